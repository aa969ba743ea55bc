"""Search by vectors: exact, over all of them. Up to some 200,000 chunks one pass is fast enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np

SLACK = 1.5  # times the rows in use, when the matrix has to grow


class VectorIndex:
    """Vectors by the number of their chunk, in memory, as unit vectors. Safe from several threads."""

    def __init__(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """numbers: (chunks,) int64. vectors: (chunks, width)."""
        self._lock = Lock()
        self._numbers = numbers
        self._vectors = vectors.astype(np.float32)
        self._size = len(numbers)

    def __len__(self) -> int:
        return self._size

    def add(self, numbers: Sequence[int], vectors: np.ndarray) -> None:
        """Add the vectors (chunks, width) of chunks that have none yet."""
        with self._lock:
            size = self._size + len(numbers)
            if size > len(self._numbers) or self._vectors.shape[1] != vectors.shape[1]:
                self._grow(int(SLACK * size), vectors.shape[1])
            self._numbers[self._size : size] = numbers
            self._vectors[self._size : size] = vectors
            self._size = size

    def _grow(self, size: int, width: int) -> None:
        numbers, vectors = np.zeros(size, np.int64), np.zeros((size, width), np.float32)
        numbers[: self._size] = self._numbers[: self._size]
        if self._size:
            vectors[: self._size] = self._vectors[: self._size]
        self._numbers, self._vectors = numbers, vectors

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove the vectors of chunks. The last rows take their places."""
        numbers = np.fromiter(numbers, np.int64)
        if not len(numbers):
            return
        with self._lock:
            gone = np.isin(self._numbers[: self._size], numbers)
            holes = np.flatnonzero(gone)
            size = self._size - len(holes)
            holes = holes[holes < size]
            movers = size + np.flatnonzero(~gone[size:])
            self._numbers[holes], self._vectors[holes] = self._numbers[movers], self._vectors[movers]
            self._size = size

    def search(self, query: np.ndarray, limit: int, only: np.ndarray | None = None) -> list[tuple[int, float]]:
        """Return the numbers of the chunks nearest to a query (width,), the nearest first, with their cosines.

        only: the numbers to search among; None: all.
        """
        with self._lock:
            if not self._size:
                return []
            numbers = self._numbers[: self._size]
            scores = self._vectors[: self._size] @ unit(query[None])[0]
            if only is not None:
                kept = np.flatnonzero(np.isin(numbers, only))
                numbers, scores = numbers[kept], scores[kept]
            else:
                numbers = numbers.copy()
        best = np.argpartition(-scores, limit)[:limit] if limit < len(scores) else np.arange(len(scores))
        best = best[np.lexsort((numbers[best], -scores[best]))]
        return list(zip(numbers[best].tolist(), scores[best].tolist(), strict=True))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (n, width) at length 1, float32; zeros, and what is no number, become zeros."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0.0, neginf=0.0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
