"""A query and a document as the one text that a reranker reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import llama_cpp
import numpy as np

from .model import Model

TEMPLATE_KEY = "tokenizer.chat_template.rerank"
FIELD = re.compile(r"\{(query|document)\}")


class Pairing:
    """Joins a query and a document by the model's template, or by its separators. Safe from several threads.

    Neither of them can become a control token: only the template's own text spells those.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        template = model.metadata(TEMPLATE_KEY)
        self._pieces = list(_cut(model, template)) if template else []
        vocab = model.vocab
        eos = int(llama_cpp.llama_vocab_eos(vocab))
        sep = int(llama_cpp.llama_vocab_sep(vocab))
        end = [eos if eos >= 0 else sep] if llama_cpp.llama_vocab_get_add_eos(vocab) else []
        between = [*end, sep] if llama_cpp.llama_vocab_get_add_sep(vocab) else end
        self._between, self._end = np.array(between, np.int32), np.array(end, np.int32)

    def __call__(self, query: str, documents: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens, int32, of the query with each document."""
        if self._pieces:
            pieces = self._pieces
            return [np.concatenate([self._piece(piece, query, text) for piece in pieces]) for text in documents]
        head = np.concatenate([self._model.tokenizer.begin, self._model.tokenize(query), self._between])
        return [np.concatenate([head, self._model.tokenize(text), self._end]) for text in documents]

    def _piece(self, piece: np.ndarray | str, query: str, document: str) -> np.ndarray:
        if isinstance(piece, np.ndarray):
            return piece
        texts = {"query": query, "document": document}
        return self._model.tokenize(FIELD.sub(lambda field: texts[field[1]], piece))


def _cut(model: Model, template: str) -> Iterator[np.ndarray | str]:
    """Yield a template in pieces: its control tokens as tokens, and its text with the fields still open."""
    done = 0
    for start, stop in model.tokenizer.controls.find(template):
        if start > done:
            yield template[done:start]
        yield model.tokenize(template[start:stop], special=True)
        done = stop
    if done < len(template):
        yield template[done:]
