"""Admission: whether requests fit the device, and which KV is evicted for them.

    |<------------------------------ num_cells ------------------------------>|
    |<---------------- num_used ---------------->|<-------- num_free -------->|
    | prefix tree             | private tokens   | promised      | unclaimed  |
    | in use   | idle KV      |                  |               |            |

A run is in use while it is on the path of a running request. All other KV in the tree is idle: only idle sequences hold it.
Idle KV can be evicted, and no other KV is ever evicted. Private tokens are generated tokens with KV. Private tokens belong
to their request, and join the tree when the request ends. Promised cells are still free, but running requests will fill them
with the rest of their prompts.
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
    idle_cells: how many cells of idle KV may stay on the device when a request starts. More idle KV than that is moved to
        host memory if this makes the request faster, because every step attends over the whole pool, idle cells included.
    swap: moves the KV of other requests to host memory during a step.
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
        """Return whether the device has room for a prompt besides the running requests and the cells promised to them.

        If no request runs, the result is True: the server accepts only prompts that fit into an empty device.

        waiting: the other waiting requests. Waiting requests, too, may keep KV outside the cells (`Strategy.has_room`).
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
        """Return how many tokens a waiting request would have to compute if it started now. The request must be laid out."""
        request, layout, index = job.request, job.layout, self._index
        scope, tokens = request.index_scope, layout.tokens
        reused = min(index.reusable(scope, tokens), index.num_cached(scope, tokens))
        return len(tokens) - reused - layout.num_placed(self._tree, request.scope, reused)

    def forecast(self, prompt: Prompt, scope: Scope) -> tuple[int, bool]:
        """Return how many tokens a background request would compute, and whether enough cells are free for its prompt."""
        layout = prompt.arrange(self._index, scope)
        reused = self._index.reusable(scope, layout.tokens)
        missing = len(layout.tokens) - reused - layout.num_placed(self._tree, scope, reused)
        return missing, self._fits_free(layout, scope)

    def _fits_free(self, layout: Layout, scope: Scope) -> bool:
        """Return whether enough cells are free for those tokens of a prompt that have no KV on the device."""
        return len(layout.tokens) - self._tree.match(scope, layout.tokens).ready <= self.num_free

    def make_room(self, prompt: Prompt, scope: Scope) -> bool:
        """Save idle KV to host memory, and free cells for a prefetch. Return whether the prefetch may start.

        The prefetch may start if enough cells, a sequence id and room in host memory are free. To free cells, this method
        evicts only runs that no request has used and that another tier keeps. Runs are evicted until `idle_cells` idle cells
        are left, because the prefetch attends over the whole pool, and then until the prefetch has enough cells. To free
        host memory, this method evicts only copies that a lower tier also has. This comes last: otherwise idle runs would be
        saved into the room that it frees.
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
        """Evict idle KV until `num_cells` cells are free.

        Return False if there is too little idle KV to free so many cells.
        """
        missing = num_cells - self.num_free
        return missing <= 0 or self._tree.evict(missing) >= missing

    def offload_idle(self, job: Job) -> None:
        """Move idle KV to host memory until `idle_cells` idle cells are left, if this makes a starting request faster.

        Each step of the request attends over the whole pool, idle cells included. The request must have claimed its path
        before, so that its own cached KV is in use and stays.
        """
        tree, sequence = self._tree, job.sequence
        excess = tree.device.num_reclaimable - self._idle_cells
        if tree.host.max_bytes and sequence is not None and excess > 0:
            left = job.num_tokens - sequence.length - tree.copies.restorable(sequence)
            if tree.costs.pays_to_offload(left, min(job.request.limit, USUAL_ANSWER)):
                tree.evict(excess)
        self.swap.bound_cells(job)


def cut(job: Job, span: Span, device: DeviceCells) -> None:
    """Free the cells of a span's rejected draft tokens."""
    if job.computed < span.stop:
        device.perform(Trim(span.sequence, job.computed, span.stop))
