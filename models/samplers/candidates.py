"""The tokens that may still be chosen, as llama.cpp's samplers see them."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

KIND = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Row:
    """All tokens of the vocabulary, in order. values: their logits."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of some tokens, and which of them are at these places: all, in order."""
        return tokens, np.arange(len(tokens))


class Candidates:
    """A list of tokens that samplers shorten, order and choose from.

    row: the logits of the vocabulary, (tokens,); those of minus infinity are left out. sort: the best ones first, for a
    sampler that would sort the whole vocabulary, which takes llama.cpp several times as long.
    """

    def __init__(self, row: np.ndarray, sort: bool = False) -> None:
        possible = np.flatnonzero(row > -np.inf)
        tokens = possible if len(possible) else np.arange(len(row))
        if sort:
            tokens = tokens[np.argsort(-row[tokens])]
        self._data = np.zeros(len(tokens), KIND)
        self._data["id"], self._data["logit"] = tokens, row[tokens]
        self._start = self._data.ctypes.data
        pointer = ctypes.cast(self._start, ctypes.POINTER(llama_cpp.llama_token_data))
        self._arrays = (llama_cpp.llama_token_data_array * 1)((pointer, len(tokens), -1, sort))
        self._struct = self._arrays[0]

    @property
    def left(self) -> np.ndarray:
        """The tokens that are left: id, logit, p. A sampler may have dropped some at the front."""
        address = ctypes.cast(self._struct.data, ctypes.c_void_p).value or self._start
        first = (address - self._start) // KIND.itemsize
        return self._data[first : first + self._struct.size]

    @property
    def values(self) -> np.ndarray:
        return self.left["logit"]

    def places(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of some tokens (sorted) that are left, and which of them are at these places."""
        ids = self.left["id"]
        nearest = np.minimum(np.searchsorted(tokens, ids), max(len(tokens) - 1, 0))
        places = np.flatnonzero(tokens[nearest] == ids) if len(tokens) else np.zeros(0, np.intp)
        return places, nearest[places]

    def apply(self, chain: llama_cpp.llama_sampler_p) -> None:
        """Let a chain shorten them, or choose."""
        llama_cpp.llama_sampler_apply(chain, self._arrays)

    def unsort(self) -> None:
        """Note that the logits were changed."""
        self._struct.sorted = False

    @property
    def chosen(self) -> int:
        """The token that a chain has chosen."""
        return int(self.left["id"][self._struct.selected])
