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
from .eviction import Replacement
from .node import Claim, Node, Sequence
from .plan import Share, Trim
from .profile import Profile
from .radix import NO_TOKENS, Match, descendants, path
from .scope import Scope
from .tiers.copies import Copies
from .tiers.host import HostTier
from .tiers.restoring import restores


class OutOfSequences(RuntimeError):
    """Every sequence id is in use by a running request: a programmer's error (more lanes than the tree was made for)."""


class PrefixTree(Copies):
    """Asks are `match` and the counters; acts are `claim`, `restore`, `advance`, `catch_up`, `release`, `evict`, `forget`.

    Acts decide memory operations; the scheduler takes them with `take_operations()` into the next plan, where they run
    before anything is computed. num_cells: KV cells in the pool. num_sequences: sequence ids, at least 2 * lanes + 1.
    host: where evicted runs go; without one they are lost. replacement: which runs leave the device first. profile: what
    it costs to compute a run again. costs: of this device. Their `rest` is how many of a prompt's last tokens are computed,
    whatever is cached: one, since without it there are no logits, or more, where a few tokens alone would be rounded
    otherwise than among others.
    """

    def __init__(
        self,
        num_cells: int,
        num_sequences: int = 256,
        host: HostTier | None = None,
        replacement: Replacement | None = None,
        profile: Profile | None = None,
        costs: Costs = UNMEASURED,
    ) -> None:
        super().__init__(num_cells, num_sequences, host)
        self.num_evicted = 0  # tokens that left the device, ever
        self.costs = costs
        self.profile = profile or Profile(costs.chunk)
        self.rest = costs.rest
        self._replacement = replacement or Replacement()

    def most_cached(self, num_tokens: int) -> int:
        """How much of a prompt may come from the cache."""
        return max(num_tokens - self.rest, 0)

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
        cached = min(match.ready, self.most_cached(len(tokens)))
        own = self._continued(match, cached)
        goes_on = match.length == match.node.end and not match.node.children
        root = self.root(scope)
        ends = self.insert(root, tokens, sorted({*stops, *(at for _, *span in documents for at in span)}))
        for key, start, stop in documents:
            ends[start].place(key, ends[stop])
        tip = ends[len(tokens)]
        for node in path(tip):
            self._pin(node)
        sequence = own or self._new_sequence(tip)
        self._count_use(tip, goes_on=goes_on, guess=guess)
        if own is not None:
            del self.parked[own.tip]
            own.tip, own.active = tip, True
            return Claim(own, cached, "own")
        if cached:
            self._share(sequence, cached)
        return Claim(sequence, cached, "fork" if cached else "none")

    def restorable(self, sequence: Sequence) -> int:
        """How many tokens, and so free cells, `restore` would bring back."""
        return sum(restore.stop - restore.start for restore, _ in restores(sequence, self.rest))

    def restore(self, sequence: Sequence) -> dict[str, int]:
        """Bring back from host memory what follows on the sequence's path, up to its last `rest` tokens.

        How many tokens, by where their copies came from (host, disk).
        """
        restored: dict[str, int] = {}
        for restore, nodes in restores(sequence, self.rest):
            source, size = restore.blob.source, restore.stop - restore.start
            restored[source] = restored.get(source, 0) + size
            self._operations.append(restore)
            for node in nodes:
                self._count_ready(node, min(node.end, restore.stop) - node.start)
                node.sequences.add(sequence)
            sequence.length = restore.stop
        self.host.num_restored += sum(restored.values())
        return restored

    def catch_up(self, sequence: Sequence) -> int:
        """Share what others have computed on this sequence's path since; how many tokens that was."""
        node = next((node for node in path(sequence.tip) if node.ready), None)
        upto = min(node.start + node.ready, self.most_cached(sequence.tip.end)) if node else 0
        gained = upto - sequence.length
        if gained > 0:
            self._share(sequence, upto)
        return max(gained, 0)

    def advance(self, sequence: Sequence, stop: int) -> None:
        """`sequence` has computed its path up to position `stop`.

        Where somebody else has the same tokens already, its own cells are given back and theirs shared: a token's KV
        stands in one cell only.
        """
        for node in path(sequence.tip):
            if node.end <= sequence.length:
                break
            fresh = min(stop, node.end) - node.start
            if fresh <= 0:
                continue
            computed_from = max(sequence.length - node.start, 0)
            twice = min(node.ready, fresh)
            if twice > computed_from:
                holder, start, end = node.longest_holder(), node.start + computed_from, node.start + twice
                self._operations += [Trim(sequence.id, start, end), Share(holder.id, sequence.id, start, end)]
            self._count_ready(node, max(fresh - node.ready, 0))
            node.sequences.add(sequence)
        sequence.length = stop

    def release(self, sequence: Sequence, tail: np.ndarray = NO_TOKENS) -> None:
        """A request is done with `sequence`, which stays parked. tail: the generated tokens that have KV (int32)."""
        self._clock += 1
        claimed = sequence.tip
        for node in path(claimed):
            self._unpin(node)
        if len(tail):
            sequence.tip = self._descend(sequence.tip, tail)
            self._count_use(sequence.tip, above=claimed)
            self.advance(sequence, sequence.tip.end)
        self._prune(sequence)
        sequence.active = False
        self._drop_covered(sequence.tip)
        self._park(sequence)

    def evict(self) -> bool:
        """Free the cells of the leaf of the lowest priority; False when running requests need all that is left."""
        leaves = (node for node in self.parked if not node.pins and not any(c.ready for c in node.children.values()))
        leaf = min(leaves, key=lambda node: node.priority, default=None)
        if leaf is None:
            return False
        self._replacement.left(leaf.priority)
        self.num_evicted += leaf.ready
        self._leave_device(leaf)
        return True

    def price(self, node: Node) -> None:
        """A node was used, or is held, or is not any longer: what it is worth to its tiers, as of now."""
        node.priority = self._replacement.priority(node)
        self.host.touch(node)

    def forget(self, scope: Scope) -> None:
        """Drop a scope and all it holds. None of its requests may be running."""
        root = self.roots.pop(scope, None)
        if root is None:
            return
        nodes = list(descendants(root))
        for sequence in {sequence for node in nodes for sequence in node.sequences}:
            del self.parked[sequence.tip]
            self._drop(sequence)
        for node in nodes:
            self._count_ready(node, -node.ready)
            self.host.drop(node)
        self.held.difference_update(nodes)

    def drop(self, scope: Scope) -> int:
        """Forget what a scope holds and no running request needs, on every tier; how many tokens that were."""
        root = self.roots.get(scope)
        return self.discard(list(descendants(root))[::-1] if root else [])

    def discard(self, nodes: Iterable[Node]) -> int:
        """Forget those of these runs, deepest first, that nothing stands behind and no running request needs."""
        dropped = 0
        for node in nodes:
            if node.pins or node.children:
                continue
            dropped += len(node.tokens)
            if node.ready:
                self._leave_device(node, keep=False)
            else:
                self._unlink_all(node)
        return dropped

    # ---- how -------------------------------------------------------------------------------------------------------

    def _vacate(self, scope: Scope, tokens: np.ndarray) -> None:
        """Move the prompt's last `rest` tokens to host memory if idle sequences hold them, with all that follows them.

        Their second computation gets the same cells then. Kernels add up cells in vectors: in other cells, in another order.
        """
        at = self.most_cached(len(tokens))
        if self.rest == 1 or not self.host.max_tokens or self.match(scope, tokens).ready <= at:
            return
        node = self._descend(self.roots[scope], tokens[:at]).children[int(tokens[at])]
        for run in [node, *descendants(node)][::-1]:
            if run.ready and not node.pins:
                self._leave_device(run)

    def _continued(self, match: Match, cached: int) -> Sequence | None:
        """The parked sequence whose whole history the prompt continues, if there is one."""
        own = self.parked.get(match.ready_node)
        return own if own and own.length == match.ready == cached else None

    def _new_sequence(self, tip: Node) -> Sequence:
        """One for the pinned path to `tip`, which goes again where no id is to be had."""
        sequence = Sequence(-1, tip)
        while not self._free_ids:
            if not self.evict():
                for node in path(tip):
                    self._unpin(node)
                self._prune(sequence)
                raise OutOfSequences("no sequence id is free and nothing can be evicted")
        sequence.id = self._free_ids.pop()
        return sequence

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
        sequence = self.parked.pop(leaf)
        parent = leaf.parent
        assert parent is not None and leaf.sequences == {sequence}
        saved = keep and self._save(leaf, sequence)
        self._count_ready(leaf, -leaf.ready)
        leaf.sequences.clear()
        if not saved:
            self._unlink_all(leaf)
        sequence.tip = parent
        self._operations.append(Trim(sequence.id, leaf.start, sequence.length))
        sequence.length = leaf.start
        self._drop_covered(parent)
        self._park(sequence)
