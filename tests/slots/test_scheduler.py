"""Decisions of the scheduler that a user would notice, each against a memory that fails on a wrong plan."""

import numpy as np
import pytest
from slotcache.slots import host
from slotcache.slots.check import check, check_tree
from slotcache.slots.job import Phase
from slotcache.slots.plan import Clear, Plan, Restore, Save
from slotcache.slots.prefix_tree import OutOfSequences, PrefixTree
from slotcache.slots.radix import descendants, path
from slotcache.slots.request import Kind, Request
from slotcache.slots.scheduler import BACKGROUND_CHUNKS, Recovery
from slotcache.slots.scope import Scope
from support.fixed_prompt import Fixed
from support.scopes import COMMON
from support.world import World


def computed(plan, job):
    return sum(len(span.tokens) for span in plan.spans if span.request == job.request.id)


def test_decode_comes_first_and_prefill_keeps_its_budget():
    world = World()
    running = world.submit(range(20), limit=50)
    world.step()
    arriving = world.submit(range(500, 800), limit=2)
    for _ in range(3):
        plan = world.step()
        assert plan.spans[0].request == running.request.id and computed(plan, running) == 1
        assert computed(plan, arriving) == 32
    world.finish()


def test_generating_and_prefill_take_turns_where_a_batch_of_both_costs_more():
    world = World(apart=100)
    running = world.submit(range(20), limit=50)
    world.step()
    mixed = world.submit(range(500, 580), limit=2)
    plan = world.step()
    assert computed(plan, running) == 1 and computed(plan, mixed) == 32  # few cells in use yet
    arriving = world.submit(range(800, 1000), limit=2)
    while world.scheduler.cells.num_used < 100:
        world.step()
    turns = [world.step() for _ in range(6)]
    assert [computed(plan, running) for plan in turns] == [1, 0] * 3
    assert all(sum(computed(plan, job) for job in (mixed, arriving)) <= 32 for plan in turns)
    world.finish()
    assert [job.num_tokens - job.num_prompt for job in (running, mixed, arriving)] == [50, 2, 2]


def test_a_plan_names_the_requests_that_it_admitted():
    world = World(cells=300, slots=2)
    jobs = [world.submit(range(at, at + 100), limit=80) for at in (0, 1000, 2000)]
    assert [world.step().admitted for _ in range(3)] == [(0,), (1,), ()]
    world.finish()
    admitted = [id for plan in world.plans for id in plan.admitted]
    assert [admitted.count(job.request.id) for job in jobs] == [1 + job.reuse.num_preempted for job in jobs]
    assert any(job.reuse.num_preempted for job in jobs)


def test_prompts_that_are_reported_share_the_rows_of_a_step():
    world = World(slots=4, rows=16)
    jobs = [
        world.submit(range(at, at + 50), limit=3, scope=Scope.private(at), cache=False, scores_prompt=True)
        for at in (1000, 2000)
    ]
    plain = world.submit(range(100), limit=3)
    world.finish()
    assert all(sum(span.num_rows for span in plan.spans) <= 16 for plan in world.plans)
    for job in jobs:
        scored = [
            span.scored for plan in world.plans for span in plan.spans if span.request == job.request.id and span.num_scored
        ]
        assert np.concatenate(scored).tolist() == job.tokens[1:50].tolist()
    assert max(computed(plan, plain) for plan in world.plans) > 16, "others compute as much as ever"


def test_a_request_runs_on_the_slot_that_it_wants_and_waits_for_no_other():
    world = World(slots=3)
    first = world.run(range(20), slot=1)
    again, elsewhere = world.submit(range(25), slot=2), world.submit(range(900, 930))
    world.finish()
    assert (first.slot, again.slot) == (1, 2) and again.reuse.cached == 20
    assert elsewhere.slot == 0, "the slot that was used least recently"


def test_a_request_that_waits_for_its_slot_holds_up_no_other():
    world = World(slots=2)
    long = world.submit(range(20), limit=60, slot=1)
    world.step()
    waiting = world.submit(range(100, 120), slot=1)
    others = [world.submit(range(at, at + 20)) for at in range(1000, 2000, 100)]
    while any(other.num_tokens < 22 for other in others):
        world.step()
    assert waiting.sequence is None and long.num_tokens < long.num_prompt + long.request.limit
    assert waiting.reuse.num_overtaken == 10
    world.finish()
    assert waiting.slot == 1


def test_the_slot_that_a_request_waits_for_is_not_given_away_for_ever():
    world = World(slots=2, window=3)
    world.submit(range(5, 25), limit=200)
    world.submit(range(20), limit=8, slot=1)
    world.step()
    waiting = world.submit(range(100, 120), slot=1)
    after = 0
    while waiting.sequence is None:  # short prompts that are cached come before it, as long as they may
        world.submit([*range(20), after], limit=4)
        after += 1
        world.step()
    assert waiting.reuse.num_overtaken <= 4
    world.finish()


def test_a_request_of_a_higher_priority_waits_for_its_slot_and_lets_others_go_meanwhile():
    world = World(slots=2)
    world.submit(range(20), limit=30, slot=0)
    world.step()
    urgent, usual = world.submit(range(100, 120), slot=0, priority=5), world.submit(range(200, 220))
    world.step()
    assert urgent.sequence is None and usual.slot == 1
    world.finish()
    assert urgent.slot == 0


def test_without_streams_prefill_fills_the_batch():
    world = World()
    job = world.submit(range(300))
    assert computed(world.step(), job) == 128


def test_nothing_small_is_left_over():
    world = World()
    job = world.submit(range(150))
    sizes = [computed(world.step(), job) for _ in range(2)]
    assert sizes == [64, 86]


def test_a_step_beside_streams_takes_no_longer_than_they_may_wait():
    world = World(cells=9000, batch=1024, budget=512, stall=0.1)
    world.submit(range(20), limit=60)
    world.step()
    arriving = world.submit(range(500, 6500))
    sizes, late = [], []
    while arriving.phase is not Phase.DECODE:
        plan = world.step()
        seconds = sum(len(span.tokens) * (span.start + span.stop) for span in plan.spans) * 1e-7 + plan.num_tokens * 2e-4
        world.scheduler.observe(plan, seconds)
        sizes.append(computed(plan, arriving))
        late.append(seconds > 0.1 and sizes[-1] > 64)
    assert sizes[0] == 64, "nothing is known of this machine yet"
    assert max(sizes) > 256 and sizes[-2] == 64, "deep tokens take longer: a step has fewer of them"
    assert sum(late) <= 2, "the line is learnt within some steps"


def test_a_step_is_sized_by_the_cells_of_the_streams_in_it():
    """A large step moves the KV of others out of its way, but none that its own streams see."""
    world = World(cells=20_000, batch=1024, budget=1024, stall=0.1, host=20_000, aside=50)

    def step():
        plan = world.step()
        seconds = plan.num_tokens * (1e-4 + 1e-7 * world.scheduler.cells.swap.num_passed)
        world.scheduler.observe(plan, seconds)
        return plan, seconds

    stream = world.submit(range(6000), limit=60)
    while stream.phase is not Phase.DECODE:
        step()
    world.submit(range(10_000, 12_000))
    for _ in range(5):
        plan, seconds = step()
        assert len(plan.spans) == 2 and seconds <= 0.1


def test_a_slow_step_makes_the_next_one_smaller():
    world = World(batch=1024, budget=512, stall=0.1)
    world.submit(range(20), limit=60)
    world.step()
    arriving = world.submit(range(500, 900))
    world.scheduler.observe(world.step(), 64 * 0.00045)
    plan = world.step()
    assert computed(plan, arriving) == 192
    world.scheduler.observe(plan, 192 * 0.0015)
    assert computed(world.step(), arriving) == 64


def test_a_short_prompt_passes_a_long_one():
    world = World(slots=3)
    long = world.submit(range(2000, 2900))
    world.step()
    short = world.submit(range(100, 140))
    assert computed(world.step(), short) == 40
    assert short.phase is Phase.DECODE and long.phase is not Phase.DECODE


def test_a_long_prompt_is_passed_no_more_once_it_is_due():
    """Short ones come without end; at 128 tokens a step, those that came within its own 600 tokens may go first."""
    world = World(cells=4000, slots=4)
    long, steps = world.submit(range(2000, 2600), limit=1), 0
    while long.phase is not Phase.DONE:
        world.submit(range(5000 + 100 * steps, 5091 + 100 * steps), limit=1)
        world.step()
        steps += 1
    assert 6 < steps < 12, "alone it takes 5 steps; behind all others 16"


def test_so_it_is_among_prompts_that_are_computed_ahead():
    world = World(cells=4000, slots=4, batch=64)
    long, steps = world.submit(range(2000, 2600), limit=1, kind=Kind.AHEAD), 0
    while steps == 0 or long.sequence:
        world.submit(range(5000 + 100 * steps, 5091 + 100 * steps), limit=1, kind=Kind.AHEAD)
        world.step()
        steps += 1
        assert steps < 30


def test_tokens_that_a_grammar_forced_on_a_stream_pass_a_prompt_of_a_higher_priority():
    world = World(cells=4000)
    stream = world.submit(range(20), limit=60)
    world.step()
    urgent = world.submit(range(500, 3000), priority=1)
    for _ in range(5):
        stream.force(3)
    plan = world.step()
    assert computed(plan, stream) == 6 and computed(plan, urgent) == 26, "the stream waits: the prompt keeps its budget"


def test_a_prompt_of_a_higher_priority_goes_first_though_it_is_longer():
    world = World(slots=3)
    usual = world.submit(range(2000, 2200))
    urgent = world.submit(range(3000, 3300), priority=1)
    assert computed(world.step(), urgent) == 128 and usual.computed == 0


def admitted(world):
    """Requests in the order in which they were first computed."""
    firsts = {}
    for at, plan in enumerate(world.plans):
        for span in plan.spans:
            firsts.setdefault(span.request, at)
    return sorted(firsts, key=firsts.__getitem__)


def test_whoever_has_most_cached_for_what_it_computes_is_next():
    world = World(slots=1)
    world.run(range(100))
    world.submit(range(900, 950))  # runs while the next ones arrive
    world.step()
    cold = world.submit(range(500, 600))
    cached = world.submit([*range(90), *range(700, 740)])
    shorter = world.submit(range(600, 660))
    longer_cached = world.submit([*range(100), *range(800, 840)])
    world.finish()
    assert admitted(world)[2:] == [longer_cached.request.id, cached.request.id, shorter.request.id, cold.request.id]
    assert world.scheduler.waiting.num_overtakes == 3 + 1 + 1


def test_a_higher_priority_goes_first_and_is_paused_last():
    world = World(slots=1)
    world.run(range(100))
    world.submit(range(900, 950))
    world.step()
    cached = world.submit([*range(100), 7])
    urgent = world.submit(range(500, 600), priority=5)
    background = world.submit(range(600, 610), priority=-5)
    world.finish()
    assert admitted(world)[2:] == [urgent.request.id, cached.request.id, background.request.id]
    assert cached.reuse.num_overtaken == 0, "the window counts equals only"
    small = World(cells=100, slots=2)
    patient = small.submit(range(40), limit=50, priority=-1)
    small.step()
    pressing = small.submit(range(100, 140), limit=50)
    small.finish()
    assert (patient.reuse.num_preempted, pressing.reuse.num_preempted) == (1, 0)
    assert patient.num_tokens == pressing.num_tokens == 90


def test_nobody_is_overtaken_more_often_than_the_window_allows():
    world = World(slots=1, window=3)
    world.run(range(100))
    world.submit(range(900, 950))
    world.step()
    cold = world.submit(range(500, 600))
    others = [world.submit([*range(100), 700 + number]) for number in range(8)]
    world.finish()
    assert admitted(world)[2:] == [
        *(other.request.id for other in others[:3]),
        cold.request.id,
        *(other.request.id for other in others[3:]),
    ]
    assert cold.reuse.num_overtaken == 3


def test_overtaking_gets_harder_each_time():
    world = World(slots=1)
    world.run(range(20))
    world.submit(range(900, 950))
    world.step()
    cold = world.submit(range(500, 600))  # 1 in 100; a few tokens cached are soon no reason to pass it any more
    others = [world.submit([*range(2), *range(700 + 100 * number, 798 + 100 * number)]) for number in range(4)]
    world.finish()
    assert admitted(world)[2:] == [*(other.request.id for other in others[:3]), cold.request.id, others[3].request.id]
    assert cold.reuse.num_overtaken == 3


def test_a_request_waits_for_32_tokens_that_another_is_computing():
    world = World()
    first = world.submit(range(200))
    second = world.submit([*range(150), *range(900, 960)])
    plan = world.step()
    assert computed(plan, first) == 128 and computed(plan, second) == 0
    world.finish()
    assert second.reuse.cached == 150 and second.reuse.source == "fork"
    assert world.scheduler.counters.prefilled_tokens == 200 + 60


def test_fewer_than_32_shared_tokens_are_not_waited_for():
    world = World()
    first = world.submit(range(60))
    second = world.submit([*range(20), 999, 998])
    plan = world.step()
    assert computed(plan, first) == 60 and computed(plan, second) == 22
    world.finish()


def test_tokens_that_a_grammar_forces_on_two_requests_are_computed_for_both_at_once():
    world = World()
    first, second = both = [world.submit(range(60), limit=80) for _ in range(2)]
    while second.num_tokens == second.num_prompt:
        world.step()
    second.force(int(first.tokens[second.num_tokens]))  # it waited for the first one's prompt: now it catches up
    world.step()
    assert first.computed == second.computed
    for job in both:
        for token in range(40):  # the same ones, but in tails that are private
            job.force(token)
    plan = world.step()
    assert [computed(plan, job) for job in both] == [41, 41]
    world.finish()


def test_a_prompt_runs_in_the_slot_that_it_continues_wherever_its_kv_is():
    world = World(cells=300, slots=3)
    first = world.run(range(50), limit=4)
    world.run(range(100, 140))
    turn = world.run([*range(50), 4, 4, 4], limit=4)  # the answer reads another way in it: no sequence ends there
    assert turn.reuse.source == "fork" and turn.slot == first.slot == 0
    assert world.run([*range(50), 4, 4, 4, 9], scope=Scope.shared("other")).slot == 2, "the history of another scope"
    world.scheduler.tree.drop(COMMON)
    assert world.run([*range(50), 4, 4, 4, 9]).slot == 0
    longer = world.run([*range(50), 4, 4, 5], slot=1)
    assert world.run([*range(50), 4, 4, 5, 5]).slot == longer.slot == 1


def test_a_prompt_runs_in_the_slot_of_the_longest_prefix():
    world = World(cells=2000, slots=4)
    for start in (0, 1000, 2000):
        world.run(range(start, start + 400))
    assert world.run([*range(1000, 1399), 9]).slot == 1, "399 of 400 tokens"
    assert world.run([*range(2000, 2200), *range(200)]).slot == 2, "a half"
    assert world.run([*range(2000, 2020), *range(5000, 5200)]).slot == 3, "less than a tenth"
    world.run([*range(3000, 3003), 9], slot=0)
    world.run([*range(3000, 3008), 9], slot=3)
    assert world.run(range(3000, 3010)).slot == 3, "8 of 10 tokens are there, and 3 on slot 0"
    assert world.run(range(3000, 3010), scope=Scope.shared("other")).slot != 3, "another scope shares nothing"


def test_the_next_turn_of_a_request_that_went_on_elsewhere_is_noted_there():
    world = World(cells=2000, slots=2)
    chat = world.submit(range(40), limit=8)
    while chat.phase is not Phase.DECODE:
        world.step()
    world.scheduler._pause(chat, blocks=False)
    other = world.submit(range(50), limit=60, priority=1, slot=0)
    while chat.num_tokens < chat.num_prompt + 8:
        world.step()
    assert (other.slot, chat.slot) == (0, 1) and other in world.scheduler.running
    turn = [*chat.tokens[: chat.num_tokens], 8, 8]
    ahead = world.submit(turn, limit=1, kind=Kind.AHEAD, follows=chat.request.id)
    while ahead.num_tokens == ahead.num_prompt:
        world.step()
    assert [len(slot.ahead) for slot in world.scheduler.slots] == [0, len(turn)]


def test_without_similarity_only_a_continued_slot_is_preferred():
    world = World(cells=2000, slots=2, similarity=0.0)
    first = world.run(range(400))
    assert world.run([*range(399), 9]).slot != first.slot
    assert world.run([*range(400), 4, 4, 7]).slot == first.slot


@pytest.mark.parametrize("shared", [20, 400])
def test_two_chats_in_turn_that_share_an_opening_keep_their_slots(shared):
    """However much of their prompts the system text is, and although their questions begin alike."""
    world = World(cells=4000, slots=2)
    opening = range(5000, 5000 + shared)
    chats = {start: [*opening, 1, 2, 3, *range(start, start + 20)] for start in (1000, 2000)}
    slots = {start: set() for start in chats}
    for turn in range(4):
        for start, text in chats.items():
            slots[start].add(world.run(Fixed(text, opening=shared), limit=4).slot)
            text += range(start + 100 * turn + 50, start + 100 * turn + 60)
    assert [len(used) for used in slots.values()] == [1, 1] and slots[1000] != slots[2000]
    edited = [*chats[1000][:-4], 7, 7, 7, 7]
    assert {world.run(Fixed(edited, opening=shared)).slot} == slots[1000], "its last question is another one"


def test_a_slot_that_holds_the_whole_history_is_continued_and_others_are_forked():
    world = World(slots=3)
    first = world.run(range(50))
    world.run(range(100, 140))
    history = first.tokens[: first.num_tokens - 1].tolist()
    follower = world.run([*history, 7, 8])
    assert follower.reuse.source == "own" and follower.slot == first.slot
    forked = world.run([*range(5), *range(60, 120)])
    assert forked.reuse.source == "fork" and forked.slot != first.slot
    again = follower.tokens[: follower.num_tokens - 1].tolist()
    assert world.run([*again, 5]).reuse.cached == len(again)


def test_the_deepest_prefix_wins():
    world = World()
    world.run(range(8))
    world.run([0, 1, 2, 50, 51])
    assert world.run(range(10)).reuse.cached == 8


def test_a_request_that_does_not_fit_waits_and_none_fails():
    world = World(cells=100, slots=4)
    jobs = [world.submit(range(start, start + 60), limit=20) for start in (0, 100, 200, 300)]
    world.finish()
    assert all(job.num_tokens == 80 for job in jobs)


def test_the_youngest_is_preempted_and_resumes():
    world = World(cells=100, slots=2)
    old, young = world.submit(range(40), limit=50), world.submit(range(100, 140), limit=50)
    world.finish()
    assert (old.reuse.num_preempted, young.reuse.num_preempted) == (0, 1)
    assert old.num_tokens == young.num_tokens == 90


def test_while_a_prompt_is_computed_the_kv_of_others_is_out_of_its_way():
    world = World(apart=0, aside=2, host=1000, slots=3)
    jobs = [world.submit([*range(60), *range(100 * n, 100 * n + 60)], limit=20 + n, stops=[60]) for n in range(1, 9)]
    beside = []
    while not world.scheduler.idle:
        plan = world.step()
        if plan.afterwards:
            moved = [move for move in plan.afterwards if isinstance(move, Restore)]
            beside.append(sum(move.stop - move.start for move in moved))
    assert len(beside) >= 6 and world.scheduler.cells.swap.num_swapped == sum(beside)
    alone = [World().run(job.tokens[:120], limit=job.request.limit) for job in jobs]
    assert [r.tokens.tolist() for r in jobs] == [r.tokens.tolist() for r in alone]


def test_what_a_step_sees_stays_and_what_was_saved_is_not_saved_again():
    world = World(apart=0, aside=5, host=1000, slots=2)
    first = world.submit([*range(60), *range(100, 160)], limit=60, stops=[60])
    for _ in range(5):
        world.step()
    world.submit([*range(60), *range(200, 290)], limit=1, stops=[60])
    plans = [world.step() for _ in range(6)]
    aside = [plan for plan in plans if plan.afterwards]
    assert len(aside) == 3 and first.num_private > 0
    for plan in aside:
        later = [(move.start, move.stop) for move in plan.afterwards if isinstance(move, Restore)]
        assert later[0] == (60, 120) and later[1][0] == 120  # its own part, and its answer so far
        # Their common beginning gets the first cells and keeps them.
        moved = [(move.start, move.stop) for move in plan.operations if isinstance(move, Restore)]
        assert moved == ([(0, 60)] if plan is aside[0] else [])
    saved = [[(op.copy.start, op.copy.stop) for op in plan.operations if isinstance(op, Save)] for plan in aside]
    assert {(0, 60), (60, 120)} <= set(saved[0]) and not {(0, 60), (60, 120)} & {*saved[1], *saved[2]}


def test_nothing_is_set_aside_where_moving_it_costs_more():
    few = {"aside": 1, "host": 0}
    cases = (
        ({"aside": 1}, True),
        ({"aside": 50}, False),
        (few, False),
        (few | {"lent": 50}, False),
        (few | {"lent": 400}, True),
    )
    for options, is_set_aside in cases:
        world = World(apart=0, slots=2, **({"host": 1000} | options))
        world.submit(range(100), limit=50)
        world.submit(range(200, 290), limit=5)
        world.finish()
        assert (world.scheduler.cells.swap.num_swapped > 0) == is_set_aside
        assert world.scheduler.tree.host.num_tokens == 0 or options.get("host", 1), "what was lent is given back"


def turn(world, job, new):
    """The next turn of a conversation with these tokens, and the plan that began it."""
    before, history = len(world.plans), job.tokens[: job.num_tokens - 1].tolist()
    follower = world.run([*history, *new])
    return follower, next(plan for plan in world.plans[before:] if plan.spans)


def test_kv_that_others_have_left_free_cells_below_moves_to_the_front_once():
    world = World(aside=2, host=2000, slots=3)
    jobs = [world.submit(range(200 * n, 200 * n + 100), limit=40) for n in range(3)]
    world.finish()
    cells, swapped = world.scheduler.cells, world.scheduler.cells.swap.num_swapped
    second, plan = turn(world, jobs[2], range(700, 760))
    assert Clear() in plan.operations and cells.swap.num_swapped == swapped, "nobody else is in the way"
    assert second.reuse.source == "own" and second.reuse.cached == jobs[2].num_tokens - 1
    _, plan = turn(world, second, range(800, 860))
    assert Clear() not in plan.operations and cells.swap.num_passed == cells.num_used - 1


@pytest.mark.parametrize("shared", [0, 50])
def test_conversations_in_turn_come_back_once_each(shared):
    """Whatever a longer one leaves, its cells are those behind what stays, so a shorter one stands in front already."""
    world = World(aside=2, host=5000, cells=2000)
    histories = [[*range(shared), *range(start, start + length)] for start, length in ((1000, 600), (2000, 100))]
    for turn in range(4):
        for history in histories:
            job = world.run(history, limit=10)
            new = len(world.jobs) * 50 + 5000
            history[:] = [*job.tokens[: job.num_tokens - 1].tolist(), *range(new, new + 50)]
            assert not turn or job.reuse.cached == len(history) - 50 - 9 - 50
    assert not any(Clear() in plan.operations for plan in world.plans)
    assert world.scheduler.cells.swap.num_passed < len(histories[1])


def test_cells_that_become_free_between_two_pieces_of_a_prompt_are_filled_once():
    world = World(aside=5, host=5000, cells=3000, apart=0, budget=64, batch=64)
    world.submit(range(100), limit=500)
    ending = world.submit(range(1000, 1400), limit=500)
    while ending.phase is not Phase.DECODE:
        world.step()
    prompt, cells, scheduler = world.submit(range(2000, 2900)), world.scheduler.cells, world.scheduler
    while prompt.computed < 200:
        world.step()
    before = sum(Clear() in plan.operations for plan in world.plans)
    scheduler.finish(ending)
    scheduler.tree.evict(1000)
    while prompt.computed < 700:
        world.step()
    assert sum(Clear() in plan.operations for plan in world.plans) == before + 1
    while world.step().num_tokens > 1:
        pass
    assert cells.swap.num_passed < cells.num_used, "the other request's next token passes over no free cell"


@pytest.mark.parametrize(("limit", "moves"), [(1, False), (200, True)])
def test_a_short_question_moves_it_where_the_answer_may_be_long(limit, moves):
    """Each token of the answer passes over the free cells, too."""
    world = World(aside=50, host=5000, cells=2000, slots=3)
    jobs = [world.submit(range(1000 * n, 1000 * n + 200), limit=100) for n in range(3)]
    world.finish()
    follower = world.run([*jobs[2].tokens[: jobs[2].num_tokens - 1].tolist(), *range(5000, 5010)], limit=limit)
    assert follower.reuse.cached == 299 and world.scheduler.cells.swap.num_swapped == 0
    plans = [plan for plan in world.plans if any(span.request == follower.request.id for span in plan.spans)]
    assert [Clear() in plan.operations for plan in plans] == [moves] + [False] * (limit - 1)
    assert (world.scheduler.cells.swap.num_passed < 600) == moves


@pytest.mark.parametrize(("aside", "new"), [(10, 2), (100, 60)])
def test_it_stays_where_that_takes_longer(aside, new):
    world = World(aside=aside, host=2000, slots=3)
    jobs = [world.submit(range(200 * n, 200 * n + 100), limit=40) for n in range(3)]
    world.finish()
    _, plan = turn(world, jobs[2], range(700, 700 + new))
    assert Clear() not in plan.operations


def test_idle_kv_goes_to_host_memory_once_and_comes_back():
    world = World(host=1000)
    world.run(range(100), stops=[50])
    world.run(range(200, 300))
    restored = world.run([*range(100), 7])
    assert restored.reuse.cached == 100 and restored.reuse.sources["host"] == 100
    world.run(range(200, 300))
    world.run([*range(100), 8])
    saves = [op for plan in world.plans for op in plan.operations if isinstance(op, Save) and op.copy.start == 0]
    restores = [op for plan in world.plans for op in plan.operations if isinstance(op, Restore)]
    assert len(saves) == 2  # the two prompts' first runs, once each
    assert len(restores) >= 3


def test_a_run_that_was_restored_for_a_cancelled_request_is_of_use_to_the_next():
    world = World(host=1000)
    world.run(range(100), stops=[50])
    world.run(range(200, 300))
    job = world.submit(range(50))
    plan = world.scheduler.plan()
    assert any(isinstance(op, Restore) and op.stop == 49 for op in plan.operations)
    world.memory.run(Plan(plan.operations))  # the runner had no room for the rest
    world.scheduler.finish(job)  # and its client has gone
    check(world.scheduler)
    assert world.run([*range(100), 7]).reuse.cached == 100


def test_so_it_is_when_a_longer_prompt_that_took_it_over_is_cancelled_with_it():
    world = World(host=1000)
    world.run(range(100), stops=[50])
    world.run(range(200, 300))
    jobs = []
    for prompt in (range(50), range(100)):
        jobs.append(world.submit(prompt))
        world.memory.run(Plan(world.scheduler.plan().operations))
        check(world.scheduler)
    for job in jobs:
        world.scheduler.finish(job)
        check(world.scheduler)
    assert world.run([*range(100), 7]).reuse.cached == 100


def test_idle_time_is_used_to_save_so_that_leaving_costs_nothing():
    world = World(host=1000)
    world.run(range(100), stops=[50])
    while work := world.scheduler.plan_idle_work():
        world.memory.run(work)
        check(world.scheduler)
    assert world.scheduler.tree.host.num_tokens == 101 and world.scheduler.tree.device.num_ready == 101
    world.run(range(200, 300))
    assert not any(isinstance(op, Save) for plan in world.plans for op in plan.operations)
    assert world.run([*range(100), 7]).reuse.sources["host"] == 100


def test_idle_time_looks_at_each_run_a_few_times_however_many_there_are(monkeypatch):
    world, looked = World(host=50_000, cells=9000, slots=20, idle=9000), []
    for chat in range(20):
        world.run(range(1000 * chat, 1000 * chat + 400), stops=range(10, 400, 10), limit=1)
    num_runs = world.scheduler.tree.device.num_runs
    assert num_runs == 20 * 40 and len(world.scheduler.tree.device.idle) == 20
    monkeypatch.setattr(host, "path", lambda *ends: looked.extend(nodes := path(*ends)) or nodes)
    num_copied = 0
    while work := world.scheduler.plan_idle_work():
        starts = [save.copy.start for save in work.operations if isinstance(save, Save)]
        assert len(starts) == 1 and starts[0] == num_copied % 40 * 10, "a prefix comes first, and one run at a time"
        world.memory.run(work)
        num_copied += 1
    assert num_copied == num_runs and len(looked) <= 3 * num_runs


def test_a_run_that_left_before_its_copy_was_made_is_passed_over():
    world = World(host=2000, cells=600, idle=600)
    world.run(range(200), stops=range(20, 200, 20), limit=1)
    copies, tree = world.scheduler.tree.copies, world.scheduler.tree
    assert copies.save_ahead()
    world.carry_out()
    tree.clear()
    world.memory.run(Plan((Clear(),)))
    world.run(range(500, 700), limit=1)
    assert copies.save_ahead() and not copies.save_ahead()
    world.carry_out()
    assert world.run([*range(500, 700), 7]).reuse.cached == 200


def test_the_background_computes_in_small_steps_and_only_what_is_missing_and_fits():
    world = World(batch=512, cells=300)
    world.run(range(50))
    ahead = Fixed(range(200))
    assert world.scheduler.cells.forecast(ahead, COMMON) == (150, True)
    job = world.scheduler.submit(Request(1, ahead, 1, COMMON, kind=Kind.PREFETCH))
    world.jobs.append(job)
    while not world.scheduler.idle:
        assert computed(world.step(), job) <= 64
    counters = world.scheduler.counters
    assert (counters.idle_tokens, counters.prefilled_tokens, counters.cached_tokens) == (150, 50, {"none": 0})
    assert {node.frequency for node in descendants(world.scheduler.tree.roots[COMMON])} == {0, 1}, "nobody has used it"
    assert world.scheduler.cells.forecast(ahead, COMMON) == (0, True)
    assert world.scheduler.cells.forecast(Fixed(range(200, 400)), COMMON) == (200, False)  # no KV leaves for it


def test_what_is_computed_ahead_takes_no_cells_from_a_request_of_the_lowest_priority():
    world = World(cells=40, slots=2)
    client = world.submit(range(25), limit=3, priority=-100)
    world.step()
    ahead = world.submit(range(100, 124), limit=1, kind=Kind.AHEAD)
    assert computed(world.step(), client) == 1 and ahead.sequence is None
    assert world.scheduler.counters.preemptions == 0


def test_beside_clients_all_of_the_background_has_a_few_chunks_of_a_step():
    world = World(batch=512, budget=512, cells=3000)
    client = world.submit(range(3000, 3100), limit=8)
    world.step()
    chunks = BACKGROUND_CHUNKS * world.scheduler.tree.costs.chunk
    jobs = [world.submit(range(start, start + 400), limit=1, kind=Kind.AHEAD) for start in (0, 500)]
    shares: list[int] = []
    for _ in range(6):
        plan = world.step()
        assert computed(plan, client) == 1
        shares.append(sum(computed(plan, job) for job in jobs))
    assert client.phase is Phase.DECODE and shares[:2] == [chunks, chunks] and max(shares) == chunks


def test_no_prompt_of_a_client_shares_a_step_with_what_is_computed_ahead():
    world = World(batch=512, budget=512, cells=3000)
    ahead = world.submit(range(400), limit=1, kind=Kind.AHEAD)
    world.step()
    client = world.submit(range(3000, 3700), limit=8)
    while client.phase is not Phase.DECODE:
        assert computed(plan := world.step(), client) and computed(plan, ahead) == 0
    assert computed(plan := world.step(), client) == 1 and computed(plan, ahead) > 0


@pytest.mark.parametrize(("cells", "slots", "wanted"), [(500, 4, -1), (3000, 1, -1), (3000, 2, 0)])
def test_what_is_computed_ahead_gives_up_its_cells_and_its_slot(cells, slots, wanted):
    world = World(batch=64, cells=cells, slots=slots)
    ahead = world.submit(range(400), limit=1, kind=Kind.AHEAD)
    world.step()
    client = world.submit(range(3000, 3200), slot=wanted)
    world.step()
    assert client.sequence is not None and client.reuse.num_preempted == 0
    assert ahead.reuse.num_preempted == 1 and (ahead.sequence is None or ahead.slot != client.slot)
    world.finish()
    assert ahead.num_tokens == 401, "it goes on afterwards"


def test_idle_kv_stays_where_there_is_no_host_tier():
    world = World()
    world.run(range(100))
    world.run(range(200, 300))
    assert world.scheduler.tree.device.num_ready == 202


def test_the_cells_that_a_step_passes_over_are_known_again_without_a_host_tier():
    world, away = World(), Scope.shared("away")
    world.run(range(100))
    world.run(range(1000, 1500), scope=away)
    world.scheduler.tree.drop(away)
    world.run(range(200, 250))
    assert world.scheduler.cells.swap.num_passed < 200


@pytest.mark.parametrize("most", [60, 150])
def test_the_host_budget_holds_and_the_oldest_goes(most):
    world = World(host=most)
    for start in range(0, 1000, 100):
        world.run(range(start, start + 50))
        assert world.scheduler.tree.host.num_tokens <= most
    assert world.run([*range(800, 850), 7]).reuse.cached == 50
    assert world.run([*range(50), 7]).reuse.cached == 0


def test_cancelling_leaves_what_was_computed():
    world = World()
    job = world.submit(range(300))
    world.step()
    world.scheduler.finish(job)
    check(world.scheduler)
    assert world.scheduler.tree.device.num_ready == 128 and world.scheduler.tree.device.num_pending == 0
    assert world.run([*range(128), 9]).reuse.cached == 128


@pytest.mark.parametrize("at", ["claim", "restorable", "evict"])
def test_a_request_whose_start_fails_is_not_lost(at, monkeypatch):
    """It is handed back with the error and without KV, and after `recover` all is as at the start."""
    world = World(host=1000)
    world.run(range(100))
    job = world.submit([*range(50), *range(300, 350)])
    tree = world.scheduler.tree
    monkeypatch.setattr(tree.copies if at == "restorable" else tree, at, broken)
    with pytest.raises(ZeroDivisionError):
        world.scheduler.plan()
    monkeypatch.undo()
    assert [rejected for rejected, _ in world.scheduler.take_rejected()] == [job] and job.sequence is None
    assert world.scheduler.idle and not any(slot.job for slot in world.scheduler.slots)
    assert world.scheduler.recover() == Recovery([], [], [])
    world.memory.apply(Clear())
    check(world.scheduler)
    assert [world.run(range(100)).reuse.cached for _ in range(2)] == [0, 99]


def broken(*_, **__):
    return 1 // 0


def test_a_claim_without_a_sequence_leaves_the_tree_as_it_was():
    tree = PrefixTree(100, 2)
    for start in (0, 50):
        tree.claim(COMMON, np.arange(start, start + 10, dtype=np.int32))
    for scope in (COMMON, Scope.shared("new")):
        with pytest.raises(OutOfSequences):
            tree.claim(scope, np.arange(20, dtype=np.int32), stops=(5,))
        with pytest.raises(ValueError, match="prompt of 20 tokens"):
            tree.claim(scope, np.arange(20, dtype=np.int32), documents=[("key", 15, 25)])
        check_tree(tree)
    assert set(tree.roots) == {COMMON} and tree.device.num_pending == 20


def test_idle_kv_stays_in_place_where_its_way_back_costs_more():
    world = World(cells=300, host=1000, spill_ns=1000.0, idle_token_ns=1.0, idle_step_ns=10.0)
    world.run(range(80))
    world.run(range(500, 520), limit=7)
    assert world.scheduler.tree.device.num_reclaimable > 80
    assert world.run(range(90)).reuse.sources == {"fork": 80}, "from the device"
    world.run(range(1000, 1280))
    assert world.scheduler.tree.device.num_ready <= 300, "it leaves for prompts that need its cells"
    assert world.run(range(90)).reuse.sources["host"] == 89


def test_idle_kv_is_evicted_where_a_request_passes_over_it_for_long():
    world = World(cells=300, host=1000, spill_ns=100.0, idle_token_ns=1.0, idle_step_ns=10.0)
    world.run(range(80))
    world.submit(range(500, 530), limit=7)
    world.step()
    assert not world.scheduler.tree.device.num_reclaimable, "30 tokens and 7 steps: 100 ns"
    world.finish()
    assert world.run(range(90), limit=2).reuse.sources["host"] == 80


@pytest.mark.parametrize(("nanoseconds", "size"), [(0.0, 64), (0.1e9, 1), (1e9, 1), (40e9, 40), (200e9, 192), (1e12, 256)])
def test_a_background_step_that_cannot_be_aborted_is_sized_in_time(nanoseconds, size):
    world = World(cells=2000, batch=256, budget=256, background_ns=nanoseconds)
    first = world.submit(range(2000, 2064), limit=1)
    plan = world.step()
    assert computed(plan, first) == 64
    world.scheduler.observe(plan, 64.0)  # s: one for each token
    world.finish()
    job = world.submit(range(1000), limit=1, kind=Kind.AHEAD)
    assert computed(world.step(), job) == size
    world.finish()


def test_a_front_that_is_in_use_has_a_copy_once_what_stands_on_it_has_one():
    """A step that fails takes the device: copies of conversations are of no use without the front they share."""
    world = World(host=1000)
    stream = world.submit(range(100), limit=30)
    world.step()
    others = [[*range(100), *range(200 + at, 220 + at)] for at in (0, 300, 600)]
    for tokens in others:
        other = world.submit(tokens, limit=1)
        while other in world.scheduler.running or other in world.scheduler.waiting:
            world.step()
    world.scheduler.tree.evict(60)
    world.carry_out()
    found = world.scheduler.recover(goes_on=lambda job: False)
    world.memory.apply(Clear())
    check(world.scheduler)
    assert found == Recovery([stream], [], [])
    world.scheduler.finish(stream)
    assert [world.run(tokens, limit=1).reuse.cached for tokens in others] == [119] * 3


def test_of_several_prompts_that_are_computed_ahead_the_youngest_gives_way():
    world = World(slots=2)
    ahead = [world.submit(range(1000 * n, 1000 * n + 400), limit=1, kind=Kind.AHEAD) for n in range(3)]
    world.step()
    asked = world.submit(range(9000, 9020), limit=3)
    assert asked.request.id in world.step().admitted
    assert [job.reuse.num_preempted for job in ahead] == [0, 1, 0]
    wanted = world.submit(range(9500, 9520), limit=3, slot=ahead[0].slot)
    assert wanted.request.id in world.step().admitted
    world.finish()
    assert all(job.num_tokens == 401 for job in ahead)
