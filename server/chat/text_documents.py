"""Documents in the text of messages: if the client asks for it, a pasted list becomes documents at the same place.

The search for a list uses only the text of the list's own message, so each turn finds the same list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...models.template import Message
from ...ordering.document import MOST_DOCUMENTS, Document
from ...ordering.pasted import PastedList, find_pasted
from .body import ChatRequest
from .chat_prompt import PLACE
from .tool_results import text_of
from .volatile import INSTRUCTIONS

LIST_ROLES = (*INSTRUCTIONS, "user")
OF_AN_ID = re.compile(r"\d|\A[a-f]+\Z")  # matches stop strings that could occur within an id
MOST_UNTOUCHED = 32  # most untouched lists in a report, each with a reason
HAS_OWN = "the message has documents of its own"
HAS_PLACE = "the message has the character U+FDD0"
ONE_LIST = "another list of the message was taken"
REWRITTEN = "the chat template changes the text around it"
CONSTRAINED = "the answer has to fit a form, which may want its numbers"
MORE = "lists from here on that are left alone, too"
STOPS = "a stop string could match within an id: the model writes ids instead of numbers"
SHOWS_TOKENS = "the tokens of the answer are asked for, which name no numbers"


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of documents in the text of a message, for the report in the answer.

    message: the index of the message in the request; negative for the instructions of a response, which precede the
    messages. count: the number of documents. reason: why the list stays text; empty: the list became documents.
    """

    message: int
    format: str
    count: int = 0
    reason: str = ""

    def shown(self, order: Sequence[int]) -> dict[str, object]:
        """Return the list's entry in the answer's report. order: the ranks of the documents in the prompt's order."""
        where = self.message if self.message >= 0 else "instructions"
        fields: dict[str, object] = {"message": where, "format": self.format}
        if self.reason:
            return fields | {"left": self.reason}
        return fields | {"documents": self.count, "moved": sum(rank != place for place, rank in enumerate(order))}


@dataclass(frozen=True, slots=True)
class CutMessages:
    """Messages in which PLACE stands for each list of documents that was cut out.

    lists: the lists that were cut out, by the message's index. report: all lists that were found, also those that stay
    text.
    """

    messages: Sequence[Message]
    lists: Mapping[int, PastedList]
    report: tuple[TextList, ...] = ()

    @property
    def documents(self) -> dict[int, tuple[Document, ...]]:
        return {at: one.documents for at, one in self.lists.items()}


Given = Mapping[int, Sequence[Document]]
"""The documents in fields of messages, by the message's index."""
Cut = Callable[[Sequence[Message], Given], CutMessages]


def keep_lists(messages: Sequence[Message], given: Given) -> CutMessages:
    """Return the messages unchanged. This function is for requests that keep lists as text."""
    return CutMessages(messages, {})


def put_back(cut: Cut, messages: Sequence[Message], given: Given) -> CutMessages:
    """Return the messages unchanged, with a report that their lists stay text. cut: finds the lists.

    This function is for chat templates that change the text around the lists, so that the places of the lists are lost.
    """
    report = [
        one if one.reason else TextList(one.message, one.format, reason=REWRITTEN) for one in cut(messages, given).report
    ]
    return CutMessages(messages, {}, tuple(report))


def cut_lists(messages: Sequence[Message], given: Given, no_numbers: str = "") -> CutMessages:
    """Find lists of documents in messages, and put PLACE in place of at most one list in each message.

    no_numbers: why numbered lists must stay text; empty: numbered lists are cut out like other lists.
    """
    shown, lists = list(messages), dict[int, PastedList]()
    report, untouched = list[TextList](), list[TextList]()
    room = MOST_DOCUMENTS - sum(map(len, given.values()))
    for at, message in enumerate(messages):
        if message["role"] not in LIST_ROLES:
            continue
        has_place = any(PLACE in text for _, text in _texts(message))
        for part, text in _texts(message):
            found, skipped = find_pasted(text, room)
            untouched += [TextList(at, one.format, reason=one.why) for one in skipped]
            if found is None:
                continue
            why = HAS_OWN if given.get(at) else ONE_LIST if at in lists else HAS_PLACE if has_place else ""
            if why or (found.number_of and no_numbers):
                untouched.append(TextList(at, found.format, reason=why or no_numbers))
                continue
            report.append(TextList(at, found.format, len(found.documents)))
            lists[at], room = found, room - len(found.documents)
            shown[at] = _with_text(message, part, text[: found.start] + PLACE + text[found.stop :])
    more = len(untouched) - MOST_UNTOUCHED
    if more > 0:
        untouched[MOST_UNTOUCHED:] = [replace(untouched[MOST_UNTOUCHED], reason=f"{MORE}: {more:,}")]
    return CutMessages(shown, lists, (*report, *untouched))


def numbers_refused(request: ChatRequest) -> str:
    """Return why numbered lists must stay text; empty: they may be cut out, so that ids replace their numbers."""
    if request.is_constrained:
        return CONSTRAINED
    if any(OF_AN_ID.search(stop) for stop in request.stops()):
        return STOPS
    return SHOWS_TOKENS if request.shows_tokens else ""


def places(messages: Sequence[Message]) -> list[int]:
    """Return how many lists were cut out of each message."""
    return [text_of(message.get("content")).count(PLACE) for message in messages]


def _texts(message: Message) -> Iterator[tuple[int | None, str]]:
    """Yield the texts of a message's content, each with the index of its part; None: the content is one text."""
    content = message.get("content")
    if isinstance(content, str):
        yield None, content
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
            yield at, text


def _with_text(message: Message, part: int | None, text: str) -> Message:
    """Return the message with a new text in one of its parts."""
    content = message.get("content")
    if not isinstance(content, list) or part is None:
        return {**message, "content": text}
    return {**message, "content": [*content[:part], {**content[part], "text": text}, *content[part + 1 :]]}
