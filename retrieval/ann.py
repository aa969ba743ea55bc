"""Searches vectors in clusters, for indexes so large that the exact search is slow. Needs faiss (`slotcache[ann]`).

The vectors are in an inverted file index (IVF): k-means puts vectors that are near each other into one cluster. A search
compares the query only with the vectors of the clusters nearest to it. A search takes its clusters in `GROUPS` groups. After
each group, it yields the nearest vectors found so far (RAGCache, section 5.3: pipelined vector search). As in RAGCache, a
search ends after a fixed number of clusters.

The clusters are in a memory-mapped file beside the database. The vectors in the cluster file have the database's precision,
float16, so cosines equal those of an exact search. A child process makes the file. The database gets a record of the file
once the file is complete. A crash can leave a file without a record. A file without a record is never used: searches are
exact until another file is made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from secrets import token_hex
from threading import Lock
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from .process import signal_of, start_module
from .ranking import Nearest, unit
from .store import Store
from .writing import connect

CLUSTERS_FROM = 50_000  # vectors: with fewer, the exact search ends before all other work for a question
SHARE = 0.1  # of the clusters that a search compares: recall@5 was at least 0.98 with 100,000 vectors, 0.99 with 1,000,000
GROUPS = 12  # with 1,000,000 vectors, the first group takes 0.15 of the time; with 8 groups, it takes 0.19
GROWTH = 0.5  # of the vectors: after so many additions and removals, clusters are made again
SAMPLE = 64  # vectors per cluster for the training of k-means
BATCH = 16384  # vectors that are put into clusters at once
NICENESS = 12  # as in `reader`
ENDING, LETTERS = ".ivf", 8  # a file's suffix, and random bytes in its name: a database may have had other files


class ClusterFile(msgspec.Struct, frozen=True):
    """The database's record of a cluster file.

    size: the file's size in bytes.
    last: the highest number of a chunk in the file.
    vectors: the number of vectors in the file.
    """

    name: str
    size: int
    last: int
    vectors: int


CLUSTER_FILES = msgspec.json.Decoder(ClusterFile)


class ClusterError(Exception):
    """Clusters cannot be used or made, for the reason in the message. Without clusters, searches compare all vectors."""


def has_faiss() -> bool:
    return find_spec("faiss") is not None


def _faiss() -> ModuleType:
    """Import faiss at its first use, because the import takes 0.2 s and about 40 MB."""
    faiss = import_module("faiss")
    faiss.omp_set_num_threads(1)  # for the calling thread: more threads would take the engine's cores
    return faiss


class Clusters:
    """The vectors of chunks, in clusters. Any thread may search; one thread may add and remove meanwhile.

    A vector has the number of its chunk. Chunks never get the number of a removed chunk, so a removed vector cannot come
    back. Chunks that are newer than the file have numbers above the file's `last`.
    """

    def __init__(self, path: Path, kept: ClusterFile, numbers: np.ndarray) -> None:
        """Open a cluster file. numbers: the numbers of all chunks in the database. Raises ClusterError."""
        try:
            faiss = _faiss()
            if (size := path.stat().st_size) != kept.size:
                raise ClusterError(f"it has {size} bytes instead of {kept.size}")
            self._mapped = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        except (ImportError, OSError, RuntimeError, MemoryError) as error:  # a damaged length may ask for any memory
            raise ClusterError(str(error).splitlines()[0]) from None
        if self._mapped.ntotal != kept.vectors:
            raise ClusterError(f"it has {self._mapped.ntotal} vectors instead of {kept.vectors}")
        self._added = _empty(faiss, self._mapped.quantizer, self._mapped.d, self._mapped.nlist)
        self._added.is_trained = True
        self._lock = Lock()
        numbers = numbers[numbers <= kept.last]
        self._is_there = _bits(numbers, kept.last)
        self._size, self.num_changed = len(numbers), kept.vectors - len(numbers)

    def __len__(self) -> int:
        return self._size

    @property
    def num_clusters(self) -> int:
        return self._mapped.nlist

    def add(self, numbers: Sequence[int] | np.ndarray, vectors: np.ndarray) -> None:
        """Put the vectors (chunks, width) of new chunks into their clusters."""
        numbers = np.asarray(numbers, np.int64)
        if not len(numbers):
            return
        with self._lock:
            _faiss()
            self._added.add_with_ids(vectors.astype(np.float32), numbers)
            bits = np.zeros(max(len(self._is_there), int(numbers.max()) // 8 + 1), np.uint8)
            bits[: len(self._is_there)] = self._is_there
            self._is_there = bits | _bits(numbers, 8 * len(bits) - 1)
            self._size += len(numbers)
            self.num_changed += len(numbers)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove the vectors of chunks from all searches.

        The space of removed vectors is freed when clusters are made again.
        """
        with self._lock:
            gone = _bits(np.fromiter(numbers, np.int64), 8 * len(self._is_there) - 1) & self._is_there
            self._is_there = self._is_there & ~gone
            count = int(np.unpackbits(gone.view(np.uint8)).sum())
            self._size -= count
            self.num_changed += count

    def groups(self, query: np.ndarray, limit: int, only: np.ndarray | None = None) -> Iterator[tuple[Nearest, bool]]:
        """Search the clusters group by group. After each group, yield the `limit` nearest vectors so far.

        Each yielded pair has the vectors, and whether the last group has been searched.

        only: the numbers of the vectors to search among; None for all. If `only` is given, all clusters are searched,
        because the nearest clusters may have none of the given vectors.
        """
        faiss, query = _faiss(), unit(query[None])
        count = self.num_clusters if only is not None else max(round(SHARE * self.num_clusters), 1)
        nearness, clusters = self._mapped.quantizer.search(query, count)
        bits = self._is_there if only is None else self._is_there & _bits(only, 8 * len(self._is_there) - 1)
        has_gone = self.num_changed > self._added.ntotal
        selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits)) if has_gone or only is not None else None
        numbers, cosines = np.empty(0, np.int64), np.empty(0, np.float32)
        for part in np.array_split(np.arange(count), min(GROUPS, count)):
            group = nearness[:, part], clusters[:, part]
            parameters = faiss.SearchParametersIVF(nprobe=len(part), sel=selector)
            found = [_compare(self._mapped, query, limit, group, parameters)]
            if self._added.ntotal:
                with self._lock:
                    found.append(_compare(self._added, query, limit, group, parameters))
            numbers = np.concatenate([numbers, *(one for one, _ in found)])
            cosines = np.concatenate([cosines, *(one for _, one in found)])
            best = np.lexsort((numbers, -cosines))[:limit]
            numbers, cosines = numbers[best], cosines[best]
            yield list(zip(numbers.tolist(), cosines.tolist(), strict=True)), bool(part[-1] == count - 1)


Pair = tuple[np.ndarray, np.ndarray]


def _compare(index: Any, query: np.ndarray, limit: int, group: Pair, parameters: object) -> Pair:
    """Search a group of clusters. Return the numbers and cosines of the `limit` vectors nearest to the query.

    group: the inner products of the query and the clusters' centres, and the clusters' numbers.
    """
    faiss, (nearness, clusters) = _faiss(), group
    cosines, numbers = np.empty(limit, np.float32), np.empty(limit, np.int64)
    arrays = map(faiss.swig_ptr, (np.ascontiguousarray(clusters), np.ascontiguousarray(nearness), cosines, numbers))
    index.search_preassigned_c(1, faiss.swig_ptr(query), limit, *arrays, False, parameters)
    is_found = numbers >= 0
    return numbers[is_found], cosines[is_found]


def _bits(numbers: np.ndarray, most: int) -> np.ndarray:
    """Return a bitmap of those numbers that are at most `most`, in faiss's order of bits."""
    flags = np.zeros(most + 1, np.bool_)
    flags[numbers[numbers <= most]] = True
    return np.packbits(flags, bitorder="little")


def _empty(faiss: ModuleType, quantizer: object, width: int, num_clusters: int) -> Any:
    """Return clusters of float16 without any vectors."""
    kind, metric = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
    return faiss.IndexIVFScalarQuantizer(quantizer, width, num_clusters, kind, metric, False)


def open_clusters(store: Store) -> Clusters | None:
    """Open the clusters of a database, and add the vectors that are newer than the cluster file.

    Returns None if the database has no clusters. Removes cluster files without a record in the database. Raises ClusterError
    if the recorded file cannot be used.
    """
    try:
        kept = CLUSTER_FILES.decode(text) if (text := store.clusters) else None
    except msgspec.MsgspecError as error:
        raise ClusterError(str(error)) from None
    own = re.compile(rf"{re.escape(store.path.stem)}-[0-9a-f]{{{2 * LETTERS}}}{re.escape(ENDING)}")
    for path in store.path.parent.iterdir():  # another server's database may have this name plus a number
        if own.fullmatch(path.name) and (not kept or path.name != kept.name):
            path.unlink(missing_ok=True)
    if kept is None:
        return None
    clusters = Clusters(store.path.with_name(kept.name), kept, store.all_numbers())
    last = kept.last
    while len((added := store.vectors(last, BATCH))[0]):
        clusters.add(*added)
        last = int(added[0][-1])
    return clusters


# ---- Making clusters, in another process. -------------------------------------------------------------------------------


class ClusterMaker:
    """Makes the cluster file of a database, in another process. One thread may use it; any thread may close it."""

    def __init__(self, database: Path) -> None:
        self._database = self._file = database
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a file is being made: from `start` until `made` notices that the process has ended, or until `close`."""
        return self._process is not None

    def start(self) -> None:
        self._file = self._database.with_name(f"{self._database.stem}-{token_hex(LETTERS)}{ENDING}")
        self._process = start_module("ann", str(self._database), str(self._file), stderr=subprocess.PIPE)

    def made(self, seconds: float = 0.0) -> str:
        """Return the new file's record for the database; empty if the file is not ready. Raises ClusterError.

        seconds: how long to wait for the file.
        """
        if (process := self._process) is None:
            return ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return ""
        (answer, errors), self._process = process.communicate(), None
        if process.returncode:
            self._file.unlink(missing_ok=True)  # it may have filled the disk
            lines = errors.decode(errors="replace").splitlines()
            raise ClusterError(signal_of(process.returncode) or (lines or ["no reason is known"])[-1])
        return answer.decode()

    def close(self) -> None:
        """End the process, and remove its unfinished file."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
            self._file.unlink(missing_ok=True)


def main(database: str, file: str) -> None:
    """Make a file of clusters from all vectors of a database, and print the record of the file."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICENESS)
    os.umask(0o077)  # only the owner may read the file, as the database: texts can be guessed from their vectors
    path, made_at = Path(database), Path(file)
    with closing(connect(path, creates=False)) as connection:
        connection.execute("begin")  # all reads see the same state
        numbers = np.fromiter(
            (number for (number,) in connection.execute("select chunk from vector order by chunk")), np.int64
        )
        if not len(numbers):
            sys.exit("no vectors are left")
        faiss, num_clusters = _faiss(), isqrt(len(numbers))
        chosen = np.random.default_rng(0).permutation(len(numbers))[: SAMPLE * num_clusters]
        query = "select x from vector where chunk = ?"
        sample = _floats([connection.execute(query, (number,)).fetchone() for number in numbers[np.sort(chosen)].tolist()])
        quantizer = faiss.IndexFlatIP(sample.shape[1])
        made = _empty(faiss, quantizer, sample.shape[1], num_clusters)
        made.train(sample)
        del sample
        rows = connection.execute("select x from vector order by chunk")
        for first in range(0, len(numbers), BATCH):
            made.add_with_ids(_floats(rows.fetchmany(BATCH)), numbers[first : first + BATCH])
    faiss.write_index(made, file)
    with made_at.open("rb+") as written:
        os.fsync(written.fileno())
    faiss.read_index(file, faiss.IO_FLAG_MMAP)  # faiss does not report a disk that was full at the very end
    kept = ClusterFile(made_at.name, made_at.stat().st_size, last=int(numbers[-1]), vectors=len(numbers))
    sys.stdout.write(msgspec.json.encode(kept).decode())


def _floats(rows: Sequence[tuple[bytes]]) -> np.ndarray:
    return np.frombuffer(b"".join(row[0] for row in rows), np.float16).reshape(len(rows), -1).astype(np.float32)
