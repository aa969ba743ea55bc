"""Conversations as tokens, with the places of their answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..vocabulary import IM_END
from .encoder import Encoder
from .layout import Source, pieces
from .world.conversation import Conversation

MAX_TOKENS = 4096
"""The longest conversation; later turns of a longer one are left out."""

HEAD = 3
"""Tokens that an answer begins with: by them it is settled whether the documents say it, and what is copied."""

VERB = " is"
"""What stands between what a sentence is about and what it tells."""

NOWHERE = 1
"""Where to look for what no document says: the number of a conversation's first token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's tokens, end token included, are `start` to `stop`. sort: what kind of question it answers.

    told: how many of them stand before it tells anything new.
    """

    start: int
    stop: int
    sort: str
    told: int = 1


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

    def evidence(self) -> tuple[np.ndarray, np.ndarray]:
        """Where a reader has to look: (tokens,) uint8 twice.

        The first numbers sentences that answers repeat, from the verb on: before that they have not said all that they are
        about. The second stands where the first tokens of an answer are written, and is the number of its sentence, NOWHERE
        for questions that no document answers. 0 is the rest.
        """
        sentences, sought = np.zeros(len(self.tokens), np.uint8), np.zeros(len(self.tokens), np.uint8)
        sentences[0], last = NOWHERE, NOWHERE
        for answer in self.answers:
            writing = slice(answer.start - 1, answer.start - 1 + HEAD)
            if answer.sort == "unknown":
                sought[writing] = NOWHERE
                continue
            # Without the first token, which in a document has a space in front, and the last, which may hold the line's
            # end there; behind it comes the end token.
            text = self.tokens[answer.start + 1 : answer.stop - 2]
            places = _places(self.tokens[: answer.start], text)
            if not places or last == 255:
                continue
            verb = answer.told - 1
            number = sentences[places[0] + verb]
            if not number:
                number = last = last + 1
            for place in places:
                sentences[place + verb : place + len(text)] = number
            sought[writing] = number
        return sentences, sought


def encode(conversation: Conversation, encoder: Encoder) -> Sample | None:
    """The sample of a conversation; None where not even its first turn fits."""
    end, verb = encoder.special(IM_END), encoder.encode(VERB)[0]
    tokens: list[int] = []
    answers: list[Answer] = []
    for piece in pieces(conversation):
        if piece.source is Source.TEMPLATE:
            tokens += encoder.encode_template(piece.text)
            continue
        start = len(tokens)
        ids = encoder.encode(piece.text)
        tokens += ids
        if piece.source is Source.ANSWER:
            if len(tokens) >= MAX_TOKENS:
                break
            answers.append(Answer(start, len(tokens) + 1, piece.sort, ids.index(verb) if verb in ids[1:-1] else 1))
    if not answers:
        return None
    stop = answers[-1].stop
    return Sample(np.array([*tokens, end][:stop], np.uint16), tuple(answers))


def _places(tokens: np.ndarray, text: np.ndarray) -> list[int]:
    """Where `text` stands in `tokens`."""
    if not len(text):
        return []
    starts = np.flatnonzero(tokens[: len(tokens) - len(text) + 1] == text[0])
    return [int(at) for at in starts if np.array_equal(tokens[at : at + len(text)], text)]
