"""Writes to the index's SQLite file, for each process that has it open: one transaction a file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .chunks import Chunk
from .files import Stamp
from .records import StoredFile
from .unspaced import spaced

PATIENCE = 30.0  # seconds to wait for another process that writes


class Written(NamedTuple):
    """What a write did. num_new: chunks that the index did not have. gone: the numbers of those that it has no more."""

    num_new: int
    gone: list[int]


def connect(path: Path, creates: bool = True) -> sqlite3.Connection:
    """Open the file for any thread, readable by its owner alone. creates: it is made if there is none."""
    if not path.exists():
        # Never a file that is there: to close it would end all locks of this process on it (POSIX), and the next process
        # that has done with the file would take itself for the last one, and remove its journal.
        os.close(os.open(path, os.O_CREAT * creates | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        connection.create_function("spaced", 1, spaced, deterministic=True)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("begin immediate")
    try:
        yield
    except BaseException:
        connection.execute("rollback")
        raise
    connection.execute("commit")


def put_file(connection: sqlite3.Connection, file: StoredFile, chunks: Iterable[Chunk] = ()) -> Written:
    """Store a file with all its chunks in order."""
    with transaction(connection):
        row, before = _put_row(connection, file)
        num_new = 0
        for number, chunk in enumerate(chunks, 1):
            chunk_number, is_new = _put_chunk(connection, chunk)
            num_new += is_new
            place = (row, number, chunk_number, chunk.page, chunk.start, chunk.stop)
            connection.execute("insert into place values (?, ?, ?, ?, ?, ?)", place)
        return Written(num_new, _remove_orphans(connection, before))


def put_stamp(connection: sqlite3.Connection, path: str, stamp: Stamp) -> None:
    """Store the stamp of a file whose content is the same."""
    times = (stamp.size, stamp.mtime_ns, stamp.ctime_ns, path)
    with transaction(connection):
        connection.execute("update file set size = ?, mtime_ns = ?, ctime_ns = ? where path = ?", times)


def remove_files(connection: sqlite3.Connection, paths: Iterable[str]) -> Written:
    with transaction(connection):
        before: list[int] = []
        for path in paths:
            for (row,) in connection.execute("delete from file where path = ? returning id", (path,)).fetchall():
                before += _take_places(connection, row)
        return Written(0, _remove_orphans(connection, before))


def _put_row(connection: sqlite3.Connection, file: StoredFile) -> tuple[int, list[int]]:
    """Store a file without its places; return its row, and the chunks it had."""
    stamp = file.stamp
    row = connection.execute("select id from file where path = ?", (file.path,)).fetchone()
    before = _take_places(connection, row[0]) if row else []
    query = """
        insert into file(path, hash, state, reason, size, mtime_ns, ctime_ns) values (?, ?, ?, ?, ?, ?, ?)
        on conflict(path) do update set hash = excluded.hash, state = excluded.state, reason = excluded.reason,
        size = excluded.size, mtime_ns = excluded.mtime_ns, ctime_ns = excluded.ctime_ns returning id"""
    values = (file.path, file.digest, file.state, file.reason, stamp.size, stamp.mtime_ns, stamp.ctime_ns)
    ((number,),) = connection.execute(query, values).fetchall()
    return number, before


def _take_places(connection: sqlite3.Connection, file: int) -> list[int]:
    """Remove the places of a file; return the chunks that stood there."""
    numbers = [number for (number,) in connection.execute("select distinct chunk from place where file = ?", (file,))]
    connection.execute("delete from place where file = ?", (file,))
    return numbers


def _remove_orphans(connection: sqlite3.Connection, numbers: Iterable[int]) -> list[int]:
    """Remove those of the chunks that stand in no file, and return them."""
    query = "delete from chunk where number = ? and not exists (select 1 from place where place.chunk = chunk.number)"
    return [number for number in numbers if connection.execute(query, (number,)).rowcount]


def _put_chunk(connection: sqlite3.Connection, chunk: Chunk) -> tuple[int, bool]:
    """Return the number of a chunk, and whether it is new: it is stored once, however many files have it."""
    document = chunk.document
    known = connection.execute("select number from chunk where key = ?", (document.key,)).fetchone()
    if known:
        return known[0], False
    row = (document.id, document.key, document.title, document.text, chunk.tokens)
    added = connection.execute("insert into chunk(id, key, title, text, tokens) values (?, ?, ?, ?, ?)", row)
    assert added.lastrowid is not None
    words = (added.lastrowid, spaced(document.title), spaced(document.text))
    connection.execute("insert into words(rowid, title, text) values (?, ?, ?)", words)
    return added.lastrowid, True
