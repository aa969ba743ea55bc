"""A pool of KV cells in this process, filled and emptied by hand through the server's own runner."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from ...models.context import Context
from ...models.runner import Runner
from ...models.sampling import Sampler, Sampling
from ...slots.node import Blob
from ...slots.plan import Drop, Plan, Restore, Save, Share, Span, Trim

IDLE_RUN = 1024
"""Tokens of each idle sequence."""
MOVED, RUNNING, IDLE = 0, 1, 32
"""Sequences: the one that saved KV comes back to, the first of those that run, the first idle one."""
MOST_STREAMS = IDLE - RUNNING


class Pool:
    """Its methods return the seconds that they took. Token ids are arbitrary; sampling is greedy."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.runner = Runner(context)
        self._samplers = dict.fromkeys(range(IDLE), Sampler(context.model, Sampling(temperature=0)))
        self.num_idle = 0
        self._idle_blob: Blob | None = None
        self._tokens = np.random.default_rng(0).integers(0, min(4000, context.model.num_vocab), 1 << 16, np.int32)

    def warm_up(self) -> None:
        """Run a first batch of each size: it pays for buffers and graphs."""
        self.runner.warm_up()
        self.prefill(RUNNING, 2 * self.context.batch)
        for at in range(4):
            self.step([RUNNING], 2 * self.context.batch + at)
        self.drop(RUNNING)

    def prefill(self, sequence: int, length: int) -> float:
        """Compute `length` tokens into an empty sequence, batch by batch."""
        began, size = perf_counter(), self.context.batch
        for start in range(0, length, size):
            stop = min(start + size, length)
            span = Span(sequence, sequence, start, self._tokens[start:stop], logits=stop == length)
            self.runner.run(Plan((), (span,), num_spare=self._num_spare - stop), self._samplers)
        return perf_counter() - began

    def step(self, sequences: Sequence[int], position: int) -> float:
        """Decode one token of each sequence at `position`."""
        token = self._tokens[position : position + 1]
        spans = tuple(Span(sequence, sequence, position, token, logits=True) for sequence in sequences)
        began = perf_counter()
        self.runner.run(Plan((), spans, num_spare=self._num_spare - position - len(sequences)), self._samplers)
        return perf_counter() - began

    def save(self, sequence: int, length: int) -> tuple[float, Blob]:
        """Copy a sequence's first tokens to host memory, as the server does. Return the seconds and the copy."""
        blob = Blob(0, length)
        began = perf_counter()
        self.runner.apply(Save(sequence, blob))
        return perf_counter() - began, blob

    def restore(self, blob: Blob, sequence: int) -> float:
        """Restore `blob` into new cells of an empty sequence."""
        began = perf_counter()
        self.runner.apply(Restore(blob, sequence, blob.start, blob.stop))
        return perf_counter() - began

    def share(self, source: int, targets: Sequence[int], length: int) -> None:
        """Let `targets` share the first tokens of `source`."""
        for target in targets:
            self.runner.apply(Share(source, target, 0, length))

    def trim(self, sequence: int, start: int, stop: int) -> None:
        """Remove the tokens of a sequence from `start` to `stop`."""
        self.runner.apply(Trim(sequence, start, stop))

    def drop(self, *sequences: int) -> None:
        """Empty sequences."""
        for sequence in sequences:
            self.runner.apply(Drop(sequence))

    def keep_idle(self, num_cells: int) -> None:
        """Fill the pool up to `num_cells` idle cells, with copies of one run: the content does not change the cost."""
        if self._idle_blob is None and num_cells:
            self.prefill(RUNNING, IDLE_RUN)
            _, self._idle_blob = self.save(RUNNING, IDLE_RUN)
            self.drop(RUNNING)
        while self._idle_blob and self.num_idle < num_cells:
            self.restore(self._idle_blob, IDLE + self.num_idle // IDLE_RUN)
            self.num_idle += IDLE_RUN

    @property
    def _num_spare(self) -> int:
        """Cells that no idle sequence holds."""
        return self.context.num_cells - self.num_idle
