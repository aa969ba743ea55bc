"""Pinned prompts leave last, but never stand in the way of a running request."""

import numpy as np
import pytest
from slotcache.slots.check import check_tree
from slotcache.slots.host import HostMemory
from slotcache.slots.prefix_tree import Pins, PrefixTree
from slotcache.slots.radix import path
from slotcache.slots.scope import Scope
from support.fixed_prompt import Fixed
from support.scopes import COMMON
from support.world import World


class Cache:
    """A pool of 100 cells over a host tier, with a clock that is set by hand."""

    def __init__(self, host=0, cells=100):
        self.tree, self.now = PrefixTree(cells, 16, HostMemory(host)), 0.0
        self.pins = Pins(self.tree, lambda: self.now)

    def use(self, tokens, stops=(), session=""):
        """Compute a prompt. Return how much of it was cached."""
        tokens = np.array(tokens, np.int32)
        missing = len(tokens) - self.tree.match(COMMON, tokens).ready
        while self.tree.device.num_cells - self.tree.device.num_ready < missing:
            assert self.tree.evict()
        sequence = self.tree.claim(COMMON, tokens, stops, session=session).sequence
        self.tree.copies.restore(sequence)
        found = sequence.length
        self.tree.device.advance(sequence, len(tokens))
        self.tree.release(sequence)
        check_tree(self.tree)
        return found

    def pin(self, tokens, *seconds):
        return self.pins.pin(COMMON, np.array(tokens, np.int32), *seconds)

    def unpin(self, tokens):
        return self.pins.unpin(COMMON, np.array(tokens, np.int32))

    def pinned(self, now=None):
        """Return the lengths of the runs that are held. now: the time, at which holds may have ended."""
        self.now = self.now if now is None else now
        self.pins.expire()
        return sorted(len(node.tokens) for node in self.pins.runs())

    def retire(self, tokens, session="s"):
        return self.tree.retire(COMMON, np.array(tokens, np.int32), session)

    def worths(self, tokens):
        """Return what the runs of a prompt are worth, by their ends."""
        nodes = path(self.tree.match(COMMON, np.array(tokens, np.int32)).node)
        return {node.end: (node.frequency, node.priority, node.last_use) for node in nodes}


def others(cache, count=12):
    """Use prompts that have nothing in common twice each, so that their priorities are higher."""
    for number in range(count):
        for _ in range(2):
            cache.use(range(1000 * (number + 1), 1000 * (number + 1) + 30))


@pytest.mark.parametrize("host", [0, 100])
@pytest.mark.parametrize(("pinned", "found"), [(True, 39), (False, 0)])
def test_what_is_pinned_outlives_what_is_used_more(host, pinned, found):
    cache = Cache(host)
    cache.use(range(40))
    assert not pinned or cache.pin(range(40)) == 40
    others(cache)
    while host and cache.tree.evict():
        pass
    assert cache.use(range(40)) == found


def test_a_pin_ends_when_its_time_is_over():
    cache = Cache()
    cache.use(range(40))
    cache.pin(range(40), 60.0)
    assert (cache.pinned(59.0), cache.pinned(60.0)) == ([40], [])
    others(cache)
    assert cache.use(range(40)) == 0


def test_the_longer_of_two_holds_counts():
    cache = Cache()
    cache.use(range(40))
    cache.pin(range(40), 60.0)
    cache.pin(range(40), 20.0)
    assert (cache.pinned(30.0), cache.pinned(61.0)) == ([40], [])


def test_a_run_that_is_cut_stays_pinned_and_ends_with_the_rest():
    cache = Cache()
    cache.use(range(40))
    cache.pin(range(40), 60.0)
    cache.use([*range(20), *range(500, 510)])
    assert (cache.pinned(), cache.pinned(61.0)) == ([20, 20], [])


def test_a_release_keeps_what_another_pin_needs():
    cache = Cache()
    first, second = [*range(20), *range(100, 120)], [*range(20), *range(200, 220)]
    for prompt in (first, second):
        cache.use(prompt, stops=(20,))
        assert cache.pin(prompt) == 40
    assert cache.unpin(first) == 20 and sum(cache.pinned()) == 40
    assert cache.unpin(second) == 40 and not cache.pinned()


def test_where_everything_is_pinned_requests_still_run():
    cache = Cache()
    for number in range(10):
        prompt = range(1000 * number, 1000 * number + 40)
        assert cache.use(prompt) == 0
        cache.pin(prompt)
    assert cache.tree.num_evicted > 0


def test_pinning_what_nobody_has_computed_pins_nothing():
    cache = Cache()
    assert cache.pin(range(40)) == 0
    cache.use(range(20))
    assert cache.pin(range(40)) == 20


def test_a_pin_that_is_renewed_again_and_again_is_remembered_once():
    cache = Cache()
    cache.use(range(40), stops=(20,))
    for _ in range(1000):
        cache.pin(range(40), 60.0)
        cache.now += 0.01
    assert len(cache.pins._ends) < 200 and not cache.pinned(cache.now + 60.0)


def test_pins_on_what_was_evicted_are_forgotten():
    cache = Cache()
    for number in range(500):
        cache.use(range(1000 * number, 1000 * number + 40))
        cache.pin(range(1000 * number, 1000 * number + 40), 1e9)
    assert len(cache.pins._ends) < 100 and sum(cache.pinned()) <= 100


def test_a_pin_ends_for_what_is_left_of_its_prompt():
    cache = Cache()
    cache.use(range(40), stops=(20,))
    cache.pin(range(40), 60.0)
    (first,) = cache.tree.roots[COMMON].children.values()
    cache.tree.discard(list(first.children.values()))
    for number in range(1, 200):
        cache.pin(range(40), 60.0 if number == 1 else 1e-9)
    assert not cache.pinned(61.0)


def test_what_a_client_marks_is_pinned_when_its_request_ends():
    world = World(cells=200)
    prompt = Fixed(range(60), [20, 40], breakpoints=[(20, 60.0), (40, 0.0)])
    world.run(prompt)
    assert [(node.start, node.end) for node in world.scheduler.pins.runs()] == [(0, 20)]
    ended = world.submit(Fixed(range(500, 560), [20], breakpoints=[(20, 60.0)]))
    world.scheduler.finish(ended)  # before it ran
    private = Fixed(range(800, 860), [20], breakpoints=[(20, 60.0)])
    world.run(private, scope=Scope.private(1), cache=False)
    assert len(list(world.scheduler.pins.runs())) == 1


def test_what_a_session_alone_has_is_evicted_first():
    cache = Cache(cells=130)
    shared, ended = list(range(20)), [*range(20), *range(100, 140)]
    cache.use(ended, [20], session="s")
    for text in ([*shared, *range(200, 230)], range(300, 330)):
        cache.use(text, [20])
    assert cache.retire(ended) == 40
    cache.use(range(400, 430))
    assert cache.use(range(300, 330)) == 29 and cache.use([*shared, *range(200, 230)]) == 49, "they were used before"
    assert cache.use([*shared, 1000]) == 20 and cache.tree.match(COMMON, np.array(ended, np.int32)).ready == 20


def test_what_another_prompt_has_too_stays_as_it_is():
    cache = Cache(cells=200)
    for text in (range(40), range(80), [*range(40), 1000, *range(80)]):
        cache.use(text, session="s")
    assert cache.retire(range(40)) == 0, "two others of the session begin with it"
    cache.use(range(200, 240), session="s")
    cache.pin(range(200, 240))
    assert cache.retire(range(200, 240)) == 0
    assert cache.retire(range(700, 720)) == 0


@pytest.mark.parametrize("other", ["", "t"])
@pytest.mark.parametrize(
    ("before", "after", "retired"),
    [
        ((range(40),), (), 40),  # it warmed the system prompt and the documents
        ((), (range(80),), 0),  # the same prompt
        ((), (range(120),), 0),  # it goes on from this prompt
        ((), (range(60),), 20),  # a part of the prompt, to no segment's end
        ((), ([*range(40), *range(300, 340)],), 40),  # the same documents, another question
    ],
)
def test_what_another_client_computed_or_used_keeps_its_worth_when_a_session_ends(before, after, retired, other):
    cache = Cache(cells=300)
    for text in before:
        cache.use(text, session=other)
    cache.use(range(80), [20, 40], session="s")
    for text in after:
        cache.use(text, [20, 40], session=other)
    known = [cache.worths(text) for text in (*before, *after)]
    assert cache.retire(range(80), session="other") == 0
    assert cache.retire(range(80)) == retired
    assert [cache.worths(text) for text in (*before, *after)] == known


def test_the_next_turn_of_a_session_goes_with_it():
    cache = Cache(cells=300)
    for size in (40, 80):
        cache.use(range(size), session="s")
    assert cache.retire(range(40)) == 80
