"""Citations of pasted documents: the model writes the ids of documents, and the client reads its own numbers instead.

When the client sends an answer back as history, the numbers in it become ids again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from threading import Lock

import msgspec
from msgspec import Struct

from ...models.template import Message
from ...ordering.document import ID_DIGITS
from ..formats.answer import AnswerReader, CallStart, ContentText, Fragment
from .chat_prompt import DocumentSet
from .tokens import answer_key
from .tool_results import text_of
from .volatile import INSTRUCTIONS

# ---- From ids to numbers, while an answer is generated. -----------------------------------------------------------------

ID = re.compile(rf"(?<![0-9A-Za-z_])[0-9a-f]{{{ID_DIGITS}}}(?![0-9A-Za-z_])")
WORD_AT_END = re.compile(r"[0-9A-Za-z_]+\Z")
LEAST_PART = 4  # least digits of an incomplete id: fewer digits may be a word or a number


@dataclass(frozen=True, slots=True, eq=False)
class Citations:
    """For each document's id, the number that the client's program gave to the document.

    trail: a digest of the chat before the answer, without instructions; empty: an answer that comes back keeps its
    numbers. owed: the characters of an incomplete id at the end of the text that the answer continues. The client has not
    received the owed characters.
    """

    number_of: Mapping[str, str]
    trail: bytes = b""
    owed: str = ""
    prefixes: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        prefixes = frozenset(id[:length] for id in self.number_of for length in range(1, ID_DIGITS + 1))
        object.__setattr__(self, "prefixes", prefixes)

    @classmethod
    def of(cls, sets: Sequence[DocumentSet], trail: bytes) -> Citations:
        """Return the citations of sets of documents. sets: the sets, in the order of their turns.

        If two documents have the same number, the client reads the number for the later document and the id for the
        earlier one.
        """
        number_of: dict[str, str] = {}
        taken: set[str] = set()
        for one in reversed(sets):
            new = {id: number for id, number in one.number_of if number not in taken and id not in number_of}
            number_of |= new
            taken |= {*new.values()}
        return cls(number_of, trail)

    def owing(self, written: str, sent: str) -> Citations:
        """Return the citations for an answer that continues the last message.

        written: the last message as it is in the prompt, with ids. sent: the last message as the client sent it, with
        numbers.
        """
        text = NumberedText(self)
        shown, part = text.push(written), text.pending
        return self if not part or text.finish(is_cut=True) or shown != sent else replace(self, owed=part)

    def read(self, make: Callable[[], AnswerReader], owed: str = "") -> Callable[[], AnswerReader]:
        """Return a function that makes readers of an answer. The readers replace ids by numbers.

        make: makes readers of the text that the model generates. owed: the characters with which the answer's text starts
        (see `Citations`).
        """
        return lambda: _NumberedReader(make(), self, owed)

    def shown(self, text: str) -> str:
        """Return a text with numbers in place of ids. The text must not start or end within a word."""
        return ID.sub(self._number, text)

    def _number(self, id: re.Match[str]) -> str:
        return self.number_of.get(id[0], id[0])


class NumberedText:
    """The text of an answer while it is generated, with numbers in place of ids.

    pending: the end of the text so far, which is not returned yet because it may be the start of an id.
    """

    def __init__(self, citations: Citations, pending: str = "") -> None:
        self._citations, self.pending = citations, pending
        self._before = ""  # the character before `pending`; an underscore if it belongs to a word

    def push(self, text: str) -> str:
        """Add generated text, and return the text that is ready for the client: all text that is not pending."""
        text = self._before + self.pending + text
        word = WORD_AT_END.search(text[-ID_DIGITS - 1 :])
        self.pending = word[0] if word and word[0] in self._citations.prefixes else ""
        return self._shown(text[: len(text) - len(self.pending)])

    def finish(self, is_cut: bool = False) -> str:
        """Return the pending text. is_cut: whether a limit ended the answer; then an incomplete id is dropped."""
        is_part = is_cut and len(self.pending) < ID_DIGITS and (len(self.pending) >= LEAST_PART or self._before == "[")
        text, self.pending = self._before + ("" if is_part else self.pending), ""
        return self._shown(text)

    def _shown(self, text: str) -> str:
        """Return new text with numbers in place of ids.

        text: the last character before the new text (`self._before`), then the new text. The result is only the new text.
        """
        num_before, self._before = len(self._before), "_" if WORD_AT_END.search(text[-1:]) else text[-1:]
        return self._citations.shown(text)[num_before:]


class _NumberedReader:
    """Reads an answer, and replaces ids by numbers in its content, its reasoning and the arguments of its calls."""

    def __init__(self, reader: AnswerReader, citations: Citations, owed: str) -> None:
        self._reader, self._citations = reader, citations
        self._text = NumberedText(citations, owed)
        self._last: Fragment | None = ContentText(owed) if owed else None  # the fragment of the newest text

    def push(self, text: str) -> list[Fragment]:
        return self._numbered(self._reader.push(text))

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        return [*self._numbered(self._reader.finish(is_cut)), *self._end(is_cut)]

    def _numbered(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        return [shown for fragment in fragments for shown in self._shown(fragment)]

    def _shown(self, fragment: Fragment) -> list[Fragment]:
        goes_on = self._last is not None and _is_same_text(self._last, fragment)
        shown = [] if goes_on else self._end()
        if isinstance(fragment, CallStart):
            return [*shown, fragment]
        self._last = fragment
        text = self._text.push(fragment.text)
        return [*shown, replace(fragment, text=text)] if text else shown

    def _end(self, is_cut: bool = False) -> list[Fragment]:
        """End the current text. If the end of this text is pending, return a fragment with the pending end."""
        last, text = self._last, self._text.finish(is_cut)
        self._text, self._last = NumberedText(self._citations), None
        return [replace(last, text=text)] if text and last is not None and not isinstance(last, CallStart) else []


def _is_same_text(one: Fragment, other: Fragment) -> bool:
    return type(one) is type(other) and getattr(one, "index", None) == getattr(other, "index", None)


# ---- From numbers to ids, when an answer comes back. --------------------------------------------------------------------

OVERHEAD = 200  # approximate bytes of an answer without its text
AMBIGUOUS = b""


class _Written(Struct, frozen=True):
    content: str | None
    reasoning: str | None
    arguments: list[str]


WRITTEN = msgspec.msgpack.Decoder(_Written)


class CitedAnswers:
    """Answers as the model wrote them, with ids, so that they can be restored when clients send them back. Thread-safe.

    The key of an answer is its text as the client read it, together with all questions and answers before it. A number
    means a document only within one chat. Instructions are not a part of an answer's key, because the lists of documents
    in instructions come and go. If two answers have the same key but different ids, neither is restored, and the numbers
    stay.

    max_bytes: the most bytes of all answers. If the answers have more bytes, the least recently used ones are dropped.
    """

    def __init__(self, max_bytes: int = 8 << 20) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()

    def remember(self, trail: bytes, shown: Message, written: Message) -> None:
        """Keep an answer.

        trail: a digest of the chat before the answer. shown: the answer as the client read it. written: the answer as
        the model wrote it.
        """
        key, answer = _key(trail, shown), msgspec.msgpack.encode(_written(written))
        with self._lock:
            before = self._answers.pop(key, None)
            self.num_bytes -= 0 if before is None else OVERHEAD + len(before)
            if before not in (None, answer):
                answer = AMBIGUOUS
            self._answers[key] = answer
            self.num_bytes += OVERHEAD + len(answer)
            while self.num_bytes > self._max_bytes:
                _, evicted = self._answers.popitem(last=False)
                self.num_bytes -= OVERHEAD + len(evicted)

    def restore(self, scope: str, messages: Sequence[Message]) -> tuple[list[Message], list[bytes]]:
        """Return the messages, with known answers as the model wrote them, and the trails of the chat.

        The trails are digests: one of the chat before each message, and one of the whole chat.
        """
        hash = blake2b(scope.encode(errors="surrogatepass"), digest_size=16)
        restored: list[Message] = []
        trails = [hash.digest()]
        for message in messages:
            written = self._find(_key(trails[-1], message)) if message["role"] == "assistant" else None
            restored.append(message if written is None else _as_written(message, written))
            if message["role"] not in INSTRUCTIONS:
                hash.update(_key(trails[-1], message))
            trails.append(hash.digest())
        return restored, trails

    def _find(self, key: bytes) -> _Written | None:
        with self._lock:
            if answer := self._answers.get(key):
                self._answers.move_to_end(key)
        return WRITTEN.decode(answer) if answer else None


def _key(trail: bytes, message: Message) -> bytes:
    """Return a digest of a message's role, text and calls, and of the chat before the message.

    trail: the digest of the chat before the message.
    """
    content = message.get("content")
    said = answer_key({**message, "content": text_of(content) or content})
    return blake2b(f"{message['role']}{said}".encode(errors="surrogatepass"), key=trail, digest_size=16).digest()


def _written(answer: Message) -> _Written:
    content, reasoning = answer.get("content"), answer.get("reasoning_content")
    return _Written(
        content if isinstance(content, str) else None,
        reasoning if isinstance(reasoning, str) else None,
        [str(function.get("arguments")) for function in _functions(answer)],
    )


def _as_written(message: Message, written: _Written) -> Message:
    """Return an answer that the client sent back, with the texts that the model wrote.

    If the client sent no reasoning, the reasoning is not restored.
    """
    restored = {**message, "content": written.content}
    if written.reasoning and message.get("reasoning_content"):
        restored["reasoning_content"] = written.reasoning
    if written.arguments and len(_functions(message)) == len(written.arguments):
        functions = map(_with_arguments, _functions(message), written.arguments)
        calls = message["tool_calls"]
        assert isinstance(calls, list)
        restored["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return restored


def _with_arguments(function: Mapping[str, object], arguments: str) -> Mapping[str, object]:
    return {**function, "arguments": arguments}


def _functions(message: Message) -> list[Mapping[str, object]]:
    """Return the function of each call in a message. If any call has no function, return an empty list."""
    calls = message.get("tool_calls")
    found = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    functions = [function for function in found if isinstance(function, Mapping)]
    return functions if isinstance(calls, list) and len(functions) == len(calls) else []
