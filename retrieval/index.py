"""Keeps an index equal to its folder."""

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

BATCH_TOKENS = 512  # of the chunks that are embedded at once: a request waits for no more
LOOKAHEAD = 64  # chunks that are fetched at once to be embedded
ASKING = 2  # threads: one may read the database at a time, and another one compare vectors
MOSTLY = 0.8  # of the documents have to be in the language of an embedder that knows only one
TO_BEGIN = 3  # headings
LOOK = 0.1  # seconds between two looks whether the work is to end, while clusters are made

EmbedTexts = Callable[[Sequence[str]], np.ndarray]
"""Turns texts into vectors (texts, width), float32."""

MayGoOn = Callable[[], bool]
"""Is called between small steps of work. It may wait while other work comes first; False ends the work for now."""


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Embedder:
    """An embedding model. name: identifies the model's vectors, such as a digest of the model's file.

    language: the model is used only if most documents are in this language; empty: any.
    """

    name: str
    embed: EmbedTexts
    language: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an index. files: in all folders, skipped files included. files_left: files still to read. chunks,
    vectors: in the index. reading: the file being read.

    not_read: files that could not be read or were not opened when all files were last read. by_words: chunks that get no
    vector. clusters: the number of clusters of vectors; 0: a search compares all vectors.
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
    """The difference between folders and the index: files to read, files that are not read, and paths that are gone."""

    changed: tuple[FoundFile, ...]
    skipped: tuple[SkippedFile, ...]
    removed: tuple[str, ...]


class Index:
    """An index of folders. One thread keeps it up to date, all at once (`refresh`) or in steps; any thread may search
    it.

    An index of an older version, or of other chunks, answers until all files are read anew.

    progress: for any thread to read. threads: run the searches, so that many searches take no other thread of the
    process. has_vectors: whether documents get vectors; without vectors they are found by words alone. headings:
    headings of some documents, as first questions; empty until all files are read.
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
        """paths: of folders or files. database: the index's file, made if there is none.

        clusters_from: the number of vectors from which searches use clusters, if faiss is installed.

        Raises FileNotFoundError for a path, ValueError for `chunk_tokens`, OSError and sqlite3.Error for the database.
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
        """End the reading of a file, from any thread. `may_go_on` must already return False."""
        self._reader.interrupt()

    def close(self) -> None:
        """End the reading of files, and close the database."""
        self.threads.shutdown(cancel_futures=True)
        self._reader.close()
        self._maker.close()
        self.store.close()
        if self._closing:
            self._closing.close()

    def search(self, embed: EmbedQuery | None = None, rerank: Rerank | None = None) -> Search:
        """Return a search of this index. embed: uses the model that made the index's vectors."""
        store, vectors = self._old or (self.store, self.vectors)
        embed = embed if self.has_vectors else None
        return Search(store, vectors, folders=self.folders, embed=embed, rerank=rerank, threads=self.threads)

    def expand(self, id: str, before: int = 1, after: int = 1) -> list[StoredChunk]:
        """Return a chunk between its neighbours in the first file that has it, in order; empty for an unknown id."""
        for store in (self.store, *(self._old or ())[:1]):
            for chunk in store.chunks(store.numbers(id)[:1]).values():
                place = chunk.places[0]
                numbers = store.numbers_at(place.path, place.number - before, place.number + after)
                found = store.chunks(numbers)
                return [found[number] for number in numbers if number in found]
        return []

    # ---- in the one thread that keeps it up to date ------------------------------------------------------------------

    def refresh(self, may_go_on: MayGoOn = always) -> bool:
        """Read all files that have changed, then embed all chunks that have no vector. Return whether nothing is left.

        may_go_on: called before each file and each batch of vectors, after each batch of a file's chunks, and while
        clusters are made. False ends the refresh, and the next one resumes it.
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

        If the database has been removed, the index starts again, empty.
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
        """Remove the files that are gone from the index, and note skipped files with their reasons."""
        if scan.removed:
            self.vectors.remove(self.store.remove_files(scan.removed))
        for file in scan.skipped:
            self._put(StoredFile(file.path, state=SKIPPED, reason=file.reason, stamp=file.stamp))
        self._count()

    def read_all(self, files: Sequence[FoundFile], may_go_on: MayGoOn = always) -> bool:
        """Read files, one after the other; slow files are read again after all others. Return False if `may_go_on` ended
        it.

        may_go_on: called before each file and after each batch of a file's chunks.
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
        """Store a file's chunks in the index, or why the file cannot be read. Return False if `may_go_on` ended it.

        seconds: the most processor time. Raises SlowError for a file that takes longer, if its size would allow more.
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
            if not may_go_on():  # the reading was ended, and says nothing of the file
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
        """Answer from the new index, which has all files now, and take over the vectors of equal texts."""
        if self._old:
            take_over(self.store, self._old[0])
            self.vectors, self._old = self._open_vectors(), None  # searches that run may end in the old one
            self._count()

    def embed_some(self) -> int:
        """Embed the next chunks without a vector, as many as fit into one batch. Return the number of embedded chunks."""
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
        """Whether there is an embedder, and it knows the language of the documents."""
        return self._embedder is not None and suits(self.store, self._embedder.language)

    def is_in(self, language: str) -> bool:
        """Whether most documents are in a language, as a sample from the index shows."""
        return suits(self.store, language)

    def cluster(self, may_go_on: MayGoOn = always) -> bool:
        """Wait for clusters, if they are due. Return False if `may_go_on` ended the wait; the clusters are then used
        later."""
        while self._tend_clusters(LOOK):
            if not may_go_on():
                return False
        self._count()
        return True

    def _tend_clusters(self, seconds: float = 0.0) -> bool:
        """Start to make clusters if they are due, and use those that are ready. Return whether they are being made.

        seconds: to wait for them. After a failure the next start tries again.
        """
        if isinstance(self.vectors, Clusters) and len(self.vectors) < self._clusters_from // 2:
            self.store.clusters = ""
            self.vectors = self._open_vectors()
        if not self._maker.is_running and self._are_clusters_due():
            if has_faiss():
                self._maker.start()
            else:
                self._may_cluster = False
                way = "pip install 'slotcache[ann]' has them searched in clusters"
                logger.warning("each search compares all %d vectors of the documents: %s", len(self.vectors), way)
        try:
            if made := self._maker.made(seconds):
                self.store.clusters = made
                self.vectors = self._open_vectors()
                self._may_cluster = isinstance(self.vectors, Clusters)  # else each change of a file would make them again
        except ClusterError as error:
            if len(self.vectors) >= self._clusters_from:  # else most files have gone meanwhile
                self._may_cluster = False
                logger.warning("no clusters of the vectors could be made: %s; the next start tries again", error)
        return self._maker.is_running

    def _are_clusters_due(self) -> bool:
        count, vectors = len(self.vectors), self.vectors
        is_much = isinstance(vectors, VectorIndex) or vectors.num_changed > GROWTH * count
        return self._may_cluster and count >= self._clusters_from and is_much

    def _open_vectors(self) -> VectorIndex | Clusters:
        """Return the vectors in clusters if there are usable ones, else all of them for the exact search."""
        try:
            if has_faiss() and (clusters := open_clusters(self.store)):
                logger.info("%d vectors are searched in %d clusters", len(clusters), clusters.num_clusters)
                return clusters
        except ClusterError as error:
            logger.warning("the clusters of the vectors cannot be used: %s; they are made again, of the vectors", error)
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
    """Whether a file was read as it is now, even if reading it failed."""
    return known is not None and known.state != SKIPPED and known.stamp == stamp


def suits(store: Store, language: str) -> bool:
    """Whether most chunks are in an embedder's language, as a sample shows. language: empty if the embedder knows any."""
    return not language or store.share_in(language) >= MOSTLY


def embed_next(store: Store, embed: EmbedTexts, after: int = 0) -> tuple[list[int], np.ndarray]:
    """Embed the next chunks without a vector, as many as fit into one batch, and store their vectors.

    after: as for `Store.without_vectors`. Returns the chunks' numbers and the vectors (chunks, width) float16; both are
    empty if no chunk is left.
    """
    if not (batch := _batch(store.without_vectors(LOOKAHEAD, after))):
        return [], np.zeros((0, 0), np.float16)
    numbers = [number for number, *_ in batch]
    vectors = unit(embed([embedded_text(title, text) for _, title, text, _ in batch])).astype(np.float16)
    store.put_vectors(numbers, vectors)
    return numbers, vectors


def _batch(waiting: Sequence[tuple[int, str, str, int]]) -> Sequence[tuple[int, str, str, int]]:
    """Return the first chunks, at least one, that together have no more tokens than a batch may."""
    tokens = accumulate(count for *_, count in waiting)
    return waiting[: max(sum(total <= BATCH_TOKENS for total in tokens), 1)]


# ---- The texts that embedding models were trained to see before a query and before a document. --------------------------


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
"""Prefixes by a pattern of a model's name or architecture, from the model cards. The first match counts."""


def prefixes_of(name: str, architecture: str) -> Prefixes:
    """Return the prefixes of a model by `general.name` and `general.architecture` of its GGUF file."""
    about = re.sub(r"[\s_]+", "-", f"{name} {architecture}".lower())
    return next((prefixes for pattern, prefixes in FAMILIES.items() if re.search(pattern, about)), Prefixes())
