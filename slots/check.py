"""The invariants of the cache, in code: tests call this after every step, and `--check` does when the server is idle."""

from __future__ import annotations

from .hybrids.snapshots import Snapshots
from .radix import descendants, path
from .scheduler import Scheduler
from .tree import PrefixTree


def check_tree(tree: PrefixTree) -> None:
    """Raise AssertionError where the tree, its sequences and its ledger disagree."""
    ledger = tree.ledger
    nodes = [node for root in tree.roots.values() for node in descendants(root)]
    sequences = {sequence for node in nodes for sequence in node.sequences} | set(ledger.parked.values())
    assert ledger.num_ready == sum(node.ready for node in nodes)
    assert ledger.num_pending == sum(len(node.tokens) - node.ready for node in nodes if node.in_use)
    assert ledger.num_in_use == sum(node.ready for node in nodes if node.in_use)
    assert 0 <= ledger.num_ready <= ledger.num_cells
    for node in nodes:
        assert len(node.tokens) > 0
        assert node.parent is not None and node.parent.children[int(node.tokens[0])] is node
        assert node.parent.end == node.start
        held = [min(sequence.length, node.end) - node.start for sequence in node.sequences]
        assert node.ready == max(held, default=0) and min(held, default=1) > 0
        assert node.in_use or node.complete or (node.blob and not node.ready), "a run that nobody will compute"
        assert node.ready == 0 or node.parent.complete
        assert (node.blob is not None) == (node in tree.host.nodes)
        if node.blob is not None:
            assert node.blob.start <= node.start and node.end <= node.blob.stop
        for key, end in node.documents.items():
            assert (node, key) in end.document_of and node in path(end)
        for origin, key in node.document_of:
            assert origin.documents[key] is node
    assert tree.pinned == {node for node in nodes if node.pinned_until}
    blobs = {node.blob for node in nodes if node.blob is not None}
    assert tree.host.nodes <= set(nodes)
    assert tree.host.num_tokens == sum(len(blob) for blob in blobs) <= tree.host.max_tokens
    assert all(blob.users == sum(node.blob is blob for node in nodes) for blob in blobs)
    assert tree.host.candidates.nodes >= {node for node in tree.host.nodes if tree.host.may_leave(node)}
    ids = [sequence.id for sequence in sequences]
    assert len(ids) == len(set(ids)) and not set(ids) & set(ledger._free_ids)
    assert ledger.leaves.nodes == {node for node in ledger.parked if ledger.is_leaf(node)}
    for tip, sequence in ledger.parked.items():
        assert sequence.tip is tip and not sequence.active and tip.start < sequence.length <= tip.end
    for sequence in sequences:
        held = {node for node in path(sequence.tip) if node.start < sequence.length}
        assert held == {node for node in nodes if sequence in node.sequences}


def check_snapshots(snapshots: Snapshots) -> None:
    """Raise AssertionError where runs, states and the budget disagree."""
    nodes = [node for root in snapshots.roots.values() for node in descendants(root)]
    states = [node for node in nodes if node.state is not None]
    blobs = {node.blob for node in nodes if node.blob is not None}
    assert snapshots.num_states == len(states) and snapshots.num_runs == len(nodes)
    assert snapshots.num_tokens == sum(len(node.tokens) for node in nodes)
    runs = snapshots.sizes.run_token * sum(len(blob) for blob in blobs)
    assert snapshots.num_bytes == runs + sum(snapshots.size_of(node.end) for node in states) <= snapshots.max_bytes
    for node in nodes:
        assert node.parent is not None and node.parent.end == node.start
        assert node.blob is not None and node.blob.start <= node.start and node.end <= node.blob.stop
        assert node.blob.users == sum(other.blob is node.blob for other in nodes)
        assert node.state is None or (node.state.start, node.state.stop) == (0, node.end)
    assert all(node.state is not None and node.frequency < 2 for node in snapshots.unused)
    assert all(node.state is None for node in snapshots.aged) and snapshots.aged <= set(nodes)
    assert snapshots.pinned == {node for node in nodes if node.pinned_until}
    assert snapshots.candidates.nodes == {node for node in nodes if snapshots.may_leave(node)}


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError where requests, lanes, sequences and cells disagree."""
    tree, ledger = scheduler.tree, scheduler.tree.ledger
    check_tree(tree)
    check_snapshots(scheduler.snapshots)
    assert scheduler.cells.num_used <= ledger.num_cells
    assert [lane.request for lane in scheduler.lanes if lane.request] == sorted(
        scheduler.running, key=lambda request: request.lane
    )
    pins: dict[object, int] = {}
    for request in scheduler.running:
        sequence = request.sequence
        assert sequence is not None and sequence.active and sequence.tip.end == request.claimed
        assert sequence.length == min(request.computed, request.claimed)
        assert request.computed < request.num_tokens <= len(request.tokens)
        for node in path(sequence.tip):
            pins[node] = pins.get(node, 0) + 1
    for root in tree.roots.values():
        for node in descendants(root):
            assert node.in_use == pins.get(node, 0)
    assert all(request.sequence is None for request in scheduler.waiting)
    active = len(scheduler.running)
    held = {sequence for root in tree.roots.values() for node in descendants(root) for sequence in node.sequences}
    assert len(ledger._free_ids) + len(held | {r.sequence for r in scheduler.running}) >= active + len(ledger.parked)
