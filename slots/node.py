"""The records of the prefix tree: a node is a run of tokens, a sequence a llama.cpp sequence id, a blob a saved copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

Section = tuple[int, int]
"""Positions [start, stop) of a prompt that are computed, beside documents that are moved to their places."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens at positions [start, end) of every path through it; a document, a message or a part of one.

        tokens   |---------- run ----------|
        KV       |---- ready ----|.pending.|      ready: computed, and in exactly one cell a token
                 start                    end     pending: claimed by a running request, which will compute it
        blob     |------- all of it -------|      the copy in host memory, if one was ever made
        state                              |      the recurrent state behind it, of a model that has one: see `Snapshots`

    sequences: those that hold KV of this run. in_use: the number of running requests with this run on their paths; a run
    in use is not evicted. documents: the ends of documents that begin behind this run, by their keys. document_of: the
    inverse, (run before the document, key) of each document that ends with this run.
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
    token_cost: float = 0.0  # to compute it (`Profile.cost`), the mean over the requests that did not find it
    num_misses: int = 0  # those requests
    priority: float = 0.0  # on the device: the lowest leaves first
    host_priority: float = 0.0  # in host memory
    pinned_until: float = 0.0  # the time at which a client's pin ends; 0: not pinned
    blob: Blob | None = field(default=None, repr=False)
    state: Blob | None = field(default=None, repr=False)
    documents: dict[str, Node] = field(default_factory=dict, repr=False)
    document_of: set[tuple[Node, str]] = field(default_factory=set, repr=False)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_cached(self) -> bool:
        """Whether its KV is on any tier."""
        return self.ready > 0 or self.blob is not None

    @property
    def complete(self) -> bool:
        return self.ready == len(self.tokens)

    def note_miss(self, token_cost: float) -> None:
        """Count a request that has to compute it, at `token_cost` a token (RAGCache, formula 4)."""
        self.num_misses += 1
        self.token_cost += (token_cost - self.token_cost) / self.num_misses

    def place(self, key: str, end: Node) -> None:
        """Note that a document begins behind this run and ends with the run `end`. A key has one end."""
        if key in self.documents:
            self.documents[key].document_of.discard((self, key))
        self.documents[key] = end
        end.document_of.add((self, key))

    def longest_holder(self) -> Sequence:
        """Return the sequence that holds most of this run: the one to share it from."""
        return max(self.sequences, key=lambda sequence: sequence.length)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence id, with KV at positions [0, length) of the path that ends in `tip`.

    An active sequence belongs to a running request; its tip is the end of that request's claimed path, computed or not. A
    parked one outlives its request, so that the next request can continue or fork it.
    """

    id: int
    tip: Node
    length: int = 0
    active: bool = True
    sections: tuple[Section, ...] = ()  # of its request's prompt
    parked_at: int = 0  # the ledger's count of parkings: of leaves with equal priorities, the one parked first is evicted

    def most_cached(self, upto: int, rest: int) -> int:
        """Return how much of its path may come from the cache, if that has `upto` tokens of it."""
        return most_cached(self.sections, upto, rest)


def most_cached(sections: Seq[Section], upto: int, rest: int) -> int:
    """Return how much of a prompt may come from the cache, if that has `upto` tokens of it.

    sections: the last one ends with the prompt. None of them is computed in pieces of fewer than `rest` tokens, unless it is
    as short as a whole: the bits of KV depend on that. The prompt's last token is always computed.
    """
    upto = min(upto, sections[-1][1] - 1)
    at = bisect_right(sections, upto, key=itemgetter(0)) - 1
    start, stop = sections[at] if at >= 0 else (0, 0)
    return max(min(upto, stop - rest), start) if upto < stop else max(upto, 0)


@dataclass(slots=True, eq=False)
class Blob:
    """A copy of the KV at positions [start, stop) of one path. data: uint8, None until the plan that saves it has run.

    users: nodes whose runs lie in it; both parts of a run that is split use its one copy.
    """

    start: int
    stop: int
    data: np.ndarray | None = None
    users: int = 1
    source: str = "host"  # the tier that it came from: copied from the device, or the name of a lower tier
    is_written: bool = False  # a lower tier took it, too

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Claim:
    """A running request's place: its sequence, its cached tokens, and their source (own, fork, none)."""

    sequence: Sequence
    cached: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of copies. run_token: of one token of a run. state: of a recurrent state.

    state_token: of a state, for each token that led to it, where attention's KV cannot be told apart: runs are empty then.
    """

    run_token: int = 0
    state: int = 0
    state_token: int = 0
