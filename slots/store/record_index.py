"""The index of a tier's records: which records continue a prompt, and which one is evicted first.

The record with the lowest priority is evicted first (PGDSF, with the index's own clock). Of records with the same priority,
the least recently used one is evicted first. A run is useless without the runs before it. So a record gets at least the
priority of each record that depends on it, and is evicted after all of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from ..costs import GUESSED_NS
from ..radix import NO_TOKENS, Match, RadixTree, Run, descendants, path, scope_of
from ..scope import Scope
from .record_file import MOST_COST, MOST_USES, Cost, Large, Position

NO_NODES: dict[int, IndexNode] = {}
NO_ENDS: dict[str, IndexNode] = {}
MOMENT = 1000  # ns: the difference that file systems can store
MOST_COMPARED = 16  # records of one run that are compared: very many may have a short prefix
MOST_SEARCHED = 256  # runs after a record that are searched for a record that depends on it


K = TypeVar("K")


class Only(MutableMapping[K, "IndexNode"]):
    """A mapping with at most one entry. Such a mapping takes a fifth of the memory of a dict."""

    __slots__ = ("_key", "_node")

    def __init__(self, key: K, node: IndexNode) -> None:
        self._key: K = key
        self._node: IndexNode | None = node

    def __getitem__(self, key: K) -> IndexNode:
        if key != self._key or self._node is None:
            raise KeyError(key)
        return self._node

    def __setitem__(self, key: K, node: IndexNode) -> None:
        self._key, self._node = key, node

    def __delitem__(self, key: K) -> None:
        self._node = None

    def __iter__(self) -> Iterator[K]:
        return iter(() if self._node is None else (self._key,))

    def __len__(self) -> int:
        return self._node is not None


class IndexNode(Run["IndexNode"]):
    """A run whose KV is in records. A node takes little memory: empty mappings are shared, and tokens are kept as bytes.

    covers: the property `records`, in a compact form.
    begins: the property `documents_here`, as one flat tuple.
    """

    __slots__ = ("_tokens", "begins", "covers")

    def __init__(self, tokens: np.ndarray, start: int, parent: IndexNode | None) -> None:
        self._tokens, self.start, self.parent = tokens.tobytes(), start, parent
        self.children, self.documents = NO_NODES, NO_ENDS
        self.covers: Covers = ()
        self.begins: tuple[Any, ...] = ()

    @property
    def tokens(self) -> np.ndarray:  # type: ignore[override]
        return np.frombuffer(self._tokens, np.int32)

    @property
    def end(self) -> int:
        return self.start + len(self._tokens) // 4

    def cut(self, at: int) -> None:
        """Drop the first `at` tokens."""
        self._tokens, self.start = self._tokens[4 * at :], self.start + at

    @property
    def records(self) -> Collection[RecordEntry]:
        """The records that contain the KV of this run."""
        return (self.covers,) if isinstance(self.covers, RecordEntry) else self.covers

    @property
    def documents_here(self) -> Iterator[tuple[IndexNode, str]]:
        """For each document that ends with this run, the run before the document and the document's key."""
        return zip(self.begins[::2], self.begins[1::2], strict=True)


class IndexRoot(IndexNode):
    """The empty prefix of all records of a scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: Scope) -> None:
        super().__init__(NO_TOKENS, 0, None)
        self.scope: Scope = scope  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(slots=True, eq=False, kw_only=True)
class RecordEntry:
    """A record in the index. The record has the KV from position `start` to the end of `node`.

    size: the size of the record's file in bytes.
    used: the time of the record's last use, ns.
    has_state: whether the record has a recurrent state.
    frequency, token_cost: as in `Node`. The record's worth is the product of these two.
    priority: the worth, plus the value of the index's clock at the last use.
    """

    key: str
    start: int
    size: int
    used: int
    frequency: int
    token_cost: float
    has_state: bool
    node: IndexNode
    priority: float = 0.0

    @property
    def stop(self) -> int:
        return self.node.end

    @property
    def scope(self) -> Scope:
        return scope_of(self.node)

    @property
    def place(self) -> Place:
        """The sort key of eviction: the record with the lowest place is evicted first.

        Of records with the same priority and time, the deepest one is evicted first.
        """
        return self.priority, self.used, -self.start, self.key

    def runs(self) -> Iterator[IndexNode]:
        """Yield the nodes of which the record has KV, last one first."""
        node: IndexNode | None = self.node
        while node is not None and node.end > self.start:
            yield node
            node = node.parent


Place = tuple[float, int, int, str]
"""Priority, time of the last use (ns), negated start, key."""

Covers = RecordEntry | tuple[RecordEntry, ...] | dict[RecordEntry, None]
"""The records that contain the KV of a run: a single record, a tuple of a few, or a dict of many."""


class Stretch(NamedTuple):
    """Positions [start, stop) of a prompt. Records have the KV of all these positions. Between two stretches is a hole.

    entries: the records with this KV, prefixes first.
    """

    entries: list[RecordEntry]
    start: int
    stop: int


class StoredEntry(Struct, frozen=True, array_like=True):
    """An entry in the file of an index.

    parent: the key of an entry with the KV directly before this entry's run; empty: there is none.
    tokens: the tokens of the run, as int32.
    documents: (key, first position) of the documents that end with the run.
    """

    key: str
    parent: str
    scope: str
    start: Position
    size: Large
    used: int
    frequency: Large
    token_cost: Cost
    priority: float
    has_state: bool
    documents: tuple[tuple[str, int], ...]
    tokens: bytes


class StoredIndex(Struct, frozen=True, array_like=True):
    """The content of an index's file. Each entry comes after its parent."""

    clock: float
    entries: list[msgspec.Raw]  # decoded one at a time: all together would take more memory than the index


ENTRIES, INDEXES = msgspec.msgpack.Decoder(StoredEntry), msgspec.msgpack.Decoder(StoredIndex)


class RecordIndex(RadixTree[IndexNode]):
    """The index of a tier's records, by key. Prompts are matched against it as against the cache: see `PrefixIndex`.

    lock: guards everything. Only looking up a key in `entries` needs no lock.
    """

    def __init__(self) -> None:
        super().__init__(IndexNode, IndexRoot)
        self.lock = threading.Lock()
        self.entries: dict[str, RecordEntry] = {}
        self.num_bytes = 0
        self._num_states, self.recompute_last = 0, 1
        self._age = 0.0  # PGDSF's clock: the priority of the record evicted last
        self._heap: list[Place] | None = None  # made once a record has to be evicted

    # ---- records come and go ---------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all records. The caller holds the lock."""
        self.roots.clear()
        self.entries.clear()
        self.num_bytes = self._num_states = 0
        self._age, self._heap = 0.0, None

    def add(
        self,
        key: str,
        scope: Scope,
        start: int,
        tokens: np.ndarray,
        *,
        size: int,
        used: int,
        frequency: int = 1,
        token_cost: float = 0.0,
        documents: Collection[tuple[str, int]] = (),
        has_state: bool = False,
    ) -> RecordEntry:
        """Add a record with the KV of `tokens` (int32) from position `start` on.

        The other arguments are as in `RecordEntry` and `Record`.
        """
        ends = self.insert(self.root(scope), tokens, sorted({start, *(at for _, at in documents)}))
        node = ends[len(tokens)]
        for document, at in documents:
            _place(ends[at], document, node)
        return self._enter(
            RecordEntry(
                key=key,
                start=start,
                size=size,
                used=used,
                frequency=frequency,
                token_cost=token_cost,
                has_state=has_state,
                node=node,
                priority=self._age + frequency * token_cost,
            )
        )

    def remove(self, entry: RecordEntry) -> None:
        """Forget a record."""
        del self.entries[entry.key]
        self.num_bytes -= entry.size
        self._num_states -= entry.has_state
        for node in entry.runs():
            if isinstance(node.covers, dict):
                del node.covers[entry]
            else:
                others = tuple(other for other in node.records if other is not entry)
                node.covers = others[0] if len(others) == 1 else others
        for node in path(entry.node):
            if node.children or node.records:
                break
            self._unlink(node)

    def use(self, key: str, now: int) -> None:
        """Count a use of a record at the time `now` (ns)."""
        if entry := self.entries.get(key):
            entry.frequency += 1
            entry.priority, entry.used = self._age + entry.frequency * entry.token_cost, now
            self._offer(entry)

    def touch_prefixes(self, entry: RecordEntry, now: int) -> list[RecordEntry]:
        """Mark the records before a record as used, at times after `now` (ns). Return these records.

        The first record of the path gets the latest time.
        """
        *_, first = entry.runs()
        in_front = (node.records for node in path(first.parent or first) if node is not first)
        found = list(dict.fromkeys(next(iter(covers)) for covers in in_front if covers))
        for prefix in found:
            now += MOMENT
            prefix.used = max(prefix.used, now)
            self._offer(prefix)
        return found

    def stands_on_records(self, scope: Scope, start: int, tokens: np.ndarray) -> bool:
        """Return whether records have all KV of a prompt before position `start`."""
        match = self.match(scope, tokens[:start])
        return match.length == start and all(node.records for node in path(match.node))

    def of(self, names: Collection[str]) -> list[RecordEntry]:
        """Return the records of all scopes with these names, deepest first."""
        found = [entry for entry in self.entries.values() if entry.scope.name in names]
        return sorted(found, key=lambda entry: -entry.start)

    def first_to_evict(self) -> RecordEntry | None:
        """Return the record to evict next, on which no other record depends; None if there is no record."""
        if self._heap is None:
            self._heap = [entry.place for entry in self.entries.values()]
            heapq.heapify(self._heap)
        while self._heap:
            entry = self.entries.get(self._heap[0][-1])
            if entry is None or self._heap[0] != entry.place:
                heapq.heappop(self._heap)
            elif (above := self._above(entry)) is not None:
                entry.priority, entry.used = max((entry.priority, entry.used), (above.priority, above.used))
                heapq.heapreplace(self._heap, entry.place)
            else:
                return entry
        return None

    def evict(self) -> RecordEntry | None:
        """Forget and return the record to evict next, and advance the clock to its priority."""
        if entry := self.first_to_evict():
            self._age = max(self._age, entry.priority)
            self.remove(entry)
        return entry

    def _enter(self, entry: RecordEntry) -> RecordEntry:
        self.entries[entry.key] = entry
        for node in entry.runs():
            if isinstance(node.covers, dict):
                node.covers[entry] = None
                continue
            several = (*node.records, entry)
            node.covers = (
                entry if len(several) == 1 else several if len(several) <= MOST_COMPARED else dict.fromkeys(several)
            )
        self.num_bytes += entry.size
        self._num_states += entry.has_state
        self._offer(entry)
        return entry

    def _above(self, entry: RecordEntry) -> RecordEntry | None:
        """Return a record that depends on this one; None if none is found."""
        *_, first = entry.runs()
        later = itertools.islice(descendants(first), MOST_SEARCHED)
        others = (other for node in (first, *later) for other in node.records)
        return next((other for other in others if other.start > entry.start), None)

    def _offer(self, entry: RecordEntry) -> None:
        if self._heap is not None:
            heapq.heappush(self._heap, entry.place)
            if len(self._heap) > 2 * len(self.entries) + 64:
                self._heap = None  # to be made anew without outdated entries

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def continuing(self, scope: Scope, tokens: np.ndarray, reached: int) -> list[Stretch]:
        """Return the stretches of a prompt after its first `reached` tokens, in order.

        If the model has recurrent states, each stretch ends with a state, so that the prompt can continue from there.
        """
        match = self.match(scope, tokens)
        nodes, stop = path(match.node)[::-1], match.length
        found: list[Stretch] = []
        while stretch := self._last_stretch(nodes, reached, stop):
            found.append(stretch)
            stop = stretch.start
            nodes = [node for node in nodes if node.end <= stop]
        return found[::-1]

    def _last_stretch(self, nodes: list[IndexNode], reached: int, stop: int) -> Stretch | None:
        """Return the last stretch of a path between the positions `reached` and `stop`; None if there is none."""
        if not self._num_states:
            return _covering(nodes, reached, stop)
        for at, last in reversed(list(enumerate(nodes))):
            if last.end <= reached:
                break
            known = itertools.islice(last.records, MOST_COMPARED) if last.end <= stop else ()
            state = next((one for one in known if one.has_state and one.node is last), None)
            if state is not None:
                before = _covering([node for node in nodes[:at] if node.end <= state.start], reached, state.start)
                if before is None or before.stop < state.start:
                    return Stretch([state], max(state.start, reached), last.end)
                return Stretch([*before.entries, state], before.start, last.end)
        return None

    def may_continue(self, node: IndexNode) -> bool:
        """Return whether a prompt can continue from the end of a run."""
        return not self._num_states or any(
            one.has_state and one.node is node for one in itertools.islice(node.records, MOST_COMPARED)
        )

    def saved_share(self, node: IndexNode) -> float:
        """Return 1: reuse saves the whole time to compute a run, as if reading the run took no time."""
        return 1.0

    def seconds(self, cached: int, new: int) -> float:
        """Return a guess, since an index does not know how fast the device is."""
        return new * GUESSED_NS / 1e9

    def continued(self, origin: IndexNode, match: Match[IndexNode]) -> int:
        """Return how many of the tokens that `match` found after `origin` need not be computed."""
        if not self._num_states:
            return match.length
        stop = origin.end + match.length
        ends = (node.end for node in path(match.node, origin.end) if node.end <= stop and self.may_continue(node))
        return max(ends, default=origin.end) - origin.end

    # ---- a file ----------------------------------------------------------------------------------------------------

    def stored(self) -> bytes:
        """Return the index as the content of a file. The lock is held for one record at a time."""
        stored: list[msgspec.Raw] = []
        for entry in sorted(self.entries.copy().values(), key=lambda entry: entry.start):
            with self.lock:
                if self.entries.get(entry.key) is entry:
                    stored.append(msgspec.Raw(msgspec.msgpack.encode(_stored(entry))))
        return msgspec.msgpack.encode(StoredIndex(self._age, stored))

    def restore(self, content: bytes) -> None:
        """Add the records of an index's file.

        The caller holds the lock. Raises ValueError if `content` is not the content of an index's file.

        The index's clock starts at 0 again, so the clock's value in the file is subtracted from all priorities. Priorities
        that are too high are lowered to a limit.
        """
        stored, scopes = INDEXES.decode(content), dict[str, Scope]()
        if not math.isfinite(stored.clock):
            raise ValueError(f"its clock is {stored.clock}")
        stored.entries.reverse()
        while stored.entries:  # popped, so that the index can use the memory of decoded entries
            one = ENTRIES.decode(stored.entries.pop())
            scope = scopes.get(one.scope) or scopes.setdefault(one.scope, Scope.read(one.scope))
            origin = self._end_at(self.entries.get(one.parent), one.start) if one.start else self.root(scope)
            tokens = np.frombuffer(one.tokens, "<i4")
            if origin is None or not len(tokens) or one.key in self.entries:
                continue  # the head of its file will be read
            node = self.insert(origin, tokens, ())[len(tokens)]
            frequency, token_cost = min(one.frequency, MOST_USES), min(one.token_cost, MOST_COST)
            priority = min(max(0.0, one.priority - stored.clock), MOST_USES * MOST_COST)  # 0 for NaN
            worth: dict[str, Any] = {"frequency": frequency, "token_cost": token_cost, "priority": priority}
            self._enter(RecordEntry(node=node, **_kept_of(one) | worth))
            for document, at in one.documents:
                if (begin := self._end_at(self.entries[one.key], at) if at else self.root(scope)) is not None:
                    _place(begin, document, node)

    def _end_at(self, entry: RecordEntry | None, at: int) -> IndexNode | None:
        """Return the node of a record's path that ends at position `at`.

        If no run ends at this position, cut a run in two there.

        Return None if the path does not reach this position.
        """
        node = entry.node if entry is not None else None
        while node is not None and node.start >= at > 0:
            node = node.parent
        if node is None or not node.start < at <= node.end:
            return None
        return self._split(node, at - node.start) if at < node.end else node

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _grow(self, node: IndexNode, tokens: np.ndarray) -> IndexNode:
        _adopt(node, child := IndexNode(tokens, node.end, node))
        return child

    def _unlink(self, node: IndexNode) -> None:
        for origin, key in node.documents_here:
            del origin.documents[key]
        node.begins = ()
        super()._unlink(node)

    def _split(self, lower: IndexNode, at: int) -> IndexNode:
        assert lower.parent is not None
        upper = IndexNode(lower.tokens[:at], lower.start, lower.parent)
        lower.cut(at)
        upper.covers = lower.covers.copy() if isinstance(lower.covers, dict) else lower.covers
        _adopt(lower.parent, upper)
        _adopt(upper, lower)
        lower.parent = upper
        return upper


def _adopt(parent: IndexNode, child: IndexNode) -> None:
    parent.children = _with(parent.children, int(child.tokens[0]), child)


def _place(origin: IndexNode, key: str, end: IndexNode) -> None:
    """Enter document `key`, which starts after `origin` and ends with `end`.

    If the document had another end before, that end is replaced.
    """
    if (before := origin.documents.get(key)) is not None:
        before.begins = tuple(part for one in before.documents_here if one != (origin, key) for part in one)
    origin.documents = _with(origin.documents, key, end)
    end.begins = (*end.begins, origin, key)


def _with(nodes: MutableMapping[K, IndexNode], key: K, node: IndexNode) -> Any:
    """Return a mapping with one more node. The result is `nodes` itself or a new mapping."""
    if not nodes:
        return Only(key, node)
    more = dict(nodes) if isinstance(nodes, Only) and key not in nodes else nodes
    more[key] = node
    return more


def _covering(nodes: list[IndexNode], at: int, stop: int) -> Stretch | None:
    """Return the last stretch of a path between the positions `at` and `stop`; None if there is none.

    The search goes backward from the end, since the last runs of a path are in the fewest records.
    """
    chosen: list[RecordEntry] = []
    end = first = stop
    for node in reversed(nodes):
        if node.end <= at:
            break
        if node.start >= first:
            continue  # the last chosen record has this run, too
        if not node.records:
            if chosen:
                break
            continue
        end = end if chosen else min(stop, node.end)
        best = min(itertools.islice(node.records, MOST_COMPARED), key=lambda entry: (entry.start, entry.stop))
        chosen.append(best)
        first = best.start
    return Stretch(chosen[::-1], max(first, at), end) if chosen else None


def _stored(entry: RecordEntry) -> StoredEntry:
    *above, first = entry.runs()
    in_front = first.parent
    parent = next(iter(in_front.records), None) if in_front is not None else None
    tokens = np.concatenate([node.tokens for node in (first, *reversed(above))])
    return StoredEntry(
        parent=parent.key if parent else "",
        scope=entry.scope.text,
        documents=tuple((key, origin.end) for origin, key in entry.node.documents_here),
        tokens=tokens.astype("<i4").tobytes(),
        **_kept_of(entry),
    )


KEPT = ("key", "start", "size", "used", "frequency", "token_cost", "priority", "has_state")
"""Fields that `RecordEntry` and `StoredEntry` have in common."""


def _kept_of(entry: RecordEntry | StoredEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in KEPT}
