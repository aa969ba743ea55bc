"""The prefill budget: what a step may compute beside running streams, by the time that earlier steps took."""

import sys

import numpy as np
from slotcache.models.times import CPU
from slotcache.slots.costs import PrefillBudget, Profile
from slotcache.slots.plan import Plan, Span
from support.world import World

TOKEN = 0.001  # s


class Machine:
    """It computes a token in a millisecond, and `per_cell` more for each cell in use; a step may take 0.2 s."""

    def __init__(self, per_cell=0.0):
        self.per_cell = per_cell
        self.profile = Profile(CPU.chunk)
        self.budget = PrefillBudget(512, 0.2, CPU, self.profile)

    def step(self, num_tokens=0, pause=0.0, cells=0):
        """Compute as many tokens as the budget allows, if it is not said; return how many."""
        num_tokens = num_tokens or self.budget.limit(512, lambda _: cells)
        plan = Plan(spans=(Span(0, 0, 0, np.zeros(num_tokens, np.int32), logits=False),))
        seconds = num_tokens * (TOKEN + self.per_cell * (cells + num_tokens / 2)) + pause
        self.budget.observe(plan, seconds, cells)
        return num_tokens


def test_a_pause_of_the_machine_makes_one_step_small_and_not_hundreds():
    machine = Machine()
    for _ in range(100):
        machine.step()
    machine.step(512, pause=60.0)
    assert machine.step() == CPU.chunk
    after = [machine.step() for _ in range(40)]
    assert min(after) > 100 and 160 < after[-1] <= 180


def test_a_step_that_takes_a_tenth_longer_than_its_profile_keeps_to_the_stall():
    machine = Machine()
    for _ in range(100):
        assert machine.step() * TOKEN * 1.1 <= 0.2 + 1e-9
    assert 170 < machine.step() <= 180


def test_cells_of_others_make_steps_small_and_their_end_makes_them_large_again():
    """512 tokens in an empty pool are followed by steps beside 8,000 cells, where a token takes three times as long."""
    machine = Machine(per_cell=TOKEN / 4000)
    for cells in [0, 2000, 4000, 6000] * 5:
        machine.step(128, cells=cells)
    crowded, alone = machine.step(cells=8000), machine.step(cells=0)
    assert 55 <= crowded <= 64 and 170 <= alone <= 180
    assert machine.step(cells=8000) == crowded


def test_a_machine_that_stays_slower_is_learnt():
    machine = Machine()
    for _ in range(100):
        machine.step(512)
    for _ in range(150):
        machine.step(512, pause=512 * 9 * TOKEN)
    assert machine.profile.seconds(0, 1) > 9 * TOKEN


def test_to_look_at_a_swap_takes_no_longer_with_many_idle_runs():
    """The budget looks at it several times a step, and so do prompts that start later."""

    def num_calls(num_idle):
        world, calls = World(cells=9000, slots=2, aside=10, lent=9000), []
        for n in range(num_idle):
            world.run([1, 2, *range(100 * n, 100 * n + 20)], limit=1, stops=[1, 2])
        world.submit(range(5000, 5500))
        world.step()
        sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
        try:
            passed = world.scheduler.cells.swap.passed_over(world.scheduler.running, 128)
        finally:
            sys.setprofile(None)
        assert passed == world.scheduler.running[0].computed, "all idle runs are set aside"
        return len(calls)

    assert num_calls(3) == num_calls(7)
