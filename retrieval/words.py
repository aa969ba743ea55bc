"""Searches by words. SQLite's FTS5 finds the chunks. A chunk's rank depends on its BM25 score and on its file's score."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from heapq import nlargest
from itertools import chain, islice

from .languages import WORDS, language_of
from .store import Store
from .terms import fold, sought, words_of

# ---- The words to search for in a question. -----------------------------------------------------------------------------

MAX_LETTERS, MAX_WORDS = 8192, 64  # read from the end of a query: a long message has its question last


@cache
def _frequent(language: str) -> frozenset[str]:
    """Return the frequent words of a language, folded; empty for an unknown language."""
    return frozenset(map(fold, WORDS.get(language, "").split()))


def words_sought(text: str, languages: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the words of a question to search for, each as a tuple of spellings. A text matches by any spelling.

    Frequent words of the question's language are left out: a search is six times as fast without them, and finds as much.

    languages: the languages of the searched texts.
    """
    words = list(dict.fromkeys(reversed(words_of(text[-MAX_LETTERS:]))))
    frequent = _frequent(language_of([word.lower() for word in words], languages))
    rare = [word for word in words if fold(word) not in frequent] or words
    found = chain.from_iterable(sought(word, languages) for word in rare)
    return list(dict.fromkeys(map(tuple, islice(found, MAX_WORDS))))


def fts_query(words: Iterable[Sequence[str]]) -> str:
    """Return an FTS5 query that matches any spelling of any word; empty without words.

    All spellings are quoted, so that FTS5 takes none for an operator.
    """
    return " OR ".join(dict.fromkeys(f'"{one}"' for spellings in words for one in spellings))


# ---- The search. --------------------------------------------------------------------------------------------------------

TITLE_WEIGHT = 2.0
WITHIN = """(
    select place.chunk from place where place.file in (
        select file.id from json_each(:paths) as asked join file on file.path = asked.value
        union select file.id from json_each(:paths) as asked
            join file on file.path > asked.value || '/' and file.path < asked.value || '0'))"""
"""The chunks in files and folders. A folder is a range of paths: in ASCII, `0` follows the slash."""


def search_words(store: Store, query: str, limit: int, paths: Sequence[str] = ()) -> list[tuple[int, float]]:
    """Return the numbers and scores of the chunks with words of the query, best first. A higher score is better.

    paths: files and folders to search in; empty for all.
    """
    words = words_sought(query, store.languages)
    match = fts_query(words)
    if not match:
        return []
    score = f"-bm25(words, {TITLE_WEIGHT}, 1.0) as score"
    # The plus keeps SQLite from searching once for each chunk in the paths.
    condition = f"and +rowid in {WITHIN}" if paths else ""
    statement = (
        f"select rowid, {score} from words where words match :match {condition} order by score desc, rowid limit :limit"
    )
    with store.reading() as connection:
        found = connection.execute(statement, {"paths": _json(paths), "match": match, "limit": limit}).fetchall()
        if not found or not _has_terms(connection):
            return found
        statistics = _Statistics(connection, words)
        texts = [_text(connection, number) for number, _ in found]
    scores = [statistics.score(title, text) for title, text, _ in texts]
    rows = zip((number for number, _ in found), _with_files(scores, [file for *_, file in texts]), strict=True)
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def numbers_within(store: Store, paths: Sequence[str]) -> list[int]:
    """Return the numbers of the chunks in files and folders."""
    with store.reading() as connection:
        rows = connection.execute(f"select number from chunk where number in {WITHIN}", {"paths": _json(paths)})
        return [number for (number,) in rows]


def _json(paths: Sequence[str]) -> str:
    return json.dumps([*paths])


def _has_terms(connection: sqlite3.Connection) -> bool:
    """Whether the terms of the index are stemmed by language, as the scores require.

    In indexes of older versions, terms are not stemmed by language.
    """
    query = "select 1 from sqlite_master where name = 'told' and instr(sql, 'terms(text, language)')"
    return connection.execute(query).fetchone() is not None


def _text(connection: sqlite3.Connection, number: int) -> tuple[str, str, int]:
    """Return the terms of a chunk's title, the terms of its text, and the chunk's first file."""
    query = "select title, text, (select min(file) from place where chunk = number) from told where number = ?"
    (row,) = connection.execute(query, (number,)).fetchall()
    return row


# ---- Scores: BM25 (Robertson, Zaragoza, 2009), and a share of the file's score. -----------------------------------------
# FTS5's own BM25 has a fixed `b`, counts each spelling as a different word, and gives no score for a word that half of
# the documents have.

K1, B = 1.2, 0.4
FILE_WEIGHT, OF_FILE = 0.2, 3  # the weight of a file's score, and the number of its best chunks that make the score


class _Statistics:
    """The frequencies of words in the index, and the lengths of chunks."""

    def __init__(self, connection: sqlite3.Connection, words: Sequence[tuple[str, ...]]) -> None:
        (averages,) = connection.execute("select block from words_data where id = 1").fetchone()
        self._num_chunks, *sizes = _numbers(averages)
        self._usual = max(sum(sizes) / max(self._num_chunks, 1), 1)  # the mean number of terms of a chunk
        count = "select count(*) from words where words match ?"
        self._words = [
            (spellings, self._rarity(*connection.execute(count, (fts_query([spellings]),)).fetchone()))
            for spellings in words
        ]

    def _rarity(self, num_with: int) -> float:
        """Return the weight of a word that `num_with` chunks have.

        The weight is above 0 even if all chunks have the word.
        """
        return math.log(1 + (self._num_chunks - num_with + 0.5) / (num_with + 0.5))

    def score(self, title: str, text: str) -> float:
        """Return the BM25 score of a chunk, by its terms. Terms of the title count twice."""
        in_title, in_text = _Terms(title), _Terms(text)
        length = K1 * (1 - B + B * (in_title.size + in_text.size) / self._usual)
        counts = (TITLE_WEIGHT * in_title.count(one) + in_text.count(one) for one, _ in self._words)
        return sum(
            rarity * count * (K1 + 1) / (count + length) for count, (_, rarity) in zip(counts, self._words, strict=True)
        )


class _Terms:
    """Counts the terms of a text."""

    def __init__(self, terms: str) -> None:
        each = terms.split(" ")
        self.size = len(each)
        self._counts, self._text = Counter(each), f" {'  '.join(each)} "

    def count(self, spellings: Sequence[str]) -> int:
        """Return how often a word occurs in any of its spellings. A spelling is a term, or a phrase of several terms."""
        return sum(self._text.count(f" {one.replace(' ', '  ')} ") if " " in one else self._counts[one] for one in spellings)


def _numbers(data: bytes) -> list[int]:
    """Decode SQLite's numbers of variable length: 7 bits a byte, and the eighth bit is set if more bytes follow."""
    found, number = [], 0
    for byte in data:
        number = number << 7 | byte & 127
        if byte < 128:
            found.append(number)
            number = 0
    return found


def _with_files(scores: Sequence[float], files: Sequence[int]) -> list[float]:
    """Add a share of each file's score to its chunks' scores. Of two similar chunks, the chunk in the better file wins."""
    of_file: defaultdict[int, list[float]] = defaultdict(list)
    for file, score in zip(files, scores, strict=True):
        of_file[file].append(score)
    means = {file: sum(nlargest(OF_FILE, each)) / OF_FILE for file, each in of_file.items()}
    return [score + FILE_WEIGHT * means[file] for file, score in zip(files, scores, strict=True)]
