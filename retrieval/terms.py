"""The terms of the word search. Words are folded and stemmed by language. Scripts without spaces are cut into letters.

Texts of the index (`terms_of`) and questions (`sought`) are folded by the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from unicodedata import category, combining, normalize

import Stemmer

# ---- Words. A mark belongs to its letter; `C++` and `C#` are words. -----------------------------------------------------

HAVE_MARKS = (*range(0x300, 0x3100), *range(0xA66F, 0xABEF), *range(0xFB1E, 0xFE30))  # Han and Hangul have no marks
ALL_MARKS = [code for code in HAVE_MARKS if category(chr(code))[0] == "M"]


def _ranges(codes: Iterable[int]) -> str:
    """Return characters as ranges for a pattern's character class. Ranges compile twice as fast as single characters."""
    given = set(codes)
    starts = sorted(code for code in given if code - 1 not in given)
    stops = sorted(code for code in given if code + 1 not in given)
    return "".join(f"{chr(start)}-{chr(stop)}" for start, stop in zip(starts, stops, strict=True))


MARKS = _ranges(ALL_MARKS)
INVISIBLE = "\u00ad\u034f\u061c\u0640\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff"
"""Invisible characters, and the Arabic character that only stretches a word."""

UNSPACED = (
    "\u3005\u3007\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\ua9e0-\ua9ff\uaa60-\uaa7f"
)
"""Han and Kana, Hangul, then Thai, Lao, Burmese and Khmer: scripts without clear ends of words."""

WORD = re.compile(rf"[\w{MARKS}{INVISIBLE}]+(?:\+\+|#(?![^\W\d]))?")
RUN = re.compile(rf"[{UNSPACED}][{UNSPACED}{MARKS}]*")
LETTER = re.compile(rf".[{MARKS}]*", re.S)
MANY_MARKS = re.compile(rf"([{MARKS}]{{8}})[{MARKS}]+")


SIGN_OF_NAME = re.compile(r"[+#](?<=\w.)(?![A-Za-z_])")  # as in `C++`; the sign is looked for first, as it is rare
SPACED = bytes(code if chr(code).isalnum() or code == ord("_") else ord(" ") for code in range(128)) + bytes(128)


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are written, in the Unicode form NFKC."""
    if text.isascii() and not SIGN_OF_NAME.search(text):
        return text.encode().translate(SPACED).decode().split()  # the same words in a third of the time
    return WORD.findall(normalize("NFKC", MANY_MARKS.sub(r"\1", text)))  # quadratic in one letter's marks


# ---- Folding: letters without case and without marks. -------------------------------------------------------------------

SIGNS = {0, 8, 9, *range(84, 133)}  # combining classes: vowel signs, viramas, the voicing of Kana, tones of Thai and Lao
ACCENTS = _ranges(code for code in ALL_MARKS if combining(chr(code)) not in SIGNS and code != 0x306)
LOST = re.compile(rf"(?<![иИ])\u0306|[{ACCENTS}{INVISIBLE}]")
"""Signs that folding drops: accents, points of Hebrew and Arabic, the nukta. The Russian й is a letter of its own."""

PLAIN = str.maketrans(
    {"ı": "i", "ł": "l", "ø": "o", "đ": "d", "ħ": "h", "ŧ": "t", "æ": "ae", "œ": "oe", "ð": "d", "þ": "th"}
    | {"ک": "ك", "ی": "ي", "ى": "ي", "ٱ": "ا"}
)
UNMARKED = frozenset(map(chr, PLAIN))
"""Letters whose mark Unicode does not separate, such as ø, and Persian letters, which are folded to Arabic letters."""


def fold(word: str) -> str:
    """Return a word in the form in which words are compared: without case and marks.

    >>> [fold(word) for word in ("Straße", "ÅNGSTRÖM", "İstanbul", "Łódź", "ёлка", "Ώρα", "בְּרֵאשִׁית", "हिन्दी")]
    ['strasse', 'angstrom', 'istanbul', 'lodz', 'елка', 'ωρα', 'בראשית', 'हिन्दी']
    """
    if word.isascii():
        return word.lower()
    folded = LOST.sub("", normalize("NFD", word)).casefold()
    if folded.isascii():
        return folded
    return normalize("NFC", folded if UNMARKED.isdisjoint(folded) else folded.translate(PLAIN))


# ---- Stems. Identifiers have none. --------------------------------------------------------------------------------------

STEMS = {
    **{"ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek", "en": "english"},
    **{"es": "spanish", "fi": "finnish", "fr": "french", "hi": "hindi", "hu": "hungarian", "it": "italian", "nl": "dutch"},
    **{"no": "norwegian", "pl": "polish", "pt": "portuguese", "ro": "romanian", "ru": "russian", "sv": "swedish"},
    "tr": "turkish",
}
"""Snowball's names of languages, by their codes. Texts in other languages are not stemmed."""

STEMMER = f"PyStemmer {Stemmer.version()}"  # another version may give other terms
MOST_LETTERS = 64  # longer words are not stemmed
IDENTIFIER = re.compile(r"\d|[a-zß-öø-ÿ][A-Z]")  # it has a digit, or a capital after a small letter

_stemmer = cache(lambda language: Stemmer.Stemmer(STEMS[language], 0))


def stems(word: str, language: str) -> dict[str, None]:
    """Return the stem of a word with its accents, and its stem without accents. Most words have only one stem.

    A stem ends with a mark of its language (none for English), so that it matches no word of another language.

    >>> [*stems("informações", "pt")], [*stems("Haus", "de")], [*stems("getUsers", "en")], [*stems("Users", "en")]
    (['inform+pt', 'informaco+pt'], ['haus+de'], ['getusers'], ['user'])
    """
    folded = fold(word)
    if language not in STEMS or len(word) > MOST_LETTERS or IDENTIFIER.search(word):
        return {folded: None}
    stem = _stemmer(language).stemWord
    mark = _mark(language)
    if word.isascii():
        return {stem(folded) + mark: None}
    accented = normalize("NFC", word.casefold()).replace("i\u0307", "i")
    return {fold(stem(accented)) + mark: None, stem(folded) + mark: None}


def _mark(language: str) -> str:
    """Return the mark that ends each stem of a language; empty for English. No word has such a mark."""
    return f"+{language}" if language != "en" else ""


def parts_of(word: str) -> tuple[str, list[str]]:
    """Return an identifier as one folded term, and the words in it. If the word is no identifier, the term is empty.

    >>> parts_of("max_connections"), parts_of("C++"), parts_of("Notepad++"), parts_of("_so_")
    (('max_connections', ['max', 'connections']), ('c++', []), ('notepad++', ['Notepad']), ('', ['so']))
    """
    name = word.rstrip("+#")
    end, parts = word[len(name) :], [part for part in name.split("_") if part]
    whole = fold("_".join(parts)) + end if end or len(parts) > 1 else ""
    return whole, parts if not end or len(name) > 1 else []


# ---- Both sides: the terms of texts and of questions. -------------------------------------------------------------------

MOST_KNOWN, MOST_KEPT = 100_000, 32  # words of a language whose terms are cached, and letters of such a word


class _Known(dict[str, str]):
    """A cache of the terms of a language's words. If a word has several terms, its value has them with spaces between."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._stem, self._mark = (_stemmer(language).stemWord, _mark(language)) if language in STEMS else (str, "")

    def __missing__(self, word: str) -> str:
        is_plain = len(word) <= MOST_KEPT and word.isalpha() and word[1:].islower()
        if is_plain and word.isascii():
            found = self._stem(word.lower()) + self._mark  # the same as `_terms`, but faster
        elif is_plain and not RUN.search(word):
            found = " ".join(stems(word, self.language))
        else:
            found = " ".join(self._terms(word))
        if len(word) <= MOST_KEPT:
            if len(self) >= MOST_KNOWN:
                self.clear()
            self[word] = found
        return found

    def _terms(self, word: str) -> Iterator[str]:
        for run, is_unspaced in _runs(word):
            if is_unspaced:
                yield from LETTER.findall(fold(run))
                continue
            whole, parts = parts_of(run)
            yield from [whole] if whole else []
            for part in parts:
                yield from stems(part, self.language)


_known = cache(_Known)


def terms_of(words: Iterable[str], language: str) -> str:
    """Return the terms that the index gets for the words of a text, with spaces between the terms.

    language: the language of the text; empty if it is unknown.

    >>> terms_of(words_of("東京のC++ libraries, max_connections."), "en")
    '東 京 の c++ librari max_connections max connect'
    """
    return " ".join(map(_known(language).__getitem__, words))


def sought(word: str, languages: Sequence[str]) -> Iterator[list[str]]:
    """Yield lists of spellings to seek for one word of a question. A text matches a list by any of its spellings.

    A spelling is one term, or a phrase: several terms with spaces between them. In a script without spaces, each pair of
    neighbouring letters is a phrase, in a list of its own.

    languages: the languages of the texts in the index.

    >>> list(sought("東京都", [])), list(sought("ragとは", [])), list(sought("月", []))
    ([['東 京'], ['京 都']], [['rag'], ['と は']], [['月']])
    >>> list(sought("Houses", ["en", "de"])), list(sought("max_sizes", ["en"])), list(sought("C++", ["en"]))
    ([['houses', 'hous', 'hous+de']], [['max_sizes', 'max sizes', 'max size']], [['c++']])
    """
    for run, is_unspaced in _runs(word):
        if is_unspaced:
            letters = LETTER.findall(fold(run))
            yield from [[pair] for pair in map(" ".join, pairwise(letters))] or [letters]
            continue
        whole, parts = parts_of(run)
        found = dict.fromkeys([whole] if whole else [])
        for language in ("", *languages) if len(parts) > 1 or not whole else ():
            if len(parts) == 1:
                found |= stems(parts[0], language)
            elif parts:
                found[" ".join(next(iter(stems(part, language))) for part in parts)] = None
        if found:
            yield [*found]


def _runs(word: str) -> Iterator[tuple[str, bool]]:
    """Cut a word where its script changes. Yield each part, and whether its script writes no spaces between words."""
    at = 0
    for run in RUN.finditer(word):
        if run.start() > at:
            yield word[at : run.start()], False
        yield run[0], True
        at = run.end()
    if at < len(word):
        yield word[at:], False
