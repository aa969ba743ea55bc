"""Eviction: the order in which runs leave a full tier, and the cost of computing them again."""

import numpy as np
import pytest
from slotcache.models.times import CPU
from slotcache.slots.check import check_tree
from slotcache.slots.costs import Profile
from slotcache.slots.eviction import POLICIES, EvictionPolicy
from slotcache.slots.host import HostMemory
from slotcache.slots.plan import Plan, Span
from slotcache.slots.prefix_tree import PrefixTree
from support.scopes import COMMON


class Tier:
    """A host tier of `capacity` tokens behind a tree; idle KV leaves the pool at once."""

    def __init__(self, capacity, policy, profile=None):
        self.tree = PrefixTree(1000, 8, HostMemory(capacity, EvictionPolicy(policy)), profile=profile)

    def use(self, *tokens, stops=()):
        """Compute a prompt. Return how much of it was cached."""
        prompt = np.array(tokens, np.int32)
        sequence = self.tree.claim(COMMON, prompt, stops).sequence
        while self.tree.evict():
            pass
        self.tree.copies.restore(sequence)
        found = sequence.length
        self.tree.device.advance(sequence, len(prompt))
        self.tree.release(sequence)
        while self.tree.evict():
            pass
        check_tree(self.tree)
        return found


def run(start, size=20):
    return range(start, start + size)


@pytest.mark.parametrize(("policy", "found"), [("lru", 0), ("lfu", 19), ("gdsf", 19), ("pgdsf", 19)])
def test_what_many_have_used_outlives_what_came_later(policy, found):
    tier = Tier(100, policy)
    for number in range(3):
        tier.use(*run(100), 7, number, stops=[20])  # three requests with one document
    for start in (200, 300, 400, 500, 600):
        tier.use(*run(start))
    assert tier.use(*run(100)) == found


def test_what_was_used_often_does_not_stay_for_ever():
    stays, evicts = Tier(100, "lfu"), Tier(100, "gdsf")
    for tier in (stays, evicts):
        for number in range(3):
            tier.use(*run(100), 7, number, stops=[20])
        for start in range(1000, 3000, 100):
            tier.use(*run(start))
    assert stays.use(*run(100)) == 19 and evicts.use(*run(100)) == 0


def test_a_conversation_does_not_make_its_history_dearer_to_others():
    tier = Tier(1000, "pgdsf")
    history = list(run(100))
    for turn in range(5):
        tier.use(*history)
        history += run(200 + 100 * turn, 5)
    (first,) = tier.tree.roots[COMMON].children.values()
    assert first.frequency == 1
    tier.use(*run(100), 9)
    (first,) = tier.tree.roots[COMMON].children.values()
    assert first.frequency == 2


def test_of_two_used_alike_the_dearer_stays():
    profile = Profile(CPU.chunk)
    for start, seconds in ((0, 0.1), (1000, 0.3)):
        profile.observe(Plan((), (Span(0, 0, start, np.zeros(100, np.int32), logits=False),)), seconds)
    tier = Tier(150, "pgdsf", profile)
    tier.use(*run(500, 100), *run(300, 20), stops=[100])  # 20 tokens behind 100
    tier.use(*run(100))
    tier.use(*run(200))  # 10 tokens too many
    assert tier.use(*run(100)) == 0


def test_what_came_before_the_first_step_was_timed_is_no_dearer():
    profile = Profile(CPU.chunk)
    tier = Tier(60, "pgdsf", profile)
    tier.use(*run(100))
    profile.observe(Plan((), (Span(0, 0, 0, np.zeros(100, np.int32), logits=False),)), 0.1)
    for start in (200, 300, 400):
        tier.use(*run(start))
    assert tier.use(*run(100)) == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_budget_holds_under_every_policy(policy):
    tier = Tier(70, policy)
    for start in range(0, 2000, 30):
        tier.use(*run(start % 200, 25))
        assert tier.tree.host.num_tokens <= 70


def idle(*sizes):
    """Return a tree with an idle run of each size. The first one leaves first; all begin with the same token."""
    tree = PrefixTree(100_000, len(sizes) + 1, policy=EvictionPolicy("lru"))
    for number, size in enumerate(sizes):
        sequence = tree.claim(COMMON, np.array([0, *range(number + 1, number + size + 1)], np.int32), stops=[1]).sequence
        tree.device.advance(sequence, size + 1)
        tree.release(sequence)
    return tree


def test_one_call_frees_as_many_leaves_as_it_takes_and_no_more():
    tree = idle(5, 7, 11, 13)
    assert tree.evict(6) == 12 and tree.num_evicted == 12
    check_tree(tree)
    assert tree.evict(1) == 11
    assert tree.evict(1000) == 14 and not tree.device.num_ready, "the last one's parent follows it"
    assert tree.evict() == 0
    check_tree(tree)


def test_a_leaf_is_found_without_a_look_at_each():
    tree = idle(*[3] * 400)
    device, looks = tree.device, []
    device.leaves._may_evict = lambda node: looks.append(node) or device.is_leaf(node)
    assert tree.evict(300) == 300
    assert len(looks) <= 200 and device.num_ready == 901


def test_runs_that_are_used_over_and_over_leave_no_entries():
    tier = Tier(100, "pgdsf")
    for number in range(1000):
        tier.use(*run(100), number % 2, stops=[20])
        tier.tree.device.leaves.offer(next(iter(tier.tree.roots[COMMON].children.values())))
    assert len(tier.tree.device.leaves._heap) <= 100 and len(tier.tree.host.candidates._heap) <= 100


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'fifo': expected one of pgdsf"):
        EvictionPolicy("fifo")


def test_a_profile_learns_what_depth_costs():
    profile = Profile(CPU.chunk)
    assert profile.seconds(1000, 10) == 10, "nothing seen: every token costs the same"
    for start in (0, 512, 1024, 2048):
        mean = start + 256
        plan = Plan((), (Span(0, 0, start, np.zeros(512, np.int32), logits=False),))
        profile.observe(plan, 512 * (1e-3 + 1e-6 * mean))
    assert profile.seconds(0, 100) == pytest.approx(100 * (1e-3 + 1e-6 * 50), rel=1e-6)
    assert profile.seconds(4000, 100) == pytest.approx(100 * (1e-3 + 1e-6 * 4050), rel=1e-6)
    profile.observe(Plan((), (Span(0, 0, 0, np.zeros(8, np.int32), logits=False),)), 10.0)
    assert profile.seconds(0, 100) < 1, "a small step says nothing"


def test_a_profile_of_one_depth_is_flat():
    profile = Profile(CPU.chunk)
    profile.observe(Plan((), (Span(0, 0, 0, np.zeros(100, np.int32), logits=False),)), 0.2)
    assert profile.seconds(5000, 10) == pytest.approx(0.02)
