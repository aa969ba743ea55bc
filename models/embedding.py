"""Vectors and relevance scores of texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..slots.plan import Span
from . import llama
from .context import CLOSED, FLASH_ATTENTION, open_context
from .errors import RunnerError
from .model import POOLINGS, Model
from .runner import Batch

UNSPECIFIED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderSettings:
    """The settings of an embedding model.

    pooling: how the vectors of a text's tokens are combined into one vector. If `pooling` is empty, the model's file
    decides.
    max_tokens: the most tokens of a text. The limit is never above the number of tokens that the model was trained for.
    threads: the most threads of the CPU.
    most_texts: the most texts of one call of `vectors`.
    """

    pooling: str = ""
    max_tokens: int = 512
    flash_attention: str = "auto"
    threads: int = 1
    most_texts: int = 1


class EmbeddingModel:
    """Turns tokens into vectors. Only one thread at a time may use this object, but any thread may call `tokens`.

    On a CPU, a text that is alone in its call of `vectors` gets the same vectors each time, bit for bit. If a call has
    several texts, each result also depends slightly on the other texts (by 0.003 of a unit vector with Q8_0 weights). On a
    CPU, one call with several texts is no faster than several calls: attention computes all pairs of tokens in a call, even
    of different texts.

    pooling: none, mean, cls, last or rank.
    limit: the most tokens of a call.
    most_texts: the most texts of a call.
    width: how many numbers a vector has. For a reranker, `width` is the number of scores that a text gets.
    """

    def __init__(self, model: Model, settings: EmbedderSettings) -> None:
        self.model = model
        self.limit = min(settings.max_tokens, model.context_train or settings.max_tokens)
        self.most_texts = settings.most_texts
        params = llama.llama_context_default_params()
        # In an encoder, every token attends to every other token, so a whole text must be in one kernel.
        # llama.cpp aborts if the number of texts does not divide the size.
        size = -(-self.limit // self.most_texts) * self.most_texts
        params.n_ctx = params.n_batch = params.n_ubatch = size
        params.n_seq_max = self.most_texts
        params.kv_unified = params.embeddings = True
        params.pooling_type = POOLINGS.get(settings.pooling, UNSPECIFIED)
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        model.rope_scaling.apply(params)
        params.n_threads = params.n_threads_batch = settings.threads
        self._params = params
        self.handle = CLOSED
        self.open()
        self.threads = settings.threads
        number = llama.llama_pooling_type(self.handle)
        self.pooling = next(name for name, value in POOLINGS.items() if value == number)
        self.is_ranker = self.pooling == "rank"
        sizes = llama.llama_model_n_cls_out if self.is_ranker else llama.llama_model_n_embd_out
        self.width: int = sizes(model.handle)
        self._batch = Batch(size)
        self._begin, self._end = _frame(model)

    @property
    def is_open(self) -> bool:
        return bool(self.handle)

    def open(self) -> None:
        """Allocate the context, and load the weights if they are unloaded. Raises ModelError."""
        if not self.handle:
            self.handle = open_context(self.model, self._params)
            self._memory = llama.llama_get_memory(self.handle)  # an encoder has none

    def unload(self) -> None:
        """Free the memory, as `Context.unload` does. `open` allocates the memory again."""
        self.close()
        self.model.weights.exit()

    def close(self) -> None:
        if self.handle:
            llama.llama_free(self.handle)
            self.handle = CLOSED

    def tokens(self, text: str, most: int | None = None) -> np.ndarray:
        """Return the tokens (int32) of a text, with the tokens that the model expects around it, such as [CLS] and [SEP].

        No part of the text becomes a control token.

        most: stop after about this many tokens, for callers that need no more of a long text.
        """
        made, parts = 0, [self._begin]
        for run in islice(self.model.tokenizer.runs(text, begin=True), 1, None):
            parts.append(run)
            made += len(run)
            if most is not None and made >= most:
                break
        return np.concatenate([*parts, self._end])

    def shortened(self, tokens: np.ndarray, from_start: bool = False) -> np.ndarray:
        """Cut the result of `tokens` at the text's end, or start, to fit the limit. Tokens such as [CLS] and [SEP] stay."""
        if len(tokens) <= self.limit:
            return tokens
        head, tail = len(self._begin), len(self._end)
        body = tokens[head : len(tokens) - tail]
        room = self.limit - head - tail
        kept = body[len(body) - room :] if from_start else body[:room]
        return np.concatenate([self._begin, kept, self._end])

    def vectors(self, texts: Sequence[np.ndarray], threads: int = 0) -> list[np.ndarray]:
        """Compute the vectors of texts (int32 each) in one call.

        Return one vector for each text, (width,), float32. Without pooling, return for each text the vectors of its tokens:
        (tokens, width).

        texts: at most `most_texts` texts, none of them empty, with at most `limit` tokens in total.
        threads: the number of CPU threads; 0: as many as the settings allow.

        Raises RunnerError.
        """
        number = threads or self.threads
        llama.llama_set_n_threads(self.handle, number, number)
        if self._memory:
            llama.llama_memory_clear(self._memory, False)
        self._batch.fill(tuple(Span(0, at, 0, tokens, logits=True) for at, tokens in enumerate(texts)))
        num_tokens = sum(map(len, texts))
        self._batch.wants_logits[:num_tokens] = 1  # the pooling needs the vector of each token
        result = llama.llama_decode(self.handle, self._batch.struct)
        if result != 0:
            raise RunnerError(f"llama_decode returned {result} for {len(texts)} texts of {num_tokens} tokens")
        if self.pooling != "none":
            return [self._pooled(at) for at in range(len(texts))]
        pointer = llama.llama_get_embeddings(self.handle)
        rows = np.ctypeslib.as_array(pointer, (num_tokens, self.width)).copy()
        return np.split(rows, np.cumsum([len(tokens) for tokens in texts])[:-1])

    def _pooled(self, sequence: int) -> np.ndarray:
        pointer = llama.llama_get_embeddings_seq(self.handle, sequence)
        if not pointer:
            raise RunnerError(f"llama.cpp has no vector of text {sequence}")
        return np.ctypeslib.as_array(pointer, (self.width,)).copy()


def normalised(vectors: np.ndarray, norm: int) -> np.ndarray:
    """Scale vectors (..., width) as llama-server does.

    norm: how to scale. If `norm` is below 0, vectors stay as they are. If it is 0, the largest absolute value of a vector
    becomes 32,760. If it is 1, the length in the taxicab norm becomes 1. If it is 2, the length in the Euclidean norm
    becomes 1. If `norm` is any other p, the length in the p-norm becomes 1.
    """
    if norm < 0:
        return vectors
    size = np.abs(vectors).astype(np.float64)
    most, total = size.max(-1, keepdims=True), (size**norm).sum(-1, keepdims=True)
    lengths = most / 32760.0 if norm == 0 else total ** (1 / norm)
    factors = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return vectors * factors.astype(np.float32)


def _frame(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that llama.cpp puts before and after a text."""
    frame = (llama.llama_token * 4)()
    size = llama.llama_tokenize(model.vocab, b"", 0, frame, len(frame), True, False)
    tokens = np.array(frame[:size], np.int32)
    begin = size == 2 or (size == 1 and len(model.tokenizer.begin) == 1)
    return tokens[:begin], tokens[begin:]


# ---- A query and a document, joined to one text for a reranker. ---------------------------------------------------------

TEMPLATE_KEY = "tokenizer.chat_template.rerank"
FIELD = re.compile(r"\{(query|document)\}")


class Pairing:
    """Joins a query and a document to one text for a reranker. Safe from several threads.

    If the model has a template for a query and a document, this template joins them. Without a template, the model's
    separator tokens come between the query and the document. Only the template's own text can become a control token. The
    query and the document are never read as control tokens.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        template = model.metadata(TEMPLATE_KEY)
        self._pieces = list(_cut(model, template)) if template else []
        vocab = model.vocab
        eos = llama.llama_vocab_eos(vocab)
        sep = llama.llama_vocab_sep(vocab)
        end = [eos if eos >= 0 else sep] if llama.llama_vocab_get_add_eos(vocab) else []
        between = [*end, sep] if llama.llama_vocab_get_add_sep(vocab) else end
        self._between, self._end = np.array(between, np.int32), np.array(end, np.int32)

    def __call__(self, query: str, documents: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield, for each document, the tokens (int32) of the query joined with the document."""
        if self._pieces:
            pieces = self._pieces
            yield from (np.concatenate([self._piece(piece, query, text) for piece in pieces]) for text in documents)
            return
        head = np.concatenate([self._model.tokenizer.begin, self._model.tokenize(query), self._between])
        yield from (np.concatenate([head, self._model.tokenize(text), self._end]) for text in documents)

    def _piece(self, piece: np.ndarray | str, query: str, document: str) -> np.ndarray:
        if isinstance(piece, np.ndarray):
            return piece
        texts = {"query": query, "document": document}
        return self._model.tokenize(FIELD.sub(lambda field: texts[field[1]], piece))


def _cut(model: Model, template: str) -> Iterator[np.ndarray | str]:
    """Yield a template in pieces: the ids of its control tokens, and the texts between them, with unfilled fields."""
    done = 0
    for start, stop in model.tokenizer.controls.find(template):
        if start > done:
            yield template[done:start]
        yield model.tokenize(template[start:stop], special=True)
        done = stop
    if done < len(template):
        yield template[done:]
