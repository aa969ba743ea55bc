"""Learns which prompts the upstream has cached, and orders documents so that they can be reused.

Also has the front's metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from platform import python_version
from threading import Lock

import msgspec
from msgspec import Raw
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..ordering.document import Document, leave_out
from ..ordering.policy import arrange
from ..ordering.prompt import document_text, location_hint, order_hint
from ..ordering.tree import DocumentNode, KnowledgeTree
from ..server.config.settings import VERSION
from ..server.http.api_errors import RequestError
from .chat_documents import DocumentChat, DocumentTurn, Fields, FrontOptions, NamedConversation, PlainText
from .engines import EngineFeedback
from .lengths import Lengths, leading
from .prefills import PrefillSpeeds
from .settings import FrontSettings

# ---- The front's metrics: requests by status, and the expected and reported reuse of documents. -------------------------

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
LONG = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)


class FrontMetrics:
    """The metrics of one front, in a registry of their own.

    size: returns the number of prompt parts that are expected to be cached upstream.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "slotcache_order"
        self.requests = Counter(f"{prefix}_requests", "Relayed requests by status", ["status"], registry=registry)
        self.failures = Counter(f"{prefix}_failures", "Failures of the upstream", ["code"], registry=registry)
        self.documents = Counter(f"{prefix}_documents", "Documents in chats", registry=registry)
        self.repeated = Counter(f"{prefix}_repeated", "Documents left out: an earlier turn shows them", registry=registry)
        self.expected = Counter(f"{prefix}_expected", "Documents that were expected to be cached", registry=registry)
        self.cached = Counter(f"{prefix}_cached", "Documents that were cached, as the upstream reported", registry=registry)
        self.prompt_tokens = Counter(f"{prefix}_prompt_tokens", "Tokens of prompts with documents", registry=registry)
        of_cached = "Tokens of prompts with documents that were cached, as the upstream reported"
        self.cached_tokens = Counter(f"{prefix}_cached_tokens", of_cached, registry=registry)
        self.unreported = Counter(f"{prefix}_unreported", "Answers without a number of cached tokens", registry=registry)
        of_stale = "Prompts that took the time of cold ones, though the upstream should have had them"
        self.stale = Counter(f"{prefix}_stale", of_stale, registry=registry)
        self.warmed = Counter(f"{prefix}_warmed", "Prompts computed during a search up to its documents", registry=registry)
        self.ordering = Histogram(f"{prefix}_seconds", "From a body to the order", buckets=SECONDS, registry=registry)
        self.waiting = Histogram(f"{prefix}_wait_seconds", "Until the upstream's head", buckets=LONG, registry=registry)
        Gauge(f"{prefix}_nodes", "Documents and texts that the upstream should have", registry=registry).set_function(size)

        build = Gauge("slotcache_build_info", "The versions of this front", ["version", "python"], registry=registry)
        build.labels(VERSION, python_version()).set(1)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


MAX_TURNS = 20_000  # turns whose order is kept: about 300 bytes each
MAX_RANKS = 1_000_000  # ranks of all these orders: about 36 bytes each


@dataclass(frozen=True, slots=True)
class Placed:
    """The documents of a turn as its prompt shows them.

    documents: the turn's documents by retrieval rank. Documents that an earlier turn shows are left out.
    repeated: the ids of documents that an earlier turn shows.
    order: the ranks of the documents, in the order of the prompt.
    in_place: whether each hint about a repeated document stands where the document would stand by its rank. If `in_place` is
        False, all hints about repeated documents come after the documents.
    why: the reason for the order. `cached`: the order starts with documents that are expected to be cached upstream. `rank`:
        none of the documents is expected to be cached upstream. `kept`: the turn has the order that it had in an earlier
        prompt. `asked`: another policy than `auto` chose the order.
    """

    turn: DocumentTurn
    documents: tuple[Document, ...]
    repeated: tuple[str, ...]
    order: tuple[int, ...]
    has_hint: bool
    why: str
    in_place: bool = False

    @property
    def shown(self) -> list[Document]:
        """The documents in the order of the prompt."""
        return [self.documents[at] for at in self.order]

    @property
    def pieces(self) -> list[Document | str]:
        """The documents in the order of the prompt.

        If `in_place` is True, ids of repeated documents stand among them, as hints.
        """
        if not self.in_place:
            return [*self.shown]
        new, shown = {document.key for document in self.documents}, iter(self.shown)
        return [next(shown) if document.key in new else document.id for document in self.turn.documents]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt: a document, or the text up to the next document.

    document: the part's document; None if the part is a text.
    """

    key: str
    chars: int
    document: Document | None = None

    @classmethod
    def of(cls, part: PlainText | Document | str) -> PromptPart:
        """Make a part from a text, from a document, or from the id of a document that a hint replaces."""
        if isinstance(part, str):
            return cls(f"hint {part}", len(location_hint([part])))
        return cls(part.key, part.chars) if isinstance(part, PlainText) else cls(part.key, len(document_text(part)), part)


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """The order of a chat's documents, the prompt's parts up to the last document, and the number of characters after it.

    known: the number of leading parts that are expected to be cached upstream.
    """

    placed: tuple[Placed, ...]
    parts: tuple[PromptPart, ...]
    known: int
    chars: int

    @property
    def first(self) -> Document:
        """The first document of the prompt."""
        return next(self.documents)

    def ordered_by(self, ids: Sequence[str]) -> OrderPlan:
        """Return the plan with the documents of each turn in the order of `ids`. Documents that `ids` lacks are left out."""
        place = {id: at for at, id in enumerate(ids)}
        parts: list[PromptPart] = []
        for placed in self.placed:
            shown = [document for document in placed.documents if document.id in place]
            shown.sort(key=lambda document: place[document.id])
            parts += [PromptPart.of(placed.turn.before), *map(PromptPart.of, shown)]
        both = zip(self.parts, parts, strict=False)
        same = next((at for at, (old, new) in enumerate(both) if old.key != new.key), len(parts))
        return replace(self, parts=tuple(parts), known=min(self.known, same))

    @property
    def documents(self) -> Iterator[Document]:
        """The documents in the order of the prompt."""
        return (part.document for part in self.parts if part.document is not None)

    @property
    def num_documents(self) -> int:
        return self.documents_in(len(self.parts))

    @property
    def num_expected(self) -> int:
        """The number of documents that are expected to be cached upstream."""
        return self.documents_in(self.known)

    def documents_in(self, number: int) -> int:
        """Return how many of the first `number` parts are documents."""
        return sum(part.document is not None for part in self.parts[:number])


@dataclass(frozen=True, slots=True)
class Learnt:
    """What the front has learnt from an answer.

    cached: the number of leading parts that were cached; None if the engine reports no cached tokens.
    is_stale: whether parts were expected to be cached, but the wait for the first token showed that they were not.
    """

    cached: int | None
    is_stale: bool = False


class Onward:
    """The knowledge tree as the `Index` that orders one turn's documents. Searches start at `place` instead of at the root.

    place: the node at the end of the text before the documents; None if the tree lacks that text.
    """

    def __init__(self, tree: KnowledgeTree, place: DocumentNode | None) -> None:
        self._place = place
        self.after, self.follow, self.beyond, self.recency = tree.after, tree.follow, tree.beyond, tree.recency

    def start(self) -> DocumentNode | None:
        return self._place


class Orders:
    """Chooses orders, and learns from answers. Thread-safe.

    A path of the tree is a prompt: the key of the text before the first documents, the keys of the documents, the key of
    the text up to the documents of the next turn, and so on.
    """

    def __init__(self, settings: FrontSettings, lengths: Lengths) -> None:
        self._settings, self._lengths = settings, lengths
        self._tree = KnowledgeTree(settings.tree_nodes)
        self._kept: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._num_ranks = 0  # in `_kept`
        self._speeds = PrefillSpeeds()
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of parts that are expected to be cached upstream."""
        return len(self._tree)

    def plan(self, chat: DocumentChat) -> OrderPlan:
        """Choose the order of each turn's documents. After this call, the whole prompt is expected to be cached upstream."""
        placed: list[Placed] = []
        parts: list[PromptPart] = []
        seen: set[str] = set()
        # All requests wait for the lock, so texts are made before it is taken.
        made = {document.key: PromptPart.of(document) for turn in chat.turns for document in turn.documents}
        with self._lock:
            place, known = self._tree.start(), 0
            for turn in chat.turns:
                before = [PromptPart.of(turn.before)]
                place, number = self._walk(place, before)
                placed.append(self._place(turn, chat, seen, place))
                pieces = placed[-1].pieces
                shown = [PromptPart.of(piece) if isinstance(piece, str) else made[piece.key] for piece in pieces]
                place, more = self._walk(place, shown)
                known += number + more
                parts += [*before, *shown]
            self._tree.insert((part.key, self._lengths.tokens(part)) for part in parts)
        return OrderPlan(tuple(placed), tuple(parts), known, chat.chars)

    def has(self, parts: Sequence[PromptPart]) -> bool:
        """Return whether all parts of a prompt are expected to be cached upstream."""
        with self._lock:
            return self._walk(self._tree.start(), parts)[0] is not None

    def add(self, parts: Sequence[PromptPart]) -> None:
        """Record that the upstream has the parts of a prompt."""
        with self._lock:
            self._tree.insert((part.key, self._lengths.tokens(part)) for part in parts)

    def take_back(self, plan: OrderPlan) -> None:
        """Forget the parts of a prompt that the upstream did not take.

        Keep the first `plan.known` parts: they were known before.
        """
        if plan.known < len(plan.parts):
            with self._lock:
                self._tree.forget([part.key for part in plan.parts[: plan.known + 1]])

    def learn(self, plan: OrderPlan, reported: EngineFeedback, seconds: float | None = None, model: bytes = b"") -> Learnt:
        """After an answer, correct the knowledge tree: record which parts of the prompt are cached upstream.

        seconds: the wait for the first token; used if no cached tokens are reported.
        """
        if reported.documents:
            plan = plan.ordered_by(reported.documents)
        with self._lock:
            path = self._lengths.fit(plan.parts, plan.chars, reported.prompt_tokens)
            cached_tokens = reported.cached_tokens
            is_timed = False
            if cached_tokens is None and seconds is not None:
                is_timed = True
                expected = sum(tokens for _, tokens in path[: plan.known])
                rest = PromptPart("", plan.chars)
                tokens = reported.prompt_tokens or sum(tokens for _, tokens in path) + self._lengths.tokens(rest)
                cached_tokens = self._speeds.cached(model, max(tokens, expected + 1), expected, seconds)
            cached = None if cached_tokens is None else leading(path, cached_tokens)
            is_stale = is_timed and cached is not None and cached < plan.known
            if cached is not None and cached < plan.known:
                self._tree.forget([key for key, _ in path[: cached + 1]])
            self._tree.insert(path)
        return Learnt(None if is_timed else cached, is_stale)

    def _place(self, turn: DocumentTurn, chat: DocumentChat, seen: set[str], place: DocumentNode | None) -> Placed:
        """Order the documents of a turn.

        seen: the keys of documents that earlier turns show. The method adds the keys of this turn's documents.
        place: the node at the end of the text before the documents; None if the tree lacks that text.
        """
        options, settings = chat.options, self._settings
        dedup = options.dedup or settings.dedup
        documents, repeated = leave_out(turn.documents, seen if dedup != "off" else set())
        if dedup == "in_place":
            new = {document.key for document in documents}
            hints = takewhile(lambda document: document.key not in new, turn.documents)
            place, _ = self._walk(place, [PromptPart.of(document.id) for document in hints])
        seen.update(document.key for document in documents)
        hint = settings.order_hint if options.order_hint is None else options.order_hint
        policy = options.document_order or settings.document_order
        kept = self._kept.get(turn.name, ()) if turn is not chat.turns[-1] else ()
        if sorted(kept) == list(range(len(documents))):
            order, why = kept, "kept"
        else:
            index = Onward(self._tree, place)
            names = [document.id for document in documents]
            found = arrange(
                [document.key for document in documents],
                index,
                policy,
                keep_first=options.keep_first,
                keep_last=options.keep_last,
                names=names,
                best=(options.best or settings.best) if documents[:1] == turn.documents[:1] else "free",
            )
            order, why = found.order, "asked" if policy != "auto" else "cached" if found.reused_documents else "rank"
        self._keep(turn.name, order)
        return Placed(turn, documents, repeated, order, has_hint=hint, why=why, in_place=dedup == "in_place")

    def _keep(self, name: str, order: tuple[int, ...]) -> None:
        self._num_ranks += len(order) - len(self._kept.pop(name, ()))
        self._kept[name] = order
        while len(self._kept) > MAX_TURNS or self._num_ranks > MAX_RANKS:
            _, evicted = self._kept.popitem(last=False)
            self._num_ranks -= len(evicted)

    def _walk(self, place: DocumentNode | None, parts: Sequence[PromptPart]) -> tuple[DocumentNode | None, int]:
        """Follow parts of a prompt through the tree, from a place on.

        Returns the place after the last part (None if the tree lacks any of the parts), and the number of leading parts
        that the tree has.
        """
        for number, part in enumerate(parts):
            if place is None or (step := self._tree.follow(place, part.key)) is None:
                return None, number
            place = step.position
        return place, len(parts)


# ---- Learning from answers: the tree is corrected, and reuse is counted, while no client waits. -------------------------

logger = logging.getLogger("slotcache")


class Learning:
    """Learns from answers, in worker threads of the event loop."""

    def __init__(self, orders: Orders, metrics: FrontMetrics) -> None:
        self._orders, self._metrics = orders, metrics
        self._has_reported = self._has_warned = False

    def learn(self, plan: OrderPlan, reported: EngineFeedback, seconds: float | None = None, model: bytes = b"") -> None:
        """Learn from the answer to a prompt, now or soon.

        seconds: the wait for the first token; None if it is not known.
        """
        _run(self._learn, plan, self._completed(plan, reported), seconds, model)

    def take_back(self, plan: OrderPlan) -> None:
        """Forget a prompt that the upstream did not take, so that refused requests have no effect on later orders."""
        _run(self._orders.take_back, plan)

    def _completed(self, plan: OrderPlan, reported: EngineFeedback) -> EngineFeedback:
        """Return the figures to learn from. Log a warning, once, if the engine seems not to report cached tokens.

        If the engine reported cached tokens for another prompt, but not for this one, this prompt had none: vLLM does not
        report a 0.
        """
        self._has_reported |= reported.cached_tokens is not None
        if reported.cached_tokens is None and self._has_reported and reported.prompt_tokens is not None:
            return replace(reported, cached_tokens=0)
        if not self._has_reported and plan.num_expected and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the upstream reports no cached tokens, so its cache is guessed from the time to a stream's first token: "
                "vLLM reports them with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
            )
        return reported

    def _learn(self, plan: OrderPlan, reported: EngineFeedback, seconds: float | None, model: bytes) -> None:
        learnt, metrics = self._orders.learn(plan, reported, seconds, model), self._metrics
        metrics.stale.inc(learnt.is_stale)
        metrics.documents.inc(plan.num_documents)
        metrics.repeated.inc(sum(len(placed.repeated) for placed in plan.placed))
        metrics.expected.inc(plan.num_expected)
        metrics.prompt_tokens.inc(reported.prompt_tokens or 0)
        if learnt.cached is None:
            metrics.unreported.inc()
        else:
            metrics.cached.inc(plan.documents_in(learnt.cached))
            metrics.cached_tokens.inc(reported.cached_tokens or 0)


def _run(work: Callable[..., None], *arguments: object) -> None:
    asyncio.get_running_loop().run_in_executor(None, work, *arguments).add_done_callback(_note_failure)


def _note_failure(learning: asyncio.Future[None]) -> None:
    if not learning.cancelled() and (error := learning.exception()) is not None:
        logger.error("an answer taught nothing", exc_info=error)


# ---- A chat with its documents as text, for an upstream that knows no documents. ----------------------------------------

encode = msgspec.json.Encoder().encode
OURS = ("documents", *FrontOptions.__struct_fields__)  # fields that the upstream does not know


def check(chat: DocumentChat) -> None:
    """Raise RequestError if a chat cannot be sent to an upstream that takes no documents.

    For example, refuse a chat that wants a new stored conversation. Also refuse a chat if the content of a message with
    documents is neither a string, nor a list of parts, nor null.
    """
    for turn in chat.turns:
        content = msgspec.json.decode(chat.messages[turn.at].get("content", b"null"))
        if not (turn.result is not None or content is None or isinstance(content, str | list)):
            where = f"messages[{turn.at}].content"
            raise RequestError(f"{where}: expected a string or a list of parts", param=where)
    options, conversation = chat.options, chat.options.conversation
    if options.best == "last" and (options.keep_first or options.keep_last):
        problem = "best is last, and keep_first or keep_last say what stands there: send one of them"
        raise RequestError(problem, param="best")
    if options.best_price_ms:
        problem = f"best_price_ms is {options.best_price_ms:g}: a gain of the upstream has no known time, send best alone"
        raise RequestError(problem, param="best_price_ms")
    if isinstance(conversation, NamedConversation) and conversation.history == "new":
        problem = "the upstream keeps no conversations: send the whole history"
        raise RequestError(f"conversation.history is new: {problem}", param="conversation.history")


def write(chat: DocumentChat, plan: OrderPlan, wants_usage: bool) -> bytes:
    """Return the body for the upstream, with the documents before the text of their messages.

    Fields that only the front uses (`OURS`) are left out. All other fields stay the same, except `stream_options` if
    `wants_usage` is True.

    wants_usage: ask for a chunk with the usage.
    """
    messages = [{name: value for name, value in message.items() if name != "documents"} for message in chat.messages]
    for placed in plan.placed:
        message = messages[placed.turn.at]
        result = placed.turn.result
        content = message.get("content", Raw(b"null")) if result is None else Raw(encode(result))
        message["content"] = _with_text(turn_text(placed), content)
    fields: Fields = {name: value for name, value in chat.fields.items() if name not in OURS}
    fields["messages"] = Raw(encode(messages))
    if wants_usage:
        options = chat.stream_options if isinstance(chat.stream_options, dict) else {}
        fields["stream_options"] = Raw(encode(options | {"include_usage": True}))
    return encode(fields)


def turn_text(placed: Placed) -> str:
    """Return the text of a turn's documents with the hints about them."""
    documents = "".join(
        location_hint([piece]) if isinstance(piece, str) else document_text(piece) for piece in placed.pieces
    )
    moved = placed.shown != list(placed.documents)
    hint = order_hint(placed.shown, placed.turn.documents) if placed.has_hint and moved else ""
    return documents + location_hint(() if placed.in_place else placed.repeated) + hint


def _with_text(text: str, content: Raw) -> Raw:
    """Put a text before a message's content, which is a text, a list of parts, or null."""
    value = msgspec.json.decode(content)
    if isinstance(value, list):
        first = value[0] if value else None
        if isinstance(first, dict) and first.get("type") == "text" and isinstance(first.get("text"), str):
            return Raw(encode([first | {"text": text + first["text"]}, *value[1:]]))
        return Raw(encode([{"type": "text", "text": text}, *value]))
    return Raw(encode(text + value if isinstance(value, str) else text))
