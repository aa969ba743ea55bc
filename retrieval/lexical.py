"""Search by words: SQLite's FTS5, with stems of English and BM25. A title counts twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, islice
from unicodedata import category

from .store import Store
from .unspaced import phrases

TITLE_WEIGHT = 2.0
MAX_LETTERS, MAX_WORDS = 8192, 64  # of a query, from its end: a long message asks its question last
FREQUENT = frozenset(
    """a about after all also am an and any are as at be because been before being but by can could d did do does doing
    for from had has have having he her here hers him his how i if in into is it its just ll m me more most my no
    nor not of off on once only or other our out over own re s same she should so some t than that the their theirs
    them then there these they this those through to too under until up us ve very was we were what when where which
    while who whom why will with would you your yours""".split()  # noqa: SIM905
)
"""Words of English questions that stand in most texts: without them a search is six times as fast, and finds as much."""

WITHIN = """(
    select place.chunk from place where place.file in (
        select file.id from json_each(?1) as asked join file on file.path = asked.value
        union select file.id from json_each(?1) as asked
            join file on file.path > asked.value || '/' and file.path < asked.value || '0'))"""
"""The chunks in files and folders: by ranges of the paths, as 0 follows the slash."""


def search_words(store: Store, query: str, limit: int, paths: Sequence[str] = ()) -> list[tuple[int, float]]:
    """Return the numbers of chunks that have words of the query, the best first, with their scores; a higher one is better.

    paths: of files and folders to search in; none: in all.
    """
    match = fts_query(query)
    if not match:
        return []
    score = f"-bm25(words, {TITLE_WEIGHT}, 1.0) as score"
    # The plus keeps SQLite from looking up each chunk by itself, which takes as many searches as there are chunks.
    condition = f"and +rowid in {WITHIN}" if paths else ""
    statement = f"select rowid, {score} from words where words match ?2 {condition} order by score desc, rowid limit ?3"
    with store.reading() as connection:
        return connection.execute(statement, (_json(paths), match, limit)).fetchall()


def numbers_within(store: Store, paths: Sequence[str]) -> list[int]:
    """Return the numbers of the chunks in files and folders."""
    with store.reading() as connection:
        rows = connection.execute(f"select number from chunk where number in {WITHIN}", [_json(paths)])
        return [number for (number,) in rows]


def _json(paths: Sequence[str]) -> str:
    return json.dumps([*paths])


def fts_query(text: str) -> str:
    """Return a query for any of the telling words of a text; empty if it has no words.

    Each word or phrase is quoted, so that none is an operator.
    """
    letters = "".join(letter if category(letter)[0] in "LNM" else " " for letter in text[-MAX_LETTERS:])
    words = list(dict.fromkeys(reversed(letters.casefold().split())))
    telling = [word for word in words if word not in FREQUENT] or words
    found = chain.from_iterable(map(phrases, telling))
    return " OR ".join(f'"{one}"' for one in islice(found, MAX_WORDS))
