"""Histories that clients shorten: what follows is known once a client has done it before, and is computed ahead.

Such a client asks for a summary of all that was said, and goes on with a new history, which begins with that summary
between words of its own. The words are learnt from the first time that an answer comes back so; when the same question is
answered again, the beginning of the new history is known before the client sends it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from .body import ChatRequest
from .decode import decode
from .history import INSTRUCTIONS, HistoryMessage
from .shortened_history import Kept, follows

SHORTEST_SUMMARY = 200  # characters of a summary: shorter answers are quoted by chance
FEW_ANSWERS = 4  # answers that are remembered of a session
MOST_SESSIONS = 64  # sessions
LONGEST_SUMMARY = 64 << 10  # bytes of an answer, and of a beginning, that are remembered
INNER = re.compile("<summary>(.*)</summary>", re.DOTALL)  # the part that some clients go on with

T = TypeVar("T")
SessionKey = tuple[str, str]
"""A scope, and the session's name in it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """An answer that may come back. question: that it answers, as JSON. texts: all of it, and the part in its tag."""

    question: bytes
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A history that began with an answer. question: to which it was one. options: of the request, as JSON.

    first: its messages in front of the one with the answer; before, after: that one, around the answer. All are JSON.
    place: of the text that came back, among those of the answer.
    """

    question: bytes
    options: bytes
    first: tuple[bytes, ...]
    before: bytes
    after: bytes
    place: int

    def chat(self, text: str) -> ChatRequest:
        """Return the request that begins with another answer."""
        messages = map(msgspec.json.decode, (*self.first, self.before + _escaped(text) + self.after))
        return msgspec.structs.replace(decode(self.options, ChatRequest), messages=list(messages))


class Compactions:
    """What sessions have shortened, and how. It belongs to the event loop."""

    def __init__(self) -> None:
        self._answers: OrderedDict[SessionKey, list[Summary]] = OrderedDict()
        self._shortened: OrderedDict[SessionKey, Shortened] = OrderedDict()
        self._kept: OrderedDict[SessionKey, Kept] = OrderedDict()

    def note(self, key: SessionKey, options: bytes, entries: Sequence[HistoryMessage]) -> Iterator[ChatRequest]:
        """Take an answered chat; yield what the client is likely to ask next, if it has shortened its history like this."""
        *asked, answer = entries
        kept = self._kept.get(key, Kept()).learnt(entries)
        if found := follows(entries, kept):
            messages, kept = found
            yield msgspec.structs.replace(decode(options, ChatRequest), messages=messages)
        if kept != Kept():
            _keep(self._kept, key, kept)
        if found:
            return
        if found := self._find(key, options, asked):
            _keep(self._shortened, key, found)
        texts = _texts(answer)
        if not texts or not asked:
            return
        known = self._shortened.get(key)
        if known is not None and known.question == asked[-1].said and len(texts) > known.place:
            yield known.chat(texts[known.place])
        _keep(self._answers, key, [*self._answers.get(key, ()), Summary(asked[-1].said, texts)][-FEW_ANSWERS:])

    def forget(self, scope: str, session: str | None = None) -> None:
        """Forget the sessions of a scope, or one of them."""
        for known in (self._answers, self._shortened, self._kept):
            for key in [key for key in known if key[0] == scope and session in (None, key[1])]:
                del known[key]

    def _find(self, key: SessionKey, options: bytes, asked: Sequence[HistoryMessage]) -> Shortened | None:
        """Return how a chat begins, if the first message behind its instructions has an earlier answer in it."""
        at = next((at for at, entry in enumerate(asked) if entry.role not in INSTRUCTIONS), None)
        if at is None or asked[at].role != "user" or sum(len(entry.said) for entry in asked[: at + 1]) > 4 * LONGEST_SUMMARY:
            return None
        for summary in reversed(self._answers.get(key, ())):
            for place, text in enumerate(summary.texts):
                before, found, after = asked[at].said.partition(_escaped(text))
                if found:
                    first = tuple(entry.said for entry in asked[:at])
                    return Shortened(summary.question, options, first, before, after, place)
        return None


def _texts(answer: HistoryMessage) -> tuple[str, ...]:
    """Return the texts by which an answer may come back; none of a short or a very long one."""
    if len(answer.said) > LONGEST_SUMMARY or not isinstance(text := answer.message.get("content"), str):
        return ()
    inner = INNER.search(text)
    texts = (text.strip(), inner[1].strip()) if inner else (text.strip(),)
    return texts if min(map(len, texts)) >= SHORTEST_SUMMARY else ()


def _escaped(text: str) -> bytes:
    """Return a text as it stands within a string of JSON."""
    return msgspec.json.encode(text)[1:-1]


def _keep(known: OrderedDict[SessionKey, T], key: SessionKey, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > MOST_SESSIONS:
        known.popitem(last=False)
