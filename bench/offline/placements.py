"""Placement of requests on replicas, simulated: reuse, waiting and balance for 2 to 64 replicas, without a server."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random

from ...ordering.fleet import DISPLACING, Fleet
from ...ordering.policy import arrange
from ...ordering.tree import KnowledgeTree
from ..journal import note
from ..report import Bar, Report, Table, mean, median
from .simulator import DECODE, SPEED, TOKENS, Choice, Events, Order, Outcome, Placing, Replica, Simulation, World

Replicas = dict[str, Replica]
WAIT = "seconds to the first token, mean"
FIGURES: dict[str, Callable[[Outcome], float]] = {
    "documents reused, of 5": lambda one: mean(one.reused),
    WAIT: lambda one: mean(one.waits),
    "load of the busiest replica over the mean": lambda one: one.balance,
}
SLACK = 2  # requests in flight by which a replica may be above the least one before a prefix router leaves it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench fleet`."""
    add = parser.add_argument
    add("--replicas", default="2,4,8,16,64", help="numbers of replicas (default: %(default)s)")
    add("--questions", type=int, default=150, help="for each replica (default: %(default)s)")
    add("--seeds", type=int, default=3, help="runs of each, whose means are shown (default: %(default)s)")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Simulate each way of placing with each number of replicas, then the fleet with trouble."""
    numbers = [int(number) for number in args.replicas.split(",")]
    found: dict[str, list[list[Outcome]]] = {way: [] for way in WAYS}
    for number in numbers:
        for way, make in WAYS.items():
            print(f"  {number} replicas: {way}", file=sys.stderr, flush=True)
            found[way].append([Simulation(World(number, args.questions), make, seed).run() for seed in range(args.seeds)])
            note(replicas=number, way=way, means={title: _mean(figure, found[way][-1]) for title, figure in FIGURES.items()})
    columns = ("placed by, ordered", *(f"{number} replicas" for number in numbers))
    means = {title: {way: [_mean(figure, runs) for runs in found[way]] for way in WAYS} for title, figure in FIGURES.items()}
    tables = [Table(title, columns, [(way, *row) for way, row in rows.items()]) for title, rows in means.items()]
    waits = means[WAIT]
    worst = max(waits[FLEET][at] / min(waits[way][at] for way in WAYS) for at in range(len(numbers)))
    bars = [Bar(5, "mean wait with the fleet, of the best way's, at most", worst, 1.03, unit="x")]
    return Report("fleet", [*tables, _trouble(args)], bars=bars, data={"means": means})


def _mean(figure: Callable[[Outcome], float], runs: Sequence[Outcome]) -> float:
    return mean([figure(one) for one in runs])


def _trouble(args: argparse.Namespace) -> Table:
    """Return what the fleet loses by restarts and by a subject that everybody asks about, with 8 replicas."""
    world, names = World(8, args.questions), [f"replica {number:02}" for number in range(8)]
    rolling = [(0.3 + 0.05 * number, name) for number, name in enumerate(names)]
    cases: dict[str, tuple[World, Events]] = {
        "no trouble": (world, ()),
        "one replica lost": (world, [(0.5, names[0])]),
        "all restarted in turn": (world, rolling),
        "30 % of all questions about one region": (World(8, args.questions, hot=0.3), ()),
    }
    figures = [FIGURES["documents reused, of 5"], _p50, _p95, FIGURES["load of the busiest replica over the mean"]]
    rows = []
    for case, (asked, restarts) in cases.items():
        runs = [Simulation(asked, WAYS[FLEET], seed, restarts).run() for seed in range(args.seeds)]
        rows.append((case, *(_mean(figure, runs) for figure in figures)))
        note(trouble=rows[-1])
    columns = ("the fleet, 8 replicas", "reused", "TTFT p50 s", "p95", "busiest over mean")
    return Table("trouble", columns, rows)


def _p50(outcome: Outcome) -> float:
    return median(outcome.waits)


def _p95(outcome: Outcome) -> float:
    return sorted(outcome.waits)[int(0.95 * len(outcome.waits))]


# ---- ways to place ---------------------------------------------------------------------------------------------------


class _Way:
    """Knows the requests in flight of each replica."""

    def __init__(self, replicas: Replicas) -> None:
        self.flying: Counter[str] = Counter(dict.fromkeys(replicas, 0))

    def answered(self, replica: str, order: Order, cached: int) -> None:
        self.flying[replica] -= 1

    def lost(self, names: Sequence[str]) -> None:
        pass

    def _to(self, replica: str, order: Order | None) -> Choice:
        self.flying[replica] += 1
        return Choice(replica, order)


class _Random(_Way):
    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._random = Random(0)

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        return self._to(self._random.choice(names), documents)


class _Session(_Way):
    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        return self._to(_hashed(user, names), None)


class _PrefixRouter(_Way):
    """Sends a prompt to the replica that was sent its longest prefix, unless that one is busier than others."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._trees = {name: KnowledgeTree(100 * len(replicas)) for name in replicas}

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        keys, least = [key for key, _ in documents], min(self.flying.values())
        free = [name for name in names if self.flying[name] <= least + SLACK]
        known = {name: arrange(keys, self._trees[name], "retrieval").reused_documents for name in free}
        chosen = min(free, key=lambda name: (-known[name], self.flying[name], len(self._trees[name]), name))
        self._trees[chosen].insert(documents)
        return self._to(chosen, documents)


class _GlobalOrder:
    """Orders by one tree for all replicas, and leaves the placement to a router that sees the prompt."""

    def __init__(self, replicas: Replicas) -> None:
        self._tree, self._router = KnowledgeTree(100 * len(replicas)), _PrefixRouter(replicas)
        self.answered, self.lost = self._router.answered, self._router.lost

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        order = [documents[at] for at in arrange([key for key, _ in documents], self._tree).order]
        self._tree.insert(order)
        return self._router.choose(order, names, user)


class _Header(_Way):
    """Orders by one tree, and sends each request to the replica that its first document hashes to."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._tree = KnowledgeTree(100 * len(replicas))

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        order = [documents[at] for at in arrange([key for key, _ in documents], self._tree).order]
        self._tree.insert(order)
        return self._to(_hashed(order[0][0], names), order)


class _Fleet(_Way):
    """`Fleet`: a tree for each replica, and the work that was sent there. The replica orders once more."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._fleet = Fleet(100)
        self._ahead = dict.fromkeys(replicas, 0.0)  # work in flight, in tokens of prefill

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        best = self._fleet.choose(documents, names, self._ahead.__getitem__)
        self._fleet.served(best.replica, [documents[at] for at in best.arrangement.order])
        self._ahead[best.replica] += _work(documents, best.arrangement.reused_tokens)
        return self._to(best.replica, None)

    def answered(self, replica: str, order: Order, cached: int) -> None:
        super().answered(replica, order, cached)
        self._fleet.report(replica, order, cached)
        self._ahead[replica] = max(self._ahead[replica] - _work(order, cached), 0.0)

    def lost(self, names: Sequence[str]) -> None:
        self._fleet.replicas(names)


class _Foresight(_Way):
    """The same choice with the replicas' caches and queues themselves before it: no front can know as much."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._replicas, self._ahead = replicas, dict.fromkeys(replicas, 0.0)

    def choose(self, documents: Order, names: Sequence[str], user: str) -> Choice:
        keys = [key for key, _ in documents]
        reused = {name: arrange(keys, self._replicas[name].cache).reused_tokens for name in names}
        chosen = min(
            names, key=lambda name: (self._ahead[name] - DISPLACING * reused[name], len(self._replicas[name].cache), name)
        )
        self._ahead[chosen] += _work(documents, reused[chosen])
        return self._to(chosen, None)

    def answered(self, replica: str, order: Order, cached: int) -> None:
        super().answered(replica, order, cached)
        self._ahead[replica] = max(self._ahead[replica] - _work(order, cached), 0.0)


def _work(documents: Order, cached: int) -> float:
    """Return what a replica does for a request, in tokens of prefill: its answer counts, too."""
    return len(documents) * TOKENS - cached + DECODE * SPEED


def _hashed(text: str, names: Sequence[str]) -> str:
    return names[int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) % len(names)]


FLEET, FORESIGHT = "fleet, ordered at the replica", "the same with foresight"
WAYS: dict[str, Callable[[Replicas], Placing]] = {
    "random, as retrieved": _Random,
    "prefix router, as retrieved": _PrefixRouter,
    "session, ordered at the replica": _Session,
    "prefix router behind one global order": _GlobalOrder,
    "hash of the first document of a global order": _Header,
    FLEET: _Fleet,
    FORESIGHT: _Foresight,
}
