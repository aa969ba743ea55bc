"""The embedding model and the reranking model.

Each of the two models has a queue of texts, and a thread that computes the texts in batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import reprlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, field, replace
from math import inf
from operator import add
from pathlib import Path
from threading import Lock, Thread, Timer
from time import perf_counter
from typing import Literal, Self

import numpy as np

from ...models.embedding import EmbedderSettings, EmbeddingModel, Pairing
from ...models.errors import ChangedFile, ModelError
from ...models.hardware import fast_cores
from ...models.model import Model
from ...models.model_files import OFFERED, PACKAGED, digest, files_of
from ...retrieval.index import Embedder, Prefixes, prefixes_of
from ..chat.decode import check_number
from ..chat.prompt_length import MOST_COUNTED
from ..chat.text_prompt import TextTokens, split_prompts
from ..config.settings import Settings, SettingsError
from ..engine.fit import embedding_file, open_beside
from ..http.api_errors import RequestError, not_loaded
from ..http.bodies import LARGEST
from ..http.threads import PromptThreads

# ---- Texts that wait for their vectors, and the thread that computes them. ----------------------------------------------

logger = logging.getLogger("slotcache.vectors")
NICENESS = 10  # so that the engine's threads get a core first


@dataclass(slots=True, eq=False)
class VectorJob:
    """The texts of one request, as tokens.

    vectors: the vectors computed so far, in the order of the texts.
    num_taken: the number of texts that were put into a batch so far.
    """

    texts: Sequence[np.ndarray]
    vectors: list[np.ndarray] = field(default_factory=list)
    num_taken: int = 0
    future: Future[list[np.ndarray]] = field(default_factory=Future)


@dataclass(slots=True)
class Computed:
    """What the models have computed so far.

    texts, tokens: how many texts were computed, and how many tokens they have.
    steps: calls of a model.
    loads: how often a model was loaded again after it had been unloaded.
    in_memory: the number of models that are in memory now.
    """

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    loads: int = 0
    in_memory: int = 0

    def __add__(self, other: Computed) -> Computed:
        return Computed(*map(add, astuple(self), astuple(other)))


Batch = list[tuple[VectorJob, np.ndarray]]


class VectorQueue:
    """Computes vectors for the texts of requests. Any thread may use this object.

    The requests take turns, text by text. So a request with one text need not wait for all texts of an earlier request.
    Texts that were submitted with `in_gaps` are computed only while no other texts wait.

    The queue's thread ends when no more texts wait. OpenMP keeps workers for each thread that computes, and the workers of
    the queue's thread would slow the engine's workers. While the engine generates, the queue's thread computes on one core.

    is_busy: returns whether the engine generates; called in the queue's thread.
    sleep_after: seconds without a text after which the embedder is unloaded. If 0, it is unloaded only on request.
    computed: the counts since the start.
    """

    def __init__(self, embedder: EmbeddingModel, is_busy: Callable[[], bool], sleep_after: float = 0) -> None:
        self._embedder, self.is_busy = embedder, is_busy
        self._usual = self._seconds = sleep_after or inf
        self.computed = Computed()
        self.failure = ""  # why the last load failed; empty if it succeeded
        self._lock = Lock()
        self._jobs: deque[VectorJob] = deque()
        self._in_gaps: deque[VectorJob] = deque()
        self._thread: Thread | None = None
        self._computes = self._closed = False
        self._timer, self._ends = self._start_timer()

    @property
    def seconds_left(self) -> float:
        """Seconds until the model is unloaded if no text comes."""
        return max(self._ends - perf_counter(), 0)

    def keep(self, seconds: float) -> None:
        """Unload the embedder once no text has come for `seconds`. From the next text on, `sleep_after` applies again.

        The next text also loads the embedder again if it is unloaded.
        """
        with self._lock:
            self._seconds, self._ends = seconds, perf_counter() + seconds
            if self._thread is None:
                self._timer.cancel()
                self._timer, self._ends = self._start_timer()

    def unload_now(self) -> bool:
        """Unload the model at once unless texts wait or are computed. Return whether it was unloaded.

        Not for the event loop.
        """
        was_open = self._embedder.is_open
        with self._lock:
            ending = None if self._jobs or self._in_gaps or self._computes else self._thread
        if ending:
            ending.join()
        leaving = Thread(target=self._fall_asleep, name="vectors", daemon=True)  # a separate thread, which `close` may join
        leaving.start()
        leaving.join()
        return was_open and not self._embedder.is_open

    def submit(self, texts: Sequence[np.ndarray], *, in_gaps: bool = False) -> Future[list[np.ndarray]]:
        """Queue one or more texts, as int32 tokens. The future gets the results of `EmbeddingModel.vectors`.

        To drop the texts, cancel the future. Raises RequestError once the queue is closed.

        in_gaps: whether to compute these texts only while no other texts wait.
        """
        job = VectorJob(texts)
        with self._lock:
            if self._closed:
                raise RequestError("the server is shutting down", status=503)
            if self._thread is None:
                self._start()
            (self._in_gaps if in_gaps else self._jobs).append(job)
            self._timer.cancel()
            self._seconds, self._ends = self._usual, inf
        return job.future

    def close(self) -> None:
        """Fail all waiting texts, and wait for the end of the thread."""
        with self._lock:
            self._closed, thread = True, self._thread
            self._timer.cancel()
            waiting, self._jobs, self._in_gaps = (*self._jobs, *self._in_gaps), deque(), deque()
        for job in waiting:
            _fail(job, RequestError("the server is shutting down", status=503))
        if thread:
            thread.join()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        thread = Thread(target=self._work, name="vectors", daemon=True)
        thread.start()  # the thread waits for the lock; if it cannot start, the next text tries again
        self._thread = thread

    def _open(self) -> None:
        """Load the embedder if it is unloaded. Raises ModelError."""
        if not self._embedder.is_open:
            began = perf_counter()
            self._embedder.open()
            self.failure = ""
            self.computed += Computed(loads=1)
            logger.info("%s is back in memory after %.1f s", self._embedder.model.path.name, perf_counter() - began)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has a niceness of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while batch := self._take():
            try:
                self._open()
                vectors = self._embedder.vectors([text for _, text in batch], threads=1 if self.is_busy() else 0)
                self._computes = False
            except ModelError as error:
                self.failure = f"{error}: restart the server" if isinstance(error, ChangedFile) else str(error)
                self._drop(batch, not_loaded(ModelError(self.failure)))
                continue
            except Exception:
                logger.exception("the vectors of texts could not be computed")
                self._drop(batch, RequestError("the model failed while computing this", status=500))
                continue
            self.computed += Computed(len(batch), sum(len(text) for _, text in batch), 1)
            for (job, _), vector in zip(batch, vectors, strict=True):
                job.vectors.append(vector)
                if len(job.vectors) == len(job.texts) and job.future.set_running_or_notify_cancel():
                    job.future.set_result(job.vectors)

    def _take(self) -> Batch:
        """Take one text of each job in turn, as many as fit into one call of the model. An empty batch ends the thread."""
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
            self._computes = bool(batch)
            if not batch:
                self._thread = None
                self._timer, self._ends = self._start_timer()
        return batch

    def _drop(self, batch: Batch, error: RequestError) -> None:
        jobs = {job for job, _ in batch}
        with self._lock:
            self._jobs, self._in_gaps = (
                deque(job for job in queue if job not in jobs) for queue in (self._jobs, self._in_gaps)
            )
        for job in jobs:
            _fail(job, error)

    # ---- sleep -----------------------------------------------------------------------------------------------------

    def _start_timer(self) -> tuple[Timer, float]:
        """Return a timer that unloads the model, and the time at which it fires.

        The timer is started only if the model is loaded.
        """
        timer = Timer(self._seconds, self._fall_asleep)
        timer.daemon = True
        if self._seconds < inf and self._embedder.is_open and not self._closed:
            timer.start()
        return timer, perf_counter() + self._seconds

    def _fall_asleep(self) -> None:
        """Unload the model if no other thread uses it. Runs in a separate thread."""
        with self._lock:
            if self._thread is not None or self._closed or not self._embedder.is_open:
                return
            self._thread = threading.current_thread()
        try:
            self._embedder.unload()
            logger.info("%s is unloaded until its next text", self._embedder.model.path.name)
        finally:
            with self._lock:
                self._thread = None
                if self._jobs or self._in_gaps:
                    self._start()


def _fail(job: VectorJob, error: RequestError) -> None:
    if not job.future.done() and job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)


# ---- The texts of a request for vectors, as tokens. ---------------------------------------------------------------------


def tokens_of(
    embedder: EmbeddingModel, given: object, name: str, *, cut: Literal["start", "end"] | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the field path of each text in the body, and the text's int32 tokens. Raises RequestError.

    A text without token ids gets the special tokens that the model expects around it. Token ids, and texts mixed with ids,
    get no special tokens. If the caller cuts the end of a text, the text is tokenised only to just beyond the model's limit.
    If the caller refuses texts that are too long, a text of more than `MOST_COUNTED` letters is also tokenised only to just
    beyond the model's limit.

    given: a text, a list of token ids, a list that mixes both, `{"prompt_string": text}`, `{"content": [parts]}`, or a list
    of these.
    name: the name of the field.
    cut: the end at which the caller cuts a text that is too long; None if the caller refuses such a text.
    """
    if isinstance(given, list):
        check_number(len(given), name)
    texts = TextTokens(embedder.model)
    for where, one in split_prompts(given, name):
        text = _plain(one, where)
        alone = isinstance(text, str)
        is_cut = cut == "end" or (cut is None and alone and len(text) > MOST_COUNTED)
        most = embedder.limit + 1 if is_cut else None
        yield where, embedder.tokens(text, most) if alone else texts.tokens(text, where, special=False, begin=False)


def _plain(one: object, where: str) -> object:
    """Return the text of `one` if it is an object such as `{"prompt_string": text}`. Return any other `one` unchanged."""
    match one:
        case {"content": list(parts)}:
            return "".join(_text(part, f"{where}.content[{at}]") for at, part in enumerate(parts))
        case {"prompt_string": str(text), **others} if not others:
            return text
    return one


def _text(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise RequestError(f"{where} is {reprlib.repr(part)}: expected a part of type text", param=where)


RETRY_AFTER = 1  # s


class EmbeddingWorker:
    """An embedding or reranking model.

    Only the event loop may use this object, except for methods that are documented otherwise.

    name: the model's name in answers.
    num_open: requests that wait for the model.
    max_open: the limit of `num_open`.
    """

    def __init__(self, name: str, embedder: EmbeddingModel, queue: VectorQueue, max_open: int) -> None:
        self.name, self.embedder = name, embedder
        self._pairing = Pairing(embedder.model)
        self._queue, self._max_open, self.num_open = queue, max_open, 0

    @property
    def is_asleep(self) -> bool:
        """Whether the model is unloaded and no request waits for it."""
        return not (self.num_open or self.embedder.is_open)

    @property
    def failure(self) -> str:
        """Why the last load of the model failed; empty if it succeeded."""
        return self._queue.failure

    async def compute(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the vectors of texts (int32 tokens). If the call is cancelled, the texts are dropped.

        Raises RequestError if the queue is full, if the model fails, or at shutdown.
        """
        if self.num_open >= self._max_open:
            raise RequestError(
                f"{self.num_open} requests wait for {self.name}, and at most {self._max_open} may wait: try again later",
                status=429,
                code="queue_full",
                retry_after=RETRY_AFTER,
            )
        self.num_open += 1
        try:
            return await asyncio.wrap_future(self._queue.submit(texts))
        finally:
            self.num_open -= 1

    def compute_in_gaps(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the vectors of texts (int32 tokens), computed while no request waits. Raises RequestError.

        Call it in a thread.
        """
        return self._queue.submit(texts, in_gaps=True).result()

    def is_busy(self) -> bool:
        """Return whether the engine generates. Any thread may call this method."""
        return self._queue.is_busy()

    @property
    def computed(self) -> Computed:
        return replace(self._queue.computed, in_memory=int(self.embedder.is_open))

    @property
    def seconds_left(self) -> float:
        """Seconds until the model is unloaded if no request comes."""
        return self._queue.seconds_left

    def keep(self, seconds: float) -> None:
        """Unload the model after `seconds` without a request. The next request loads it again."""
        self._queue.keep(seconds)

    def unload_now(self) -> bool:
        """Unload the model at once unless texts wait or are computed. Return whether it was unloaded.

        Not for the event loop.
        """
        return self._queue.unload_now()

    # ---- for threads other than the event loop ---------------------------------------------------------------------

    def tokens(self, given: object, name: str, cut: Literal["start", "end"] | None) -> list[np.ndarray]:
        """Return the tokens of each text of a request. Raises RequestError.

        given, name: see `tokens_of`.
        cut: the end at which a text that is too long is cut; None if such a text is an error.
        """
        texts: list[np.ndarray] = []
        for where, tokens in tokens_of(self.embedder, given, name, cut=cut):
            kept = self.embedder.shortened(tokens, cut == "start") if cut else tokens
            self._check_length(kept, where)  # before the next text is tokenised
            texts.append(kept)
        return texts

    def pairs(self, query: str, documents: Sequence[str], name: str) -> list[np.ndarray]:
        """Return the tokens of each document joined with the query. Raises RequestError. name: the documents' field."""
        pairs: list[np.ndarray] = []
        for at, pair in enumerate(self._pairing(query, documents)):
            self._check_length(pair, f"{name}[{at}]")  # before the next pair is tokenised
            pairs.append(pair)
        return pairs

    def pair(self, query: str, document: str) -> np.ndarray:
        """Return the tokens of the query joined with a document, even if they are too many for the model."""
        return next(self._pairing(query, [document]))

    def _check_length(self, tokens: np.ndarray, where: str) -> None:
        """Raise RequestError for a text that is empty or too long for the model. where: the text's field in the body."""
        size, limit = len(tokens), self.embedder.limit
        if not size:
            raise RequestError(f"{where} is empty: expected a text", param=where)
        if size > limit:
            raise RequestError(
                f"{where} is too large: it has {size} tokens, and {self.name} takes {limit} at once; shorten it, or start "
                "the server with a larger --ubatch-size if the model was trained for more",
                param=where,
                code="context_length_exceeded",
                n_prompt_tokens=size,
                n_ctx=limit,
            )

    def stop(self) -> None:
        """End all requests with an error."""
        self._queue.close()

    def close(self) -> None:
        self.stop()
        self.embedder.close()


@dataclass(slots=True, kw_only=True)
class Vectors:
    """The models and threads with which a server computes tokens, vectors and scores.

    model, name: the served model.
    texts: the tokeniser of the served model.
    embedding, reranking: the models for vectors and for scores; None if the settings ask for no such model.
    for_search: the embedder of searches; None if no embedding model turns each text into one vector.
    threads: the threads that tokenise texts and write vectors as JSON.
    beside: the models that `close` closes, such as models that were loaded only for vectors or scores.
    """

    settings: Settings
    model: Model
    name: str
    texts: TextTokens
    embedding: EmbeddingWorker | None
    reranking: EmbeddingWorker | None
    for_search: Embedding | None
    threads: PromptThreads
    beside: list[Model]

    def embedder(self) -> EmbeddingWorker:
        """Return the embedding model. Raises RequestError 501 if the server has no embedding model."""
        if self.embedding is None:
            raise _not_asked_for("embeddings", "--embedding-model FILE, or --embeddings for the model itself")
        return self.embedding

    def ranker(self) -> EmbeddingWorker:
        """Return the reranker. Raises RequestError 501 if the server has no reranker."""
        if self.reranking is None:
            raise _not_asked_for("reranking", "--rerank-model FILE, or --reranking for the model itself")
        return self.reranking

    def models(self) -> dict[str, Model]:
        """Return all models by name, the served model first."""
        return {self.name: self.model} | {worker.name: worker.embedder.model for worker in self.workers}

    def properties(self) -> dict[str, object]:
        """Return the fields of `/props` about the model and the vectors."""
        embedding, reranking = self.embedding, self.reranking
        return {
            "model_path": str(self.model.path),
            "model_alias": self.name,
            "settings": self.settings.shown(),
            "embedding": embedding
            and {
                "model": embedding.name,
                "pooling": embedding.embedder.pooling,
                "dimensions": embedding.embedder.width,
                "n_ctx": embedding.embedder.limit,
            },
            "reranking": reranking and {"model": reranking.name, "n_ctx": reranking.embedder.limit},
        }

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def close(self) -> None:
        self.threads.close()
        for worker in self.workers:
            worker.close()
        for model in self.beside:
            model.close()

    @property
    def computed(self) -> Computed:
        """The sum of the counts of the embedding model and the reranker."""
        return sum((worker.computed for worker in self.workers), Computed())

    @property
    def workers(self) -> list[EmbeddingWorker]:
        return [worker for worker in (self.embedding, self.reranking) if worker]


def about(model: Model) -> dict[str, object]:
    """Return the properties of a model under the names that llama-server uses."""
    return {
        "n_vocab": model.num_vocab,
        "n_ctx_train": model.context_train,
        "n_params": model.num_parameters,
        "size": model.size,
        "vocab_type": model.vocabulary_type,
        "n_embd": model.width,
        "ftype": model.file_type,
    }


def _not_asked_for(kind: str, remedy: str) -> RequestError:
    return RequestError(f"this server was started without {kind}: start it with {remedy}", status=501)


# ---- The embedder and the reranker for an index and its searches. -------------------------------------------------------

POOLED = ("mean", "cls", "last")  # poolings that make one vector for a text
MAX_LETTERS = 8192  # letters: only the end of a longer query counts, since a long message asks its question last
MARGIN = 0.9  # the share kept of the letters that would fit if all letters took equally many tokens
AUTO = "auto"  # the model's name decides the prefix
MOST_PREFIX = 0.5  # the largest share of the model's input that a prefix may take


def can_search(worker: EmbeddingWorker) -> bool:
    """Return whether the model turns each text into a single vector."""
    return worker.embedder.pooling in POOLED


class Embedding:
    """Turns the documents of an index and queries into vectors.

    prefixes: the texts that are put before documents and before queries, as in the model's training.
    language: see `Embedder`.
    is_busy: returns whether the engine generates.
    """

    def __init__(self, worker: EmbeddingWorker, prefixes: Prefixes, language: str) -> None:
        self._worker, self.prefixes, self.language = worker, prefixes, language
        self.is_busy = worker.is_busy

    @classmethod
    def of(cls, worker: EmbeddingWorker, settings: Settings) -> Self:
        """Make an `Embedding` with the prefixes of the settings.

        If the settings give no prefix of a kind, use the model's usual prefix.

        Raises SettingsError if a prefix is too long.
        """
        model, embedder = worker.embedder.model, worker.embedder
        usual = prefixes_of(*(model.metadata(f"general.{key}") or "" for key in ("name", "architecture")))
        given = (settings.embedding_query_prefix, settings.embedding_document_prefix)
        prefixes = Prefixes(*(own if one == AUTO else one for one, own in zip(given, astuple(usual), strict=True)))
        for kind, prefix in asdict(prefixes).items():
            size = len(embedder.tokens(prefix))
            if size > MOST_PREFIX * embedder.limit:
                raise SettingsError(
                    f"--embedding-{kind}-prefix has {size} tokens, of {embedder.limit} that {worker.name} takes at once: "
                    "expected a short text"
                )
        is_default = not (settings.embedding_model or settings.embeddings)
        return cls(worker, prefixes, PACKAGED[OFFERED].language if is_default else "")

    def for_index(self) -> Embedder:
        """Return the embedder for an index. Raises ModelError.

        The first call for a model takes seconds, because it computes a digest of the model's files.
        """
        embedder = self._worker.embedder
        files, prefix = digest(files_of(embedder.model.path)), self.prefixes.document
        parts = [files, embedder.pooling, str(embedder.limit), *([repr(prefix)] if prefix else []), *embedder.model.altered]
        return Embedder(" ".join(parts), self.embed, self.language)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of documents, computed while no request waits. Raises RequestError. Call it in a thread."""
        embedder, prefix = self._worker.embedder, self.prefixes.document
        tokens = [embedder.shortened(embedder.tokens(prefix + text)) for text in texts]
        return np.stack(self._worker.compute_in_gaps(tokens))

    async def query(self, text: str) -> np.ndarray:
        """Return the vector of a query, an array of shape (width,). Raises RequestError."""
        (vector,) = await self._worker.compute([await asyncio.to_thread(self._query_tokens, text[-MAX_LETTERS:])])
        return vector

    def _query_tokens(self, text: str) -> np.ndarray:
        """Return the tokens of the prefix and a query.

        If there are too many tokens for the model, the start of the query is cut.
        """
        embedder = self._worker.embedder
        while len(tokens := embedder.tokens(self.prefixes.query + text)) > embedder.limit:
            text = text[len(text) - int(MARGIN * embedder.limit / len(tokens) * len(text)) :]
        return tokens


class Reranking:
    """Gives each text a score that says how well it answers a query."""

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text. A higher score is better. Raises RequestError."""
        if not texts:
            return []
        pairs = await asyncio.to_thread(lambda: [self._pair(query[-MAX_LETTERS:], text) for text in texts])
        return [float(scores[0]) for scores in await self._worker.compute(pairs)]

    def _pair(self, query: str, text: str) -> np.ndarray:
        """Return the tokens of a query and a text.

        If there are too many tokens for the model, the text's end and the query's start are cut.
        """
        limit = self._worker.embedder.limit
        while len(pair := self._worker.pair(query, text)) > limit:
            share = MARGIN * limit / len(pair)
            text, query = text[: int(share * len(text))], query[len(query) - int(share * len(query)) :]
        return pair


# ---- From the settings to the embedder and the reranker. ----------------------------------------------------------------

TEXTS_ON_GPU = 64  # the most texts of a call on a GPU; a call on a CPU has one text


def load_vectors(settings: Settings, model: Model, name: str, is_busy: Callable[[], bool]) -> Vectors:
    """Load the models for vectors and scores, and make their contexts. Raises ModelError and SettingsError.

    model, name: the served model, which may itself compute vectors or scores.
    is_busy: see `VectorQueue`.
    """
    reranks = settings.reranking or (settings.embeddings and settings.pooling == "rank")
    embeds = settings.embeddings and not reranks
    loader = _Loader(settings, model, name, is_busy)
    embedding = loader.load(embedding_file(settings), embeds, settings.pooling)
    return Vectors(
        settings=settings,
        model=model,
        name=name,
        texts=TextTokens(model),
        embedding=embedding,
        reranking=loader.load(settings.rerank_model, reranks, "rank"),
        for_search=Embedding.of(embedding, settings) if embedding and can_search(embedding) else None,
        threads=PromptThreads(LARGEST * settings.max_body << 20),
        beside=loader.beside,
    )


@dataclass(slots=True)
class _Loader:
    settings: Settings
    model: Model
    name: str
    is_busy: Callable[[], bool]
    beside: list[Model] = field(default_factory=list)

    def load(self, file: str, is_served: bool, pooling: str) -> EmbeddingWorker | None:
        """Make a worker for the model in `file` or, if `is_served`, for the served model.

        Return None if there is no file and `is_served` is false.

        file: the model's file; empty if no file is given.
        is_served: whether the settings ask the served model itself for vectors or scores.
        """
        if file and is_served:
            raise ModelError(f"{file} and the served model {self.model.path} cannot both be used: choose one of the two")
        if is_served:
            return self._worker(self.model, self.name, pooling)
        if not file:
            return None
        path = Path(file).expanduser()
        self.beside.append(open_beside(self.settings, file))
        return self._worker(self.beside[-1], path.stem, pooling)

    def _worker(self, model: Model, name: str, pooling: str) -> EmbeddingWorker:
        kind = model.pooling
        if pooling == "rank" and kind not in ("", "none", "rank"):
            raise ModelError(f"{model.path} is not a reranker: it pools the vectors of a text by {kind}, not by rank")
        settings = EmbedderSettings(
            pooling=pooling,
            max_tokens=self.settings.ubatch_size,
            flash_attention=self.settings.flash_attn,
            threads=self.settings.threads or fast_cores(),
            most_texts=TEXTS_ON_GPU if model.device else 1,
        )
        embedder = EmbeddingModel(model, settings)
        return EmbeddingWorker(
            name, embedder, VectorQueue(embedder, self.is_busy, self.settings.sleep_after), self.settings.max_queue + 1
        )
