"""The tokens of a text, the text of tokens, and the spellings of added tokens."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from heapq import merge

import numpy as np

from . import llama

# ---- Spellings ----------------------------------------------------------------------------------------------------------
# llama.cpp looks for the spellings of special tokens in this order: longer spellings first, then from the left.

Trie = dict[str, "Trie"]
END = ""  # the key of a trie node at which a word ends


class Spellings:
    """Finds special tokens by their spelling.

    The text is scanned from the left, and the longest spelling at each place is taken. llama.cpp looks for longer spellings
    first. The results differ only if one spelling starts inside another one, and is at least as long. In `>>A<<|end|>`, for
    example, the scan finds `>>A<<`, but llama.cpp finds `<|end|>`. `is_sure` says whether llama.cpp finds the same spelling
    as the scan.
    """

    def __init__(self, words: Collection[str]) -> None:
        self.words = frozenset(filter(None, words))
        self._longest = max(map(len, self.words), default=0)
        self._pattern = _compiled(self.words)
        self._cross = self._may_cross()

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of each spelling, from the left. At each place, the longest spelling is taken."""
        return (found.span() for found in self._pattern.finditer(text))

    def is_sure(self, text: str, start: int, stop: int) -> bool:
        """Return whether llama.cpp surely finds this spelling, too: no other spelling overlaps its start or its end."""
        for at in range(max(start - self._longest + 1, 0), stop) if self._cross else ():
            other = self._pattern.match(text, at)
            if other and at != start and other.end() > (start if at < start else stop):
                return False
        return True

    def touches(self, text: str) -> bool:
        """Return whether `text` contains a spelling, starts with the end of a spelling, or ends with the start of one.

        The text around `text` in a template might complete a spelling. Upper and lower case count as equal, and blanks at
        both ends of `text` are ignored.
        """
        text = text.strip().lower()
        most = min(len(text), max(self._longest - 1, 0))
        head, tail = text[:most], text[len(text) - most :]
        return (
            self._lower.search(text) is not None
            # Nearly all spellings start and end with the same few characters. Most texts have none of these at their ends.
            or (not self._first.isdisjoint(tail) and any(tail[at:] in self._prefixes for at in range(most)))
            or (not self._last.isdisjoint(head) and any(head[: at + 1] in self._ends for at in range(most)))
        )

    @cached_property
    def _lower(self) -> re.Pattern[str]:
        return _compiled({word.lower() for word in self.words})

    @cached_property
    def _first(self) -> frozenset[str]:
        return frozenset(prefix[0] for prefix in self._prefixes)

    @cached_property
    def _last(self) -> frozenset[str]:
        return frozenset(end[-1] for end in self._ends)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(word[:length].lower() for word in self.words for length in range(1, len(word)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(word[length:].lower() for word in self.words for length in range(1, len(word)))

    def _may_cross(self) -> bool:
        """Return whether a scan can find a word, and so miss another word that starts inside it and is at least as long."""
        begins: dict[str, list[str]] = {}
        for word in self.words:
            for length in range(1, len(word)):
                begins.setdefault(word[:length], []).append(word)
        return any(
            other != word and len(other.encode()) >= len(word.encode()) and self._takes(word, word[:at] + other)
            for word in self.words
            for at in range(1, len(word))
            for other in begins.get(word[at:], ())
        )

    def _takes(self, word: str, text: str) -> bool:
        found = self._pattern.match(text)
        return found is not None and found[0] == word


def _compiled(words: Collection[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(_trie(words)) if words else "(?!)")


def _trie(words: Collection[str]) -> Trie:
    root: Trie = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[END] = {}
    return root


def _alternatives(node: Trie) -> str:
    """Return a regular expression for the words of a trie, longest first.

    A flat list of thousands of words would be slow to match.
    """
    stem = ""
    while len(node) == 1 and END not in node:
        ((character, node),) = node.items()
        stem += re.escape(character)
    branches = [re.escape(character) + _alternatives(rest) for character, rest in node.items() if character != END]
    if not branches:
        return stem
    return f"{stem}(?:{'|'.join(branches)}){'?' if END in node else ''}"


CONTROL = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN  # plain text unless `special`
SPECIAL = CONTROL | llama.LLAMA_TOKEN_ATTR_USER_DEFINED  # found before the rest of the text is cut
STRIPS = llama.LLAMA_TOKEN_ATTR_LSTRIP | llama.LLAMA_TOKEN_ATTR_RSTRIP  # removes adjacent spaces
GUARD = "\n"  # a text that merges with no text after it
SLICE = 512  # characters after which text is cut at the next safe special token or unknown character
LONGEST_RUN = 4096  # most characters of one call without a space, or of spaces alone
LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN + 1},}}|\s{{{LONGEST_RUN + 1},}}")
WORD_END = re.compile(r"(?s).*\w(?=\W)")  # up to the last word end
PIECE = 16 << 10  # characters after which other text is cut at the next sure place
MOST_IN_CALL = 1 << 18  # most characters of one call in text without a sure place; they take about 0.2 s
SURE = (  # each kind of place, with a pattern of tokens that cross it; the second kind is part of the first
    (r"(?<=\S)(?= \S)", re.compile(r"[^\s\0\u0109-\u010D\u0120\u2581][ \u0120\u2581]")),
    (r"(?<=[A-Za-z])(?= [A-Za-z])", re.compile(r"[A-Za-z][ \u0120\u2581]")),
    (r"(?<=\S\n)(?=\S)", re.compile(r"[\n\u010A][^\s\0\u0109-\u010D\u0120\u2581]")),
)  # byte vocabularies spell a space as \u0120, tabs and line ends as \u0109 to \u010D; SentencePiece spells it as \u2581
CUT = (llama.LLAMA_VOCAB_TYPE_BPE, llama.LLAMA_VOCAB_TYPE_SPM, llama.LLAMA_VOCAB_TYPE_WPM)  # cut at sure places
LINED_SPACE = re.compile(r"\n[ \u2581]")  # in a token: a space may merge with the guard


class Tokenizer:
    """Cuts text into the tokens of a vocabulary. Safe from several threads.

    llama.cpp's time grows with the square of the number of special tokens in a text and, in SentencePiece's vocabularies,
    with the square of the number of unknown characters. A long text therefore goes to llama.cpp in slices, which are cut
    before special tokens or unknown characters. No token crosses the start of a special token or an unknown character, so
    the ids are those of the whole text.

    A long text is also cut before a single space and after a single line end, where all rules that split text into words
    start a new word. Cuts at single spaces are left out if a token of the vocabulary can cross one. Cuts at line ends are
    left out for the same reason. Each call of llama.cpp gets one slice, and takes some 20 ms.

    Only three other kinds of cuts can change the ids. First, a text without a safe place for a cut is cut after
    `MOST_IN_CALL` characters, if possible at the end of a word. Second, a slice that has `LONGEST_RUN` characters is cut
    before the next special token, even if this token is not sure (see `Spellings`). Third, a stretch without spaces, or of
    spaces alone, is cut after `LONGEST_RUN` characters. Long stretches must be cut because llama.cpp splits the text of some
    vocabularies with a recursive regular expression, which would end the process at a word of many thousand characters.

    between: called before each call of llama.cpp. If `between` raises an exception, tokenizing ends with this exception.
    """

    def __init__(self, vocab: llama.llama_vocab_p, between: Callable[[], None] | None = None) -> None:
        self._vocab, self.between = vocab, between
        size = llama.llama_vocab_n_tokens(vocab)
        kinds = [llama.llama_vocab_get_attr(vocab, token) for token in range(size)]
        self.longest = max(max(-llama.llama_token_to_piece(vocab, token, b"", 0, 0, True) for token in range(size)), 1)
        """The most bytes that one token can spell."""
        specials = {token: self._spelling(token) for token in range(size) if kinds[token] & SPECIAL}
        self._specials = np.array(list(specials), np.int32)
        self._strips = frozenset(word for token, word in specials.items() if kinds[token] & STRIPS)
        self.controls = Spellings([word for token, word in specials.items() if kinds[token] & CONTROL])
        """The spellings of control tokens, which are plain text unless `special`."""
        self._all = Spellings(specials.values())
        self._plain = Spellings([word for token, word in specials.items() if not kinds[token] & CONTROL])
        kind = llama.llama_vocab_type(vocab)
        is_pieces = kind == llama.LLAMA_VOCAB_TYPE_SPM
        unknown = f"[^{self._characters(size)}]" if is_pieces else "(?!)"
        # The first of several unknown characters may follow a special token, and then gets a space before it.
        self._unknown = re.compile(f"(?<={unknown}){unknown}" if is_pieces else unknown)
        self._bounds_runs = kind == llama.LLAMA_VOCAB_TYPE_BPE or bool(self._strips)
        bos = llama.llama_vocab_bos(vocab) if llama.llama_vocab_get_add_bos(vocab) else -1
        self.begin = np.array([bos] if bos >= 0 else [], np.int32)
        """The first token of a prompt: BOS, if the model wants it."""
        self._guard = self._call(GUARD, False) if self._adds_space() else np.empty(0, np.int32)
        self._is_cut = kind in CUT
        self._sure = self._sure_places(size, specials)

    def __call__(self, text: str, special: bool = False, begin: bool = False) -> np.ndarray:
        """Return the token ids (int32) of a part of a prompt.

        special: turn the spellings of control tokens into these tokens. If `special` is false, such spellings are plain
        text.
        begin: whether the part is the start of a prompt. If it is, add BOS if the model wants it. Some vocabularies, such as
        SentencePiece's, put a space before every text. Only the first part of a prompt starts with an added space, since the
        prompt has no space before its other parts.
        """
        return np.concatenate([np.empty(0, np.int32), *self.runs(text, special, begin)])

    def runs(self, text: str, special: bool = False, begin: bool = False) -> Iterator[np.ndarray]:
        """Yield the ids that `__call__` returns, slice by slice."""
        parts = self.slices(text, special)
        if begin:
            yield self.begin
            yield self._call(next(parts), special)
        for part in parts:
            yield self._guarded(part, special)

    def slices(self, text: str, special: bool) -> Iterator[str]:
        """Yield `text` in slices, one for each call of llama.cpp. The first slice may be empty."""
        spellings, cut = self._all if special else self._plain, 0
        for start, stop in self._borders(text, spellings) if len(text) > SLICE else ():
            size = start - cut
            if size >= LONGEST_RUN or (size >= SLICE and spellings.is_sure(text, start, stop)):
                yield from self._parts(text[cut:start])
                cut = start
        yield from self._parts(text[cut:])

    def texts(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """Cut tokens (int32) into pieces: special tokens, and the text tokens between them.

        Yield each piece, and whether `__call__` puts a space before its text. If the vocabulary adds spaces, `__call__` puts
        a space at the start of a prompt and after special tokens. If the vocabulary adds no spaces, all tokens are one
        piece.
        """
        marks = np.flatnonzero(np.isin(tokens, self._specials)) if len(self._guard) else np.empty(0, np.int64)
        for run in np.split(tokens, np.union1d(marks, marks + 1)):
            yield run, bool(len(self._guard)) and not np.isin(run[:1], self._specials).any()

    def _parts(self, text: str) -> Iterator[str]:
        for run in self._runs(text):
            yield from self._words(run)

    def _borders(self, text: str, spellings: Spellings) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of each special token and unknown character, in order.

        No token crosses the start of a special token or of an unknown character.
        """
        special = ((start, stop) for start, stop in spellings.find(text) if text[start:stop] not in self._strips)
        unknown = (found.span() for found in self._unknown.finditer(text) if not (self._strips and found[0].isspace()))
        return merge(special, unknown)

    def _runs(self, text: str) -> Iterator[str]:
        start = 0
        for run in LONG_RUN.finditer(text) if self._bounds_runs else ():
            while run.end() - max(start, run.start()) > LONGEST_RUN:
                at = max(start, run.start())
                soft = WORD_END.match(text, at + LONGEST_RUN // 2, at + LONGEST_RUN)
                stop = soft.end() if soft else at + LONGEST_RUN
                yield text[start:stop]
                start = stop
        yield text[start:]

    def _words(self, text: str) -> Iterator[str]:
        start = 0
        while self._is_cut and len(text) - start > PIECE:
            sure = self._sure.search(text, start + PIECE, start + MOST_IN_CALL)
            if sure is None and len(text) - start <= MOST_IN_CALL:
                break
            soft = sure or WORD_END.match(text, start + MOST_IN_CALL // 2, start + MOST_IN_CALL)
            stop = soft.end() if soft else start + MOST_IN_CALL
            yield text[start:stop]
            start = stop
        yield text[start:]

    def _sure_places(self, size: int, specials: Mapping[int, str]) -> re.Pattern[str]:
        """Return a pattern for places where a token always starts: those of SURE that no token of the vocabulary crosses."""
        spelt = "\0".join(self._spelling(token) for token in range(size) if token not in specials)
        if self._strips or (len(self._guard) and LINED_SPACE.search(spelt)):
            return re.compile("(?!)")
        words = specials.values()
        places = [
            place for place, crosses in SURE if not (crosses.search(spelt) or any(re.search(place, one) for one in words))
        ]
        return re.compile("|".join(places) or "(?!)")

    def _guarded(self, text: str, special: bool) -> np.ndarray:
        """Return the ids of a part that is not the first part of a prompt."""
        if not len(self._guard):
            return self._call(text, special)
        guarded = self._call(GUARD + text, special)
        is_apart = np.array_equal(guarded[: len(self._guard)], self._guard)
        return guarded[len(self._guard) :] if is_apart else self._call(text, special)

    def _call(self, text: str, special: bool) -> np.ndarray:
        if self.between is not None:
            self.between()
        data = text.encode("utf-8", "replace")
        ids = np.empty(len(data) + 2, np.int32)
        count = self._fill(data, ids, special)
        if count < 0:  # more tokens than bytes, in odd vocabularies only
            ids = np.empty(-count, np.int32)
            count = self._fill(data, ids, special)
        return ids[:count].copy()

    def _fill(self, data: bytes, ids: np.ndarray, special: bool) -> int:
        return llama.llama_tokenize(self._vocab, data, len(data), ids.ctypes.data, len(ids), False, special)

    def _spelling(self, token: int) -> str:
        return llama.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")

    def _characters(self, size: int) -> str:
        """Return all characters of the vocabulary, escaped for the brackets of a regular expression."""
        known = {" "}.union(*map(self._spelling, range(size)))
        return re.escape("".join(sorted(known)))

    def _adds_space(self) -> bool:
        first = self._call("a", False)[:1].tolist()
        buffer = ctypes.create_string_buffer(256)
        llama.llama_token_to_piece(self._vocab, first[0], buffer, len(buffer), 0, False) if first else 0
        return buffer.raw.startswith(b" ")
