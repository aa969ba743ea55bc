"""Drafts: found by lookup, checked in the step that computes the last token, and taken back where they are wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.slots.costs import UNMEASURED, Costs
from slotcache.slots.drafts import FIRST_CREDIT, FIRST_STEPS, REFRESH, ROWS, UNKNOWN, Drafts, Odds, Pace, expected
from slotcache.slots.job import Phase
from slotcache.slots.lookup import LONGEST, MOST_PLACES, SHORTEST, Lookup, Score
from slotcache.slots.plan import Plan, Span, Trim
from support.world import END, World

WORDS = st.lists(st.integers(0, 3), max_size=60)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def longest(tokens: list[int], last: int) -> int:
    """Return how many last tokens end at or before place `last`, too, at most LONGEST; 0 for fewer than are looked up."""
    for length in range(min(last, LONGEST), SHORTEST - 1, -1):
        if any(tokens[stop - length : stop] == tokens[-length:] for stop in range(length, last + 1)):
            return length
    return 0


@given(prompt=WORDS, steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=20))
def test_a_draft_is_the_text_after_the_longest_match(prompt, steps):
    lookup, tokens = Lookup(), list(prompt)
    for step in steps:
        tokens += step
        draft = lookup.draft(np.array(tokens, np.int32), len(prompt), 5)
        assert (draft is not None) == (longest(tokens, len(tokens) - 1) > 0)
        if draft:
            if len(prompt) <= MOST_PLACES:  # else an older place than the newest ones may match further
                assert draft.matched >= longest(tokens, len(prompt))
            matched = tokens[len(tokens) - draft.matched :]
            after_draft = [
                (tokens[stop:] * 5)[:5]
                for stop in range(draft.matched, len(tokens))
                if tokens[stop - draft.matched : stop] == matched
            ]
            assert draft.tokens.tolist() in after_draft


def test_a_draft_goes_on_where_the_last_one_was_right():
    """Of two places with as much in common, the last draft's."""
    page = [*range(100, 150), *range(200, 210), *range(100, 150), *range(300, 310)]
    lookup, draft = Lookup(), None
    for length in range(1, 40):
        answer = [*page, *range(100, 100 + length)]
        draft = lookup.draft(np.array(answer, np.int32), len(page), 4)
    assert draft is not None and draft.matched == LONGEST
    assert draft.tokens.tolist() == [139, 140, 141, 142]


def test_a_repetition_goes_on():
    draft = Lookup().draft(np.array([7, 1, 2, 3, 1, 2, 3, 1, 2, 3], np.int32), 4, 8)
    assert draft is not None and draft.tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drafts_change_no_token_and_save_steps():
    plain, world = World(), World(rows=64)
    tokens = [*plain.run(PROMPT, limit=40).tokens[len(PROMPT) :], 8, *PROMPT]
    expected_tokens = plain.run(tokens, limit=40).tokens
    job = world.run(tokens, limit=40, drafts=True)
    assert job.tokens.tolist() == expected_tokens.tolist() and job.request.draft is not None
    assert 0 < job.request.draft.num_accepted <= job.request.draft.num_drafted == world.scheduler.counters.drafted_tokens
    assert len(world.plans) < 20 < len(plain.plans)


def test_wrong_tokens_leave_the_cells():
    world = World(rows=64)
    job = world.submit([*[5, 6, 7, 1, 1, 1, 1, 1] * 3, 5, 6, 7], limit=30, drafts=True)
    world.finish()
    world.step()  # takes back what the last one had wrong
    trims = [operation for plan in world.plans for operation in plan.operations if isinstance(operation, Trim)]
    draft = job.request.draft
    assert draft is not None
    assert sum(trim.stop - trim.start for trim in trims) == draft.num_drafted - draft.num_accepted > 0
    assert job.num_tokens == job.num_prompt + 30


@pytest.mark.parametrize("reason", ["not asked for", "a prompt waits", "no rows", "no cells"])
def test_no_drafts(reason):
    repeated = PROMPT * 4
    world = World(rows=0 if reason == "no rows" else 64, cells=42 if reason == "no cells" else 1000, budget=4)
    world.submit(repeated, limit=8, drafts=reason != "not asked for")
    while world.scheduler.waiting or world.jobs[0].phase is not Phase.DECODE:
        world.step()
    if reason == "a prompt waits":
        world.submit(range(100, 200), limit=2)
    world.step()
    world.step()
    assert not any(plan.has_drafts for plan in world.plans)


def test_tokens_that_end_an_answer_are_not_drafted():
    world = World(rows=64)
    job = world.submit([1, 2, 3, 5, END, 4, 1, 2], limit=8, drafts=True)
    job.lay_out(job.request.prompt.arrange(world.scheduler.index, job.request.scope))
    job.append(3)
    (draft,) = world.scheduler.drafts.propose([job], [job], world.scheduler.cells)
    assert draft.tolist() == [5]


def test_what_is_never_right_costs_half_a_percent():
    """A step of n rows takes n times as long as one: nothing pays unless nearly all is right, and here nothing is."""
    drafts, job = Drafts(UNMEASURED, max_rows=64), World(rows=64).submit(PROMPT * 4, limit=20000, drafts=True)
    job.lay_out(job.request.prompt.arrange(World().scheduler.index, job.request.scope))
    job.append(1)
    job.computed = job.num_prompt
    seconds = steps = num_rows = 0.0
    world = World(cells=100000)
    for number in range(5000):
        proposed = drafts.propose([job], [job], world.scheduler.cells)
        draft = proposed[0] if len(proposed) else np.zeros(0, np.int32)
        rows = 1 + len(draft)
        span = Span(0, 0, job.computed, np.zeros(rows, np.int32), logits=True, drafted=len(draft))
        drafts.observe(Plan((), (span,)), rows * 0.01)
        job.computed += 1
        job.append(PROMPT[(2 * number + number // 7) % 8])
        num_rows += rows
        drafts.settle([(job, span)] if len(draft) else [], world.scheduler.tree.device)
        seconds, steps = seconds + rows * 0.01, steps + 1
    assert num_rows > steps, "nothing was drafted"
    assert seconds < 0.01 * (steps * 1.005 + FIRST_CREDIT + max(ROWS))


def test_all_streams_of_a_step_gain_or_none_drafts():
    world = World(rows=64)
    first = world.submit(PROMPT * 4, limit=30, drafts=True)
    second = world.submit(range(100, 130), limit=30)
    world.finish()
    alone = [plan for plan in world.plans if plan.has_drafts and len(plan.spans) == 2]
    assert not alone and first.num_tokens == second.num_tokens + 2


@pytest.mark.parametrize("longest", [math.inf, 4])
def test_streams_whose_states_go_back_draft_as_many_tokens(longest):
    """llama.cpp computes streams with as many rows at once; else it may lose the states to which one of them goes back."""
    world, drafts = World(rows=64), Drafts(UNMEASURED, max_rows=64, longest=longest, ends=[END])
    for prompt in (PROMPT * 4, [1, 2, 3, 5, 6, END, 4, 1, 2]):
        job = world.submit(prompt, limit=30, drafts=True)
        job.lay_out(job.request.prompt.arrange(world.scheduler.index, job.request.scope))
        job.append(prompt[0] if prompt[-1] == PROMPT[-1] else 3)
    first, second = map(len, drafts.propose(world.jobs, world.jobs, world.scheduler.cells))
    assert second == 2 and (first == second if longest < math.inf else first > second)


def test_a_step_of_a_prompt_teaches_no_pace(monkeypatch):
    """Where prompts have steps of their own, one may follow a step with drafts."""
    world, seen = World(rows=64, apart=0, budget=128), []
    monkeypatch.setattr(Pace, "observe", lambda self, streams, rows, **step: seen.append(rows) or 1.0)
    first = world.submit(PROMPT * 4, limit=30, drafts=True)
    while first.num_tokens < first.num_prompt + 3:
        world.scheduler.observe(world.step(), 0.01)
    world.submit(range(100, 200))
    while not world.scheduler.idle:
        world.scheduler.observe(world.step(), 0.01)
    assert seen and max(seen) <= max(ROWS)


def test_odds_are_learnt_by_the_matched_length_and_by_request():
    odds, own, other = Odds(), Score(), Score()
    before = odds.chance(other, 4), odds.chance(other, 20)
    for _ in range(20):
        odds.learn(own, 4, right=0, drafted=7)
    assert odds.chance(other, 4) < before[0] and odds.chance(other, 20) == before[1]
    assert odds.chance(own, 20) < before[1]
    for _ in range(200):
        odds.forget(own)
    assert odds.chance(own, 20) == pytest.approx(before[1], abs=0.01)


def test_expected_tokens():
    assert expected(1.0, 7) == 7 and expected(0.0, 7) == 0
    assert expected(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)


def test_the_pace_is_that_of_the_steps_that_ran():
    pace = Pace(UNMEASURED)
    assert pace.multiple(1, 8, 100) == pytest.approx(1 + 7 * UNKNOWN), "no cost is known"
    for _ in range(60):
        pace.observe(1, 1, depth=100, seconds=0.01)
        pace.observe(1, 8, depth=100, seconds=0.03)
    seen = pytest.approx(2, rel=0.05)
    assert pace.multiple(1, 8, 100) - 1 == seen
    assert (pace.multiple(1, 5, 100) - 1) / 4 * 7 == seen, "as wrong as about eight rows"
    assert (pace.multiple(1, 64, 100) - 1) / 63 * 7 == seen
    reported = (pace.multiple(1, 20, 100) - 1) / 19
    pace.observe(1, 20, depth=100, seconds=0.05)
    each = pytest.approx((reported + 4 / 19) / 2, rel=0.01)
    assert (pace.multiple(1, 20, 100) - 1) / 19 == each, "the first of its size"
    assert (pace.multiple(1, 32, 100) - 1) / 31 == each, "of the same size, but with more rows"
    assert pace.seconds(1, 100) == pytest.approx(0.01)


KNOWN = Costs(tile=64, token_ns=1e6, cell_ns=500, tile_cell_ns=1500, pass_ns=20e6, row_ns=2e6)


def run(pace, rows, depth, times=1, slow=1.0):
    """Observe steps that take as long as the costs say, on a machine that is so much slower."""
    for _ in range(times):
        pace.observe(1, rows, depth=depth, seconds=slow * KNOWN.step_ns(rows, depth) / 1e9)


def test_rows_that_seemed_to_take_no_time_are_found_to_take_some():
    """The machine was slow, or the context long, when the last step without drafts ran."""
    true = KNOWN.step_ns(4, 60) / KNOWN.step_ns(1, 60)
    pace = Pace(KNOWN)
    run(pace, 1, 25_000, times=20)
    run(pace, 4, 60, times=100)
    assert pace.multiple(1, 4, 60) == pytest.approx(true, rel=0.05)
    run(pace, 1, 60, times=60, slow=3.0)
    run(pace, 4, 60, times=200)
    assert pace.is_old(1)
    for _ in range(10):
        run(pace, 1, 60)
        run(pace, 4, 60, times=20)
    assert not pace.is_old(1) and pace.multiple(1, 4, 60) == pytest.approx(true, rel=0.1)
    assert pace.multiple(1, 64, 60) > 3


@pytest.mark.parametrize("depth", [8000, 25_000])
def test_the_first_draft_after_a_long_prompt_says_little_of_others(depth):
    pace = Pace(KNOWN)
    run(pace, 1, 100)
    run(pace, 8, depth)
    assert pace.multiple(1, 8, 100) == pytest.approx(KNOWN.step_ns(8, 100) / KNOWN.step_ns(1, 100), rel=0.01)
    run(pace, 16, depth, slow=4.0)
    assert pace.multiple(1, 4, 100) < 2 * KNOWN.step_ns(4, 100) / KNOWN.step_ns(1, 100), "an outlier counts as one"
    slow = pace.multiple(1, 16, 100)
    run(pace, 1, 100, times=1000)
    assert pace.multiple(1, 16, 100) - 1 < 0.1 * slow + KNOWN.step_ns(16, 100) / KNOWN.step_ns(1, 100) - 1, (
        "it has a try later"
    )


def test_before_the_first_step_without_drafts_little_is_known_so_it_comes_soon():
    pace = Pace(KNOWN)
    run(pace, 8, 100, times=FIRST_STEPS)
    assert pace.is_old(1) and not pace.seconds(1, 100)
    run(pace, 1, 100)
    assert not pace.is_old(1)


def test_a_machine_that_became_slower_beside_drafts_is_noticed():
    pace = Pace(KNOWN)
    run(pace, 1, 100)
    run(pace, 8, 100, times=REFRESH, slow=3.0)
    run(pace, 1, 100, slow=3.0)
    assert pace.seconds(1, 100) == pytest.approx(2 * KNOWN.step_ns(1, 100) / 1e9), "it counts as much as all before it"


def test_one_pause_of_the_machine_is_no_size_s_time():
    """On a card, where a row takes next to nothing, the first step of a size loads a kernel."""
    pace = Pace(Costs(pass_ns=10e6))
    run_for = [(1, 0.01), (16, 1.0)]
    for rows, seconds in run_for:
        pace.observe(1, rows, depth=100, seconds=seconds)
    assert pace.multiple(1, 16, 100) < 1.05


def test_a_tile_of_rows_takes_no_longer_than_one_row_less():
    assert KNOWN.step_ns(64, 8000) < 1.1 * KNOWN.step_ns(63, 8000) < 2 * KNOWN.step_ns(65, 8000)


@pytest.mark.parametrize("most", [2, 5])
def test_a_step_without_drafts_reports_now_and_then_how_long_it_takes(monkeypatch, most):
    monkeypatch.setattr("slotcache.slots.drafts.REFRESH", most)
    world = World(cells=4000, rows=64)
    world.submit(PROMPT * 4, limit=400, drafts=True)
    in_a_row = [0]
    while not world.scheduler.idle:
        plan = world.step()
        world.scheduler.observe(plan, 0.01 + 0.0001 * plan.num_tokens)
        in_a_row.append(in_a_row[-1] + 1 if plan.has_drafts else 0)
    assert max(in_a_row) == most
