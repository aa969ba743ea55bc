"""A draft model's part of a step: asked where it pays, let read where the answer is worth it, and never a token other."""

from dataclasses import replace

import numpy as np
import pytest
from slotcache.slots.costs import UNMEASURED, Costs
from slotcache.slots.drafter import FIRST_MEAN, DraftTimes, ModelOdds
from slotcache.slots.drafts import FIRST_MODEL_CREDIT, NO_DRAFT, READ_ALONG, Drafts
from slotcache.slots.job import Phase
from slotcache.slots.lookup import Lookup, Score
from slotcache.slots.plan import Plan, Span
from support.memory import next_token, seen
from support.toy_drafter import PASS, ToyDrafter
from support.world import World

STEP = 0.01  # seconds of a step with a row a stream
ROW = 0.0005  # of each row more
PROMPT = list(range(100, 120))


@pytest.fixture(autouse=True)
def without_lookups(request, monkeypatch):
    """The toy answers go round, so that a lookup would soon be as good; the tests that want it say so."""
    if "lookup" not in request.node.name:
        monkeypatch.setattr(Lookup, "draft", lambda *_: None)


def drive(world, until=lambda: False):
    """Run all requests; a step's time is that of its rows. Return the seconds of the model's steps that only decode."""
    seconds = 0.0
    while not world.scheduler.idle and not until():
        plan = world.step()
        took = STEP + ROW * (plan.num_tokens - len(plan.spans))
        world.scheduler.observe(plan, took)
        if all(len(span.tokens) == span.drafted + 1 for span in plan.spans):
            seconds += took
    return seconds


def source(job):
    assert job.request.draft is not None
    return job.request.draft


def answer_of(prompt, limit):
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(seen(tokens, "")))
    return tokens


@pytest.mark.parametrize("right", [0, 5, 10])
def test_no_token_is_another_one(right):
    toy = ToyDrafter(right)
    world = World(rows=64, drafter=toy)
    jobs = [world.submit(PROMPT[:size], limit=60, drafts="model") for size in (20, 12, 7)]
    drive(world)
    assert [job.tokens.tolist() for job in jobs] == [answer_of(PROMPT[:size], 60) for size in (20, 12, 7)]
    assert toy.calls, "it was never asked"
    for job in jobs:
        assert source(job).num_accepted <= source(job).num_drafted


def test_right_drafts_save_as_much_as_they_should():
    """With nine of ten right, each step brings several tokens, and the whole is as fast as the costs let expect."""
    toy = ToyDrafter(9)
    world = World(rows=64, drafter=toy)
    job = world.submit(PROMPT, limit=400, drafts="model")
    seconds = drive(world) + toy.now
    draft = source(job)
    assert draft.num_accepted > 250
    best = max(
        sum(0.9**place for place in range(length + 1)) / (1 + (ROW + PASS) / STEP * length) for length in range(1, 16)
    )
    assert 400 * STEP / seconds > 0.8 * best > 1.6


def simulate(toy, steps, right=(), answers=1):
    """Decode answers one after the other, without a memory. right: from which step on how many of ten tokens are right.

    Return for each step its seconds, the tokens that it drafted, and those that were right.
    """
    world, reported, taken = World(cells=100_000), dict(right), []
    drafts = Drafts(UNMEASURED, max_rows=64, drafter=toy, clock=toy.clock)
    each = steps // answers
    for number in range(steps):
        if number % each == 0:
            job = world.submit(PROMPT, limit=20 * each, drafts="model")
            job.lay_out(job.request.prompt.arrange(world.scheduler.index, job.request.scope))
            job.append(1)
            job.computed = job.num_prompt
        job = world.jobs[-1]
        toy.right, began = reported.get(number, toy.right), toy.now
        proposed = drafts.propose([job], [job], world.scheduler.cells)
        draft = proposed[0] if len(proposed) else NO_DRAFT
        span = Span(0, 0, job.computed, np.zeros(1 + len(draft), np.int32), logits=True, drafted=len(draft))
        took = STEP + ROW * len(draft)
        drafts.observe(Plan((), (span,)), took)
        job.computed, num_right = job.computed + 1, 0
        job.append(next_token(tuple(job.tokens[job.num_tokens - 3 : job.num_tokens].tolist())))
        while num_right < len(draft) and draft[num_right] == job.tokens[job.num_tokens - 1]:
            num_right += 1
            job.accept(next_token(tuple(job.tokens[job.num_tokens - 3 : job.num_tokens].tolist())))
        drafts.settle([(job, span)] if len(draft) else [], world.scheduler.tree.device)
        taken.append((took + toy.now - began, len(draft), num_right))
    return taken


def test_what_is_never_right_is_given_up():
    taken = simulate(ToyDrafter(0), 4000, answers=40)
    drafted = [number for _, number, _ in taken]
    assert sum(drafted[:100]) > 3, "it was never tried"
    assert sum(seconds for seconds, _, _ in taken) < STEP * (1.006 * 4000 + FIRST_MODEL_CREDIT)
    assert sum(seconds for seconds, _, _ in taken[1000:]) < 1.01 * STEP * 3000


def test_what_always_ends_is_given_up():
    """As where `ignore_eos` lets an answer go on, behind which the draft model sees nothing but its end."""
    toy = ToyDrafter()
    toy.says_end = True
    taken = simulate(toy, 4000, answers=40)
    assert toy.num_passes > 10 and not any(number for _, number, _ in taken)
    assert sum(seconds for seconds, _, _ in taken) < STEP * (1.006 * 4000 + FIRST_MODEL_CREDIT)


def test_what_became_useful_is_tried_again():
    taken = simulate(ToyDrafter(0), 4000, right=[(500, 10)], answers=40)
    assert sum(right for _, _, right in taken[2500:]) > 3 * 1500


def test_a_draft_model_whose_tokens_seem_to_cost_nothing_reads():
    """On a GPU two chunks of a small model may take no longer than one."""
    toy = ToyDrafter(10, batch=64)
    toy.costs = replace(toy.costs, pass_ns=1e5, row_ns=0.0)
    world = World(rows=64, drafter=toy, stall=1.0, pass_ns=1e7, row_ns=1e5)
    job = world.submit(range(100, 400), limit=200, drafts="model")
    drive(world)
    assert sum(size for kind, size in toy.calls if kind == "read") > 250 and source(job).num_accepted > 100


def test_a_long_prompt_is_read_in_pieces_after_the_first_token():
    toy = ToyDrafter(10, batch=64)
    world = World(rows=64, drafter=toy, batch=512)
    job = world.submit(range(100, 400), limit=200, drafts="model")
    drive(world, until=lambda: job.phase is Phase.DECODE)
    assert not toy.calls, "the first token waited"
    drive(world)
    reads = [size for kind, size in toy.calls if kind == "read"]
    assert reads[:4] == [64] * 4 and sum(reads) <= 305 and toy.calls[-1][0] == "draft"
    assert source(job).num_accepted > 100


def test_a_step_after_what_is_read_teaches_no_pace():
    """The draft model leaves the caches cold: a step that seems slow makes drafts seem cheap."""
    toy = ToyDrafter(10, batch=64)
    world = World(cells=2000, rows=64, drafter=toy, stall=1.0)
    world.submit(list(range(100, 500)), limit=60, drafts="model")
    num_cold = 0
    while not world.scheduler.idle:
        read = toy.num_tokens
        plan = world.step()
        is_cold = toy.num_tokens > read and not plan.has_drafts
        num_cold += is_cold
        world.scheduler.observe(plan, 3 * STEP if is_cold else STEP + ROW * (plan.num_tokens - len(plan.spans)))
    assert isinstance(world.scheduler.drafts, Drafts)
    assert num_cold and world.scheduler.drafts._pace.seconds(1, 0) == pytest.approx(STEP)


def test_an_answer_too_short_is_not_read_for():
    toy = ToyDrafter(10)
    world = World(rows=64, drafter=toy, batch=1024)
    usual = world.submit(PROMPT, limit=60, drafts="model")
    drive(world)
    toy.calls.clear()
    world.submit(range(100, 900), limit=8, drafts="model")
    drive(world)
    assert source(usual).num_accepted and not toy.calls


def test_a_prompt_that_costs_more_than_the_credit_is_not_read():
    toy = ToyDrafter(10)
    world = World(rows=64, drafter=toy, batch=1024)
    world.submit(range(900), limit=30, drafts="model")  # 900 tokens of UNKNOWN_TOKEN steps each
    drive(world)
    assert not toy.calls


def test_requests_that_do_not_ask_have_none_and_keep_none_back():
    toy = ToyDrafter(10)
    world = World(rows=64, drafter=toy)
    world.submit(PROMPT, limit=30)
    drive(world)
    world.submit(PROMPT, limit=30, drafts="lookup")
    drive(world)
    assert not toy.calls
    first, second = world.submit(PROMPT, limit=60, drafts="model"), world.submit(PROMPT[3:], limit=20)
    drive(world)
    assert not any(plan.has_drafts and len(plan.spans) == 2 for plan in world.plans)
    assert source(first).num_accepted > 10 and second.request.draft is None


def test_a_lookup_is_taken_where_it_gains_more():
    """The answer goes round: looked up, a draft is as right as the model's, and costs nothing."""
    toy = ToyDrafter(6)
    world = World(rows=64, drafter=toy)
    job = world.submit([1, 2, 3, 4], limit=600, drafts="model")
    drive(world)
    asked = [number for number, (kind, _) in enumerate(toy.calls) if kind == "draft"]
    drafts = sum(plan.has_drafts for plan in world.plans)
    assert len(asked) < drafts / 2 and source(job).num_accepted > 300


def test_idle_slots_are_read_for_the_next_turn_and_what_is_not_cached_is_forgotten():
    toy = ToyDrafter(10)
    world = World(rows=64, drafter=toy)
    world.submit(PROMPT, limit=30, drafts="model")
    drive(world)
    while world.scheduler.read_ahead():
        pass
    assert sum(toy.ahead.values()) == world.scheduler.tree.num_cached(world.jobs[0].request.scope, world.jobs[0].tokens) > 40
    assert not toy.forgotten
    job = world.submit(PROMPT, limit=4, cache=False)
    drive(world)
    assert toy.forgotten == [job.request.scope]


def test_the_odds_follow_confidence_and_each_request():
    odds, own, other = ModelOdds(), Score(), Score()
    assert odds.mean(own) == pytest.approx(FIRST_MEAN)
    for _ in range(50):
        odds.learn(own, [0.99, 0.99, 0.2], right=2)
    sure, unsure = odds.chances(other, [0.99, 0.2])
    assert sure > 0.9 and unsure < 0.1
    for _ in range(30):
        odds.learn(other, [0.9] * 4, right=0)
    assert odds.mean(other) < odds.mean(own)
    for _ in range(5000):
        odds.forget()
    assert odds.mean(Score()) == pytest.approx(FIRST_MEAN, abs=0.01)


def test_a_pass_learnt_in_a_long_context_takes_less_in_a_short_one():
    """Else a draft model seems too slow for every short chat behind it, and would not run to show that it is not."""
    served, small = Costs(pass_ns=20e6, row_ns=1e6, cell_ns=5e3), Costs(pass_ns=4e6, row_ns=1e6, cell_ns=5e3)
    times = DraftTimes(served, small)
    times.learn_passes(1, 1, 4000, small.step_ns(1, 4000) / 1e9)
    for depth in (0, 4000):
        reported = small.step_ns(1, depth) / served.step_ns(1, depth)
        assert times.pass_steps(1, depth, served.step_ns(1, depth) / 1e9) == pytest.approx(reported)
    times = DraftTimes(UNMEASURED, UNMEASURED)
    times.learn_passes(1, 2, 4000, 0.004)
    assert times.pass_steps(1, 0, 0.01) == pytest.approx(0.2), "no cost is known"


def test_a_short_rest_is_read_along():
    toy = ToyDrafter(10)
    world = World(rows=64, drafter=toy)
    world.submit(PROMPT[: READ_ALONG - 2], limit=30, drafts="model")
    drive(world)
    assert {kind for kind, _ in toy.calls} == {"draft"}
