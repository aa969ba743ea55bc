"""The prefix tree, whose runs are claimed, released, pinned and evicted."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from .costs import UNMEASURED, Costs, Profile
from .device import DeviceCells
from .eviction import EvictionPolicy, count_use
from .host import Copies, HostMemory, PromptTree
from .radix import NO_TOKENS, Claim, Node, Section, Sequence, descendants, most_cached, path
from .reuse import Source
from .scope import Scope


class Pins:
    """The runs that clients have pinned, for some time or until they are unpinned. Pinned runs are evicted last.

    A pin never makes a request fail: if running requests need all cells, pinned runs are evicted, too.

    clock: returns the time in seconds, like `time.monotonic`.
    """

    def __init__(self, tree: PromptTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree, self._clock = tree, clock
        self._ends: list[tuple[float, int, Node]] = []  # (end of the pin, order, last node of the pinned path)
        self._count = itertools.count()

    def pin(self, scope: Scope, tokens: np.ndarray, seconds: float = math.inf) -> int:
        """Pin the cached runs of a prompt (int32) for `seconds` from now. Return how many tokens the pinned runs have."""
        until = self._clock() + seconds
        nodes = self._path_of(scope, tokens)
        for node in nodes:
            node.pinned_until = max(node.pinned_until, until)
            self._tree.pinned.add(node)
            self._tree.price(node)
        if nodes and until < math.inf:
            self._note_end(until, nodes[0])
        return sum(len(node.tokens) for node in nodes)

    def unpin(self, scope: Scope, tokens: np.ndarray) -> int:
        """Unpin a prompt's runs, except runs that another pinned prompt also has. Return the number of unpinned tokens."""
        released = 0
        for node in self._path_of(scope, tokens):
            if node.pinned_until and not any(child.pinned_until for child in node.children.values()):
                released += len(node.tokens)
                self._end(node)
        return released

    def expire(self) -> None:
        """End the pins whose time has passed."""
        while self._ends and self._ends[0][0] <= self._clock():
            until, _, last_node = heapq.heappop(self._ends)
            for node in path(last_node):
                if node.pinned_until and node.pinned_until <= until:
                    self._end(node)

    def runs(self) -> Iterator[Node]:
        """Iterate over the pinned runs."""
        return iter(self._tree.pinned)

    def _path_of(self, scope: Scope, tokens: np.ndarray) -> list[Node]:
        """Return the cached runs that lie wholly within a prompt, last one first."""
        match = self._tree.match(scope, tokens)
        return [node for node in path(match.node) if node.end <= match.length and node.is_cached]

    def _note_end(self, until: float, last_node: Node) -> None:
        """Keep an entry with the time at which a pin ends.

        When a pin is renewed or a pinned run is evicted, the pin's old entry stays. If there are too many entries, they are
        replaced by one entry for each run that is still pinned.
        """
        heapq.heappush(self._ends, (until, next(self._count), last_node))
        if len(self._ends) > 2 * len(self._tree.pinned) + 64:
            pinned = [node for node in self._tree.pinned if node.pinned_until < math.inf]
            self._ends = [(node.pinned_until, next(self._count), node) for node in pinned]
            heapq.heapify(self._ends)

    def _end(self, node: Node) -> None:
        node.pinned_until = 0.0
        self._tree.pinned.discard(node)
        self._tree.price(node)


# ---- The prefix tree: a radix tree over tokens that is the index of all KV, with a count of its cells. ------------------
#
# A slot is a place to run, not a cache: computed KV stays in the tree, in idle sequences, until cells run out and
# the leaf of the lowest priority is evicted. Sources: SGLang's radix attention; RAGCache, section 5.1 (knowledge tree);
# llama_cpp_ex ADR 007 (a slot's history outlives its request).


class OutOfSequences(RuntimeError):
    """Running requests use all sequence ids. The error shows a mistake in the program: the tree was made for fewer slots."""


class PrefixTree(PromptTree):
    """The tree of all cached KV. The tree finds, claims, releases and evicts runs.

    Each change adds memory operations to the next plan.

    device: the sequences and the cells.
    copies: saves runs to host memory, and restores them.
    num_sequences: the number of sequence ids, at least 2 * slots + 1.
    host: the host memory that evicted runs are moved to; None: evicted runs are lost.
    policy: decides the order in which runs are evicted from the device.
    """

    def __init__(
        self,
        num_cells: int,
        num_sequences: int = 256,
        host: HostMemory | None = None,
        policy: EvictionPolicy | None = None,
        profile: Profile | None = None,
        costs: Costs = UNMEASURED,
    ) -> None:
        super().__init__(costs, host or HostMemory(), profile or Profile(costs.chunk))
        self.device = DeviceCells(
            num_cells, num_sequences, self.host.offer, policy=policy or EvictionPolicy(), recompute_last=costs.recompute_last
        )
        self.copies = Copies(self.device, self.host, costs)
        self.num_evicted = 0  # tokens evicted from the device, ever
        self.num_uncopied = 0  # tokens evicted without a copy, since computing them again is faster

    def clear(self) -> None:
        """Forget everything, even in an inconsistent state. No cell, sequence or copy is in use afterwards."""
        super().clear()
        self.device.clear()

    def void(self) -> None:
        """Forget KV that only the device had, and operations that were never carried out. Finished copies stay.

        Afterwards no cell and no sequence is in use. `void` works even if the tree's counts of cells were wrong before.
        """
        self.device.clear()
        for node in [node for root in self.roots.values() for node in descendants(root)]:
            node.ready = node.in_use = 0
            node.sequences.clear()
        for node in self.without_copy():
            self._remove(node)
        self.roots = {scope: root for scope, root in self.roots.items() if root.children}
        self.host.recount()

    def claim(
        self,
        scope: Scope,
        tokens: np.ndarray,
        stops: Seq[int] = (),
        documents: Seq[tuple[str, int, int]] = (),
        counts_as_use: bool = True,
        sections: Seq[Section] = (),
        session: str = "",
    ) -> Claim:
        """Add a prompt's whole path to the tree, mark it as in use, and give it a sequence with the cached prefix.

        If an idle sequence is a prefix of the prompt, and none of its tokens have to be computed again, the request
        continues this sequence. If there is no such sequence, the request gets a new one, which shares the cells of the
        cached prefix (a fork).

        stops: ascending positions where nodes must end.
        documents: (key, start, stop) of each document.
        counts_as_use: whether the runs of the prompt count as used, see `Kind`.
        sections: the parts of the prompt that are computed and not moved from elsewhere; empty: the whole prompt.
        session: the name of the request's session; empty: none.

        Raises ValueError for a document outside the prompt, before anything changes, and OutOfSequences.
        """
        if not all(0 <= start <= stop <= len(tokens) for _, start, stop in documents):
            raise ValueError(f"documents at {[span for _, *span in documents]} of a prompt of {len(tokens)} tokens")
        self._clock += 1
        sections = sections or ((0, len(tokens)),)
        if counts_as_use:
            self._vacate(scope, tokens, sections)
        match = self.match(scope, tokens)
        cached = most_cached(sections, match.ready, self.recompute_last)
        idle = self.device.idle.get(match.ready_node)
        own = idle if idle and idle.length == match.ready == cached else None
        continues = match.length == match.node.end and not match.node.children
        ends = self.insert(self.root(scope), tokens, sorted({*stops, *(at for _, *span in documents for at in span)}))
        for key, start, stop in documents:
            ends[start].place(key, ends[stop])
        last_node = ends[len(tokens)]
        for node in (nodes := path(last_node)):
            self.device.begin_use(node)
        sequence = own or self._begin(last_node)
        sequence.sections = tuple(sections)
        self._count_use(nodes, session, continues=continues, counts_as_use=counts_as_use)
        if own is not None:
            self.device.resume(own, last_node)
        elif cached:
            self.device.share(sequence, cached)
        return Claim(sequence, cached, Source.OWN if own else Source.FORK if cached else Source.NONE)

    def release(self, sequence: Sequence, private: np.ndarray = NO_TOKENS, session: str = "") -> None:
        """End a request's use of `sequence`, which stays in the tree as an idle sequence.

        private: the generated tokens with KV (int32).
        session: as for `claim`.
        """
        self._clock += 1
        claimed = sequence.last_node
        for node in path(claimed):
            node.last_use = self._clock
            self.device.end_use(node)
        if len(private):
            sequence.last_node = self._descend(claimed, private)
            nodes = path(sequence.last_node, claimed.end)
            self.device.stretches.settle(sequence, nodes)
            self._count_use(nodes, session)
            self.device.advance(sequence, sequence.last_node.end)
        self._prune(sequence)
        self.device.keep_idle(sequence)

    def use(self, nodes: Iterable[Node], *, counts_as_use: bool = True, session: str = "") -> None:
        """Count a request's use of cached runs that are not on its path.

        The runs do not become in use: they may be evicted, since the request has copies of them.

        session: as for `claim`.
        """
        self._clock += 1
        used = list(nodes)
        for node in used:
            node.last_use = self._clock
        self._count_use(used, session, counts_as_use=counts_as_use)

    def evict(self, needed: int = 1, unused: bool = False) -> int:
        """Evict leaves, the one with the lowest priority first, until at least `needed` cells are freed.

        Return how many cells were freed. The result is less than `needed` if no more leaves can be evicted.

        unused: whether to evict only runs that no request has used and that another tier keeps.
        """
        take = partial(self.device.take_unused, self.host.keeps) if unused else self.device.take_leaf
        freed = 0
        while freed < needed and (leaf := take()):
            freed, parent = freed + leaf.ready, leaf.parent
            self._evict_from_device(leaf)
            self.copies.save_prefix(parent)
        self.num_evicted += freed
        return freed

    def price(self, node: Node, *, is_used: bool = True) -> None:
        self.device.touch(node)
        self.host.touch(node)

    def lose(self, node: Node) -> int:
        self.host.release(node)
        if node.ready:
            return 0
        self._remove(node)
        return len(node.tokens)

    def forget(self, scope: Scope) -> None:
        """Forget a scope and all its KV. No request of the scope may be running."""
        root = self.roots.pop(scope, None)
        nodes = list(descendants(root)) if root else []
        for sequence in {sequence for node in nodes for sequence in node.sequences}:
            assert not sequence.active
            self.device.drop(sequence)
        for node in nodes:
            self.device.count_ready(node, -node.ready)
            self.host.release(node)
        self.pinned.difference_update(nodes)

    def discard(self, nodes: Iterable[Node]) -> int:
        dropped = 0
        for node in nodes:
            if node.in_use or node.children:
                continue
            dropped += len(node.tokens)
            if node.ready:
                self._evict_from_device(node, keep=False)
            else:
                self._remove(node)
        return dropped

    def _vacate(self, scope: Scope, tokens: np.ndarray, sections: Seq[Section]) -> None:
        """A request will compute some cached tokens again. Free their cells, and the cells of all runs after them.

        The KV in these cells is moved to host memory. When the tokens are computed again, they get the same cells. In other
        cells, KV that is computed again would have other bits: kernels sum over cells in vectors, in an order that depends
        on the cells. Runs in use are not moved.
        """
        if self.recompute_last == 1 or not self.host.max_bytes:
            return
        if (at := most_cached(sections, ready := self.match(scope, tokens).ready, self.recompute_last)) == ready:
            return
        node = self._descend(self.roots[scope], tokens[:at]).children[int(tokens[at])]
        for run in [node, *descendants(node)][::-1]:
            if run.ready and not node.in_use:
                self._evict_from_device(run)

    def _begin(self, last_node: Node) -> Sequence:
        """Return a new sequence for the path to `last_node`, which is already in use.

        If no sequence id can be freed, remove the path and raise OutOfSequences.
        """
        while not self.device.num_free_ids:
            if not self.evict():
                for node in path(last_node):
                    self.device.end_use(node)
                self._prune(Sequence(-1, last_node))
                raise OutOfSequences("no sequence id is free and nothing can be evicted")
        return self.device.begin(last_node)

    def _count_use(self, nodes: list[Node], session: str, continues: bool = False, counts_as_use: bool = True) -> None:
        count_use(nodes, self.profile, continues=continues, counts_as_use=counts_as_use)
        for node in nodes:
            node.note_session(session)
            self.price(node)

    def _evict_from_device(self, leaf: Node, keep: bool = True) -> None:
        """Free a leaf's cells.

        keep: whether to move the run to host memory. If host memory does not take the run, the run is forgotten.
        """
        sequence = self.device.idle[leaf]
        saved = keep and self.copies.save(leaf, sequence)
        if keep and not saved:
            self.num_uncopied += 0 if not self.host.max_bytes or self.copies.pays(leaf) else leaf.ready
            self.host.count_lost(leaf, leaf.ready)
            for run in descendants(leaf):  # useless without the leaf
                self.host.count_lost(run, len(run.tokens))
        self.device.retreat(sequence, leaf)
        if not saved:
            self._remove(leaf)

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        self.device.split(upper, lower)
        return upper

    def _prune(self, sequence: Sequence) -> None:
        """Remove the part of a released path that was never computed, such as the rest of a cancelled request's prompt."""
        while (node := sequence.last_node).parent and not node.in_use and not node.children and not node.complete:
            if node.ready:
                node.tokens = node.tokens[: node.ready].copy()  # a copy, since a view would keep all tokens in memory
                self._unlink_document(node)
                break
            if node.copy is not None:
                break
            sequence.last_node = node.parent
            self._remove(node)
        for node in path(sequence.last_node):
            if 0 < node.ready < len(node.tokens) and not node.in_use:
                # All tokens of the run but the last were restored. The last one is in host memory, like the runs after it.
                self._split(node, node.ready)
                break
        while sequence.last_node.parent and sequence.last_node.start >= sequence.length:
            sequence.last_node = sequence.last_node.parent
