"""An endless stream of batches: worker processes write samples, a pool keeps them, and a batch never waits long."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from random import Random

import numpy as np

from .encoder import Encoder
from .sample import encode
from .world.author import AnyAuthor
from .world.curriculum import CURRICULA
from .world.words import Words

WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Lengths of rows. If the tokens of a batch are a multiple of each length, all batches have the same size."""

CHUNK = 48  # samples that a worker sends at a time
WAITING = 40  # batches' worth of new samples in the pool at which the workers have to wait


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Four arrays (rows, width + 1). tokens: int32. marks: uint8, 0 padding, 1 text, 2 answer. sentences, sought: see
    `Sample.evidence`.
    """

    tokens: np.ndarray
    marks: np.ndarray
    sentences: np.ndarray
    sought: np.ndarray


class Pool:
    """Samples by length: new ones, and the last ones that were drawn."""

    def __init__(self, tokens: int, seed: int) -> None:
        if tokens < max(WIDTHS):
            raise ValueError(f"{tokens} tokens a batch: expected at least {max(WIDTHS)}")
        self._tokens, self._rng = tokens, Random(seed)
        self._fresh: dict[int, deque[np.ndarray]] = {width: deque() for width in WIDTHS}
        self._used = {width: deque(maxlen=8 * tokens // width) for width in WIDTHS}
        self.waiting = 0
        """Tokens not drawn yet."""
        self.drawn = self.reused = 0
        """Samples drawn, and how many of them were drawn before."""

    def add(self, sample: np.ndarray) -> None:
        """Add a sample: (4, tokens) int16, the fields of a batch in order."""
        length = sample.shape[1]
        width = next(width for width in WIDTHS if width >= length - 1)
        self._fresh[width].append(sample)
        self.waiting += length

    def draw(self) -> Batch | None:
        """Return a batch with rows of one width; None while the pool holds too few samples."""
        ready = {width: len(fresh) * width / self._tokens for width, fresh in self._fresh.items()}
        width = max(ready, key=lambda width: ready[width])
        if ready[width] < 1:
            # Fill up with used samples, for any width with enough of them.
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
    """Worker processes, and a thread that receives samples and builds batches. A dead worker is not replaced."""

    def __init__(self, workers: int, tokens: int, seed: int, size: str, level: int) -> None:
        self.pool = Pool(tokens, seed)
        self._batches: queue.Queue[Batch] = queue.Queue(maxsize=4)
        self._stopping = threading.Event()
        self._limit = WAITING * tokens
        context = get_context("fork")  # before CUDA is initialised
        self._connections: list[Connection] = []
        self._workers: list[BaseProcess] = []
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
        """Return the next batch. Raises RuntimeError if none comes for two minutes."""
        try:
            return self._batches.get(timeout=120)
        except queue.Empty:
            raise RuntimeError(f"no batch for two minutes; {self.num_workers} workers are alive") from None

    def set_level(self, level: int) -> None:
        """Tell the workers the level of the samples to write from now on."""
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
    """Write samples until the connection closes."""
    os.nice(5)
    rng, words, encoder = Random(seed), Words.load(), Encoder.load()
    author = AnyAuthor(rng, words, frozenset(words["reserved"]))
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
