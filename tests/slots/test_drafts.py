"""Drafts: found by lookup, checked in the step that computes the last token, and taken back where they are wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.slots.costs import UNMEASURED
from slotcache.slots.drafts import FIRST_CREDIT, ROWS, UNKNOWN, Drafts, Odds, Pace, expected
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
def test_a_draft_is_the_text_behind_the_longest_match(prompt, steps):
    lookup, tokens = Lookup(), list(prompt)
    for step in steps:
        tokens += step
        draft = lookup.draft(np.array(tokens, np.int32), len(prompt), 5)
        assert (draft is not None) == (longest(tokens, len(tokens) - 1) > 0)
        if draft:
            if len(prompt) <= MOST_PLACES:  # else an older place than the newest ones may match further
                assert draft.matched >= longest(tokens, len(prompt))
            matched = tokens[len(tokens) - draft.matched :]
            behind = [
                (tokens[stop:] * 5)[:5]
                for stop in range(draft.matched, len(tokens))
                if tokens[stop - draft.matched : stop] == matched
            ]
            assert draft.tokens.tolist() in behind


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
    while world.scheduler.waiting or not world.jobs[0].decoding:
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
    for _ in range(10):
        pace.observe(1, 1, depth=100, seconds=0.01)
        pace.observe(1, 8, depth=100, seconds=0.03)
    assert pace.multiple(1, 8, 100) == pytest.approx(3)
    assert pace.multiple(1, 5, 100) == pytest.approx(1 + 4 * 2 / 7), "as wrong as about eight rows"
    assert pace.multiple(1, 64, 100) == pytest.approx(1 + 63 * 2 / 7)
    pace.observe(1, 20, depth=100, seconds=0.05)
    told, seen = 2 / 7, 4 / 19
    assert pace.multiple(1, 20, 100) == pytest.approx(1 + 19 * (told + seen) / 2), "the first of its size"
    assert pace.multiple(1, 32, 100) == pytest.approx(1 + 31 * (told + seen) / 2), "of the same size, but with more rows"
    assert pace.seconds(1) == pytest.approx(0.01)
