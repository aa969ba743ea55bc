"""With many scopes, a request pays for its own."""

import numpy as np
import pytest
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.scope import Scope
from support.world import World

A, NUMBERED = Scope.shared("a"), [Scope.shared(str(number)) for number in range(20)]


class Counted(dict):
    """Roots by scope that count how often all of them are visited."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()

    def values(self):
        self.walks += 1
        return super().values()

    def items(self):
        self.walks += 1
        return super().items()


class Busy(World):
    """Without the checks behind each step, which visit everything."""

    def step(self):
        plan = self.scheduler.plan()
        for job, _ in self.scheduler.commit(plan, self.memory.run(plan)):
            if job.num_tokens == job.num_prompt + job.request.limit:
                self.scheduler.finish(job)
        self.moved = bool(plan.afterwards) or getattr(self, "moved", False)
        return plan


@pytest.mark.parametrize("aside", [10_000, 0.1])
def test_no_request_looks_at_all_scopes(aside):
    world = Busy(host=1000, aside=aside, batch=64)
    for number, scope in enumerate(NUMBERED):
        world.run([number, 1, 2], scope=scope)
    tree = world.scheduler.tree
    tree.roots = roots = Counted(tree.roots)
    others = [world.submit([*range(100), last], scope=A, stops=(50,), limit=20) for last in (5, 6)]
    world.step()
    world.submit([*range(200, 300)], scope=NUMBERED[3])
    world.finish()
    assert world.moved == (aside < 1)
    (node,) = tree.roots[NUMBERED[5]].children.values()
    record = tree.host.get(node)
    assert record is not None and record.scope == NUMBERED[5]
    assert tree.drop(A) and tree.drop(NUMBERED[3]) and A not in tree.roots and all(job.reuse.source for job in others)
    world.scheduler.pins.expire()
    assert not list(world.scheduler.pins.runs())
    assert tree.roots is roots and roots.walks == 0


def test_what_is_computed_of_a_cancelled_prompt_takes_no_memory_for_its_rest():
    tree = PrefixTree(2000, 8)
    sequence = tree.claim(A, np.arange(1000, dtype=np.int32)).sequence
    tree.device.advance(sequence, 10)
    tree.release(sequence)
    tokens = sequence.last_node.tokens
    assert (tokens if tokens.base is None else tokens.base).nbytes == 4 * len(tokens) == 40
