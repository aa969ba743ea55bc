"""A knowledge tree: which documents were served behind which, for engines whose cache cannot be asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Lock

from .index import Step


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A document in the tree, or the root. Its children are the documents that were served right behind it."""

    parent: Node | None
    key: str
    children: dict[str, Step[Node]] = field(default_factory=dict)


class KnowledgeTree:
    """A trie over document keys whose paths are the orders served of late (CacheWeaver, section 3.2). An `Index`.

    It predicts what an engine still holds from what that engine was sent: of at most `max_nodes` documents, the least
    recently served leaf leaves first, as blocks leave a prefix cache. Any thread may call any method.
    """

    def __init__(self, max_nodes: int = 10_000) -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is the number of documents to remember, 1 or more: got {max_nodes}")
        self.max_nodes = max_nodes
        self._root = Node(None, "")
        # Least recently served first. A path is touched from its leaf up, so a node always stands before its parent,
        # and the first node is always a leaf.
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._served: OrderedDict[str, int] = OrderedDict()
        self._clock = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    # Asking takes no lock: each answer is one dictionary lookup, and a node that has just left is a prediction that
    # was just wrong.

    def start(self) -> Node:
        """The root: documents stand behind the same system text in every prompt."""
        return self._root

    def behind(self, position: Node) -> Collection[str]:
        """Keys of the documents that were served right behind `position`."""
        return position.children

    def follow(self, position: Node, key: str) -> Step[Node] | None:
        """The step over `key` where it was served right behind `position`."""
        return position.children.get(key)

    def beyond(self, position: Node) -> float:
        """0.0: the tree knows documents only."""
        return 0.0

    def recency(self, key: str) -> int | None:
        """When `key` was last served, as a count that grows; None when that is not remembered."""
        return self._served.get(key)

    def insert(self, order: Iterable[tuple[str, int]]) -> None:
        """Remembers documents as just served: (key, tokens) in the order they stood in."""
        served = [(key, tokens) for key, tokens in order]  # before the lock: it may be anybody's generator
        with self._lock:
            node = self._root
            for key, tokens in served:
                node = self._child(node, key, tokens)
            self._touch(node)
            self._trim()

    def report(self, order: Iterable[tuple[str, int]], cached_tokens: int) -> None:
        """Remembers documents as just served, and what the engine said it had cached of them, in tokens.

        What stood in front of the documents is not to be counted. Where the engine had less than was remembered it has
        dropped the rest, and so whatever stood behind that.
        """
        served = [(key, tokens) for key, tokens in order]
        with self._lock:
            node, left = self._root, cached_tokens
            for key, _ in served:
                if (step := node.children.get(key)) is None:
                    break
                node, left = step.position, left - step.tokens
                if left < 0:
                    self._drop(node)
                    break
        self.insert(served)

    def forget(self, path: Sequence[str]) -> int:
        """Drops the last document of `path` and all behind it, everything for an empty path. Returns how many left."""
        with self._lock:
            node = self._root
            for key in path:
                if (step := node.children.get(key)) is None:
                    return 0
                node = step.position
            before = len(self._nodes)
            self._drop(node)
            return before - len(self._nodes)

    def check(self) -> None:
        """Asserts the invariants: no node is lost or too many, children leave first, and the bounds hold."""
        with self._lock:
            age = {node: i for i, node in enumerate(self._nodes)}
            assert len(age) <= self.max_nodes and len(self._served) <= self.max_nodes
            reached = [self._root]
            for node in reached:
                for key, step in node.children.items():
                    child = step.position
                    assert child.parent is node and child.key == key
                    assert child.children or step.ahead == 0.0
                    assert all(step.ahead >= after.saved + after.ahead for after in child.children.values())
                    assert node is self._root or age[child] < age[node]
                    reached.append(child)
            assert set(reached[1:]) == set(age)

    def _child(self, node: Node, key: str, tokens: int) -> Node:
        step = node.children.get(key) or Step(Node(node, key), tokens, float(tokens), 0.0)
        child = step.position
        node.children[key] = step if step.tokens == tokens else Step(child, tokens, float(tokens), step.ahead)
        self._served[key] = next(self._clock)
        self._served.move_to_end(key)
        return child

    def _touch(self, node: Node) -> None:
        ahead = 0.0
        while node.parent is not None:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            step = node.parent.children[node.key]
            # It only grows until the last child has left: too high a bound costs the search a visit, too low a one
            # the best path.
            if ahead > step.ahead:
                step = node.parent.children[node.key] = replace(step, ahead=ahead)
            ahead = step.saved + step.ahead
            node = node.parent

    def _trim(self) -> None:
        while len(self._nodes) > self.max_nodes:
            self._drop(next(iter(self._nodes)))
        while len(self._served) > self.max_nodes:
            self._served.popitem(last=False)

    def _drop(self, node: Node) -> None:
        if (parent := node.parent) is not None:
            del parent.children[node.key]
            del self._nodes[node]
            if parent.parent is not None and not parent.children:
                parent.parent.children[parent.key] = replace(parent.parent.children[parent.key], ahead=0.0)
        leaving = [node]
        for parent in leaving:
            for step in parent.children.values():
                del self._nodes[step.position]
                leaving.append(step.position)
            parent.children.clear()
