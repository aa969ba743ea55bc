"""How many of a prompt's last tokens are computed at least, and together, so that their bits stay the same."""

from dataclasses import replace

import numpy as np
import pytest
from slotcache.models.times import CPU
from slotcache.slots.costs import chunk_size
from slotcache.slots.host import HostMemory
from slotcache.slots.job import Job
from slotcache.slots.plan import Save, Trim
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots
from support.fixed_prompt import Fixed
from support.reuse import reuse_with
from support.world import World

from slots.test_scheduler import computed

REST = 8
COSTS = replace(CPU, recompute_last=REST)


def test_a_prompt_that_is_fully_cached_computes_its_rest_in_one_piece():
    world = World(recompute_last=REST)
    world.run(range(200))
    again = world.submit(range(200))
    assert computed(world.step(), again) == REST and again.reuse.cached == 200 - REST
    world.finish()


def test_the_rest_is_not_restored_from_host_memory():
    world = World(recompute_last=REST, host=1000)
    world.run(range(200), stops=[60, 195])  # the rest lies in two runs
    world.run(range(500, 600))
    again = world.submit(range(200))
    assert computed(world.step(), again) == REST and again.reuse.sources["host"] == 200 - REST
    world.finish()


def test_idle_kv_of_the_rest_makes_way_for_its_second_computation():
    world = World(recompute_last=REST, host=1000)
    first = world.run(range(200), limit=5)
    again = world.submit(range(200))
    plan = world.step()
    assert [(move.start, move.stop) for move in plan.operations if isinstance(move, Trim)] == [(200, 204), (192, 200)]
    assert sum(isinstance(move, Save) for move in plan.operations) == 2  # the answer behind it is still of use
    assert again.reuse.source == "own" and again.sequence and again.sequence.length == 200
    world.finish()
    more = world.run([*range(200), *first.tokens[200:204].tolist(), *range(300, 320)])
    assert more.reuse.cached == 204


def test_running_requests_keep_their_kv_of_the_rest():
    world = World(recompute_last=REST, host=1000)
    busy = world.submit(range(200), limit=30)
    world.step()
    world.step()
    again = world.run(range(200))
    assert again.reuse.cached == 200 - REST and again.reuse.source == "fork"
    assert not busy.reuse.num_preempted


def test_identical_prompts_compute_their_rests_in_one_step():
    world = World(recompute_last=REST, slots=4, batch=256)
    jobs = [world.submit(range(200)) for _ in range(4)]
    world.step()
    plan = world.step()
    assert [computed(plan, job) for job in jobs] == [1, REST, REST, REST]
    world.finish()


def test_a_prompt_shorter_than_the_rest_is_computed_whole():
    world = World(recompute_last=REST)
    world.run(range(5))
    again = world.submit(range(5))
    assert computed(world.step(), again) == 5 and again.reuse.cached == 0
    world.finish()


@pytest.mark.parametrize("room", [16, 64, 100, 512])
def test_no_piece_of_a_prompt_is_smaller_than_the_rest(room):
    for length in range(1, 1500):
        left = length
        while left:
            size = chunk_size(left, room, COSTS)
            assert min(length, REST) <= size <= room
            left -= size


def test_snapshots_leave_no_piece_that_is_smaller_than_the_rest():
    tree = PrefixTree(400, 8, costs=COSTS)
    scheduler = Scheduler(tree, num_slots=1, **reuse_with(Snapshots(tree, HostMemory(1000), spacing=8)))
    tokens = np.arange(200, dtype=np.int32)
    request = Request(
        1,
        Fixed(tokens, [4, 40, 90, 93, 150, 185, 195]),
        2,
        Scope.private(1),
        cache=False,
        snapshot_scope=Scope.shared("kept"),
    )
    job = scheduler.submit(request)
    sizes = []
    while job.computed < len(tokens):
        plan = scheduler.plan()
        sizes.append(len(plan.spans[0].tokens))
        scheduler.commit(plan, [7] * plan.spans[0].logits)
    assert len(sizes) > 4 and min(sizes) >= REST


def test_documents_keep_the_state_at_their_end_where_the_rest_covers_the_question():
    tree = PrefixTree(400, 8, costs=COSTS)
    snapshots = Snapshots(tree, HostMemory(1000), spacing=50)
    layout = Fixed(np.arange(200, dtype=np.int32), [40, 160, 195])
    job = Job(Request(1, layout, 2, Scope.private(1), cache=False, snapshot_scope=Scope.shared("kept")))
    job.lay_out(layout.layout)
    assert snapshots.stops(job) == (160,)
