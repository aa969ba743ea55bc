"""Replicas with a prefix cache each, simulated: queues, costs of prefill, caches that evict, replicas that are lost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random
from typing import Protocol

from ...ordering.policy import arrange
from ...ordering.tree import KnowledgeTree

TOKENS = 200  # of a document
SPEED = 2000.0  # prompt tokens that a replica computes in a second
DECODE = 0.2  # seconds of a replica for an answer
THINKING = 1.0  # seconds between an answer and the user's next question, on average
Order = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class World:
    """What is asked. regions: subjects, the n-th of them 1 / n times as popular (Zipf); hot: the first one's further share.

    documents: of a region. k: of a question. cache: documents that a replica can hold. users: for each replica, at once.
    """

    replicas: int
    questions: int = 150  # for each replica
    regions: int = 50
    documents: int = 8
    k: int = 5
    cache: int = 100
    users: int = 4
    hot: float = 0.0


@dataclass(slots=True, eq=False)
class Replica:
    """An engine that computes one prompt after the other. free: when it has done all that it was sent, in seconds."""

    name: str
    cache: KnowledgeTree
    free: float = 0.0
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes. order: of its documents in the prompt, where the engine does not choose one itself."""

    replica: str
    order: Order | None = None


@dataclass(slots=True)
class Outcome:
    """reused: documents of each question. waits: seconds from each question to its first token. loads: by replica."""

    reused: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)

    @property
    def balance(self) -> float:
        """The load of the busiest replica over the mean."""
        return max(self.loads.values()) * len(self.loads) / sum(self.loads.values())


class Placing(Protocol):
    """A way to place requests. It sees the requests and the answers; only `Foresight` sees the replicas themselves."""

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice: ...

    def answered(self, replica: str, order: Order, cached: int) -> None: ...

    def lost(self, names: Sequence[str]) -> None: ...


Events = Sequence[tuple[float, str]]
"""The share of all questions after which a replica restarts with an empty cache, and its name."""


class Simulation:
    """Users in a closed loop: each asks, reads the answer, and asks again about any region."""

    def __init__(
        self, world: World, make: Callable[[dict[str, Replica]], Placing], seed: int, restarts: Events = ()
    ) -> None:
        self._world, self._random = world, Random(seed)
        self._replicas = {name: Replica(name, KnowledgeTree(world.cache)) for name in map(_name, range(world.replicas))}
        self._placing = make(self._replicas)
        weights = [1 / rank for rank in range(1, world.regions + 1)]
        weights[0] += world.hot / (1 - world.hot) * sum(weights)
        self._weights = list(accumulate(weights))
        self._restarts = sorted(restarts)
        self.outcome = Outcome(loads=dict.fromkeys(self._replicas, 0))

    def run(self) -> Outcome:
        """Ask all questions. An answer is reported to the placing when it ends, as a front would see it."""
        world, numbers = self._world, count()
        events: list[tuple[float, int, Callable[[float], Iterator[tuple[float, Callable]]]]] = []
        for user in range(world.users * world.replicas):
            heapq.heappush(events, (self._random.random() * THINKING, next(numbers), self._asking(f"user {user}")))
        left = world.questions * world.replicas
        while left and events:
            now, _, act = heapq.heappop(events)
            asks = act.__name__ == "ask"
            left -= asks
            if asks and self._restarts and left <= (1 - self._restarts[0][0]) * world.questions * world.replicas:
                self._restart(self._restarts.pop(0)[1], now)
            for at, following in act(now):
                heapq.heappush(events, (at, next(numbers), following))
        return self.outcome

    def _restart(self, name: str, now: float) -> None:
        self._placing.lost([other for other in self._replicas if other != name])
        self._replicas[name].cache.forget(())
        self._replicas[name].free = max(self._replicas[name].free, now)

    def _question(self) -> Order:
        (region,) = self._random.choices(range(self._world.regions), cum_weights=self._weights)
        chosen = self._random.sample(range(self._world.documents), self._world.k)
        return [(f"{region}/{number}", TOKENS) for number in chosen]

    def _asking(self, user: str) -> Callable[[float], Iterator[tuple[float, Callable]]]:
        def ask(now: float) -> Iterator[tuple[float, Callable]]:
            documents = self._question()
            choice = self._placing.choose(documents, list(self._replicas), user)
            replica = self._replicas[choice.replica]
            order = choice.order or [documents[at] for at in arrange([key for key, _ in documents], replica.cache).order]
            cached = _cached(replica.cache, order)
            replica.cache.insert(order)
            first_token = max(now, replica.free) + (len(order) - cached) * TOKENS / SPEED
            replica.free = first_token + DECODE
            self.outcome.reused.append(cached)
            self.outcome.waits.append(first_token - now)
            self.outcome.loads[replica.name] += 1

            def answer(now: float) -> Iterator[tuple[float, Callable]]:
                self._placing.answered(replica.name, order, cached * TOKENS)
                yield now + self._random.expovariate(1 / THINKING), ask

            yield replica.free, answer

        return ask


def _cached(cache: KnowledgeTree, order: Order) -> int:
    """Return how many documents of an order are cached."""
    position = cache.start()
    for number, (key, _) in enumerate(order):
        step = cache.follow(position, key)
        if step is None:
            return number
        position = step.position
    return len(order)


def _name(number: int) -> str:
    return f"replica {number:02}"
