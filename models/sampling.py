"""Chooses the next token: llama-server's samplers in its order, for each request that does not simply take the best one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import llama_cpp
import numpy as np

from .grammar.constraint import Constraint
from .model import Model
from .samplers.candidates import Candidates, Row
from .samplers.chain import Link, chain_of, choice, links_of, mirostat
from .samplers.chances import Chances
from .samplers.parameters import GREEDY, Sampling
from .samplers.repetition import Dry, Penalties
from .thought import ThoughtClock

__all__ = ["GREEDY", "Chances", "Sampler", "Sampling"]

Repetition = Penalties | Dry
REPETITION: dict[str, Callable[[Model, Sampling], Repetition | None]] = {
    "penalties": lambda model, sampling: Penalties(sampling) if sampling.repeat_window else None,
    "dry": lambda model, sampling: Dry(sampling, _spelling(model)) if sampling.dry_window else None,
}
"""The samplers that are not llama.cpp's: its own look at the whole vocabulary, or scan it when they are made."""

ALONG = 0.05  # seconds that the choices along a draft may take: other streams wait for them


class Sampler:
    """Chooses the tokens of one request. Call `prime` before the first one, and `close` when the request ends.

    constraint: the tokens that a grammar allows.
    """

    def __init__(self, model: Model, sampling: Sampling) -> None:
        self._chances: Chances | None = None  # of the last token, where the request asks for them
        self._further: list[tuple[int, Chances | None]] = []  # tokens behind it that were chosen in the same step
        self.constraint: Constraint | None = None
        self._grammar, self._end = sampling.grammar, min(model.ends, default=0)
        self._clock = None if sampling.thought is None else ThoughtClock(sampling.thought)
        self._most, self._after = sampling.n_probs, sampling.post_sampling_probs
        self._biases = _biases(sampling)
        self._first: list[Repetition] = []  # before all chains, so that they need no list of candidates
        self._between: list[tuple[Link, Repetition]] = []  # a chain, and what comes after it
        self._last: Link | None = None  # the chain that chooses; None: the best token is chosen
        self._make(model, sampling)
        self._repetitions = [*self._first, *(step for _, step in self._between)]
        asks = self._most is not None and self._after
        self._sorts = sampling.sorts_all
        self._needs_list = bool(self._between) or asks or self._sorts or sampling.typical_p < 1  # fails on infinite logits

    def _make(self, model: Model, sampling: Sampling) -> None:
        """Make the steps in the order that the request asks for."""
        if sampling.mirostat:
            self._last = chain_of(mirostat(model, sampling))
            return
        names: list[str] = []  # of samplers that share a chain
        for name in sampling.samplers:
            if name not in REPETITION:
                names.append(name)
            elif step := REPETITION[name](model, sampling):
                if not names and not self._between:
                    self._first.append(step)
                else:
                    self._between.append((chain_of(links_of(model, sampling, names)), step))
                    names = []
        if self._between or not sampling.keeps_best:
            self._last = chain_of([*links_of(model, sampling, names), choice(sampling)])

    def choose(self, logits: np.ndarray, context: llama_cpp.llama_context_p, index: int) -> int:
        """Return the next token. logits: (vocabulary,), float32, overwritten; they are those of batch row `index`."""
        if self.constraint is not None and (forced := self.constraint.first_forced()) is not None:
            self._watch([forced])
            self._count(np.array([forced], np.int32))
            return forced
        given = logits.copy() if self._most is not None and not self._after else None
        if self._biases is not None:
            tokens, values = self._biases
            logits[tokens] += values
        fits = self.constraint is None or self.constraint.apply(logits)
        for step in self._first:
            step.apply(Row(logits))
        token = self._choose(logits, context, index) if fits else self._end_answer()
        if given is not None and self._most is not None:
            self._chances = Chances.of_model(given, token, self._most)
        if self._repetitions:
            self._count(np.array([token], np.int32))
        self._go_on([token])
        return token

    def choose_along(self, draft: np.ndarray, rows: np.ndarray, context: llama_cpp.llama_context_p, index: int) -> int:
        """Return the next token, and keep those behind it as far as the choices are the draft's: see `take_further`.

        draft: (tokens,), int32. rows: the logits in front of the draft and behind each token of it, those of the batch rows
        from `index` on. It ends before forced tokens, which come without a choice, and where choices take long.
        """
        until = perf_counter() + ALONG
        first = token = self.choose(rows[0], context, index)
        chances = self.take_chances()
        for place, drafted in enumerate(draft.tolist(), start=1):
            if token != drafted or self.error or self._forces or perf_counter() > until:
                break
            token = self.choose(rows[place], context, index + place)
            if not self.error:
                self._further.append((token, self.take_chances()))
        self._chances = chances
        return first

    @property
    def _forces(self) -> bool:
        """Whether the next token is no choice."""
        is_over = self._clock is not None and self._clock.is_over
        return is_over or (self.constraint is not None and self.constraint.has_forced)

    def take_further(self) -> list[tuple[int, Chances | None]]:
        """Return the tokens that were chosen behind the last one in the same step, each with its chances."""
        if not self._further:
            return self._further
        further, self._further = self._further, []
        return further

    def _go_on(self, tokens: Sequence[int]) -> None:
        """Let the grammar, and the clock of thoughts, know tokens."""
        if self.constraint is not None:
            self.constraint.accept(*tokens)
        self._watch(tokens)

    def _watch(self, tokens: Sequence[int]) -> None:
        if self._clock is not None:
            for token in tokens:
                self._clock.push(token)

    def _choose(self, logits: np.ndarray, context: llama_cpp.llama_context_p, index: int) -> int:
        if self._last is None:
            token = int(logits.argmax())
            self._chances = Chances.certain(token) if self._most is not None else None
            return token
        if not self._needs_list:
            return llama_cpp.llama_sampler_sample(self._last, context, index)
        candidates = Candidates(logits, sort=self._sorts)
        for chain, step in self._between:
            candidates.apply(chain)
            if step.apply(candidates):
                candidates.unsort()
        candidates.apply(self._last)
        token = candidates.chosen
        llama_cpp.llama_sampler_accept(self._last, token)
        if self._most is not None:
            self._chances = Chances.of_samplers(candidates.left, token, self._most)
        return token

    def _end_answer(self) -> int:
        """Return the end, where all other tokens are forbidden."""
        self._chances = Chances.certain(self._end) if self._most is not None else None
        return self._end

    def take_chances(self) -> Chances | None:
        """Return the chances of the token that was chosen since the last call, if the request asks for them."""
        chances, self._chances = self._chances, None
        return chances

    def prime(self, prompt: np.ndarray) -> None:
        """Begin an answer. A prompt's last tokens (int32) count as used, as in llama-server."""
        self._count(prompt)
        if self._grammar is not None:
            self.constraint = self._grammar.start(fast_forward=self._most is None)

    def take_forced(self) -> list[int]:
        """Return the tokens that follow the last one in any case, as if they were chosen."""
        forced: list[int] = []
        while more := self._next_forced():
            forced += more
        if forced:
            self._count(np.array(forced, np.int32))
        return forced

    def _next_forced(self) -> list[int]:
        """Return tokens that the grammar forces, else those that end a thought; more may follow."""
        forced = [] if self.constraint is None else self.constraint.take_forced()
        self._watch(forced)
        if not forced and self._clock is not None and self._clock.is_over:
            forced = list(self._clock.closing)
            self._go_on(forced)
        return forced

    @property
    def error(self) -> str:
        """Why the grammar let no token be chosen; the last one means nothing then. Empty if one was."""
        return "" if self.constraint is None else self.constraint.error

    def _count(self, tokens: np.ndarray) -> None:
        for step in self._repetitions:
            step.extend(tokens)

    def close(self) -> None:
        """Free the chains."""
        chains = [chain for chain, _ in self._between]
        for chain in chains if self._last is None else [*chains, self._last]:
            llama_cpp.llama_sampler_free(chain)
        self._between, self._last = [], None


def _spelling(model: Model) -> Callable[[int], bytes]:
    """Return the bytes of a token, of a control token, too."""
    return lambda token: model.piece(token) or model.text_of(token).encode()


def _biases(sampling: Sampling) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tokens whose logits are changed, and by how much."""
    biases = sampling.logit_bias | dict.fromkeys(sampling.banned, -np.inf)
    if not biases:
        return None
    return np.array(list(biases), np.intp), np.array(list(biases.values()), np.float32)
