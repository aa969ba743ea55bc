"""The records of the prefix tree: a node is a run of tokens, a sequence a llama.cpp sequence id, a blob a saved copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens at positions [start, end) of every path through it; a document, a message or a part of one.

        tokens   |---------- run ----------|
        KV       |---- ready ----|.pending.|      ready: somebody has computed it, so it is in a cell exactly once;
                 start                    end     pending: a running request has claimed it and will compute it
        blob     |------- all of it -------|      in host memory, if it was ever moved there

    sequences: who holds KV of this run. pins: running requests whose path goes through (pinned runs are not evicted).
    documents: where a document that follows this run ends, by the document's key. document_of: the inverse of that, with
    the run that each such document follows.
    """

    tokens: np.ndarray
    start: int
    parent: Node | None = field(repr=False)
    children: dict[int, Node] = field(default_factory=dict, repr=False)
    ready: int = 0
    sequences: set[Sequence] = field(default_factory=set, repr=False)
    in_use: int = 0
    last_use: int = 0
    frequency: int = 0  # requests that used it
    token_cost: float = 0.0  # of its computation, the mean over the requests that did not find it: seconds a token
    num_misses: int = 0  # those requests
    priority: float = 0.0  # on the device: whoever has least leaves first
    host_priority: float = 0.0
    pinned_until: float = 0.0  # a client asked to keep it; 0: nobody did
    blob: Blob | None = field(default=None, repr=False)
    documents: dict[str, Node] = field(default_factory=dict, repr=False)
    document_of: set[tuple[Node, str]] = field(default_factory=set, repr=False)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_cached(self) -> bool:
        """Whether its KV is anywhere."""
        return self.ready > 0 or self.blob is not None

    @property
    def complete(self) -> bool:
        return self.ready == len(self.tokens)

    def note_miss(self, token_cost: float) -> None:
        """A request has to compute it, at so many seconds a token (RAGCache, formula 4)."""
        self.num_misses += 1
        self.token_cost += (token_cost - self.token_cost) / self.num_misses

    def place(self, key: str, end: Node) -> None:
        """A document follows this run, and ends with the run `end`; of one key there is one end."""
        if key in self.documents:
            self.documents[key].document_of.discard((self, key))
        self.documents[key] = end
        end.document_of.add((self, key))

    def longest_holder(self) -> Sequence:
        """The sequence that holds most of this run: who to share it from."""
        return max(self.sequences, key=lambda sequence: sequence.length)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence id: it holds KV for positions [0, length) of the path that ends in `tip`.

    An active sequence belongs to a running request, and its tip is the end of that request's claimed path, computed or
    not. A parked one outlives its request, so that the next one can continue or fork it.
    """

    id: int
    tip: Node
    length: int = 0
    active: bool = True
    parked_at: int = 0  # the ledger's count of parkings: of leaves that are worth the same, the oldest leaves first


@dataclass(slots=True, eq=False)
class Blob:
    """A copy of the KV at positions [start, stop) of one path. data: uint8, filled when the plan that saves it has run.

    users: nodes whose runs lie in it; a run that is split keeps its one copy.
    """

    start: int
    stop: int
    data: np.ndarray | None = None
    users: int = 1
    source: str = "host"  # where it came from: the device, or what was kept on disk

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Claim:
    """A running request's place: its sequence, the tokens it need not compute, and whose they were (own, fork, none)."""

    sequence: Sequence
    cached: int
    source: str
