"""The documents of one turn, read in many ways: jointly, alone, behind other text, or with some tokens computed again.

Prompts are computed by hand, as the server does it: see `slots/separate.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...models.context import Context
from ...models.model import Model
from ...models.rotation import NUMBERS, Rotation
from ...models.runner import Runner, data_of
from ...models.sampling import Sampler
from ...models.sampling_params import GREEDY
from ...slots.plan import Drop, HostCopy, Operation, Plan, Restore, Save, Share, Span, Trim
from ..report import BenchError

MAIN, FRONT, OTHER, ALONE, EXTRA = 0, 1, 2, 3, 4  # sequences; further ones follow
MOST_EXTRA = 200  # extra sequences of one batch
ROWS = 32  # of logits, in one batch


@dataclass(frozen=True, slots=True)
class Turn:
    """A question as tokens (int32). prefix: up to the first document. tail: behind the last one. answer: a human's."""

    name: str
    prefix: np.ndarray
    documents: tuple[np.ndarray, ...]
    tail: np.ndarray
    answer: np.ndarray

    @property
    def num_tokens(self) -> int:
        return sum(map(len, (self.prefix, *self.documents, self.tail, self.answer)))


@dataclass(frozen=True, slots=True)
class Found:
    """What a way comes to. likelihoods: logarithms, one for each token of the answer. choices: the most probable tokens.

    right: how many of these are the answer's. computed: the share of the prompt that a request computes although each
    document was read before.
    """

    likelihoods: list[float]
    choices: list[int]
    right: int
    computed: float


class Recorder(Sampler):
    """Notes logits instead of choosing. expected: the tokens (int32) that follow, one for each row of logits."""

    def __init__(self, model: Model, expected: np.ndarray) -> None:
        super().__init__(model, GREEDY)
        self._expected = iter(expected.tolist())
        self.likelihoods: list[float] = []
        self.choices: list[int] = []

    def choose(self, logits: np.ndarray, context: object, index: int) -> int:
        token, top = next(self._expected), float(logits.max())
        self.likelihoods.append(float(logits[token]) - top - float(np.log(np.exp(logits - top).sum())))
        self.choices.append(int(logits.argmax()))
        return token


class Reader:
    """Computes parts of prompts. Raises BenchError for a model whose KV cannot be moved."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model, self._batch, self._runner = model, context.batch, Runner(context)
        self._runner.warm_up()
        rotation = self._runner.states.rotation
        if not isinstance(rotation, Rotation):
            raise BenchError(f"the KV of {model.path.name} cannot be moved: {rotation}")
        self._rotation = rotation

    def apply(self, *operations: Operation) -> None:
        self._runner.run(Plan(operations))

    def compute(self, sequence: int, start: int, tokens: np.ndarray) -> None:
        self._run([Span(0, sequence, start, tokens, logits=False)])

    def save(self, sequence: int, start: int, stop: int) -> HostCopy:
        copy = HostCopy(start, stop)
        self.apply(Save(sequence, copy))
        return copy

    def read(self, front: int, start: int, document: np.ndarray) -> HostCopy:
        """Return a copy of a document's KV behind the first tokens of a sequence."""
        self.apply(Share(front, ALONE, 0, start))
        self.compute(ALONE, start, document)
        copy = self.save(ALONE, start, start + len(document))
        self.apply(Drop(ALONE))
        return copy

    def compute_again(self, stretches: Sequence[tuple[int, int]], text: np.ndarray) -> None:
        """Compute stretches of the main sequence again, in one batch. None sees what the batch makes of another one.

        llama.cpp takes a token only behind the last one of its sequence, so each stretch has a sequence that ends in front.
        """
        for first in range(0, len(stretches), MOST_EXTRA):
            extra = list(enumerate(stretches[first : first + MOST_EXTRA], EXTRA))
            self.apply(*(Share(MAIN, sequence, 0, start) for sequence, (start, _) in extra))
            self._run([Span(0, sequence, start, text[start:stop], logits=False) for sequence, (start, stop) in extra])
            for sequence, (start, stop) in extra:
                self.apply(Trim(MAIN, start, stop), Share(sequence, MAIN, start, stop), Drop(sequence))

    def _run(self, spans: Sequence[Span]) -> None:
        """Compute spans in one batch, or in several where one does not hold them."""
        room, taken = self._batch, list[Span]()
        for span in spans:
            for at in range(0, len(span.tokens), self._batch):
                part = Span(0, span.sequence, span.start + at, span.tokens[at : at + self._batch], logits=False)
                if len(part.tokens) > room:
                    self._runner.run(Plan((), tuple(taken)))
                    room, taken = self._batch, []
                taken.append(part)
                room -= len(part.tokens)
        if taken:
            self._runner.run(Plan((), tuple(taken)))

    def answered(self, start: int, tail: np.ndarray, answer: np.ndarray) -> Recorder:
        """Compute the end of a prompt behind `start`, and then the answer. Ends the main sequence."""
        self.compute(MAIN, start, tail[:-1])
        start += len(tail) - 1
        given, recorder = np.concatenate([tail[-1:], answer[:-1]]), Recorder(self._model, answer)
        for first in range(0, len(given), ROWS):
            places = range(first, min(first + ROWS, len(given)))
            spans = tuple(Span(0, MAIN, start + at, given[at : at + 1], logits=True) for at in places)
            self._runner.run(Plan((), spans), {0: recorder})
        self.apply(Drop(MAIN))
        recorder.close()
        return recorder

    def tensors(self, copy: HostCopy, start: int) -> list[np.ndarray]:
        """Return a copy's KV at positions from `start` on: keys (tokens, width) of each layer, then values of each."""
        run = self._rotation.moved(data_of(copy), start - copy.start)
        order = np.argsort(self._rotation.positions(run))
        return [
            numbers.view(NUMBERS[kind]).reshape(len(copy), -1)[order].astype(np.float32)
            for kind, numbers in self._rotation.tensors(run)
        ]

    def scaled(self, copy: HostCopy, factor: float) -> HostCopy:
        """Return a copy with longer keys (APE, Yang et al. 2025: a temperature below 1)."""
        run = data_of(copy).copy()
        for kind, keys in list(self._rotation.tensors(run))[: len(self._rotation.angles)]:
            numbers = keys.view(NUMBERS[kind])
            numbers[...] = numbers.astype(np.float32) * factor
        return HostCopy(copy.start, copy.stop, run)


class Case:
    """One turn while it is looked at. Documents are read once for all ways that need them read so."""

    def __init__(self, reader: Reader, turn: Turn) -> None:
        self._reader, self._turn = reader, turn
        self._text = np.concatenate([turn.prefix, *turn.documents])
        stops = np.cumsum([len(part) for part in (turn.prefix, *turn.documents)]).tolist()
        self._places = list(pairwise(stops))
        reader.compute(FRONT, 0, turn.prefix)

    def close(self) -> None:
        self._reader.apply(Drop(FRONT))

    # ---- Copies of the documents' KV.

    @cached_property
    def joint(self) -> list[HostCopy]:
        start = len(self._turn.prefix)
        self._reader.apply(Share(FRONT, MAIN, 0, start))
        self._reader.compute(MAIN, start, self._text[start:])
        copies = [self._reader.save(MAIN, *place) for place in self._places]
        self._reader.apply(Drop(MAIN))
        return copies

    @cached_property
    def alone(self) -> list[HostCopy]:
        return self._read(self._turn.prefix, self._turn.documents)

    @cached_property
    def behind_first(self) -> list[HostCopy]:
        first, *others = self._turn.documents
        return [self.joint[0], *self._read(np.concatenate([self._turn.prefix, first]), others)]

    @cached_property
    def pairs(self) -> list[HostCopy]:
        documents, copies = self._turn.documents, self.joint[:2]
        for at in range(2, len(documents), 2):
            front = np.concatenate([self._turn.prefix, documents[at]])
            copies += [self.alone[at], *self._read(front, documents[at + 1 : at + 2])]
        return copies

    def scaled(self, factor: float, copies: Sequence[HostCopy]) -> list[HostCopy]:
        return [self._reader.scaled(copy, factor) for copy in copies]

    def _read(self, front: np.ndarray, documents: Iterable[np.ndarray]) -> list[HostCopy]:
        """Return copies of documents that are read behind a text that begins with the prefix."""
        known = len(self._turn.prefix)
        self._reader.apply(Share(FRONT, OTHER, 0, known))
        self._reader.compute(OTHER, known, front[known:])
        copies = [self._reader.read(OTHER, len(front), document) for document in documents]
        self._reader.apply(Drop(OTHER))
        return copies

    # ---- Tokens to compute again. The first document is exact as it is.

    def most(self, scores: np.ndarray, share: float) -> np.ndarray:
        """Return the positions of that share of the documents' tokens, those with the highest scores."""
        first = self._places[1][0]
        count = round(share * (len(self._text) - len(self._turn.prefix)))
        return np.sort(first + np.argsort(-scores[first:], kind="stable")[:count])

    def changed(self) -> np.ndarray:
        """Score tokens by how much their KV differs from the joint prompt's, which no request knows."""
        scores = np.zeros(len(self._text))
        for (start, stop), *copies in zip(self._places, self.alone, self.joint, strict=True):
            for ours, joint in zip(*(self._reader.tensors(copy, start) for copy in copies), strict=True):
                scores[start:stop] += np.square(ours - joint).sum(axis=1) / np.square(joint).sum(axis=1).mean()
        return scores

    def heads(self) -> np.ndarray:
        """Score the first tokens of each document (EPIC, Hu et al. 2024)."""
        return np.concatenate([-np.arange(len(part)) for part in (self._turn.prefix, *self._turn.documents)])

    # ---- Answers.

    def ordered(self, number: int) -> Found:
        """Answer a joint prompt whose documents stand in a random order."""
        documents = list(self._turn.documents)
        random.Random(f"{self._turn.name} {number}").shuffle(documents)
        start = len(self._turn.prefix)
        self._reader.apply(Share(FRONT, MAIN, 0, start))
        self._reader.compute(MAIN, start, np.concatenate(documents))
        return self._answered(len(self._text), len(self._text) - start)

    def placed(self, copies: Sequence[HostCopy], *, again: np.ndarray | None = None, computed: int = 0) -> Found:
        """Answer with documents moved to their places. again: positions to compute anew there, document after document."""
        stop = self._place(copies)
        for start, end in self._places if again is not None else ():
            assert again is not None
            inside = again[(again >= start) & (again < end)]
            self._reader.compute_again(_stretches(inside), self._text)
            computed += len(inside)
        return self._answered(stop, computed)

    def first_two_joint(self) -> Found:
        return self.placed([*self.joint[:2], *self.alone[2:]], computed=len(self.joint[1]))

    def last_joint(self) -> Found:
        """Compute the last document again, behind the others as they were read alone."""
        return self.placed(self.alone, again=np.arange(*self._places[-1]))

    def _place(self, copies: Sequence[HostCopy]) -> int:
        at = len(self._turn.prefix)
        self._reader.apply(Share(FRONT, MAIN, 0, at))
        for copy in copies:
            self._reader.apply(Restore(copy, MAIN, at, at + len(copy), distance=at - copy.start))
            at += len(copy)
        return at

    def _answered(self, stop: int, computed: int) -> Found:
        recorder = self._reader.answered(stop, self._turn.tail, self._turn.answer)
        right = int(np.sum(self._turn.answer == recorder.choices))
        return Found(recorder.likelihoods, recorder.choices, right, computed / (stop + len(self._turn.tail)))


def _stretches(positions: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs [start, stop) of sorted positions."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) > 1)
    starts, stops = positions[[0, *(breaks + 1)]], positions[[*breaks, -1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


Way = Callable[[Case], Found]


def again(scores: Callable[[Case], np.ndarray], share: float) -> Way:
    """Return a way that moves documents read alone, and computes the share of their tokens with the highest scores again."""
    return lambda case: case.placed(case.alone, again=case.most(scores(case), share))


WAYS: dict[str, Way] = {
    "joint": lambda case: case.placed(case.joint),
    "no documents": lambda case: case.placed([]),
    "random order": lambda case: case.ordered(1),
    "another random order": lambda case: case.ordered(2),
    "separate": lambda case: case.placed(case.alone),
    "separate, 15 % that differ most again": again(Case.changed, 0.15),
    "separate, 15 % heads again": again(Case.heads, 0.15),
    "separate, the last one again": Case.last_joint,
    "separate, longer keys": lambda case: case.placed(case.scaled(1.05, case.alone)),
    "joint, longer keys": lambda case: case.placed(case.scaled(1.05, case.joint)),
    "the first two joint": Case.first_two_joint,
    "pairs joint": lambda case: case.placed(case.pairs),
    "each behind the first": lambda case: case.placed(case.behind_first),
}
