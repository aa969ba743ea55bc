"""The queries of a batch, caught while llama.cpp computes it (an experiment)."""

from __future__ import annotations

import ctypes

import numpy as np

from ...models.context import Context

EVAL = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
NE, DATA, NAME = 16, 248, 256  # offsets in ggml_tensor


class Gaze:
    def __init__(self, context: Context) -> None:
        self.is_on, self.queries = False, {}
        self._callback = EVAL(self._see)
        context.close()
        context._params.cb_eval = ctypes.cast(self._callback, ctypes.c_void_p)
        context.open()

    def _see(self, tensor: int, ask: bool, _: object) -> bool:
        name = ctypes.string_at(tensor + NAME)
        if not self.is_on or not name.startswith(b"Qcur-") or not name[5:].isdigit():
            return not ask
        if not ask:
            shape = (ctypes.c_int64 * 4).from_address(tensor + NE)
            data = ctypes.cast(ctypes.c_void_p.from_address(tensor + DATA).value, ctypes.POINTER(ctypes.c_float))
            self.queries[int(name[5:])] = np.ctypeslib.as_array(data, (shape[2], shape[1], shape[0])).copy()
        return True


def attention(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return how much of all queries' attention each key gets. queries: (tokens, heads, width); keys: (cells, all)."""
    _, heads, width = queries.shape
    keys = keys.reshape(len(keys), -1, width)
    group = heads // keys.shape[1]
    total = np.zeros(len(keys))
    for head in range(heads):
        scores = queries[:, head] @ keys[:, head // group].T / width**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return total
