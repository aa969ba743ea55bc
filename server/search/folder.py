"""The folders of --docs and their index. The folders are watched, and changed files are indexed again."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, time
from typing import ParamSpec, Protocol, TypeVar

from ...models.demo.corpus import SUGGESTED
from ...models.model import Model
from ...models.model_files import CACHE_REMEDY, OFFERED, PACKAGED, cache_folder
from ...retrieval.files import Folder, changes
from ...retrieval.index import Index
from ...retrieval.indexes import lock_index, remove_unused
from ...retrieval.ranking import FUSED, LEXICAL, PROVISIONAL, RERANKED, Search
from ...slots.store.private_folder import MOST_SERVERS, FolderError, own_folder, places
from ..config.settings import Settings, SettingsError
from ..engine.fit import WORDS_ALONE
from ..http.api_errors import RequestError
from .vectors import Embedding, Reranking, Vectors

logger = logging.getLogger("slotcache.docs")
P = ParamSpec("P")
T = TypeVar("T")
OPENING, READING, EMBEDDING, READY, FAILED = "opening", "reading", "embedding", "ready", "failed"
NICENESS = 10  # so that the engine's threads get a core first
POLL = 0.02  # seconds between two checks of whether the engine is idle
EVERY = 10.0  # seconds between two lines of progress in the log
REST, LONGEST_REST = 4.0, 10.0  # the pause after a scan: this multiple of the scan's duration, and its limit in seconds
RETRY_AFTER = 30.0  # seconds after which failed work is tried again
UNUSED = 90  # days after which an unused index is removed


class DocumentPrefetch(Protocol):
    """The prefill of documents before a client asks a question about them.

    num_documents: the number of documents prefilled so far.
    num_tokens: the number of tokens of the documents prefilled so far.
    """

    num_documents: int
    num_tokens: int

    def shown(self) -> dict[str, int | bool]: ...


@dataclass(slots=True, eq=False, kw_only=True)
class FolderIndex:
    """The folders of --docs. One scope may search them.

    Only the event loop may use this object, but any thread may use `index`.

    top_k: the default number of hits.
    watcher: keeps the index up to date.
    lock: the file descriptor of the index's lock.
    questions: questions to suggest to users; if there are none, `suggested` makes questions from headings.
    offers: whether `advice` may suggest an embedding model.
    num_searches: the number of searches so far.
    prefixes: prefills the documents for --read-ahead; None without --read-ahead.
    """

    index: Index
    scope: str
    top_k: int
    embedding: Embedding | None
    reranking: Reranking | None
    watcher: FolderWatcher
    lock: int
    questions: Sequence[str] = ()
    offers: bool = False
    num_searches: int = 0
    prefixes: DocumentPrefetch | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a search, in order. A search has the provisional stage only if the index has clusters of vectors."""
        provisional = (PROVISIONAL,) if self.index.progress.clusters else ()
        fused, reranked = (*provisional, FUSED) if self.index.has_vectors else (), (RERANKED,) if self.reranking else ()
        return (LEXICAL, *fused, *reranked)

    @property
    def advice(self) -> str:
        """Advice on how to get vectors; empty if the documents have vectors, or if the user wants no vectors."""
        if self.index.has_vectors or not self.offers:
            return ""
        return OFFER if self.index.is_in(PACKAGED[OFFERED].language) else OTHER_LANGUAGE

    @property
    def suggested(self) -> Sequence[str]:
        """`questions` or, if there are none, questions made from headings. Headings are known once all files are read."""
        return self.questions or [_question(heading) for heading in self.index.headings]

    @property
    def folders(self) -> Sequence[Folder]:
        return self.index.folders

    def search(self) -> Search:
        self.num_searches += 1
        embedding, reranking = self.embedding, self.reranking
        return self.index.search(embedding.query if embedding else None, reranking.scores if reranking else None)

    async def ask(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` in a thread of the index, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.index.threads, partial(work, *arguments, **named))

    def check_scope(self, scope: str, where: str) -> None:
        """Raise RequestError 403 for a scope that may not search these documents. where: the field with the scope."""
        if scope != self.scope:
            raise RequestError(
                f"{where}: the documents of this server belong to another scope, which --docs-scope names",
                status=403,
                param=where,
                code="documents_of_another_scope",
            )

    def close(self) -> None:
        self.watcher.close()
        self.index.close()
        os.utime(self.lock)  # notes the last use of the index
        os.close(self.lock)


def _question(heading: str) -> str:
    """Return a question about a heading. A search for the question ignores the words that this function adds."""
    return heading if heading.endswith("?") else f"What is “{heading}” about?"


class FolderWatcher:
    """Keeps an index up to date in its own threads.

    The watcher first reads files, then computes vectors while no request runs.

    state: opening, reading, embedding, ready or failed. Any thread may read `state`.
    error: the reason for the last failure.
    watches: whether to watch the folders for changes.
    is_busy: returns whether the engine computes for a request.
    """

    def __init__(self, index: Index, *, watches: bool, is_busy: Callable[[], bool]) -> None:
        self._index, self._watches, self._is_busy = index, watches, is_busy
        self.state, self.error = OPENING, ""
        self._wanted, self._stopping, self._settling = Event(), Event(), Lock()
        self._threads: list[Thread] = []
        self._pause = 0.0  # seconds until the next scan
        self._logged = monotonic()
        self._on_read: Callable[[], None] = lambda: None

    def start(self, on_read: Callable[[], None] = lambda: None) -> None:
        """Start the threads.

        on_read: called in a thread whenever all files have been read, even if vectors are still missing.
        """
        self._on_read = on_read
        self.refresh()
        jobs = [("docs", self._work), *([("docs-watch", self._watch)] if self._watches else [])]
        self._threads = [Thread(target=job, name=name, daemon=True) for name, job in jobs]
        for thread in self._threads:
            thread.start()

    def refresh(self) -> None:
        """Ask for a comparison of folders and index after the current work.

        The index is not ready until this comparison is done.
        """
        with self._settling:
            self._wanted.set()
            if self.state in (READY, FAILED):
                self.state = READING

    def stop(self) -> None:
        """Tell all threads to end soon."""
        self._stopping.set()
        self._wanted.set()
        self._index.interrupt()

    def close(self) -> None:
        """End all threads, and wait for them."""
        self.stop()
        for thread in self._threads:
            thread.join()

    # ---- the threads -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            for _ in changes(self._index.folders, self._stopping):
                self.refresh()
        except (OSError, UnicodeError) as error:  # too many watches, or the name of a folder is not UTF-8
            logger.warning("changes of --docs are not noticed: %s; POST /v1/sources/refresh finds them", error)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux has a niceness of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        wait = None
        while not self._stopping.is_set():
            self._wanted.wait(wait)
            self._stopping.wait(self._pause)  # a file that changes all the time in a large folder must not use a whole core
            self._wanted.clear()
            wait = None if self._refresh() else RETRY_AFTER

    def _refresh(self) -> bool:
        """Bring the index up to date, or end early if asked to.

        Return False after an error, so that the work is repeated.
        """
        try:
            if self._read():
                self._on_read()
                if self._embed():
                    self._settle(READY)
                    self._index.cluster(lambda: not (self._stopping.is_set() or self._wanted.is_set()))
        except (OSError, sqlite3.Error, RequestError) as error:
            return self._fail(str(error))
        except Exception as error:  # an unexpected error must end neither the server nor the search
            logger.debug("the index of --docs could not be brought up to date", exc_info=True)
            return self._fail(f"{type(error).__name__}: {error}")
        return True

    def _fail(self, error: str) -> bool:
        if not self._stopping.is_set() and self._settle(FAILED, error):
            logger.warning("the index of --docs is not up to date: %s; the next try is in %.0f s", error, RETRY_AFTER)
        return False

    def _settle(self, state: str, error: str = "") -> bool:
        """Set the state at the end of the work. If the folders must be compared again, keep the state and return False."""
        with self._settling:
            if self._wanted.is_set():
                return False
            self.state, self.error = state, error
            return True

    def _read(self) -> bool:
        """Read the changed files. Return False if the work was stopped."""
        index, began = self._index, monotonic()
        self.state = READING
        scan = index.scan()
        self._pause = min(REST * (monotonic() - began), LONGEST_REST)
        index.forget(scan)
        if not index.read_all(scan.changed, self._may_go_on):
            return False
        if scan.changed or scan.removed:
            now = index.progress
            numbers = (len(scan.changed), len(scan.removed), now.not_read, now.chunks, monotonic() - began)
            logger.info("files: %d new or changed, %d gone, %d not read; documents: %d; after %.1f s", *numbers)
        return True

    def _embed(self) -> bool:
        """Compute missing vectors while no request runs. Return False if the work was stopped or files have changed."""
        while self._gap_comes():
            if not self._index.embed_some():
                return True
            self.state = EMBEDDING
            self._log_progress()
        return False

    def _may_go_on(self) -> bool:
        self._log_progress()
        return not self._stopping.is_set()

    def _gap_comes(self) -> bool:
        """Wait until the engine is idle. Return False if the work has to stop or files must be read first."""
        while not (gives_up := self._stopping.is_set() or self._wanted.is_set()) and self._is_busy():
            self._wanted.wait(POLL)
        return not gives_up

    def _log_progress(self) -> None:
        if monotonic() - self._logged > EVERY:
            self._logged, now = monotonic(), self._index.progress
            numbers = (now.files - now.files_left, now.files, now.vectors, now.chunks - now.by_words)
            logger.info("%s: %d of %d files, vectors of %d of %d documents", self.state, *numbers)


# ---- From settings to the documents of `--docs`. ------------------------------------------------------------------------

OFFER = f"--embedding-model {OFFERED} {PACKAGED[OFFERED].adds}; for other languages, give a GGUF file"
OTHER_LANGUAGE = (
    f"found by words alone: {OFFERED} knows English only, and most of these documents are not in English; "
    "--embedding-model FILE adds vectors of a model for other languages"
)
BY_DEFAULT = (
    f"{OFFERED} was fetched earlier, and adds vectors if documents are mostly English; --embedding-model none prevents that"
)


def load_folder_index(settings: Settings, vectors: Vectors, is_busy: Callable[[], bool]) -> FolderIndex | None:
    """Open the index of --docs. None without --docs. Raises SettingsError and FolderError.

    is_busy: see `FolderWatcher`.
    """
    paths = [Path(path) for path in settings.docs.split("\n") if path]
    if not paths:
        return None
    embedding, ranker = vectors.for_search, vectors.reranking
    embedder = embedding.for_index() if embedding else None
    real = real_paths(settings)
    try:
        name = f"{_name(real, embedder.name if embedder else '')}-{settings.chunk_tokens}"
        database, locked = _free_file(index_folder(settings), name, real)
        _remove_unused(database.parent)
        index = Index(paths, database, embedder=embedder, chunk_tokens=settings.chunk_tokens)
    except (OSError, sqlite3.Error, ValueError) as error:
        raise SettingsError(f"the index of --docs cannot be opened: {error}") from None
    if embedding is None and settings.embedding_model != WORDS_ALONE:
        logger.info("--docs is searched by words alone: %s", OFFER)
    elif embedding and any(astuple(embedding.prefixes)):
        logger.info("queries are embedded with the prefix %r, documents with %r", *astuple(embedding.prefixes))
    elif embedding and embedding.language:
        logger.info("%s", BY_DEFAULT)
    bundled = paths == [bundled_folder()]
    return FolderIndex(
        index=index,
        scope=settings.docs_scope,
        top_k=settings.docs_top_k,
        embedding=embedding,
        reranking=Reranking(ranker) if ranker else None,
        watcher=FolderWatcher(index, watches=settings.docs_watch, is_busy=is_busy),
        lock=locked,
        questions=SUGGESTED if bundled else (),
        offers=settings.embedding_model != WORDS_ALONE,
    )


def check_read_ahead(settings: Settings, model: Model) -> None:
    """Raise SettingsError if --read-ahead is given but cannot prefill anything."""
    hindrances = {
        "it needs documents: --docs": not settings.docs,
        "it needs host memory, and --cache-ram is 0": not settings.cache_ram,
        "this model generates no text": not model.can_chat,
    }
    if settings.read_ahead and (found := next((text for text, holds in hindrances.items() if holds), None)):
        raise SettingsError(f"--read-ahead: {found}")


def real_paths(settings: Settings) -> list[str]:
    """Return the paths of --docs with all links resolved. Raises SettingsError if a path does not exist."""
    try:
        return [str(Path(path).expanduser().resolve(strict=True)) for path in settings.docs.split("\n") if path]
    except FileNotFoundError as error:
        raise SettingsError(f"--docs {error.filename}: there is no such file or folder") from None
    except OSError as error:
        raise SettingsError(f"--docs {error.filename}: {error.strerror}") from None


def index_folder(settings: Settings) -> Path:
    """Return the folder of the indexes, which contain the text of documents. Raises FolderError for an unusable --docs-db.

    Without --docs-db the folder is in the user's cache folder. If the cache folder cannot be used, the result is a temporary
    folder, which is removed at the end of the process.
    """
    if settings.docs_db:
        return own_folder(Path(settings.docs_db).expanduser(), "--docs-db")
    try:
        return own_folder(cache_folder() / "docs", "the cache folder")
    except FolderError as error:
        folder = _temporary_folder()
        temporary = f"the index of documents is in {folder} until the server ends"
        logger.warning("%s; %s: --docs-db PATH keeps it, or %s", error, temporary, CACHE_REMEDY)
        return folder


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="slotcache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def remove_temporary_folder() -> None:
    """Remove the temporary folder of `index_folder`, if there is one.

    Call this before a signal ends the process, since a signal ends the process without `atexit`.
    """
    if _temporary_folder.cache_info().currsize:
        shutil.rmtree(_temporary_folder(), ignore_errors=True)


def bundled_folder() -> Path:
    """Return the folder of the built-in model's documents."""
    return cache_folder() / "demo"


def _name(paths: list[str], embedder: str) -> str:
    """Return a name for the index of these paths. Each embedding model has its own index."""
    return hashlib.blake2b("\0".join([*paths, embedder]).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _free_file(folder: Path, name: str, paths: Sequence[str]) -> tuple[Path, int]:
    """Return an unused file for an index of `paths`, and the file descriptor of the file's lock. Raises OSError."""
    for place in places(folder / name):
        with suppress(BlockingIOError):
            return (database := place.with_suffix(".db")), lock_index(database, paths)
    raise OSError(f"{MOST_SERVERS} servers have an index of these folders in {folder}")


def _remove_unused(folder: Path) -> None:
    """Remove the indexes that no server has used for `UNUSED` days, since they contain the text of folders."""
    try:
        for gone in remove_unused(folder, time() - UNUSED * 86_400):
            size = gone.num_bytes / 2**20
            logger.info("the index of %s was unused for %d days: removed (%.1f MiB)", gone, UNUSED, size)
    except OSError as error:
        logger.warning("indexes unused for %d days cannot be removed: %s", UNUSED, error)
