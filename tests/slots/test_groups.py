"""Requests that follow one another because they share what they reuse, and what that may cost the others that wait."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scopes import COMMON
from support.world import World


def asked(world, subject, number, size=60):
    """A question of 10 tokens behind `size` tokens that all requests of its subject share."""
    start = 10_000 * subject
    question = start + 1000 + 10 * number
    return world.submit([*range(start, start + size), *range(question, question + 10)], limit=1)


def admitted(world):
    """All requests by the time at which they were admitted."""
    return [number for plan in world.plans for number in plan.admitted]


def busy(**options):
    """A world whose only slot is taken, with room for one more prompt."""
    world = World(slots=1, cells=90, **options)
    world.submit(range(900_000, 900_010))
    world.step()
    return world


def test_requests_of_one_path_follow_each_other_however_far_apart_they_wait():
    world = busy()
    jobs = [asked(world, subject, number) for number in range(5) for subject in range(1, 9)]
    world.finish()
    subjects = [(number - 1) % 8 for number in admitted(world)[1:]]
    assert subjects == [subject for subject in range(8) for _ in range(5)], "the oldest first, each with its own"
    assert sum(job.reuse.cached for job in jobs) == 8 * 4 * 60
    assert not any(job.reuse.num_overtaken for job in jobs), "each leader was the oldest"


def test_what_is_evicted_is_not_expected_any_more():
    """The fourth prompt of a subject was cached when it came, and is not when another one has taken the cells."""
    world = busy()
    world.finish()
    asked(world, 1, 0)
    world.finish()
    running = world.submit(range(700_000, 700_060), limit=20)
    world.step()
    late, waiting = asked(world, 2, 1, size=30), asked(world, 1, 3, size=60)
    world.finish()
    assert running.reuse.cached == 0 and admitted(world)[-2:] == [late.request.id, waiting.request.id]
    assert waiting.reuse.cached == 0 and not late.reuse.num_overtaken


@pytest.mark.parametrize("window", [0, 1, 3])
def test_so_many_follow_one_leader_and_no_more(window):
    """Others of a popular subject come for ever; one that waits alone is passed by so many behind each older request."""
    world = busy(window=window)
    asked(world, 1, 0)
    alone = asked(world, 2, 0)
    number = 0
    while alone.sequence is None and alone.num_tokens < 71:
        number += 1
        asked(world, 1, number)
        asked(world, 1, number + 1000)
        world.step()
        assert number < 200
    place = admitted(world).index(alone.request.id)
    assert place <= 1 + 1 + window + window and alone.reuse.num_overtaken <= window
    world.finish()


@settings(max_examples=60)
@given(
    subjects=st.lists(st.integers(1, 4), min_size=2, max_size=30),
    window=st.sampled_from([0, 1, 2, 8]),
    slots=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_nobody_is_passed_more_often_than_the_window_says(subjects, window, slots, seed):
    """At most `window` later ones go before a request, and as many behind each one that came earlier.

    The steps are so large that none starts later than the running prompts: shorter ones would start meanwhile.
    """
    world, draw = World(slots=slots, cells=200, window=window, batch=1024), random.Random(seed)
    jobs = []
    for number, subject in enumerate(subjects):
        jobs.append(asked(world, subject, number, size=draw.choice([0, 40, 60])))
        for _ in range(draw.choice([0, 0, 0, 3])):
            world.step()
    world.finish()
    order = {number: at for at, number in enumerate(dict.fromkeys(admitted(world)))}
    for job in jobs:
        before = [number for number, at in order.items() if at < order[job.request.id]]
        later = sum(number > job.request.id for number in before)
        assert job.reuse.num_overtaken <= window
        assert later <= window * (1 + len(before) - later)


def test_a_queue_that_has_been_served_keeps_nothing():
    world = World(slots=2, cells=300)
    jobs = [asked(world, subject, number) for number in range(4) for subject in (1, 2, 3)]
    world.scheduler.finish(jobs[5])
    world.scheduler.finish(jobs[11])
    world.finish()
    groups = world.scheduler.waiting.groups
    groups.check([])
    assert not groups.paths.roots and COMMON not in groups.paths.roots


def test_a_scope_shares_nothing_with_another_one(scopes=("a", "b")):
    from slotcache.slots.scope import Scope

    world = busy()
    tokens = np.arange(60)
    first, other, same = (world.submit([*tokens, 100 + at], scope=Scope.shared(scopes[at % 2]), limit=1) for at in range(3))
    world.finish()
    assert (first.reuse.cached, other.reuse.cached, same.reuse.cached) == (0, 0, 60)
    assert admitted(world)[1:] == [first.request.id, same.request.id, other.request.id]
