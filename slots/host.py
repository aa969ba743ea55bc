"""Host memory: copies of KV and of recurrent states by node, within one budget.

A run is saved once (RAGCache, section 5.1, swap-out-only-once): it keeps its copy when it is restored, so its next eviction
costs nothing. When the budget is spent, the copy with the lowest priority and no copy behind it leaves.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from .costs import Costs, Profile
from .device import Ledger
from .eviction import Candidates, EvictionPolicy
from .plan import HostCopy, Restore, Save
from .radix import CopySizes, Match, Node, PromptTree, Sequence, descendants, path, scope_of, without_copy
from .reuse import Source
from .scope import Scope
from .tier import Cut, HostMemory, LowerTier, Record

# ---- A tree of runs and recurrent states in host memory, within one budget of bytes. ------------------------------------
#
#     runs       |-- instructions --|-- document --|-- question and answer --|      each run behind the run before it
#     states                        S              S                         S
#                                                  |-- another question --|
#                                                                         S
#
# Every leaf has a state, or it is of no use. The state that saves the least time a byte leaves first, with the runs
# that only
# it needs.


class StateTree(PromptTree):
    """The tier protocol, with nodes for keys: a node is a run, and may have a state at its end.

    max_bytes: of all runs and states; 0: none is kept. costs: of this device. profile: the time that tokens take.
    policy: the order in which states leave. cut: takes a part out of a run.
    """

    def __init__(
        self, max_bytes: int, *, costs: Costs, profile: Profile, policy: EvictionPolicy | None = None, cut: Cut
    ) -> None:
        super().__init__(costs, self._has_room_for)
        self.max_bytes = max_bytes
        self.sizes = CopySizes()
        self.num_bytes = 0
        self.num_runs = self.num_tokens = 0  # runs, and their tokens
        self.num_states = 0
        self.unused: dict[Node, None] = {}  # states within prompts that no second prompt has used, the oldest first
        self.aged: set[Node] = set()  # nodes whose states have left for that reason
        # Changed since the last `take_unsaved`, and in no lower tier; None: they are not written behind.
        self.unsaved: dict[Node, None] | None = None
        self._profile, self._cut = profile, cut
        self._policy = policy or EvictionPolicy()
        self.candidates = Candidates(lambda node: (node.host_priority, 0), self.may_leave)

    def __len__(self) -> int:
        return self.num_states

    def size_of(self, num_tokens: int) -> int:
        """Return the bytes of a state behind `num_tokens` tokens."""
        return self.sizes.state + num_tokens * self.sizes.state_token

    def reusable(self, scope: Scope, tokens: np.ndarray) -> int:
        node = self.longest(scope, tokens)
        return node.end if node is not None else 0

    def may_continue(self, node: Node) -> bool:
        return node.state is not None

    def continued(self, origin: Node, match: Match) -> int:
        stop = origin.end + match.length
        ends = (node.end for node in path(match.node) if node.state is not None and origin.end < node.end <= stop)
        return max(ends, default=origin.end) - origin.end

    def _has_room_for(self, num_tokens: int) -> bool:
        size = self.size_of(num_tokens) + num_tokens * self.sizes.run_token
        return self.num_bytes + size <= self.max_bytes

    def has_room(self, record: Record) -> bool:
        """Return whether a record fits with nothing leaving for it."""
        missing = len(record.tokens) - self._length(record.scope, record.tokens)
        state = self.size_of(len(record.tokens)) if record.state is not None else 0
        return self.num_bytes + missing * self.sizes.run_token + state <= self.max_bytes

    def of(self, scope: Scope) -> list[Node]:
        """Return the nodes of a scope with a state at their end."""
        return [node for node in descendants(self.roots[scope]) if node.state] if scope in self.roots else []

    def get(self, node: Node) -> Record | None:
        """Return a run with the state at its end as a record; None if it is gone or has not been made."""
        if node.blob is None or node.blob.data is None or (node.state and node.state.data is None):
            return None
        tokens = np.concatenate([one.tokens for one in path(node)][::-1])
        whole = (node.blob.start, node.blob.stop) == (node.start, node.end)
        documents = ((key, origin.end) for origin, key in node.document_of)
        return Record(
            scope_of(node),
            tokens,
            node.start,
            node.blob.data if whole else self._cut(node.blob.data, node.start, node.end),
            documents=tuple((key, at) for key, at in documents if at <= node.start),
            frequency=node.frequency,
            token_cost=node.token_cost,
            state=node.state.data if node.state else None,
        )

    def along(self, scope: Scope | None, tokens: np.ndarray, known: Node | None = None) -> Iterator[Node]:
        """Return the nodes with states that these tokens begin with, the longest one first.

        known: a node on their path; the search begins there.
        """
        match = self.match_from(known, tokens[known.end :]) if known is not None else self.match(scope, tokens)
        stop = match.length + (known.end if known is not None else 0)
        return (node for node in path(match.node) if node.state is not None and node.end <= stop)

    def longest(self, scope: Scope | None, tokens: np.ndarray, known: Node | None = None) -> Node | None:
        """Return the node with the deepest state that these tokens begin with."""
        return next(self.along(scope, tokens, known), None)

    def put(self, record: Record, source: str = Source.HOST) -> bool:
        """Keep a record that comes from elsewhere if the runs before it are kept and it fits. Return whether it is kept now.

        Of a run that is partly kept, the rest is taken. source: as in `Archive.put`.
        """
        start, stop = self._length(record.scope, record.tokens), len(record.tokens)
        if (
            start < record.start
            or not self.has_room(record)
            or not all(0 <= at <= record.start for _, at in record.documents)
        ):
            return False
        stops = sorted({start, *(at for _, at in record.documents)})
        ends = self.insert(self.root(record.scope), record.tokens, stops)
        node, is_written = ends[stop], source != Source.HOST
        if node.blob is None:
            data = record.data if start == record.start else self._cut(record.data, start, stop)
            self.keep_run(node, HostCopy(start, stop, data, source=source, is_written=is_written))
        if record.state is not None and node.state is None:
            self.keep_state(node, HostCopy(0, stop, record.state, source=source, is_written=is_written))
            node.frequency = record.frequency
        for key, at in record.documents:
            ends[at].place(key, node)
        self.price(node)
        return True

    def take_unsaved(self) -> list[Node]:
        """Return the nodes that changed since the last call; the first call begins to note them."""
        taken, self.unsaved = self.unsaved or {}, {}
        return list(taken)

    def drop(self, scope: Scope) -> int:
        """Forget a scope. Return how many tokens its runs had."""
        before = self.num_tokens
        for node in list(descendants(self.roots[scope]))[::-1] if scope in self.roots else []:
            self.forget(node)
        return before - self.num_tokens

    def discard(self, scope: Scope | None, tokens: np.ndarray) -> int:
        """Forget the states along a prompt, unless a longer one stands on them. Return how many tokens that were."""
        before = self.num_tokens
        for node in list(self.along(scope, tokens)):
            if not node.children:
                self.forget(node)
        return before - self.num_tokens

    def void(self) -> None:
        """Forget what was decided and never performed, with all that stands on it: a record may have come in behind it."""
        lost = set(without_copy(self))
        for node in [node for root in self.roots.values() for node in descendants(root)][::-1]:
            if node in lost or (node.state is not None and node.state.data is None):
                self.forget(node)

    def clear(self) -> None:
        """Forget everything, even in an inconsistent state."""
        self.roots, self.pinned, self.unused, self.aged = {}, set(), {}, set()
        self.num_bytes = self.num_runs = self.num_tokens = self.num_states = 0
        self.candidates.clear()

    def forget(self, node: Node) -> None:
        """Drop the state at the end of a node, and the runs that no other state needs."""
        if node.state is not None:
            node.state = None
            self.unused.pop(node, None)
            self.num_states -= 1
            self.num_bytes -= self.size_of(node.end)
        while node.parent and node.blob and not node.children and node.state is None:
            parent = node.parent
            node.blob.users -= 1
            self.num_bytes -= 0 if node.blob.users else len(node.blob) * self.sizes.run_token
            self.num_runs -= 1
            self.num_tokens -= len(node.tokens)
            self.pinned.discard(node)
            self.aged.discard(node)
            node.blob = None  # as of a node that was forgotten before
            self._unlink(node)
            node = parent
        self.candidates.offer(node)

    def price(self, node: Node) -> None:
        """Set the priority of a state that is used or new: the time that it saves, a byte that leaves with it."""
        if not self.may_leave(node):
            return  # a run that states stand on leaves with them
        above = node.parent
        while above is not None and above.parent is not None and above.state is None:
            above = above.parent
        begin, size = above.end if above is not None else 0, self.size_of(node.end)
        size += 0 if node.children else (node.end - begin) * self.sizes.run_token
        length = node.end - begin
        node.token_cost = self._profile.cost(begin, length) * length / max(size, 1)
        node.last_use, node.host_priority = self._clock, self._policy.priority(node)
        self.candidates.offer(node)

    def may_leave(self, node: Node) -> bool:
        """Return whether something would be freed: a state, or a run that no state needs."""
        return node.blob is not None and (node.state is not None or not node.children)

    def _length(self, scope: Scope, tokens: np.ndarray) -> int:
        """Return how many leading tokens are in kept runs."""
        return self.match(scope, tokens).length

    def keep_run(self, node: Node, blob: HostCopy) -> None:
        """Give a node its run."""
        node.blob = blob
        self.num_runs += 1
        self.num_tokens += len(node.tokens)
        self.num_bytes += len(blob) * self.sizes.run_token
        self._note(node, blob)

    def keep_state(self, node: Node, blob: HostCopy) -> None:
        """Give a node a state at its end."""
        node.state = blob
        self.aged.discard(node)
        self.num_states += 1
        self.num_bytes += self.size_of(node.end)
        self._note(node, blob)

    def _note(self, node: Node, blob: HostCopy) -> None:
        if self.unsaved is not None and not blob.is_written:
            self.unsaved[node] = None

    def make_room(self, node: Node) -> None:
        """Let states leave until the budget holds. `node` is new, or used now, and stays."""
        self._clock += 1
        node.host_priority = np.inf
        while self.num_bytes > self.max_bytes and (least := self.candidates.pop()):
            self._policy.on_evict(least.host_priority)
            self.forget(least)
        if self.num_bytes > self.max_bytes:  # a copy that was cut in two is freed with its last part only
            self.forget(node)
        else:
            self.price(node)

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        if lower.blob is not None:
            upper.blob = lower.blob
            upper.blob.users += 1
            self.num_runs += 1
            if self.unsaved is not None and lower in self.unsaved:
                self.unsaved[upper] = None
        return upper


class HostTier:
    """The ledger of the copies and their budget. max_tokens: 0 means that nothing is copied."""

    def __init__(self, max_tokens: int = 0, policy: EvictionPolicy | None = None) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0  # tokens that all blobs hold
        self.num_saved = 0  # tokens saved, ever
        self.num_restored = 0  # tokens restored, ever
        self.nodes: set[Node] = set()
        # Kept since the last `take_unsaved`, and in no lower tier; None: they are not written behind.
        self.unsaved: dict[Node, None] | None = None
        self._policy = policy or EvictionPolicy()
        self.candidates = Candidates(lambda node: (node.host_priority, 0), self.may_leave)

    def clear(self) -> None:
        """Forget all copies."""
        self.nodes, self.num_tokens = set(), 0
        self.candidates.clear()
        self.unsaved = None if self.unsaved is None else {}

    def recount(self) -> None:
        """Count the copies anew, of which any may leave now."""
        blobs = {node.blob for node in self.nodes if node.blob is not None}
        self.num_tokens = sum(map(len, blobs))
        self.candidates.clear()
        for node in self.nodes:
            self.offer(node)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more tokens fit with no copy leaving for them."""
        return self.num_tokens + num_tokens <= self.max_tokens

    def save(self, node: Node) -> HostCopy:
        """Return a new, empty blob for a node's run. The caller has made room for it."""
        self.num_saved += len(node.tokens)
        return self.keep(node, HostCopy(node.start, node.end))

    def keep(self, node: Node, blob: HostCopy) -> HostCopy:
        """Give a node a copy of its own."""
        node.blob = blob
        self.nodes.add(node)
        self.num_tokens += len(blob)
        if self.unsaved is not None and not blob.is_written:
            self.unsaved[node] = None
        self.touch(node)
        return blob

    def touch(self, node: Node) -> None:
        """Set the priority of a run that is used, pinned or unpinned now, or that comes to this tier."""
        node.host_priority = self._policy.priority(node)
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Consider a copy that may leave from now on: it is not needed any more, or the copy behind it has left."""
        if node.blob is not None:
            self.candidates.offer(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Let both parts of a run that was cut use its blob."""
        if lower.blob is not None:
            upper.blob = lower.blob
            upper.blob.users += 1
            self.nodes.add(upper)
            self.offer(upper)
            if self.unsaved is not None and lower in self.unsaved:
                self.unsaved[upper] = None

    def drop(self, node: Node) -> None:
        """Forget a node's copy, if it has one."""
        if node.blob is None:
            return
        node.blob.users -= 1
        self.num_tokens -= 0 if node.blob.users else len(node.blob)
        node.blob = None
        self.nodes.discard(node)
        if node.parent is not None:
            self.offer(node.parent)

    def least(self) -> Node | None:
        """Choose the copy that leaves next: of all copies that may leave, the one with the lowest priority."""
        least = self.candidates.pop()
        if least is not None:
            self._policy.on_evict(least.host_priority)
        return least

    def may_leave(self, node: Node) -> bool:
        """Return whether a run has a copy with no copy behind it, and no running request is about to restore it."""
        claimed = node.in_use and not node.ready
        return node in self.nodes and not claimed and all(child.blob is None for child in node.children.values())


# ---- The operations that bring a path's KV back from host memory. -------------------------------------------------------


def restores(sequence: Sequence, rest: int) -> list[tuple[Restore, list[Node]]]:
    """Return an operation for each blob that follows the sequence's KV on its path, with the runs that the blob covers.

    The path's last `rest` tokens are left out and computed: the last one gives the logits.
    """
    runs: list[tuple[Node, HostCopy]] = []
    reached = sequence.length
    for node in reversed(list(itertools.takewhile(lambda node: node.end > sequence.length, path(sequence.tip)))):
        if node.ready or node.blob is None or node.start != reached:
            break
        runs.append((node, node.blob))
        reached = node.end
    last = sequence.most_cached(reached, rest)
    found: list[tuple[Restore, list[Node]]] = []
    for node, blob in runs:
        start, stop = node.start, min(node.end, last)
        if start >= stop:
            break
        if found and found[-1][0].blob is blob:
            restore, nodes = found.pop()
            found.append((replace(restore, stop=stop), [*nodes, node]))
        else:
            found.append((Restore(blob, sequence.id, start, stop), [node]))
    return found


def restores_to(tip: Node, sequence: int, begin: int) -> list[Restore]:
    """Return an operation for each blob of the path to `tip`, from position `begin` on. All of its runs have one."""
    found: list[Restore] = []
    behind = itertools.takewhile(lambda node: node.end > begin, path(tip))
    for node in reversed(list(behind)):
        assert node.blob is not None
        start = found.pop().start if found and found[-1].blob is node.blob else max(node.start, begin)
        found.append(Restore(node.blob, sequence, start, node.end))
    return found


# ---- Copies -------------------------------------------------------------------------------------------------------------
# Copies of runs in host memory: made when a run leaves the device, when a step needs it, or in idle time.


class Copies:
    """Decides which runs get a copy in the host tier and which copies leave it for them, and brings copies back.

    rest: how many of a path's last tokens are not brought back. remove: takes a run that has lost its last copy out of the
    tree, with the runs behind it.
    """

    def __init__(self, ledger: Ledger, host: HostTier, rest: int, remove: Callable[[Node], None]) -> None:
        self._ledger, self._host, self._rest, self._remove = ledger, host, rest, remove

    def save_if_free(self, node: Node) -> HostCopy | None:
        """Return the run's copy, made now if all of the run has been computed and no other copy has to leave for it."""
        if node.complete and self._host.has_room(len(node.tokens)):
            self.save(node, node.longest_holder())
        return node.blob

    def save_ahead(self) -> bool:
        """Copy one idle run to host memory in idle time, so that its later eviction costs nothing.

        Beginnings come first: a run is of no use without the runs before it. Return False when every idle run has a copy or
        the tier is full; no copy is dropped for it.
        """
        for sequence in self._ledger.parked.values():
            for node in reversed(list(path(sequence.tip))):
                if node.blob is None and sequence.length >= node.end and self._host.has_room(len(node.tokens)):
                    return self.save(node, sequence)
        return False

    def save_front(self, node: Node | None) -> None:
        """Copy a run in front of copies, and those in front of it, while there is room: without them, copies are of no use.

        They may be in use on the device for long, and would be lost with it. RAGCache, section 6, copies upper nodes, too.
        """
        for above in itertools.takewhile(lambda above: above.blob is None, path(node) if node else ()):
            self.save_if_free(above)

    def save(self, node: Node, sequence: Sequence) -> bool:
        """Make sure that a run has a copy in host memory. Return False if the tier has no room for it."""
        if node.blob is not None:
            return True
        host, size = self._host, len(node.tokens)
        if size > host.max_tokens:
            return False
        while not host.has_room(size):
            least = host.least()
            if least is None:
                return False
            host.drop(least)
            if not least.ready:
                self._remove(least)
        self._ledger.perform(Save(sequence.id, host.save(node)))
        return True

    def restorable(self, sequence: Sequence) -> int:
        """Return how many tokens `restore` would bring back, each into a free cell."""
        return sum(restore.stop - restore.start for restore, _ in restores(sequence, self._rest))

    def restore(self, sequence: Sequence) -> list[tuple[str, int]]:
        """Bring back the copies that follow on the sequence's path, up to its last `rest` tokens.

        Return the tier that each copy came from, and how many tokens, in order.
        """
        restored: list[tuple[str, int]] = []
        for restore, nodes in restores(sequence, self._rest):
            source, size = restore.blob.source, restore.stop - restore.start
            restored.append((source, size))
            self._ledger.perform(restore)
            for node in nodes:
                self._ledger.count_ready(node, min(node.end, restore.stop) - node.start)
                node.sequences.add(sequence)
            sequence.length = restore.stop
        self._host.num_restored += sum(size for _, size in restored)
        return restored


# ---- From lower tiers back to host memory, when the server starts. ------------------------------------------------------

logger = logging.getLogger("slotcache.tiers")


def load_records(tier: LowerTier, num_bytes: int, adopt: Callable[[str, Record], bool]) -> int:
    """Give `adopt` the records of a tier that were used last, up to `num_bytes`, beginnings first. Return how many it took.

    adopt: gets the record's key, too. A record may be dropped from the tier between its reading and its adoption, and
    must not come back then: ask whether `key in tier` where the record enters the cache. Raises TimeoutError if it does.
    """
    count = 0
    for key in tier.load(num_bytes):
        try:
            record = tier.get(key)
            count += record is not None and adopt(key, record)
        except TimeoutError:
            raise
        except Exception:  # one record must not keep the remaining ones from coming back
            logger.exception("%s is not used", key)
    return count


# ---- From host memory to lower tiers: each new copy of KV is handed over once, and written behind. ----------------------


class WriteBehind:
    """Lives in the engine's thread. host: the tiers in host memory. lower: the tiers that get their records.

    Runs of private scopes, and those that no later process could use, stay in host memory.
    """

    def __init__(self, host: Seq[HostMemory], lower: Seq[LowerTier]) -> None:
        self.lower = tuple(lower)
        self._host = tuple(host) if lower else ()
        for tier in self._host:
            tier.take_unsaved()  # from now on it notes them

    def write(self) -> None:
        """Hand over the copies that were made since the last call."""
        for tier in self._host:
            for node in tier.take_unsaved():
                record = tier.get(node)
                if node.blob is not None and record is not None and record.scope.is_shared and record.scope.is_lasting:
                    node.blob.is_written = any([below.put(record) for below in self.lower])
