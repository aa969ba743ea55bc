"""Host memory: copies of the runs and recurrent states of a tree, within one budget of bytes.

A run is saved only once: its copy stays when the run is restored, so the run's next eviction from the device costs nothing
(RAGCache, section 5.1, swap-out-only-once). When the budget is full, the copy with the lowest priority is evicted. A copy of
a run cannot be evicted while copies of later runs follow it on its path.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from .costs import GUESSED_NS, Costs, Profile
from .device import DeviceCells
from .eviction import Candidates, EvictionPolicy
from .plan import HostCopy, Restore, Save
from .radix import CopySizes, Match, Node, RadixTree, Root, Sequence, descendants, path, scope_of, upward
from .record import Cut, Record, file_name
from .reuse import Source
from .scope import Scope

BY_TOKEN = CopySizes(run_token=1)
"""Sizes for a budget that counts tokens: each token of a run takes one byte."""
MOST_PASSED = 32  # copies that a search skips on its way to one that a lower tier also has


class Below(Protocol):
    """What host memory needs to know about the lower tiers."""

    def has_accepted(self, key: str) -> bool:
        """Return whether a lower tier has written a record, or is about to write it."""
        ...

    def has_written(self, key: str) -> bool:
        """Return whether a lower tier has written a record: the copy in host memory can then be evicted without loss."""
        ...

    def takes(self, num_bytes: int) -> bool:
        """Return whether a lower tier would accept `num_bytes` bytes now."""
        ...


class Nothing:
    """Stands for the lower tiers of a server that has none."""

    def has_accepted(self, key: str) -> bool:
        return False

    def has_written(self, key: str) -> bool:
        return False

    def takes(self, num_bytes: int) -> bool:
        return False


class HostMemory:
    """Keeps copies of a tree's runs, and of the recurrent states at their ends, within a budget of bytes.

    max_bytes: the budget; 0: nothing is copied.
    policy: decides the order of eviction.
    cut: returns a part of a run's copy.
    lent: how many bytes the KV that is swapped out during a step may take, whatever the budget is.
    """

    index: PromptTree  # set by the tree itself, which knows the runs that are useless without an evicted copy

    def __init__(
        self,
        max_bytes: int = 0,
        policy: EvictionPolicy | None = None,
        *,
        sizes: CopySizes = BY_TOKEN,
        cut: Cut = lambda run, start, stop: run,
        lent: int = 0,
    ) -> None:
        self.max_bytes, self.sizes, self._cut, self._lent = max_bytes, sizes, cut, lent
        self.num_bytes = 0
        self.num_tokens = 0  # of all copies of runs
        self.num_states = 0
        self.overdraft = 0  # bytes beyond the budget, on their way to cells or to a lower tier
        self.num_aside = 0  # bytes beside the copies: fetched records that follow a hole
        self.num_lost = 0  # tokens whose KV was evicted from the last tier that had it, ever
        self._below: Below = Nothing()
        # Copies made since the last `take_unsaved` that no lower tier has; None: no lower tier takes copies.
        self.unsaved: dict[Node, None] | None = None
        self._policy = policy or EvictionPolicy()
        self.candidates = Candidates(lambda node: (node.host_priority, 0), self.may_evict)

    @property
    def nodes(self) -> list[Node]:
        """The runs with a copy, parents first."""
        roots = self.index.roots.values()
        return [node for root in roots for node in descendants(root) if node.copy is not None]

    def clear(self) -> None:
        """Forget all copies."""
        self.num_bytes = self.num_tokens = self.num_states = self.overdraft = self.num_aside = 0
        self.candidates.clear()
        self.unsaved = None if self.unsaved is None else {}

    def resize(self, max_bytes: int) -> None:
        """Change the budget, unless it is 0.

        Copies beyond the new budget are evicted as by `settle`.
        """
        if self.max_bytes:
            self.max_bytes = max_bytes
            self.overdraft = max(self._num_taken - max_bytes, 0)
            self.settle()

    def recount(self) -> None:
        """Count all copies anew, and offer each of them for eviction."""
        nodes = self.nodes
        states = [node for node in nodes if node.state is not None]
        self.num_tokens = sum(map(len, {node.copy for node in nodes if node.copy is not None}))
        self.num_states = len(states)
        self.num_bytes = self.num_tokens * self.sizes.run_token + sum(self.size_of(node.end) for node in states)
        self.candidates.clear()
        for node in nodes:
            self.offer(node)

    # ---- the budget ------------------------------------------------------------------------------------------------

    def size_of(self, num_tokens: int) -> int:
        """Return the bytes of a state after `num_tokens` tokens; 0 for a model without states."""
        return self.sizes.state + num_tokens * self.sizes.state_token

    def could_hold(self, num_tokens: int) -> bool:
        """Return whether an empty budget has room for `num_tokens` tokens of a prompt and a state after them."""
        return 0 < self.max_bytes >= num_tokens * self.sizes.run_token + self.size_of(num_tokens)

    def could_lend(self, num_tokens: int) -> bool:
        """Return whether host memory can take the KV of `num_tokens` tokens for the time of a step."""
        return num_tokens * self.sizes.run_token <= self._lent or self.could_hold(num_tokens)

    def has_room_for(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` new tokens of a prompt, and a state after them, fit without an eviction."""
        return self._fits(num_tokens, self.size_of(num_tokens))

    def has_room(self, record: Record) -> bool:
        """Return whether the part of a record that is not cached fits without an eviction."""
        num_tokens, needs_state = self._missing(record)
        return self._fits(num_tokens, self.size_of(len(record.tokens)) if needs_state else 0)

    def make_room(self, node: Node, num_tokens: int = 0) -> bool:
        """Evict copies until `num_tokens` tokens of a node's run fit. Return False if the tokens still do not fit.

        Copies that a lower tier also has are evicted before all others. If evicting them does not make enough room, and a
        lower tier accepts more bytes, the budget is overdrawn until the lower tier has written the node's copy. Copies that
        exist nowhere else are evicted only if no lower tier accepts more. If `node` is a leaf that a lower tier already has,
        the budget is not overdrawn, and no copy that exists nowhere else is evicted.
        """
        could_hold, needed = self.could_hold(num_tokens), num_tokens * self.sizes.run_token
        if could_hold:
            self._evict_written(needed, self.overdraft)
            if self._fits(num_tokens):
                return True
        if self.is_below(node) and not node.children:
            return False  # it is on disk: no other copy is evicted for it
        if self.max_bytes and self._below.takes(self.overdraft + needed) and scope_of(node).may_outlive:
            self.overdraft = max(self.overdraft, self._num_taken + needed - self.max_bytes)
            return True
        if not could_hold:
            return False
        while not self._fits(num_tokens) and (least := self.candidates.pop()):
            self._evict(least)
        return self._fits(num_tokens)

    def free_written(self, num_tokens: int) -> None:
        """Evict copies that a lower tier also has, until `num_tokens` new tokens and a state after them fit."""
        self._evict_written(num_tokens * self.sizes.run_token + self.size_of(num_tokens))

    def overdraw(self, record: Record) -> None:
        """Make room for a fetched record: evict copies that a lower tier also has. If need be, overdraw the budget."""
        num_tokens, needs_state = self._missing(record)
        needed = num_tokens * self.sizes.run_token + (self.size_of(len(record.tokens)) if needs_state else 0)
        self._evict_written(needed)
        self.overdraft = max(self.overdraft, self._num_taken + needed - self.max_bytes)

    def settle(self) -> None:
        """Evict copies to reduce the overdraft.

        Copies that a lower tier has written by now are evicted first, then copies that are not meant for any lower tier.

        If the lower tiers accept no more bytes, copies that no lower tier has accepted yet are evicted, too. The KV of
        copies that no lower tier had accepted is lost.
        """
        if not (self.overdraft or self.num_aside):
            return
        self._evict_written(0)
        kept, takes_more = list[Node](), self._below.takes(0)
        while self._num_taken > self.max_bytes and len(kept) < MOST_PASSED and (least := self.candidates.pop()):
            may_be_written = self.is_below(least) or (takes_more and least in (self.unsaved or ()))
            if may_be_written and not self._below.has_written(least.record):
                kept.append(least)
            else:
                self._evict(least)
        for node in kept:
            self.offer(node)
        self.overdraft = max(self._num_taken - self.max_bytes, 0)

    def is_below(self, node: Node) -> bool:
        """Return whether a lower tier also has the KV of a node, or is about to write it."""
        return bool(node.record) and self._below.has_accepted(node.record)

    def keeps(self, node: Node) -> bool:
        """Return whether the KV of a node has a copy, or is written to a lower tier."""
        return node.copy is not None or (bool(node.record) and self._below.has_written(node.record))

    def count_lost(self, node: Node, num_tokens: int) -> None:
        """Count the evicted tokens of a node as lost, unless a lower tier has their KV."""
        self.num_lost += 0 if self.is_below(node) else num_tokens

    def _evict_written(self, needed: int, beyond: int = 0) -> None:
        """Evict copies that a lower tier also has, until the budget plus `beyond` has room for `needed` more bytes."""
        passed: list[Node] = []
        while self.unsaved is not None and self._num_taken + needed > self.max_bytes + beyond:
            if len(passed) == MOST_PASSED or (least := self.candidates.pop()) is None:
                break
            if self._below.has_written(least.record):
                self._evict(least)
                continue
            passed.append(least)
            if least.record and not self.is_below(least):
                self.unsaved[least] = None  # the lower tier could not write it, or has lost it since
        for node in passed:
            self.offer(node)

    def _evict(self, node: Node) -> None:
        self._policy.on_evict(node.host_priority)
        self.count_lost(node, self.index.lose(node))

    def may_evict(self, node: Node) -> bool:
        """Return whether a node's copies may be evicted.

        Copies stay while a running request is about to restore the run, or while a fetch for a waiting request needs them.
        All other copies may be evicted if their node has a state, or if none of the node's children has a copy.
        """
        if node.copy is None or node.copy.num_fetches or (node.in_use and not node.ready):
            return False
        return node.state is not None or all(child.copy is None for child in node.children.values())

    def touch(self, node: Node) -> None:
        """Set the priority of a node's copies, which are new or have just been used, pinned or unpinned."""
        node.host_priority = self._policy.priority(node)
        self.offer(node)

    def revalue(self, node: Node, token_cost: float) -> None:
        """Set the cost to compute a token of a run, and adjust the priority of its copy.

        The change does not count as a use of the run.
        """
        node.host_priority -= self._policy.worth(node)
        node.token_cost = token_cost
        node.host_priority += self._policy.worth(node)
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Offer a node's copy for eviction, if the node has one.

        Nothing may need the copy any more, or the copy of a later run may be gone.
        """
        if node.copy is not None:
            self.candidates.offer(node)

    def _fits(self, num_tokens: int, state_bytes: int = 0) -> bool:
        return self._num_taken + num_tokens * self.sizes.run_token + state_bytes <= self.max_bytes + self.overdraft

    @property
    def _num_taken(self) -> int:
        return self.num_bytes + self.num_aside

    def _missing(self, record: Record) -> tuple[int, bool]:
        """Return how many tokens of a record are not cached, and whether its state is missing."""
        end = self.index.match(record.scope, record.tokens).exact_end
        num_tokens = len(record.tokens) - self.index.num_cached(record.scope, record.tokens)
        return num_tokens, record.state is not None and (end is None or end.state is None)

    # ---- copies ----------------------------------------------------------------------------------------------------

    def keep(self, node: Node, kv: HostCopy | None = None, state: HostCopy | None = None, record: str = "") -> None:
        """Give a node a copy of its run, a copy of the state at its end, or both. The caller has made room for these copies.

        record: the key of the record from which the copies come; empty: they come from the device.
        """
        if kv is not None:
            node.copy = kv
            self._count_run(kv, 1)
        if state is not None:
            node.state = state
            self._count_state(node, 1)
        if record or state is not None:
            node.record = record
        if self.unsaved is not None and not self.is_below(node):
            self.unsaved[node] = None

    def split(self, upper: Node, lower: Node) -> None:
        """After a run was cut in two, let both parts use the run's copy and its record."""
        upper.record = lower.record
        if lower.copy is not None:
            upper.copy = lower.copy
            upper.copy.users += 1
            if self.unsaved is not None and lower in self.unsaved:
                self.unsaved[upper] = None

    def release(self, node: Node) -> None:
        """Forget the copies of a node, if it has any."""
        self.release_state(node)
        if node.copy is None:
            return
        node.copy.users -= 1
        if not node.copy.users:
            self._count_run(node.copy, -1)
        node.copy = None
        if node.parent is not None:
            self.offer(node.parent)

    def release_state(self, node: Node) -> None:
        """Forget the state at the end of a node, if it has one."""
        if node.state is not None:
            node.state = None
            self._count_state(node, -1)

    def _count_run(self, copy: HostCopy, change: int) -> None:
        self.num_tokens += change * len(copy)
        self.num_bytes += change * len(copy) * self.sizes.run_token

    def _count_state(self, node: Node, change: int) -> None:
        self.num_states += change
        self.num_bytes += change * self.size_of(node.end)

    # ---- records, to and from lower tiers and files ----------------------------------------------------------------

    def get(self, node: Node) -> Record | None:
        """Return a run, with the state at its end, as a record; None if a copy of them is gone or not made yet."""
        return self.part(node, node.copy, node.end) if node.copy is not None else None

    def part(self, node: Node, copy: HostCopy, stop: int) -> Record | None:
        """Return a run up to position `stop` as a record, with KV from `copy`; None if a copy is not made yet."""
        if copy.data is None or (node.state is not None and node.state.data is None):
            return None
        whole = (copy.start, copy.stop) == (node.start, stop)
        tokens = np.concatenate([one.tokens for one in path(node)][::-1])[:stop]
        documents = ((key, origin.end) for origin, key in node.document_of if stop == node.end)
        return Record(
            scope_of(node),
            tokens,
            node.start,
            copy.data if whole else self._cut(copy.data, node.start, stop),
            documents=tuple((key, at) for key, at in documents if at <= node.start),
            frequency=node.frequency,
            token_cost=node.token_cost,
            state=node.state.data if node.state is not None else None,
        )

    def put(self, record: Record, tier: str | None = None, *, is_claimed: bool = False) -> bool:
        """Keep a record, if it fits and the runs before it are cached. Return whether the record is cached now.

        If the record is partly cached already, only the missing part is kept.

        tier: the name of the lower tier from which the record comes; None: the record comes from elsewhere, so the lower
            tiers get it, too.
        is_claimed: True: the record is for a running request, which has claimed these tokens and will restore them. False:
            the record is refused if a running request computes the record's missing tokens.
        """
        index, stop = self.index, len(record.tokens)
        num_missing, needs_state = self._missing(record)
        if not num_missing and not needs_state:
            return True
        start = stop - num_missing
        is_computed = not is_claimed and index.match(record.scope, record.tokens).length > start  # by a running request
        if start < record.start or is_computed or not self.has_room(record):
            return False
        if not all(0 <= at <= record.start for _, at in record.documents):
            return False
        ends = index.insert(index.root(record.scope), record.tokens, sorted({start, *(at for _, at in record.documents)}))
        node, key = ends[stop], "" if tier is None else file_name(record)
        if num_missing:
            data = record.data if start == record.start else self._cut(record.data, start, stop)
            self.keep(node, copy := HostCopy(start, stop, data, source=tier or Source.HOST), record=key)
            for part in path(node, start)[1:]:  # a run that is claimed may be cut already
                part.copy, part.record = copy, key
                copy.users += 1
            for part in path(node, start):
                part.note_session("")  # who computed it is not known
        if needs_state:
            source = tier or Source.SNAPSHOT
            self.keep(node, state=HostCopy(0, stop, record.state, source=source), record=key)
        if index.may_continue(node):
            node.frequency = record.frequency + (node.frequency if is_claimed else 0)
            node.token_cost, node.num_misses = record.token_cost, 1
        for key, at in record.documents:
            ends[at].place(key, node)
        index.price(node)
        return True

    def write_behind(self, below: Below) -> None:
        """From now on, collect new copies for the lower tiers (`take_unsaved`). `below` knows what these tiers have."""
        self._below, self.unsaved = below, {}

    def take_unsaved(self) -> list[Node]:
        """Return the nodes that got copies since the last call; an empty list if the server has no lower tiers."""
        if self.unsaved is None:
            return []
        taken, self.unsaved = self.unsaved, {}
        return list(taken)


class PromptTree(RadixTree[Node]):
    """The tree that prompts are matched against. The tree has KV or, for models with recurrent states, such states.

    host: host memory with the copies of the tree's runs.
    profile: learns the time to compute tokens.
    """

    def __init__(self, costs: Costs, host: HostMemory, profile: Profile) -> None:
        super().__init__(Node, Root.of)
        self._clock: int = 0
        self.costs, self.host, self.profile = costs, host, profile
        self.recompute_last = costs.recompute_last
        self.pinned: set[Node] = set()  # runs that a client asked to keep
        host.index = self

    def clear(self) -> None:
        """Forget everything, even in an inconsistent state."""
        self.roots, self.pinned = {}, set()
        self.host.clear()

    def reusable(self, scope: Scope, tokens: np.ndarray) -> int:
        """Return how many leading tokens of a prompt can be reused.

        The result may include the prompt's last tokens, although they are always computed.
        """
        return self.match(scope, tokens).length

    def continued(self, origin: Node, match: Match[Node]) -> int:
        """Return how many of the tokens that `match` found after `origin` need not be computed."""
        return match.length

    def may_continue(self, node: Node) -> bool:
        """Return whether a prompt can continue from the end of a cached run."""
        return True

    def saved_share(self, node: Node) -> float:
        """Return which share of a run's computing time is saved by reusing it; less than 1 if it has to be restored."""
        return 1 - self.costs.restore_share if node.copy is not None and not node.ready else 1.0

    def seconds(self, cached: int, new: int) -> float:
        """Return the seconds to compute `new` tokens after `cached` ones. Before the first step, this is a guess."""
        if self.profile.is_learnt:
            return self.profile.seconds(cached, new)
        return new * max(self.costs.token_ns, self.costs.row_ns, GUESSED_NS) / 1e9

    def cached_runs(self, scope: Scope | None, tokens: np.ndarray) -> list[tuple[Node, int]]:
        """Return the cached runs at the start of a prompt, in order, each with the position where its KV ends."""
        match = self.match(scope, tokens)
        runs: list[tuple[Node, int]] = []
        for node in reversed(path(match.node)):
            known = min(node.end, match.length)
            stop = known if node.copy is not None else min(known, node.start + node.ready)
            if stop > node.start:
                runs.append((node, stop))
            if stop < node.end:
                break
        return runs

    def usable_runs(self, scope: Scope | None, tokens: np.ndarray) -> list[tuple[Node, int]]:
        """Return the `cached_runs` up to the last run from whose end a prompt can continue now."""
        return self.cached_runs(scope, tokens)

    def check(self, nodes: list[Node]) -> None:
        """Raise AssertionError if the tree contradicts `nodes`, which are all its runs. See `slots/check.py`."""

    def num_cached(self, scope: Scope | None, tokens: np.ndarray) -> int:
        """Return how many leading tokens of a prompt have KV on the device or in host memory."""
        runs = self.cached_runs(scope, tokens)
        return runs[-1][1] if runs else 0

    @abstractmethod
    def void(self) -> None:
        """Forget KV that only the device had, and operations that were never carried out. Finished copies stay."""

    @abstractmethod
    def price(self, node: Node, *, is_used: bool = True) -> None:
        """Set the priority of a run, which has just been used, pinned or unpinned."""

    def retire(self, scope: Scope, tokens: np.ndarray, session: str) -> int:
        """Lower the priority of runs that only this session has computed or used, so that they are evicted before others.

        Return how many tokens the retired runs have.

        tokens (int32): a prompt of the session. Runs that another prompt shares are not retired. If exactly one run follows
            the prompt, and no run follows that one, it is the prefilled start of the session's next turn. The prefilled
            start is retired, too.
        """
        match, retired = self.match(scope, tokens), 0
        ahead = list(match.node.children.values()) if match.node.end == match.length else []
        nodes = [node for node in path(match.node) if node.end <= match.length]
        if len(ahead) == 1 and not ahead[0].children:
            nodes.insert(0, ahead[0])
        for node in nodes:
            is_shared = node.frequency > 1 or any(child.frequency for child in node.children.values())
            if node.in_use or node.pinned_until or is_shared or node.session != session:
                break
            node.frequency = node.last_use = 0
            self.price(node, is_used=False)
            retired += len(node.tokens)
        return retired

    def drop(self, scope: Scope) -> int:
        """Forget the KV of a scope, except KV that running requests need. Return the number of forgotten tokens."""
        return self.discard(list(descendants(self.roots[scope]))[::-1] if scope in self.roots else [])

    @abstractmethod
    def discard(self, nodes: Iterable[Node]) -> int:
        """Forget runs, except runs in use and runs with children. Return the number of forgotten tokens.

        nodes: the runs, deepest first.
        """

    @abstractmethod
    def lose(self, node: Node) -> int:
        """Release the copy of a node that host memory evicts, and forget the runs that are useless without it.

        Return how many of the node's tokens have no KV on the device or in host memory any more.
        """

    def without_copy(self) -> list[Node]:
        """Return the runs that are lost if the device loses its KV, deepest first.

        The lost runs are the runs without a finished copy, and all runs after such a run.
        """
        lost: dict[Node, None] = {}
        for root in self.roots.values():
            for node in descendants(root):  # parents first
                if node.parent in lost or node.copy is None or node.copy.data is None:
                    lost[node] = None
        return list(reversed(lost))

    def _descend(self, node: Node, tokens: np.ndarray) -> Node:
        end = super()._descend(node, tokens)
        for run in path(end, node.end):
            run.last_use = self._clock
        return end

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        lower.part_with(upper)
        self.host.split(upper, lower)
        if lower.pinned_until:
            self.pinned.add(upper)
        return upper

    def _unlink(self, node: Node) -> None:
        self._unlink_document(node)
        super()._unlink(node)

    def _unlink_document(self, node: Node) -> None:
        for origin, key in node.document_of:
            del origin.documents[key]
        node.document_of.clear()

    def _remove(self, node: Node) -> None:
        """Remove from the tree a run that is not on the device, together with all runs and copies after it."""
        for run in [node, *descendants(node)][::-1]:
            self.host.release(run)
            self.pinned.discard(run)
            self._unlink(run)


# ---- Copies: made when a run is evicted from the device, when a step needs it, or in idle time. -------------------------


def restores(last_node: Node, sequence: int, begin: int) -> list[tuple[Restore, list[Node]]]:
    """Return a `Restore` for each copy after position `begin` on the path to `last_node`, with the runs that it restores.

    The list ends before the first run that has no copy, and before the first run that already has KV on the device.
    """
    found: list[tuple[Restore, list[Node]]] = []
    for node in reversed(path(last_node, begin)):
        if node.ready or node.copy is None:
            break
        if found and found[-1][0].copy is node.copy:
            restore, nodes = found.pop()
            found.append((replace(restore, stop=node.end), [*nodes, node]))
        else:
            found.append((Restore(node.copy, sequence, max(node.start, begin), node.end), [node]))
    return found


class Copies:
    """Decides which runs get a copy in host memory, and restores copies.

    costs: the costs of the model on this device. The costs decide which runs are not worth saving, and how many tokens at
        the end of a path are computed instead of restored.
    """

    def __init__(self, device: DeviceCells, host: HostMemory, costs: Costs) -> None:
        self._device, self._host, self._costs = device, host, costs
        self.num_saved = 0  # tokens, ever
        self.num_restored = 0  # tokens, ever
        self._ahead: deque[tuple[Node, Sequence]] = deque()  # idle runs that had no copy when `save_ahead` last looked
        self._looked_enough_at = -1  # `device.num_idled` when an eviction did not make room; no new look until it grows

    def save_if_free(self, node: Node) -> HostCopy | None:
        """Return the copy of a run; None if the run has no copy and none can be made now.

        If the run has no copy, one is made now, provided that the run is complete and the copy fits without an eviction.
        """
        if node.complete and self._host.has_room_for(len(node.tokens)):
            self.save(node, node.longest_sequence())
        return node.copy

    def save_ahead(self) -> bool:
        """Copy one idle run to host memory in idle time, so that its later eviction costs nothing.

        Return False if every idle run worth saving has a copy, or if host memory is full. Earlier runs of a path are copied
        before later ones, which are useless without them.

        To make room for a run that no lower tier has, copies that a lower tier also has are evicted, but no other copies. If
        evictions do not make enough room, no new search for runs starts until another sequence is idle. If a search
        started earlier, it would find the runs of the evicted copies, and copy and evict them again without end.
        """
        too_large = math.inf  # tokens for which evictions did not make room
        for looks_again in (False, True):
            if looks_again and self._looked_enough_at < self._device.num_idled:
                self._ahead.extend(self._unsaved())
            while self._ahead:
                node, sequence = self._ahead.popleft()
                if not self._is_unsaved(node, sequence) or not self.pays(node):
                    continue
                if self._has_room_ahead(node, too_large):
                    return self.save(node, sequence)
                too_large = too_large if node.record else min(too_large, len(node.tokens))
        return False

    def _unsaved(self) -> Iterator[tuple[Node, Sequence]]:
        """Yield the idle runs that are worth saving and have no copy, each with an idle sequence that holds it."""
        seen: dict[Node, bool] = {}  # many idle sequences may stand on one run
        for sequence in self._device.idle.values():
            for node in reversed(path(sequence.last_node)):
                if node.copy is not None:
                    continue
                if node not in seen:
                    seen[node] = self.pays(node)
                if not seen[node]:
                    break
                if self._is_unsaved(node, sequence):
                    yield node, sequence

    def _is_unsaved(self, node: Node, sequence: Sequence) -> bool:
        """Return whether a run has no copy and an idle sequence holds all of it."""
        is_idle = self._device.idle.get(sequence.last_node) is sequence
        return is_idle and node.copy is None and sequence in node.sequences and sequence.length >= node.end

    def pays(self, node: Node) -> bool:
        """Return whether saving a run takes less time than computing it again, together with the cached runs after it.

        llama.cpp copies each stretch of cells separately in each layer. The tokens of an answer that was computed in steps
        with other requests are not in adjacent cells. On a GPU, saving such a scattered answer takes longer than computing
        it. A pinned run is always saved.
        """
        if node.pinned_until:
            return True
        left = self._device.stretches.of(node) * self._costs.scattered_tokens - len(node.tokens)
        runs = descendants(node)
        while left > 0 and (run := next(runs, None)):  # stop early: there may be many runs
            left -= len(run.tokens) if run.is_cached else 0
        return left <= 0

    def _has_room_ahead(self, node: Node, too_large: float) -> bool:
        num_tokens = len(node.tokens)
        if not node.record and num_tokens < too_large and self._host.could_hold(num_tokens):
            return self.make_room(self._host, num_tokens)
        return self._host.has_room_for(num_tokens)

    def make_room(self, host: HostMemory, num_tokens: int) -> bool:
        """Evict copies that a lower tier has until `num_tokens` tokens fit. Return False if they do not fit.

        host: the memory that needs the room. If evictions did not make enough room, `save_ahead` makes no such copy again.
        """
        num_before = host.num_bytes
        host.free_written(num_tokens)
        has_room = host.has_room_for(num_tokens)
        if not has_room and host.num_bytes < num_before:
            self._looked_enough_at = self._device.num_idled
        return has_room

    def save_prefix(self, node: Node | None) -> None:
        """Copy the run `node` and the runs before it, back to the first run that has a copy, as far as there is room.

        A copy of a run is useless without copies of the runs before it. Runs in use are not evicted, so no eviction copies
        them: they would be lost if the device lost its KV. RAGCache (section 6) also copies the upper nodes of its tree.
        """
        for above in itertools.takewhile(lambda above: above.copy is None, upward(node) if node else ()):
            self.save_if_free(above)

    def save(self, node: Node, sequence: Sequence) -> bool:
        """Make sure that a run has a copy in host memory.

        Return False if there is no room, or if the run is not worth saving.
        """
        if node.copy is not None:
            return True
        if not self.pays(node) or not self._host.make_room(node, len(node.tokens)):
            return False
        copy = HostCopy(node.start, node.end)
        self._host.keep(node, copy)
        self._host.touch(node)
        self._device.perform(Save(sequence.id, copy))
        self.num_saved += len(copy)
        return True

    def restorable(self, sequence: Sequence) -> int:
        """Return how many tokens `restore` would restore. Each token to restore needs a free cell."""
        return sum(restore.stop - restore.start for restore, _ in self._restores(sequence))

    def restore(self, sequence: Sequence) -> list[tuple[str, int]]:
        """Restore the copies that follow a sequence's KV on its path, without the last tokens of the path.

        Return the origin of each copy, and how many of its tokens were restored, in the order of the path.
        """
        restored: list[tuple[str, int]] = []
        for restore, nodes in self._restores(sequence):
            source, size = restore.copy.source, restore.stop - restore.start
            restored.append((source, size))
            self._device.perform(restore)
            restore.copy.source = Source.HOST  # where the copy is from now on
            for node in nodes:
                self._device.count_ready(node, min(node.end, restore.stop) - node.start)
                node.sequences.add(sequence)
            sequence.length = restore.stop
        self.num_restored += sum(size for _, size in restored)
        return restored

    def _restores(self, sequence: Sequence) -> list[tuple[Restore, list[Node]]]:
        """Return the `restores` of a sequence, without the last tokens of its path, which are always computed."""
        found = restores(sequence.last_node, sequence.id, sequence.length)
        last = sequence.most_cached(found[-1][0].stop if found else sequence.length, self._costs.recompute_last)
        return [
            (replace(restore, stop=min(restore.stop, last)), [node for node in nodes if node.start < last])
            for restore, nodes in found
            if restore.start < last
        ]
