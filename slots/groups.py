"""Waiting requests, grouped by shared prefixes and documents. The groups show which request would reuse the most KV.

Waiting requests are in a radix tree of their fixed tokens, which precede the documents. Documents may come in any order, so
the node at the end of the fixed tokens lists the documents:

    instructions --+-- history              a chat
                   |
                   +-- { documents }        question A: documents 1 2 4
                                            question B: documents 4 1 9
                                            question C: documents 2 8 9

Once a request is admitted, requests that share its path are expected to reuse its KV. If question A is admitted with its
documents in the order 1 4 2, question B is expected to reuse the KV of documents 1 and 4. Question C is expected to reuse no
document, because A's first document is not one of C's.

What a request is expected to reuse is compared with the cache only if the request would be admitted next. So an admission
searches the cache for a few requests, not for the whole queue.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from .host import PromptTree
from .job import Job
from .radix import Node, RadixTree, Root, descendants, upward
from .request import Prompt

MOST_SHARING = 64  # waiting requests that an admission looks at; requests that share its documents come first
MOST_PLACES = 64  # cached documents that are visited to see what a request would reuse
MOST_LOOKS = 4  # expectations that an admission compares with the cache


@dataclass(slots=True, eq=False)
class Group:
    """Requests that are admitted one after another because they reuse the same KV.

    order: the arrival number of the leader, which is the request that was admitted first.
    num_following: how many requests have followed the leader.
    """

    order: int
    num_following: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A waiting request.

    order: the request's arrival number.
    place: the node where the request's fixed tokens end.
    expected: how many tokens the request is expected to reuse.
    ratio: the expected tokens divided by the tokens left to compute.
    weight: the ratio times n + 1, if n later requests have overtaken this one.
    source: the admitted request whose KV this one is expected to reuse; None: the expected tokens were cached when this
        request arrived.
    group: the group of the request `source`. The waiting request may follow the leader of this group.
    """

    job: Job
    order: int
    place: Node
    expected: int = 0
    ratio: float = 0.0
    weight: float = 0.0
    source: Job | None = None
    group: Group | None = None

    def expect(self, num_tokens: int) -> None:
        """Set how many tokens the request is expected to reuse.

        To compute the ratio, one token is added to this number, so that of two requests without cached tokens the shorter
        one comes first.
        """
        self.expected = num_tokens
        self.ratio = (1 + num_tokens) / max(self.job.request.prompt.num_tokens - num_tokens, 1)
        self.weight = (1 + self.job.reuse.num_overtaken) * self.ratio

    def count_overtake(self) -> None:
        """Count a later request that is admitted before this one."""
        self.job.reuse.num_overtaken += 1
        self.weight += self.ratio


@dataclass(slots=True)
class Sharers:
    """Waiting requests with the same fixed tokens, oldest first.

    entries: all waiting requests with these fixed tokens.
    by_document: for each document, the requests that have it.
    """

    entries: dict[Entry, None] = field(default_factory=dict[Entry, None])
    by_document: dict[str, dict[Entry, None]] = field(default_factory=dict[str, dict[Entry, None]])


class Groups:
    """The waiting requests that have not run yet.

    window: how many requests may overtake a waiting request, and how many may follow a leader.
    """

    def __init__(self, tree: PromptTree, window: int) -> None:
        self._tree, self._window = tree, window
        self.paths = RadixTree(Node, Root.of)
        self._sharers: dict[Node, Sharers] = {}
        self._entries: dict[Job, Entry] = {}
        self._after_all, self._before_all = itertools.count(), itertools.count(-1, -1)

    def add(self, job: Job, *, first: bool = False) -> None:
        """Add a waiting request after all other requests, or before all of them if `first` is True."""
        prompt = job.request.prompt
        root = self.paths.root(job.request.index_scope)
        place = self.paths.insert(root, prompt.prefix, ())[len(prompt.prefix)]
        entry = self._entries[job] = Entry(job, next(self._before_all if first else self._after_all), place)
        sharers = self._sharers.setdefault(place, Sharers())
        sharers.entries[entry] = None
        for key in prompt.documents:
            sharers.by_document.setdefault(key, {})[entry] = None
        entry.expect(self._num_cached(job))

    def remove(self, job: Job) -> None:
        """Remove a request from the groups, if it is in them."""
        if (entry := self._entries.pop(job, None)) is None:
            return
        sharers = self._sharers[entry.place]
        del sharers.entries[entry]
        for key in job.request.prompt.documents:
            del sharers.by_document[key][entry]
            if not sharers.by_document[key]:
                del sharers.by_document[key]
        if not sharers.entries:
            del self._sharers[entry.place]
            self._prune(entry.place)

    def check(self, waiting: Iterable[Job]) -> None:
        """Raise AssertionError if the requests, their documents and their paths contradict each other.

        waiting: all requests of the queue.
        """
        assert set(self._entries) <= set(waiting)
        assert {entry for sharers in self._sharers.values() for entry in sharers.entries} == set(self._entries.values())
        for place, sharers in self._sharers.items():
            assert sharers.entries and all(entry.place is place for entry in sharers.entries)
            keys = {key for entry in sharers.entries for key in entry.job.request.prompt.documents}
            assert keys == set(sharers.by_document)
        paths = [run for root in self.paths.roots.values() for run in (root, *descendants(root))]
        assert set(self._sharers) <= set(paths) and all(run.children or run in self._sharers for run in paths)

    def choose(self, first: Job, may_start: Callable[[Job], bool]) -> Job:
        """Return the request to admit: of the requests that may start, the one with the most weight.

        first: the first request in the queue. The result is `first` if no other request of its priority has more weight.
        """
        oldest = self._entries.get(first)
        if oldest is None:
            return first
        best = self._best(oldest, may_start)
        if not self._follows(best, oldest):
            best.group = None  # it follows no leader
        return best.job

    def sharing(self, job: Job) -> list[Prompt]:
        """Return other waiting prompts that have the same fixed tokens as a request and at least one of its documents."""
        if (entry := self._entries.get(job)) is None:
            return []
        by_document = self._sharers[entry.place].by_document
        found: dict[Entry, None] = {}
        for other in itertools.chain.from_iterable(by_document[key] for key in job.request.prompt.documents):
            found[other] = None
            if len(found) == MOST_SHARING:
                break
        return [other.job.request.prompt for other in found if other is not entry]

    def take(self, job: Job, passed: Iterable[Job]) -> None:
        """Remove an admitted request. Requests that share its path are now expected to reuse its KV.

        passed: the requests of the same priority that are before it in the queue. Each of these requests counts as
            overtaken, unless it arrived after the leader that the admitted request follows.
        """
        entry = self._entries.get(job)
        group = None if entry is None else entry.group or Group(entry.order)
        came = math.inf if group is None else group.order
        for other in passed:
            if (waits := self._entries.get(other)) is None:
                other.reuse.num_overtaken += 1
            elif waits.order < came:
                waits.count_overtake()
        if entry is not None and group is not None:
            self.remove(job)
            group.num_following += group is entry.group
            for sharer, shared in islice(self._sharing(entry), MOST_SHARING):
                if shared > sharer.expected:
                    sharer.expect(shared)
                    sharer.source, sharer.group = job, group

    def _follows(self, entry: Entry, oldest: Entry) -> bool:
        """Return whether a request may be admitted before `oldest` because it follows a leader.

        The leader must have arrived before `oldest`, and the request must be expected to reuse more tokens than `oldest`.
        """
        group = entry.group
        if group is None or group.order >= min(oldest.order, entry.order) or group.num_following >= self._window:
            return False
        return entry.expected >= oldest.expected + self._tree.costs.min_shared

    def _best(self, oldest: Entry, may_start: Callable[[Job], bool]) -> Entry:
        """Return the request with the most weight that may start, after comparing its expected tokens with the cache."""
        for _ in range(MOST_LOOKS):
            best = self._heaviest(oldest, may_start)
            if best is oldest or (best.source is not None and best.source.sequence is not None):
                return best  # KV that a running request computes is not evicted
            if (cached := self._num_cached(best.job)) == best.expected:
                return best
            best.expect(cached)
        return self._heaviest(oldest, may_start)

    def _heaviest(self, oldest: Entry, may_start: Callable[[Job], bool]) -> Entry:
        """Return the request with the most weight that may start; `oldest` if no other request has more.

        Once `oldest` has been overtaken `window` times, only requests that follow a leader may be admitted before it.
        """
        best, priority, is_due = oldest, oldest.job.request.priority, oldest.job.reuse.num_overtaken >= self._window
        for entry in self._entries.values():
            if entry.weight <= best.weight or entry.job.request.priority != priority or not may_start(entry.job):
                continue
            if not is_due or self._follows(entry, oldest):
                best = entry
        return best

    def _num_cached(self, job: Job) -> int:
        """Estimate how many tokens of a prompt need not be computed.

        To find the exact number, the prompt would have to be laid out.

        The prompt's documents are searched after its fixed tokens, in any order. At most `MOST_PLACES` cached documents are
        visited.
        """
        prompt, scope, tree = job.request.prompt, job.request.index_scope, self._tree
        match = tree.match(scope, prompt.prefix)
        most = 0 if match.node.parent is None else tree.continued(tree.roots[scope], match)
        places = [match.exact_end] if match.exact_end is not None and prompt.documents else []
        for place in places:
            ends = [end for key, end in place.documents.items() if key in prompt.documents]
            most = max([most, *(end.end for end in ends if tree.may_continue(end))])
            places += ends[: MOST_PLACES - len(places)]
        return most

    def _sharing(self, admitted: Entry) -> Iterator[tuple[Entry, int]]:
        """Yield the entries that share documents or fixed tokens with an admitted one, and how many tokens each shares."""
        start = len(admitted.job.request.prompt.prefix)
        ends = {key: stop for key, at, stop in admitted.job.layout.places if at >= start}
        if ends and (same := self._sharers.get(admitted.place)) is not None:
            for entry in same.by_document.get(next(iter(ends)), ()):
                *_, last = takewhile(entry.job.request.prompt.documents.__contains__, ends)
                yield entry, ends[last]
        below: Node | None = None
        for node in upward(admitted.place):
            others = (run for child in node.children.values() if child is not below for run in (child, *descendants(child)))
            for run in itertools.chain([node], others):
                if (sharers := self._sharers.get(run)) is not None:
                    yield from ((entry, node.end) for entry in sharers.entries)
            below = node

    def _prune(self, node: Node) -> None:
        """Remove a node and the nodes above it, up to the first node that a waiting request needs."""
        while not node.children and node not in self._sharers:
            if isinstance(node, Root):
                del self.paths.roots[node.scope]
            if node.parent is None:
                break
            del node.parent.children[int(node.tokens[0])]
            node = node.parent
