"""The state of the cache and of the lanes as frozen values, read in the engine's thread between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from ...slots.lanes import Lane
from ...slots.node import Node, most_cached
from ...slots.radix import descendants, path
from ...slots.request import Layout, Prompt, Request
from ...slots.scheduler import Scheduler
from ...slots.scope import Scope
from ...slots.separate.reading import num_placed
from .prefixes import beginning, followed_by, id_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of the prefix tree. id: of the prompt up to its end; parent: of the run in front of it.

    adapters: the set of LoRA adapters that computed its KV, as a text; empty: none. disk: it was written to disk, too.
    document: the key of a document that ends with it. pinned: by a client. sequences: those of running requests that hold
    its KV.
    """

    id: str = ""
    parent: str | None = None
    adapters: str
    start: int
    tokens: int
    device_tokens: int
    host: bool
    disk: bool
    document: str | None
    frequency: int
    in_use: bool
    pinned: bool
    sequences: tuple[int, ...]

    @classmethod
    def of(cls, node: Node, adapters: str) -> Run:
        return cls(
            adapters=adapters,
            start=node.start,
            tokens=len(node.tokens),
            device_tokens=node.ready,
            host=node.blob is not None,
            disk=node.blob is not None and node.blob.is_written,
            document=next((key for _, key in node.document_of), None),
            frequency=node.frequency,
            in_use=node.in_use > 0,
            pinned=node.pinned_until > 0,
            sequences=tuple(sorted(sequence.id for sequence in node.sequences if sequence.active)),
        )


@dataclass(frozen=True, slots=True)
class WholeState:
    """A snapshot: the model's recurrent state after `tokens`."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """The KV that a scope has cached, of all sets of LoRA adapters. tokens: by tier.

    runs: parents first, without ids until `identified`. texts: the tokens of each, and the place of its parent in the list.
    """

    tokens: dict[str, int]
    runs: list[Run]
    snapshots: list[WholeState]
    texts: list[tuple[np.ndarray, int | None]]

    @classmethod
    def of(cls, scheduler: Scheduler, scope: str) -> Holdings:
        """scope: by the clients' name."""
        scopes, roots, snapshots = scopes_of(scheduler, scope), scheduler.index.roots, scheduler.snapshots
        found = [(node, one.adapters) for one in scopes if one in roots for node in descendants(roots[one])]
        nodes = [node for node, _ in found]
        device = sum(node.ready for node in nodes)
        host = sum(len(node.tokens) for node in nodes if node.blob is not None)
        states = [WholeState(node.end, snapshots.size_of(node.end)) for one in scopes for node in snapshots.of(one)]
        places = {node: place for place, node in enumerate(nodes)}
        texts = [(node.tokens, places.get(node.parent) if node.parent else None) for node in nodes]
        return cls({"device": device, "host": host}, [Run.of(*one) for one in found], states, texts)

    def identified(self) -> Holdings:
        """Return the same with the ids of the runs. It reads all tokens, so it is no work for the engine's thread."""
        hashes: list[blake2b] = []  # of each run
        runs: list[Run] = []
        for run, (tokens, place) in zip(self.runs, self.texts, strict=True):
            above = beginning(run.adapters) if place is None else hashes[place]
            hashes.append(followed_by(above, tokens))
            runs.append(replace(run, id=id_of(hashes[-1]), parent=None if place is None else runs[place].id))
        return replace(self, runs=runs)


def scopes_of(scheduler: Scheduler, name: str) -> list[Scope]:
    """Return the scopes with KV that clients know by a name: one for each set of LoRA adapters."""
    known = scheduler.index.roots
    return sorted((scope for scope in known if scope.is_shared and scope.name == name), key=lambda scope: scope.adapters)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prompt laid out as if it were admitted now. reused: its cached tokens. on_device: those with KV on the device."""

    layout: Layout
    reused: int
    on_device: int

    @classmethod
    def of(cls, scheduler: Scheduler, prompt: Prompt, scope: Scope) -> Prediction:
        tree, index = scheduler.tree, scheduler.index
        layout = prompt.arrange(index, scope)
        match = tree.match(scope, layout.tokens)
        nodes = [node for node in path(match.node) if node.start < match.length]
        on_device = sum(min(node.ready, match.length - node.start) for node in nodes)
        length = len(layout.tokens)
        reused = index.reusable(scope, layout.tokens[: most_cached(layout.sections(length), length, tree.rest)])
        placed = num_placed(tree, scope, layout, reused)
        return cls(layout, reused + placed, min(on_device, reused))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request on a lane, in the words of `GET /slots`."""

    id_task: int
    sequence: int
    state: str
    source: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    limit: int
    speculative: bool

    @classmethod
    def of(cls, request: Request) -> Task:
        return cls(
            id_task=request.id,
            sequence=request.sequence.id if request.sequence else -1,
            state="generating" if request.decoding else "prefill",
            source=request.source,
            prompt_tokens=request.num_prompt,
            cached_tokens=request.cached,
            computed_tokens=request.computed,
            generated_tokens=request.num_tokens - request.num_prompt,
            limit=request.limit,
            speculative=request.draft is not None,
        )


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane. sequence: the one with the history of its last request. last: that request; -1: none. tokens: of the history.

    task: the request that it runs.
    """

    id: int
    sequence: int
    last: int
    tokens: int
    task: Task | None

    @classmethod
    def of(cls, lane: Lane) -> LaneState:
        return cls(
            id=lane.id,
            sequence=lane.sequence_id,
            last=lane.last,
            tokens=len(lane.history),
            task=Task.of(lane.request) if lane.request is not None else None,
        )
