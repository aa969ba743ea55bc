"""What a request took: timings, cached tokens by source, misses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NotRequired, TypedDict

import numpy as np

from ...slots.request import Layout
from ...slots.reuse import ReusedSpan, prefix_cache_ratio

ID_BYTES = 8


def empty_prefix(adapters: str) -> blake2b:
    """Return the hash of no tokens, of KV that these LoRA adapters compute. `followed_by` goes on."""
    return blake2b(adapters.encode(), digest_size=ID_BYTES)


def followed_by(before: blake2b, tokens: np.ndarray) -> blake2b:
    """Return the hash of a prefix and the tokens (int32) behind it."""
    hash = before.copy()
    hash.update(np.ascontiguousarray(tokens).data)
    return hash


def ids_at(tokens: np.ndarray, stops: Iterable[int], adapters: str = "") -> list[str]:
    """Return the ids of a prompt's prefixes that end at ascending positions. adapters: as in `Scope`."""
    hash, start, ids = empty_prefix(adapters), 0, []
    for stop in stops:
        hash, start = followed_by(hash, tokens[start:stop]), stop
        ids.append(hash.hexdigest())
    return ids


# ---- The cost and the reuse of one answer, and their JSON. --------------------------------------------------------------

Fields = dict[str, object]
"""An object of JSON."""


class DocumentUsage(TypedDict):
    """How much of a document in a prompt came from the cache. rank: in retrieval, from 1; moved: out of that order."""

    id: str
    tokens: int
    cached_tokens: int
    rank: int
    moved: bool


class Reordering(TypedDict):
    """What the order of documents gained against retrieval order; negative: it cost that. hint: its line in the prompt."""

    gained_tokens: int
    gained_ms: float
    hint: str


class SegmentReuse(TypedDict):
    """A part of a prompt. label: its origin, in words. id: of the prompt up to its end. cached_tokens: by source.

    saved_ms: an estimate, from the steps that ran, of the time that reuse saved; 0 before the first.
    """

    label: str
    id: str
    tokens: int
    cached_tokens: dict[str, int]
    saved_ms: float


class Change(TypedDict):
    """Text that stands where an earlier prompt had other text, in front of the same as there.

    before: that other text, where it is shown; both with a few words in front. tokens, ms: what the same text behind it
    took to compute again.
    """

    before: NotRequired[str]
    after: str
    tokens: int
    ms: float


class Miss(TypedDict):
    """Where reuse ended, and why."""

    at: int
    why: str
    changed: NotRequired[Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in seconds, lengths in tokens.

    fetch_time: for which it waited for KV from a tier below host memory. segments: where the request asks for them.
    reordered: where documents have moved.
    conversation, retrieval, moved, documents_in_text: added by the service, for a chat that belongs to one, for one whose
    documents were found, for one whose instructions have changed, and for one with documents in its texts.
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
        """The share of the prompt that was not computed."""
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
        """Return our own object in the answer: the slot, the reuse, and where it ended."""
        fields: Fields = {
            "slot": self.slot,
            "lane": self.slot,  # its name before 0.2, for one release
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
"""Positions [start, stop) of a prompt that were not computed, in order."""


def document_reuse(layout: Layout, reused: Reused) -> list[DocumentUsage]:
    """Return how much of each document was not computed."""
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
    """Return what the order of documents gained; None where none has moved. cached: tokens that were reused in it.

    seconds: of the prompt's tokens at positions [start, stop).
    """
    if (in_rank := layout.in_rank) is None:
        return None
    sign = 1 if cached >= in_rank else -1
    gained_ms = sign * 1000 * seconds(*sorted((in_rank, cached)))
    return {"gained_tokens": cached - in_rank, "gained_ms": round(gained_ms, 1), "hint": layout.hint}


def first_gap(reused: Reused) -> int:
    """Return the first position that was computed."""
    at = 0
    for start, stop in reused:
        if start > at:
            break
        at = stop
    return at


def segment_reuse(layout: Layout, reused: Sequence[ReusedSpan], adapters: str = "") -> list[SegmentReuse]:
    """Return the parts of a prompt in order, each with the tokens of it that were not computed. adapters: as in `Scope`."""
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
    """Return llama-server's `timings`. cache_n: prompt tokens that were not computed; prompt_n: those that were.

    drafts: tokens drafted, and accepted; an answer without drafts does not show them.
    """
    decoded = max(num_generated - 1, 0)  # the first token comes with the end of the prompt
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


# ---- Volatile -----------------------------------------------------------------------------------------------------------
# Names text that changes from one request to the next and so ends the common prefix: dates, counters, ids.

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
"""The kinds of such text, the surest first."""
COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in SPANS)
LONGEST = 80  # characters that are quoted


def volatile_span(text: str, at: int) -> str | None:
    """Return the kind and the text of the volatile span that covers position `at` of a text; None without one.

    A span counts from one character before its first: tokens may begin with the blank in front.
    """
    for name, pattern in COMPILED:
        for found in pattern.finditer(text):
            if found.start() - 1 <= at <= found.end():
                return f"{name} ({found[0][:LONGEST]})"
    return None
