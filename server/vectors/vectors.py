"""The models that turn texts into vectors and scores, as the routes ask them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...models.embedding import Embedder, normalised
from ...models.model import Model
from ...models.rerank import Pairing
from ..chat.texts import Texts
from ..chat.threads import PromptThreads
from ..errors import RequestError
from ..settings import Settings
from .queue import Computed, VectorQueue
from .texts import tokens_of

RETRY_AFTER = 1  # s


class Computer:
    """One such model. It belongs to the event loop.

    name: the model's, in answers. num_open: requests that wait for it; max_open: how many may.
    """

    def __init__(self, name: str, embedder: Embedder, queue: VectorQueue, max_open: int) -> None:
        self.name, self.embedder = name, embedder
        self._pairing = Pairing(embedder.model)
        self._queue, self._max_open, self.num_open = queue, max_open, 0

    @property
    def is_asleep(self) -> bool:
        """Whether the model has left memory and no request wants it back."""
        return not (self.num_open or self.embedder.is_open)

    async def compute(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the vectors of texts, int32 each. Cancelling it drops the texts. Raises RequestError: the queue is full."""
        if self.num_open >= self._max_open:
            raise RequestError(
                f"{self.num_open} requests wait for {self.name}, of at most {self._max_open}: try again later",
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
        """Return the vectors of texts, int32 each, while no request waits for some. Raises RequestError. Any thread's."""
        return self._queue.submit(texts, in_gaps=True).result()

    @property
    def computed(self) -> Computed:
        return self._queue.computed

    @staticmethod
    def normalised(vector: np.ndarray, norm: int) -> np.ndarray:
        """Return vectors (..., width) at a length: see `models.embedding.normalised`."""
        return normalised(vector, norm)

    # ---- in a thread -----------------------------------------------------------------------------------------------

    def tokens(self, given: object, name: str, cut: Literal["start", "end"] | None) -> list[np.ndarray]:
        """Return the tokens of each text of a request: see `tokens_of`. Raises RequestError.

        cut: the end of a text that is cut off where it is too long; None: that is an error.
        """
        found = list(tokens_of(self.embedder, given, name))
        if cut:
            found = [(where, self.embedder.shortened(tokens, cut == "start")) for where, tokens in found]
        for where, tokens in found:
            self._check_length(tokens, where)
        return [tokens for _, tokens in found]

    def pairs(self, query: str, documents: Sequence[str], name: str) -> list[np.ndarray]:
        """Return the tokens of the query with each document. Raises RequestError. name: of the documents' field."""
        pairs = self._pairing(query, documents)
        for at, pair in enumerate(pairs):
            self._check_length(pair, f"{name}[{at}]")
        return pairs

    def pair(self, query: str, document: str) -> np.ndarray:
        """Return the tokens of the query with a document, however many they are."""
        return self._pairing(query, [document])[0]

    def _check_length(self, tokens: np.ndarray, where: str) -> None:
        """Raise RequestError for a text that is empty or too long for the model. where: its place in the body."""
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
    """All that a server does without generating: tokens, vectors, scores. The last two: None if not asked for.

    model, name: the served model; texts: its tokeniser. beside: models that were loaded for vectors or scores alone.
    threads: for texts that become tokens, and for numbers that become text.
    """

    settings: Settings
    model: Model
    name: str
    texts: Texts
    embedding: Computer | None
    reranking: Computer | None
    threads: PromptThreads
    beside: list[Model]

    def embedder(self) -> Computer:
        """Return the embedder. Raises RequestError 501."""
        if self.embedding is None:
            raise _not_asked_for("embeddings", "--embedding-model FILE, or --embeddings for the model itself")
        return self.embedding

    def ranker(self) -> Computer:
        """Return the reranker. Raises RequestError 501."""
        if self.reranking is None:
            raise _not_asked_for("reranking", "--rerank-model FILE, or --reranking for the model itself")
        return self.reranking

    def models(self) -> dict[str, dict[str, object]]:
        """Return the sizes and kinds of each model by its name, the served one first."""
        found = {self.name: self.model} | {computer.name: computer.embedder.model for computer in self.computers}
        return {name: _about(model) for name, model in found.items()}

    def properties(self) -> dict[str, object]:
        """Return what `/props` says of vectors and of the model itself."""
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
        """End all requests with an error."""
        for computer in self.computers:
            computer.stop()

    def close(self) -> None:
        self.threads.close()
        for computer in self.computers:
            computer.close()
        for model in self.beside:
            model.close()

    @property
    def computed(self) -> Computed:
        """What the embedder and the reranker computed."""
        return sum((computer.computed for computer in self.computers), Computed())

    @property
    def computers(self) -> list[Computer]:
        return [computer for computer in (self.embedding, self.reranking) if computer]


def _about(model: Model) -> dict[str, object]:
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
