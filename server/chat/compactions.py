"""Histories that clients shorten: learn how a client shortens its history, and predict its next request.

A client asks for a summary of all messages. Then it starts a new history with the summary between its own words. The
server learns these words when the summary comes back for the first time. When the client later asks for a summary with
the same question, the server knows the start of the new history before the client sends it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getsizeof

import msgspec

from .body import ChatRequest
from .decode import decode
from .history import INSTRUCTIONS, HistoryMessage
from .shortened_history import Kept, follows

SHORTEST_SUMMARY = 200  # least characters of a summary: shorter answers may be quoted by chance
FEW_ANSWERS = 4  # most remembered answers of a session
HASH = 100  # approximate bytes of a message's hash in a set
LONGEST_SUMMARY = 64 << 10  # most bytes of a remembered answer; the start of a history may have four times as many
INNER = re.compile("<summary>(.*)</summary>", re.DOTALL)  # the only part of the answer that some clients keep


@dataclass(frozen=True, slots=True)
class Summary:
    """An answer that may come back as a summary.

    question: the message before the answer, as JSON. texts: the text of the answer and, if it has a tag `summary`, the
    text inside the tag.
    """

    question: bytes
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A history that started with an earlier answer as its summary.

    question: the message that asked for the summary. options: the fields of the request. first: the messages before the
    message with the summary. before, after: the parts of that message before and after the summary. These fields are
    JSON. place: the index of the text in `Summary.texts` that the client used.
    """

    question: bytes
    options: bytes
    first: tuple[bytes, ...]
    before: bytes
    after: bytes
    place: int

    def chat(self, text: str) -> ChatRequest:
        """Return the request that would start in the same way with another summary. text: the other summary."""
        messages = map(msgspec.json.decode, (*self.first, self.before + _escaped(text) + self.after))
        return msgspec.structs.replace(decode(self.options, ChatRequest), messages=list(messages))


@dataclass(slots=True, eq=False)
class Compaction:
    """How the client of a session shortens its history.

    answers: the newest answers. shortened: the last history that started with a summary. kept: what the client keeps of
    histories that this server shortens.
    """

    answers: tuple[Summary, ...] = ()
    shortened: Shortened | None = None
    kept: Kept = field(default_factory=Kept)

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory."""
        texts = [text for one in self.answers for text in (one.question, *one.texts)]
        if (found := self.shortened) is not None:
            texts += [found.question, found.options, *found.first, found.before, found.after]
        return sum(map(getsizeof, texts)) + HASH * self.kept.num_hashes

    def note(self, options: bytes, entries: Sequence[HistoryMessage]) -> ChatRequest | None:
        """Learn from an answered chat. If the answer is a summary, return the client's likely next request.

        The request is known if this server wrote the question for the summary, or if the client used the same question
        before. options: the request's fields without messages, as JSON. entries: the messages and the answer.
        """
        *asked, answer = entries
        self.kept = self.kept.learnt(entries)
        if goes_on := follows(entries, self.kept):
            messages, self.kept = goes_on
            return msgspec.structs.replace(decode(options, ChatRequest), messages=messages)
        self.shortened = known = self._find(options, asked) or self.shortened
        texts = _texts(answer)
        if not texts or not asked:
            return None
        question = asked[-1].said
        self.answers = (*self.answers, Summary(question, texts))[-FEW_ANSWERS:]
        if known is None or known.question != question or len(texts) <= known.place:
            return None
        return known.chat(texts[known.place])

    def _find(self, options: bytes, asked: Sequence[HistoryMessage]) -> Shortened | None:
        """Return the start of a chat whose first message after the instructions contains an earlier answer; else None."""
        at = next((at for at, entry in enumerate(asked) if entry.role not in INSTRUCTIONS), None)
        if at is None or asked[at].role != "user" or sum(len(entry.said) for entry in asked[: at + 1]) > 4 * LONGEST_SUMMARY:
            return None
        for summary in reversed(self.answers):
            for place, text in enumerate(summary.texts):
                before, found, after = asked[at].said.partition(_escaped(text))
                if found:
                    first = tuple(entry.said for entry in asked[:at])
                    return Shortened(summary.question, options, first, before, after, place)
        return None


def _texts(answer: HistoryMessage) -> tuple[str, ...]:
    """Return the texts in which an answer may come back; none if the answer is short or very long."""
    if len(answer.said) > LONGEST_SUMMARY or not isinstance(text := answer.message.get("content"), str):
        return ()
    inner = INNER.search(text)
    texts = (text.strip(), inner[1].strip()) if inner else (text.strip(),)
    return texts if min(map(len, texts)) >= SHORTEST_SUMMARY else ()


def _escaped(text: str) -> bytes:
    """Return a text as it stands within a JSON string."""
    return msgspec.json.encode(text)[1:-1]
