"""The order of each turn's documents: chosen by one knowledge tree for all requests, and kept for the turns of a history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from ..ordering.arrangement import arrange
from ..ordering.document import Document
from ..ordering.given import leave_out
from ..ordering.prompt import document_text
from ..ordering.tree import KnowledgeTree, Node
from .chat import Chat, Text, Turn
from .feedback import Told
from .lengths import Lengths, leading
from .settings import Front

MAX_TURNS = 20_000  # turns whose order is kept: about 300 bytes each
MAX_RANKS = 1_000_000  # of all these orders together: about 36 bytes each


@dataclass(frozen=True, slots=True)
class Placed:
    """The documents of a turn as its prompt shows them.

    documents: in retrieval rank, without those that an earlier turn shows. repeated: the ids of these. order: ranks.
    why: `cached` begins with documents that the upstream should have, `rank` finds none, `kept` is the order of an earlier
    prompt, `asked` is another policy's.
    """

    turn: Turn
    documents: tuple[Document, ...]
    repeated: tuple[str, ...]
    order: tuple[int, ...]
    has_hint: bool
    why: str

    @property
    def shown(self) -> list[Document]:
        """The documents in the order of the prompt."""
        return [self.documents[at] for at in self.order]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt: a document, or the text up to the next one. document: None for a text."""

    key: str
    chars: int
    document: Document | None = None

    @classmethod
    def of(cls, part: Text | Document) -> Part:
        return cls(part.key, part.chars) if isinstance(part, Text) else cls(part.key, len(document_text(part)), part)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt up to its last document, and the number of characters after it.

    known: its leading parts that the upstream should have.
    """

    placed: tuple[Placed, ...]
    parts: tuple[Part, ...]
    known: int
    chars: int

    @property
    def first(self) -> Document:
        """The first document of the prompt."""
        return next(self.documents)

    def ordered_by(self, ids: Sequence[str]) -> Plan:
        """Return the plan with the documents of each turn in another order. Those that `ids` lacks are left out."""
        place = {id: at for at, id in enumerate(ids)}
        parts: list[Part] = []
        for placed in self.placed:
            shown = [document for document in placed.documents if document.id in place]
            shown.sort(key=lambda document: place[document.id])
            parts += [Part.of(placed.turn.before), *map(Part.of, shown)]
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
        """The documents that the upstream should have."""
        return self.documents_in(self.known)

    def documents_in(self, number: int) -> int:
        """Return how many of the first parts are documents."""
        return sum(part.document is not None for part in self.parts[:number])


class Onward:
    """A knowledge tree from one of its places on: an `Index`. place: None where the tree knows no such prompt."""

    def __init__(self, tree: KnowledgeTree, place: Node | None) -> None:
        self._place = place
        self.behind, self.follow, self.beyond, self.recency = tree.behind, tree.follow, tree.beyond, tree.recency

    def start(self) -> Node | None:
        return self._place


class Orders:
    """Chooses orders, and learns from answers. Thread-safe.

    A path of the tree is a prompt: the key of the text in front of the first documents, the keys of the documents, the key
    of the text up to those of the next turn, and so on.
    """

    def __init__(self, settings: Front, lengths: Lengths) -> None:
        self._settings, self._lengths = settings, lengths
        self._tree = KnowledgeTree(settings.tree_nodes)
        self._kept: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._num_ranks = 0  # in `_kept`
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of parts that the upstream should have."""
        return len(self._tree)

    def plan(self, chat: Chat) -> Plan:
        """Choose the order of each turn's documents. The upstream is taken to have them from now on."""
        placed: list[Placed] = []
        parts: list[Part] = []
        held: set[str] = set()
        with self._lock:
            place, known = self._tree.start(), 0
            for turn in chat.turns:
                before = [Part.of(turn.before)]
                place, number = self._walk(place, before)
                placed.append(self._place(turn, chat, held, place))
                shown = list(map(Part.of, placed[-1].shown))
                place, more = self._walk(place, shown)
                known += number + more
                parts += [*before, *shown]
            self._tree.insert((part.key, self._lengths.tokens(part)) for part in parts)
        return Plan(tuple(placed), tuple(parts), known, chat.chars)

    def take_back(self, plan: Plan) -> None:
        """Forget a prompt that the upstream did not take, but for the parts that it should have had before."""
        if plan.known < len(plan.parts):
            with self._lock:
                self._tree.forget([part.key for part in plan.parts[: plan.known + 1]])

    def learn(self, plan: Plan, told: Told) -> int | None:
        """Correct the tree by an answer. Return how many leading parts were cached, None if it is not told."""
        if told.documents:
            plan = plan.ordered_by(told.documents)
        with self._lock:
            path = self._lengths.fit(plan.parts, plan.chars, told.prompt_tokens)
            cached = None if told.cached_tokens is None else leading(path, told.cached_tokens)
            if cached is not None and cached < plan.known:
                self._tree.forget([key for key, _ in path[: cached + 1]])
            self._tree.insert(path)
        return cached

    def _place(self, turn: Turn, chat: Chat, held: set[str], place: Node | None) -> Placed:
        """Order the documents of a turn. held: keys of documents that earlier turns show; these are added.

        place: the end of the text in front of them in the tree; None if the tree lacks it.
        """
        options, settings = chat.options, self._settings
        removes = (options.dedup or settings.dedup) == "auto"
        documents, repeated = leave_out(turn.documents, held if removes else set())
        held.update(document.key for document in documents)
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
            )
            order, why = found.order, "asked" if policy != "auto" else "cached" if found.reused_documents else "rank"
        self._keep(turn.name, order)
        return Placed(turn, documents, repeated, order, has_hint=hint, why=why)

    def _keep(self, name: str, order: tuple[int, ...]) -> None:
        self._num_ranks += len(order) - len(self._kept.pop(name, ()))
        self._kept[name] = order
        while len(self._kept) > MAX_TURNS or self._num_ranks > MAX_RANKS:
            _, left = self._kept.popitem(last=False)
            self._num_ranks -= len(left)

    def _walk(self, place: Node | None, parts: Sequence[Part]) -> tuple[Node | None, int]:
        """Follow parts of a prompt from a place on. Return their end, None if the tree lacks it, and how many it has."""
        for number, part in enumerate(parts):
            if place is None or (step := self._tree.follow(place, part.key)) is None:
                return None, number
            place = step.position
        return place, len(parts)
