"""Keeps an index up to date with its folders."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from .ann import CLUSTERS_FROM, GROWTH, ClusterError, ClusterMaker, Clusters, has_faiss, open_clusters
from .chunks import Sizes, embedded_text
from .files import FoundFile, SkippedFile, Stamp, folders_of, walk
from .outline import Unreadable
from .process import MOST_SECONDS, QUICK, EndedError, FileReader, ReadTask, SlowError, seconds_for
from .ranking import EmbedQuery, Rerank, Search, VectorIndex, unit
from .store import Store, headings, set_aside, take_over
from .terms import STEMMER
from .writing import FAILED, SKIPPED, StoredChunk, StoredFile

logger = logging.getLogger("slotcache.docs")

BATCH_TOKENS = 512  # tokens of the chunks that are embedded at once: a request waits for at most one batch
LOOKAHEAD = 64  # chunks fetched at once for embedding
ASKING = 2  # threads for searches: one can read the database while another compares vectors
MOSTLY = 0.8  # of the documents must be in the language of an embedder that knows only one language
TO_BEGIN = 3  # headings that are shown as first questions
LOOK = 0.1  # seconds between two calls of `may_go_on` while clusters are made

EmbedTexts = Callable[[Sequence[str]], np.ndarray]
"""Turns texts into vectors (texts, width), float32."""

MayGoOn = Callable[[], bool]
"""Called between small steps of work. It may block while other work goes first. False stops the work for now."""


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Embedder:
    """An embedding model.

    name: identifies the model's vectors, for example a digest of the model's file.
    language: the model is used only if most documents are in this language; empty for any language.
    """

    name: str
    embed: EmbedTexts
    language: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an index.

    files: the number of files in all folders, including skipped files.
    files_left: the number of files still to read.
    not_read: the number of files that failed or were skipped; updated only after all files have been read.
    chunks, vectors: the number of chunks and the number of vectors in the index.
    by_words: the number of chunks that get no vector.
    clusters: the number of clusters of vectors; 0 if a search compares all vectors.
    reading: the path of the file that is being read; empty if there is none.
    """

    files: int = 0
    files_left: int = 0
    not_read: int = 0
    chunks: int = 0
    vectors: int = 0
    by_words: int = 0
    clusters: int = 0
    reading: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """The difference between the folders and the index.

    changed: the files to read, which are new or have changed.
    skipped: skipped files that the index lacks, or has with another reason.
    removed: the paths in the index that are no longer in the folders.
    """

    changed: tuple[FoundFile, ...]
    skipped: tuple[SkippedFile, ...]
    removed: tuple[str, ...]


class Index:
    """An index of folders. Any thread may search it.

    One thread keeps the index up to date, with `refresh`, or step by step with `scan`, `forget`, `read_all`, `embed_some`
    and `cluster`.

    If the database has an index of an older version or with chunks of another size, all files are read into a new index.
    Until all files are read, searches use the old index.

    progress: the index's `Progress`, which any thread may read.
    threads: the threads that run the searches, so that many searches do not occupy other threads of the process.
    has_vectors: whether documents get vectors. Documents without vectors are found only by the word search.
    headings: headings of some documents, which a user can be offered as first questions; empty until all files are read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        database: Path,
        *,
        embedder: Embedder | None = None,
        chunk_tokens: int = 300,
        clusters_from: int = CLUSTERS_FROM,
    ) -> None:
        """Open the index.

        paths: paths of folders or files.
        database: the file of the index, which is created if it is missing.
        clusters_from: the number of vectors from which searches use clusters, if faiss is installed.

        Raises FileNotFoundError if a path does not exist, ValueError if `chunk_tokens` is too small, OSError or
        sqlite3.Error if the database cannot be opened.
        """
        Sizes.around(chunk_tokens)
        self.folders = folders_of(paths)
        origin = {"chunks": f"{chunk_tokens} tokens, {STEMMER}", "vectors": embedder.name if embedder else ""}
        old = set_aside(database, origin)
        self.store = Store(database, origin)
        self._old, self._closing = (old, VectorIndex(*old.vectors_of(origin["vectors"]))) if old else None, old
        self._maker, self._clusters_from, self._may_cluster = ClusterMaker(database), clusters_from, True
        self.vectors = self._open_vectors()
        self.progress = Progress()
        self.headings: Sequence[str] = ()
        self._embedder, self._chunk_tokens = embedder, chunk_tokens
        self._embedded = 0  # all chunks up to this number have vectors: numbers only grow
        self._reader = FileReader(database)
        self.threads = ThreadPoolExecutor(ASKING, "index")
        self._count()
        self.has_vectors = self._suits()

    def interrupt(self) -> None:
        """Stop the reading of the current file, from any thread.

        Before this call, `may_go_on` must already return False. If it still returned True, the file would count as
        unreadable.
        """
        self._reader.interrupt()

    def close(self) -> None:
        """Stop the reading of files, and close the database."""
        self.threads.shutdown(cancel_futures=True)
        self._reader.close()
        self._maker.close()
        self.store.close()
        if self._closing:
            self._closing.close()

    def search(self, embed: EmbedQuery | None = None, rerank: Rerank | None = None) -> Search:
        """Return a search of this index. embed: must use the model that made the index's vectors."""
        store, vectors = self._old or (self.store, self.vectors)
        embed = embed if self.has_vectors else None
        return Search(store, vectors, folders=self.folders, embed=embed, rerank=rerank, threads=self.threads)

    def expand(self, id: str, before: int = 1, after: int = 1) -> list[StoredChunk]:
        """Return a chunk and its neighbours in the first file that has the chunk, in order; empty for an unknown id.

        before, after: the number of neighbours before and after the chunk.
        """
        for store in (self.store, *(self._old or ())[:1]):
            for chunk in store.chunks(store.numbers(id)[:1]).values():
                place = chunk.places[0]
                numbers = store.numbers_at(place.path, place.number - before, place.number + after)
                found = store.chunks(numbers)
                return [found[number] for number in numbers if number in found]
        return []

    # ---- in the one thread that updates the index --------------------------------------------------------------------

    def refresh(self, may_go_on: MayGoOn = always) -> bool:
        """Read all files that have changed, then embed all chunks without a vector. Return whether all work is done.

        may_go_on: called before each file, after each batch of a file's chunks, after each batch of vectors, and while
        clusters are made. If `may_go_on` returns False, the refresh stops, and the next call of `refresh` resumes it.
        """
        scan = self.scan()
        self.forget(scan)
        if not self.read_all(scan.changed, may_go_on):
            return False
        while self.embed_some():
            if not may_go_on():
                return False
        return self.cluster(may_go_on)

    def scan(self) -> Scan:
        """Compare the folders with the index, by the sizes and times of files. No file is read.

        If the database file has been removed, an empty index is created first.
        """
        if self.store.is_lost:
            self._reader.close()
            self._maker.close()
            self.store.reopen()
            self.vectors, self._embedded = self._open_vectors(), 0
        known = self.store.files()
        seen: dict[str, FoundFile | SkippedFile] = {file.path: file for file in chain.from_iterable(map(walk, self.folders))}
        found = [file for file in seen.values() if isinstance(file, FoundFile)]
        changed = [file for file in found if not _is_read(known.get(file.path), file.stamp)]
        skipped = [file for file in seen.values() if isinstance(file, SkippedFile)]
        news = [file for file in skipped if file.path not in known or known[file.path].reason != file.reason]
        removed = tuple(path for path in known if path not in seen)
        self.progress = replace(self.progress, files=len(seen), files_left=len(changed))
        return Scan(tuple(changed), tuple(news), removed)

    def forget(self, scan: Scan) -> None:
        """Remove the scan's removed files from the index, and store its skipped files with their reasons."""
        if scan.removed:
            self.vectors.remove(self.store.remove_files(scan.removed))
        for file in scan.skipped:
            self._put(StoredFile(file.path, state=SKIPPED, reason=file.reason, stamp=file.stamp))
        self._count()

    def read_all(self, files: Sequence[FoundFile], may_go_on: MayGoOn = always) -> bool:
        """Read files one at a time. Files that are slow to read are tried again, with more time, after all other files.

        may_go_on: called before each file and after each batch of a file's chunks. Once `may_go_on` returns False,
        `read_all` stops reading and returns False.
        """
        slow: list[FoundFile] = []
        for seconds, some in ((QUICK, files), (MOST_SECONDS, slow)):
            for file in some:
                try:
                    if not may_go_on() or not self.read(file, may_go_on, seconds):
                        return False
                except SlowError:
                    slow.append(file)
        self._replace_old()
        self.has_vectors = self._suits()
        self.headings = headings(self.store, TO_BEGIN)
        self.progress = replace(self.progress, not_read=self.store.num_not_read)
        return True

    def read(self, file: FoundFile, may_go_on: MayGoOn = always, seconds: float = MOST_SECONDS) -> bool:
        """Store a file's chunks in the index, or the reason why the file cannot be read.

        Returns False if `may_go_on` stopped the reading.

        seconds: a limit of the processor time, in addition to the limit for a file of this size (`seconds_for`). Raises
        SlowError if the file needs more than `seconds`, but a file of its size may take longer. After a SlowError, the file
        can be tried again with more time.
        """
        most = seconds_for(file.stamp.size)
        self.progress = replace(self.progress, reading=file.path)
        task = ReadTask(
            os.fsencode(file.folder.root),
            file.parts,
            file.path,
            file.stamp,
            known=self.store.digest(file.path),
            tokens=self._chunk_tokens,
            seconds=min(seconds, most),
        )
        try:
            self.vectors.remove(self.store.written_elsewhere(lambda: self._reader.read(task, may_go_on)))
        except Unreadable as error:
            if not may_go_on():  # the reading was stopped, which says nothing about the file
                return False
            if isinstance(error, SlowError) and seconds < most:
                raise
            self._put(StoredFile(file.path, state=FAILED, reason=str(error), stamp=file.stamp))
        except EndedError:
            return False
        finally:
            self.progress = replace(self.progress, reading="")
        self._count(files_left=max(self.progress.files_left - 1, 0))
        return True

    def _replace_old(self) -> None:
        """Make searches use the new index, which now has all files. Copy the vectors of equal texts from the old index."""
        if self._old:
            take_over(self.store, self._old[0])
            self.vectors, self._old = self._open_vectors(), None  # running searches may end in the old index
            self._count()

    def embed_some(self) -> int:
        """Embed one batch of chunks without a vector. Return the number of embedded chunks."""
        if self._embedder is None or not self.has_vectors:
            return 0
        numbers, vectors = embed_next(self.store, self._embedder.embed, self._embedded)
        if numbers:
            self._embedded = numbers[-1]
            self.vectors.add(numbers, vectors)
            self._tend_clusters()
            self._count()
        return len(numbers)

    def _suits(self) -> bool:
        """Whether there is an embedder that knows the language of the documents."""
        return self._embedder is not None and suits(self.store, self._embedder.language)

    def is_in(self, language: str) -> bool:
        """Whether most documents are in a language, by a sample from the index."""
        return suits(self.store, language)

    def cluster(self, may_go_on: MayGoOn = always) -> bool:
        """Make clusters if they are due, and wait for them.

        Returns False if `may_go_on` returned False before the clusters were ready. Clusters that are not ready are still
        made, and a later call uses them.
        """
        while self._tend_clusters(LOOK):
            if not may_go_on():
                return False
        self._count()
        return True

    def _tend_clusters(self, seconds: float = 0.0) -> bool:
        """Start to make clusters if they are due, and use clusters that are ready. Return whether clusters are being made.

        After a failure, this `Index` makes no clusters any more.

        seconds: how long to wait for clusters that are being made.
        """
        if isinstance(self.vectors, Clusters) and len(self.vectors) < self._clusters_from // 2:
            self.store.clusters = ""
            self.vectors = self._open_vectors()
        if not self._maker.is_running and self._are_clusters_due():
            if has_faiss():
                self._maker.start()
            else:
                self._may_cluster = False
                way = "pip install 'slotcache[ann]' makes this faster with clusters"
                logger.warning("each search compares all %d vectors of the documents: %s", len(self.vectors), way)
        try:
            if made := self._maker.made(seconds):
                self.store.clusters = made
                self.vectors = self._open_vectors()
                self._may_cluster = isinstance(self.vectors, Clusters)  # else each changed file would make them again
        except ClusterError as error:
            if len(self.vectors) >= self._clusters_from:  # with fewer vectors, most files were removed meanwhile
                self._may_cluster = False
                logger.warning("no clusters of the vectors could be made: %s; the next start tries again", error)
        return self._maker.is_running

    def _are_clusters_due(self) -> bool:
        count, vectors = len(self.vectors), self.vectors
        is_much = isinstance(vectors, VectorIndex) or vectors.num_changed > GROWTH * count
        return self._may_cluster and count >= self._clusters_from and is_much

    def _open_vectors(self) -> VectorIndex | Clusters:
        """Return the vectors in clusters if there are usable clusters, else all vectors for the exact search."""
        try:
            if has_faiss() and (clusters := open_clusters(self.store)):
                logger.info("%d vectors are searched in %d clusters", len(clusters), clusters.num_clusters)
                return clusters
        except ClusterError as error:
            logger.warning("the clusters of the vectors cannot be used: %s; they are made again", error)
            self.store.clusters = ""
        return VectorIndex(*self.store.vectors())

    def _put(self, file: StoredFile) -> None:
        self.vectors.remove(self.store.put_file(file))

    def _count(self, **changed: int) -> None:
        clusters = self.vectors.num_clusters if isinstance(self.vectors, Clusters) else 0
        counts = {"chunks": self.store.num_chunks, "vectors": len(self.vectors), "clusters": clusters}
        counts["by_words"] = self.store.num_by_words
        self.progress = replace(self.progress, **counts | changed)


def _is_read(known: StoredFile | None, stamp: Stamp) -> bool:
    """Whether a file was read in its present state, even if reading it failed."""
    return known is not None and known.state != SKIPPED and known.stamp == stamp


def suits(store: Store, language: str) -> bool:
    """Whether most chunks are in an embedder's language, by a sample. language: empty if the embedder knows any language."""
    return not language or store.share_in(language) >= MOSTLY


def embed_next(store: Store, embed: EmbedTexts, after: int = 0) -> tuple[list[int], np.ndarray]:
    """Embed one batch of chunks without a vector, and store the vectors.

    after: only chunks with higher numbers are embedded.

    Returns the chunks' numbers and the vectors (chunks, width) float16; both are empty if no chunk is left.
    """
    if not (batch := _batch(store.without_vectors(LOOKAHEAD, after))):
        return [], np.zeros((0, 0), np.float16)
    numbers = [number for number, *_ in batch]
    vectors = unit(embed([embedded_text(title, text) for _, title, text, _ in batch])).astype(np.float16)
    store.put_vectors(numbers, vectors)
    return numbers, vectors


def _batch(waiting: Sequence[tuple[int, str, str, int]]) -> Sequence[tuple[int, str, str, int]]:
    """Return as many of the first chunks as fit into one batch, but at least one."""
    tokens = accumulate(count for *_, count in waiting)
    return waiting[: max(sum(total <= BATCH_TOKENS for total in tokens), 1)]


# ---- The texts that embedding models expect before a query and before a document. ---------------------------------------


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The texts that an embedding model expects before a query and before a document; empty by default."""

    query: str = ""
    document: str = ""


TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
RETRIEVE = "Represent this sentence for searching relevant passages: "
FAMILIES = {
    r"\be5-.*instruct\b": Prefixes(f"{TASK} "),
    r"\be5-": Prefixes("query: ", "passage: "),
    r"\bqwen3-embedding\b": Prefixes(TASK),
    r"\bbge-(small|base|large)-en\b": Prefixes(RETRIEVE),
    r"\bbge-(small|base|large)-zh\b": Prefixes("为这个句子生成表示以用于检索相关文章："),
    r"\bmxbai-embed-large\b": Prefixes(RETRIEVE),
    r"\barctic-embed-[lm]-v2": Prefixes("query: "),
    r"\barctic-embed\b": Prefixes(RETRIEVE),
    r"\bnomic-(embed-text|bert)\b": Prefixes("search_query: ", "search_document: "),
    r"\bgemma-embedding\b": Prefixes("task: search result | query: ", "title: none | text: "),
}
"""Prefixes from model cards, by a pattern for the model's name or architecture. The first match counts."""


def prefixes_of(name: str, architecture: str) -> Prefixes:
    """Return the prefixes of a model by `general.name` and `general.architecture` of its GGUF file."""
    about = re.sub(r"[\s_]+", "-", f"{name} {architecture}".lower())
    return next((prefixes for pattern, prefixes in FAMILIES.items() if re.search(pattern, about)), Prefixes())
