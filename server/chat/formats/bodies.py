"""The notations of a call's arguments: JSON, parameters between tags, literals as in Python. All become JSON."""

from __future__ import annotations

from dataclasses import dataclass
from string import hexdigits
from typing import Protocol

from .calls import MAX_NAME, Calls, Types
from .text import SPACE, Steps, Tags, Text
from .values import TEXT, JsonSpan, escape, typed


class Body(Protocol):
    """begins: the tags with which arguments begin, or end at once. tags: all tags that they contain."""

    @property
    def begins(self) -> tuple[str, ...]: ...
    @property
    def tags(self) -> tuple[str, ...]: ...

    def read(self, text: Text, begin: str, calls: Calls, types: Types) -> Steps[None]:
        """Read arguments behind the tag that began them, and yield them as JSON text."""
        ...


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object."""

    @property
    def begins(self) -> tuple[str, ...]:
        return ("{",)

    @property
    def tags(self) -> tuple[str, ...]:
        return ()

    def read(self, text: Text, begin: str, calls: Calls, types: Types) -> Steps[None]:
        span = JsonSpan()
        span.feed(begin)
        yield calls.arguments(begin)
        while True:
            if part := text.take(span.feed(text.rest)):
                yield calls.arguments(part)
            if span.ended or text.ended:
                return
            yield None


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """Parameters, each with its name and its value between tags.

    opens, key_ends, value_opens, value_ends: the tags around a parameter's parts; value_opens may be missing. `{key}` in
    an end of a value stands for the parameter's name. text_key_ends: ends of a name whose value is a text, whatever the
    schema says. ends: the tags behind the last parameter.
    """

    opens: tuple[str, ...]
    key_ends: tuple[str, ...]
    value_ends: tuple[str, ...]
    ends: tuple[str, ...]
    text_key_ends: tuple[str, ...] = ()
    value_opens: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        return self.opens + self.ends

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opens + self.key_ends + self.value_ends + self.ends + self.text_key_ends + self.value_opens

    def read(self, text: Text, begin: str, calls: Calls, types: Types) -> Steps[None]:
        yield calls.arguments("{")
        between, is_whole, tag = "", True, begin
        while is_whole and tag in self.opens:
            key, end = yield from text.upto(Tags(self.key_ends + self.text_key_ends), MAX_NAME)
            if not end:
                return
            yield calls.arguments(f'{between}"{escape(key.strip())}": ')
            is_text = end in self.text_key_ends
            is_whole = yield from self._value(
                text, key.strip(), calls, TEXT if is_text else types.get(key.strip(), frozenset())
            )
            yield from text.skip()
            between, tag = ", ", (yield from text.one_of(*self.begins))
        if is_whole:
            yield calls.arguments("}")

    def _value(self, text: Text, key: str, calls: Calls, types: frozenset[str]) -> Steps[bool]:
        """Read a value: a text passed on as it comes, all others when they are whole. Whether it was whole."""
        ends = Tags(end.replace("{key}", key) for end in self.value_ends)
        if any(not tag.isspace() for tag in self.value_opens):
            yield from text.skip()
        yield from text.one_of(*self.value_opens)
        parts: list[str] = []
        if types == TEXT:
            yield calls.arguments('"')
        tag = ""
        while not tag:
            part, tag = text.before(ends)
            if types != TEXT:
                parts.append(part)
            elif part:
                yield calls.arguments(escape(part))
            if text.ended and not tag:
                break
            if not tag:
                yield None
        if tag or types != TEXT:
            yield calls.arguments('"' if types == TEXT else typed("".join(parts), types))
        return bool(tag)


@dataclass(frozen=True, slots=True)
class LiteralBody:
    """Literals much as in Python. begin: what opens the arguments. assign: what stands between a name and its value."""

    begin: str
    assign: str
    quotes: tuple[str, ...]

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(quote for quote in self.quotes if len(quote) > 1)

    def read(self, text: Text, begin: str, calls: Calls, types: Types) -> Steps[None]:
        """Write the literals as JSON, character by character: what is malformed stays so."""
        yield calls.arguments("{")
        open_brackets, between, is_key = ["}"], "", True
        while character := (yield from text.skip()):
            if character in ")]}":
                text.take(1)
                yield calls.arguments(open_brackets.pop())
                if not open_brackets:
                    return
                between, is_key = ", ", False
            elif character == ",":
                text.take(1)
                between, is_key = ", ", open_brackets[-1] == "}"
            elif character in "([{":
                text.take(1)
                open_brackets.append("}" if character == "{" else "]")
                yield calls.arguments(between + ("{" if character == "{" else "["))
                between, is_key = "", character == "{"
            elif is_key:
                yield calls.arguments(between + (yield from self._key(text)))
                between, is_key = "", False
            else:
                yield calls.arguments(between)
                yield from self._scalar(text, calls)
                between = ", "

    def _key(self, text: Text) -> Steps[str]:
        """Read a name and the sign behind it; return them as JSON."""
        name, _ = yield from text.upto(Tags((self.assign, ":")), MAX_NAME)
        for quote in self.quotes:
            name = name.strip().removeprefix(quote).removesuffix(quote)
        return f'"{escape(name)}": '

    def _scalar(self, text: Text, calls: Calls) -> Steps[None]:
        quote = yield from text.one_of(*self.quotes)
        if quote:
            yield from self._string(text, quote, calls)
            return
        word = text.take(1)
        while (character := (yield from text.peek())) and character not in SPACE + ",)]}":
            word += text.take(1)
        yield calls.arguments(typed(word, ()))

    def _string(self, text: Text, quote: str, calls: Calls) -> Steps[None]:
        """Read a text up to its quote; short quotes may be escaped in it."""
        stops = Tags((quote, "\\") if len(quote) == 1 else (quote,))
        yield calls.arguments('"')
        while True:
            part, stop = text.before(stops)
            if part:
                yield calls.arguments(escape(part))
            if stop == quote:
                yield calls.arguments('"')
                return
            if stop:
                yield calls.arguments((yield from self._escaped(text)))
            elif text.ended:
                return
            else:
                yield None

    def _escaped(self, text: Text) -> Steps[str]:
        """Read what stands behind a backslash; return it as it stands in JSON."""
        sign = yield from text.peek()
        text.take(1)
        digits = ""
        while sign == "u" and len(digits) < 4 and (digit := (yield from text.peek())) and digit in hexdigits:
            digits += text.take(1)
        return f"\\u{digits}" if len(digits) == 4 else escape(_ESCAPES.get(sign, "\\" + sign) + digits)


_ESCAPES = {"b": "\b", "f": "\f", "/": "/", "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
