"""Exact match on held-out conversations during training: whether each token of the last answer is the likeliest one.

Given the right answer as history this equals greedy decoding, for the price of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from .encoder import Encoder
from .network import Network
from .sample import Sample, encode
from .world.author import AnyAuthor
from .world.recipe import Recipe
from .world.words import Words

SEED = 987_654_321  # far from those of the workers
TOKENS = 32_768  # a pass


def samples_of(recipes: Mapping[str, Recipe], count: int, encoder: Encoder) -> dict[str, list[Sample]]:
    """Return `count` samples of each recipe. Only chance repeats a name of another sample."""
    words, sets = Words.load(), {}
    for number, (name, recipe) in enumerate(recipes.items()):
        author = AnyAuthor(Random(SEED + number), words, frozenset(words["reserved"]))
        samples: list[Sample] = []
        while len(samples) < count:
            sample = encode(author.write(recipe), encoder)
            if sample is not None:
                samples.append(sample)
        sets[name] = samples
    return sets


@torch.no_grad()
def exact_match(network: Network, samples: Sequence[Sample], device: str, dtype: torch.dtype) -> float:
    """Return the share of samples whose last answer is right to the last token."""
    samples = sorted(samples, key=lambda sample: len(sample.tokens))
    right = start = 0
    while start < len(samples):
        rows = 1
        while start + rows < len(samples) and len(samples[start + rows].tokens) * (rows + 1) <= TOKENS:
            rows += 1
        right += _right(network, samples[start : start + rows], device, dtype)
        start += rows
    return right / len(samples)


def _right(network: Network, samples: Sequence[Sample], device: str, dtype: torch.dtype) -> int:
    longest = max(len(sample.tokens) for sample in samples)
    tokens = np.zeros((len(samples), longest), np.int64)
    counts = np.zeros((len(samples), longest), bool)
    for row, sample in enumerate(samples):
        last = sample.answers[-1]
        tokens[row, : len(sample.tokens)] = sample.tokens
        counts[row, last.start : last.stop] = True
    given = torch.from_numpy(tokens).to(device)
    x = network.hidden(given[:, :-1], dtype, plain=True)
    _, likeliest = network.score(x, given[:, 1:].reshape(-1), plain=True)
    wrong = ~likeliest.view(len(samples), -1) & torch.from_numpy(counts[:, 1:]).to(device)
    return int((~wrong.any(1)).sum())
