"""One step while it is planned: spans under a budget of tokens and of cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from .budget import chunk_size
from .cells import Cells
from .counters import Counters
from .hybrids.snapshots import Snapshots, next_stop
from .plan import Plan, Span
from .radix import NO_TOKENS
from .request import Request
from .separate.placing import fetch, place
from .separate.reading import note_read
from .tree import PrefixTree


class Step:
    """Requests and their spans, in the same order. It lives from one `plan()` to the next: `commit()` reads it.

    is_decode_turn: decode took a step of its own, since both together cost more; the next step is for prompts, if any wait.
    """

    def __init__(self, tree: PrefixTree, cells: Cells, snapshots: Snapshots, counters: Counters) -> None:
        self._tree, self._cells, self._snapshots, self._counters = tree, cells, snapshots, counters
        self.requests: list[Request] = []
        self.spans: list[Span] = []
        self.checked: list[tuple[Request, Span]] = []  # those with drafts, once they are computed
        self.num_tokens = 0
        self.is_decode_turn = False
        self._num_cells = 0  # cells of the spans, and of one token behind each prompt
        self._leaders: list[Request] = []  # requests that this step prefills, or would with more tokens or cells

    @property
    def adapters(self) -> str:
        """The LoRA adapters of its requests, which all have the same."""
        return self.requests[0].scope.adapters if self.requests else ""

    @property
    def background(self) -> bool:
        """Whether no client waits for its results."""
        return all(request.background for request in self.requests)

    @property
    def have_read(self) -> list[Request]:
        """Return the requests that have read a document for their prompt to its end."""
        return [one for one in self.requests if one.is_reading and one.computed == one.num_tokens]

    def decode(self, requests: Iterable[Request], drafts: Sequence[np.ndarray] = ()) -> None:
        """Add the last token of each request, and its draft. Their cells are free. drafts: of each request, or none."""
        for request, draft in zip(requests, drafts or repeat(NO_TOKENS), strict=False):
            self._add(request, 1, draft)

    def prefill(self, requests: Iterable[Request], num_tokens: int) -> None:
        """Add as much of the prompts as `num_tokens` and the cells allow, in the order in which they are due.

        A prompt is due when as many prompt tokens have been computed since its admission as it lacked then: a short one
        passes a long one, and none that comes later passes one that is due (fair queueing, Demers et al. 1989).
        Tokens that a grammar forced on an answer go before all prompts: a stream waits for them.
        """
        for request in sorted(requests, key=lambda request: (not request.answering, -request.priority, request.due)):
            self._catch_up(request)
            if self._follows_a_leader(request):
                continue
            self._leaders.append(request)
            if size := self._size(request, num_tokens):
                self._add(request, size)
                self._num_cells += 1
                num_tokens -= size

    def commit(self, plan: Plan, sampled: Iterable[int]) -> list[tuple[Request, int]]:
        """Take over the results: see `Scheduler.commit`."""
        self._counters.count_step(len(plan.spans))
        tokens = iter(sampled)
        progress = []
        for request, span in zip(self.requests, plan.spans, strict=True):
            request.computed = span.stop - span.drafted
            if span.drafted and request.draft is not None:
                request.draft.num_drafted += span.drafted
                self._counters.count_draft(span.drafted)
                self.checked.append((request, span))
            if request.sequence is not None and request.sequence.length < request.claimed:
                self._tree.ledger.advance(request.sequence, min(span.stop, request.claimed))
                if request.background:
                    self._counters.idle_tokens += len(span.tokens)
                else:
                    self._counters.prefilled_tokens += len(span.tokens)
            if request.is_reading:
                note_read(self._tree, request, span)
            if request.snapshot_scope is not None and request.computed in request.stops:
                self._snapshots.take(request)
            if span.logits:
                token = next(tokens)
                request.append(token)
                self._counters.generated_tokens += not request.background
                progress.append((request, token))
        return progress

    def _catch_up(self, request: Request) -> None:
        """Share KV of this request's prompt that other requests have computed since its last span."""
        assert request.sequence is not None
        if request.snapshot_scope is not None:
            has_room = self._cells.reserve(self._num_cells + request.num_tokens - request.computed)
            source, gained = "snapshot", self._snapshots.load(request) if has_room else 0
        else:
            source, gained = "fork", self._tree.ledger.catch_up(request.sequence)
        if gained:
            self._counters.count_cached(request, source, gained)
            request.computed += gained
        if place(self._tree, self._cells, self._counters, request, spans=self._num_cells):
            fetch(self._tree, self._cells, self._counters, request, spans=self._num_cells)
            request.computed = request.sequence.length

    def _follows_a_leader(self, request: Request) -> bool:
        """Return whether this step computes the next tokens of this request for another one."""
        return any(request.waits_for(leader, self._tree.costs.min_shared) for leader in self._leaders)

    def _size(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens of a prompt to compute: at most `num_tokens`, up to its next snapshot, if cells allow."""
        costs = self._tree.costs
        most = min(num_tokens, self._background_size(request.computed)) if request.background else num_tokens
        assert request.layout is not None
        if request.layout.moved_at(request.computed) is not None:
            return 0  # no cells are free for the document that is to be moved here
        stop = next_stop(request.stops, request.computed) or request.num_tokens
        size = chunk_size(stop - request.computed, most, costs)
        if size > 0 and not self._cells.reserve(self._num_cells + size):
            size = self._cells.num_free - self._num_cells
        return max(size, 0)

    def _background_size(self, cached: int) -> int:
        """Return the most tokens of a background step: more where they are done before a new request waits long."""
        costs = self._tree.costs
        return max(costs.background_step, self._tree.profile.tokens_within(costs.background_ns / 1e9, cached))

    def _add(self, request: Request, size: int, draft: np.ndarray = NO_TOKENS) -> None:
        assert request.sequence is not None
        start, stop = request.computed, request.computed + size
        tokens, is_last = request.ids(start, stop), stop == request.num_tokens and not request.is_reading
        if len(draft):
            tokens, size = np.concatenate((tokens, draft)), size + len(draft)
        self.spans.append(Span(request.id, request.sequence.id, start, tokens, logits=is_last, drafted=len(draft)))
        self.requests.append(request)
        self.num_tokens += size
        self._num_cells += size


def in_turn(running: Sequence[Request], last: str, *, decoding: bool) -> list[Request]:
    """Return the running requests that may share the next step: those of one set of LoRA adapters.

    A context computes with one set at a time. Of several, the turn is that of the set after `last`, the last step's.
    decoding: those that decode; else those with a prompt to compute.
    """
    sets = list(dict.fromkeys([request.scope.adapters for request in running]))
    turn = sets[(sets.index(last) + 1) % len(sets)] if last in sets else next(iter(sets), "")
    return [request for request in running if request.decoding is decoding and request.scope.adapters == turn]
