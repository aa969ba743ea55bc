"""A knowledge tree: recent orders of documents, to predict the cache of an engine that cannot be queried."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from threading import Lock

from .policy import Step


@dataclass(slots=True, eq=False, repr=False)
class DocumentNode:
    """A document in the tree, or the root.

    children: by key, the steps to the documents that were served directly after this one.
    """

    parent: DocumentNode | None
    key: str
    children: dict[str, Step[DocumentNode]] = field(default_factory=dict[str, "Step[DocumentNode]"])


class KnowledgeTree:
    """An `Index`: a trie over document keys, whose paths are recently served orders (CacheWeaver, section 3.2).

    From the prompts that were sent to an engine, the tree predicts which documents the engine still has in its cache. The
    tree keeps at most `max_nodes` documents and evicts the least recently served leaf first, like a prefix cache. All
    methods are thread-safe. Raises ValueError if `max_nodes` is less than 1.
    """

    def __init__(self, max_nodes: int = 10_000) -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is the number of documents to remember, 1 or more: got {max_nodes}")
        self.max_nodes = max_nodes
        self._root = DocumentNode(None, "")
        # Least recently served first. `_touch` moves a path from its leaf up, so a node always comes before its parent,
        # and the first node is always a leaf.
        self._nodes: OrderedDict[DocumentNode, None] = OrderedDict()
        self._served: OrderedDict[str, int] = OrderedDict()
        self._clock = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    # Reads take no lock: each is one dictionary lookup, and a node that was evicted a moment ago is only a wrong
    # prediction.

    def start(self) -> DocumentNode:
        """Return the root, since in every prompt the documents follow the same system text."""
        return self._root

    def after(self, position: DocumentNode) -> Collection[str]:
        """Return the keys of the documents that were served directly after `position`."""
        return position.children

    def follow(self, position: DocumentNode, key: str) -> Step[DocumentNode] | None:
        """Return the step over `key`; None if it was not served directly after `position`."""
        return position.children.get(key)

    def beyond(self, position: DocumentNode) -> float:
        """Return 0.0, since the tree knows only documents, and not the text after them."""
        return 0.0

    def recency(self, key: str) -> int | None:
        """Return a number that is greater the later the document was served; None if the tree does not remember it."""
        return self._served.get(key)

    def insert(self, order: Iterable[tuple[str, int]]) -> None:
        """Store the documents of a prompt that is served now.

        order: (key, tokens) of each document, in the order of the prompt.
        """
        # Read before the lock is taken, since a generator may run any code. Of a longer prompt, the tree keeps the prefix.
        served = [(key, tokens) for key, tokens in islice(order, self.max_nodes)]
        with self._lock:
            node = self._root
            for key, tokens in served:
                node = self._child(node, key, tokens)
            self._touch(node)
            self._trim()

    def report(self, order: Iterable[tuple[str, int]], cached_tokens: int) -> None:
        """Store a prompt's documents as `insert` does, and correct the tree by the cached tokens that the engine reported.

        If fewer tokens were cached than the tree predicted, the engine has evicted the first missing document and all
        documents after it. In this case the tree drops the missing documents from its predictions before it stores the
        prompt.

        order: as in `insert`.
        cached_tokens: how many tokens of the prompt's documents were cached. The text before the documents does not count.
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
        """Drop the last document of `path` and all documents after it. Return how many documents were dropped.

        If `path` is empty, all documents are dropped.
        """
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
        """Assert that every node is reachable, that children are evicted before their parents, and that all bounds hold."""
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

    def _child(self, node: DocumentNode, key: str, tokens: int) -> DocumentNode:
        step = node.children.get(key) or Step(DocumentNode(node, key), tokens, float(tokens), 0.0)
        child = step.position
        node.children[key] = step if step.tokens == tokens else Step(child, tokens, float(tokens), step.ahead)
        self._served[key] = next(self._clock)
        self._served.move_to_end(key)
        return child

    def _touch(self, node: DocumentNode) -> None:
        ahead = 0.0
        while node.parent is not None:
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            step = node.parent.children[node.key]
            # The bound only grows until the last child is evicted: a bound that is too high costs the search a visit, a
            # bound that is too low costs it the best path.
            if ahead > step.ahead:
                step = node.parent.children[node.key] = _with_ahead(step, ahead)
            ahead = step.saved + step.ahead
            node = node.parent

    def _trim(self) -> None:
        while len(self._nodes) > self.max_nodes:
            self._drop(next(iter(self._nodes)))
        while len(self._served) > self.max_nodes:
            self._served.popitem(last=False)

    def _drop(self, node: DocumentNode) -> None:
        if (parent := node.parent) is not None:
            del parent.children[node.key]
            del self._nodes[node]
            if parent.parent is not None and not parent.children:
                parent.parent.children[parent.key] = _with_ahead(parent.parent.children[parent.key], 0.0)
        dropped = [node]
        for parent in dropped:
            for step in parent.children.values():
                del self._nodes[step.position]
                dropped.append(step.position)
            parent.children.clear()


def _with_ahead(step: Step[DocumentNode], ahead: float) -> Step[DocumentNode]:
    """Return a step with the bound `ahead`.

    This function runs for each document of a prompt, and `dataclasses.replace` would take four times as long.
    """
    return Step(step.position, step.tokens, step.saved, ahead)
