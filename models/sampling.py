"""Chooses the next token: with a sampler chain of llama.cpp for each request that does not simply take the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

import llama_cpp
import numpy as np

from .model import Model

MIN_KEEP = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of one request; the defaults are llama-server's. temperature 0: the best token. seed -1: random."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned: frozenset[int] = frozenset()  # tokens that are never chosen: the ends, with `ignore_eos`

    def varied(self, choice: int) -> Self:
        """Return the parameters of one of several answers to a prompt: a fixed seed would make all of them equal."""
        return self if self.seed < 0 or not choice else replace(self, seed=self.seed + choice)

    @property
    def penalises(self) -> bool:
        return self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def greedy(self) -> bool:
        """Whether the answer is simply the best token, so that no chain is needed."""
        return self.temperature <= 0 and not self.logit_bias and not self.penalises


GREEDY = Sampling(temperature=0.0)


class Sampler:
    """Chooses the tokens of one request. Call `close` when the request ends."""

    def __init__(self, model: Model, sampling: Sampling) -> None:
        self._banned = np.array(sorted(sampling.banned), np.intp)
        self._window = sampling.repeat_last_n if sampling.penalises else 0
        self._chain: llama_cpp.llama_sampler_p | None = None
        if not sampling.greedy:
            self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            for link in self._links(model, sampling):
                llama_cpp.llama_sampler_chain_add(self._chain, link)

    def choose(self, logits: np.ndarray, context: llama_cpp.llama_context_p, index: int) -> int:
        """Return the next token. logits: (vocabulary,), float32, overwritten; they are those of batch row `index`."""
        if self._chain is not None:
            return llama_cpp.llama_sampler_sample(self._chain, context, index)  # counts it for the penalties, too
        if len(self._banned):
            logits[self._banned] = -np.inf
        return int(logits.argmax())

    def prime(self, prompt: np.ndarray) -> None:
        """Count a prompt's last tokens (int32) for the penalties, as llama-server does."""
        if self._chain is not None and self._window:
            for token in prompt[-self._window :].tolist():
                llama_cpp.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain."""
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None

    def _links(self, model: Model, sampling: Sampling) -> list[llama_cpp.llama_sampler_p]:
        links = []
        biases = sampling.logit_bias | dict.fromkeys(sampling.banned, -math.inf)
        if biases:
            bias = (llama_cpp.llama_logit_bias * len(biases))(*biases.items())
            links.append(llama_cpp.llama_sampler_init_logit_bias(model.num_vocab, len(bias), bias))
        if sampling.penalises:
            links.append(
                llama_cpp.llama_sampler_init_penalties(
                    model.num_vocab,
                    sampling.repeat_last_n,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature <= 0:
            return [*links, llama_cpp.llama_sampler_init_greedy()]
        if sampling.top_k > 0:
            links.append(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            links.append(llama_cpp.llama_sampler_init_top_p(sampling.top_p, MIN_KEEP))
        if sampling.min_p > 0:
            links.append(llama_cpp.llama_sampler_init_min_p(sampling.min_p, MIN_KEEP))
        links.append(llama_cpp.llama_sampler_init_temp(sampling.temperature))
        seed = llama_cpp.LLAMA_DEFAULT_SEED if sampling.seed < 0 else sampling.seed & 0xFFFFFFFF
        return [*links, llama_cpp.llama_sampler_init_dist(seed)]
