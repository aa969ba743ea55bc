"""Chooses a replica for each request, forwards the request, and reads the answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import msgspec
from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Scope

from ..ordering.fleet import DISPLACING, Fleet, Placement
from ..ordering.prompt import document_text
from ..server.http.api_errors import RequestError, refusal
from .chat_documents import NO_JSON, DocumentChat, Fields, messages_of, read_chat
from .events import data_of, split
from .lengths import CHARS_A_TOKEN, Lengths
from .orders import PromptPart

# ---- A replica's cache as slotcache's answers report it, read while the answers pass. -----------------------------------

OWN_FIELD = b'"slotcache"'
LARGEST = 16 << 20  # bytes of an answer's JSON that are read


class AnsweredDocument(Struct, frozen=True):
    id: str
    tokens: int
    cached_tokens: int


class AnsweredConversation(Struct, frozen=True):
    id: str
    remembered: bool


class AnswerReport(Struct, frozen=True):
    documents: list[AnsweredDocument] = []
    conversation: AnsweredConversation | None = None


class Answered(Struct, frozen=True):
    """An answer, or the last chunk of an answer.

    response: the whole answer, which an event of the Responses API has in its field `response`.
    """

    id: str = ""
    slotcache: AnswerReport | None = None
    response: Answered | None = None


DECODER = msgspec.json.Decoder(Answered)


@dataclass(slots=True)
class ReplicaAnswer:
    """The part of a replica's answer that has arrived so far.

    status: the HTTP status; 0 until the head has arrived.
    id, report: the answer's id, and its field `slotcache`. Until they have arrived, `id` is empty and `report` is None.
    body: the body so far; empty for a stream.
    """

    status: int = 0
    id: str = ""
    report: AnswerReport | None = None
    is_stream: bool = False
    body: bytearray = field(default_factory=bytearray)

    def read(self, message: Message) -> None:
        """Read one ASGI message. In a stream, each message has only whole events."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = any(
                name.lower() == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
        elif self.is_stream:
            for event in split(message.get("body", b"")) if OWN_FIELD in message.get("body", b"") else ():
                self._take(data_of(event))
        elif len(self.body) <= LARGEST:
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                self._take(self.body)

    @property
    def documents(self) -> list[AnsweredDocument]:
        """The documents in the order of the prompt; empty if the answer reports none."""
        return self.report.documents if self.report else []

    @property
    def remembered(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the id of each conversation and answer that the replica has stored for later requests."""
        if self.report and (conversation := self.report.conversation) and conversation.remembered:
            yield "conversation", conversation.id
            yield "answer", self.id

    def _take(self, data: bytes | bytearray) -> None:
        if OWN_FIELD not in data:
            return
        try:
            found = DECODER.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return
        found = found.response or found
        if found.slotcache is not None:
            self.id, self.report = found.id, found.slotcache


# ---- A request that reaches an application without a port. --------------------------------------------------------------

REPLICA = "x-slotcache-replica"
LOOPBACK = ("127.0.0.1", 0)


@dataclass(frozen=True, slots=True)
class Forward:
    """A request with its whole body.

    path: the decoded path.
    query: the query as it was sent.
    only: the name of the only replica that may answer the request; empty if any replica may.
    """

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""
    only: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes, only: str = "") -> Forward:
        """Make a forward from an ASGI request.

        The prefix `root_path`, by which Ray found the application, is cut off the path.
        """
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]  # the body was unpacked
        return cls(scope["method"], path or "/", scope["query_string"], headers, body=body, only=only)

    def scope(self) -> Scope:
        """Return the ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # as in uvicorn: applications look for a disconnect
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": [*self.headers],
            "client": LOOPBACK,
            "server": LOOPBACK,
            "state": {},
        }


class Answering:
    """An application's answer to one request."""

    def __init__(self, app: ASGIApp, forward: Forward) -> None:
        self._app, self._forward = app, forward
        self._messages: list[Message] = []
        self._news, self._is_disconnected, self._is_read = asyncio.Event(), asyncio.Event(), False

    async def messages(self) -> AsyncGenerator[list[Message], None]:
        """Yield the answer as it arrives, some ASGI messages at a time.

        If the caller stops before the end of the answer, the application is told that the client has disconnected.
        """
        work = asyncio.ensure_future(self._app(self._forward.scope(), self._receive, self._send))
        work.add_done_callback(lambda _: self._news.set())
        try:
            while not work.done() or self._messages:
                await self._news.wait()
                self._news.clear()
                taken, self._messages = self._messages, []
                if taken:
                    yield taken
        finally:
            self._is_disconnected.set()
            await asyncio.wait((work,))
        work.result()

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._forward.body, "more_body": False}
        await self._is_disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_disconnected.is_set():
            raise OSError("the client has left")
        self._messages.append(message)
        self._news.set()


def meant_for(replica: str, app: ASGIApp, forward: Forward) -> ASGIApp:
    """Return the application that answers a request at a replica.

    If the request names another replica, that replica is no longer up: return an application that refuses the request.
    """
    return app if forward.only in ("", replica) else refusal(unknown(forward.only), forward.path)


def unknown(replica: str) -> RequestError:
    """Make the error of a request for a replica that is not up."""
    return RequestError(f"{REPLICA}: no replica {replica[:80]!r}: GET /v1/replicas lists those that are up", status=404)


def lost(replica: str) -> RequestError:
    """Make the error of a request whose replica ended before its answer did."""
    return RequestError(
        f"the replica {replica} ended before its answer did: send the request again", status=502, code="replica_lost"
    )


STORED = re.compile(
    "/v1/(?:(conversations)/(.+)|(responses)/([^/]+)(?:/input_items)?|(chat/completions)/([^/]+))"
)  # paths of state that a replica has stored
KINDS = {"conversations": "conversation", "responses": "answer", "chat/completions": "answer"}
DECODING = 4.0  # tokens of prefill that take as long as a token of an answer
ANSWER = 100  # tokens of an answer, if the request sets no limit
ANSWERED = ("/chat/completions", "/responses", "/v1/messages")  # the ends of paths whose requests begin a session
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
MOST_COUNTED = 40_000  # documents whose tokens are remembered
MOST_PLACED, MOST_BEFORE = 1000, 1000  # documents and earlier messages that decide a replica: prompts seldom have more
MOST_AHEAD = 10_000.0  # tokens of prefill, plus the request's, by which the replica of its history may be busier
MAX_NAME = 256  # characters of the name of a scope or a conversation: a replica refuses longer ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The documents and sessions of a request, which show what the request could reuse at each replica.

    documents: the documents of the first message that has any, at most `MOST_PLACED`.
    at: the index of the message that has `documents`.
    front: the key of the text before the documents. Equal texts in different scopes have different keys.
    stored: the session of the stored conversation or answer that the request continues; empty if it continues none. A stored
        conversation or answer is at one replica only.
    history: the sessions of the earlier messages, the newest first.
    own: the session that the answer belongs to: `stored`, or a new one if `stored` is empty. If no later request can
        continue the answer, `own` is empty.
    tokens: an estimate of the prompt's tokens without documents.
    """

    scope: str = ""
    documents: tuple[PromptPart, ...] = ()
    at: int = 0
    front: str = ""
    stored: str = ""
    history: tuple[str, ...] = ()
    own: str = ""
    tokens: float = 0.0
    answer: int = ANSWER

    @classmethod
    def of(cls, forward: Forward, tool_documents: str) -> Needs:
        """Read a request.

        A request that is neither a chat nor about stored state has no needs: any replica may answer or refuse it.
        """
        if forward.method != "POST" and (found := STORED.fullmatch(forward.path)):
            kind, id = filter(None, found.groups())
            return cls._of_stored(KINDS[kind], QueryParams(forward.query).get("scope", ""), id)
        if forward.method != "POST" or not forward.body:
            return cls()
        try:
            needs = cls._of_chat(read_chat(forward.body, tool_documents))
        except RequestError:
            return cls()
        return needs if forward.path.endswith(ANSWERED) else replace(needs, own="")

    @classmethod
    def _of_stored(cls, kind: str, scope: str, id: str) -> Needs:
        return cls() if _is_too_long(scope, id) else cls(scope=scope, stored=session(kind, scope, id))

    @classmethod
    def _of_chat(cls, chat: DocumentChat) -> Needs:
        scope, continued = _text(chat.fields, "cache_scope"), _text(chat.fields, "previous_response_id")
        conversation = chat.options.conversation_id
        if _is_too_long(scope, continued, conversation):
            return cls()
        stored = session("conversation", scope, conversation) if conversation else ""
        stored = session("answer", scope, continued) if continued else stored
        names = [session("history", scope, name) for name in chat.names[-MOST_BEFORE - 1 :]]
        first = chat.turns[0] if chat.turns else None
        chars = chat.chars + sum(turn.before.chars for turn in chat.turns)
        return cls(
            scope=scope,
            documents=tuple(map(PromptPart.of, first.documents[:MOST_PLACED])) if first else (),
            at=first.at if first else 0,
            front=first.before.key if first else "",
            stored=stored,
            history=tuple(names[-2::-1]),
            own=stored or (names[-1] if names else ""),
            tokens=chars / CHARS_A_TOKEN,
            answer=_answer(chat.fields),
        )


class Fleets:
    """Learns from all requests what the replicas have cached, and how busy they are. Thread-safe.

    tool_documents: the default of the request's field `tool_documents`.
    """

    def __init__(self, tool_documents: str = "off") -> None:
        self.tool_documents = tool_documents
        self.fleet, self.lengths = Fleet(), Lengths(MOST_COUNTED)
        self.names: frozenset[str] = frozenset()
        self._ahead: dict[str, float] = {}
        self._lock = Lock()

    def keep(self, names: Collection[str]) -> None:
        """Keep these replicas, and forget all other replicas."""
        if self.names != frozenset(names):
            self.names = frozenset(names)
            self.fleet.replicas(self.names)
            with self._lock:
                self._ahead = {name: self.ahead(name) for name in self.names}

    def ahead(self, name: str) -> float:
        """Return the work in flight at a replica, in tokens of prefill."""
        return self._ahead.get(name, 0.0)

    def add(self, name: str, work: float) -> None:
        """Count work at a replica.

        work: in tokens of prefill; negative once the work is done.
        """
        with self._lock:
            if name in self._ahead:
                self._ahead[name] = max(self._ahead[name] + work, 0.0)


@dataclass(slots=True, eq=False)
class Asked:
    """A request for which a replica is chosen. When an `Asked` is pickled for the replica, only its `Forward` is kept.

    replica: the replica that accepted the request.
    """

    forward: Forward
    needs: Needs
    fleets: Fleets
    replica: str = ""
    begins_anew: bool = False
    _placements: dict[str, Placement] = field(default_factory=dict)
    _work: float = 0.0
    _is_over: bool = False
    _lock: Lock = field(default_factory=Lock)  # a client may disconnect in one thread while a replica accepts in another

    def __reduce__(self) -> tuple[type[Forward], tuple[object, ...]]:
        forward = self.forward
        sent = (forward.method, forward.path, forward.query, forward.headers, forward.body, forward.only)
        return Forward, sent

    @property
    def is_ranked(self) -> bool:
        """Whether replicas have been ranked for the request before."""
        return bool(self._placements)

    @property
    def is_bound(self) -> bool:
        """Whether a replica that is up has the stored conversation or answer that the request continues."""
        return self.fleets.fleet.home(self.needs.stored) in self.fleets.names

    @property
    def is_unknown(self) -> bool:
        """Whether the request continues a stored conversation or answer, but no running replica is known to have it."""
        return bool(self.needs.stored) and not self.is_bound

    def found_at(self, name: str) -> None:
        """Record that a replica has the stored conversation or answer that the request continues."""
        self.fleets.fleet.served(name, (), self.needs.stored)

    def rank(self, names: Collection[str]) -> list[str]:
        """Return the replicas that may take the request, the best first."""
        self.fleets.keep(names)
        if self.forward.only in names:
            return [self.forward.only]
        needs, fleet = self.needs, self.fleets.fleet
        self.begins_anew = fleet.home(needs.stored) not in (None, *self.fleets.names)
        ranked = fleet.rank(self._counted(needs.documents), names, self.fleets.ahead, self._session())
        self._placements = {placement.replica: placement for placement in ranked}
        return [placement.replica for placement in ranked[: 1 if self.is_bound else None]]

    def accepted_by(self, name: str) -> None:
        """Record that a replica has taken the request."""
        self.replica, placement, needs = name, self._placements.get(name), self.needs
        if placement is None:
            return
        order = self._counted([needs.documents[at] for at in placement.arrangement.order])
        self.fleets.fleet.served(name, order, needs.own or None)
        new = sum(tokens for _, tokens in order) - placement.arrangement.reused_tokens
        with self._lock:
            if not self._is_over:
                self._work = new + DECODING * needs.answer + (0.0 if placement.stays else needs.tokens)
                self.fleets.add(name, self._work)

    def answered(self, answer: ReplicaAnswer) -> None:
        """Learn from an answer that has ended or broken off."""
        with self._lock:
            self._is_over = True
            self.fleets.add(self.replica, -self._work)
        if self.replica not in self.fleets.names:
            return  # the replica is gone, although this answer went on to its end: its cache is lost
        fleet, documents = self.fleets.fleet, {part.document.id: part for part in self.needs.documents if part.document}
        reported = [(documents[one.id], one) for one in answer.documents if one.id in documents]
        for document, one in reported:
            self.fleets.lengths.count(document.key, one.tokens)
        if reported:
            order = [(self._key(document), one.tokens) for document, one in reported]
            fleet.report(self.replica, order, sum(one.cached_tokens for _, one in reported))
        for kind, id in answer.remembered:
            fleet.served(self.replica, (), session(kind, self.needs.scope, id))

    @property
    def why(self) -> str:
        """Why the request went to its replica, in one line."""
        if self.forward.only:
            return "the request names it"
        if self.begins_anew:
            return "its replica has left: what the request continues begins anew"
        placement = self._placements.get(self.replica)
        return placement.why if placement else "any replica"

    @property
    def prompt(self) -> str:
        """The request's text as it was sent, for routers of Ray that compare characters. Never empty."""
        documents = [part.document for part in self.needs.documents if part.document]
        try:
            fields = msgspec.json.decode(self.forward.body or b"{}", type=Fields)
            said = [bytes(message.get("content", b"")).decode() for message in messages_of(fields)]
        except NO_JSON:
            return self.forward.path  # the replica refuses the request; if its router failed, it would wait for ever
        said[self.needs.at : self.needs.at] = map(document_text, documents)
        return "".join(said) or self.forward.path

    def _session(self) -> str | None:
        """Return the session whose replica should get the request, because it has the request's history.

        If no replica has the history, return None. Also return None if the replica with the history has much more work in
        flight than the least busy one, unless the request continues a stored conversation or answer of that replica.
        """
        fleets, needs = self.fleets, self.needs
        if self.is_bound:
            return needs.stored
        known = next((one for one in needs.history if fleets.fleet.home(one) in fleets.names), None)
        if known is None:
            return None
        waiting = fleets.ahead(fleets.fleet.home(known) or "") - min(map(fleets.ahead, fleets.names))
        return known if waiting <= MOST_AHEAD + DISPLACING * needs.tokens else None

    def _counted(self, documents: Iterable[PromptPart]) -> list[tuple[str, int]]:
        """Return the key by which the fleet knows each document, and the document's number of tokens."""
        return [(self._key(document), self.fleets.lengths.tokens(document)) for document in documents]

    def _key(self, document: PromptPart) -> str:
        return f"{self.needs.front}:{document.key}"


def session(kind: str, scope: str, id: str) -> str:
    """Return the name of a session.

    kind: a conversation, an answer or a history.
    id: unique within the scope.
    """
    return msgspec.json.encode((kind, scope, id)).decode()


def _is_too_long(*names: str) -> bool:
    return any(len(name) > MAX_NAME for name in names)


def _text(fields: Fields, name: str) -> str:
    """Return a field if it is a text, else an empty text."""
    value = _value(fields, name)
    return value if isinstance(value, str) else ""


def _answer(fields: Fields) -> int:
    """Return about how many tokens the answer will have: the request's limit if it is below `ANSWER`, else `ANSWER`."""
    limits = [_value(fields, name) for name in LIMITS]
    return min((limit for limit in limits if type(limit) is int and 0 <= limit < ANSWER), default=ANSWER)


def _value(fields: Fields, name: str) -> object:
    """Return a field; None if it is missing, or if the replica will refuse its value, such as 1e999."""
    try:
        return msgspec.json.decode(fields.get(name, b"null"))
    except msgspec.MsgspecError:
        return None
