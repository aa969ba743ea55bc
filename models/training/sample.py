"""Conversations as tokens, with the positions of their answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..vocabulary import IM_END
from .encoder import Encoder
from .layout import Source, pieces
from .world.conversation import Conversation

MAX_TOKENS = 4096
"""The longest conversation; later turns of a longer one are left out."""

HEAD = 3
"""First tokens of an answer. They decide whether the documents hold the answer, and which sentence is copied."""

FOUND = 12
"""First tokens of an answer in freer wording at which its sentence is looked for: `It was built` may begin several ones."""

VERB = " is"
"""The word between the subject of a sentence and the fact that it tells."""

NOWHERE = 1
"""The number of a conversation's first token, the place to look at for a question that no document answers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Its tokens, end token included, are `start` to `stop`.

    sort: the kind of question. told: the number of its tokens before it tells anything new. rest: its second sentence, of
    another document than the first one, if there is one.
    """

    start: int
    stop: int
    sort: str
    told: int = 1
    rest: Answer | None = None

    def sentences(self) -> tuple[Answer, ...]:
        """Return an answer for each sentence; the first one ends with a token of the second one."""
        return (replace(self, stop=self.rest.start + 1, rest=None), self.rest) if self.rest else (self,)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A tokenised conversation. tokens: uint16, whole turns only."""

    tokens: np.ndarray
    answers: tuple[Answer, ...]

    def is_answer(self) -> np.ndarray:
        """Return (tokens,) bool: whether a token belongs to an answer."""
        marks = np.zeros(len(self.tokens), bool)
        for answer in self.answers:
            marks[answer.start : answer.stop] = True
        return marks

    def evidence(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where a reader has to look: (tokens,) uint8 twice.

        The first array numbers the sentences that answers repeat, from the verb on: the words before it do not tell all that
        the sentence is about. The second is set where the first tokens of an answer are predicted: the number of the
        answer's sentence, or NOWHERE for a question that no document answers. Otherwise both are 0.
        """
        sentences, sought = np.zeros(len(self.tokens), np.uint8), np.zeros(len(self.tokens), np.uint8)
        sentences[0], last = NOWHERE, NOWHERE
        for answer in (sentence for one in self.answers for sentence in one.sentences()):
            head = min(FOUND, answer.stop - answer.start) if answer.sort == "free" else HEAD
            writing = slice(answer.start - 1, answer.start - 1 + head)
            if answer.sort == "unknown":
                sought[writing] = NOWHERE
                continue
            # Without the first token, which has a leading space in a document, without the last token, which may hold
            # the end of its line, and without the end token after it.
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
    """Return the sample of a conversation; None if its first turn does not fit."""
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
            first, rest = len(encoder.encode(piece.first)), None
            if first:
                rest = Answer(start + first, len(tokens) + 1, piece.sort, _told(ids[first:], verb))
            told = 1 if piece.sort == "free" else _told(ids, verb)
            answers.append(Answer(start, len(tokens) + 1, piece.sort, told=told, rest=rest))
    if not answers:
        return None
    stop = answers[-1].stop
    return Sample(np.array([*tokens, end][:stop], np.uint16), tuple(answers))


def _told(ids: list[int], verb: int) -> int:
    return ids.index(verb) if verb in ids[1:-1] else 1


def _places(tokens: np.ndarray, text: np.ndarray) -> list[int]:
    """Return the positions of `text` in `tokens`."""
    if not len(text):
        return []
    starts = np.flatnonzero(tokens[: len(tokens) - len(text) + 1] == text[0])
    return [int(at) for at in starts if np.array_equal(tokens[at : at + len(text)], text)]
