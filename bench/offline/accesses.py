"""The accesses of a cache over time, as prompts of blocks: the traces of the eviction simulator.

A block stands for `BLOCK` tokens of a prompt; in Mooncake's trace for 512 tokens, and its name includes the blocks before.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..trace import mtrag

BLOCK = 16  # tokens
SYSTEM = 6  # blocks of the system prompt, with which every prompt begins
QUESTION = 2  # blocks of a question, unique to its prompt
ANSWER = 6  # blocks of an answer in the history
WORDS_TO_TOKENS = 1.3


@dataclass(frozen=True, slots=True)
class Accesses:
    """A trace: each prompt's blocks (int32) and the ends of its documents. tokens: of one block."""

    name: str
    prompts: Sequence[tuple[np.ndarray, tuple[int, ...]]]
    tokens: int = BLOCK

    @property
    def footprint(self) -> int:
        """The blocks that an unlimited cache would hold: the number of different prefixes."""
        return len({prefix for blocks, _ in self.prompts for prefix in prefixes(blocks)})


def prefixes(blocks: np.ndarray) -> list[Hashable]:
    """Return a name for each prefix of a prompt; equal prefixes have equal names."""
    names, name = [], 0
    for block in blocks.tolist():
        name = hash((name, block))
        names.append(name)
    return names


def skewed(requests: int = 4000, documents: int = 1000, hot: float = 0.03, share: float = 0.6, k: int = 2) -> Accesses:
    """Draw from RAGCache's skew (section 3.2): 3 % of the documents get 60 % of the retrievals; lengths vary widely."""
    rng = random.Random(0)
    lengths = [max(4, round(rng.lognormvariate(4.5, 0.8))) for _ in range(documents)]
    popular = round(documents * hot)
    blocks = _Blocks()

    def draw() -> int:
        return rng.randrange(popular) if rng.random() < share else rng.randrange(popular, documents)

    prompts = []
    for number in range(requests):
        chosen: list[int] = []
        while len(chosen) < k:
            if (document := draw()) not in chosen:
                chosen.append(document)
        prompts.append(blocks.prompt([(f"d{one}", lengths[one]) for one in chosen], f"q{number}"))
    return Accesses("skewed", prompts)


def conversations(folder: Path) -> Accesses:
    """Return MT-RAG: each turn's prompt holds the turns before it, with the documents of a real retriever."""
    blocks = _Blocks()
    histories: dict[str, list[tuple[str, int]]] = {}
    prompts = []
    for query in mtrag(folder, active=8):
        history = histories.setdefault(query.session, [])
        history += [(text, _num_blocks(text)) for _, text in query.documents]
        asked = f"{query.session} {query.turn}"
        prompts.append(blocks.prompt(history, asked))
        history += [(asked, QUESTION), (f"{asked} answered", ANSWER)]
    return Accesses("MT-RAG", prompts)


def mooncake(folder: Path, name: str = "conversation") -> Accesses:
    """Return an hour of production requests, 512 tokens a block."""
    with gzip.open(folder / "mooncake" / f"{name}_trace.jsonl.gz", "rt") as lines:
        rows = [np.array(json.loads(line)["hash_ids"], np.int32) for line in lines]
    return Accesses("Mooncake", [(row, tuple(range(1, len(row)))) for row in rows if len(row)], tokens=512)


class _Blocks:
    """Numbers the blocks of texts; the same text has the same numbers."""

    def __init__(self) -> None:
        self._known: dict[str, np.ndarray] = {}
        self._next = 0

    def prompt(self, parts: Sequence[tuple[str, int]], question: str) -> tuple[np.ndarray, tuple[int, ...]]:
        pieces = [self.of("system", SYSTEM), *(self.of(*part) for part in parts), self.of(question, QUESTION)]
        ends = np.cumsum([len(piece) for piece in pieces])
        return np.concatenate(pieces), tuple(ends[:-1].tolist())

    def of(self, text: str, size: int) -> np.ndarray:
        if text not in self._known:
            self._known[text] = np.arange(self._next, self._next + size, dtype=np.int32)
            self._next += size
        return self._known[text]


def _num_blocks(text: str) -> int:
    return max(1, round(len(text.split()) * WORDS_TO_TOKENS / BLOCK))
