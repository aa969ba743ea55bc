"""The prefix tree: one radix tree over tokens that is the index of everything that has KV, and the ledger of its cells.

A slot is an execution lane, not a cache: what was computed stays here, held by parked sequences, until cells run out and
the leaf that is worth least leaves. Sources: SGLang's radix attention; RAGCache, section 5.1 (knowledge tree); llama_cpp_ex
ADR 007 (a slot's history outlives its request).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from .costs import UNMEASURED, Costs
from .eviction import EvictionPolicy
from .ledger import Ledger
from .node import Claim, Node, Sequence
from .profile import Profile
from .radix import NO_TOKENS, RadixTree, descendants, path
from .scope import Scope
from .tiers.copies import Copies
from .tiers.host import HostTier


class OutOfSequences(RuntimeError):
    """Every sequence id is in use by a running request: a programmer's error (more lanes than the tree was made for)."""


class PrefixTree(RadixTree):
    """Asks are `match` and the counters; acts are `claim`, `release`, `evict`, `forget`, and those of its parts.

    Acts decide memory operations; the scheduler takes them from the ledger into the next plan, where they run before
    anything is computed. ledger: which sequence holds what in which cells. copies: what moves to host memory and back.

    num_cells: KV cells in the pool. num_sequences: sequence ids, at least 2 * lanes + 1. host: where evicted runs go;
    without one they are lost. replacement: which runs leave the device first. profile: what it costs to compute a run
    again. costs: of this device. Their `rest` is how many of a prompt's last tokens are computed, even if all are cached:
    one, since without it there are no logits, or more, where a few tokens alone would be rounded otherwise.
    """

    def __init__(
        self,
        num_cells: int,
        num_sequences: int = 256,
        host: HostTier | None = None,
        policy: EvictionPolicy | None = None,
        profile: Profile | None = None,
        costs: Costs = UNMEASURED,
    ) -> None:
        super().__init__()
        self.host = host or HostTier()
        self.costs, self.rest = costs, costs.rest
        self.ledger = Ledger(num_cells, num_sequences, self.host, policy=policy or EvictionPolicy(), rest=self.rest)
        self.copies = Copies(self.ledger, self.host, self.rest, self._remove)
        self.profile = profile or Profile(costs.chunk)
        self.pinned: set[Node] = set()  # runs that a client asked to keep
        self.num_evicted = 0  # tokens that left the device, ever

    def clear(self) -> None:
        """Forget everything, even what is inconsistent: no cell, sequence or copy is in use then."""
        self.roots, self.pinned = {}, set()
        self.ledger.clear()
        self.host.clear()

    # ---- act -------------------------------------------------------------------------------------------------------

    def claim(
        self,
        scope: Scope,
        tokens: np.ndarray,
        stops: Seq[int] = (),
        documents: Seq[tuple[str, int, int]] = (),
        guess: bool = False,
    ) -> Claim:
        """Put a prompt's whole path into the tree, pinned, and give it a sequence that holds what is already computed.

        stops: positions where nodes must end (segment boundaries), ascending. documents: (key, start, stop) of each one.
        guess: nobody has asked for it yet, so nothing counts as used. The last `rest` tokens are never taken from the
        cache. A parked sequence whose whole history is a prefix of the prompt is continued in place; any other match is
        forked, its donor untouched.

        Raises OutOfSequences, and ValueError for a document outside the prompt; the tree is as before then.
        """
        if not all(0 <= start <= stop <= len(tokens) for _, start, stop in documents):
            raise ValueError(f"documents at {[span for _, *span in documents]} of a prompt of {len(tokens)} tokens")
        self._clock += 1
        if not guess:
            self._vacate(scope, tokens)
        match = self.match(scope, tokens)
        cached = min(match.ready, self.ledger.most_cached(len(tokens)))
        parked = self.ledger.parked.get(match.ready_node)
        own = parked if parked and parked.length == match.ready == cached else None
        goes_on = match.length == match.node.end and not match.node.children
        ends = self.insert(self.root(scope), tokens, sorted({*stops, *(at for _, *span in documents for at in span)}))
        for key, start, stop in documents:
            ends[start].place(key, ends[stop])
        tip = ends[len(tokens)]
        for node in path(tip):
            self.ledger.begin_use(node)
        sequence = own or self._begin(tip)
        self._count_use(tip, goes_on=goes_on, guess=guess)
        if own is not None:
            self.ledger.resume(own, tip)
        elif cached:
            self.ledger.share(sequence, cached)
        return Claim(sequence, cached, "own" if own else "fork" if cached else "none")

    def release(self, sequence: Sequence, tail: np.ndarray = NO_TOKENS) -> None:
        """A request is done with `sequence`, which stays parked. tail: the generated tokens that have KV (int32)."""
        self._clock += 1
        claimed = sequence.tip
        for node in path(claimed):
            node.last_use = self._clock
            self.ledger.end_use(node)
        if len(tail):
            sequence.tip = self._descend(sequence.tip, tail)
            self._count_use(sequence.tip, above=claimed)
            self.ledger.advance(sequence, sequence.tip.end)
        self._prune(sequence)
        self.ledger.park(sequence)

    def evict(self, needed: int = 1) -> int:
        """Free at least so many cells, leaf by leaf, the one of the lowest priority first; how many were freed.

        Fewer where running requests need all that is left. A leaf that has left may make its parent the next one.
        """
        freed = 0
        while freed < needed and (leaf := self.ledger.take_leaf()):
            freed += leaf.ready
            self._leave_device(leaf)
        self.num_evicted += freed
        return freed

    def price(self, node: Node) -> None:
        """A node was used, or is held, or is not any longer: what it is worth to its tiers, as of now."""
        self.ledger.touch(node)
        self.host.touch(node)

    def forget(self, scope: Scope) -> None:
        """Drop a scope and all it holds. None of its requests may be running."""
        root = self.roots.pop(scope, None)
        if root is None:
            return
        nodes = list(descendants(root))
        for sequence in {sequence for node in nodes for sequence in node.sequences}:
            assert not sequence.active
            self.ledger.drop(sequence)
        for node in nodes:
            self.ledger.count_ready(node, -node.ready)
            self.host.drop(node)
        self.pinned.difference_update(nodes)

    def drop(self, scope: Scope) -> int:
        """Forget what a scope holds and no running request needs, on every tier; how many tokens that were."""
        root = self.roots.get(scope)
        return self.discard(list(descendants(root))[::-1] if root else [])

    def discard(self, nodes: Iterable[Node]) -> int:
        """Forget those of these runs, deepest first, that nothing stands behind and no running request needs."""
        dropped = 0
        for node in nodes:
            if node.in_use or node.children:
                continue
            dropped += len(node.tokens)
            if node.ready:
                self._leave_device(node, keep=False)
            else:
                self._remove(node)
        return dropped

    # ---- how -------------------------------------------------------------------------------------------------------

    def _vacate(self, scope: Scope, tokens: np.ndarray) -> None:
        """Move the prompt's last `rest` tokens to host memory if idle sequences hold them, with all that follows them.

        Their second computation gets the same cells then. Kernels add up cells in vectors: in other cells, in another order.
        """
        at = self.ledger.most_cached(len(tokens))
        if self.rest == 1 or not self.host.max_tokens or self.match(scope, tokens).ready <= at:
            return
        node = self._descend(self.roots[scope], tokens[:at]).children[int(tokens[at])]
        for run in [node, *descendants(node)][::-1]:
            if run.ready and not node.in_use:
                self._leave_device(run)

    def _begin(self, tip: Node) -> Sequence:
        """A new sequence for the pinned path to `tip`, which goes again where no id is to be had."""
        while not self.ledger.num_free_ids:
            if not self.evict():
                for node in path(tip):
                    self.ledger.end_use(node)
                self._prune(Sequence(-1, tip))
                raise OutOfSequences("no sequence id is free and nothing can be evicted")
        return self.ledger.begin(tip)

    def _count_use(self, tip: Node, above: Node | None = None, goes_on: bool = False, guess: bool = False) -> None:
        """A request uses the path to `tip`, from behind the node `above`: frequencies, costs, priorities.

        goes_on: it goes on with an earlier one, whose use of the same runs is not another one: a conversation of many
        turns does not make its history dearer to others.
        """
        nodes = list(itertools.takewhile(lambda node: node is not above, path(tip)))
        missing = [node for node in nodes if not node.is_cached]
        new = sum(len(node.tokens) for node in missing)
        each = self.profile.seconds(tip.end - new, new) / max(new, 1)
        for node in missing:
            node.missed(each)
        for node in nodes:
            node.frequency += not (guess or (goes_on and node.frequency))
            self.price(node)

    def _leave_device(self, leaf: Node, keep: bool = True) -> None:
        """Free a parked leaf's cells; its sequence lives on at the parent if needed.

        keep: saved if the host tier takes it. If not, or if it does not, the run is forgotten.
        """
        sequence = self.ledger.parked[leaf]
        saved = keep and self.copies.save(leaf, sequence)
        self.ledger.retreat(sequence, leaf)
        if not saved:
            self._remove(leaf)

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        self.host.split(upper, lower)
        self.ledger.split(upper, lower)
        if lower.pinned_until:
            self.pinned.add(upper)
        return upper

    def _prune(self, sequence: Sequence) -> None:
        """Take away what nobody has computed and nobody will: the rest of a cancelled request's path."""
        while (node := sequence.tip).parent and not node.in_use and not node.children and not node.complete:
            if node.ready:
                node.tokens = node.tokens[: node.ready]
                self._unlink_document(node)
                break
            if node.blob is not None:
                break
            sequence.tip = node.parent
            self._remove(node)
        for node in path(sequence.tip):
            if 0 < node.ready < len(node.tokens) and not node.in_use:
                # Restored but for its last token, in front of what is still in host memory: so is what is left of it.
                self._split(node, node.ready)
                break
        while sequence.tip.parent and sequence.tip.start >= sequence.length:
            sequence.tip = sequence.tip.parent

    def _remove(self, node: Node) -> None:
        """Take a node out of the tree with whatever is only in host memory behind it."""
        for run in [node, *descendants(node)][::-1]:
            self.host.drop(run)
            self.pinned.discard(run)
            self._unlink(run)
