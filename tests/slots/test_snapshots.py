"""Snapshots of whole states within a budget, without a model."""

import numpy as np
from slotcache.slots.archive import Record
from slotcache.slots.check import check
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots
from slotcache.slots.tree import PrefixTree
from support.fixed_prompt import Fixed
from support.memory import Memory

S = Scope.shared("s")


class Server:
    """A model that cannot be cut, with `budget` bytes for states, one byte a token."""

    def __init__(self, budget):
        self.memory = Memory(100, can_cut=False)
        tree = PrefixTree(100, 8)
        self.snapshots = Snapshots(tree, budget)
        self.snapshots.token_bytes = 1
        self.scheduler = Scheduler(tree, num_lanes=1, snapshots=self.snapshots)

    def ask(self, tokens):
        """Return how much of a prompt a snapshot spared."""
        prompt = Fixed(tokens, [len(tokens)])
        request = Request(len(tokens), prompt, 1, Scope.private(len(tokens)), cache=False, snapshot_scope=S)
        self.scheduler.submit(request)
        while request.num_tokens == request.num_prompt:
            plan = self.scheduler.plan()
            self.scheduler.commit(plan, self.memory.run(plan))
            check(self.scheduler)
        self.scheduler.finish(request)
        self.memory.run(self.scheduler.plan())
        check(self.scheduler)
        return request.cached

    def kept(self):
        return [node.end for node in self.snapshots.of(S)]


PROMPT = np.arange(30, dtype=np.int32)


def test_a_shorter_prompt_takes_the_room_of_a_longer_one():
    server = Server(budget=30)
    server.ask(PROMPT)
    assert server.kept() == [30]
    server.ask(PROMPT[:20])
    assert server.kept() == [20]
    assert server.ask(PROMPT[:21]) == 20
    assert server.snapshots.drop(S) == 21 and server.snapshots.num_bytes == 0


def test_a_longer_prompt_takes_the_room_of_a_shorter_one():
    server = Server(budget=30)
    server.ask(PROMPT[:20])
    assert server.ask(PROMPT) == 20
    assert server.kept() == [30] and server.snapshots.num_bytes == 30


def record(length):
    return Record(Scope.shared("s"), np.zeros(length, np.int32), 0, np.zeros(length, np.uint8))


def test_there_is_room_until_the_budget_is_spent():
    server = Server(budget=30)
    assert server.snapshots.has_room(record(30)) and not server.snapshots.has_room(record(31))
    server.ask(PROMPT[:20])
    assert server.snapshots.has_room(record(10)) and not server.snapshots.has_room(record(11))
