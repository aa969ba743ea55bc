"""Search by words: SQLite's FTS5, with stems of English and BM25. A title counts twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from unicodedata import category

from .store import Store

TITLE_WEIGHT = 2.0
MAX_LETTERS, MAX_WORDS = 8192, 64  # of a query, from its end: a long message asks its question last
WITHIN = """rowid in (
    select place.chunk from place join file on file.id = place.file join json_each(?) as asked
    where file.path = asked.value or substr(file.path, 1, length(asked.value) + 1) = asked.value || '/')"""


def search_words(store: Store, query: str, limit: int, paths: Sequence[str] = ()) -> list[tuple[int, float]]:
    """Return the numbers of chunks that have words of the query, the best first, with their scores; a higher one is better.

    paths: of files and folders to search in; none: in all.
    """
    match = fts_query(query)
    if not match:
        return []
    score = f"bm25(words, {TITLE_WEIGHT}, 1.0)"
    condition, values = (f"and {WITHIN}", [_json(paths)]) if paths else ("", [])
    statement = f"select rowid, -{score} from words where words match ? {condition} order by {score}, rowid limit ?"
    with store.reading() as connection:
        return connection.execute(statement, (match, *values, limit)).fetchall()


def numbers_within(store: Store, paths: Sequence[str]) -> list[int]:
    """Return the numbers of the chunks in files and folders."""
    with store.reading() as connection:
        rows = connection.execute(f"select number from chunk where {WITHIN}", [_json(paths)])
        return [number for (number,) in rows]


def _json(paths: Sequence[str]) -> str:
    return json.dumps([path.rstrip("/") for path in paths])


def fts_query(text: str) -> str:
    """Return a query for any of the words of a text. Each is quoted, so that none is an operator; empty without words."""
    letters = "".join(letter if category(letter)[0] in "LNM" else " " for letter in text[-MAX_LETTERS:])
    words = list(dict.fromkeys(reversed(letters.casefold().split())))
    return " OR ".join(f'"{word}"' for word in words[:MAX_WORDS])
