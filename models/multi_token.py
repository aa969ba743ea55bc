"""The multi-token head of a model: an additional layer, which predicts the token after the next one. It drafts tokens.

    served model   state  0    1    2 ... n-2
                         \\    \\    \\      \\
    head           token  1    2    3 ... n-1 | n

The head reads each token together with the last hidden state of the token before it. The served model computes these hidden
states. They are kept until the head has read them. With a drafted token (n), the head reads a state that the head itself
computed.

Like a draft model, the head has KV of its own, with a sequence for each slot. If the served model does not compute a prefix,
because its KV is restored or shared, the states of the prefix may be missing. If the states of a prefix are missing, the
head's KV starts after the prefix. A head without KV of the prefix may draft worse, but this changes no answer.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..slots.drafter import GoesOn, ModelDraft
from ..slots.job import Job
from ..slots.plan import Span
from ..slots.reuse import ids_of
from ..slots.scope import Scope
from .context import Context, ContextSettings
from .draft_model import FEWEST, DraftModel, KeptTokens
from .model import Model
from .model_files import files_of
from .runner import Runner

ARCHITECTURES = ("glm4moe", "qwen35")
"""Architectures whose head llama.cpp computes as this module expects. Each has a test."""
LONGEST_HEADER = 64 << 20  # the first bytes of a file, which name its tensors
MOST_BYTES = 128 << 20  # bytes of the states of all requests; a state of GLM 4.5 Air takes 16 KiB


def why_unused(model: Model) -> str:
    """Return why a model's multi-token head cannot draft; empty if it can."""
    architecture = model.metadata("general.architecture")
    if not model.num_heads:
        return "its file has none"
    if model.num_heads > 1:
        return f"it has {model.num_heads}, of which each would need KV of its own"
    if architecture not in ARCHITECTURES:
        return f"those of {architecture} were never tried here, but of {', '.join(ARCHITECTURES)}"
    if not any(_names(file, f"blk.{model.num_layers}.nextn.eh_proj.weight".encode()) for file in files_of(model.path)):
        return "its file's metadata names one, but the file lacks its tensors"
    return ""


def _names(path: Path, tensor: bytes) -> bool:
    """Return whether a file has a tensor. llama.cpp cannot be asked: it ends the process if a head lacks a tensor."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(tensor, 0, LONGEST_HEADER) >= 0


@dataclass(slots=True, eq=False)
class Trail:
    """The served model's last hidden states of a request's tokens at positions [start, stop).

    pieces: consecutive pieces of the tokens (int32), each with its states, (tokens, width), float32.
    """

    start: int
    stop: int
    pieces: deque[tuple[np.ndarray, np.ndarray]] = field(default_factory=deque)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * (self.pieces[0][1].strides[0] if self.pieces else 0)

    def append(self, start: int, tokens: np.ndarray, states: np.ndarray) -> None:
        """Add computed tokens at position `start`.

        Drop the tokens that the trail already has from `start` on: they were not accepted.

        If there is a gap between the trail and `start`, the trail drops all its earlier tokens.
        """
        if self.start <= start <= self.stop:
            self.cut(start)
        else:
            self.pieces.clear()
            self.start = start
        self.pieces.append((tokens, states))
        self.stop = start + len(tokens)

    def cut(self, stop: int) -> None:
        """Drop the states from position `stop` on."""
        while self.pieces and self.stop > stop:
            tokens, states = self.pieces.pop()
            keep = len(tokens) - (self.stop - stop)
            self.stop -= len(tokens)
            if keep > 0:
                self.pieces.append((tokens[:keep], states[:keep].copy()))  # a view would also keep the dropped states
                self.stop = stop
        if not self.pieces:
            self.start = self.stop = min(self.start, stop)

    def shed(self, start: int) -> None:
        """Drop the pieces that end at or before position `start`."""
        while self.pieces and self.start + len(self.pieces[0][0]) <= start:
            self.start += len(self.pieces.popleft()[0])

    def states(self, start: int, stop: int) -> np.ndarray:
        """Return the states of positions [start, stop). The trail must have the states of all these positions."""
        found, at = [], self.start
        for tokens, states in self.pieces:
            if at + len(tokens) > start and at < stop:
                found.append(states[max(start - at, 0) : stop - at])
            at += len(tokens)
        return np.concatenate(found)

    def goes_on_from(self, other: Trail, tokens: np.ndarray) -> bool:
        """Prepend the states of another trail, if it has `tokens` up to this trail's start.

        Return whether the other trail has these tokens.
        """
        if not (other.pieces and other.start < self.start <= other.stop):
            return False
        theirs = np.concatenate([piece for piece, _ in other.pieces])[: self.start - other.start]
        if not np.array_equal(theirs, tokens[other.start : self.start]):
            return False
        front = Trail(other.start, other.stop, other.pieces.copy())
        front.cut(self.start)
        self.pieces.extendleft(reversed(front.pieces))
        self.start = front.start
        return True


class MultiTokenHead(DraftModel):
    """A `Drafter` that uses the served model's last hidden states.

    served: the runner of the served model, which computes the hidden states.
    """

    def __init__(self, context: Context, served: Runner, *, num_slots: int) -> None:
        super().__init__(context, served.context.model, num_slots=num_slots, beside=served.interrupt)
        self._served, self._most_trails = served.context, 2 * num_slots
        self._trails: dict[int, Trail] = {}  # by request id, the most recently computed last
        self._own: dict[int, np.ndarray] = {}  # the head's state after the last token of each slot
        served.on_computed = self._note

    def unload(self) -> None:
        super().unload()
        self._trails.clear()

    def close(self) -> None:
        """Free the context. The weights belong to the served model."""
        self._close_samplers()
        self.context.close()

    def draft(self, jobs: Sequence[Job], lengths: Sequence[int], goes_on: GoesOn) -> list[ModelDraft]:
        """See `Drafter`.

        The KV of drafted tokens comes from the head's own states, so it is freed after the draft. The head reads accepted
        tokens again with the served model's states.
        """
        drafts = super().draft(jobs, lengths, goes_on)
        for job in jobs:
            self._keep(job.slot, self._kept[job.slot].known)
        return drafts

    def forget(self, scope: Scope) -> None:
        """See `Drafter`."""
        for kept in self._kept:
            if kept.scope == scope:
                self._trails.pop(kept.request, None)
        super().forget(scope)

    # ---- states ----------------------------------------------------------------------------------------------------

    def _note(self, spans: tuple[Span, ...]) -> None:
        """Keep the states that the served model has just computed.

        Only the latest requests keep states, with at most `MOST_BYTES` in total.
        """
        if self.is_off:
            return
        states, at = self._served.states(sum([len(span.tokens) for span in spans])), 0
        for span in spans:
            trail = self._trails.pop(span.request, None) or Trail(span.start, span.start)
            trail.append(span.start, span.tokens, states[at : at + len(span.tokens)].copy())
            self._trails[span.request] = trail
            at += len(span.tokens)
        while len(self._trails) > max(self._most_trails, len(spans)):
            self._trails.pop(next(iter(self._trails)))
        self._shorten(sum([trail.num_bytes for trail in self._trails.values()]) - MOST_BYTES)

    def _shorten(self, excess: int) -> None:
        """Drop `excess` bytes of states, the longest trails first, so that a long prompt displaces no other states."""
        while excess > 0:
            longest = max(self._trails.values(), key=lambda trail: trail.num_bytes * (len(trail.pieces) > 1))
            before = longest.num_bytes
            if len(longest.pieces) > 1:
                longest.shed(longest.start + len(longest.pieces[0][0]))
                excess -= before - longest.num_bytes
            elif len(self._trails) > 1:
                excess -= self._trails.pop(next(iter(self._trails))).num_bytes
            else:
                return

    def _of(self, job: Job) -> KeptTokens:
        kept, last = super()._of(job), job.num_tokens - 1
        trail = self._trails.get(job.request.id)
        if trail is None or trail.stop < last:  # other requests have computed the tokens before
            trail = self._trails[job.request.id] = Trail(last, last)
        trail.cut(last)  # later states belong to drafted tokens that were not accepted
        if kept.length < trail.start:  # the tokens in between cannot be read, and llama.cpp allows no gaps between positions
            self._keep(job.slot, 0)
            kept.extend(ids_of(job.tokens[: trail.start]))
            kept.known = kept.length
        return kept

    def _begin(self, slot: int, request: int, scope: Scope, tokens: np.ndarray, most: int) -> None:
        others = [one.request for one in self._kept if one.scope == scope]
        super()._begin(slot, request, scope, tokens, most)
        trail = self._trails.get(request)
        if trail is not None and trail.start <= most:
            any(trail.goes_on_from(self._trails[other], tokens) for other in others if other in self._trails)

    # ---- computing -------------------------------------------------------------------------------------------------

    def _read(self, slot: int, kept: KeptTokens, tokens: np.ndarray) -> bool:
        trail = self._trails.get(kept.request)
        if trail is None or not trail.start <= kept.length <= trail.stop:
            return False
        return super()._read(slot, kept, tokens[: trail.stop + 1 - kept.length])

    def _run(self, spans: tuple[Span, ...], background: bool = False) -> list[int]:
        rows, at = self._runner.batch.states, 0
        for span in spans:
            rows[at : at + len(span.tokens)] = self._states_for(span)
            at += len(span.tokens)
        sampled = super()._run(spans, background)
        states, at = self.context.states(at), 0
        for span in spans:
            at += len(span.tokens)
            self._own[span.sequence] = states[at - 1].copy()
            if trail := self._trails.get(self._kept[span.sequence].request):
                trail.shed(span.stop - 1)
        return sampled

    def _states_for(self, span: Span) -> np.ndarray:
        """Return the states that the head reads with the tokens of a span.

        With a drafted token, the head reads its own state. With any other token, the head reads the served model's state of
        the token before. A state of the served model that is unknown is replaced by zeros, as in llama.cpp.
        """
        trail = self._trails[self._kept[span.sequence].request]
        if span.start > trail.stop:
            return self._own[span.sequence]
        states = np.zeros((len(span.tokens), self.context.state_width), np.float32)
        first = max(span.start - 1, trail.start)
        if first < span.stop - 1:
            states[first - span.start + 1 :] = trail.states(first, span.stop - 1)
        return states


def open_head(served: Runner, settings: ContextSettings, *, num_slots: int) -> MultiTokenHead:
    """Return the multi-token head of the served model. Raises ModelError.

    settings: the settings of the served context.
    """
    context = Context(served.context.model, head_settings(settings, num_slots))
    context.costs = served.context.costs.scaled(_share(context.model))
    return MultiTokenHead(context, served, num_slots=num_slots)


def head_settings(settings: ContextSettings, num_slots: int) -> ContextSettings:
    """Return the settings of a head's context, from the settings of the served context."""
    num_sequences = max(num_slots, FEWEST) + 1  # and a scratch sequence
    types = {"cache_type_k": "f16", "cache_type_v": "f16"}
    return replace(settings, num_sequences=num_sequences, is_head=True, gives_states=True, rollback=0, **types)


def _share(model: Model) -> float:
    """Return the share of all weights that a step of the head reads: the weights of one layer and of the output."""
    layer = model.num_layer_parameters / (model.num_layers + model.num_heads)
    return min((layer + model.num_vocab * model.width) / max(model.num_parameters, 1), 1.0)
