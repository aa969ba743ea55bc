"""The prompt that a slot ran last is saved and restored, beside other requests, and where host memory is short."""

import pytest
from slotcache.slots.check import check
from slotcache.slots.slot import Histories
from support.scopes import COMMON
from support.world import World


def histories(world):
    tree = world.scheduler.tree
    return Histories(tree.device, tree, carry_out=world.carry_out)


def save(world, slot=0):
    """Return the slot's records. Each holds the KV of just its own tokens."""
    records = histories(world).save(world.scheduler.slots[slot])
    for record in records:
        tokens = record.tokens.tolist()
        assert record.data == [tuple(tokens[: at + 1]) for at in range(record.start, len(tokens))]
    assert [record.start for record in records] == [0, *(len(record.tokens) for record in records)][: len(records)]
    check(world.scheduler)
    return records


def restore(world, records, slot=0):
    """Return how many tokens came back."""
    for record in records:
        if not world.scheduler.tree.host.put(record):
            break
    check(world.scheduler)
    last = records[-1]
    return histories(world).remember(world.scheduler.slots[slot], last.scope, last.tokens)


def test_only_what_is_computed_is_saved():
    world = World(host=1000, batch=64)
    world.run(range(300), stops=(100,))
    world.scheduler.tree.drop(COMMON)
    again = world.submit(range(300), stops=(100,), slot=1)
    world.step()
    world.step()
    assert again.computed == 128 and again.slot == 1
    records = save(world)
    assert [len(record.tokens) for record in records] == [100, 128]
    fresh = World(host=1000)
    assert restore(fresh, records) == 128
    assert fresh.run(range(300)).reuse.cached == 128


@pytest.mark.parametrize("room", [60, 100, 150, 200])
def test_a_save_needs_no_room_in_the_host_tier(room):
    world = World(host=room, idle=1000)
    world.run(range(140), stops=(50, 90))
    while plan := world.scheduler.plan_idle_work():
        world.memory.run(plan)
    copied = world.scheduler.tree.host.num_tokens
    records = save(world)
    assert len(records[-1].tokens) == 141 and world.scheduler.tree.host.num_tokens == copied
    fresh = World(host=room)
    restored = restore(fresh, records)
    assert restored == max((len(record.tokens) for record in records if len(record.tokens) <= room), default=0)
    assert fresh.run([*range(140), 3]).reuse.cached == min(restored, 140)


def test_what_is_saved_after_a_part_was_evicted_is_a_prefix():
    world = World(cells=310, host=0)
    world.run(range(140), stops=(50, 90))
    assert save(world) == [], "there is nowhere to keep KV"


def test_a_record_goes_on_where_a_part_of_it_is_cached_already():
    world = World(host=1000)
    world.run(range(140))
    records = save(world)
    fresh = World(host=1000)
    fresh.run([*range(60), *range(500, 540)])
    assert restore(fresh, records) == 141
    assert fresh.scheduler.tree.host.num_tokens == 81
    assert fresh.run([*range(140), 3]).reuse.cached == 140


def test_what_another_request_is_computing_has_not_come_back():
    world = World(host=1000)
    world.run(range(140))
    records = save(world)
    fresh = World(host=1000, batch=64)
    running = fresh.submit(range(140))
    fresh.step()
    assert running.computed == 64 and restore(fresh, records, slot=1) == 64
    fresh.finish()
    assert restore(fresh, records, slot=1) == 141


def test_what_only_a_slot_kept_is_erased():
    world = World(host=1000, idle=1000)
    world.run(range(100), stops=(50,))
    world.run([*range(50), 7, 7, 7], stops=(50,), slot=1)
    slots = world.scheduler.slots
    before = world.scheduler.tree.device.num_ready
    assert histories(world).erase(slots[0]) == 51
    check(world.scheduler)
    assert world.scheduler.tree.device.num_ready == before - 51
    assert histories(world).erase(slots[0]) == 0
