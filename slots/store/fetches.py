"""Fetches records from lower tiers for waiting requests.

A fetch may delay a request by at most a tenth of the time that it takes to compute the tokens to fetch. To keep this bound,
a request waits no longer than the time to compute the tokens that have arrived so far, plus the share `PATIENCE` of the time
to compute all tokens to fetch. When this time is over, the request gives up the fetch, and computes the missing tokens.
`PATIENCE` is smaller than a tenth, because the times to compute tokens are estimates. Only time in which the request could
have been admitted counts as waiting.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

import numpy as np

from ..fetched import Fetch, FetchedRecord, Holes
from ..host import PromptTree
from ..job import Job, Phase
from ..radix import Node, common_prefix, most_cached, path
from ..record import Record
from ..request import Layout, Prompt, Request
from ..scheduler import Scheduler
from ..scope import Scope
from .record_index import IndexNode, RecordEntry, RecordIndex, Stretch
from .tier import LowerTier

logger = logging.getLogger("slotcache.tiers")
GUESS = 200e6  # bytes a second of a tier before its first read
MEMORY = 0.9  # weight of all earlier reads relative to a new one
FORGIVING = 1.05  # factor by which a tier that was too slow counts as faster each time, so that it is tried again
LEAST = 0.005  # seconds that any fetch may take: less than a client notices
NUM_READERS = 4  # threads: a disk with a long latency serves several reads at once


class Readers:
    """Threads that read records, in the order of the calls.

    Each call starts a thread, until there are as many threads as the constructor was told.
    """

    def __init__(self, count: int = NUM_READERS) -> None:
        self._count, self._threads = count, list[Thread]()
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def __call__(self, read: Callable[[], None]) -> None:
        """Let one of the threads call `read`."""
        self._asked.put(read)
        if len(self._threads) < self._count:
            thread = Thread(target=self._work, name=f"read-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            try:
                self._asked.get()()
            except Exception:  # a thread that ends would never read again
                logger.exception("a record was not read")


class Speed:
    """The speed of a tier in bytes per second, learnt from its reads."""

    def __init__(self) -> None:
        self._bytes, self._seconds = GUESS * 1e-3, 1e-3

    def learn(self, num_bytes: int, seconds: float) -> None:
        self._bytes, self._seconds = MEMORY * self._bytes + num_bytes, MEMORY * self._seconds + seconds

    def forgive(self) -> None:
        self._bytes *= FORGIVING

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds to read `num_bytes` bytes."""
        return num_bytes * self._seconds / self._bytes


class PricedIndex:
    """The index of a tier, with prices that consider the cache. A priced index is used to order the documents of one prompt.

    A priced index is valid as long as neither the tier's index nor the cache changes.

    live: the cache. A run that the cache has, too, is priced as the cache prices it. Reusing any other run also takes the
        time to read it from the tier.
    read_share: returns the time to read a run, divided by the time to compute it.
    """

    def __init__(self, index: RecordIndex, live: PromptTree, scope: Scope, read_share: Callable[[IndexNode], float]) -> None:
        self.roots, self.match_from = index.roots, index.match_from
        self.continued, self.may_continue, self.seconds = index.continued, index.may_continue, live.seconds
        self.recompute_last = live.recompute_last
        self._live, self._read_share = live, read_share
        self._ends: dict[IndexNode, tuple[Node, int] | None] = {}  # by run: the live run and position of its end
        self._root = live.roots.get(scope)

    def saved_share(self, node: IndexNode) -> float:
        found = self._end(node)
        if found is not None:
            return self._live.saved_share(found[0])
        return max(1 - self._live.costs.restore_share - self._read_share(node), 0.0)

    def _end(self, node: IndexNode) -> tuple[Node, int] | None:
        new = list(itertools.takewhile(lambda one: one not in self._ends, path(node)))
        above = new[-1].parent if new else node
        end = self._ends.get(above, self._root and (self._root, 0)) if above else None
        for one in reversed(new):
            end = self._ends[one] = end and _after(*end, one.tokens)
        return end


def _after(node: Node, at: int, tokens: np.ndarray) -> tuple[Node, int] | None:
    """Return where `tokens` end in a tree: the run, and the position in this run.

    None if the tree does not have all these tokens.

    The tokens follow the first `at` tokens of `node`.
    """
    while len(tokens):
        if at == len(node.tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                return None
            node, at = child, 0
        common = common_prefix(node.tokens[at:], tokens)
        if not common:
            return None
        at, tokens = at + common, tokens[common:]
    return node, at


class Fetches:
    """The scheduler's `Fetcher`: it brings records for waiting prompts into host memory.

    The methods of `Fetches` run in the engine's thread, except `_bring`, which reads files. Once the records of open fetches
    exceed half of host memory's budget, `look` begins no further fetch.

    lower: the lower tiers. A prompt's records are read from the first tier from which reading them pays.
    hand_over: lets the engine's thread call a function.
    accepts: returns whether a record's KV fits this model. The reading threads call this function.
    read: lets a reading thread call a function.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lower: Sequence[LowerTier],
        *,
        hand_over: Callable[[Callable[[], None]], object],
        accepts: Callable[[Record], bool] = lambda record: True,
        read: Callable[[Callable[[], None]], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._scheduler, self._lower, self._hand_over, self._accepts = scheduler, tuple(lower), hand_over, accepts
        self._read, self._clock = read or Readers(), clock
        self.least = LEAST
        self._unasked: deque[Job] = deque()
        self._open: list[Fetch] = []  # fetches until their requests run or have ended
        self._by_job: dict[Job, Fetch] = {}  # likewise
        self._expected: dict[Job, int] = {}  # a job's tokens in cells and host memory when lower tiers were searched
        self._holes = Holes()
        self._speeds = {tier.name: Speed() for tier in lower}
        self.num_hits = self.num_tokens = self.num_bytes = self.num_given_up = 0  # requests, tokens, bytes, requests; ever
        self.seconds = 0.0  # waited by requests, ever
        scheduler.fetch_with(self)

    def expect(self, job: Job) -> None:
        """Remember a waiting request, so that `look` may begin a fetch for it."""
        if self._lower and self._may_fetch(job):
            self._unasked.append(job)

    def _may_fetch(self, job: Job) -> bool:
        return job.request.keeps and job.request.index_scope.is_shared

    def look(self) -> None:
        """Begin fetches, give up fetches that take too long, and release fetches whose requests run or have ended.

        The engine calls this between two steps.
        """
        for fetch in [fetch for fetch in self._open if self._by_job.get(fetch.job) is not fetch]:
            self._release(fetch)
        self._scheduler.index.host.num_aside = self._holes.forget_dropped({tier.name: tier for tier in self._lower})
        going_on = [fetch for fetch in self._open if not fetch.is_over]
        wanted = self._scheduler.startable({fetch.job: fetch.gained for fetch in going_on})
        for fetch in going_on:
            if fetch.job in wanted:
                fetch.wanted_at = fetch.wanted_at or self._clock()
                if fetch.patience_left(self._clock()) <= 0:
                    self.num_given_up += 1
                    self._end(fetch)
        while self._unasked and self._has_room():
            job = self._unasked.popleft()
            if job not in self._by_job and job.sequence is None and job in self._scheduler.waiting:
                try:
                    self._begin(job)
                except Exception:  # the queue will report what is wrong with the request
                    logger.exception("request %d is not looked for in lower tiers", job.request.id)
        self._scheduler.index.host.settle()

    def has_all(self, prompt: Prompt, scope: Scope) -> bool:
        """Return whether a lower tier has that part of a prompt that device and host memory do not have."""
        for tier in self._lower:
            with tier.index.lock:
                if scope in tier.index.roots:
                    texts = prompt.arrange(tier.index, scope).texts
                    if all(_reached(*self._found(tier.index, scope, text)) >= len(text) for text in texts):
                        return True
        return False

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the next fetch is given up; None unless there are requests and all of them wait for fetches."""
        if self._scheduler.running or not len(self._scheduler.waiting):
            return None
        waits = [self._by_job[job] for job in self._scheduler.waiting if self.is_fetching(job)]
        if len(waits) < len(self._scheduler.waiting):
            return None
        return max(min(fetch.patience_left(self._clock()) for fetch in waits), 1e-3)

    # ---- one request -------------------------------------------------------------------------------------------------

    def has_to_wait(self, job: Job) -> bool:
        """Return whether a request that is about to be admitted has to wait for a fetch.

        If no fetch was considered for the request before, or if cached KV was lost after that, a fetch may begin now.
        """
        if not self._lower or job in self._by_job or job.has_started or job.is_suspect or not self._may_fetch(job):
            return False
        expected = self._expected.get(job)
        if expected is None or self._scheduler.index.reusable(job.request.index_scope, job.layout.tokens) < expected:
            self._begin(job)
        return job in self._by_job

    def is_fetching(self, job: Job) -> bool:
        fetch = self._by_job.get(job)
        return fetch is not None and not fetch.is_over

    def begins(self, job: Job) -> None:
        self._by_job.pop(job, None)

    def ends(self, job: Job) -> None:
        self._by_job.pop(job, None)
        self._expected.pop(job, None)
        self._holes.forget(job)

    def next_pause(self, job: Job) -> int:
        return self._holes.next_pause(job)

    def take_over(self, job: Job) -> bool:
        return self._holes.take_over(job, self._scheduler.index.host)

    def _begin(self, job: Job) -> None:
        """Begin to fetch the records that a lower tier has of a request's prompt, if that pays."""
        request, index = job.request, self._scheduler.index
        scope = request.index_scope
        known = request.prompt.arrange(index, scope)
        expected = self._expected[job] = index.reusable(scope, known.tokens)
        has = self._usable(known, expected)
        for tier in self._lower:
            with tier.index.lock:
                if scope not in tier.index.roots:
                    continue
                layout = self._arrange(request, tier)
                found = [self._found(tier.index, scope, text) for text in layout.texts]
            if layout.in_pieces:  # in a text of pieces, records after a hole are useless for now
                found = [(at, stretches[:1] if _reached(at, stretches) > at else []) for at, stretches in found]
            stretches = [one for _, more in found for one in more]
            entries = list(dict.fromkeys(entry for one in stretches for entry in one.entries))
            gained = sum(one.stop - one.start for one in stretches)
            if entries and not layout.in_pieces:
                at, stop = found[0][0], stretches[-1].stop
                gained = self._usable(layout, stop) - has - (stop - at - gained)
            if gained > 0 and entries:
                seconds, num_bytes = self._seconds(has, gained), sum(entry.size for entry in entries)
                if self._speeds[tier.name].seconds(num_bytes + self._num_unread) < seconds:
                    self._start(Fetch(job, tier.name, layout.texts, gained, seconds, num_bytes), tier, entries)
                    return
                self._speeds[tier.name].forgive()

    def _arrange(self, request: Request, tier: LowerTier) -> Layout:
        """Return a layout of a request's prompt, with documents ordered by a tier's records and the time to read them."""
        scope, read_share = request.index_scope, partial(self._read_share, tier.name)
        return request.prompt.arrange(PricedIndex(tier.index, self._scheduler.index, scope, read_share), scope)

    def _read_share(self, tier: str, node: IndexNode) -> float:
        """Return the time to read a run, divided by the time to compute it."""
        entry = next(iter(node.records), None)
        if entry is None:
            return 1.0
        return self._speeds[tier].seconds(entry.size) / self._seconds(entry.start, entry.stop - entry.start)

    def _found(self, records: RecordIndex, scope: Scope, text: np.ndarray) -> tuple[int, list[Stretch]]:
        """Return how many tokens of a text are cached and usable, and the stretches after them that records have.

        If the state after cached runs was evicted, these runs are not usable.
        """
        index = self._scheduler.index
        at = min(index.num_cached(scope, text), index.reusable(scope, text))
        return at, records.continuing(scope, text, at)

    def _usable(self, layout: Layout, reached: int) -> int:
        length = len(layout.tokens)
        return min(reached, most_cached(layout.sections(length), reached, self._scheduler.tree.recompute_last))

    def _seconds(self, cached: int, new: int) -> float:
        """Return the seconds to compute `new` tokens after `cached` ones, but at least `least`."""
        return max(self._scheduler.tree.seconds(cached, new), self.least)

    def _start(self, fetch: Fetch, tier: LowerTier, entries: Sequence[RecordEntry]) -> None:
        fetch.began = self._clock()
        if self._scheduler.startable({fetch.job: fetch.gained}):
            fetch.wanted_at = fetch.began
        self._by_job[fetch.job] = fetch
        fetch.job.enter(Phase.FETCHING)
        self._open.append(fetch)
        for text in fetch.texts:
            self._reserve(fetch, text)
        for entry in entries:
            fetch.keys.append((entry.key, entry.size))
            self._read(partial(self._bring, fetch, tier, entry.key))

    def _bring(self, fetch: Fetch, tier: LowerTier, key: str) -> None:
        """Read a record, and pass it to the engine's thread. `_bring` runs in a reading thread."""
        record, began = None, self._clock()
        try:
            if not fetch.is_over:
                record = tier.get(key)
                if record is not None and not self._accepts(record):
                    logger.warning("the KV of %d tokens does not fit this model", len(record.tokens) - record.start)
                    record = None
        finally:
            seconds = self._clock() - began
            self._hand_over(lambda: self._arrive(fetch, tier, key, record, seconds))

    def _arrive(self, fetch: Fetch, tier: LowerTier, key: str, record: Record | None, seconds: float) -> None:
        """Receive a record. Take over the arrived records in their order, up to the first one that has not arrived.

        If the tier no longer has a record (None), the request will compute the record's tokens.
        """
        if record is not None:
            self._speeds[tier.name].learn(record.num_bytes, seconds)
            self.num_bytes += record.num_bytes
        fetch.arrived[key] = record
        while not fetch.is_over and fetch.keys and fetch.keys[0][0] in fetch.arrived:
            key, size = fetch.keys.popleft()
            record = fetch.arrived.pop(key)
            if record is None or key not in tier or record.scope != fetch.job.request.index_scope:
                if len(fetch.texts) > 1:
                    break
                continue
            if not self._take(fetch, FetchedRecord(tier.name, key, record)):
                break
            fetch.num_adopted += size
        else:
            if fetch.keys:
                return
        self._end(fetch)

    def _take(self, fetch: Fetch, fetched: FetchedRecord) -> bool:
        """Put a record into host memory. If the record follows a hole, keep it for its request only."""
        index, record = self._scheduler.index, fetched.record
        if index.num_cached(record.scope, record.tokens) < record.start:
            if fetch.job.phase is Phase.DONE:
                return False
            self._holes.add(fetch.job, fetched)
            return True
        index.host.overdraw(record)
        if not index.host.put(record, fetched.tier):
            return False
        self._reserve(fetch, record.tokens)
        return True

    def _end(self, fetch: Fetch) -> None:
        """End a fetch, so that its request no longer waits for it."""
        if not fetch.is_over:
            fetch.is_over = True
            if self._by_job.get(fetch.job) is fetch and fetch.job.phase is Phase.FETCHING:
                fetch.job.enter(Phase.WAITING)
            fetch.keys.clear()
            fetch.arrived.clear()
            waited = self._clock() - fetch.began
            fetch.job.reuse.fetch_seconds = waited
            self.seconds += waited
            self.num_hits += fetch.num_adopted > 0
            self.num_tokens += fetch.gained if fetch.num_adopted else 0

    # ---- host memory -------------------------------------------------------------------------------------------------

    @property
    def _num_unread(self) -> int:
        return sum(fetch.num_bytes - fetch.num_adopted for fetch in self._open if not fetch.is_over)

    def _has_room(self) -> bool:
        return not self._open or sum(one.num_bytes for one in self._open) <= self._scheduler.index.host.max_bytes // 2

    def _reserve(self, fetch: Fetch, tokens: np.ndarray) -> None:
        """Until `_release`, prevent host memory from evicting the copies that a prompt will need."""
        for node in path(self._scheduler.index.match(fetch.job.request.index_scope, tokens).node):
            if node.copy is not None and node.copy not in fetch.reserved:
                node.copy.num_fetches += 1
                fetch.reserved[node.copy] = node

    def _release(self, fetch: Fetch) -> None:
        """Allow the eviction of a fetch's reserved copies, because its request runs or has ended."""
        self._end(fetch)
        self._open.remove(fetch)
        index, scope = self._scheduler.index, fetch.job.request.index_scope
        for copy, node in fetch.reserved.items():
            copy.num_fetches -= 1
            *above, root = _to_root(node)
            parts = [part for part in above if part.copy is copy][-1:] if root is index.roots.get(scope) else []
            while parts:  # one run, or several parts of a split run
                index.price(part := parts.pop())
                parts += [child for child in part.children.values() if child.copy is copy]


def _reached(at: int, stretches: Sequence[Stretch]) -> int:
    """Return the position up to which a text has KV without a hole, in the cache (up to `at`) and in `stretches`."""
    return stretches[0].stop if stretches and stretches[0].start <= at else at


def _to_root(node: Node) -> Iterator[Node]:
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent
