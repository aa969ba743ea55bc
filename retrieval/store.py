"""Reads the database of an index, and counts the uses of chunks.

If the process is killed, the index stays whole: it has each file either as it was before or as it is now, never in part.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import msgspec
import numpy as np

from . import writing
from .chunks import BETWEEN_HEADINGS, Chunk
from .files import Stamp
from .writing import READABLE, SCHEMA, TABLES, VIOLATIONS, Place, StoredChunk, StoredFile

FILES = """
    select path, hash, state, reason, count(place.chunk), count(vector.chunk), size, mtime_ns, ctime_ns, by_words, left_out
    from file left join place on place.file = file.id left join vector on vector.chunk = place.chunk"""
SAMPLE = 1000  # chunks that show the language of all chunks
NEWEST = 20  # newest files, and chunks of each, whose headings may become first questions
MOST_LETTERS = 80  # letters of a heading that is used as a first question
LEFT_OUT = msgspec.json.Decoder(dict[str, int])


class FilePart(NamedTuple):
    """A chunk at one of its places in files. The fields are those of `Chunk`."""

    title: str
    text: str
    page: int | None
    start: int
    stop: int


class Store:
    """The SQLite file. One thread may write files and vectors; any thread may read at the same time.

    If the file is damaged, has another version, or has other chunks than `origin` says, it is emptied, to be filled again.

    num_chunks: the number of chunks in the index.
    """

    def __init__(self, path: Path, origin: Mapping[str, str] | None) -> None:
        """Open the file.

        origin: how the chunks and the vectors are made, as two texts named `chunks` and `vectors`. If the text for the
        chunks or the vectors differs from the one in the file, the file's chunks or vectors were made in another way, and
        are removed. If `origin` is None, the file is only read.
        """
        self.path, self._origin = path, origin
        self._writing, self._reading = Lock(), Lock()
        self._open()

    def _open(self) -> None:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._writer = writing.connect(path)
            self._prepare(self._origin)
        except sqlite3.DatabaseError as error:
            if self._origin is None or isinstance(error, sqlite3.OperationalError):
                raise  # it is locked, or the disk is full; the file itself is sound
            _remove(path)
            self._writer = writing.connect(path)
            self._prepare(self._origin)
        self._reader = writing.connect(path)
        self._file = _identity(path)
        (self.num_chunks,) = self._reader.execute("select count(*) from chunk").fetchone()

    @property
    def is_lost(self) -> bool:
        """Whether the file was removed or replaced by another file, so that all writes would be lost."""
        return _identity(self.path) != self._file

    def reopen(self) -> None:
        """Open the file that is now at the path. If no file is at the path, an empty index is created."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()
            self._open()

    def _prepare(self, origin: Mapping[str, str] | None) -> None:
        connection = self._writer
        if origin is None:
            if connection.execute("pragma user_version").fetchone()[0] not in READABLE:
                raise sqlite3.DatabaseError("it is no index that can be searched")
            connection.execute("select 1 from chunk").fetchone()
            return
        connection.execute("begin immediate")
        (version,) = connection.execute("pragma user_version").fetchone()
        if version != writing.VERSION:
            for table in connection.execute("select name from sqlite_master where type = 'table'").fetchall():
                if table[0] in TABLES:
                    connection.execute(f"drop table {table[0]}")
            connection.execute("drop view if exists told")
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute(f"pragma user_version = {writing.VERSION}")
        known = dict(connection.execute("select name, value from origin"))
        if known.get("chunks") != origin["chunks"]:
            for table in ("place", "file", "chunk"):
                connection.execute(f"delete from {table}")
        if known.get("vectors") != origin["vectors"]:
            connection.execute("delete from vector")
        if any(known.get(name) != value for name, value in origin.items()):
            connection.execute("delete from origin where name = 'clusters'")
        connection.executemany("insert or replace into origin values (?, ?)", origin.items())
        connection.execute("commit")

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for reads in one transaction. All reads see the same state, even if another thread writes."""
        with self._reading:
            self._reader.execute("begin")
            try:
                yield self._reader
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("rollback")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for writing, in a transaction."""
        with self._writing, writing.transaction(self._writer):
            yield self._writer

    def attach(self, path: Path, statements: Iterable[str]) -> None:
        """Execute statements in one transaction, with another index attached as `old`."""
        with self._writing:
            self._writer.execute("attach database ? as old", (str(path),))
            try:
                with writing.transaction(self._writer):
                    for statement in statements:
                        self._writer.execute(statement)
            finally:
                self._writer.execute("detach database old")

    def written_elsewhere(self, write: Callable[[], writing.WriteOutcome]) -> list[int]:
        """Call `write`, and return the numbers of the chunks that are in no file any more.

        write: lets another process write to the index. While `write` runs, this process does not write to the index.
        """
        with self._writing:
            return self._count(write())

    # ---- files -----------------------------------------------------------------------------------------------------

    def put_file(self, file: StoredFile, chunks: Iterable[Chunk] = ()) -> list[int]:
        """Store a file with all its chunks in order. Return the numbers of the chunks that are in no file any more."""
        with self._writing:
            return self._count(writing.put_file(self._writer, file, chunks))

    def remove_files(self, paths: Iterable[str]) -> list[int]:
        """Remove files. Return the numbers of the chunks that are in no file any more."""
        with self._writing:
            return self._count(writing.remove_files(self._writer, paths))

    def _count(self, written: writing.WriteOutcome) -> list[int]:
        self.num_chunks += written.num_new - len(written.gone)
        return written.gone

    def files(self, after: str = "", limit: int = -1) -> dict[str, StoredFile]:
        """Return files by path, sorted. after: return only later paths. limit: return at most so many files; -1 for all."""
        with self.reading() as connection:
            rows = connection.execute(
                f"{FILES} where path > ? group by path order by path limit ?", (after, limit)
            ).fetchall()
        return {
            path: StoredFile(path, *values, stamp=Stamp(*stamp), num_by_words=count, left_out=LEFT_OUT.decode(left_out))
            for path, *values, stamp, count, left_out in ((*row[:6], row[6:9], *row[9:]) for row in rows)
        }

    @property
    def num_not_read(self) -> int:
        """The number of files that failed or were skipped."""
        with self.reading() as connection:
            (count,) = connection.execute("select count(*) from file where state != 'indexed'").fetchone()
        return count

    def digest(self, path: str) -> str:
        """Return the digest of a file in the index; empty for an unknown path."""
        with self.reading() as connection:
            row = connection.execute("select hash from file where path = ?", (path,)).fetchone()
        return row[0] if row else ""

    # ---- chunks ----------------------------------------------------------------------------------------------------

    @property
    def languages(self) -> list[str]:
        """The languages of the chunks; empty in an index of an older version, which has no languages."""
        with self.reading() as connection:
            if not connection.execute("select 1 from sqlite_master where name = 'language'").fetchone():
                return []
            return [name for (name,) in connection.execute("select name from language")]

    def share_in(self, language: str) -> float:
        """Return the share of the chunks in a language, by a sample from the whole index; 0 if the index is empty."""
        numbers = np.sort(self.all_numbers())
        some = numbers[:: max(len(numbers) // SAMPLE, 1)].tolist()
        with self.reading() as connection:
            query = "select language = ? from chunk where number = ?"
            found = [row for number in some for row in connection.execute(query, (language, number))]
        return sum(is_in for (is_in,) in found) / max(len(found), 1)

    @property
    def num_by_words(self) -> int:
        """The number of chunks that get no vector, so that only the word search finds them."""
        with self.reading() as connection:
            (count,) = connection.execute("select count(*) from chunk where not is_embedded").fetchone()
        return count

    def chunks(self, numbers: Iterable[int]) -> dict[int, StoredChunk]:
        """Return chunks with their places, by number. The result lacks chunks that have been removed."""
        found: dict[int, StoredChunk] = {}
        with self.reading() as connection:
            for number in numbers:
                row = connection.execute("select number, id, title, text, tokens from chunk where number = ?", (number,))
                for values in row:
                    found[number] = StoredChunk(*values, places=_places(connection, number))
        return found

    def numbers(self, id: str) -> list[int]:
        """Return the numbers of the chunks with an id. Several chunks share an id only if their hashes begin equally."""
        with self.reading() as connection:
            return [number for (number,) in connection.execute("select number from chunk where id = ?", (id,))]

    def numbers_at(self, path: str, first: int, last: int) -> list[int]:
        """Return the numbers of the chunks of a file from place `first` to place `last`, both included, in order."""
        query = """
            select chunk from place join file on file.id = place.file
            where path = ? and number between ? and ? order by number"""
        with self.reading() as connection:
            return [number for (number,) in connection.execute(query, (path, first, last))]

    def parts(self, path: str, first: int, last: int) -> list[FilePart]:
        """Return the parts of a file from place `first` to place `last`, both included, in order."""
        query = """
            select title, text, page, start, stop from place
            join file on file.id = place.file join chunk on chunk.number = place.chunk
            where path = ? and place.number between ? and ? order by place.number"""
        with self.reading() as connection:
            return [FilePart(*row) for row in connection.execute(query, (path, first, last))]

    # ---- vectors ---------------------------------------------------------------------------------------------------

    def without_vectors(self, limit: int, after: int = 0) -> list[tuple[int, str, str, int]]:
        """Return number, title, text and tokens of chunks that need a vector, lowest numbers first.

        after: return only chunks with higher numbers.
        """
        query = """
            select number, title, text, tokens from chunk
            where number > ? and is_embedded and not exists (select 1 from vector where chunk = number)
            order by number limit ?"""
        with self.reading() as connection:
            return connection.execute(query, (after, limit)).fetchall()

    def put_vectors(self, numbers: Sequence[int], vectors: np.ndarray) -> None:
        """Store vectors (chunks, width), float16."""
        with self.writing() as connection:
            rows = [(number, vector.tobytes()) for number, vector in zip(numbers, vectors, strict=True)]
            connection.executemany("insert or replace into vector values (?, ?)", rows)

    def vectors(self, after: int = 0, limit: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers (chunks,) int64 of chunks with a vector, and the vectors (chunks, width), float16.

        after: return only chunks with higher numbers.
        limit: return only so many chunks, those with the lowest numbers; -1 for all.
        """
        query = "select chunk, x from vector where chunk > ? order by chunk limit ?"
        with self.reading() as connection:
            rows = connection.execute(query, (after, limit)).fetchall()
        vectors = np.frombuffer(b"".join(row[1] for row in rows), np.float16)
        return np.array([row[0] for row in rows], np.int64), vectors.reshape(len(rows), -1 if rows else 0)

    def vectors_of(self, embedder: str) -> tuple[np.ndarray, np.ndarray]:
        """Return all vectors, as `vectors` does, if this embedder made them; otherwise empty arrays."""
        with self.reading() as connection:
            (known,) = connection.execute("select value from origin where name = 'vectors'").fetchone() or ("",)
        return self.vectors() if known == embedder else (np.zeros(0, np.int64), np.zeros((0, 0), np.float16))

    def all_numbers(self) -> np.ndarray:
        """Return the numbers (chunks,) int64 of all chunks, in any order.

        SQLite reads the numbers from an index of the table, which is faster than reading the table's rows.
        """
        with self.reading() as connection:
            return np.fromiter((number for (number,) in connection.execute("select number from chunk")), np.int64)

    @property
    def clusters(self) -> str:
        """The record of the cluster file (`ClusterFile` as JSON); empty if there is none."""
        with self.reading() as connection:
            row = connection.execute("select value from origin where name = 'clusters'").fetchone()
        return row[0] if row else ""

    @clusters.setter
    def clusters(self, known: str) -> None:
        with self.writing() as connection:
            connection.execute("insert or replace into origin values ('clusters', ?)", (known,))

    def check(self) -> None:
        """Raise AssertionError if the index is inconsistent."""
        with self.reading() as connection:
            assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
            for violation, query in VIOLATIONS.items():
                assert connection.execute(query).fetchone() is None, violation
        with self.writing() as connection:  # FTS5's own check is a write
            connection.execute("insert into words(words, rank) values ('integrity-check', 1)")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of the file at a path, to notice that another file replaces it; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _places(connection: sqlite3.Connection, number: int) -> tuple[Place, ...]:
    query = """
        select path, place.number, page, start, stop from place join file on file.id = place.file
        where chunk = ? order by path, place.number"""
    return tuple(Place(*row) for row in connection.execute(query, (number,)))


# ---- An old index, which answers until the new index is complete. -------------------------------------------------------


def set_aside(path: Path, origin: Mapping[str, str]) -> Store | None:
    """Return the old index, for searches until the new index at `path` has all files; None if there is no old index.

    If the index at `path` is of an older version or has other chunks than `origin` says, it is the old index. The old index
    is moved to a file beside `path`, where the next start also finds it. If an earlier old index is already in that file,
    the earlier one stays the old index, since it has all files. The index at `path`, which was made later and never
    completed, is removed in this case.
    """
    aside = path.with_suffix(".old.db")
    if path.exists() and _is_other(path, origin):
        if aside.exists():
            _remove(path)
        elif path.with_name(f"{path.name}-wal").exists():  # there is a journal, so another process has the index open
            _copy(path, aside)
        else:
            path.replace(aside)
    if not aside.exists():
        return None
    try:
        return Store(aside, None)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        _remove(aside)
        return None


def _copy(path: Path, to: Path) -> None:
    """Copy an index completely or not at all. The file at `path` stays there, and is emptied later."""
    part = to.with_suffix(".part")
    part.unlink(missing_ok=True)
    with closing(writing.connect(path)) as source, closing(writing.connect(part)) as copy:
        source.backup(copy)
    part.replace(to)


def _is_other(path: Path, origin: Mapping[str, str]) -> bool:
    """Whether a file is an old index.

    An old index can be searched, but it has another version or other chunks than a new index.
    """
    try:
        with closing(writing.connect(path)) as connection:
            (version,) = connection.execute("pragma user_version").fetchone()
            if version not in READABLE or not connection.execute("select 1 from chunk").fetchone():
                return False
            known = dict(connection.execute("select name, value from origin"))
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False  # it is damaged, and will be rebuilt
    return version != writing.VERSION or known.get("chunks") != origin["chunks"]


def take_over(store: Store, old: Store) -> None:
    """Copy the use counts of equal chunks from an old index, and their vectors if the embedder is the same.

    After the copying, remove the old file. If the old file is already gone, do nothing: another process has taken the old
    index over.
    """
    if not old.path.exists():
        return
    same = "from chunk as new join old.chunk as known on known.key = new.key join"
    vectors = f"""
        insert or ignore into vector select new.number, x {same} old.vector on vector.chunk = known.number
        where new.is_embedded and exists (
            select 1 from main.origin as now join old.origin as before on now.name = before.name
            where now.name = 'vectors' and now.value = before.value)"""
    uses = f"insert or ignore into popularity select new.number, uses {same} old.popularity as p on p.chunk = known.number"
    store.attach(old.path, (vectors, uses))
    with suppress(OSError):  # Windows cannot remove an open file; the next start does this again
        _remove(old.path)


# ---- The most used chunks, and the chunks that the next question may need. ----------------------------------------------


def count_uses(store: Store, uses: Mapping[str, int]) -> None:
    """Add to the use counts of chunks. Waits while a file is written.

    uses: the number of new uses, by the chunks' ids. Unknown ids are skipped.
    """
    query = """
        insert into popularity select number, ? from chunk where id = ?
        on conflict(chunk) do update set uses = uses + excluded.uses"""
    with store.writing() as connection:
        connection.executemany(query, [(count, id) for id, count in uses.items()])


def headings(store: Store, limit: int) -> list[str]:
    """Return up to `limit` different headings, which a user can be offered as first questions.

    The titles of the most recently changed files come first, then headings inside these files.
    """
    newest = "select id from file where state = 'indexed' order by mtime_ns desc, path limit ?"
    of_file = """
        select title from place join chunk on chunk.number = place.chunk
        where file = ? and title != '' order by place.number limit ?"""
    with store.reading() as connection:
        files = connection.execute(newest, (NEWEST,)).fetchall()
        rows = [connection.execute(of_file, (*file, NEWEST)).fetchall() for file in files]
    paths = [[title.split(BETWEEN_HEADINGS) for (title,) in some] for some in rows]
    titles, inner = [some[0][0] for some in paths if some], [path[-1] for some in paths for path in some]
    return list(dict.fromkeys(heading for heading in titles + inner if _is_specific(heading)))[:limit]


def _is_specific(heading: str) -> bool:
    return len(heading) <= MOST_LETTERS and any(map(str.isalpha, heading))


def likeliest(store: Store, most_tokens: int) -> list[int]:
    """Return the numbers of the chunks that the next questions most likely need, up to `most_tokens` estimated tokens.

    Chunks with the most uses come first, then the chunks of the most recently changed files, in their order in the file.
    """
    chosen: dict[int, None] = {}
    for number, tokens in _by_likelihood(store):
        most_tokens -= 0 if number in chosen else tokens
        if most_tokens < 0:
            break
        chosen[number] = None
    return list(chosen)


def _by_likelihood(store: Store) -> Iterable[tuple[int, int]]:
    """Yield the numbers and tokens of chunks, likeliest first. The same chunk may be yielded more than once.

    Each file is read by a query of its own, so that a search has to wait for one such query at most.
    """
    popular = "select number, tokens from popularity join chunk on number = chunk order by uses desc, number"
    newest = "select id from file where state = 'indexed' order by mtime_ns desc, path"
    of_file = """
        select chunk, tokens from place join chunk on chunk.number = place.chunk
        where file = ? order by place.number"""
    with store.reading() as connection:
        rows, files = connection.execute(popular).fetchall(), connection.execute(newest).fetchall()
    yield from rows
    for file in files:
        with store.reading() as connection:
            rows = connection.execute(of_file, file).fetchall()
        yield from rows
