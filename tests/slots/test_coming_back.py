"""KV that is computed again while its records come back, and while slots that ran it before are saved."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from slotcache.slots.check import check
from slotcache.slots.reuse import Source
from slotcache.slots.slot import Histories
from support.memory import next_token
from support.scopes import COMMON
from support.world import World

LONGEST = 60


@given(
    length=st.integers(20, LONGEST),
    stops=st.sets(st.integers(1, LONGEST), max_size=4),
    later=st.sets(st.integers(1, LONGEST), max_size=4),
    batch=st.integers(4, 16),
    steps=st.integers(0, 6),
    ends=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_what_is_being_computed_is_neither_saved_nor_taken_in(length, stops, later, batch, steps, ends):
    """Only computed KV is saved, and a record is not put into runs that a request is computing."""
    world = World(cells=200, slots=2, batch=batch, host=500, idle=200)
    tree, tokens = world.scheduler.tree, np.arange(length, dtype=np.int32) % 5
    histories = Histories(tree.device, tree, carry_out=world.carry_out)
    world.run(tokens, stops=sorted(one for one in stops if one < length), limit=1)
    slot = next(slot for slot in world.scheduler.slots if len(slot.history))
    records = histories.save(slot)
    assert len(records[-1].tokens) == length
    tree.drop(COMMON)
    again = world.submit(tokens, stops=sorted(one for one in later if one < length), limit=30)
    for _ in range(steps):
        world.step()
    saved = histories.save(slot)
    assert (len(saved[-1].tokens) if saved else 0) == min(again.computed, length)
    for record in saved:
        assert record.data == [tuple(record.tokens[: at + 1].tolist()) for at in range(record.start, len(record.tokens))]
    for record in records:
        tree.host.put(record, Source.DISK)
        check(world.scheduler)
    if ends:
        world.scheduler.finish(again)
        check(world.scheduler)
    world.finish()
    last = world.run([*tokens.tolist(), 1, 2, 3], limit=2)
    assert last.tokens[-1] == next_token(tuple(last.tokens[:-1].tolist()))
