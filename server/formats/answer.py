"""The fragments into which a model's answer is divided: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...models.detokenizer import ReasoningLimit
from ...models.json_schema import GrammarSource
from ..http.json_body import whole_characters


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call.

    index: the call's number in the answer, from 0.
    id: the call's id. The client sends the tool's result with the same id.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments. All pieces of a call, joined, are the text of a JSON object."""

    index: int
    text: str


Fragment = ContentText | ReasoningText | CallStart | CallArguments


class AnswerReader(Protocol):
    """Reads one answer as its text arrives.

    An answer has the same content, reasoning and calls, however its text is divided into pieces.
    """

    def push(self, text: str) -> list[Fragment]:
        """Add text. Return the new fragments, which later text cannot change."""
        ...

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        """Return the remaining fragments. Call this once, after the last `push`.

        is_cut: whether the answer ended at a limit. If the answer was cut, a call without a complete name is dropped.
        """
        ...


class Plain:
    """Reads all text as content."""

    def push(self, text: str) -> list[Fragment]:
        return [ContentText(text)] if text else []

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        return []


class WithoutReasoning:
    """Drops the reasoning from the fragments of another reader."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def push(self, text: str) -> list[Fragment]:
        return [one for one in self._reader.push(text) if not isinstance(one, ReasoningText)]

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        return [one for one in self._reader.finish(is_cut) if not isinstance(one, ReasoningText)]


def message(fragments: Iterable[Fragment]) -> dict[str, object]:
    """Return the fragments of a whole answer as a message of OpenAI's API.

    The message has `reasoning_content` only if the answer has reasoning, and `tool_calls` only if it has calls. In a message
    with `tool_calls`, empty content is null.
    """
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[CallStart] = []
    arguments: dict[int, list[str]] = {}
    for fragment in fragments:
        match fragment:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallStart(index):
                starts.append(fragment)
                arguments[index] = []
            case CallArguments(index, text):
                arguments[index].append(text)
    said: dict[str, object] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        said["reasoning_content"] = "".join(reasoning)
    if starts:
        said["content"] = said["content"] or None
        said["tool_calls"] = [tool_call(start, "".join(arguments[start.index])) for start in starts]
    return said


def tool_call(start: CallStart, arguments: str) -> Mapping[str, object]:
    """Return a tool call in the form of OpenAI's API. arguments: the arguments as JSON text."""
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}


def decoded_arguments(arguments: str) -> dict[str, object] | None:
    """Return the arguments of a call as an object.

    Return None if the text is not a JSON object, for example because the answer was cut.
    """
    try:
        decoded = msgspec.json.decode(whole_characters(arguments.encode()))
    except (msgspec.DecodeError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar, and the field of the request that it comes from. Errors in the grammar name the request's field."""

    field: str
    source: GrammarSource


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of one answer.

    reader: makes a reader of the answer's text.
    spelt: the control tokens that stay in the answer's text, because the reader looks for them.
    grammar_spec: the grammar that the answer must follow; None if any text is allowed.
    reasoning: the limit of the answer's reasoning; None if there is no limit.
    """

    reader: Callable[[], AnswerReader] = Plain
    spelt: frozenset[str] = frozenset()
    grammar_spec: GrammarSpec | None = None
    reasoning: ReasoningLimit | None = None


PLAIN = AnswerFormat()
