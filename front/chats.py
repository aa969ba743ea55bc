"""Chats: their documents are ordered, and their answers teach what the upstream has in its cache."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from hashlib import blake2b
from time import perf_counter

from starlette.types import Scope, Send

from ..server.errors import RequestError
from .chat import read_chat
from .engines import Engine
from .exchange import Exchange, headers_of, target_of
from .feedback import Listener
from .orders import Plan
from .prompt import check, write
from .relay import Bystander, Relay
from .upstream import Headers, Sent

ORDER = b"x-slotcache-order"
MAX_VALUE = 128  # characters of a header's value that may be a client's
MAX_RANKS = 64  # of an order that the header names


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat on its way. body: for the upstream. session: the affinity header's value; empty: none.

    plan: None for a chat without documents. model: the name in the request, as JSON. hides_usage: the client did not ask for
    the chunk with the usage.
    """

    body: bytes
    session: str = ""
    plan: Plan | None = None
    model: bytes = b"null"
    hides_usage: bool = False


class Chats(Exchange):
    """Orders a chat's documents, and relays it."""

    async def exchange(self, scope: Scope, send: Send, body: bytes) -> None:
        host, began = self._host, perf_counter()
        engine = await host.finder.engine(scope["headers"])
        ask = await asyncio.to_thread(self._prepare, body, engine)
        host.metrics.ordering.observe(perf_counter() - began)
        sent = Sent("POST", target_of(scope), self._headers(headers_of(scope), ask.session), ask.body)
        if ask.plan is None:
            await self.relay(sent, Relay(host.upstream, send, scope["path"], Bystander()))
            return
        reader, more = Listener(ask.hides_usage), [(ORDER, _reason(ask.plan, engine).encode("latin-1"))]
        relay = Relay(host.upstream, send, scope["path"], reader, more=more)
        try:
            await self.relay(sent, relay)
        except RequestError:
            host.learning.take_back(ask.plan)
            raise
        if relay.is_refused:
            host.learning.take_back(ask.plan)
            return
        host.counting.add(ask.plan.documents, engine, scope["headers"], ask.model)
        if reader.told is not None:
            host.learning.learn(ask.plan, reader.told)

    def _headers(self, headers: Headers, session: str) -> Headers:
        """Return the headers for the upstream: the client's, and the affinity header unless the client has set it."""
        kept = [(name, value) for name, value in headers if name != b"accept-encoding"]  # answers are read
        affinity = self._host.settings.affinity_header.lower().encode("latin-1")
        has_own = any(name == affinity for name, _ in kept)
        return [*kept, (affinity, session.encode("latin-1"))] if affinity and session and not has_own else kept

    def _prepare(self, body: bytes, engine: Engine) -> Ask:
        """Return a chat for the upstream. Raises RequestError."""
        try:
            chat = read_chat(body, self._host.settings.tool_documents)
        except RequestError:
            if engine.knows_documents:
                return Ask(body)  # it will say what is wrong
            raise
        if not chat.turns:
            return Ask(body, _safe(chat.options.conversation_id))
        if not engine.knows_documents:
            check(chat)
        plan = self._host.orders.plan(chat)
        session = _safe(chat.options.conversation_id) or plan.first.key[:16]
        ask = Ask(body, session, plan, model=bytes(chat.fields.get("model", b"null")))
        if engine.knows_documents:
            return ask
        wants = chat.lacks_usage and not engine.tells_in_streams
        return replace(ask, body=write(chat, plan, wants), hides_usage=wants)


def _safe(name: str) -> str:
    """Return a name as a header can hold it: unchanged, or its hash."""
    if len(name) <= MAX_VALUE and name.isascii() and name.isprintable():
        return name.strip()
    return blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _reason(plan: Plan, engine: Engine) -> str:
    """Return the order of the last documents and its reason, as a header."""
    placed = plan.placed[-1]
    ranks = ",".join(str(at + 1) for at in placed.order[:MAX_RANKS]) or "none"
    expected, number = plan.documents_in(plan.known), plan.documents_in(len(plan.parts))
    why = "engine" if engine.knows_documents else placed.why
    return f"{why}; order={ranks}; repeated={len(placed.repeated)}; expected={expected}/{number}"
