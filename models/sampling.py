"""The sampler of a request: the chain of samplers, the choice of a token, logprobs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import numpy as np

from . import llama
from .detokenizer import ReasoningClock
from .grammar import Constraint
from .model import Model
from .penalties import Dry, Penalties
from .sampling_params import Sampling

# ---- The tokens that may still be chosen, in the form of llama.cpp's samplers. ------------------------------------------

KIND = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class LogitsRow:
    """The logits of all tokens of the vocabulary, by token id."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Logits`. Here `values` has the logits of the whole vocabulary, so a token's index in it is the token's id."""
        return tokens, np.arange(len(tokens))


class TokenList:
    """A list of tokens that samplers shorten, sort and choose from.

    row: the logits of the vocabulary, (tokens,). The list leaves out tokens whose logit is minus infinity.
    sort: sort the list, best token first, before a sampler does so. llama.cpp would take several times as long.
    """

    def __init__(self, row: np.ndarray, sort: bool = False) -> None:
        possible = np.flatnonzero(row > -np.inf)
        tokens = possible if len(possible) else np.arange(len(row))
        if sort:
            tokens = tokens[np.argsort(-row[tokens])]
        self._data = np.zeros(len(tokens), KIND)
        self._data["id"], self._data["logit"] = tokens, row[tokens]
        self._start = self._data.ctypes.data
        pointer = ctypes.cast(self._start, ctypes.POINTER(llama.llama_token_data))
        self._arrays = (llama.llama_token_data_array * 1)((pointer, len(tokens), -1, sort))
        self._struct = self._arrays[0]

    @property
    def left(self) -> np.ndarray:
        """The tokens that samplers have left in the list: id, logit, p. Samplers may drop tokens at both ends."""
        address = ctypes.cast(self._struct.data, ctypes.c_void_p).value or self._start
        first = (address - self._start) // KIND.itemsize
        return self._data[first : first + self._struct.size]

    @property
    def values(self) -> np.ndarray:
        return self.left["logit"]

    def places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find which of `tokens` (sorted) are in the list.

        Return two arrays: the indices of the found tokens in the list, and their indices in `tokens`.
        """
        ids = self.left["id"]
        nearest = np.minimum(np.searchsorted(tokens, ids), max(len(tokens) - 1, 0))
        places = np.flatnonzero(tokens[nearest] == ids) if len(tokens) else np.zeros(0, np.intp)
        return places, nearest[places]

    def apply(self, chain: llama.llama_sampler_p) -> None:
        """Let a chain shorten the list or choose from it."""
        llama.llama_sampler_apply(chain, self._arrays)

    def unsort(self) -> None:
        """Tell llama.cpp that the list may no longer be sorted, since logits have changed."""
        self._struct.sorted = False

    @property
    def chosen(self) -> int:
        """The token that a chain chose."""
        return int(self.left["id"][self._struct.selected])


# ---- llama.cpp's samplers in llama-server's order, with their parameters. -----------------------------------------------

Link: TypeAlias = "llama.llama_sampler_p"
MIROSTAT_TOKENS = 100  # how many of the most probable tokens Mirostat 1 uses for its estimate
MAX_INFILL = 128  # the most tokens that infill compares pair by pair


def _infill(model: Model, sampling: Sampling) -> list[Link]:
    limit = llama.llama_sampler_init_top_k(MAX_INFILL)
    return [limit, llama.llama_sampler_init_infill(model.vocab)]


LINKS: dict[str, Callable[[Model, Sampling], list[Link]]] = {
    "top_n_sigma": lambda model, sampling: [llama.llama_sampler_init_top_n_sigma(sampling.top_n_sigma)],
    "top_k": lambda model, sampling: [llama.llama_sampler_init_top_k(sampling.top_k)],
    "typ_p": lambda model, sampling: [llama.llama_sampler_init_typical(sampling.typical_p, sampling.min_keep)],
    "top_p": lambda model, sampling: [llama.llama_sampler_init_top_p(sampling.top_p, sampling.min_keep)],
    "min_p": lambda model, sampling: [llama.llama_sampler_init_min_p(sampling.min_p, sampling.min_keep)],
    "xtc": lambda model, sampling: [
        llama.llama_sampler_init_xtc(
            sampling.xtc_probability, sampling.xtc_threshold, sampling.min_keep, bits(sampling.seed)
        )
    ],
    "temperature": lambda model, sampling: [
        llama.llama_sampler_init_temp_ext(sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent)
    ],
    "infill": _infill,
}
"""The links that each name in `samplers` adds to a chain."""


def chain_of(links: Iterable[Link]) -> Link:
    """Return a chain of these links. The chain owns the links."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for link in links:
        llama.llama_sampler_chain_add(chain, link)
    return chain


def links_of(model: Model, sampling: Sampling, names: Sequence[str]) -> list[Link]:
    """Return the links of the samplers with these names, in order."""
    return [link for name in names if name in LINKS for link in LINKS[name](model, sampling)]


def mirostat(model: Model, sampling: Sampling) -> list[Link]:
    """Return the links of Mirostat, which replaces all other samplers."""
    seed, tau, eta = bits(sampling.seed), sampling.mirostat_tau, sampling.mirostat_eta
    temperature = llama.llama_sampler_init_temp(sampling.temperature)
    if sampling.mirostat == 1:
        return [temperature, llama.llama_sampler_init_mirostat(model.num_vocab, seed, tau, eta, MIROSTAT_TOKENS)]
    return [temperature, llama.llama_sampler_init_mirostat_v2(seed, tau, eta)]


def choice(sampling: Sampling) -> Link:
    """Return the link that chooses one of the tokens that the other links have kept."""
    seed = bits(sampling.seed)
    if "adaptive_p" in sampling.samplers:
        return llama.llama_sampler_init_adaptive_p(sampling.adaptive_target, sampling.adaptive_decay, seed)
    return llama.llama_sampler_init_dist(seed)


def bits(seed: int) -> int:
    """Return a seed in llama.cpp's form."""
    return seed & 0xFFFFFFFF


# ---- The probabilities of a token and of the most probable tokens at its place. -----------------------------------------

LEAST = -9999.0  # OpenAI's value for the logarithm of 0, which JSON cannot represent


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """The logprobs of one token and of the most probable tokens in its place, as natural logarithms.

    top_tokens, top_logprobs: the most probable tokens (int32) and their logprobs (float32), best first.
    """

    token: int
    logprob: float
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def of_model(cls, row: np.ndarray, token: int, most: int) -> Logprobs:
        """Return the logprobs of the model alone, before any sampler.

        row: the model's logits, (vocabulary,), float32.
        most: how many top tokens to return.
        """
        first = max(len(row) - most, 0)
        tokens = np.argpartition(row, first)[first:] if 0 < first < len(row) else np.arange(first, len(row))
        tokens = tokens[np.lexsort((tokens, -row[tokens]))].astype(np.int32)
        best = row.max()
        total = best + np.log(np.exp(row - best).sum(dtype=np.float64))
        logprobs = np.maximum(row[tokens] - total, LEAST).astype(np.float32)
        return cls(token, float(np.float32(max(row[token] - total, LEAST))), tokens, logprobs)

    @classmethod
    def of_samplers(cls, left: np.ndarray, token: int, most: int) -> Logprobs:
        """Return the logprobs after the samplers.

        left: llama_token_data of the tokens that could be chosen.
        most: as in `of_model`.
        """
        possible = left[left["p"] > 0]
        best = possible[np.argsort(-possible["p"], kind="stable")[:most]]
        own = left["p"][left["id"] == token]
        logprob = float(np.log(own[0])) if len(own) and own[0] > 0 else LEAST
        return cls(token, logprob, best["id"].copy(), np.log(best["p"]))

    @classmethod
    def unknown(cls, token: int) -> Logprobs:
        """Return the logprobs of a prompt's first token. The first token's logprob is NaN, since no token precedes it."""
        return cls(token, np.nan, np.zeros(0, np.int32), np.zeros(0, np.float32))

    @classmethod
    def certain(cls, token: int) -> Logprobs:
        """Return the logprobs of a token that was chosen without an alternative: its probability is 1."""
        return cls(token, 0.0, np.array([token], np.int32), np.zeros(1, np.float32))


Repetition = Penalties | Dry
REPETITION: dict[str, Callable[[Model, Sampling], Repetition | None]] = {
    "penalties": lambda model, sampling: Penalties(sampling) if sampling.repeat_window else None,
    "dry": lambda model, sampling: Dry(sampling, _spelling(model)) if sampling.dry_window else None,
}
"""The samplers that this package computes. llama.cpp's go over the whole vocabulary, for each token or at their creation."""

ALONG = 0.05  # seconds that choosing along a draft may take, while other streams wait


class Sampler:
    """Chooses the tokens of one request. Call `prime` before the first choice, and `close` when the request ends.

    constraint: decides which tokens a grammar allows; None without a grammar.
    """

    def __init__(self, model: Model, sampling: Sampling) -> None:
        self._given = model, sampling
        self.num_chosen = 0  # chosen tokens, including one whose choice failed
        self._logprobs: Logprobs | None = None  # of the last token, if the request asks for logprobs
        self._further: list[tuple[int, Logprobs | None]] = []  # later tokens chosen in the same step
        self._prompt: list[Logprobs] = []  # logprobs of the prompt tokens of the last step
        self.constraint: Constraint | None = None
        self._grammar, self._end = sampling.grammar, min(model.ends, default=0)
        self._clock = None if sampling.reasoning is None else ReasoningClock(sampling.reasoning)
        self._most, self._after = sampling.n_probs, sampling.post_sampling_probs
        self._biases = _biases(sampling)
        self._first: list[Repetition] = []  # applied before all chains, so they need no list of candidates
        self._between: list[tuple[Link, Repetition]] = []  # each chain, and the step after it
        self._last: Link | None = None  # the chain that chooses; None: choose the best token
        self._make(model, sampling)
        self._repetitions = [*self._first, *(step for _, step in self._between)]
        asks = self._most is not None and self._after
        self._sorts = sampling.sorts_all
        self._needs_list = bool(self._between) or asks or self._sorts or sampling.typical_p < 1  # needs finite logits

    def _make(self, model: Model, sampling: Sampling) -> None:
        """Create the steps of sampling, in the order of the request's samplers."""
        if sampling.mirostat:
            self._last = chain_of(mirostat(model, sampling))
            return
        names: list[str] = []  # consecutive samplers, which share a chain
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

    def choose(self, logits: np.ndarray, context: llama.llama_context_p, index: int) -> int:
        """Return the next token.

        logits: the logits (vocabulary,), float32, of batch row `index`. They are overwritten.
        """
        self.num_chosen += 1
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
            step.apply(LogitsRow(logits))
        token = self._choose(logits, context, index) if fits else self._end_answer()
        if given is not None and self._most is not None:
            self._logprobs = Logprobs.of_model(given, token, self._most)
        if self._repetitions:
            self._count(np.array([token], np.int32))
        self._go_on([token])
        return token

    def choose_along(self, draft: np.ndarray, rows: np.ndarray, context: llama.llama_context_p, index: int) -> int:
        """Return the next token. Choose further tokens as long as the chosen tokens equal the draft.

        `take_further` returns the tokens after the first one. Choosing stops before a forced token, which needs no logits,
        and after `ALONG` seconds.

        draft: (tokens,), int32.
        rows: the logits before the draft, and the logits after each token of the draft. They are the rows of the batch from
        `index` on.
        """
        until = perf_counter() + ALONG
        first = token = self.choose(rows[0], context, index)
        logprobs = self.take_logprobs()
        for place, drafted in enumerate(draft.tolist(), start=1):
            if token != drafted or self.error or self._forces or perf_counter() > until:
                break
            token = self.choose(rows[place], context, index + place)
            if not self.error:
                self._further.append((token, self.take_logprobs()))
        self._logprobs = logprobs
        return first

    @property
    def _forces(self) -> bool:
        """Whether the next token is forced."""
        is_over = self._clock is not None and self._clock.is_over
        return is_over or (self.constraint is not None and self.constraint.has_forced)

    def score_prompt(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Keep the logprobs of prompt tokens for `take_scored`.

        rows: the model's logits before each of these tokens.
        """
        assert self._most is not None, "a request with prompt logprobs must set n_probs"
        self._prompt = [Logprobs.of_model(row, token, self._most) for row, token in zip(rows, tokens.tolist(), strict=True)]

    def take_scored(self) -> list[Logprobs]:
        """Return the logprobs of the prompt tokens that the last step computed."""
        taken, self._prompt = self._prompt, []
        return taken

    def take_further(self) -> list[tuple[int, Logprobs | None]]:
        """Return the tokens that `choose_along` chose after the token that it returned, each with its logprobs."""
        if not self._further:
            return self._further
        further, self._further = self._further, []
        return further

    def _go_on(self, tokens: Sequence[int]) -> None:
        """Pass tokens to the grammar and to the reasoning clock."""
        if self.constraint is not None:
            self.constraint.accept(*tokens)
        self._watch(tokens)

    def _watch(self, tokens: Sequence[int]) -> None:
        if self._clock is not None:
            for token in tokens:
                self._clock.push(token)

    def _choose(self, logits: np.ndarray, context: llama.llama_context_p, index: int) -> int:
        if self._last is None:
            token = int(logits.argmax())
            self._logprobs = Logprobs.certain(token) if self._most is not None else None
            return token
        if not self._needs_list:
            return llama.llama_sampler_sample(self._last, context, index)
        candidates = TokenList(logits, sort=self._sorts)
        for chain, step in self._between:
            candidates.apply(chain)
            if step.apply(candidates):
                candidates.unsort()
        candidates.apply(self._last)
        token = candidates.chosen
        llama.llama_sampler_accept(self._last, token)
        if self._most is not None:
            self._logprobs = Logprobs.of_samplers(candidates.left, token, self._most)
        return token

    def _end_answer(self) -> int:
        """Return the token that ends the answer.

        The probability of this token is 1, since all other tokens are forbidden.
        """
        self._logprobs = Logprobs.certain(self._end) if self._most is not None else None
        return self._end

    def take_logprobs(self) -> Logprobs | None:
        """Return the logprobs of the last chosen token and forget them; None if the request asks for no logprobs."""
        logprobs, self._logprobs = self._logprobs, None
        return logprobs

    def prime(self, prompt: np.ndarray) -> None:
        """Start an answer. Penalties will also count the last tokens (int32) of the prompt, as in llama-server."""
        self._count(prompt)
        if self._grammar is not None:
            self.constraint = self._grammar.start(fast_forward=self._most is None)

    def take_forced(self) -> list[int]:
        """Return the forced tokens that follow the last chosen token, and count them as chosen."""
        forced: list[int] = []
        while more := self._next_forced():
            forced += more
        if forced:
            self.num_chosen += len(forced)
            self._count(np.array(forced, np.int32))
        return forced

    def _next_forced(self) -> list[int]:
        """Return the tokens that the grammar forces; if there are none, the tokens that must end reasoning now.

        More forced tokens may follow the returned tokens, so call this function until it returns none.
        """
        forced = [] if self.constraint is None else self.constraint.take_forced()
        self._watch(forced)
        if not forced and self._clock is not None and self._clock.is_over:
            forced = list(self._clock.closing)
            self._go_on(forced)
        return forced

    @property
    def error(self) -> str:
        """Why the grammar allowed no token; empty if it allowed one. After an error, the last token is meaningless."""
        return "" if self.constraint is None else self.constraint.error

    def _count(self, tokens: np.ndarray) -> None:
        for step in self._repetitions:
            step.extend(tokens)

    def anew(self) -> Sampler:
        """Close this sampler, and return an equal sampler that has not seen or chosen any token."""
        self.close()
        return Sampler(*self._given)

    def close(self) -> None:
        """Free the chains."""
        chains = [chain for chain, _ in self._between]
        for chain in chains if self._last is None else [*chains, self._last]:
            llama.llama_sampler_free(chain)
        self._between, self._last = [], None


def _spelling(model: Model) -> Callable[[int], bytes]:
    """Return a function that returns the bytes of a token, also of a control token."""
    return lambda token: model.piece(token) or model.text_of(token).encode()


def _biases(sampling: Sampling) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tokens with a logit bias, and the biases; None if there are none."""
    biases = sampling.logit_bias | dict.fromkeys(sampling.banned, -np.inf)
    if not biases:
        return None
    return np.array(list(biases), np.intp), np.array(list(biases.values()), np.float32)
