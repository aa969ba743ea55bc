"""The cost of an answer: timings, cached tokens by source, and why reuse ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NotRequired, TypedDict

import numpy as np

from ...slots.radix import Node, common_prefix, path
from ...slots.request import Layout
from ...slots.reuse import ReusedSpan, prefix_cache_ratio

ID_BYTES = 8


def empty_prefix(adapters: str) -> blake2b:
    """Return the hash of the empty prefix for a set of LoRA adapters. `followed_by` adds tokens to the hash."""
    return blake2b(adapters.encode(), digest_size=ID_BYTES)


def followed_by(before: blake2b, tokens: np.ndarray) -> blake2b:
    """Return the hash of a prefix that ends with `tokens` (int32). before: the hash of the prefix without `tokens`."""
    hash = before.copy()
    hash.update(np.ascontiguousarray(tokens).data)
    return hash


def ids_at(tokens: np.ndarray, stops: Iterable[int], adapters: str = "") -> list[str]:
    """Return an id for each of the stops: the id of the prompt's prefix up to this stop.

    stops: positions in ascending order. adapters: as in `Scope`.
    """
    hash, start, ids = empty_prefix(adapters), 0, []
    for stop in stops:
        hash, start = followed_by(hash, tokens[start:stop]), stop
        ids.append(hash.hexdigest())
    return ids


# ---- The cost and the reuse of one answer, and their JSON. --------------------------------------------------------------

Fields = dict[str, object]
"""A JSON object."""


class DocumentUsage(TypedDict):
    """How much of a document came from the cache.

    rank: the document's place in the retrieval order, from 1. moved: whether the document's place among the prompt's
    documents differs from its place among the request's documents.
    """

    id: str
    tokens: int
    cached_tokens: int
    rank: int
    moved: bool


class Reordering(TypedDict):
    """What the order of the documents in the prompt gained, compared with the retrieval order. A negative gain is a loss.

    hint: the line in the prompt that tells the model the retrieval order; empty if there is no such line.
    """

    gained_tokens: int
    gained_ms: float
    hint: str


class SegmentReuse(TypedDict):
    """The reuse of one part of a prompt.

    label: where the part comes from, in words. id: the id of the prompt up to the end of this part. cached_tokens: the
    numbers of reused tokens by source. saved_ms: the time that reuse saved, estimated from earlier steps; 0 if there is
    no estimate yet.
    """

    label: str
    id: str
    tokens: int
    cached_tokens: dict[str, int]
    saved_ms: float


class Change(TypedDict):
    """A piece of text that differs from an earlier prompt, although the same text follows in both prompts.

    after: the text of the piece in this prompt. before: the text of the piece in the earlier prompt, if this text may be
    shown. `before` and `after` start with a few words that stand in front of the piece in both prompts. tokens: the number
    of equal tokens after the piece. ms: the time to compute these tokens, which could have been reused without the change.
    """

    before: NotRequired[str]
    after: str
    tokens: int
    ms: float


class Miss(TypedDict):
    """Where reuse ended, and why. at: the position in the prompt, in tokens."""

    at: int
    why: str
    changed: NotRequired[Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The cost of one answer. Times are in seconds, lengths in tokens.

    fetch_time: the wait for KV from a tier below host memory. segments: the reuse of each part of the prompt; None unless
    the request asks for it. reordered: what the order of the documents gained; None if the documents are in retrieval order.

    The service sets the last four fields: `conversation` if the chat belongs to a conversation, `retrieval` if the server
    searched for documents, `moved` if the server moved changed text of the instructions, and `documents_in_text` if the
    server found documents in the text of a message.
    """

    slot: int
    source: str
    num_prompt: int
    num_cached: int
    num_generated: int
    stop: str | None
    documents: list[DocumentUsage]
    repeated: tuple[str, ...]
    miss: Miss | None
    queue_time: float
    prompt_time: float
    generation_time: float
    num_preempted: int
    documents_attention: str | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    fetch_time: float = 0.0
    segments: list[SegmentReuse] | None = None
    reordered: Reordering | None = None
    conversation: Mapping[str, object] | None = None
    retrieval: Mapping[str, object] | None = None
    moved: Sequence[Mapping[str, str]] | None = None
    documents_in_text: Sequence[Mapping[str, object]] | None = None

    @property
    def prefix_cache_ratio(self) -> float:
        """The share of the prompt that came from the cache."""
        return prefix_cache_ratio(self.num_cached, self.num_prompt)

    def timings(self) -> Fields:
        """Return llama-server's `timings` of the whole answer."""
        return timings(
            num_cached=self.num_cached,
            num_computed=self.num_prompt - self.num_cached,
            num_generated=self.num_generated,
            queue_time=self.queue_time,
            prompt_time=self.prompt_time,
            generation_time=self.generation_time,
            drafts=(self.num_drafted, self.num_accepted),
        )

    def slotcache(self) -> Fields:
        """Return the answer's object `slotcache`: the slot, the reuse, and where reuse ended."""
        fields: Fields = {
            "slot": self.slot,
            "lane": self.slot,  # the name before 0.2, for one more release
            "source": self.source,
            "cached_tokens": self.num_cached,
            "prefix_cache_tokens": self.num_cached,
            "prefix_cache_ratio": self.prefix_cache_ratio,
            "documents": self.documents,
            "repeated": self.repeated,
            "miss": self.miss,
            "preempted": self.num_preempted,
            "fetch_ms": self.fetch_time * 1000,
        }
        optional = {
            "documents_attention": self.documents_attention,
            "segments": self.segments,
            "reordered": self.reordered,
            "conversation": self.conversation,
            "moved": self.moved,
            "documents_in_text": self.documents_in_text,
            **(self.retrieval or {}),
        }
        return fields | {name: value for name, value in optional.items() if value is not None}


Reused = Sequence[tuple[int, int]]
"""The reused positions [start, stop) of a prompt, in order."""


def document_reuse(layout: Layout, reused: Reused) -> list[DocumentUsage]:
    """Return how much of each document was reused."""
    return [
        {
            "id": document.id,
            "tokens": document.stop - document.start,
            "cached_tokens": sum(max(min(stop, document.stop) - max(start, document.start), 0) for start, stop in reused),
            "rank": document.rank,
            "moved": document.moved,
        }
        for document in layout.documents
    ]


def reordering(layout: Layout, cached: int, seconds: Callable[[int, int], float]) -> Reordering | None:
    """Return what the documents' order in the prompt gained, compared with the retrieval order.

    Return None if no document moved.

    cached: the number of reused tokens of the prompt. seconds: returns the prefill seconds of the prompt's tokens at
    positions [start, stop).
    """
    if (in_rank := layout.in_rank) is None:
        return None
    sign = 1 if cached >= in_rank else -1
    gained_ms = sign * 1000 * seconds(*sorted((in_rank, cached)))
    return {"gained_tokens": cached - in_rank, "gained_ms": round(gained_ms, 1), "hint": layout.hint}


def first_gap(reused: Reused) -> int:
    """Return the first position that was not reused."""
    at = 0
    for start, stop in reused:
        if start > at:
            break
        at = stop
    return at


def segment_reuse(layout: Layout, reused: Sequence[ReusedSpan], adapters: str = "") -> list[SegmentReuse]:
    """Return the reuse of each part of a prompt, in order. adapters: as in `Scope`."""
    stops = [segment.stop for segment in layout.segments]
    ids = ids_at(layout.tokens, stops, adapters)
    segments: list[SegmentReuse] = []
    rest = iter(reused)
    now = next(rest, None)
    for start, (stop, label, _), id in zip([0, *stops], layout.segments, ids, strict=False):
        cached: dict[str, int] = {}
        saved = 0.0
        while now is not None and now.start < stop:
            shared = min(now.stop, stop) - max(now.start, start)
            cached[now.source] = cached.get(now.source, 0) + shared
            saved += now.seconds * shared / (now.stop - now.start)
            if now.stop > stop:
                break
            now = next(rest, None)
        saved_ms = round(saved * 1000, 1)
        segments.append({"label": label, "id": id, "tokens": stop - start, "cached_tokens": cached, "saved_ms": saved_ms})
    return segments


def timings(
    *,
    num_cached: int,
    num_computed: int,
    num_generated: int,
    queue_time: float,
    prompt_time: float,
    generation_time: float,
    drafts: tuple[int, int] = (0, 0),
) -> Fields:
    """Return llama-server's `timings`, in which `cache_n` counts reused prompt tokens, and `prompt_n` computed ones.

    drafts: the number of drafted tokens, and how many of them were accepted; left out of `timings` if none were drafted.
    """
    decoded = max(num_generated - 1, 0)  # prefill already gives the first token
    return {
        "cache_n": num_cached,
        "prompt_n": num_computed,
        **_rates("prompt", num_computed, prompt_time),
        "predicted_n": num_generated,
        **_rates("predicted", decoded, generation_time),
        "queue_ms": queue_time * 1000,
        **(dict(zip(("draft_n", "draft_n_accepted"), drafts, strict=True)) if drafts[0] else {}),
    }


def _rates(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


# ---- Volatile text ------------------------------------------------------------------------------------------------------
# Text that changes with each request, such as dates, counters and ids. Such text ends the common prefix.

SPANS = (
    ("a billing line", r"x-anthropic-billing-header:[^\n]*"),
    ("a UUID", r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    ("a time", r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?[\d.:Z+-]*"),
    ("a date", r"\b\d{4}-\d\d-\d\d\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"),
    ("a date", r"\b(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:, \d{4})?\b"),
    ("a date", r"\b\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{4}\b"),
    ("a time", r"\b\d{1,2}:\d\d(?::\d\d)?\b"),
    ("a counter", r"\b\d+\b"),
)
"""The kinds of volatile text and their patterns, the most reliable first."""
COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in SPANS)
LONGEST = 80  # characters of a quote


def volatile_span(text: str, at: int) -> str | None:
    """Return the kind and the text of the volatile span that covers position `at` of a text, or None if no span covers `at`.

    The character before a span counts as covered, since a token may start with the space before a word.
    """
    for name, pattern in COMPILED:
        for found in pattern.finditer(text):
            if found.start() - 1 <= at <= found.end():
                return f"{name} ({found[0][:LONGEST]})"
    return None


# ---- A changed piece, with the same text after it in both prompts. ------------------------------------------------------

LONGEST_CHANGE = 64  # most tokens of a piece in either prompt
SAME_AFTER = 32  # tokens after the piece that must be equal; more than the opening of an answer
MOST_BRANCHES = 4  # most earlier prompts to compare, the most recently used first


@dataclass(frozen=True, slots=True, eq=False)
class ChangedPiece:
    """A short piece in which a prompt differs from an earlier prompt, while both have equal tokens after the piece.

    before, after: the tokens (int32) of the piece in the earlier prompt and in this prompt. num_after: the number of equal
    tokens after the piece, which would have been reused without the change.
    """

    before: np.ndarray
    after: np.ndarray
    num_after: int


def changed_piece(last_node: Node, tokens: np.ndarray, at: int) -> ChangedPiece | None:
    """Return the piece from position `at` on in which a prompt differs from an earlier prompt.

    The earlier prompts are those in the prefix tree with the same tokens up to `at` and different tokens after it. Return
    None if no earlier prompt has equal tokens after a short piece that differs. last_node: the last node of the prompt's
    path in the tree.
    """
    own = next((node for node in path(last_node, at) if node.start == at), None)
    if own is None or own.parent is None:
        return None
    branches = sorted((node for node in own.parent.children.values() if node is not own), key=lambda node: -node.last_use)
    found = (_change(_continuation(node, len(tokens) - at), tokens[at:]) for node in branches[:MOST_BRANCHES])
    return max(filter(None, found), key=lambda piece: piece.num_after, default=None)


def _continuation(node: Node, num_tokens: int) -> np.ndarray:
    """Return the tokens from a node's start along the path of the most recently used children.

    Return at least `num_tokens` tokens, or all tokens of the path if it has fewer.
    """
    runs = [node]
    while runs[-1].end - node.start < num_tokens + LONGEST_CHANGE and runs[-1].children:
        runs.append(max(runs[-1].children.values(), key=lambda child: child.last_use))
    return np.concatenate([run.tokens for run in runs])


def _change(old: np.ndarray, new: np.ndarray) -> ChangedPiece | None:
    """Return the shortest piece at the start of `old` and `new` after which both have equal tokens.

    Return None if no piece of at most `LONGEST_CHANGE` tokens is followed by `SAME_AFTER` equal tokens.
    """
    places: dict[bytes, int] = {}
    for at in range(min(LONGEST_CHANGE, len(new) - SAME_AFTER) + 1):
        places.setdefault(new[at : at + SAME_AFTER].tobytes(), at)
    pairs = [
        (at, places[window])
        for at in range(min(LONGEST_CHANGE, len(old) - SAME_AFTER) + 1)
        if (window := old[at : at + SAME_AFTER].tobytes()) in places
    ]
    if not pairs:
        return None
    before, after = min(pairs, key=sum)
    return ChangedPiece(old[:before], new[:after], common_prefix(old[before:], new[after:]))
