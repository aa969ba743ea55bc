"""Records that are fetched for requests that wait: what comes back, who waits and for how long, and what room it takes."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from slotcache.slots.check import check
from slotcache.slots.costs import UNMEASURED
from slotcache.slots.fetched import PATIENCE
from slotcache.slots.host import HostMemory
from slotcache.slots.plan import Clear
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.radix import CopySizes
from slotcache.slots.record import Record
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots
from slotcache.slots.store import fetches
from slotcache.slots.store.fetches import Fetches, Readers
from slotcache.slots.store.tier import WriteBehind
from support.fixed_prompt import Fixed
from support.life import greedy
from support.memory import Memory, cut, seen
from support.remote import Remote
from support.reuse import reuse_with

S = Scope.shared("s")
PROMPT = [number % 5 for number in range(40)]


def record(tokens, start, **fields):
    data = [seen(tokens, "")[: at + 1] for at in range(start, len(tokens))]
    return Record(S, np.array(tokens, np.int32), start, data, **fields)  # type: ignore[arg-type]


class Lab:
    """A scheduler and a tier below it. `reads` are what threads would do; `now` is what the clock says.

    states: of a hybrid, the bytes of its runs and states, one a token and two a state.
    """

    def __init__(self, host=100, cells=100, slots=2, ends=(10, 20, 30, 40), recompute_last=1, idle=0, states=0, batch=512):
        self.memory, self.remote, self.reads, self.now = Memory(cells, can_cut=not states), Remote(10_000), [], 1.0
        costs = replace(UNMEASURED, recompute_last=recompute_last)
        self.tree = PrefixTree(cells, 12, HostMemory(0 if states else host, cut=cut), costs=costs)
        of_states = HostMemory(states, sizes=CopySizes(run_token=1, state=2), cut=cut)
        self.snapshots = Snapshots(self.tree, of_states, spacing=4)
        shape = {"num_slots": slots, "idle_cells": idle, "batch_size": batch}
        self.scheduler = Scheduler(self.tree, **shape, **reuse_with(self.snapshots))
        self.write_behind = WriteBehind(self.scheduler.index.host, [self.remote])
        self.fetches = Fetches(
            self.scheduler, [self.remote], hand_over=lambda act: act(), read=self.reads.append, clock=lambda: self.now
        )
        self.fetches.least = 10.0
        for start, stop in zip((0, *ends), ends, strict=False):
            self.remote.put(record(PROMPT[:stop], start))

    def submit(self, tokens, number=0, limit=3, **fields):
        job = self.scheduler.submit(Request(number, Fixed(tokens), limit, S, **fields))
        self.fetches.expect(job)
        self.look()
        return job

    def look(self):
        self.fetches.look()
        check(self.scheduler)

    def arrive(self, count=1):
        for _ in range(count):
            self.reads.pop(0)()
        self.look()

    def lose(self, start):
        """The record from a position on is gone."""
        self.remote._forget([next(one.key for one in self.remote.index.entries.values() if one.start == start)])

    def step(self):
        """Compute a step. Return the ids of the requests in it."""
        self.look()
        plan = self.scheduler.plan()
        sampled = self.memory.run(plan)
        self.write_behind.write()
        for job, _ in self.scheduler.commit(plan, sampled):
            if job.num_tokens == job.num_prompt + job.request.limit:
                self.scheduler.finish(job)
                prompt = job.tokens[: job.num_prompt].tolist()
                assert job.tokens[: job.num_tokens].tolist() == greedy(prompt, job.request.limit, "")
        check(self.scheduler)
        return [span.request for span in plan.spans]

    def finish(self):
        while not self.scheduler.idle:
            assert self.step()
        self.look()


def test_a_request_waits_for_what_is_on_its_way_and_computes_the_rest():
    lab = Lab()
    job = lab.submit(PROMPT)
    assert lab.fetches.seconds_left == pytest.approx(PATIENCE * lab.fetches.least), "a slot is idle: it could have begun"
    assert not lab.step()
    lab.arrive(4)
    assert lab.fetches.seconds_left is None
    lab.finish()
    assert (job.reuse.cached, job.reuse.source) == (39, "remote")
    again = lab.submit(PROMPT, 1)
    assert not lab.reads
    lab.finish()
    assert again.reuse.source == "own" or again.reuse.source == "fork"


def test_others_go_on_meanwhile_and_a_later_one_does_not_starve_it():
    lab = Lab(slots=1)
    job = lab.submit(PROMPT)
    lab.submit([4, 3, 2], 1)
    assert lab.step() == [1]
    lab.arrive(4)
    lab.finish()
    assert job.reuse.cached == 39 and job.reuse.num_overtaken == 1


def test_a_prompt_larger_than_host_memory_passes_through_it():
    lab = Lab(host=12)
    job = lab.submit(PROMPT)
    lab.arrive(4)
    host = lab.tree.host
    assert host.overdraft == 28 and host.num_bytes == 40
    lab.finish()
    assert job.reuse.cached == 39 and host.overdraft == 0 and host.num_bytes <= 12


def test_a_run_on_disk_stays_for_those_after_it_that_are_not():
    """Its own copy would be refused, with the others of no use without it: they were dropped before they were written."""
    lab, prompt = Lab(host=12, ends=(10,)), [*PROMPT[:10], *[4] * 20]
    lab.submit(prompt)
    lab.arrive()
    lab.finish()
    lab.remote.put(record(other := [3] * 12, 0))
    lab.submit([*other, 1], 1)
    lab.arrive()  # host memory is full of what this one waits for
    assert lab.tree.evict(100) == 32
    work = lab.scheduler.plan_idle_work()
    assert work is not None
    lab.memory.run(work)
    lab.write_behind.write()
    check(lab.scheduler)
    (found,) = lab.remote.index.continuing(S, np.array(prompt, np.int32), 0)
    assert (found.start, found.stop) == (0, 30) and lab.tree.host.num_lost == 0


def test_idle_time_writes_what_only_the_device_has():
    lab = Lab(host=12, ends=(12,))
    assert lab.tree.host.put(record(PROMPT[:12], 0), "remote"), "host memory is full of what is there, too"
    lab.write_behind.write()
    lab.submit([4, 3, 2, 1, 0, 4, 3, 2])
    lab.finish()
    while work := lab.scheduler.plan_idle_work():
        lab.memory.run(work)
        lab.write_behind.write()
    check(lab.scheduler)
    assert lab.remote.index.continuing(S, np.array([4, 3, 2, 1, 0, 4, 3, 2], np.int32), 0)


def idle(lab):
    """Do all idle work. Return how many plans that took."""
    for count in range(50):
        if (work := lab.scheduler.plan_idle_work()) is None:
            check(lab.scheduler)
            return count
        lab.memory.run(work)
        lab.write_behind.write()
    raise AssertionError("idle work does not end")


@pytest.mark.parametrize(("host", "most", "first"), [(20, 10_000, [4, 3, 2, 1, 0] * 5), (12, 14, [4, 3, 2, 1, 0, 4, 3, 2])])
def test_idle_work_ends_where_a_tier_is_too_small(host, most, first):
    """A run that host memory cannot hold, and a lower tier in which one of two runs has room."""
    lab = Lab(host=host, ends=(), idle=100)
    lab.remote.max_bytes = most
    for number, tokens in enumerate((first, [3] * 8)):
        lab.submit(tokens, number)
        lab.finish()
    assert idle(lab) > 0


def test_idle_work_ends_where_a_copy_was_evicted_and_the_next_run_still_does_not_fit():
    """One run of 8 tokens is written and has room in host memory. The other one of 10 would need more than its place."""
    lab = Lab(host=12, ends=(), idle=100)
    assert lab.tree.host.put(replace(record([2] * 4, 0), scope=Scope.shared("u", "@x")))  # no lower tier takes it
    for number, tokens in enumerate(([3] * 8, [4] * 10)):
        lab.submit(tokens, number, limit=1)
        lab.finish()
        idle(lab)
    assert lab.remote.num_written == 1 and lab.tree.host.num_tokens == 4, "evicted in vain, and not copied again"
    lab.submit([1] * 6, 2, limit=1)
    lab.finish()
    assert idle(lab) > 0 and lab.tree.host.num_tokens == 4 + 6, "a new idle run is looked at"


def test_a_search_for_idle_runs_tries_each_size_only_once():
    """Else each act of another thread would wait while every idle run looks through the copies that no tier takes."""
    lab, other = Lab(host=100, cells=1000, ends=(), idle=1000), Scope.shared("u", "@x")
    for number in range(20):
        assert lab.tree.host.put(replace(record([number] * 5, 0), scope=other))
    for number in range(10):
        lab.submit([number, *[1] * 8], number, limit=1)
        lab.finish()
    asked, has_written = [], lab.write_behind.has_written
    lab.write_behind.has_written = lambda key: asked.append(key) or has_written(key)
    assert lab.scheduler.plan_idle_work() is None
    assert len(lab.tree.device.idle) == 10 and len(asked) == 20, "once about each copy"


def test_host_memory_keeps_its_budget_beside_copies_that_no_tier_takes():
    lab, other = Lab(host=100, ends=(), cells=60), Scope.shared("u", "@x")
    for number in range(40):
        tokens = [number, number]
        assert lab.tree.host.put(replace(record(tokens, 0), scope=other))
    lab.write_behind.write()
    for number in range(8):
        lab.remote.put(record(prompt := [100 + number, *PROMPT[:29]], 0))
        lab.submit(prompt, number)
        while lab.reads:
            lab.arrive()
        lab.finish()
        assert lab.tree.host.num_bytes <= 100 and lab.tree.host.overdraft == 0


def test_a_copy_stays_until_its_record_is_written():
    """Not only taken: the write may fail."""
    lab = Lab(host=12, ends=())
    for tokens, left in (([3] * 12, 0), ([4] * 12, 12)):
        assert lab.tree.host.put(record(tokens, 0))
        lab.write_behind.write()
        if left:
            lab.remote.index.remove(list(lab.remote.index.entries.values())[-1])  # as while it waits to be written
        lab.tree.host.free_written(12)
        assert lab.tree.host.num_tokens == left


def test_copies_that_are_there_too_are_evicted_for_it_and_others_stay():
    lab = Lab(host=45)
    kept = record([4] * 5, 0)
    assert lab.tree.host.put(kept)  # it is in no lower tier
    assert lab.remote.put(there := record([3] * 30, 0)) and lab.tree.host.put(there, "remote")
    lab.submit(PROMPT)
    lab.arrive(4)
    assert lab.tree.num_cached(S, kept.tokens) == 5 and lab.tree.num_cached(S, np.array([3] * 30, np.int32)) == 0
    assert lab.tree.num_cached(S, np.array(PROMPT, np.int32)) == 40 and lab.tree.host.overdraft == 0
    lab.finish()


@pytest.mark.parametrize("arrived", range(4))
def test_nobody_waits_longer_than_computing_and_a_tenth_more(arrived):
    """By the time it gives up it has lost a tenth of the time to compute at most, beside what it is spared."""
    lab = Lab()
    job = lab.submit(PROMPT)
    lab.look()  # from now on it could run
    lab.arrive(arrived)
    most = 1 + 10.0 * (PATIENCE + arrived / 4)
    lab.now = most - 0.01
    assert not lab.step()
    lab.now = most
    assert lab.step() == [0] and lab.fetches.num_given_up == 1
    while lab.reads:
        lab.arrive()  # too late: nothing of it is taken
    lab.finish()
    assert job.reuse.cached == 10 * arrived


def test_the_clock_stands_while_it_would_start_after_a_running_prompt():
    lab = Lab(batch=8)
    lab.submit([4] * 30, 1)
    lab.step()
    job = lab.submit(PROMPT)
    lab.now = 1000.0
    assert lab.step() == [1] and lab.fetches.num_given_up == 0
    lab.arrive(4)
    lab.finish()
    assert (job.reuse.cached, job.reuse.source) == (39, "remote")


def test_the_clock_stands_while_no_slot_is_idle():
    lab = Lab(slots=1)
    lab.submit([4, 3, 2], 1, limit=20)
    assert lab.step() == [1]
    job = lab.submit(PROMPT)
    lab.now = 1000.0
    assert lab.step() == [1] and lab.fetches.num_given_up == 0
    lab.arrive(4)
    lab.finish()
    assert job.reuse.cached == 39


def test_the_clock_stands_while_no_request_may_start():
    """As at the end of a model's turn on a shared device."""
    lab = Lab()
    lab.submit([4, 3, 2], 1, limit=20)
    assert lab.step() == [1]
    lab.scheduler.admits = False
    job = lab.submit(PROMPT)
    lab.now = 1000.0
    assert lab.step() == [1] and lab.fetches.num_given_up == 0
    lab.scheduler.admits = True
    lab.arrive(4)
    lab.finish()
    assert job.reuse.cached == 39


def test_a_tier_that_was_slow_is_not_asked_but_tried_again():
    lab = Lab()
    read = lab.remote.get

    def slow(key):
        lab.now += 1e6
        return read(key)

    lab.remote.get = slow
    lab.submit(PROMPT)
    lab.arrive(4)
    tries = 0
    while not lab.reads:
        lab.finish()
        lab.tree.forget(S)
        lab.submit(PROMPT, tries := tries + 1)
        assert tries < 1000
    assert tries > 10


@pytest.mark.parametrize("lost", [(0,), (10,), (20,), (30,), (0, 20), (10, 20), (0, 10, 20)])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("host", [100, 12])
def test_a_record_that_is_gone_costs_its_own_tokens(lost, when, host):
    lab = Lab(host=host)
    jobs = [lab.submit(PROMPT)] if when == "meanwhile" else []
    for start in lost:
        lab.lose(start)
    (job,) = jobs or [lab.submit(PROMPT)]
    lab.arrive(len(lab.reads))
    lab.finish()
    assert job.reuse.sources == {"remote": 40 - 10 * len(lost) - (30 not in lost)}
    assert [(one.start, one.stop) for one in job.reuse.spans] == [
        (start, min(start + 10, 39)) for start in range(0, 40, 10) if start not in lost
    ]
    assert lab.tree.host.num_aside == lab.tree.host.overdraft == 0 and lab.tree.host.num_bytes <= host
    assert lab.scheduler.counters.prefilled_tokens == 40 - job.reuse.cached


def test_a_short_hole_is_computed_with_tokens_after_it_for_exact_bits():
    lab = Lab(ends=(10, 13, 16, 30, 40), recompute_last=8)
    lab.lose(10)
    job = lab.submit(PROMPT)
    lab.arrive(4)
    sizes = []
    while not lab.scheduler.idle:
        plan = lab.scheduler.plan()
        sizes += [len(span.tokens) for span in plan.spans]
        for done, _ in lab.scheduler.commit(plan, lab.memory.run(plan)):
            if done.num_tokens == 43:
                lab.scheduler.finish(done)
        check(lab.scheduler)
    assert [(one.start, one.stop) for one in job.reuse.spans] == [(0, 10), (18, 30), (30, 32)]
    assert sizes == [8, 8, 1, 1]


def test_a_twin_shares_what_is_adopted_after_a_hole():
    lab = Lab()
    lab.lose(10)
    jobs = [lab.submit(PROMPT, number) for number in range(2)]
    lab.arrive(len(lab.reads))
    lab.finish()
    assert jobs[0].reuse.sources == {"remote": 29} and jobs[1].reuse.cached == 39
    assert lab.scheduler.counters.prefilled_tokens == 10 + 2


def test_what_is_after_a_hole_is_let_go_where_it_is_not_needed():
    lab = Lab(host=50)
    lab.lose(0)
    job = lab.submit(PROMPT)
    lab.arrive(3)
    assert lab.tree.host.num_aside == 30 and lab.tree.host.num_bytes == 0
    lab.scheduler.finish(job)
    lab.look()
    assert lab.tree.host.num_aside == 0


def test_what_comes_from_after_a_hole_for_a_request_that_has_ended_is_not_kept():
    lab = Lab(host=50)
    lab.lose(0)
    lab.scheduler.finish(lab.submit(PROMPT))
    lab.arrive(3)
    assert lab.tree.host.num_aside == 0


def test_what_is_after_a_hole_is_dropped_with_its_scope():
    lab = Lab()
    lab.lose(0)
    job = lab.submit(PROMPT)
    lab.arrive(3)
    lab.tree.drop(S)
    lab.remote.drop(S)
    lab.finish()
    assert job.reuse.cached == 0 and lab.tree.host.num_aside == 0


def test_what_is_after_a_hole_survives_a_pause_and_a_failed_step():
    lab = Lab()
    lab.lose(0)
    job = lab.submit(PROMPT)
    lab.arrive(3)
    assert lab.step() == [0] and job.computed == 10
    lab.scheduler.recover()
    lab.memory.apply(Clear())
    lab.finish()
    assert job.reuse.cached == 29


@pytest.mark.parametrize("takes_more", [True, False])
def test_kv_that_only_the_device_has_is_written_before_eviction_where_host_memory_is_full(takes_more):
    lab, other = Lab(host=40, slots=1, idle=100), np.array([4] * 15, np.int32)
    lab.submit(other, 1)
    lab.finish()
    lab.submit([1, 2], 2, limit=30)
    lab.step()
    job = lab.submit(PROMPT)
    lab.arrive(4)
    assert lab.tree.host.num_bytes == 40
    if not takes_more:
        lab.remote.max_bytes = 0
    lab.tree.evict(15)
    lab.step()
    lab.look()
    assert lab.tree.host.num_bytes == 40 and lab.tree.num_cached(S, other) == 0
    written = [one.stop for one in lab.remote.index.continuing(S, other, 0)]
    assert (written, lab.tree.host.num_lost) == (([15], 0) if takes_more else ([], 17))
    lab.finish()
    assert job.reuse.cached == 39


def test_a_state_that_was_evicted_comes_back_though_its_runs_are_there():
    lab = Lab(states=200, ends=())
    for number, stop in enumerate((20, 40)):
        lab.submit(PROMPT[:stop], number, 1, cache=False, snapshot_scope=S)
        lab.finish()
    node = lab.snapshots.longest(S, np.array(PROMPT[:39], np.int32))
    assert node is not None and node.end == 20
    lab.snapshots.forget(node)
    job = lab.submit([*PROMPT[:30], 7, 7], 2, 1, cache=False, snapshot_scope=S)
    lab.arrive(1)
    lab.finish()
    assert (job.reuse.cached, job.reuse.source) == (20, "remote")


@pytest.mark.parametrize("arrived", [4, 2])
def test_a_request_that_begins_lets_go(arrived):
    """Not only once it ends: what it has read could not leave for others as long as it runs."""
    lab = Lab()
    job = lab.submit(PROMPT, limit=30)
    lab.arrive(arrived)
    needed = [node.copy for node in lab.tree.host.nodes if node.copy and node.copy.num_fetches]
    assert needed, "it is needed as long as it waits"
    lab.look()
    lab.now = 1e6
    assert lab.step() == [0] and job.sequence is not None
    lab.look()
    assert not any(copy.num_fetches for copy in needed) and lab.fetches._num_unread == 0
    assert not lab.fetches._open, "it takes no room of the fetches of others"


def test_a_request_that_ends_lets_go():
    lab = Lab(host=12)
    job = lab.submit(PROMPT)
    lab.arrive(2)
    lab.scheduler.finish(job)
    lab.look()
    lab.arrive(2)
    assert lab.scheduler.idle and lab.tree.host.overdraft == 0 and lab.tree.host.num_bytes <= 12
    assert all(node.copy.num_fetches == 0 for node in lab.tree.host.nodes if node.copy)


def test_a_scope_that_is_dropped_meanwhile_stays_dropped():
    lab = Lab()
    job = lab.submit(PROMPT)
    read, lab.reads = lab.reads, []
    lab.tree.drop(S)
    lab.remote.drop(S)
    for one in read:
        one()
    lab.finish()
    assert job.reuse.cached == 0


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    readers, read = Readers(count=1), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(fetches, "Thread", NoThread)
        with pytest.raises(RuntimeError, match="new thread"):
            readers(lambda: None)
    readers(read.set)
    assert read.wait(60)
