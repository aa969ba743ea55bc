"""Earlier turns in a new prompt: messages, the order of documents, and answers whose start a request gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from sys import getsizeof, intern
from typing import Self

import msgspec
import numpy as np

from ...models.marks import TextPiece
from ...models.template import Message, prefilled_content
from ...ordering.document import TOOLS, Document
from ...ordering.pasted import PastedList
from ...slots.request import Layout, PlacedDocument
from ..formats.answer import PLAIN, AnswerFormat, AnswerReader, ContentText, Fragment, ReasoningText
from ..http.api_errors import RequestError
from .body import ChatRequest, HistoryKind
from .chat_prompt import PLACE, ChatPrompt, DocumentSet, Part
from .citations import Citations
from .parts import CallPairs
from .text_documents import TextList
from .volatile import INSTRUCTIONS, ChangedText

# ---- Prefilled answers: an answer that continues the last message. ------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """The start of an answer, which the request gives and the model continues.

    content: the content of this start. tokens: the ids (int32) of the content in the prompt; None: they are unknown, since
    the last piece of the prompt is not exactly this content. is_shown: whether the answer that the client gets includes
    the given start.
    """

    reasoning: str
    content: str
    tokens: np.ndarray | None
    is_shown: bool

    @classmethod
    def of(cls, message: Message, piece: TextPiece, part: Part, is_shown: bool) -> Self:
        """Make the start of an answer from the message that the model continues.

        piece: the last piece of the prompt. part: the part of the prompt that was made from this piece.
        """
        content, reasoning = prefilled_content(message, "the last message's content"), message.get("reasoning_content")
        is_whole = piece.message is not None and piece.part == "content" and piece.text == content
        tokens = part.tokens if is_whole and isinstance(part.tokens, np.ndarray) else None
        return cls(str(reasoning or ""), content, tokens, is_shown)

    @property
    def fragments(self) -> list[Fragment]:
        reasoning: list[Fragment] = [ReasoningText(self.reasoning)] if self.reasoning else []
        return [*reasoning, ContentText(self.content)] if self.content else reasoning

    def read_whole(self, rest: Callable[[], AnswerReader]) -> Callable[[], AnswerReader]:
        """Return a function that makes readers of the whole answer: of its given start, then of the generated text.

        rest: makes readers of the generated text.
        """
        return lambda: _PrefilledReader(self.fragments, rest())

    def join(self, sampled: np.ndarray) -> np.ndarray:
        """Return the ids (int32) of the whole content, or only the sampled ids if the start's ids are unknown."""
        return sampled if self.tokens is None else np.concatenate([self.tokens, sampled])


class _PrefilledReader:
    """Reads a whole answer: its given start, then the generated text."""

    def __init__(self, prefilled: Sequence[Fragment], rest: AnswerReader) -> None:
        self._prefilled, self._rest = list(prefilled), rest

    def push(self, text: str) -> list[Fragment]:
        prefilled, self._prefilled = self._prefilled, []
        return [*prefilled, *self._rest.push(text)]

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        return [*self._prefilled, *self._rest.finish(is_cut)]


def continues_answer(request: ChatRequest, messages: Sequence[Message], *, prefills: bool) -> bool:
    """Return whether the answer continues the last message. Raises RequestError if the message cannot be continued.

    messages: the whole history. prefills: whether an assistant's last message is continued even without the field
    `continue_final_message`.
    """
    last, asked = messages[-1], bool(request.continue_final_message)
    if not asked and not (prefills and last["role"] == "assistant"):
        return False
    where = "continue_final_message" if asked else "messages"
    if last["role"] != "assistant":
        raise RequestError("continue_final_message: the last message is not an assistant's", param=where)
    if not asked and len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise RequestError("messages: expected at most one assistant message at the end", param=where)
    if last.get("tool_calls"):
        raise RequestError(f"{where}: an assistant message with tool calls cannot be continued", param=where)
    if request.continue_final_message == "reasoning_content" and last.get("content"):
        raise RequestError(f"{where}: the last message has content, so its reasoning is over", param=where)
    return True


Documents = tuple[Document, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HistoryMessage:
    """A message as it was in a prompt.

    said: the client's message without documents, as JSON. Decoded, the message would take up to 20 times as much memory as
        JSON.
    keys: the keys of all documents of the message, in retrieval order.
    shown: the documents that the prompt shows with the message, and their hint; None: there are none.
    sampled: the token ids (int32) of an answer, if they decode to exactly its text; else None.
    one_turn: whether the message has instructions that later turns drop.
    num_bytes: the total size in memory.
    """

    role: str
    said: bytes
    keys: tuple[str, ...] = ()
    shown: DocumentSet | None = None
    sampled: np.ndarray | None = None
    one_turn: bool = False
    num_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", _size(self))

    @classmethod
    def of(
        cls,
        message: Message,
        keys: tuple[str, ...] = (),
        shown: DocumentSet | None = None,
        sampled: np.ndarray | None = None,
        one_turn: bool = False,
    ) -> Self:
        role = intern(str(message["role"]))
        return cls(role, msgspec.json.encode(message), keys, shown=shown, sampled=sampled, one_turn=one_turn)

    @property
    def message(self) -> dict[str, object]:
        """The message, which is decoded again at each access."""
        return msgspec.json.decode(self.said)

    def public(self, citations: Citations) -> dict[str, object]:
        """Return the message for the client, with the ids of its documents in the prompt's order but without their texts.

        citations: the numbers of the client's program. These numbers replace the documents' ids in the message and in the
        list of documents.
        """
        if self.shown is None:
            said = self.message
            texts = ("content", "reasoning_content") if self.role == "assistant" else ()
            return said | {name: citations.shown(text) for name in texts if isinstance(text := said.get(name), str)}
        said = msgspec.json.decode(self.said.replace(PLACE.encode(), b"") if self.shown.in_text else self.said)
        order = self.shown.order or ()
        documents = [citations.shown(self.shown.documents[at].id) for at in order]
        return {**said, "documents": documents, "repeated": [*map(citations.shown, self.shown.repeated)]}


@dataclass(frozen=True, slots=True)
class History:
    """All messages of a prompt: first the `kept` messages, as they were in an earlier prompt, then the new messages.

    messages: all messages, without documents.
    documents: the documents of new messages, by the message's index.
    shift: the index of a message here, minus its index in the request.
    lists: the lists of documents that were cut out of messages' texts, by the message's index.
    """

    messages: Sequence[Message]
    documents: Mapping[int, Documents]
    kept: Sequence[HistoryMessage] = ()
    shift: int = 0
    lists: Mapping[int, PastedList] = field(default_factory=dict[int, PastedList])


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """A chat as a prompt.

    entries: one entry for each message; the first `num_kept` entries come from the stored conversation.
    form: the form in which the model writes the answer.
    prefilled: the start of the answer, which is also the last entry; None: the request gives no start.
    moved: the changes of instructions that the prompt states.
    citations: the numbers that the client's program gave to documents; None: it gave none.
    lists: the lists of documents that were found in the texts of the request, for the report.
    shift: the index of a message in `entries`, minus its index in the request.
    """

    prompt: ChatPrompt
    entries: tuple[HistoryMessage, ...]
    num_kept: int = 0
    form: AnswerFormat = PLAIN
    prefilled: Prefilled | None = None
    moved: tuple[ChangedText, ...] = ()
    citations: Citations | None = None
    lists: tuple[TextList, ...] = ()
    shift: int = 0

    @property
    def shown_reader(self) -> Callable[[], AnswerReader]:
        """A function that makes readers of the part of the answer that the client gets.

        The client gets the whole answer, or only the generated part if the start that the request gave is not shown.
        """
        if self.prefilled is None or self.prefilled.is_shown:
            return self._for_client(self.whole_reader)
        return self._for_client(self.form.reader, self.citations.owed if self.citations else "")

    @property
    def cited_reader(self) -> Callable[[], AnswerReader]:
        """A function that makes readers of the whole answer as the client may send it back: with the client's numbers."""
        return self._for_client(self.whole_reader)

    @property
    def whole_reader(self) -> Callable[[], AnswerReader]:
        return self.form.reader if self.prefilled is None else self.prefilled.read_whole(self.form.reader)

    def _for_client(self, make: Callable[[], AnswerReader], owed: str = "") -> Callable[[], AnswerReader]:
        return make if self.citations is None else self.citations.read(make, owed)

    def shown_lists(self, entries: Sequence[HistoryMessage]) -> list[dict[str, object]]:
        """Return the report on the lists of documents in the request's texts. entries: the result of `place_entries`."""
        sets = (entries[one.message + self.shift].shown for one in self.lists)
        return [
            one.shown(shown.order or () if shown is not None else ()) for one, shown in zip(self.lists, sets, strict=True)
        ]

    def place_entries(self, layout: Layout) -> tuple[HistoryMessage, ...]:
        """Return the entries of the messages before the answer.

        The entries' documents get the order of the layout, which later turns keep.
        """
        placed = iter(layout.documents)
        entries = self.entries[:-1] if self.prefilled else self.entries
        return tuple(_place_documents(entry, placed) for entry in entries)


def continue_history(
    messages: Sequence[Message],
    documents: Mapping[int, Documents],
    remembered: Sequence[HistoryMessage] = (),
    kind: HistoryKind = "auto",
) -> History:
    """Join the stored history of a conversation and the messages of the client.

    If the client sends its whole history, the stored entries are kept up to the first message that differs. remembered:
    the stored entries. documents: by a message's index, the documents that the client sent with it. A message without
    documents keeps its stored documents.
    """
    plain = [{name: value for name, value in message.items() if name != "documents"} for message in messages]
    if are_new(plain, kind):
        shift = len(remembered)
        moved = {at + shift: given for at, given in documents.items()}
        return History(_paired([entry.message for entry in remembered], plain), moved, remembered, shift)
    same = 0
    while same < min(len(plain), len(remembered)) and _is_same(remembered[same], plain[same], documents.get(same)):
        same += 1
    return History(plain, {at: given for at, given in documents.items() if at >= same}, remembered[:same])


def are_new(messages: Sequence[Message], kind: HistoryKind) -> bool:
    """Return whether the messages follow the stored history. If not, the messages are a whole history."""
    return kind == "new" or (kind == "auto" and not _is_whole(messages))


def _paired(before: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """Return the stored messages, then the new messages. A new tool result gets the id of the call that it answers."""
    pairs, messages = CallPairs(), list[Message]()
    for at, message in enumerate([*before, *new]):
        if isinstance(calls := message.get("tool_calls"), list):
            pairs.call(calls, at)
        answered = pairs.answer(dict(message)) if message["role"] in TOOLS else message
        messages.append(message if at < len(before) else answered)
    return messages


def _is_whole(messages: Sequence[Message]) -> bool:
    """Return whether messages look like a whole conversation: they start with instructions or contain answers."""
    return messages[0]["role"] in INSTRUCTIONS or any(message["role"] == "assistant" for message in messages)


def _is_same(entry: HistoryMessage, message: Message, documents: Documents | None) -> bool:
    if documents is not None and entry.keys != tuple(document.key for document in documents):
        return False
    return entry.role == message["role"] and _filled_fields(entry.message) == _filled_fields(message)


def _filled_fields(message: Message) -> dict[str, object]:
    """Return a message without its fields that are null or an empty list, since only some clients send these."""
    return {name: value for name, value in message.items() if value is not None and value != []}


def _place_documents(entry: HistoryMessage, placed: Iterator[PlacedDocument]) -> HistoryMessage:
    """Return an entry with its documents in the order of the prompt.

    placed: yields the documents of the prompt, from the entry's first document on.
    """
    if entry.shown is None:
        return entry
    ranks = {key: rank for rank, key in enumerate(entry.shown.keys)}
    order = tuple(ranks[document.key] for document in islice(placed, len(ranks)))
    return entry if entry.shown.order == order else replace(entry, shown=replace(entry.shown, order=order))


def _size(entry: HistoryMessage) -> int:
    """Estimate the bytes of an entry in memory. If several entries share a part, it counts in each of them."""
    size = getsizeof(entry) + getsizeof(entry.said) + getsizeof(entry.keys)
    if entry.sampled is not None:
        size += getsizeof(entry.sampled)
    if entry.shown is None:
        return size + sum(map(getsizeof, entry.keys))
    counted = {document.key for document in entry.shown.documents}
    return size + _set_size(entry.shown) + sum(getsizeof(key) for key in entry.keys if key not in counted)


def _set_size(shown: DocumentSet) -> int:
    strings = (text for one in shown.documents for text in (one.id, one.text, one.title, one.key, one.form))
    strings = chain(strings, chain.from_iterable(shown.number_of))
    tuples = (shown.documents, shown.tokens, shown.repeated, shown.ranking, tuple(range(len(shown.documents))))
    tuples += (shown.number_of, *shown.number_of)
    arrays = (*shown.tokens, shown.location)
    return sum(map(getsizeof, (shown, *tuples, *shown.documents, *strings, *shown.repeated, *arrays)))
