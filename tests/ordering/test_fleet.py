"""Placement over several replicas, against brute force and against engines that forget."""

from collections import OrderedDict
from itertools import permutations
from random import Random
from threading import Thread

import pytest
from slotcache.ordering import Fleet, KnowledgeTree
from slotcache.ordering.fleet import DISPLACING, GONE

KEYS = "abcdefgh"
Order = list[tuple[str, int]]


def order_of(keys: str, tokens: int = 10) -> Order:
    return [(key, tokens) for key in keys]


def reused(tree: KnowledgeTree, order: Order) -> int:
    """The tokens that a tree predicts for documents in this very order."""
    position, tokens = tree.start(), 0
    for key, _ in order:
        step = tree.follow(position, key)
        if step is None:
            break
        position, tokens = step.position, tokens + step.tokens
    return tokens


def random_fleet(random: Random, names: list[str]) -> Fleet:
    fleet = Fleet()
    for _ in range(random.randint(0, 12)):
        order = [(key, tokens_of(key)) for key in random.sample(KEYS, random.randint(1, 5))]
        fleet.served(random.choice(names), order)
    return fleet


def tokens_of(key: str) -> int:
    return 7 + 13 * KEYS.index(key)


def test_the_first_placement_is_the_best_over_all_replicas_and_orders() -> None:
    random = Random(1)
    for _ in range(2000):
        names = [f"r{number}" for number in range(random.randint(1, 4))]
        fleet = random_fleet(random, names)
        documents = [(key, tokens_of(key)) for key in random.sample(KEYS, random.randint(0, 4))]
        ahead = {name: random.choice([0.0, 20.0, 200.0]) for name in names}
        total = sum(tokens for _, tokens in documents)
        best = min(
            ahead[name] + DISPLACING * (total - reused(fleet._tree(name), list(order)))
            for name in names
            for order in permutations(documents)
        )
        placements = fleet.rank(documents, names, ahead.__getitem__)
        assert placements[0].cost == best
        assert [one.cost for one in placements] == sorted(one.cost for one in placements)
        first = placements[0]
        assert DISPLACING * (total - first.arrangement.reused_tokens) == first.cost - ahead[first.replica]
        assert fleet.choose(documents, names, ahead.__getitem__) == first


def test_a_choice_without_a_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="no replica"):
        Fleet().choose(order_of("ab"), [])
    with pytest.raises(ValueError, match="'a' is given twice"):
        Fleet().choose(order_of("aa"), ["r0"])


def test_equal_costs_fill_the_emptier_cache_and_then_go_by_name() -> None:
    fleet = Fleet()
    assert [one.replica for one in fleet.rank(order_of("ab"), ["r1", "r0"])] == ["r0", "r1"]
    fleet.served("r0", order_of("cd"))
    assert [one.replica for one in fleet.rank(order_of("ab"), ["r1", "r0"])] == ["r1", "r0"]
    assert "2 documents (20 tokens) cached" in fleet.rank(order_of("dc"), ["r1", "r0"])[0].why


def test_a_session_stays_until_its_replica_is_gone() -> None:
    fleet = Fleet(max_sessions=2)
    fleet.served("r1", order_of("ab"), "s")
    fleet.served("r0", order_of("cd"))
    first = fleet.rank(order_of("cd"), ["r0", "r1"], session="s")[0]
    assert (first.replica, first.stays, first.why) == ("r1", True, "the session has its history here")
    assert fleet.choose(order_of("cd"), ["r0", "r1"], session="s") == first
    assert fleet.rank(order_of("cd"), ["r0"], session="s")[0].replica == "r0"
    fleet.replicas(["r0"])
    again = fleet.rank(order_of("ab"), ["r0", "r1"], session="s")[0]
    assert not again.stays and again.arrangement.reused_documents == 0, "a replica that comes back is empty"
    assert (fleet.home("s"), fleet.home("t")) == (GONE, None)
    fleet.served("r0", order_of("ab"), "s")
    assert fleet.home("s") == "r0"
    for session in "tuv":
        fleet.served("r0", order_of("ef"), session)
    assert not fleet.rank([], ["r0", "r1"], session="t")[0].stays, "the session that was served first is forgotten"
    assert fleet.rank([], ["r1", "r0"], session="v")[0].stays


class Engine:
    """A prefix cache of some documents that evicts the least recently used leaf."""

    def __init__(self, size: int) -> None:
        self.size, self.paths = size, OrderedDict[tuple[str, ...], None]()

    def serve(self, order: Order) -> int:
        """Compute a prompt; return the cached tokens."""
        paths = [tuple(key for key, _ in order[:end]) for end in range(1, len(order) + 1)]
        cached = sum(tokens for path, (_, tokens) in zip(paths, order, strict=True) if path in self.paths)
        for path in paths[::-1]:
            self.paths[path] = None
            self.paths.move_to_end(path)
        while len(self.paths) > self.size:
            self.paths.popitem(last=False)
        return cached


@pytest.mark.parametrize("seed", range(20))
def test_after_a_report_no_order_promises_more_than_was_reported(seed: int) -> None:
    random, fleet = Random(seed), Fleet()
    engine = Engine(random.randint(4, 9))
    for _ in range(60):
        documents = [(key, tokens_of(key)) for key in random.sample(KEYS, random.randint(1, 4))]
        placement = fleet.rank(documents, ["r"])[0]
        order = [documents[rank] for rank in placement.arrangement.order]
        cached = engine.serve(order)
        fleet.report("r", order, cached)
        for other in permutations(documents):
            shared = next((at for at, (a, b) in enumerate(zip(other, order, strict=True)) if a != b), len(order))
            common = sum(tokens for _, tokens in order[:shared])
            if common > cached:  # it leaves the reported order behind the documents that were cached
                assert reused(fleet._tree("r"), list(other)) == common


def test_threads_may_rank_and_serve_at_once() -> None:
    fleet, errors = Fleet(max_nodes=20), list[BaseException]()

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(300):
                order = order_of("".join(random.sample(KEYS, 4)))
                placement = fleet.rank(order, ["r0", "r1"], session=str(seed))[0]
                fleet.served(placement.replica, order, str(seed))
                fleet.report(placement.replica, order, random.randint(0, 40))
                fleet.replicas(["r0", "r1"] if random.random() < 0.9 else ["r0"])
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    fleet._tree("r0").check()
