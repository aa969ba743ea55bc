"""Calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .calls import MAX_NAME, Calls
from .text import SPACE, Steps, Tags, Text
from .values import JsonSpan, json_value

FENCES = ("```json", "```")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """JSON objects with a name and arguments, one or several, or a list of them.

    named: the tool's name may itself be the key of the arguments. late_id: a call's id follows its arguments, so both wait
    for the end of the call.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: bool = False
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ("id",)
    named: bool = False
    late_id: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The members that a call may have before it is known to be one."""
        return (*self.names, *self.arguments, *self.ids, "type")

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def read(self, text: Text, tag: str, calls: Calls) -> Steps[None]:
        yield from text.skip()
        fence = yield from text.one_of(*FENCES)
        is_list = (yield from text.skip()) == "["
        text.take(is_list)
        number = calls.number
        while (yield from text.skip(SPACE + ",;")) == "{":
            if calls.number > number:
                text.mark("")
            if not (yield from _JsonCall(self, text, calls).read()):
                return
        if calls.number > number:
            yield from text.one_of("]" if is_list else "")
            for closes in (FENCES if fence else (), self.closes):
                yield from text.skip()
                yield from text.one_of(*closes)


class _JsonCall:
    """One call on its way in: its name, and its arguments while the name is still to come."""

    def __init__(self, shape: JsonCalls, text: Text, calls: Calls) -> None:
        self._shape, self._text, self._calls = shape, text, calls
        self._name = self._id = ""
        self._arguments: list[str] = []
        self._is_started = False

    def read(self) -> Steps[bool]:
        """Read the members of the object; whether it was a call and is whole."""
        text, depth = self._text, 0
        while character := (yield from text.skip(SPACE + ",")):
            if character == "{" and not depth:
                text.take(1)
                depth = 1
            elif character == "}":
                text.take(1)
                depth -= 1
                if not depth:
                    return (yield from self._close())
            elif character != '"' or not (key := (yield from self._key())):
                break
            elif (yield from text.peek()) == "{" and key == "function":
                text.take(1)
                depth += 1
            elif not (yield from self._member(key)):
                break
        return False

    def _key(self) -> Steps[str]:
        """Read a member's name and what stands before its value."""
        name = yield from self._string()
        yield from self._text.skip()
        if (yield from self._text.one_of(":")):
            yield from self._text.skip()
            return name
        return ""

    def _string(self) -> Steps[str]:
        """Read a short JSON string; return an empty text if it is none."""
        read, tag = yield from self._text.upto(_QUOTE, 1)
        if read or not tag:
            return ""
        read, tag = yield from self._text.upto(_QUOTE, MAX_NAME)
        return _decoded(f'"{read}"') if tag else ""

    def _member(self, key: str) -> Steps[bool]:
        """Read the value of a member; whether this may still be a call."""
        shape, character = self._shape, (yield from self._text.peek())
        if key in shape.names and not self._name and character == '"':
            self._name = yield from self._string()
            return self._name in self._calls.tools
        if shape.named and not self._name and key in self._calls.tools and character == "{":
            self._name = key
            return (yield from self._object())
        if key in shape.arguments and not self._is_started and not self._arguments:
            if character == "{":
                return (yield from self._object())
            value = yield from json_value(self._text)
            self._arguments.append("{}" if value == "null" else _decoded(value))
            return self._arguments[0].lstrip().startswith("{")
        value = yield from json_value(self._text)
        if key in shape.ids and value:
            self._id = _decoded(value) or value[:MAX_NAME]
        return bool(value) and (self._is_started or key in shape.keys)

    def _object(self) -> Steps[bool]:
        """Read the arguments: passed on as they come if the name is known, else kept."""
        streams = bool(self._name) and not self._shape.late_id
        if streams:
            yield from self._start()
        span = JsonSpan()
        while True:
            part = self._text.take(span.feed(self._text.rest))
            if not streams:
                self._arguments.append(part)
            elif part:
                yield self._calls.arguments(part)
            if span.ended or self._text.ended:
                return span.ended
            yield None

    def _start(self) -> Steps[None]:
        self._is_started = True
        self._text.unmark()
        yield self._calls.start(self._name, self._id)

    def _close(self) -> Steps[bool]:
        """End the call, and begin it first if it waited for its end; whether it is one."""
        if self._name and not self._is_started:
            yield from self._start()
            yield self._calls.arguments("".join(self._arguments) or "{}")
        return self._is_started


_QUOTE = Tags(['"'])


def _decoded(text: str) -> str:
    """Return the string that a JSON text is; an empty one if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
