"""Requests with different LoRA adapters: never in one step, in turns, and with no KV in common."""

import numpy as np
from slotcache.slots.host import HostMemory
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import MAX_NAME, Scope, name_in
from support.fixed_prompt import Fixed
from support.memory import Memory


def request_of(number, adapters, size=9):
    return Request(number, Fixed(np.arange(size, dtype=np.int32), ()), 20, Scope.shared("s", adapters))


def scheduler_of(*adapters, budget=512):
    """A scheduler and a memory, with a request for each of these sets, all of the same prompt."""
    tree = PrefixTree(400, 16, HostMemory(0))
    scheduler = Scheduler(tree, num_slots=8, batch_size=64, prefill_budget=budget)
    for number, one in enumerate(adapters):
        scheduler.submit(request_of(number, one))
    return scheduler, Memory(400)


def run(scheduler, memory, steps):
    """Return the adapters and the requests of each step."""
    seen = []
    for _ in range(steps):
        plan = scheduler.plan()
        seen.append((plan.adapters, [span.request for span in plan.spans]))
        scheduler.commit(plan, memory.run(plan))
    return seen


def test_the_sets_take_turns():
    scheduler, memory = scheduler_of("", "a", "b", "a")
    steps = run(scheduler, memory, 12)
    assert [adapters for adapters, _ in steps] == ["a", "b", ""] * 4
    assert {tuple(requests) for adapters, requests in steps[3:] if adapters == "a"} == {(1, 3)}


def test_one_set_shares_each_step():
    scheduler, memory = scheduler_of("a", "a", "a")
    assert all(adapters == "a" for adapters, _ in run(scheduler, memory, 5))
    assert {len(requests) for _, requests in run(scheduler, memory, 5)} == {3}


def test_a_long_prompt_of_one_set_keeps_its_budget_while_another_set_generates():
    scheduler, memory = scheduler_of("", budget=16)
    run(scheduler, memory, 2)
    scheduler.submit(request_of(1, "a", size=200))
    sizes = []
    for _ in range(8):
        plan = scheduler.plan()
        sizes.append((plan.adapters, plan.num_tokens))
        scheduler.commit(plan, memory.run(plan))
    assert sizes == [("a", 16), ("", 1)] * 4


def test_no_kv_in_common():
    scheduler, memory = scheduler_of("")
    run(scheduler, memory, 2)
    scheduler.finish(scheduler.running[0])
    for number, adapters in ((1, "a"), (2, "")):
        scheduler.submit(request_of(number, adapters))
    run(scheduler, memory, 2)
    assert {job.request.id: job.reuse.cached for job in scheduler.running} == {1: 0, 2: 8}


def test_a_scope_as_text():
    for scope in (Scope.shared(""), Scope.shared("x"), Scope.shared("", "a"), Scope.shared("n" * MAX_NAME, "a,b")):
        assert Scope.read(scope.text) == scope and name_in(scope.text) == scope.name
    assert Scope.shared("x").text == "x"
