"""Where prompt tokens came from, and what that saved."""

from dataclasses import replace

import numpy as np
import pytest
from slotcache.models.times import CPU
from slotcache.slots.host import HostMemory, Nothing
from slotcache.slots.job import Job
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.radix import CopySizes
from slotcache.slots.record import Record
from slotcache.slots.request import Request
from slotcache.slots.reuse import ON_DEVICE, Source
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots
from slotcache.slots.state_tree import StateTree
from support.fixed_prompt import Fixed
from support.memory import Memory, cut
from support.reuse import reuse_with
from support.scopes import COMMON

SHARE = 0.25  # of the time that tokens take to compute: to bring them back
PROMPT = np.arange(30, dtype=np.int32)


def scheduler_of(max_bytes=0, host=0):
    """A device on which a token takes a tenth of a second, and a quarter of that to restore."""
    tree = PrefixTree(200, 8, HostMemory(host), costs=replace(CPU, restore_share=SHARE, recompute_last=1))
    tree.profile.learn(100, 50, 10.0)
    states = HostMemory(max_bytes, sizes=CopySizes(run_token=1, state=5), cut=cut)
    return Scheduler(tree, num_slots=1, **reuse_with(Snapshots(tree, states, spacing=2)))


def ask(scheduler, memory, tokens):
    """Have a hybrid compute a prompt."""
    prompt, alone = Fixed(tokens, [len(tokens)]), Scope.private(len(tokens))
    job = scheduler.submit(Request(len(tokens), prompt, 1, alone, cache=False, snapshot_scope=COMMON))
    while job.num_tokens == job.num_prompt:
        plan = scheduler.plan()
        scheduler.commit(plan, memory.run(plan))
    scheduler.finish(job)
    memory.run(scheduler.plan())
    return job


@pytest.mark.parametrize("source", [source for source in Source if source is not Source.NONE])
def test_what_is_brought_back_saves_less_than_what_is_there(source):
    scheduler = scheduler_of()
    job = Job(Request(0, Fixed(PROMPT, [30]), 1, COMMON))
    scheduler.counters.count_cached(job, source, 0, 20)
    (reused,) = job.reuse.spans
    whole = scheduler.tree.profile.seconds(0, 20)
    assert whole == pytest.approx(2.0) and reused.seconds == pytest.approx(whole * (1 if source in ON_DEVICE else 1 - SHARE))
    assert job.reuse.source == source and scheduler.counters.cached_tokens == {source: 20}


@pytest.mark.parametrize(("origin", "source"), [(None, Source.SNAPSHOT), (Source.DISK, Source.DISK)])
def test_a_state_counts_by_its_tier_and_its_restore_takes_time(origin, source):
    first, memory = scheduler_of(max_bytes=1000), Memory(200, can_cut=False)
    ask(first, memory, PROMPT)
    assert isinstance(first.index, StateTree)
    records = [first.index.host.get(node) for node in first.index.of(COMMON)]
    again, memory = scheduler_of(max_bytes=1000), Memory(200, can_cut=False)
    assert records and all(record and again.index.host.put(record, origin) for record in records)
    job = ask(again, memory, [*PROMPT, 77])
    assert job.reuse.cached == 30 and job.reuse.source == source
    whole = again.tree.profile.seconds(0, 30)
    assert sum(one.seconds for one in job.reuse.spans) == pytest.approx((1 - SHARE) * whole)


class HasAll(Nothing):
    def has_accepted(self, key):
        return True


@pytest.mark.parametrize(("name", "is_noted"), [(None, True), (Source.DISK, False), ("another tier", False)])
@pytest.mark.parametrize("max_bytes", [0, 1000])
def test_what_comes_from_a_lower_tier_is_not_written_there_again(name, is_noted, max_bytes):
    scheduler = scheduler_of(max_bytes, host=100)
    host = scheduler.index.host
    host.write_behind(HasAll())
    state = np.zeros(5, np.uint8) if max_bytes else None
    assert host.put(Record(COMMON, PROMPT, 0, np.zeros(30, np.uint8), state=state), name)
    noted = host.take_unsaved()
    (node,) = host.nodes
    assert noted == [node] * is_noted and host.is_below(node) is not is_noted
