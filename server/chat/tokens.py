"""The tokens of messages. An answer that comes back keeps the tokens that the model generated."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from sys import getsizeof
from threading import Lock

import numpy as np

from ...models.marks import TextPiece
from ...models.template import Message

# ---- The model's answers in later prompts -------------------------------------------------------------------------------
# If the template writes an answer's text again, the prompt gets the sampled ids.


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """An answer: its text with all tags, and its sampled ids (int32)."""

    text: str
    tokens: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A piece of a prompt.

    tokens: the ids (int32) of a piece that the model wrote; None: the piece must be tokenised. rewritten: the index of an
    answer to which this piece may belong, and whose text the template writes differently; None: there is no such answer.
    The sampled ids of a rewritten answer cannot be used.
    """

    piece: TextPiece
    tokens: np.ndarray | None = None
    rewritten: int | None = None


def answer_key(message: Message) -> str:
    """Return the key of an answer, made from its content and its calls: both stay the same when the answer comes back."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    named = [(each.get("name"), each.get("arguments")) for each in functions if isinstance(each, dict)]
    return "\0" + json.dumps([message.get("content") or "", named], default=str)


def place_answers(
    pieces: Sequence[TextPiece], answers: Mapping[int, Sampled], touches_control: Callable[[str], bool]
) -> list[Shown]:
    """Return the pieces of a prompt, with the sampled ids in place of the pieces that spell an answer.

    answers: the answers by the message's index. touches_control: returns whether a text contains a control token, or may
    complete one. A client's text that contains a control token, or may complete one, is never replaced.
    """
    shown, regions, end = [Shown(piece) for piece in pieces], _Regions(pieces), len(pieces)
    for message, answer in sorted(answers.items(), reverse=True):
        first, last = regions.of(message)
        last = min(last, end)
        if first >= last:
            continue
        end = first
        place = _find(shown[first:last], answer.text, touches_control)
        if place is None:
            shown[first:last] = [replace(each, rewritten=message) for each in shown[first:last]]
        else:
            shown[first:last] = _replaced(shown[first:last], place, (message, answer))
    return shown


class _Regions:
    """Finds the pieces of a prompt that may show a message: all pieces after earlier messages and before later messages."""

    def __init__(self, pieces: Sequence[TextPiece]) -> None:
        owned = [(at, piece.message) for at, piece in enumerate(pieces) if piece.message is not None]
        self._places, self._num_pieces = [at for at, _ in owned], len(pieces)
        self._latest = list(accumulate((owner for _, owner in owned), max))  # for each piece, the latest message up to it
        self._earliest = list(accumulate((owner for _, owner in reversed(owned)), min))[::-1]  # the earliest from a piece on

    def of(self, message: int) -> tuple[int, int]:
        """Return the range of a message's pieces: the index of the first piece, and the index after the last piece."""
        before, after = bisect_left(self._earliest, message), bisect_right(self._latest, message)
        first = self._places[before - 1] + 1 if before else 0
        return first, self._places[after] if after < len(self._places) else self._num_pieces


def _find(shown: Sequence[Shown], text: str, touches_control: Callable[[str], bool]) -> int | None:
    """Return the position of an answer's text in the joined pieces; None: it is not there, or must not be replaced."""
    place, at = "".join(each.piece.text for each in shown).find(text), 0
    if place < 0:
        return None
    for each in shown:
        is_covered = at < place + len(text) and at + len(each.piece.text) > place
        of_client = each.piece.is_plain or each.piece.message is not None
        if is_covered and (each.tokens is not None or (of_client and touches_control(each.piece.text))):
            return None
        at += len(each.piece.text)
    return place


def _replaced(shown: Sequence[Shown], place: int, answered: tuple[int, Sampled]) -> list[Shown]:
    """Return the pieces with an answer's ids in place of the answer's text.

    place: the position of the text in the joined pieces. answered: the message's index and the answer.
    """
    message, answer = answered
    end, at = place + len(answer.text), 0
    before: list[Shown] = []
    after: list[Shown] = []
    for each in shown:
        text = each.piece.text
        before.append(replace(each, piece=replace(each.piece, text=text[: max(place - at, 0)])))
        after.append(replace(each, piece=replace(each.piece, text=text[max(end - at, 0) :])))
        at += len(text)
    parts = [*before, Shown(TextPiece(answer.text, message), answer.tokens), *after]
    return [part for part in parts if part.piece.text]


OVERHEAD = 500  # approximate bytes of an entry without its texts and tokens

ScopedText = tuple[str, str]


class TokensByText:
    """Tokens (int32) by scope and text. Safe from several threads.

    max_bytes: the most bytes of all texts and tokens. If the entries have more bytes, the least recently used ones are
        dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[ScopedText, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def recall(self, scope: str, text: str) -> np.ndarray | None:
        """Return the ids of a text in a scope; None: they are unknown."""
        key = scope, text
        with self._lock:
            if (tokens := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
            return tokens

    def remember(self, scope: str, text: str, tokens: np.ndarray) -> None:
        """Keep the ids of a text, unless this entry alone takes more than `max_bytes`."""
        key = scope, text
        size = _size(key, tokens)
        if size > self._max_bytes:
            return
        with self._lock:
            if (before := self._entries.pop(key, None)) is not None:
                self.num_bytes -= _size(key, before)
            self._entries[key] = tokens
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._entries.popitem(last=False))


def _size(key: ScopedText, tokens: np.ndarray) -> int:
    scope, text = key
    return OVERHEAD + getsizeof(scope) + getsizeof(text) + tokens.nbytes


class TokenCache(TokensByText):
    """Keeps the tokens of texts that are tokenised often: documents, and messages that come back in every turn.

    Scopes share no entries, so the duration of a call reveals nothing about other scopes.
    """

    def __init__(self, tokenize: Callable[[str], np.ndarray], max_bytes: int = 64 << 20) -> None:
        super().__init__(max_bytes)
        self._tokenize = tokenize

    def __call__(self, scope: str, text: str, tokenise: Callable[[str], np.ndarray] | None = None) -> np.ndarray:
        """Return the read-only ids (int32) of a text.

        tokenise: a function that returns the same ids as the cache's own function, but may refuse the text with an error;
        None: use the cache's own.
        """
        tokens = self.recall(scope, text)
        if tokens is None:
            tokens = (tokenise or self._tokenize)(text)
            self.remember(scope, text, tokens)
        return tokens


class AnswerMemory(TokensByText):
    """The ids that the model sampled for its answers, by the answer's text or key. The ids spell exactly the answer's bytes.

    Cached KV belongs to the sampled ids. If the text comes back as history, tokenising it may give other ids.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        super().__init__(max_bytes)
