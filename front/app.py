"""The ASGI app in front of any engine."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from time import perf_counter

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..models.heap import return_large_blocks
from ..server.http.api_errors import RequestError, handlers
from ..server.http.bodies import Reservation
from ..server.http.log import HEADER, RequestLog
from ..server.http.security import guards, is_open
from .chat_documents import opening, read_chat
from .engines import EngineApi, FirstChunk, Listener, decode
from .orders import OrderPlan, PromptPart, check, write
from .prefills import Prefill
from .relay import Bystander, Relay
from .state import FrontState
from .upstream import SOON, Headers, Sent, credentials_of

logger = logging.getLogger("slotcache")

# ---- Requests that are relayed unchanged, and code that chats share with them. ------------------------------------------

REQUEST_ID = HEADER.lower().encode()
SEPARATOR = re.compile(r"[/\\]")


class Proxy:
    """An ASGI application that sends each request to the upstream, and the upstream's answer to the client."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room = self._state.room
        if is_open(scope):
            with room.probing():
                await _while_connected(receive, self._probe(scope, send))
            return
        with room.relaying() as reservation:
            sent = Sent(scope["method"], target_of(scope), headers_of(scope))
            sent.body = await room.bodies.read(Request(scope, receive), reservation)
            await _while_connected(receive, self.exchange(scope, send, sent, reservation))

    async def exchange(self, scope: Scope, send: Send, sent: Sent, reservation: Reservation) -> None:
        """Send a request and relay its answer.

        reservation: the memory of the request's body.

        Raises RequestError.
        """
        sent.reservation = reservation
        await self.relay(sent, Relay(self._state, send, scope["path"], Bystander()))

    async def _probe(self, scope: Scope, send: Send) -> None:
        """Ask for the upstream's health.

        Anybody may ask, so the upstream gets only the request's method, path and credentials, and not the upstream's key.
        """
        headers = [*credentials_of(scope["headers"]), _id_of(scope)]
        try:
            async with asyncio.timeout(SOON):
                sent = Sent(scope["method"], scope["path"], headers, has_key=False)
                await self.relay(sent, Relay(self._state, send, scope["path"], Bystander()))
        except TimeoutError:
            silent = f"the upstream was silent for {SOON:g} s"
            raise RequestError(silent, status=504, code="upstream_timeout") from None

    async def relay(self, sent: Sent, relay: Relay) -> None:
        """Send a request and relay its answer. Raises RequestError."""
        metrics, began = self._state.metrics, perf_counter()
        try:
            async with self._state.upstream.ask(sent) as response:
                sent.let_go()
                metrics.waiting.observe(perf_counter() - began)
                metrics.requests.labels(str(response.status)).inc()
                await relay.relay(response)
        except RequestError as error:
            relay.failure = error
            raise
        finally:
            if relay.failure is not None:
                metrics.failures.labels(str(relay.failure.code)).inc()


def target_of(scope: Scope) -> str:
    """Return the path and the query of a request, as they were sent. Raises RequestError for a path outside the upstream.

    The path is appended to the upstream's address. A path that does not begin with a slash could name another
    host, and a path with `..` could name another part of the host.
    """
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    target = f"{path}?{query}" if query else path
    if not path.startswith("/") or "#" in target or ".." in SEPARATOR.split(scope["path"]):
        raise RequestError(f"the path {target[:80]!r} is no path of the upstream: expected one such as /v1/models")
    return target


def headers_of(scope: Scope) -> Headers:
    """Return a request's headers, among them the id that names the request in the logs of the front and of the upstream."""
    headers: Headers = scope["headers"]
    if any(name == REQUEST_ID for name, _ in headers):
        return headers
    return [*headers, _id_of(scope)]


def _id_of(scope: Scope) -> tuple[bytes, bytes]:
    return REQUEST_ID, scope["state"]["request_id"].encode()


async def _while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work` until it is done or the client disconnects. Raises the errors of `work`."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- Chats: their documents are ordered, and their answers show what the upstream has in its cache. ---------------------

ORDER = b"x-slotcache-order"
COPIES = 4  # times its body: the memory that a chat takes while it is ordered
MAX_VALUE = 128  # characters of a header's value that may be a client's
MAX_RANKS = 64  # ranks of an order that the header shows


@dataclass(frozen=True, slots=True)
class Ask:
    """What the front keeps about a chat while it relays the answer.

    session: the value of the affinity header; empty if the header is missing.
    plan: the order of the documents; None for a chat without documents.
    model: the model's name in the request, as JSON.
    hides_usage: whether the front removes the chunk with the usage, since the client did not ask for it.
    """

    session: str = ""
    plan: OrderPlan | None = None
    model: bytes = b"null"
    hides_usage: bool = False


class ChatProxy(Proxy):
    """Orders a chat's documents, and relays it."""

    async def exchange(self, scope: Scope, send: Send, sent: Sent, reservation: Reservation) -> None:
        state, began = self._state, perf_counter()
        engine = await state.finder.engine(scope["headers"])
        reservation.reserve(COPIES * len(sent.body))
        sent.body, ask = await state.threads.run(len(sent.body), self._prepare, sent.body, engine)
        reservation.reserve(len(sent.body))
        state.metrics.ordering.observe(perf_counter() - began)
        sent.headers = self._headers(sent.headers, ask.session)
        prefill = state.prefills.begin()
        if ask.plan is None:  # its prefill counts, since it delays prompts that are judged by their wait
            try:
                sent.reservation = reservation
                await self.relay(sent, Relay(state, send, scope["path"], FirstChunk(prefill)))
            finally:
                prefill.end()
            return
        reader = Listener(ask.hides_usage, prefill)
        more = [(ORDER, _reason(ask.plan, engine).encode("latin-1"))]
        relay = Relay(state, send, scope["path"], reader, more=more)
        try:
            await self.relay(sent, relay)
        except RequestError:
            state.learning.take_back(ask.plan)
            raise
        finally:
            prefill.end()
        if relay.is_refused:
            state.learning.take_back(ask.plan)
            return
        state.counting.add(ask.plan.documents, engine, scope["headers"], ask.model)
        if reader.feedback is not None:
            state.learning.learn(ask.plan, reader.feedback, prefill.seconds, ask.model)

    def _headers(self, headers: Headers, session: str) -> Headers:
        """Return the headers for the upstream: the client's, and the affinity header unless the client has set it."""
        kept = [(name, value) for name, value in headers if name != b"accept-encoding"]  # so that the front can read answers
        affinity = self._state.settings.affinity_header.lower().encode("latin-1")
        has_own = any(name == affinity for name, _ in kept)
        return [*kept, (affinity, session.encode("latin-1"))] if affinity and session and not has_own else kept

    def _prepare(self, body: bytes, engine: EngineApi) -> tuple[bytes, Ask]:
        """Return a chat's body for the upstream, and its `Ask`. Raises RequestError."""
        try:
            chat = read_chat(body, self._state.settings.tool_documents)
        except RequestError:
            if engine.knows_documents:
                return body, Ask()  # the engine will say what is wrong
            raise
        if not chat.turns:
            return chat.body, Ask(_safe(chat.options.conversation_id))
        if not engine.knows_documents:
            check(chat)
        plan = self._state.orders.plan(chat)
        session = _safe(chat.options.conversation_id) or plan.first.key[:16]
        ask = Ask(session, plan, model=bytes(chat.fields.get("model", b"null")))
        if engine.knows_documents:
            return chat.body, ask
        wants = chat.lacks_usage and not engine.reports_in_streams
        return write(chat, plan, wants), replace(ask, hides_usage=wants)


def _safe(name: str) -> str:
    """Return a name as the value of a header: unchanged, or hashed if no header can have this value."""
    if len(name) <= MAX_VALUE and name.isascii() and name.isprintable():
        return name.strip()
    return blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _reason(plan: OrderPlan, engine: EngineApi) -> str:
    """Return the value of a header about the last turn's documents: their order, and the reason for it."""
    placed = plan.placed[-1]
    ranks = ",".join(str(at + 1) for at in placed.order[:MAX_RANKS]) or "none"
    expected, number = plan.documents_in(plan.known), plan.documents_in(len(plan.parts))
    why = "engine" if engine.knows_documents else placed.why
    return f"{why}; order={ranks}; repeated={len(placed.repeated)}; expected={expected}/{number}"


class WarmUpProxy(ChatProxy):
    """Answers `POST /v1/speculate` for an engine that cannot order documents.

    The engine prefills the part of the chat's prompt before the documents (RAGCache++, section 3.6).
    """

    async def exchange(self, scope: Scope, send: Send, sent: Sent, reservation: Reservation) -> None:
        state, engine = self._state, await self._state.finder.engine(scope["headers"])
        if engine.knows_documents:
            await Proxy.exchange(self, scope, send, sent, reservation)
            return
        reservation.reserve(COPIES * len(sent.body))
        name, parts, body, session, plan, model = await state.threads.run(len(sent.body), self._open, sent.body)
        # Waiting prompts come first: a warm-up would delay them. A warm-up that hangs delays only warm-ups of its model.
        starts = bool(parts) and state.prefills.has_time_for(model) and state.warm_ups.has_room(len(body))
        if starts:
            headers = self._headers(sent.headers, session)
            prefill = state.prefills.begin_warming(model)
            state.warm_ups.start(self._warm(Sent("POST", "/v1/chat/completions", headers, body), parts, plan, prefill))
        elif plan is not None:
            state.learning.take_back(plan)
        answer = {"object": "speculation", "id": name, "state": "started" if starts else "skipped"}
        await JSONResponse(answer)(scope, _nothing, send)

    def _open(self, body: bytes) -> tuple[str, Sequence[PromptPart], bytes, str, OrderPlan | None, bytes]:
        """Read the body of a warm-up. Raises RequestError.

        Returns, in this order:
        - the name of the turn.
        - the parts of the prompt before the turn's documents; none if all of them are expected to be cached.
        - the body of the request that makes the upstream compute these parts.
        - the value of the affinity header.
        - the order of the documents of earlier turns; None if these have no documents.
        - the model's name, as JSON.
        """
        state, whole, body = self._state, body, opening(body)  # first: it limits how much is decoded
        decoded = decode(whole)
        name = decoded.get("id", "default") if isinstance(decoded, Mapping) else ""
        if not isinstance(name, str):
            raise RequestError("id: expected a string", param="id")
        chat = read_chat(body, state.settings.tool_documents)
        parts: Sequence[PromptPart] = [PromptPart.of(chat.before_last)] if chat.before_last.chars else []
        plan: OrderPlan | None = None
        session = _safe(chat.options.conversation_id)
        if chat.turns:
            check(chat)
            plan = state.orders.plan(chat)
            session = session or plan.first.key[:16]  # the chat will have the same session
            body, parts = write(chat, plan, wants_usage=False), [*plan.parts, *parts]
        model = bytes(chat.fields.get("model", b"null"))
        return name, [] if state.orders.has(parts) else parts, body, session, plan, model

    async def _warm(self, sent: Sent, parts: Sequence[PromptPart], plan: OrderPlan | None, prefill: Prefill) -> None:
        """Let the upstream compute the parts of a prompt.

        The front records `parts` as cached only if the upstream answers with status 200.

        plan: the order of the documents in `parts`; None if `parts` have no documents. If the upstream fails, the plan is
        taken back.
        """
        state = self._state
        try:
            async with state.upstream.ask(sent) as response:
                async for _ in state.upstream.pieces(response):
                    pass
                if response.status == 200:
                    state.orders.add(parts)
                    state.metrics.warmed.inc()
                    plan = None
        except RequestError as error:
            logger.debug("nothing was computed ahead: %s", error.message)
        finally:
            prefill.end()
            if plan is not None:
                state.learning.take_back(plan)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def make_app(state: FrontState) -> Starlette:
    """Return the ASGI application of a front with this state. Raises SettingsError."""
    chats, warm_ups, others = ChatProxy(state), WarmUpProxy(state), Proxy(state)
    routes = [
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/chat/completions", chats, methods=["POST"]),
        Route("/v1/speculate", warm_ups, methods=["POST"]),
        Route("/metrics", metrics),
        Route("/{path:path}", others),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestLog), *guards(state.hosting)],
        exception_handlers=handlers("front"),
        lifespan=partial(_while_up, state),
    )
    app.state.app = state
    return app


@asynccontextmanager
async def _while_up(state: FrontState, app: Starlette) -> AsyncIterator[None]:
    return_large_blocks()
    async with state.upstream:
        yield
        state.counting.stop()
        state.warm_ups.stop()
    state.threads.close()


async def metrics(request: Request) -> Response:
    """Show the front's own metrics. The upstream shows its metrics at its own address."""
    return Response(request.app.state.app.metrics.exposition(), media_type="text/plain; version=0.0.4")
