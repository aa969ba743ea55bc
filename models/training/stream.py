"""Samples without end: worker processes write them, a pool keeps them, batches are drawn without ever waiting long."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from random import Random

import numpy as np

from .encoder import Encoder
from .sample import encode
from .world.conversation import Author
from .world.curriculum import CURRICULA
from .world.words import Words

WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Lengths of rows; where the tokens of a batch are a multiple of each, all batches are of one size."""

CHUNK = 48  # samples that a worker sends at a time
WAITING = 40  # batches' worth of samples in the pool, at which workers have to wait


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All (rows, width + 1). tokens: int32. marks: uint8, 0 padding, 1 text, 2 answer. The others: `Sample.evidence`."""

    tokens: np.ndarray
    marks: np.ndarray
    sentences: np.ndarray
    sought: np.ndarray


class Pool:
    """Samples by length: those that have not been drawn yet, and the last ones that have."""

    def __init__(self, tokens: int, seed: int) -> None:
        if tokens < max(WIDTHS):
            raise ValueError(f"{tokens} tokens a batch: expected at least {max(WIDTHS)}")
        self._tokens, self._rng = tokens, Random(seed)
        self._fresh: dict[int, deque[np.ndarray]] = {width: deque() for width in WIDTHS}
        self._used = {width: deque(maxlen=8 * tokens // width) for width in WIDTHS}
        self.waiting = 0
        """Tokens not drawn yet."""
        self.drawn = self.reused = 0
        """Samples drawn, and those of them that had been drawn before."""

    def add(self, sample: np.ndarray) -> None:
        """sample: (4, tokens) int16, a batch's fields one after the other."""
        length = sample.shape[1]
        width = next(width for width in WIDTHS if width >= length - 1)
        self._fresh[width].append(sample)
        self.waiting += length

    def draw(self) -> Batch | None:
        """A batch of rows of one width; None while there is too little to draw from."""
        ready = {width: len(fresh) * width / self._tokens for width, fresh in self._fresh.items()}
        width = max(ready, key=lambda width: ready[width])
        if ready[width] < 1:
            # Used ones make up for those that are missing; any width for which there are many.
            usable = [w for w in WIDTHS if (len(self._used[w]) + len(self._fresh[w])) * w >= self._tokens]
            if not usable:
                return None
            width = self._rng.choice(usable)
        rows = self._tokens // width
        fresh, used = self._fresh[width], self._used[width]
        chosen = [fresh.popleft() for _ in range(min(rows, len(fresh)))]
        self.waiting -= sum(sample.shape[1] for sample in chosen)
        old = self._rng.choices(used, k=rows - len(chosen)) if len(chosen) < rows else []
        used.extend(chosen)
        self.drawn += rows
        self.reused += len(old)
        return _batch(chosen + old, width)


def _batch(samples: list[np.ndarray], width: int) -> Batch:
    fields = np.zeros((4, len(samples), width + 1), np.int32)
    for row, sample in enumerate(samples):
        fields[:, row, : sample.shape[1]] = sample
    return Batch(fields[0], *fields[1:].astype(np.uint8))


class Stream:
    """Workers, and a thread that reads from them and lays out batches. A worker that dies is done without."""

    def __init__(self, workers: int, tokens: int, seed: int, size: str, level: int) -> None:
        self.pool = Pool(tokens, seed)
        self._batches: queue.Queue[Batch] = queue.Queue(maxsize=4)
        self._stopping = threading.Event()
        self._limit = WAITING * tokens
        context = get_context("fork")  # before there is any CUDA
        self._connections: list[Connection] = []
        self._workers: list[ForkProcess] = []
        for number in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, seed * 1000 + number, size, level), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._workers.append(process)
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    @property
    def num_workers(self) -> int:
        """Workers that are alive."""
        return len(self._connections)

    def next(self) -> Batch:
        """The next batch. Raises RuntimeError where none comes for two minutes."""
        try:
            return self._batches.get(timeout=120)
        except queue.Empty:
            raise RuntimeError(f"no batch for two minutes; {self.num_workers} workers are alive") from None

    def set_level(self, level: int) -> None:
        """Tell the workers what to write from now on."""
        for connection in list(self._connections):
            try:
                connection.send(level)
            except OSError:
                self._drop(connection)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)
        for process in self._workers:
            process.kill()

    def _feed(self) -> None:
        while not self._stopping.is_set():
            if self._connections and self.pool.waiting < self._limit:
                for connection in wait(self._connections, timeout=0 if self.pool.waiting else 0.2):
                    self._receive(connection)  # pyright: ignore[reportArgumentType]
            if self._batches.full():
                time.sleep(0.002)
            elif batch := self.pool.draw():
                self._batches.put(batch)

    def _receive(self, connection: Connection) -> None:
        try:
            lengths, samples = connection.recv()
        except (EOFError, OSError):
            self._drop(connection)
            return
        for sample in np.split(samples, np.cumsum(lengths)[:-1], axis=1):
            self.pool.add(sample)

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            print(f"a worker is gone, {self.num_workers} are left", flush=True)


def _work(connection: Connection, seed: int, size: str, level: int) -> None:
    """Writes samples until nobody reads them any more."""
    os.nice(5)
    rng, words, encoder = Random(seed), Words.load(), Encoder.load()
    author = Author(rng, words, frozenset(words["reserved"]))
    try:
        while True:
            while connection.poll():
                level = connection.recv()
            samples: list[np.ndarray] = []
            while len(samples) < CHUNK:
                sample = encode(author.write(CURRICULA[size].recipe(rng, level)), encoder)
                if sample is not None:
                    samples.append(np.stack([sample.tokens, 1 + sample.is_answer(), *sample.evidence()]).astype(np.int16))
            connection.send(([sample.shape[1] for sample in samples], np.concatenate(samples, axis=1)))
    except (EOFError, OSError, KeyboardInterrupt):
        return
