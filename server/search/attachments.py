"""Files that clients attach to a chat. They are read like files of --docs, and may be kept for searches.

Each file has its own folder, reading process and index. So nothing in a file affects a search in another file: even the
frequency of a word is counted within one file. There are three queues, so that long work does not delay short work:

    quick     a1 b1 a2 a3 ...
    slow      a2 ...
    vectors   a1 b1 a2 a1 ...

The clients (a and b) take turns in the first two queues, and the scopes of kept files take turns in the third. The quick
queue reads one file at a time, for at most `QUICK` seconds of processor time. If the quick queue does not read a file in
this time, the slow queue reads the file from the start, with the time limit of a file of --docs. The third queue computes
the vectors of kept files, a batch of documents at a time, while no request runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from time import monotonic

import numpy as np

from ...retrieval.files import MAX_BYTES, NEVER_READ, Folder
from ...retrieval.index import embed_next, suits
from ...retrieval.outline import Unreadable
from ...retrieval.process import MOST_SECONDS, QUICK, EndedError, FileReader, ReadTask, SlowError, seconds_for
from ...retrieval.ranking import BY_VECTORS, BY_WORDS, FUSED, LEXICAL, EmbedQuery, Hit, Query, Search, Stage, VectorIndex
from ...retrieval.store import FilePart, Store
from ...retrieval.terms import STEMMER
from ...slots.store.private_folder import MOST_SERVERS, FolderError, lock, places
from ..config.settings import Settings
from ..http.api_errors import RequestError
from ..http.threads import CLIENT, Disconnected, Turns, give_way
from .folder import EMBEDDING, FAILED, OTHER_LANGUAGE, POLL, READY, index_folder
from .vectors import Embedding

logger = logging.getLogger("slotcache.docs")
MOST_WAITING = 256 << 20  # bytes of files that wait or are being read; one client may have half of them
MOST_OF_SCOPE, MOST_FILES = 16, 64  # kept files in a scope, and in total
MOST_KEPT = 1 << 30  # bytes on disk of all kept files
SECONDS_KEPT = 24 * 3600.0  # for which a file is kept after its last use
MAX_NAME = 200  # characters: of a longer file name, only the end is kept
BATCH = 64  # parts of a text that are read from an index at a time
NO_VECTORS = (np.zeros(0, np.int64), np.zeros((0, 0), np.float32))


class Attachment:
    """One attached file and its index, in their own folder. Any thread may use the object after `read`.

    name: the file's name, without control characters.
    size: bytes of the file.
    letters, tokens: the length of the file's text in letters and in tokens.
    num_bytes: bytes of the folder on disk.
    left_out: how many letters were left out on purpose, by kind of text, such as navigation.
    scope: the scope that may search a kept file.
    used: the time of the last use of a kept file, in monotonic seconds.
    state: `embedding`, `ready`, or `failed` with an `error`.
    num_vectors: vectors computed so far.
    num_embedded: documents that get a vector.
    embedding: the model that computed the vectors; None until all vectors are computed.
    """

    def __init__(self, folder: Path, name: str, data: bytes, chunk_tokens: int) -> None:
        """Write the file and an empty index to disk. Raises OSError and sqlite3.Error."""
        self.id, self.name, self.size = f"file-{secrets.token_hex(12)}", name, len(data)
        self.letters = self.tokens = self.num_bytes = 0
        self.left_out: Mapping[str, int] = {}
        self.scope, self.used = "", monotonic()
        self.state, self.error = READY, ""
        self.num_vectors = self.num_embedded = 0
        self.embedding: Embedding | None = None
        self._folder, self._chunk_tokens = folder / self.id, chunk_tokens
        self._folder.mkdir(mode=0o700)
        try:
            (self._folder / "file").write_bytes(data)
            self.store = Store(self._folder / "index.db", {"chunks": f"{chunk_tokens} tokens, {STEMMER}", "vectors": ""})
        except BaseException:  # if the disk is full, the written part must not keep it full
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._reader, self._lock, self._over = FileReader(self.store.path), Lock(), Event()

    @property
    def kind(self) -> str:
        return PurePosixPath(self.name).suffix.lower().removeprefix(".") or "txt"

    def read(self, seconds: float) -> None:
        """Read the file in a separate process.

        Raises Unreadable and sqlite3.Error. Raises SlowError if the time runs out, and EndedError after `stop`.

        seconds: the most processor time. A small file may get less time than `seconds`.
        """
        with self._lock:
            if self._over.is_set():
                raise EndedError
            task = ReadTask(
                os.fsencode(self._folder / "file"),
                (),
                self.name,
                NEVER_READ,
                known="",
                tokens=self._chunk_tokens,
                seconds=min(seconds, seconds_for(self.size)),
            )
            try:
                self.store.written_elsewhere(lambda: self._reader.read(task, lambda: not self._over.is_set()))
            finally:
                self._reader.close()
            (self._folder / "file").unlink()
            self.left_out = self.store.files()[self.name].left_out
            self.num_embedded = self.store.num_chunks - self.store.num_by_words
            self._measure()

    def parts(self) -> Iterator[FilePart]:
        """Yield the parts of the file's text in order, each with its position in the file."""
        first = 1
        while batch := self.store.parts(self.name, first, first + BATCH - 1):
            yield from batch
            first += BATCH

    def embed(self, embedding: Embedding) -> None:
        """Compute the vectors of the file's documents while no request runs.

        Between two batches of documents, the files of other scopes get their turns.

        A file in a language that the model does not know gets no vectors. Raises RequestError and sqlite3.Error. Raises
        Disconnected after `stop`.
        """
        if suits(self.store, embedding.language):
            numbers = [0]
            while numbers:
                self._wait_for_gap(embedding)
                numbers, _ = embed_next(self.store, embedding.embed, after=numbers[-1])
                self.num_vectors += len(numbers)
            self._measure()
            self.embedding = embedding
        self.state = READY

    def _wait_for_gap(self, embedding: Embedding) -> None:
        """Wait until it is this file's turn and the engine is idle. Raises Disconnected if the work has to end."""
        give_way()
        while embedding.is_busy() and not self._over.wait(POLL):
            give_way()
        if self._over.is_set():
            raise Disconnected

    def fail(self, error: str) -> None:
        """Store the reason why the file has no vectors. A search of the file by words still works."""
        self.state, self.error = FAILED, error

    def _measure(self) -> None:
        self.num_bytes = sum(one.stat().st_size for one in self._folder.iterdir())

    async def search(self, query: Query, threads: Executor, embed: EmbedQuery | None) -> Stage:
        """Search the file by words and, if `embed` is given, also by vectors. Return the last stage with the final hits.

        The vectors are read from the index in each search. Raises sqlite3.ProgrammingError for a removed file.
        """

        def read() -> VectorIndex:
            return VectorIndex(*(self.store.vectors() if embed else NO_VECTORS))

        vectors = await asyncio.get_running_loop().run_in_executor(threads, read)
        *_, last = [stage async for stage in Search(self.store, vectors, embed=embed, threads=threads).stages(query)]
        return last

    def stop(self) -> None:
        """End the reading of the file and the work on its vectors.

        The reading and the work on vectors cannot start again.
        """
        self._over.set()
        self._reader.interrupt()

    def remove(self) -> None:
        self.stop()
        with self._lock:
            self.store.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class Attachments:
    """Reads attached files, and keeps some of them for searches by one scope each. Only the event loop may use this object.

    num_read: files that were read.
    num_failed: files that could not be read.
    num_searches: searches in kept files.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._opening = settings, Lock()
        self._place: Path | None = None  # the folder for all files, made for the first file and locked by `_locked`
        self._locked = -1
        self._quick, self._slow = Turns("quick-files"), Turns("slow-files")
        self._threads, self._searching = ThreadPoolExecutor(1, "attachments"), asyncio.Lock()
        self._embedding: Embedding | None = None
        self._vectors = Turns("attached-vectors")
        self._kept: OrderedDict[tuple[str, str], Attachment] = (
            OrderedDict()
        )  # by scope and id, the least recently used first
        self._taken: set[Attachment] = set()  # files that are not released yet
        self._is_stopped = False
        self._waiting: Counter[tuple[object, ...]] = Counter()  # bytes of files that are not released yet, by client
        self.num_read = self.num_failed = self.num_searches = 0

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_vectors(self) -> int:
        return sum(file.num_vectors for file in self._kept.values())

    def embed_with(self, embedding: Embedding | None) -> None:
        """Use this model for the vectors of files that are kept from now on. Vectors of another model are no longer used."""
        self._embedding = embedding

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def take(self, name: str, data: bytes) -> Attachment:
        """Write an attached file to disk. After `take`, the caller must `read` the file, and must `release` it at the end.

        Raises RequestError: 400 for an empty file, 413 for a file that is too large, and 503 if too many files wait, if the
        disk is full, or if the server shuts down.

        name: the name that the client gave.
        """
        name = Folder(Path()).shown((PurePosixPath(name.replace("\\", "/")).name[-MAX_NAME:] or "file",))
        if not data:
            raise unreadable(name, "it is empty")
        if len(data) > MAX_BYTES:
            wrong = f"{name} has {len(data) >> 20:,} MiB: expected at most {MAX_BYTES >> 20} MiB"
            raise RequestError(wrong, status=413, param="file")
        client, size = CLIENT.get(), len(data)
        if self._is_stopped:
            raise _stopping()
        if self._waiting.total() + size > MOST_WAITING or self._waiting[client] + size > MOST_WAITING // 2:
            raise RequestError("too many files are waiting: try again", status=503, retry_after=1)
        self._waiting[client] += size
        try:
            file = await asyncio.to_thread(self._write, name, data)
        except BaseException as error:  # also a cancelled caller, or a system without free threads
            self._free(size)
            if isinstance(error, OSError | FolderError | sqlite3.Error):
                raise RequestError(f"files cannot be stored here: {error}", status=503) from None
            raise
        self._taken.add(file)
        return file

    async def read(self, file: Attachment) -> None:
        """Read a file when it is its client's turn.

        Raises RequestError: 400 for an unreadable file, and 503 if the index cannot be stored or the server shuts down.
        """
        try:
            try:
                await self._in_turn(self._quick, file, QUICK)
            except SlowError:
                await self._in_turn(self._slow, file, MOST_SECONDS)
        except Unreadable as error:
            self.num_failed += 1
            raise unreadable(file.name, str(error)) from None
        except sqlite3.Error as error:
            raise RequestError(f"files cannot be stored here: {error}", status=503) from None
        except (Disconnected, EndedError):
            raise _stopping() from None
        self.num_read += 1

    def release(self, file: Attachment) -> None:
        """Remove a file, unless it is kept for searches."""
        self._free(file.size)
        self._taken.discard(file)
        if self._kept.get((file.scope, file.id)) is not file:
            asyncio.get_running_loop().run_in_executor(None, file.remove)

    async def _in_turn(self, turns: Turns, file: Attachment, seconds: float) -> None:
        work = turns.submit(partial(file.read, seconds), CLIENT.get())
        try:
            await asyncio.wrap_future(work.future)
        finally:
            work.disconnect()

    def _free(self, size: int) -> None:
        client = CLIENT.get()
        self._waiting[client] -= size
        if not self._waiting[client]:
            del self._waiting[client]

    def _write(self, name: str, data: bytes) -> Attachment:
        return Attachment(self._own_folder(), name, data, self._settings.chunk_tokens)

    def _own_folder(self) -> Path:
        """Return the folder for the files of this server. If a killed server left files in this folder, they are deleted.

        Raises OSError and FolderError.
        """
        with self._opening:
            if self._place is None:
                self._place, self._locked = _free_folder(index_folder(self._settings) / "attached")
                shutil.rmtree(self._place, ignore_errors=True)
            self._place.mkdir(mode=0o700, exist_ok=True)  # in every call, since an earlier call may have failed
            return self._place

    # ---- keeping and searching -------------------------------------------------------------------------------------

    def keep(self, scope: str, file: Attachment) -> None:
        """Keep a file, so that the chats of a scope can search it. The file must have been read.

        The file can be searched by words at once, and by vectors once all vectors are computed. If a scope has too many
        files, its least recently used files are removed. Files are also removed if all scopes together have too many files,
        or if the files take too much of the disk. In that case, the scope whose files take most bytes loses its least
        recently used files. Raises RequestError at shutdown.
        """
        file.scope, file.used = scope, monotonic()
        if self._embedding is not None:
            file.state = EMBEDDING
            self._vectors.submit(partial(self._embed, file, self._embedding), (scope,))
        self._kept[scope, file.id] = file
        self._forget_old()
        while sum(1 for other, _ in self._kept if other == scope) > MOST_OF_SCOPE:
            self._forget_of(scope)
        while len(self._kept) > MOST_FILES or sum(one.num_bytes for one in self._kept.values()) > MOST_KEPT:
            takes: Counter[str] = Counter()
            for one in self._kept.values():
                takes[one.scope] += one.num_bytes
            self._forget_of(max(takes, key=takes.__getitem__))

    def find(self, scope: str, id: str, where: str = "id") -> Attachment:
        """Return a kept file of a scope, and note its use. Raises RequestError 404 if the scope has no such file.

        where: the name of the request's field that has the id.
        """
        self._forget_old()
        file = self._kept.get((scope, id))
        if file is None:
            raise _gone(id, where)
        file.used = monotonic()
        self._kept.move_to_end((scope, id))
        return file

    def forget(self, scope: str, id: str) -> None:
        """Remove a kept file of a scope. Raises RequestError 404."""
        self.find(scope, id)
        self._remove(scope, id)

    def stages(self, file: Attachment) -> tuple[str, ...]:
        """Return the stages of a search in a file: by words, and also by vectors once all vectors are computed."""
        return (LEXICAL, FUSED) if self._has_vectors(file) else (LEXICAL,)

    def _has_vectors(self, file: Attachment) -> bool:
        return file.embedding is not None and file.embedding is self._embedding

    async def search(self, scope: str, ids: Sequence[str], query: Query) -> dict[str, Stage]:
        """Search several files, one after another. Return the last stage of each search by the file's id.

        Only one file's vectors are in memory at a time. Raises RequestError: 404 for a file that is not kept, and 400 or 503
        if the query uses only vectors and a file has none.
        """
        files = {id: self.find(scope, id, _where(ids, id)) for id in ids}
        if query.by == BY_VECTORS:
            for file in files.values():
                self._check_vectors(file)
        vector: np.ndarray | None = None
        if self._embedding is not None and query.by != BY_WORDS and any(map(self._has_vectors, files.values())):
            vector = await self._embedding.query(query.text)
        found: dict[str, Stage] = {}
        for id, file in files.items():
            self.num_searches += 1
            embed = None if vector is None or not self._has_vectors(file) else partial(_known, vector)
            try:
                async with self._searching:
                    stage = await file.search(query, self._threads, embed)
            except sqlite3.ProgrammingError:  # the file was removed meanwhile
                raise _gone(id, _where(ids, id)) from None
            found[id] = replace(stage, hits=tuple(replace(hit, file=id) for hit in stage.hits))
        return found

    def _check_vectors(self, file: Attachment) -> None:
        """Raise RequestError for a file without vectors: 503 if they are still being computed, and otherwise 400."""
        if self._has_vectors(file):
            return
        wrong, param = f"retrieval.by is vectors, and {file.name} has none", "retrieval.by"
        if file.state == EMBEDDING:
            done = f"{file.num_vectors:,} of {file.num_embedded:,} documents have one so far: ask again, or search by words"
            raise RequestError(f"{wrong} yet: {done}", status=503, param=param, code="vectors_not_ready", retry_after=1)
        lacks = OTHER_LANGUAGE if self._embedding else "expected a server with --embedding-model"
        raise RequestError(f"{wrong}: {file.error or lacks}", param=param)

    def _embed(self, file: Attachment, embedding: Embedding) -> None:
        """Compute the vectors of a file, in a thread of `_vectors`.

        If the computation fails, searches of the file by words still work.
        """
        try:
            file.embed(embedding)
        except sqlite3.ProgrammingError:  # the file was removed meanwhile
            file.fail("the file was removed")
        except (RequestError, sqlite3.Error, OSError) as error:
            file.fail(str(error))
            logger.warning("an attached file is searched by words alone: %s", error)
        except Exception:
            file.fail("the server failed on its vectors")
            logger.exception("an attached file is searched by words alone")

    def _forget_old(self) -> None:
        while self._kept and next(iter(self._kept.values())).used < monotonic() - SECONDS_KEPT:
            self._remove(*next(iter(self._kept)))

    def _forget_of(self, scope: str) -> None:
        """Remove the least recently used file of a scope."""
        self._remove(*next(key for key in self._kept if key[0] == scope))

    def _remove(self, scope: str, id: str) -> None:
        self._threads.submit(self._kept.pop((scope, id)).remove)

    def stop(self) -> None:
        """Stop all reading, and accept no more files."""
        self._is_stopped = True
        for file in (*tuple(self._taken), *tuple(self._kept.values())):
            file.stop()

    def close(self) -> None:
        """Delete all files. No request may use this object after the call."""
        self.stop()
        for turns in (self._quick, self._slow, self._vectors):
            turns.close()
        self._threads.shutdown()
        for file in (*self._taken, *self._kept.values()):
            file.remove()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            os.close(self._locked)


def unreadable(name: str, why: str) -> RequestError:
    """Return the error for a file that cannot be read."""
    return RequestError(f"{name} cannot be read: {why}", param="file", code="unreadable_file")


def interleaved(rankings: Sequence[Sequence[Hit]], top_k: int) -> list[Hit]:
    """Return `top_k` hits of several searches: the best hit of each search, then the second of each, and so on.

    The scores do not decide the order, because scores of different searches cannot be compared.
    """
    first: dict[str, Hit] = {}
    for hit in (hit for rank in zip_longest(*rankings) for hit in rank if hit is not None):
        first.setdefault(hit.chunk.id, hit)
    return list(first.values())[:top_k]


def _stopping() -> RequestError:
    return RequestError("the server is shutting down", status=503)


async def _known(vector: np.ndarray, text: str) -> np.ndarray:
    """Return `vector`, the vector of the query `text`.

    The vector of a query is computed only once for the searches in all files.
    """
    return vector


def _where(ids: Sequence[str], id: str) -> str:
    return f"retrieval.documents[{ids.index(id)}]"


def _gone(id: str, where: str) -> RequestError:
    return RequestError(
        f"no file {id[:80]!r} is kept in this scope: it was removed, or the server was restarted: attach the file again",
        status=404,
        param=where,
        code="file_not_found",
    )


def _free_folder(folder: Path) -> tuple[Path, int]:
    """Return a folder that no running server uses, and the file descriptor of its lock. Raises OSError."""
    for place in places(folder):
        with suppress(BlockingIOError):
            return place, lock(place.with_suffix(".lock"))
    raise OSError(f"{MOST_SERVERS} servers keep files in {folder.parent}")
