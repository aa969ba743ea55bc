"""Answers that were computed beside others: from a card, their cells take longer to save than to compute again."""

import pytest
from slotcache.slots import host
from slotcache.slots.radix import descendants
from support.scopes import COMMON
from support.world import World

LIMIT = 40
PROMPTS = (range(100), range(200, 300))


def answered(world, together):
    """Two prompts with answers, computed beside each other or one behind the other. A third prompt sends them away."""
    jobs = [world.submit(prompt, limit=LIMIT) if together else world.run(prompt, limit=LIMIT) for prompt in PROMPTS]
    world.finish()
    turns = [job.tokens[: job.num_tokens - 1].tolist() for job in jobs]
    world.run(range(500, 560))
    return turns


def nodes(tree):
    return [node for root in tree.roots.values() for node in descendants(root)]


def cached(world, turn):
    return world.run([*turn, 1, 2, 3]).reuse.cached


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("scattered_tokens", [0.0, 0.5, 3.0])
def test_what_takes_longer_to_save_than_to_compute_is_not_saved(together, scattered_tokens):
    world = World(host=2000, scattered_tokens=scattered_tokens)
    first, second = answered(world, together)
    tree = world.scheduler.tree
    is_dropped = together and scattered_tokens > 1
    assert tree.num_uncopied == (2 * (LIMIT - 1) if is_dropped else 0) == tree.host.num_lost
    assert cached(world, first) == cached(world, second) == 100 + (0 if is_dropped else LIMIT - 1)


def test_without_host_memory_the_price_of_a_save_drops_nothing():
    world = World(scattered_tokens=3.0)
    answered(world, together=True)
    tree = world.scheduler.tree
    tree.evict(tree.device.num_ready)
    assert tree.num_uncopied == 0 < tree.host.num_lost


def test_it_is_saved_where_much_stands_after_it():
    world = World(host=2000, scattered_tokens=3.0)
    jobs = [world.submit(prompt, limit=LIMIT) for prompt in PROMPTS]
    world.finish()
    longer = [*jobs[0].tokens[: jobs[0].num_tokens - 1].tolist(), *range(600, 800)]
    world.run(longer)
    world.run(range(500, 560))
    assert cached(world, longer) == len(longer)


def test_idle_time_does_not_save_it_either_and_ends():
    world = World(host=2000, idle=1000, scattered_tokens=3.0)
    for prompt in PROMPTS:
        world.submit(prompt, limit=LIMIT)
    world.finish()
    tree = world.scheduler.tree
    while tree.copies.save_ahead():
        world.carry_out()
    assert tree.copies.num_saved == 200 and tree.num_uncopied == 0


def test_it_is_saved_where_a_client_has_pinned_it():
    world = World(host=2000, idle=1000, scattered_tokens=3.0)
    jobs = [world.submit(prompt, limit=LIMIT) for prompt in PROMPTS]
    world.finish()
    first, second = [job.tokens[: job.num_tokens - 1] for job in jobs]
    assert world.scheduler.pins.pin(COMMON, first) == len(first)
    tree = world.scheduler.tree
    tree.evict(tree.device.num_ready)
    assert tree.num_uncopied == tree.host.num_lost == LIMIT - 1
    assert [cached(world, turn.tolist()) for turn in (first, second)] == [len(first), 100]


def test_it_is_saved_once_it_was_computed_again():
    world = World(host=2000, scattered_tokens=3.0)
    first, _ = answered(world, together=True)
    cached(world, first)
    world.run(range(500, 560))
    assert cached(world, first) == len(first) + 2  # less its last token, which is always computed


def test_both_parts_of_a_run_that_is_cut_keep_their_share():
    world = World(host=2000, idle=1000, scattered_tokens=3.0)
    jobs = [world.submit(prompt, limit=LIMIT) for prompt in PROMPTS]
    world.finish()
    world.run([*jobs[0].tokens[:120].tolist(), 7, 7, 7])
    shares = map(world.scheduler.tree.device.stretches.of, nodes(world.scheduler.tree))
    assert sorted(filter(None, shares)) == [19, 20, 35]  # the last three of the other answer were computed alone


def test_branches_are_counted_as_far_as_it_takes(monkeypatch):
    """What eviction and idle time look at is bounded by the run, not by what clients put behind it."""
    world, looked = World(host=5000, cells=4000, idle=4000, scattered_tokens=1.5), []
    jobs = [world.submit(prompt, limit=LIMIT) for prompt in PROMPTS]
    world.finish()
    turn = jobs[0].tokens[: jobs[0].num_tokens - 1].tolist()
    for branch in range(20):
        world.run([*turn, 1000 + branch], limit=1)
    copies, run = world.scheduler.tree.copies, next(node for node in nodes(world.scheduler.tree) if len(node.children) == 20)
    monkeypatch.setattr(host, "descendants", lambda node: (looked.append(one) or one for one in descendants(node)))
    stretches = world.scheduler.tree.device.stretches
    for scattered, num_looked in ((LIMIT - 1, 20), (28, 3), (26, 0)):
        monkeypatch.setattr(stretches, "_counts", {run: scattered})
        assert copies.pays(run) and len(looked) == num_looked
        looked.clear()
    monkeypatch.setattr(copies, "pays", lambda node: looked.append(node) or node is not run)
    while copies.save_ahead():
        world.carry_out()
        looked.clear()
    assert looked.count(run) == 1, "20 sequences stand on it"


@pytest.mark.parametrize(("scattered_tokens", "aside", "is_swapped"), [(0.0, 4, True), (3.0, 4, False), (3.0, 1, True)])
def test_it_is_swapped_where_a_step_gains_more_and_comes_back_in_one_piece(scattered_tokens, aside, is_swapped):
    world = World(host=2000, idle=1000, slots=3, apart=0, aside=aside, scattered_tokens=scattered_tokens)
    idle = world.submit(PROMPTS[0], limit=LIMIT)
    running = world.submit(PROMPTS[1], limit=LIMIT + 20)
    while idle in world.scheduler.running or not idle.num_tokens:
        world.step()
    stretches = world.scheduler.tree.device.stretches
    run = next(filter(stretches.of, nodes(world.scheduler.tree)))
    assert running.sequence and stretches.of(running.sequence) > LIMIT / 2
    world.submit(range(500, 600))
    while not (swap := world.step()).afterwards and not world.scheduler.idle:
        pass
    assert bool(swap.afterwards) == is_swapped == (run.copy is not None)
    assert not is_swapped or stretches.of(run) == stretches.of(running.sequence) == 0
