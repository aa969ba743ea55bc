"""Indexes to test ordering policies: one as a table of paths, and random ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from hypothesis import strategies as st
from slotcache.ordering import Arrangement, Index, KnowledgeTree, Step

Path = tuple[str, ...]


@dataclass
class PathTable:
    """An index of cached paths, each with (tokens, saved). A position in it is the path up to there."""

    paths: dict[Path, tuple[int, float]]
    followed_by: dict[Path, float] = field(default_factory=dict)
    cached: bool = True

    def start(self) -> Path | None:
        return () if self.cached else None

    def after(self, position: Path) -> list[str]:
        return [path[-1] for path in self.paths if path[:-1] == position]

    def follow(self, position: Path, key: str) -> Step[Path] | None:
        value = self.paths.get(path := (*position, key))
        return None if value is None else Step(path, *value)

    def beyond(self, position: Path) -> float:
        return self.followed_by.get(position, 0.0)


KEYS = "abcdefg"
documents = st.permutations(KEYS).flatmap(lambda keys: st.integers(1, len(keys)).map(lambda n: keys[:n]))
served = st.lists(st.permutations("abcdefgx").flatmap(lambda p: st.integers(1, 8).map(lambda n: p[:n])), max_size=12)


@st.composite
def tables(draw: st.DrawFn) -> PathTable:
    """Draw tables with few distinct values, so that ties are common. A document's worth may depend on its path."""
    prefixes = sorted({tuple(order[:n]) for order in draw(served) for n in range(1, len(order) + 1)})
    worth = st.sampled_from([(0, 0.0), (100, 0.0), (100, 50.0), (100, 100.0), (200, 100.0)])
    paths = {prefix: draw(worth) for prefix in prefixes}
    return PathTable(paths, {path: draw(st.sampled_from([0.0, 50.0, 500.0])) for path in paths})


@st.composite
def trees(draw: st.DrawFn) -> KnowledgeTree:
    """Draw trees that have lost some documents, so that their bounds are not tight."""
    tree = KnowledgeTree(draw(st.integers(5, 40)))
    tokens = {key: draw(st.sampled_from([0, 100, 200])) for key in "abcdefgx"}
    for order in draw(served):
        tree.insert((key, tokens[key]) for key in order)
        if draw(st.booleans()):
            tree.forget(order[: draw(st.integers(1, len(order)))])
    tree.check()
    return tree


indexes = st.one_of(tables(), trees())


def saved(index: Index, keys: Sequence[str]) -> float:
    """Return the tokens that an order saves: in its cached prefix, and after the last document if all are cached."""
    position, total = index.start(), 0.0
    if position is None:
        return 0.0
    for key in keys:
        if (step := index.follow(position, key)) is None:
            return total
        position, total = step.position, total + step.saved
    return total + index.beyond(position)


def best_order(index: Index, keys: Sequence[str], first: int = 0, last: int = 0, best: str = "free") -> tuple[int, ...]:
    """Return, by brute force, the allowed order that saves the most tokens. Of equal orders, the smallest wins."""
    size = len(keys)
    fixed = {*range(min(first, size)), *range(max(0, size - last), size)}
    orders = (order for order in permutations(range(size)) if all(order[i] == i for i in fixed))
    if best != "free":
        orders = (order for order in orders if order[0 if best == "first" else -1] == 0)
    return min(orders, key=lambda order: (-saved(index, [keys[i] for i in order]), order))


def saved_by(index: Index, keys: Sequence[str], arrangement: Arrangement) -> float:
    return saved(index, [keys[i] for i in arrangement.order])
