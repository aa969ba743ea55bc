"""Texts that wait to become vectors, and the thread that computes them while any wait."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread, Timer

import numpy as np

from ...models.embedding import Embedder
from ...models.errors import ModelError
from ..errors import RequestError, not_loaded

logger = logging.getLogger("slotcache.vectors")
NICENESS = 10  # the engine's threads come first where both want a core


@dataclass(slots=True, eq=False)
class Job:
    """The texts of one request. vectors: of its first texts, so far."""

    texts: Sequence[np.ndarray]
    vectors: list[np.ndarray] = field(default_factory=list)
    num_taken: int = 0
    future: Future[list[np.ndarray]] = field(default_factory=Future)


@dataclass(slots=True)
class Computed:
    """The texts that became vectors or scores, their tokens, and the steps that this took."""

    texts: int = 0
    tokens: int = 0
    steps: int = 0

    def __add__(self, other: Computed) -> Computed:
        return Computed(self.texts + other.texts, self.tokens + other.tokens, self.steps + other.steps)


Batch = list[tuple[Job, np.ndarray]]


class VectorQueue:
    """Computes texts of several requests in turn, a call of the embedder at a time. Safe from any thread.

    A request of one text waits for at most one call, however many texts wait in front of it. The thread lives only while
    texts wait: the workers that OpenMP keeps for a thread would slow the engine's own down as long as it lives. While the
    engine generates, it computes on one core.

    Texts in gaps wait until no others do. is_busy: whether the engine generates; called in the queue's thread. sleep_after:
    seconds without a text after which the embedder leaves memory; 0: never. computed: in all.
    """

    def __init__(self, embedder: Embedder, is_busy: Callable[[], bool], sleep_after: float = 0) -> None:
        self._embedder, self._is_busy, self._sleep_after = embedder, is_busy, sleep_after
        self.computed = Computed()
        self._lock = Lock()
        self._jobs: deque[Job] = deque()
        self._in_gaps: deque[Job] = deque()
        self._thread: Thread | None = None
        self._closed = False
        self._timer = self._start_timer()

    def submit(self, texts: Sequence[np.ndarray], *, in_gaps: bool = False) -> Future[list[np.ndarray]]:
        """Queue texts (int32 each, at least one); the future's result is as of `Embedder.vectors`. Cancel it to drop them.

        in_gaps: they give way to all other texts. Raises RequestError once the queue is closed.
        """
        job = Job(texts)
        with self._lock:
            if self._closed:
                raise RequestError("the server is shutting down", status=503)
            (self._in_gaps if in_gaps else self._jobs).append(job)
            self._timer.cancel()
            if self._thread is None:
                self._thread = Thread(target=self._work, name="vectors", daemon=True)
                self._thread.start()
        return job.future

    def close(self) -> None:
        """Fail the texts that wait, and return when the thread has ended."""
        with self._lock:
            self._closed, thread = True, self._thread
            self._timer.cancel()
            waiting, self._jobs, self._in_gaps = (*self._jobs, *self._in_gaps), deque(), deque()
        for job in waiting:
            _fail(job, RequestError("the server is shutting down", status=503))
        if thread:
            thread.join()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux alone has a niceness of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while batch := self._take():
            try:
                self._embedder.open()
                vectors = self._embedder.vectors([text for _, text in batch], threads=1 if self._is_busy() else 0)
            except ModelError as error:
                self._drop(batch, not_loaded(error))
                continue
            except Exception:
                logger.exception("texts could not be computed")
                self._drop(batch, RequestError("the model failed while computing this", status=500))
                continue
            self.computed += Computed(len(batch), sum(len(text) for _, text in batch), 1)
            for (job, _), vector in zip(batch, vectors, strict=True):
                job.vectors.append(vector)
                if len(job.vectors) == len(job.texts) and job.future.set_running_or_notify_cancel():
                    job.future.set_result(job.vectors)

    def _take(self) -> Batch:
        """Take one text of each job in turn, as many as a call holds. An empty batch ends the thread."""
        batch: Batch = []
        room = self._embedder.limit
        with self._lock:
            while len(batch) < self._embedder.most_texts and (jobs := self._jobs or self._in_gaps):
                job = jobs[0]
                if job.future.cancelled():
                    jobs.popleft()
                    continue
                text = job.texts[job.num_taken]
                if len(text) > room:
                    break
                batch.append((job, text))
                room -= len(text)
                job.num_taken += 1
                jobs.rotate(-1)
                if job.num_taken == len(job.texts):
                    jobs.pop()
            if not batch:
                self._thread = None
                self._timer = self._start_timer()
        return batch

    def _drop(self, batch: Batch, error: RequestError) -> None:
        """Fail the requests of a batch."""
        jobs = {job for job, _ in batch}
        with self._lock:
            self._jobs, self._in_gaps = (
                deque(job for job in queue if job not in jobs) for queue in (self._jobs, self._in_gaps)
            )
        for job in jobs:
            _fail(job, error)

    # ---- sleep -----------------------------------------------------------------------------------------------------

    def _start_timer(self) -> Timer:
        """Return a timer for the embedder's sleep, which runs if it is in memory and may leave it."""
        timer = Timer(self._sleep_after, self._fall_asleep)
        timer.daemon = True
        if self._sleep_after and self._embedder.is_open and not self._closed:
            timer.start()
        return timer

    def _fall_asleep(self) -> None:
        """Runs in a thread of its own, which also computes the texts that come meanwhile."""
        with self._lock:
            if self._thread is not None or self._closed or not self._embedder.is_open:
                return
            self._thread = threading.current_thread()
        self._embedder.rest()
        logger.info("%s: asleep after %g s without a text", self._embedder.model.path.name, self._sleep_after)
        self._work()


def _fail(job: Job, error: RequestError) -> None:
    if not job.future.done() and job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)
