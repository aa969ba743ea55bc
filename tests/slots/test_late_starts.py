"""A prompt that would be computed later starts later: its documents get their order then."""

import pytest
from slotcache.slots.job import Phase
from slotcache.slots.request import Kind
from slotcache.slots.scope import Scope
from support.fixed_prompt import Fixed
from support.world import World


def computed(plan, job):
    return sum(len(span.tokens) for span in plan.spans if span.request == job.request.id)


LONG = range(1000, 1500)


def prompts(world):
    return [job.request.id for job in world.scheduler.running if job.phase is not Phase.DECODE]


@pytest.mark.parametrize("aside", [50, 1e9])
def test_a_prompt_starts_once_the_one_before_it_is_computed(aside):
    world = World(cells=2000, aside=aside)
    first, second = world.submit(LONG), world.submit(range(2000, 2600))
    while second.phase is Phase.WAITING:
        assert prompts(world) in ([], [0])
        world.step()
    lacking = first.num_prompt - (first.computed - computed(world.plans[-1], first))
    assert lacking <= min(aside, 128 - 64) and world.scheduler.counters.late_starts == 1
    world.finish()


def test_one_that_is_cancelled_before_it_starts_is_no_late_start():
    world = World(cells=2000)
    world.submit(LONG)
    world.step()
    late = world.submit(range(2000, 2600))
    world.step()
    assert late.phase is Phase.WAITING
    world.scheduler.finish(late)
    world.finish()
    assert not world.scheduler.counters.late_starts


def test_prompts_of_one_step_start_together():
    world = World()
    jobs = [world.submit(range(100 * n, 100 * n + 20)) for n in range(3)]
    assert world.step().admitted == (0, 1, 2)
    assert all(job.phase is Phase.DECODE for job in jobs) and world.scheduler.counters.late_starts == 0


def test_beside_streams_a_step_has_the_end_of_one_and_the_start_of_the_next():
    world = World(cells=3000, slots=3, batch=512, budget=256)
    world.submit(range(20), limit=500)
    first, second = world.submit(range(1000, 1600)), world.submit(range(2000, 2700))
    world.finish()
    sizes = [(computed(plan, first), computed(plan, second)) for plan in world.plans]
    (shared,) = [both for both in sizes if min(both) > 1]
    assert 256 - 64 < sum(shared) <= 256, "the end of the first and the beginning of the second"


def test_a_prompt_that_would_be_computed_before_it_starts_at_once():
    world = World(cells=2000)
    world.submit(LONG)
    world.step()
    short = world.submit(range(2000, 2090))
    assert computed(world.step(), short) == 90 and world.scheduler.counters.late_starts == 0


def test_so_does_one_of_a_higher_priority_and_one_for_a_client_beside_work_ahead():
    world = World(cells=3000)
    world.submit(LONG, kind=Kind.AHEAD)
    world.step()
    world.submit(range(2000, 2600))
    assert world.step().admitted == (1,)
    world.submit(range(3000, 3700), priority=1)
    assert world.step().admitted == (2,)


def test_it_waits_no_longer_for_those_that_come_after_it():
    """Its turn is counted from the moment in which it could have started."""
    world = World(cells=4000)
    world.submit(LONG)
    world.step()
    late = world.submit(range(2000, 2600))
    world.step()
    steps = 0
    while late.phase is not Phase.DECODE:
        world.submit(range(5000 + 100 * steps, 5091 + 100 * steps), limit=1)
        world.step()
        steps += 1
    assert steps <= (500 + 2 * 600) // 128 + 1


class Documents(Fixed):
    """A prompt of two documents, with the one in front that is cached."""

    def arrange(self, tree, scope, waiting=()):
        either = [Fixed([*a, *b, *self.layout.tokens]).layout for a, b in ((A, B), (B, A))]
        return max(either, key=lambda layout: tree.reusable(scope, layout.tokens))


A, B = range(5000, 5100), range(6000, 6100)


def test_its_documents_get_their_order_when_it_starts():
    world = World(cells=2000)
    world.submit([*LONG, *range(50)])
    world.step()
    asked = world.submit(Documents(range(700, 900)))
    reader = world.submit([*B, *range(800, 850)])
    world.finish()
    assert reader.num_prompt < asked.num_prompt and asked.reuse.cached == len(B)
    assert asked.layout.tokens[0] == B[0]


def test_a_prompt_is_laid_out_once_while_it_waits():
    world, laid_out = World(cells=2000), []

    class Counted(Fixed):
        def arrange(self, tree, scope, waiting=()):
            laid_out.append(len(world.plans))
            return super().arrange(tree, scope, waiting)

    first = world.submit(LONG)
    world.step()
    world.submit(Counted(range(2000, 2600)))
    while first.phase is not Phase.DECODE:
        world.step()
    assert laid_out == [1]
    world.step()
    assert laid_out[1:] == [len(world.plans) - 1], "and once more when it starts"
    short = world.submit(range(5000, 5020))
    assert computed(world.step(), short), "one that comes later is found all the same"


def test_an_equal_prompt_finds_all_of_it_computed():
    world = World(cells=2000)
    jobs = [world.submit(LONG) for _ in range(3)]
    world.finish()
    assert [job.reuse.cached for job in jobs] == [0, 499, 499]


def test_prompts_of_one_step_start_together_where_a_step_is_no_longer_than_a_chunk():
    world = World(batch=32)
    for n in range(2):
        world.submit(range(100 * n, 100 * n + 10))
    assert world.step().admitted == (0, 1)


def test_a_short_question_does_not_wait_after_one_with_more_cached_that_starts_later():
    world = World(cells=4000)
    world.run(range(3000, 3800))
    world.submit(LONG)
    world.step()
    chat = world.submit([*range(3000, 3800), *range(100, 700)])
    world.step()
    short = world.submit(range(2000, 2050))
    assert computed(world.step(), short) == 50 and chat.phase is Phase.WAITING
    world.finish()


def test_short_questions_do_not_wait_once_one_that_starts_later_was_overtaken_often():
    world = World(cells=9000, window=4)
    world.submit(range(5000, 8000))
    world.step()
    late = world.submit(range(1000, 5000))
    for n in range(8):
        short = world.submit(range(100 * n, 100 * n + 20), limit=1)
        assert computed(world.step(), short) == 20
    assert late.phase is Phase.WAITING and late.reuse.num_overtaken == 8
    world.finish()


def test_a_short_question_shares_a_step_with_one_before_it():
    world = World(cells=4000)
    long = world.submit(range(1000, 3000))
    world.step()
    world.submit(range(4000, 4192))
    world.step()
    short = world.submit(range(5000, 5064))
    plan = world.step()
    assert computed(plan, short) == 64 and not computed(plan, long)


def test_a_short_question_does_not_wait_for_tokens_that_a_grammar_forces_beside_a_long_prompt():
    world = World(cells=4000)
    stream = world.submit(range(20), limit=400)
    for _ in range(2):
        world.step()
    world.submit(LONG)
    world.step()
    short = world.submit(range(2000, 2020))
    for token in (5, 6):
        stream.force(token)
    assert computed(world.step(), short)


def test_one_that_waits_for_its_slot_starts_once_that_is_idle():
    world = World(cells=4000, slots=3)
    stream = world.submit(range(20), limit=4, slot=0)
    world.step()
    world.submit(LONG, slot=1)
    world.step()
    late, short = world.submit(range(2000, 2600)), world.submit(range(700, 730), slot=0)
    while stream.phase is not Phase.DONE:
        world.step()
    assert computed(world.step(), short) and late.phase is Phase.WAITING


def test_no_prompt_waits_for_those_of_another_set_of_adapters():
    world = World(cells=9000)
    world.submit(LONG)
    world.step()
    other = world.submit(range(5000, 8000), scope=Scope.shared("", "lora"))
    assert computed(world.step(), other)
    late = world.submit(range(8000, 9000))
    world.step()
    assert late.phase is Phase.WAITING


def test_what_no_client_waits_for_starts_after_a_client_s_that_starts_later():
    world = World(cells=4000)
    world.submit(LONG)
    world.step()
    late = world.submit(range(2000, 2600))
    ahead = world.submit(range(3000, 3100), kind=Kind.AHEAD)
    while late.phase is Phase.WAITING:
        world.step()
        assert ahead.phase is Phase.WAITING or late.phase is not Phase.WAITING
    world.finish()
    assert not world.scheduler.counters.preemptions


def test_few_prompts_are_laid_out_in_one_step():
    world, laid_out = World(cells=9000), []

    class Counted(Fixed):
        def arrange(self, tree, scope, waiting=()):
            laid_out.append(len(world.plans))
            return super().arrange(tree, scope, waiting)

    world.submit(range(1000, 4000))
    world.step()
    for n in range(10):
        world.submit(Counted(range(10000 * n, 10000 * n + 3500)), limit=1)
    for _ in range(8):
        world.step()
    assert laid_out == [1] * 4 + [2] * 4 + [3] * 2
