"""The schema of the index's database, and all writes to it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..ordering.document import Document
from .chunks import Chunk
from .files import NEVER_READ, Stamp
from .languages import language_of
from .terms import terms_of, words_of

# ---- The files and chunks of an index, as values. -----------------------------------------------------------------------

INDEXED, FAILED, SKIPPED = "indexed", "failed", "skipped"  # states of a file


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the index.

    digest: the hash of the file's bytes.
    state: `indexed`, `failed` (it could not be read) or `skipped` (it was not opened).
    reason: why the file failed or was skipped.
    num_chunks, num_vectors: the number of the file's chunks, and the number of those chunks that have a vector.
    num_by_words: the file's chunks that get no vector, so that only the word search finds them.
    left_out: letters that are left out of the chunks on purpose, by kind.
    """

    path: str
    digest: str = ""
    state: str = INDEXED
    reason: str = ""
    num_chunks: int = 0
    num_vectors: int = 0
    stamp: Stamp = NEVER_READ
    num_by_words: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a chunk: the file's path, the chunk's number in the file, and page, start and stop as in `Chunk`."""

    path: str
    number: int
    page: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk in the index.

    number: the number of its row.
    id: the id of its content, as in `Chunk`.
    places: all places with this text, possibly in several files.
    """

    number: int
    id: str
    title: str
    text: str
    tokens: int
    places: tuple[Place, ...]


# ---- The tables of the index, and the rules that every consistent index keeps. ------------------------------------------

VERSION = 6
"""The version of the tables and of their content (readers, chunks, terms). An index of another version is rebuilt."""

READABLE = range(3, VERSION + 1)  # versions that can still be searched while the new index is built

SCHEMA = (
    "create table origin(name text primary key, value text not null) without rowid",
    """create table file(
        id integer primary key, path text unique not null, size integer not null, mtime_ns integer not null,
        ctime_ns integer not null, hash text not null, state text not null, reason text not null,
        by_words integer not null, left_out text not null)""",
    """create table chunk(
        number integer primary key autoincrement, id text not null, key text unique not null, title text not null,
        text text not null, tokens integer not null, language text not null, is_embedded integer not null)""",
    "create index chunk_id on chunk(id)",
    "create index chunk_by_words on chunk(number) where not is_embedded",
    "create table language(name text primary key) without rowid",  # languages of all chunks, including removed chunks
    """create table place(
        file integer not null, number integer not null, chunk integer not null, page integer, start integer not null,
        stop integer not null, primary key (file, number)) without rowid""",
    "create index place_chunk on place(chunk)",
    "create table vector(chunk integer primary key, x blob not null)",
    "create table popularity(chunk integer primary key, uses integer not null)",
    # `terms` is a function that `connect` defines for each connection.
    "create view told as select number, terms(title, language) as title, terms(text, language) as text from chunk",
    # The table is not contentless, because deleting from a contentless table needs SQLite 3.43. Rows are added without a
    # trigger: a statement with a trigger opens a savepoint, at which FTS5 flushes, and a chunk takes a third more time.
    """create virtual table words using fts5(
        title, text, content='told', content_rowid='number', tokenize="ascii tokenchars '+#_'")""",
    # Each file is one transaction. With the default automerge of 4, FTS5 would merge the same words again and again.
    "insert into words(words, rank) values ('automerge', 8)",
    """create trigger chunk_removed after delete on chunk begin
        insert into words(words, rowid, title, text)
            values ('delete', old.number, terms(old.title, old.language), terms(old.text, old.language));
        delete from vector where chunk = old.number;
        delete from popularity where chunk = old.number;
    end""",
)
TABLES = ("origin", "file", "chunk", "language", "place", "vector", "popularity", "words")

VIOLATIONS = {
    "a place without its file": "select 1 from place left join file on file.id = place.file where file.id is null",
    "a place without its chunk": "select 1 from place left join chunk on chunk.number = place.chunk where id is null",
    "a chunk in no file": "select 1 from chunk where not exists (select 1 from place where place.chunk = chunk.number)",
    "a vector without its chunk": "select 1 from vector left join chunk on number = vector.chunk where number is null",
    "uses without their chunk": """
        select 1 from popularity left join chunk on number = popularity.chunk where number is null""",
    "a file with a gap": "select 1 from place group by file having max(number) != count(*) or min(number) != 1",
    "an indexed file without chunks": """
        select 1 from file where (state = 'indexed') != exists (select 1 from place where place.file = file.id)""",
}


PATIENCE = 30.0  # seconds to wait for another process that writes


class WriteOutcome(NamedTuple):
    """The result of a write. num_new: the number of added chunks. gone: the numbers of removed chunks."""

    num_new: int
    gone: list[int]


def connect(path: Path, creates: bool = True) -> sqlite3.Connection:
    """Open the database for use by any thread.

    Only the owner of the database's file can read the file.

    creates: whether to create a missing file.
    """
    if not path.exists():
        # Only for a missing file. Closing an existing file would end all POSIX locks of this process on it. The next
        # process that closes the database would then take itself for the last one, and remove the journal.
        os.close(os.open(path, os.O_CREAT * creates | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        connection.create_function("terms", 2, _terms, deterministic=True)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
    except BaseException:
        connection.close()
        raise
    return connection


def _terms(text: str, language: str) -> str:
    return terms_of(words_of(text), language)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("begin immediate")
    try:
        yield
    except BaseException:
        connection.execute("rollback")
        raise
    connection.execute("commit")


MOST_VECTORS = 4000  # vectors of a file, for its first chunks: 4 MiB of text


def put_file(
    connection: sqlite3.Connection, file: StoredFile, chunks: Iterable[Chunk] = (), most_vectors: int = MOST_VECTORS
) -> WriteOutcome:
    """Store a file with all its chunks in order.

    most_vectors: only so many chunks, the first ones of the file, get a vector. Only the word search finds the file's other
    chunks.
    """
    with transaction(connection):
        row, before = _put_row(connection, file)
        num_new = number = 0
        language = ""
        for number, chunk in enumerate(chunks, 1):
            document = chunk.document
            words = words_of(document.text)
            if (
                found := language_of(words, before=language or "en") or language
            ) != language:  # a chunk too short to tell has the language of the chunk before it
                language = found
                connection.execute("insert or ignore into language values (?)", (language,))
            chunk_number, is_new = _put_chunk(connection, document, words, (chunk.tokens, language, number <= most_vectors))
            num_new += is_new
            place = (row, number, chunk_number, chunk.page, chunk.start, chunk.stop)
            connection.execute("insert into place values (?, ?, ?, ?, ?, ?)", place)
        if number > most_vectors:
            connection.execute("update file set by_words = ? where id = ?", (number - most_vectors, row))
        return WriteOutcome(num_new, _remove_orphans(connection, before))


def put_stamp(connection: sqlite3.Connection, path: str, stamp: Stamp) -> None:
    """Store the stamp of a file whose content has not changed."""
    times = (stamp.size, stamp.mtime_ns, stamp.ctime_ns, path)
    with transaction(connection):
        connection.execute("update file set size = ?, mtime_ns = ?, ctime_ns = ? where path = ?", times)


def remove_files(connection: sqlite3.Connection, paths: Iterable[str]) -> WriteOutcome:
    with transaction(connection):
        before: list[int] = []
        for path in paths:
            for (row,) in connection.execute("delete from file where path = ? returning id", (path,)).fetchall():
                before += _take_places(connection, row)
        return WriteOutcome(0, _remove_orphans(connection, before))


def _put_row(connection: sqlite3.Connection, file: StoredFile) -> tuple[int, list[int]]:
    """Store a file without its places. Return the number of the file's row, and the chunks that the file had before."""
    stamp = file.stamp
    row = connection.execute("select id from file where path = ?", (file.path,)).fetchone()
    before = _take_places(connection, row[0]) if row else []
    query = """
        insert into file(path, hash, state, reason, size, mtime_ns, ctime_ns, left_out, by_words)
        values (?, ?, ?, ?, ?, ?, ?, ?, 0)
        on conflict(path) do update set hash = excluded.hash, state = excluded.state, reason = excluded.reason,
        size = excluded.size, mtime_ns = excluded.mtime_ns, ctime_ns = excluded.ctime_ns, left_out = excluded.left_out,
        by_words = 0 returning id"""
    left_out = msgspec.json.encode(dict(file.left_out)).decode()
    values = (file.path, file.digest, file.state, file.reason, stamp.size, stamp.mtime_ns, stamp.ctime_ns, left_out)
    ((number,),) = connection.execute(query, values).fetchall()
    return number, before


def _take_places(connection: sqlite3.Connection, file: int) -> list[int]:
    """Remove the places of a file. Return the chunks that were at the removed places."""
    numbers = [number for (number,) in connection.execute("select distinct chunk from place where file = ?", (file,))]
    connection.execute("delete from place where file = ?", (file,))
    return numbers


def _remove_orphans(connection: sqlite3.Connection, numbers: Iterable[int]) -> list[int]:
    """Remove the given chunks unless a file contains them. Return the removed chunks."""
    query = "delete from chunk where number = ? and not exists (select 1 from place where place.chunk = chunk.number)"
    return [number for number in numbers if connection.execute(query, (number,)).rowcount]


def _put_chunk(
    connection: sqlite3.Connection, document: Document, words: list[str], about: tuple[int, str, bool]
) -> tuple[int, bool]:
    """Return the number of a chunk, and whether the chunk is new. Equal chunks of several files are stored once.

    words: the words of the chunk's text.
    about: the chunk's number of tokens, the chunk's language, and whether the chunk gets a vector.
    """
    known = connection.execute("select number from chunk where key = ?", (document.key,)).fetchone()
    if known:
        return known[0], False
    row = (document.id, document.key, document.title, document.text, *about)
    query = "insert into chunk(id, key, title, text, tokens, language, is_embedded) values (?, ?, ?, ?, ?, ?, ?)"
    added = connection.execute(query, row)
    assert added.lastrowid is not None
    terms = (added.lastrowid, _terms(document.title, about[1]), terms_of(words, about[1]))
    connection.execute("insert into words(rowid, title, text) values (?, ?, ?)", terms)
    return added.lastrowid, True
