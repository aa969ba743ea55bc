"""The fragments of a chat's answer: content, reasoning and tool calls, read from the model's text."""

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
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. index: its number in the answer, from 0. id: the tool's result refers to it."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text. Joined, the pieces are an object."""

    index: int
    text: str


Fragment = ContentText | ReasoningText | CallStart | CallArguments


class AnswerReader(Protocol):
    """Reads one answer as its text arrives. Joined, the fragments are the same however the text arrives."""

    def push(self, text: str) -> list[Fragment]:
        """Add text and return the fragments that it settles."""
        ...

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        """Return the remaining fragments. Called once, after the last text. is_cut: the answer ended at its limit.

        A call that was cut before its name was known is dropped.
        """
        ...


class Plain:
    """Reads all text as content."""

    def push(self, text: str) -> list[Fragment]:
        return [ContentText(text)] if text else []

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        return []


class WithoutReasoning:
    """Reads an answer without its reasoning. reader: of the whole answer."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def push(self, text: str) -> list[Fragment]:
        return [one for one in self._reader.push(text) if not isinstance(one, ReasoningText)]

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        return [one for one in self._reader.finish(is_cut) if not isinstance(one, ReasoningText)]


def message(fragments: Iterable[Fragment]) -> dict[str, object]:
    """Return the fragments of a whole answer as a message of OpenAI's API.

    It has `reasoning_content` and `tool_calls` only where the answer has them. With `tool_calls`, empty content is null.
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
    """Return a tool call as OpenAI's API has it. arguments: JSON text."""
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}


def decoded_arguments(arguments: str) -> dict[str, object] | None:
    """Return the arguments of a call as an object; None if they are not one, as when they were cut off."""
    try:
        decoded = msgspec.json.decode(whole_characters(arguments.encode()))
    except (msgspec.DecodeError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar, and the field that it comes from, for errors."""

    field: str
    source: GrammarSource


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of one answer. reader: makes a reader of its text. spelt: the control tokens that the text includes.

    grammar_spec: the grammar of the answer. reasoning: the limit of its reasoning.
    """

    reader: Callable[[], AnswerReader] = Plain
    spelt: frozenset[str] = frozenset()
    grammar_spec: GrammarSpec | None = None
    reasoning: ReasoningLimit | None = None


PLAIN = AnswerFormat()
