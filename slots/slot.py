"""The slots in which requests run, and the last request of each slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from .device import DeviceCells
from .host import PromptTree
from .job import Job
from .plan import HostCopy, Save
from .radix import NO_TOKENS, common_prefix
from .record import Record
from .reuse import prefix_cache_ratio
from .scope import Scope

SIMILARITY = 0.1
"""The least share of a prompt that a slot's history must have for the slot to be preferred, as in llama-server."""


@dataclass(slots=True)
class Slot:
    """A place in which one request runs at a time. A slot remembers the last client's request that has ended in it.

    last: the id of the last client's request; -1: there was none yet.
    scope, history (int32): the last request's scope, and its tokens with KV; empty if this KV was not kept.
    num_prompt: how many tokens of the history are the last request's prompt.
    prefix_cache_tokens, prefix_cache_ratio: how many prompt tokens of the last request were not computed, and their share of
        the prompt.
    ahead (int32): the tokens of a background request that has prefilled the next turn of the remembered request; empty: no
        next turn is prefilled.

    Any other background request, and any stage that reads a document, leaves what the slot remembers as it is.
    """

    id: int
    job: Job | None = None
    sequence_id: int = -1
    last_use: int = 0
    last: int = -1
    scope: Scope | None = None
    history: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    num_prompt: int = 0
    prefix_cache_tokens: int = 0
    prefix_cache_ratio: float = 0.0
    ahead: np.ndarray = field(default_factory=lambda: NO_TOKENS)

    def remember(self, scope: Scope | None, history: np.ndarray, num_prompt: int, last: int = -1) -> None:
        """Replace the history.

        num_prompt: the number of tokens of the prompt. The history may have fewer tokens than the prompt.
        """
        self.scope, self.history, self.last, self.ahead = scope, history, last, NO_TOKENS
        self.num_prompt = min(num_prompt, len(history))
        self.prefix_cache_tokens, self.prefix_cache_ratio = 0, 0.0

    def num_shared(self, job: Job) -> int:
        """Return the length of the common prefix of the slot's history and a request's tokens; 0 if the scopes differ."""
        return common_prefix(self.history, job.tokens[: job.num_tokens]) if self.scope == job.request.index_scope else 0


class Slots:
    """A fixed number of slots.

    similarity: as in `affine_slot`.
    """

    def __init__(self, count: int, similarity: float = SIMILARITY) -> None:
        self._slots = tuple(Slot(id) for id in range(count))
        self._similarity = similarity
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, id: int) -> Slot:
        return self._slots[id]

    @property
    def any_idle(self) -> bool:
        return any(slot.job is None for slot in self._slots)

    def may_take(self, job: Job) -> bool:
        """Return whether the slot that a request wants is idle, or the request wants no certain slot."""
        return job.request.wanted_slot < 0 or self._slots[job.request.wanted_slot].job is None

    def take(self, job: Job, sequence_id: int) -> None:
        """Give a request an idle slot: the slot that it wants, else `affine_slot`, else the least recently used slot.

        sequence_id: the id of the request's sequence. The id may be new even if the request continues the slot's history.
        """
        idle = [slot for slot in self._slots if slot.job is None and job.request.wanted_slot in (-1, slot.id)]
        slot = affine_slot(idle, job, self._similarity) or min(idle, key=lambda slot: slot.last_use)
        slot.job, job.slot = job, slot.id
        if job.is_reading:
            return
        if not job.request.kind.is_client:
            if followed := self._followed(job):
                followed.sequence_id = sequence_id
            return
        self._clock += 1
        slot.sequence_id, slot.last_use = sequence_id, self._clock

    def release(self, job: Job) -> None:
        """Free the slot of a request. The slot remembers the request if a client sent it, but not a stage of it."""
        slot = self._slots[job.slot]
        slot.job = None
        if job.is_reading:
            return
        if not job.request.kind.is_client:
            if followed := self._followed(job):
                followed.ahead = job.tokens[: job.computed]
            return
        scope = job.request.index_scope if job.request.keeps else None
        history = NO_TOKENS if scope is None else job.tokens[: job.computed]
        slot.remember(scope, history, job.num_prompt, job.request.id)
        cached = job.reuse.cached
        slot.prefix_cache_tokens, slot.prefix_cache_ratio = cached, prefix_cache_ratio(cached, job.num_prompt)

    def _followed(self, job: Job) -> Slot | None:
        """Return the slot that remembers the request whose next turn `job` prefills; None if no slot does.

        If the followed request was paused and went on in another slot, several slots remember it. Of the slots that remember
        it, the most recently used one is returned.
        """
        slots = (slot for slot in self._slots if slot.last == job.request.follows)
        return max(slots, key=lambda slot: slot.last_use, default=None)


def affine_slot(idle: Sequence[Slot], job: Job, similarity: float) -> Slot | None:
    """Return the idle slot whose history has the longest common prefix with a request's prompt (ADR 007).

    If a slot's whole last prompt is a prefix of the request's prompt, only such slots are considered. The slot's answer need
    not be part of the prefix: in the next turn, the answer may lack its reasoning, or have other tokens for the same text.

    If there is no such slot, the common prefix must be at least `similarity` of the request's prompt; with a similarity of 0
    no slot qualifies. The common prefix must also contain at least half of the slot's last prompt, not counting the opening
    that new chats share. Without the rule of one half, two chats that share only a system text would keep taking each
    other's slot. The result is None if no slot qualifies.
    """
    shared = {slot.id: slot.num_shared(job) for slot in idle}
    found = [slot for slot in idle if 0 < slot.num_prompt <= shared[slot.id]]
    opening, least = job.layout.opening, similarity * job.num_prompt
    for slot in idle if similarity and not found else ():
        mine = shared[slot.id] - opening
        if mine > 0 and shared[slot.id] >= least and (not opening or 2 * mine >= slot.num_prompt - opening):
            found.append(slot)
    return max(found, key=lambda slot: (shared[slot.id], -slot.last_use), default=None)


# ---- The prompts that slots ran last: saved as records, restored, and erased. -------------------------------------------


class Histories:
    """Saves, restores and erases the histories of idle slots, between two steps.

    carry_out: performs the pending operations at once instead of with the next plan. If `carry_out` raises, the content of
        the device's memory is unknown until `Scheduler.recover` is called.
    """

    def __init__(self, device: DeviceCells, index: PromptTree, *, carry_out: Callable[[], None]) -> None:
        self._device, self._index, self._carry_out = device, index, carry_out

    def save(self, slot: Slot) -> list[Record]:
        """Return a slot's history as records, as far as it has KV. Each record begins where the previous one ends.

        Runs without a copy are copied outside host memory's budget, because making room in the budget could evict the runs
        before them. If the budget is 0, nothing can be copied, and the list is empty.
        """
        index = self._index
        if not index.host.max_bytes:
            return []
        runs = index.usable_runs(slot.scope, slot.history)
        copies = [node.copy or HostCopy(node.start, stop) for node, stop in runs]
        for (node, _), copy in zip(runs, copies, strict=True):
            if copy is not node.copy:
                self._device.perform(Save(node.longest_sequence().id, copy))
        self._carry_out()
        made = [index.host.part(node, copy, stop) for (node, stop), copy in zip(runs, copies, strict=True)]
        return list(takewhile(bool, made))  # type: ignore[arg-type]

    def remember(self, slot: Slot, scope: Scope, tokens: np.ndarray) -> int:
        """Make the cached prefix of `tokens` a slot's history. Return the length of the cached prefix."""
        runs = self._index.usable_runs(scope, tokens)
        length = runs[-1][1] if runs else 0
        slot.remember(scope, tokens[:length], length)
        return length

    def erase(self, slot: Slot) -> int:
        """Forget the KV of a slot's history and of its prefilled next turn, except runs that other prompts need.

        Return the number of forgotten tokens.
        """
        return sum(self._discard(slot.scope, tokens) for tokens in (slot.ahead, slot.history))

    def _discard(self, scope: Scope | None, tokens: np.ndarray) -> int:
        runs = self._index.usable_runs(scope, tokens)
        return self._index.discard([node for node, stop in reversed(runs) if stop == node.end])
