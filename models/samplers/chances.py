"""The probabilities of a token and of the most probable ones at its place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEAST = -9999.0  # the logarithm of no probability at all, which JSON cannot write; OpenAI's value


@dataclass(frozen=True, slots=True, eq=False)
class Chances:
    """Natural logarithms of probabilities. tokens (int32), logprobs (float32): the most probable ones, best first."""

    token: int
    logprob: float
    tokens: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def of_model(cls, row: np.ndarray, token: int, most: int) -> Chances:
        """Return the chances that the model gives. row: its logits, (vocabulary,), float32."""
        first = max(len(row) - most, 0)
        tokens = np.argpartition(row, first)[first:] if 0 < first < len(row) else np.arange(first, len(row))
        tokens = tokens[np.lexsort((tokens, -row[tokens]))].astype(np.int32)
        best = row.max()
        total = best + np.log(np.exp(row - best).sum(dtype=np.float64))
        logprobs = np.maximum(row[tokens] - total, LEAST).astype(np.float32)
        return cls(token, float(np.float32(max(row[token] - total, LEAST))), tokens, logprobs)

    @classmethod
    def of_samplers(cls, left: np.ndarray, token: int, most: int) -> Chances:
        """Return the chances that the samplers left. left: llama_token_data of the tokens that could be chosen."""
        possible = left[left["p"] > 0]
        best = possible[np.argsort(-possible["p"], kind="stable")[:most]]
        own = left["p"][left["id"] == token]
        logprob = float(np.log(own[0])) if len(own) and own[0] > 0 else LEAST
        return cls(token, logprob, best["id"].copy(), np.log(best["p"]))

    @classmethod
    def certain(cls, token: int) -> Chances:
        """Return the chances where no other token could be chosen."""
        return cls(token, 0.0, np.array([token], np.int32), np.zeros(1, np.float32))
