"""A draft model: a small model with the same vocabulary, which proposes the next tokens of the served model's answers.

    slot 0   tokens of its request ........ last | drafted, drafted
    slot 1   tokens of its request .... last | drafted

The draft model has a context of its own, with one sequence for each slot. For each slot, the draft model has KV for the
tokens of the slot's request and for the drafted tokens. Once the served model has checked the drafted tokens, KV of rejected
tokens is freed. The served model checks every drafted token, so this module cannot change an answer. The draft model shares
no cached KV with the served model: it is small, and computes a prefix fast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..slots.drafter import GoesOn, ModelDraft
from ..slots.job import Job
from ..slots.plan import Drop, Plan, Share, Span, Trim
from ..slots.radix import NO_TOKENS, common_prefix
from ..slots.reuse import ids_of
from ..slots.scope import Scope
from ..slots.slot import Slot
from . import llama
from .context import WARM_UP, Context, ContextSettings
from .errors import Interrupted, ModelError, NoRoom, RunnerError
from .learning import learn_costs
from .model import Model
from .runner import Interrupt, Runner
from .sampling import Sampler
from .sampling_params import GREEDY
from .timing import MayGoOn

logger = logging.getLogger("slotcache")

MOST_PADDING = 128  # tokens that one vocabulary may have more than the other, as the padding differs within a family
FIRST_COMPARED = 5  # as in llama.cpp: models of a family name the control tokens before this one differently
FEWEST = 2  # sequences that `Timing` needs besides the scratch sequence
TRIES = 3  # failures after which a draft model is off for good


def check_vocabulary(draft: Model, model: Model) -> None:
    """Raise ModelError unless the two models have the same tokens. The error's message names the first difference.

    The first `FIRST_COMPARED` tokens and up to `MOST_PADDING` tokens at the end may differ.
    """
    where = f"--draft-model {draft.path}"
    if draft.vocabulary_type != model.vocabulary_type:
        kinds = f"{draft.vocabulary_type} instead of {model.vocabulary_type}"
        raise ModelError(f"{where}: its vocabulary is of another kind than that of {model.path.name}: {kinds}")
    if abs(draft.num_vocab - model.num_vocab) > MOST_PADDING:
        sizes = f"{draft.num_vocab:,} tokens instead of {model.num_vocab:,}"
        raise ModelError(f"{where}: its vocabulary differs from that of {model.path.name}: {sizes}")
    for token in range(FIRST_COMPARED, min(draft.num_vocab, model.num_vocab)):
        mine, other = (llama.llama_vocab_get_text(one.vocab, token) for one in (draft, model))
        if mine != other:
            texts = " instead of ".join(repr(text.decode("utf-8", "replace")) for text in (mine, other))
            raise ModelError(f"{where}: its vocabulary differs from that of {model.path.name}: token {token} is {texts}")


class Best(Sampler):
    """Chooses the most probable token, and keeps its probability.

    num_vocab: the number of tokens that both models have.
    """

    def __init__(self, model: Model, num_vocab: int) -> None:
        super().__init__(model, GREEDY)
        self.confidence = 0.0
        self._num_vocab = num_vocab

    def choose(self, logits: np.ndarray, context: Any, index: int) -> int:
        row = logits[: self._num_vocab]
        token = int(row.argmax())
        self.confidence = 1.0 / float(np.exp(row - row[token]).sum())
        return token


@dataclass(slots=True, eq=False)
class KeptTokens:
    """The draft model's KV for a slot.

    tokens: token ids (int32). Only the first `length` tokens have KV; the rest of the array is spare.
    known: how many of these tokens belong to the request; the tokens after them are drafted.
    is_refused: the draft model cannot compute the request: the request has a token that only the served model knows, or is
    too long, or found no free cells.
    """

    request: int = -1
    scope: Scope | None = None
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    length: int = 0
    known: int = 0
    used: int = 0  # the number of the last use
    is_refused: bool = False

    def extend(self, tokens: np.ndarray) -> None:
        """Add computed tokens."""
        stop = self.length + len(tokens)
        if stop > len(self.tokens):
            grown = np.empty(max(2 * len(self.tokens), stop, 1024), np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        self.tokens[self.length : stop] = tokens
        self.length = stop


class DraftModel:
    """A `Drafter` that runs on llama.cpp. Only the engine's thread may call the methods of this class, except for `open`.

    why_off: the reason why the model drafts nothing, while `is_off` is true.
    served: the model for which this model drafts.
    beside: the interrupt of the served model's runner. This interrupt aborts background steps of the served model, and
    background prefill of the draft model.
    """

    def __init__(self, context: Context, served: Model, *, num_slots: int, beside: Interrupt) -> None:
        self.context = context
        self.costs, self.batch = context.costs, context.batch
        self.num_tokens = self.num_passes = self.num_failures = 0
        self.is_off, self.why_off = False, ""
        self._num_vocab = min(context.model.num_vocab, served.num_vocab)
        # If the position embeddings are learned, llama.cpp ends the process at a position beyond them.
        self._longest = context.model.context_train or context.num_cells
        self._is_end = served.is_end
        self._runner = Runner(context)
        self._runner.interrupt = beside.on(context)
        self._kept = [KeptTokens() for _ in range(num_slots)]
        self._samplers = {slot: Best(context.model, self._num_vocab) for slot in range(num_slots)}
        self._clock = 0

    # ---- as a part of the served model's runner --------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compute a few tokens in the engine's thread, so that the first draft need not allocate memory."""
        try:
            if self.context.handle:
                self._runner.compute_zeros(0, WARM_UP)
        except RunnerError:
            self._fail(None)
        self.clear()

    def unload(self) -> None:
        """Free the device's memory. `open` allocates the memory again."""
        if self.context.handle:
            self._runner.unload()
        self._kept = [KeptTokens() for _ in self._kept]

    def open(self) -> None:
        """Load the model again. After TRIES failures, do nothing.

        If the load fails, the model drafts nothing until a later call succeeds.
        """
        if self.num_failures >= TRIES:
            return
        try:
            self.context.open()
        except ModelError as error:
            self.is_off, self.why_off = True, str(error)
            logger.warning("the draft model drafts nothing until the next load: %s", error)
            return
        if self.is_off:
            logger.info("the draft model is back, and drafts again")
        self.is_off, self.why_off = False, ""

    def clear(self) -> None:
        """Free every cell."""
        self._runner.clear()
        self._kept = [KeptTokens() for _ in self._kept]

    def close(self) -> None:
        """Free the context and the model."""
        self._close_samplers()
        self.context.close()
        self.context.model.close()

    def _close_samplers(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()

    # ---- called by the scheduler -----------------------------------------------------------------------------------

    def lacking(self, job: Job) -> int:
        """See `Drafter`."""
        try:
            kept = self._of(job)
        except RunnerError:
            return self._fail(-1)
        return -1 if kept.is_refused else job.num_tokens - 1 - kept.length

    def read(self, job: Job, most: int) -> bool:
        """See `Drafter`."""
        kept = self._of(job)
        return self._read(job.slot, kept, ids_of(job.tokens[kept.length : job.num_tokens - 1][:most]))

    def read_ahead(self, slot: Slot, cached: int, most: int) -> bool:
        """See `Drafter`."""
        kept, tokens = self._kept[slot.id], ids_of(slot.history[:cached])
        if slot.scope is None:
            return False
        try:
            if (kept.request, kept.scope) != (slot.last, slot.scope):  # a restored history has no request
                self._begin(slot.id, slot.last, slot.scope, tokens, len(tokens))
            self._keep(slot.id, common_prefix(kept.tokens[: kept.length], tokens))
        except RunnerError:
            return self._fail(False)
        lacks = kept.length < len(tokens) and not kept.is_refused
        return lacks and self._read(slot.id, kept, tokens[kept.length :][:most])

    def draft(self, jobs: Sequence[Job], lengths: Sequence[int], goes_on: GoesOn) -> list[ModelDraft]:
        """See `Drafter`."""
        kept = [self._of(job) for job in jobs]
        feeds = [ids_of(job.tokens[one.length : job.num_tokens]) for job, one in zip(jobs, kept, strict=True)]
        found: list[list[int]] = [[] for _ in jobs]
        confidences: list[list[float]] = [[] for _ in jobs]
        active = [place for place, length in enumerate(lengths) if length > 0]
        try:
            while active:
                chosen = self._pass({jobs[place].slot: feeds[place] for place in active})
                still: list[int] = []
                for place in active:
                    token, confidence = chosen[jobs[place].slot]
                    if self._is_end(token):
                        continue
                    found[place].append(token)
                    confidences[place].append(confidence)
                    if len(found[place]) < lengths[place] and goes_on(place, confidences[place]):
                        feeds[place] = np.array([token], np.int32)
                        still.append(place)
                active = still
        except NoRoom:
            pass  # the tokens drafted so far are the draft
        except RunnerError:
            self._fail(0)
        for job, one in zip(jobs, kept, strict=True):
            one.known = min(one.length, job.num_tokens)
        drafts = zip(found, confidences, strict=True)
        return [ModelDraft(np.array(tokens, np.int32), tuple(certain)) for tokens, certain in drafts]

    def forget(self, scope: Scope) -> None:
        """See `Drafter`."""
        for slot, kept in enumerate(self._kept):
            if kept.scope == scope:
                self._keep(slot, 0)

    # ---- the KV of slots -------------------------------------------------------------------------------------------

    def _of(self, job: Job) -> KeptTokens:
        """Return the KV of a running job.

        Before that, free the KV of the job's last token and of tokens that are not in the job.
        """
        kept, last = self._kept[job.slot], job.num_tokens - 1
        if kept.request != job.request.id:
            # No more tokens than the request found in the cache, so that no draft reveals KV that the cache has dropped.
            most = min(job.reuse.cached, last)
            self._begin(job.slot, job.request.id, job.request.index_scope, ids_of(job.tokens[:last]), most)
        else:
            drafted = kept.tokens[kept.known : kept.length]
            same = common_prefix(drafted, ids_of(job.tokens[kept.known : last]))
            self._keep(job.slot, min(kept.known, last) + same)
        kept.known = kept.length
        self._clock += 1
        kept.used = self._clock
        return kept

    def _begin(self, slot: int, request: int, scope: Scope, tokens: np.ndarray, most: int) -> None:
        """Give a slot to another request. The slot starts with the longest prefix that any slot has KV for in this scope.

        most: the most tokens that the slot's prefix may have.
        """
        kept, tokens = self._kept[slot], tokens[:most]
        same = [self._common(one, scope, tokens) for one in self._kept]
        source = max(range(len(same)), key=lambda one: (same[one], one == slot))
        if source == slot:
            self._keep(slot, same[slot])
        else:
            self._keep(slot, 0)
            self._runner.apply(Share(source, slot, 0, same[source]))
            kept.extend(self._kept[source].tokens[: same[source]])
        kept.request, kept.scope, kept.known, kept.is_refused = request, scope, kept.length, False

    def _common(self, kept: KeptTokens, scope: Scope, tokens: np.ndarray) -> int:
        """Return the length of the prefix of `tokens` that a slot has KV for.

        Return 0 if the slot's KV cannot be cut after this prefix.
        """
        same = common_prefix(kept.tokens[: kept.length], tokens) if kept.scope == scope else 0
        window = self.context.model.window
        return same if not window or kept.length - same < min(window, self.batch) else 0  # farther back, cells may be gone

    def _keep(self, slot: int, length: int) -> None:
        """Free the KV of a slot after its first `length` tokens."""
        kept = self._kept[slot]
        if length < kept.length:
            self._runner.apply(Trim(slot, length, kept.length) if length else Drop(slot))
            kept.length, kept.known = length, min(kept.known, length)

    # ---- computing -------------------------------------------------------------------------------------------------

    def _read(self, slot: int, kept: KeptTokens, tokens: np.ndarray) -> bool:
        """Let the draft model read tokens of a slot: compute them without logits.

        Return False if a new request aborts the step, or if the step fails.
        """
        span = Span(slot, slot, kept.length, tokens, logits=False)
        try:
            self._run((span,), background=True)
        except (Interrupted, NoRoom):
            return False
        except RunnerError:
            return self._fail(False)
        kept.known = kept.length
        return True

    def _pass(self, feeds: dict[int, np.ndarray]) -> dict[int, tuple[int, float]]:
        """Compute the given tokens of each slot. Return the most probable next token of each slot, with its probability."""
        spans = tuple(Span(slot, slot, self._kept[slot].length, tokens, logits=True) for slot, tokens in feeds.items())
        tokens = self._run(spans)
        self.num_passes += 1
        return {slot: (token, self._samplers[slot].confidence) for slot, token in zip(feeds, tokens, strict=True)}

    def _run(self, spans: tuple[Span, ...], background: bool = False) -> list[int]:
        """Compute spans, and add their tokens to the slots.

        Raises NoRoom, Interrupted and RunnerError. After an error, no span counts as computed.
        """
        for span in spans:
            if int(span.tokens.max()) >= self.context.model.num_vocab or span.stop > self._longest:
                raise self._refuse(span.sequence)
        num_tokens = sum(len(span.tokens) for span in spans)
        while True:
            spare = max(self.context.num_cells - sum(kept.length for kept in self._kept) - num_tokens, 0)
            try:
                sampled = self._runner.run(Plan((), spans, num_spare=spare, background=background), self._samplers)
                break
            except NoRoom:
                if not self._evict({span.sequence for span in spans}, background):
                    raise self._refuse(max(spans, key=lambda span: span.start).sequence) from None
        for span in spans:
            self._kept[span.sequence].extend(span.tokens)
        self.num_tokens += num_tokens
        return sampled

    def _evict(self, needed: set[int], background: bool) -> bool:
        """Evict the KV of the least recently used slot that is not in `needed`. Return whether a slot was evicted.

        background: evict only a slot whose last use is older than that of a slot in `needed`. Without this condition, two
        idle slots could evict each other for ever.
        """
        latest = max(self._kept[slot].used for slot in needed) if background else math.inf
        others = [slot for slot, kept in enumerate(self._kept) if kept.length and slot not in needed and kept.used < latest]
        if others:
            self._keep(min(others, key=lambda slot: self._kept[slot].used), 0)
        return bool(others)

    def _refuse(self, slot: int) -> NoRoom:
        """Draft nothing more for the request of a slot. Return the error that the caller raises."""
        self._keep(slot, 0)
        self._kept[slot].is_refused = True
        return NoRoom()

    def _fail(self, value: Any) -> Any:
        """Drop all KV after a failure, and draft nothing more after TRIES failures. Return `value`.

        Answers continue without drafts.
        """
        self.num_failures += 1
        if self.num_failures >= TRIES:
            self.is_off, self.why_off = True, f"it failed {self.num_failures} times"
        end = "it drafts no more" if self.is_off else "it begins again"
        logger.exception("the draft model failed: %s", end)
        self.clear()
        return value


def open_draft_model(
    model: Model,
    settings: ContextSettings,
    served: Model,
    *,
    num_slots: int,
    beside: Interrupt,
    unit: float = 1.0,
    goes_on: MayGoOn = lambda _: True,
) -> DraftModel:
    """Return the draft model of a served model. Closing the draft model also closes `model`.

    settings, unit: the `settings` and `unit` of the served model's `Context`.
    goes_on: as in `learn_costs`.

    Raises ModelError, with the reason, if the model cannot draft.
    """
    if not (model.can_chat and model.can_trim):
        why = "its state cannot be cut back to drop wrong tokens" if model.can_chat else "it generates no text"
        raise ModelError(f"--draft-model {model.path}: {why}")
    check_vocabulary(model, served)
    each = 2 if model.window else 1  # with or without twins
    num_sequences = each * max(num_slots, FEWEST) + 1  # and a scratch sequence
    types = {"cache_type_k": "f16", "cache_type_v": "f16"}
    context = Context(model, replace(settings, num_sequences=num_sequences, rollback=0, **types))
    learn_costs(context, goes_on)
    if (unit == 1.0) != (context.unit == 1.0):  # only one of the two was timed, but their costs are compared
        context.costs = context.costs.scaled(unit / context.unit)
    return DraftModel(context, served, num_slots=num_slots, beside=beside)
