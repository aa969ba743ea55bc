"""Histories that clients shorten: learn how a client shortens its history, and predict its next request.

To shorten its history, a client asks the model for a summary of all messages. The client then starts a new history, in
which one message has the summary between words of the client. From the first new history, the server learns the words
around the summary. When the client asks for a summary with the same question again, the server predicts how the next new
history starts, before the client sends it.
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
    """An answer that the client may send back as a summary.

    question: the message before the answer, as JSON. texts: the text of the answer and, if this text has a tag
    `summary`, the text inside the tag.
    """

    question: bytes
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A history that started with an earlier answer as its summary.

    question: the message that asked for the summary, as JSON.
    options: the fields of the request, without its messages, as JSON.
    first: the messages before the message with the summary, as JSON.
    before, after: the JSON of the message with the summary, up to the summary and after it.
    place: which of the answer's texts the client used, as an index of `Summary.texts`.
    """

    question: bytes
    options: bytes
    first: tuple[bytes, ...]
    before: bytes
    after: bytes
    place: int

    def chat(self, text: str) -> ChatRequest:
        """Return a request that starts like this history, but with another summary. text: that summary."""
        messages = map(msgspec.json.decode, (*self.first, self.before + _escaped(text) + self.after))
        return msgspec.structs.replace(decode(self.options, ChatRequest), messages=list(messages))


@dataclass(slots=True, eq=False)
class Compaction:
    """How the client of one session shortens its history.

    answers: the newest answers, which may come back as summaries. shortened: the newest history that started with a
    summary. kept: the messages that the client keeps if this server shortens its history.
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
        """Learn from an answered chat. If its answer is a summary, return the likely next request of the client.

        The next request can be predicted only in two cases: this server wrote the question for the summary, or the client
        has shortened a history with the same question before. Otherwise, return None. options: the request's fields
        without messages, as JSON. entries: the chat's messages and the answer.
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
        """Return the start of a chat that begins with an earlier answer as its summary; None: the chat begins differently.

        The summary must be in the first message after the instructions.
        """
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
    """Return the texts of an answer that may come back as a summary; empty if the answer is too short or too long."""
    if len(answer.said) > LONGEST_SUMMARY or not isinstance(text := answer.message.get("content"), str):
        return ()
    inner = INNER.search(text)
    texts = (text.strip(), inner[1].strip()) if inner else (text.strip(),)
    return texts if min(map(len, texts)) >= SHORTEST_SUMMARY else ()


def _escaped(text: str) -> bytes:
    """Return a text as JSON writes it between the quotes of a string."""
    return msgspec.json.encode(text)[1:-1]
