"""A model's vocabulary as llguidance wants it."""

from __future__ import annotations

import json
from collections.abc import Collection

import llama_cpp
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from ..model import Model
from .source import GrammarError

CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


class Tokens:
    """The tokens by their bytes: what a text gets from a token is what the grammar reads of it.

    Control tokens have no bytes in a text, so only a grammar that names them allows them. User-defined ones, such as
    `<think>` in many vocabularies, are text like any other. Texts that a grammar forces are cut by the model's own
    tokenizer, which takes texts of any length. ends: ids of the tokens that end an answer. texts: a mask, a bit for each
    token: those that have bytes in a text, and those that end an answer.
    """

    def __init__(self, model: Model) -> None:
        if not model.ends:
            raise GrammarError("this model has no token that ends an answer")
        self.num_vocab, self.ends = model.num_vocab, np.array(sorted(model.ends), np.intp)
        controls = [token for token in range(model.num_vocab) if _is_control(model, token)]
        self._controls = {model.text_of(token): token for token in controls}
        self.texts = ~_mask(set(controls) - model.ends, model.num_vocab)
        tokens = [model.piece(token) for token in range(model.num_vocab)]
        for token in controls:
            tokens[token] = model.text_of(token).encode() or b"<>"
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Cutter(model, tokens, controls)), eos_token=sorted(model.ends))

    def marker(self, text: str) -> str:
        """Return a piece of Lark for a mark in a chat's format: the control token that is spelt so, else the text itself."""
        token = self._controls.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


class _Cutter:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, model: Model, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids
        self.eos_token_id = min(model.ends)
        self._model = model

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("a text is wanted")  # llguidance tries bytes first
        return self._model.tokenize(text).tolist()


def _is_control(model: Model, token: int) -> bool:
    return bool(llama_cpp.llama_vocab_get_attr(model.vocab, token) & CONTROL)


def _mask(tokens: Collection[int], num_vocab: int) -> np.ndarray:
    """Return a mask, (vocabulary / 32,) int32: a bit for each token, and set for these."""
    bits = np.zeros(-(-num_vocab // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
