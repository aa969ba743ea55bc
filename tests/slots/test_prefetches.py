"""KV that no client has asked for yet: it makes room for more of its kind, and takes none from the KV of requests."""

import numpy as np
import pytest
from slotcache.slots.record import Record
from slotcache.slots.request import Kind, Request
from slotcache.slots.scope import Scope
from slotcache.slots.store.tier import WriteBehind
from support.fixed_prompt import Fixed
from support.remote import Remote
from support.scopes import COMMON
from support.world import World


def tokens(start):
    return np.arange(start, start + 100, dtype=np.int32)


def prefetches(world, start):
    """Whether a prefetch of 100 tokens got room; it is computed then."""
    prompt = Fixed(tokens(start))
    if not world.scheduler.cells.make_room(prompt, COMMON):
        return False
    world.jobs.append(world.scheduler.submit(Request(start, prompt, 1, COMMON, kind=Kind.PREFETCH)))
    while not world.scheduler.idle:
        world.step()
    return True


def test_prefetches_make_room_for_prefetches_and_keep_their_copies():
    world = World(cells=300, host=1000)
    world.run(range(100))
    assert [prefetches(world, start) for start in range(1000, 1600, 100)] == [True] * 6
    tree = world.scheduler.tree
    assert tree.match(COMMON, tokens(0)).ready == 100, "a request has used it"
    assert all(tree.match(COMMON, tokens(start)).length == 100 for start in range(1000, 1600, 100))
    assert world.run([*range(1000, 1100), 7]).reuse.sources["host"] == 100
    assert world.run([*range(100), 7]).reuse.cached == 100


@pytest.mark.parametrize(("cells", "host"), [(300, 0), (300, 250), (1000, 250)])
def test_prefetches_stop_where_host_memory_is_full(cells, host):
    world = World(cells=cells, host=host)
    world.run(range(100))
    made = [prefetches(world, start) for start in range(1000, 1600, 100)]
    assert made == sorted(made, reverse=True) and not made[-1]
    assert world.scheduler.tree.host.num_tokens <= host
    assert world.scheduler.tree.match(COMMON, tokens(0)).ready == 100


def test_prefetches_stop_where_requests_use_all_cells():
    world = World(cells=280, host=1000, idle=280)
    world.run(range(100))
    world.run(range(200, 290))
    assert not prefetches(world, 1000)


def test_a_guess_that_a_request_has_used_stays():
    world = World(cells=300, host=1000)
    assert prefetches(world, 1000)
    world.run([*range(1000, 1100), 7])
    made = [prefetches(world, start) for start in range(2000, 2600, 100)]
    assert made == [True] * 6
    assert world.scheduler.tree.match(COMMON, tokens(1000)).ready == 100


def test_no_sequence_of_a_request_ends_for_a_guess():
    world = World(cells=3000, host=3000, idle=3000)
    device = world.scheduler.tree.device
    for start in range(0, 10 * device.num_free_ids, 10):
        world.run(range(5000 + start, 5000 + start + 5))
    kept = set(device.idle)
    prefetches(world, 1000)
    assert kept <= set(device.idle)


def with_a_copy_below(**shape):
    """A world with an idle run of 100 tokens that has a copy, which a lower tier has, too."""
    world = World(host=150, idle=1000, **shape)
    behind = WriteBehind(world.scheduler.index.host, [Remote(10_000)])
    world.run(range(100), limit=1)
    be_idle(world, behind)
    assert world.scheduler.tree.host.num_tokens == 100
    return world, behind


def be_idle(world, behind):
    """Do all idle work."""
    while (work := world.scheduler.plan_idle_work()) is not None:
        world.memory.run(work)
        behind.write()


@pytest.mark.parametrize("cells", [250, 1000])
def test_a_prefetch_gets_the_room_of_copies_that_a_lower_tier_has(cells):
    """The request's run is idle on the device. Its copy was made again each time, in the room that the prefetch needs."""
    world, behind = with_a_copy_below(cells=cells)
    for start in range(1000, 1500, 100):
        assert prefetches(world, start)
        be_idle(world, behind)


def test_a_prefetch_that_gets_no_room_is_no_reason_to_copy_again():
    (world, behind), other = with_a_copy_below(cells=1000), Scope.shared("u", "@x")  # no lower tier takes these adapters
    host, copies = world.scheduler.tree.host, world.scheduler.tree.copies
    assert host.put(Record(other, np.full(50, 4, np.int32), 0, [[4] * (at + 1) for at in range(50)]))  # type: ignore[arg-type]
    saved = copies.num_saved
    for _ in range(3):
        assert not world.scheduler.cells.make_room(Fixed(np.arange(1000, 1120)), COMMON)
        be_idle(world, behind)
    assert copies.num_saved == saved
