"""Conversations as tokens, with the places of their answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..vocabulary import IM_END
from .conversation import Conversation
from .encoder import Encoder
from .layout import Source, pieces

MAX_TOKENS = 4096
"""The longest conversation; later turns of a longer one are left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's tokens, end token included, are `start` to `stop`. sort: what kind of question it answers."""

    start: int
    stop: int
    sort: str


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """tokens: uint16, whole turns only."""

    tokens: np.ndarray
    answers: tuple[Answer, ...]

    def is_answer(self) -> np.ndarray:
        """(tokens,) bool."""
        marks = np.zeros(len(self.tokens), bool)
        for answer in self.answers:
            marks[answer.start : answer.stop] = True
        return marks


def encode(conversation: Conversation, encoder: Encoder) -> Sample | None:
    """The sample of a conversation; None where not even its first turn fits."""
    end = encoder.special(IM_END)
    tokens: list[int] = []
    answers: list[Answer] = []
    for piece in pieces(conversation):
        if piece.source is Source.TEMPLATE:
            tokens += encoder.encode_template(piece.text)
            continue
        start = len(tokens)
        tokens += encoder.encode(piece.text)
        if piece.source is Source.ANSWER:
            if len(tokens) >= MAX_TOKENS:
                break
            answers.append(Answer(start, len(tokens) + 1, piece.sort))
    if not answers:
        return None
    stop = answers[-1].stop
    return Sample(np.array([*tokens, end][:stop], np.uint16), tuple(answers))
