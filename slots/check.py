"""The invariants of the cache, in code. Tests call `check` after every step; a server with `--check` calls it when idle."""

from __future__ import annotations

from .host import PromptTree
from .job import Phase
from .prefix_tree import PrefixTree
from .radix import Node, descendants, path
from .scheduler import Scheduler


def nodes_of(tree: PromptTree) -> list[Node]:
    """Return all runs of a tree, parents first."""
    return [node for root in tree.roots.values() for node in descendants(root)]


def check_tree(tree: PrefixTree) -> None:
    """Raise AssertionError if a tree's runs, its sequences and the counts of its device contradict each other."""
    device = tree.device
    nodes = nodes_of(tree)
    sequences = {sequence for node in nodes for sequence in node.sequences} | set(device.idle.values())
    assert device.num_ready == sum(node.ready for node in nodes)
    assert device.num_runs == sum(node.ready > 0 for node in nodes)
    assert device.num_pending == sum(len(node.tokens) - node.ready for node in nodes if node.in_use)
    assert device.num_in_use == sum(node.ready for node in nodes if node.in_use)
    assert 0 <= device.num_ready <= device.num_cells
    for owner in device.stretches.owners:
        assert owner.ready if isinstance(owner, Node) else owner.active, "stretches of cells that hold nothing"
    assert device.stretches.total == sum(map(device.stretches.of, device.stretches.owners))
    for node in nodes:
        assert len(node.tokens) > 0
        assert node.parent is not None and node.parent.children[int(node.tokens[0])] is node
        assert node.parent.end == node.start
        counts = [min(sequence.length, node.end) - node.start for sequence in node.sequences]
        assert node.ready == max(counts, default=0) and min(counts, default=1) > 0
        assert node.in_use or node.complete or (node.copy and not node.ready), "a run that nobody will compute"
        assert node.ready == 0 or node.parent.complete
        for key, end in node.documents.items():
            assert (node, key) in end.document_of and node in path(end)
        for origin, key in node.document_of:
            assert origin.documents[key] is node
    check_host(tree, nodes)
    ids = [sequence.id for sequence in sequences]
    assert len(ids) == len(set(ids)) and not set(ids) & set(device.free_ids)
    assert device.leaves.nodes == {node for node in device.idle if device.is_leaf(node)}
    for last_node, sequence in device.idle.items():
        assert sequence.last_node is last_node and not sequence.active and last_node.start < sequence.length <= last_node.end
    for sequence in sequences:
        on_path = {node for node in path(sequence.last_node) if node.start < sequence.length}
        assert on_path == {node for node in nodes if sequence in node.sequences}


def check_host(tree: PromptTree, nodes: list[Node]) -> None:
    """Raise AssertionError if a tree's runs contradict host memory's counts of copies, or the tree's set of pinned runs."""
    host, states = tree.host, [node for node in nodes if node.state is not None]
    copies = {node.copy for node in nodes if node.copy is not None}
    assert host.num_tokens == sum(map(len, copies)) and host.num_states == len(states)
    size = host.num_tokens * host.sizes.run_token + sum(host.size_of(node.end) for node in states)
    assert host.num_bytes == size <= host.max_bytes + host.overdraft
    for node in nodes:
        assert node.copy is None or (node.copy.start <= node.start and node.end <= node.copy.stop)
        assert node.state is None or (node.state.start, node.state.stop) == (0, node.end)
    assert all(copy.users == sum(node.copy is copy for node in nodes) for copy in copies)
    assert host.candidates.nodes == {node for node in nodes if host.may_evict(node)}
    assert tree.pinned == {node for node in nodes if node.pinned_until}


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError if a scheduler's requests, slots, sequences and cells contradict each other."""
    tree, device = scheduler.tree, scheduler.tree.device
    check_tree(tree)
    if scheduler.index is not tree:
        check_host(scheduler.index, nodes := nodes_of(scheduler.index))
        scheduler.index.check(nodes)
    assert scheduler.cells.num_used <= device.num_cells
    assert [slot.job for slot in scheduler.slots if slot.job] == sorted(scheduler.running, key=lambda job: job.slot)
    pins: dict[object, int] = {}
    for job in scheduler.running:
        sequence = job.sequence
        assert sequence is not None and sequence.active and sequence.last_node.end == job.claimed
        assert sequence.length == min(job.computed, job.claimed)
        assert job.computed < job.num_tokens <= len(job.tokens)
        may_pause = job.computes is not Phase.DECODE and job.phase is Phase.FOLLOWING
        assert job.phase is job.computes or may_pause
        for node in path(sequence.last_node):
            pins[node] = pins.get(node, 0) + 1
    nodes = nodes_of(tree)
    assert all(node.in_use == pins.get(node, 0) for node in nodes)
    for job in scheduler.waiting:
        assert job.sequence is None
        assert job.phase is (Phase.FETCHING if scheduler.fetcher.is_fetching(job) else Phase.WAITING)
    scheduler.waiting.groups.check(scheduler.waiting)
    active = len(scheduler.running)
    holding = {sequence for node in nodes for sequence in node.sequences}
    assert len(device.free_ids) + len(holding | {job.sequence for job in scheduler.running}) >= active + len(device.idle)
