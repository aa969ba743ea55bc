"""Chats: their documents are ordered, and their answers teach what the upstream has in its cache."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from hashlib import blake2b

from starlette.types import Scope, Send

from ..server.errors import RequestError
from .chat import read_chat
from .engines import Engine
from .exchange import Exchange, target_of
from .feedback import Listener, Told
from .orders import Plan
from .prompt import check, write
from .relay import Bystander, Relay

logger = logging.getLogger("slotcache")
ORDER = b"x-slotcache-order"
MAX_VALUE = 128  # characters of a header's value that may be a client's
MAX_RANKS = 64  # of an order that the header names


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat on its way. body: for the upstream. session: the affinity header's value; empty: none.

    plan: None for a chat without documents. hides_usage: the client did not ask for the chunk with the usage.
    """

    body: bytes
    session: str = ""
    plan: Plan | None = None
    hides_usage: bool = False


class Chats(Exchange):
    """Orders a chat's documents, and relays it."""

    async def exchange(self, scope: Scope, send: Send, body: bytes) -> None:
        host = self._host
        engine = await host.finder.engine(scope["headers"])
        ask = await asyncio.to_thread(self._prepare, body, engine)
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        affinity = host.settings.affinity_header.lower().encode("latin-1")
        if affinity and ask.session and affinity not in dict(headers):
            headers.append((affinity, ask.session.encode("latin-1")))
        reader = Listener(ask.hides_usage) if ask.plan else Bystander()
        more = [(ORDER, _reason(ask.plan, engine).encode("latin-1"))] if ask.plan else []
        async with host.upstream.ask("POST", target_of(scope), headers, ask.body) as response:
            await Relay(host.upstream, send, scope["path"], reader, more=more).relay(response)
        if ask.plan and isinstance(reader, Listener) and reader.told:
            self._learn(ask.plan, reader.told)

    def _learn(self, plan: Plan, told: Told) -> None:
        """Learn behind the client's back: it has its answer."""
        learning = asyncio.get_running_loop().run_in_executor(None, self._host.orders.learn, plan, told)
        learning.add_done_callback(_note_failure)

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
        if engine.knows_documents:
            return Ask(body, session, plan)
        wants = chat.is_stream and not chat.wants_usage and not engine.tells_in_streams
        return Ask(write(chat, plan, wants), session, plan, hides_usage=wants)


def _note_failure(learning: asyncio.Future[int | None]) -> None:
    if not learning.cancelled() and (error := learning.exception()) is not None:
        logger.error("an answer taught nothing", exc_info=error)


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
