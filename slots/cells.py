"""Admission: whether requests fit the device, and which KV is evicted for them.

    |<------------------------------ num_cells ------------------------------>|
    |<---------------- num_used ---------------->|<-------- num_free -------->|
    | prefix tree             | private tokens   | promised      | unclaimed  |
    | in use   | idle KV      | generated tokens | to prompts    |            |

A run is in use while it is on the path of a running request. Idle KV belongs to idle sequences alone. It is reclaimable,
and nothing else is ever evicted. Private tokens are generated tokens: they belong to their request, and enter the tree
when the request ends. Promised cells are free now, but running requests will fill them with the rest of their prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from .device import DeviceCells
from .host import PromptTree
from .job import Job
from .plan import Span, Trim
from .prefix_tree import PrefixTree
from .request import Layout, Prompt
from .scope import Scope
from .swap import USUAL_ANSWER, Swap


class Cells:
    """Decides whether a prompt fits, and frees cells for it.

    index: the tree that prompts are matched against.
    running: the scheduler's list of running requests.
    idle_cells: most cells of idle KV while requests run, if host memory takes the rest. Every step attends over the whole
        pool, so idle cells cost time.
    swap: moves KV to host memory for the time of a step.
    """

    def __init__(self, tree: PrefixTree, index: PromptTree, running: Collection[Job], idle_cells: int) -> None:
        self._index = index
        self._tree, self._running, self._idle_cells = tree, running, idle_cells
        self.swap = Swap(tree, running)

    @property
    def num_used(self) -> int:
        return self.swap.num_used

    @property
    def num_free(self) -> int:
        return self._tree.device.num_cells - self.num_used

    def fits(self, job: Job, waiting: Iterable[Job] = ()) -> bool:
        """Return whether a prompt fits in addition to running requests and their promised cells.

        The server accepts only prompts that fit alone.

        waiting: the other waiting requests, which may also keep KV outside the cells (`Strategy.has_room`).
        """
        tree = self._tree
        if not self._running:
            return True
        if not job.strategy.has_room(job, chain(self._running, waiting)):
            return False
        match = tree.match(job.request.scope, job.tokens[: job.num_tokens])
        reclaimable = tree.device.num_reclaimable - match.evictable
        # The next token of each running request, and the cached part of this prompt's last tokens, which is computed again.
        promised = tree.device.num_pending + len(self._running) + tree.recompute_last - 1
        return job.num_tokens - match.covered + promised < self.num_free + reclaimable

    def num_missing(self, job: Job) -> int:
        """Return how many tokens a waiting request, which is laid out, would have to compute if it started now."""
        request, layout, index = job.request, job.layout, self._index
        scope, tokens = request.index_scope, layout.tokens
        reused = min(index.reusable(scope, tokens), index.num_cached(scope, tokens))
        return len(tokens) - reused - layout.num_placed(self._tree, request.scope, reused)

    def forecast(self, prompt: Prompt, scope: Scope) -> tuple[int, bool]:
        """Return how many tokens a background request would compute, and whether the cells for them are free."""
        layout = prompt.arrange(self._index, scope)
        reused = self._index.reusable(scope, layout.tokens)
        missing = len(layout.tokens) - reused - layout.num_placed(self._tree, scope, reused)
        return missing, self._fits_free(layout, scope)

    def _fits_free(self, layout: Layout, scope: Scope) -> bool:
        """Return whether enough cells are free for the tokens of a prompt that have no KV."""
        return len(layout.tokens) - self._tree.match(scope, layout.tokens).ready <= self.num_free

    def make_room(self, prompt: Prompt, scope: Scope) -> bool:
        """Save idle KV to host memory. Return whether cells, a sequence and host memory are free for a prefetch.

        Unused runs that another tier keeps are evicted until `idle_cells` idle cells are left, because the prefetch attends
        over the whole pool, too. More of these runs are evicted if the prefetch needs their cells. Host memory evicts copies
        that a lower tier also has; this comes last, since idle runs without a copy would be saved again. A prefetch evicts
        no other KV.
        """
        tree = self._tree
        missing, _ = self.forecast(prompt, scope)
        while tree.copies.save_ahead():
            pass
        if not missing:
            return True
        tree.evict(tree.device.num_reclaimable - self._idle_cells, unused=True)
        while not (tree.device.num_free_ids and self._fits_free(prompt.arrange(self._index, scope), scope)):
            if not tree.evict(unused=True):
                return False
        return tree.copies.make_room(self._index.host, missing)

    def reserve(self, num_cells: int) -> bool:
        """Evict idle KV until `num_cells` cells are free; return False if there is too little idle KV."""
        missing = num_cells - self.num_free
        return missing <= 0 or self._tree.evict(missing) >= missing

    def offload_idle(self, job: Job) -> None:
        """Move idle KV to host memory until `idle_cells` are left, since each step attends over the whole pool.

        The idle KV stays if its move would not make this request faster. The request's path is already claimed.
        """
        tree, sequence = self._tree, job.sequence
        excess = tree.device.num_reclaimable - self._idle_cells
        if tree.host.max_bytes and sequence is not None and excess > 0:
            left = job.num_tokens - sequence.length - tree.copies.restorable(sequence)
            if tree.costs.pays_to_offload(left, min(job.request.limit, USUAL_ANSWER)):
                tree.evict(excess)
        self.swap.bound_cells(job)


def cut(job: Job, span: Span, device: DeviceCells) -> None:
    """Free the cells of a span's rejected tokens."""
    if job.computed < span.stop:
        device.perform(Trim(span.sequence, job.computed, span.stop))
