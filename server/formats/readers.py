"""Readers for answers whose text arrives in pieces.

The readers find content, reasoning, and tool calls in many notations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from string import hexdigits
from typing import Protocol

from .answer import CallArguments, CallStart, ContentText, Fragment, ReasoningText
from .json_text import (
    ANY,
    ESCAPES,
    FREE_TEXT,
    SPACE,
    JsonSpan,
    ParameterType,
    Steps,
    Tags,
    UnreadText,
    escape,
    json_value,
    literal,
    typed,
)

MAX_NAME = 256  # the most characters in the name of a tool or a parameter, or in an id
Types = Mapping[str, ParameterType]
"""The type of each parameter of a tool."""


def plain_id(digest: str) -> str:
    return f"call_{digest[:24]}"


def short_id(digest: str) -> str:
    """Return an id that Mistral's templates accept: nine letters or digits."""
    return digest[:9]


class Calls:
    """Gives each call of one answer a number and an id.

    tools: the tools that may be called, with the types of their parameters.
    new_id: makes a call's id from a hexadecimal digest.
    seed: a text from which the digests are made. If an answer is read twice with the same seed, its calls get the same ids.
    """

    def __init__(self, tools: Mapping[str, Types], new_id: Callable[[str], str], seed: str) -> None:
        self.tools = tools
        self.number = 0
        self._new_id, self._seed = new_id, seed

    def start(self, name: str, id: str = "") -> CallStart:
        id = id or self._new_id(sha256(f"{self._seed} {self.number}".encode()).hexdigest())
        self.number += 1
        return CallStart(self.number - 1, id, name)

    def arguments(self, text: str) -> CallArguments:
        """Return `text` as the next piece of the newest call's arguments."""
        return CallArguments(self.number - 1, text)


class CallShape(Protocol):
    """A form in which models write calls.

    opens: the tags that open calls.
    tags: all tags of the form.
    bare: whether a call may have no opening tag.
    """

    @property
    def opens(self) -> tuple[str, ...]: ...
    @property
    def tags(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> bool: ...

    def read(self, text: UnreadText, tag: str, calls: Calls) -> Steps[None]:
        """Read calls after their opening tag.

        Text that turns out not to be a call either stays unread, or is returned by the next `text.unmark`.

        tag: the opening tag, which is already read; empty for a call without an opening tag.
        """
        ...


# ---- Bodies -------------------------------------------------------------------------------------------------------------
# The notations of a call's arguments: JSON, parameters between tags, and literals as in Python. All are converted to JSON.


class Body(Protocol):
    """A notation of a call's arguments.

    begins: the tags at which a call's arguments begin, or at which a call without arguments ends.
    tags: all tags of the notation.
    """

    @property
    def begins(self) -> tuple[str, ...]: ...
    @property
    def tags(self) -> tuple[str, ...]: ...

    def read(
        self, text: UnreadText, begin: str, calls: Calls, types: Types, after_call: Collection[str] = ()
    ) -> Steps[None]:
        """Read a call's arguments after their first tag, and yield the arguments as JSON.

        begin: the first tag, which is already read.
        types: the types of the tool's parameters.
        after_call: the tags that may follow the call.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonBody:
    begins: tuple[str, ...] = ("{",)
    tags: tuple[str, ...] = ()

    def read(
        self, text: UnreadText, begin: str, calls: Calls, types: Types, after_call: Collection[str] = ()
    ) -> Steps[None]:
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
    """Arguments that are written as parameters. Each parameter has its name and its value between tags.

    opens, key_ends: the tags before and after a parameter's name.
    value_opens, value_ends: the tags before and after a parameter's value. `{key}` in value_ends stands for the parameter's
    name. The model may omit value_opens.
    ends: the tags after the last parameter.
    text_key_ends: the tags after a name that make the value a string, even if the schema gives another type.
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

    def read(
        self, text: UnreadText, begin: str, calls: Calls, types: Types, after_call: Collection[str] = ()
    ) -> Steps[None]:
        yield calls.arguments("{")
        between, tag = "", begin
        while tag in self.opens:
            key, end = yield from text.upto(Tags(self.key_ends + self.text_key_ends), MAX_NAME)
            if not end:
                return
            key = key.strip()
            yield calls.arguments(f'{between}"{escape(key)}": ')
            wanted = FREE_TEXT if end in self.text_key_ends else types.get(key, ANY)
            tag = yield from self._value(text, key, calls, wanted, after_call)
            between = ", "
        if tag or (tag is not None and not text.is_cut):
            yield calls.arguments("}")

    def _value(
        self, text: UnreadText, key: str, calls: Calls, wanted: ParameterType, after_call: Collection[str]
    ) -> Steps[str | None]:
        """Read a value and its closing tag. Return the tag that follows the closing tag.

        Return an empty tag if the answer ends after the closing tag, and None if the answer ends before the value does. A
        closing tag ends the value only if another tag or the end of the answer follows. If other text follows, the closing
        tag is part of the value. If the closing tag is missing, a tag of `begins` at the start of a line ends the value.

        A value that may be any string is yielded as it arrives. Other values are yielded when they are complete.
        """
        ends = [end.replace("{key}", key) for end in self.value_ends]
        lines = [f"\n{tag}" for tag in self.begins if not any(end.startswith(tag) for end in ends)]
        tags, lead = Tags((*ends, *lines)), "\n" if "\n" in self.value_opens else ""
        if self.value_opens and not lead:
            yield from text.after_space(self.value_opens)
        parts: list[str] = []
        if wanted.is_free_text:
            yield calls.arguments('"')
        following: str | None = None
        while following is None:
            part, tag = text.before(tags)
            if tag in lines:
                text.back(len(tag))
            following = (yield from text.after_space(self.begins, after_call)) if tag else None
            part += tag if following is None and tag else ""
            if part and lead:
                part, lead = part.removeprefix(lead), ""
            if not wanted.is_free_text:
                parts.append(part)
            elif part:
                yield calls.arguments(escape(part))
            if not tag:
                if text.ended:
                    break
                yield None
        if following is not None or not wanted.is_free_text:
            yield calls.arguments('"' if wanted.is_free_text else typed("".join(parts), wanted))
        return following


@dataclass(frozen=True, slots=True)
class LiteralBody:
    """Arguments written much like Python's literals.

    begin: the sign before the arguments.
    assign: the sign after a name.
    quotes: the quotes that a string may have.
    """

    begin: str
    assign: str
    quotes: tuple[str, ...]

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(quote for quote in self.quotes if len(quote) > 1)

    def read(
        self, text: UnreadText, begin: str, calls: Calls, types: Types, after_call: Collection[str] = ()
    ) -> Steps[None]:
        """Read the literals, and yield them as JSON. Malformed literals become malformed JSON."""
        yield calls.arguments("{")
        open_brackets, between, is_key, wanted = ["}"], "", True, ANY
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
                key = yield from self._key(text)
                yield calls.arguments(f'{between}"{escape(key)}": ')
                between, is_key = "", False
                wanted = types.get(key, ANY) if len(open_brackets) == 1 else ANY
            else:
                yield calls.arguments(between)
                yield from self._scalar(text, calls, wanted if len(open_brackets) == 1 else ANY)
                between = ", "

    def _key(self, text: UnreadText) -> Steps[str]:
        """Read a parameter's name and the sign after it. Return the name."""
        name, _ = yield from text.upto(Tags((self.assign, ":")), MAX_NAME)
        for quote in self.quotes:
            name = name.strip().removeprefix(quote).removesuffix(quote)
        return name

    def _scalar(self, text: UnreadText, calls: Calls, wanted: ParameterType) -> Steps[None]:
        quote = yield from text.one_of(*self.quotes)
        if quote:
            yield from self._string(text, quote, calls)
            return
        word = text.take(1)
        while (character := (yield from text.peek())) and character not in SPACE + ",)]}":
            word += text.take(1)
        yield calls.arguments(literal(word, wanted))

    def _string(self, text: UnreadText, quote: str, calls: Calls) -> Steps[None]:
        """Read a string up to its closing quote. A quote of one character may be escaped in the string."""
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

    def _escaped(self, text: UnreadText) -> Steps[str]:
        """Read the rest of an escape after its backslash. Return the escape in JSON's notation."""
        sign = yield from text.peek()
        text.take(1)
        digits = ""
        while sign == "u" and len(digits) < 4 and (digit := (yield from text.peek())) and digit in hexdigits:
            digits += text.take(1)
        return f"\\u{digits}" if len(digits) == 4 else escape(ESCAPES.get(sign, "\\" + sign) + digits)


# ---- Calls with a header before their arguments. The header names the tool. ---------------------------------------------

MAX_HEADER = 512  # the most characters between the tag that opens a call and the call's arguments


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """Calls that are written as a tag, a header with the tool's name, the arguments, and a closing tag.

    starts, closes: the tags around each call.
    header: the pattern of the header, with the group `name` and, if calls have ids, the group `id`.
    more: tags other than `starts` that may start another call after the first.
    sections, section_ends: the tags around all calls.
    inner: the tags within the header.
    """

    starts: tuple[str, ...]
    header: re.Pattern[str]
    body: Body
    closes: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    section_ends: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: bool = False

    @property
    def opens(self) -> tuple[str, ...]:
        return self.sections + tuple(start for start in self.starts if len(start) > 1)

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opens + self.closes + self.section_ends + self.inner + self.body.tags

    def read(self, text: UnreadText, tag: str, calls: Calls) -> Steps[None]:
        """Read calls after their opening tag: see `CallShape.read`."""
        if tag in self.sections:
            yield from text.skip()
            tag = yield from text.one_of(*self.starts)
        while tag and (yield from self._call(text, calls)):
            tag = "next"
            while tag:
                yield from text.skip()
                tag = yield from text.one_of(*self.closes)
            tag = yield from text.one_of(*self.starts, *self.more)
            if tag:
                text.mark(tag)
            else:
                yield from text.one_of(*self.section_ends)

    def _call(self, text: UnreadText, calls: Calls) -> Steps[bool]:
        """Read one call. Return False if the text is not a call.

        If a tag of `after_call` or the end of the answer follows the header, the call has no arguments.
        """
        tags = Tags(self.body.begins + self.after_call)
        header, begin = yield from text.upto(tags, MAX_HEADER, stays=self.after_call)
        found = self.header.fullmatch(header)
        is_whole = bool(begin) or (text.ended and not text.is_cut and not text.rest)
        name = found["name"].strip() if found and is_whole else ""
        if not found or name not in calls.tools:
            return False
        text.unmark()
        yield calls.start(name, (found.groupdict().get("id") or "").strip())
        if begin in self.body.begins:
            yield from self.body.read(text, begin, calls, calls.tools[name], self.after_call)
        else:
            yield calls.arguments("{}")
        return True

    @property
    def after_call(self) -> tuple[str, ...]:
        """The tags that may follow a call's arguments: its closing tag, the start of the next call, the end of all calls."""
        after_call = (*self.closes[-1:], *self.more, self.starts[0], *self.section_ends)
        return tuple(tag for tag in after_call if tag not in self.body.begins)


# ---- Answers with tags around reasoning and calls, and the reader that runs the steps of any answer. --------------------


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags around reasoning. anywhere: whether reasoning may also come after content."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    anywhere: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return self.starts + self.ends

    def last(self, text: str) -> tuple[int, int]:
        """Return the positions of the last start tag and the last end tag in a text. -1 for a missing tag."""
        return max(map(text.rfind, self.starts)), max(map(text.rfind, self.ends))


@dataclass(slots=True)
class TrimmedText:
    """Makes fragments of one kind from text, and trims the white space next to calls and reasoning.

    begins: whether to drop white space at the start of the next text.
    source: the answer's text, to which `note` adds the positions of content; None if the positions are not needed.
    """

    kind: type[ContentText] | type[ReasoningText]
    begins: bool = False
    source: UnreadText | None = None
    _pending: list[str] = field(default_factory=list)
    _spaces: list[tuple[int, int]] = field(default_factory=list)  # positions of the white space at the end

    def note(self, text: str, num_after: int = 0) -> None:
        """Store the position of `text`, which was read just now. num_after: how many characters were read after `text`."""
        if self.source is None:
            return
        shown = text.lstrip(SPACE) if self.begins else text
        said, end = shown.rstrip(SPACE), self.source.num_read - num_after
        start = end - len(shown)
        if said:
            self.source.content += [*self._spaces, (start, start + len(said))]
            self._spaces = []
        if len(said) < len(shown):
            self._spaces.append((start + len(said), end))
        self._wait()

    def _wait(self) -> None:
        if self.source is not None:
            self.source.waits_at = self._spaces[0][0] if self._spaces else None

    def say(self, text: str) -> Iterator[Fragment]:
        """Yield a piece of text. White space at its end is held back until more text follows."""
        said = text.rstrip(SPACE)
        if said:
            text = "".join(self._pending) + text
            said = text[: len(text.rstrip(SPACE))]
            yield self.kind(said.lstrip(SPACE) if self.begins else said)
            self._pending, self.begins = [text[len(said) :]], False
        elif not self.begins:
            self._pending.append(text)

    def end(self) -> Iterator[Fragment]:
        """Yield the white space that `say` held back."""
        if self.source is not None:
            self.source.content += self._spaces
        if space := "".join(self._pending):
            yield self.kind(space)
        self.drop_space()

    def drop_space(self) -> None:
        """Drop the white space that `say` held back."""
        self._pending, self._spaces = [], []
        self._wait()

    def part(self) -> None:
        """Drop the white space at the end of the text so far, and at the start of the text that follows."""
        self.drop_space()
        self.begins = True


class SteppedReader:
    """Runs a reader in steps: each `push` runs the reader until it needs more text."""

    def __init__(self, text: UnreadText, steps: Steps[None]) -> None:
        self._text, self._steps = text, steps
        self._num_opened = 0

    def open(self, text: str) -> None:
        """Read the end of the prompt, in which the first message may have begun. Call this before the first `push`."""
        self._num_opened = len(text)
        self.push(text)

    def settled(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the number of settled characters, and the positions of new content.

        A character is settled once it is known whether it is content. Content is new if it was found since the last call.
        Only the answer's characters count, not those of the prompt.
        """
        found, self._text.content = self._text.content, []
        opened = self._num_opened
        return self._text.num_settled - opened, [
            (max(start - opened, 0), end - opened) for start, end in found if end > opened
        ]

    def push(self, text: str) -> list[Fragment]:
        """Add text. Return the new fragments, which later text cannot change."""
        self._text.add(text)
        fragments: list[Fragment] = []
        for fragment in self._steps:
            if fragment is None:
                break
            fragments.append(fragment)
        return fragments

    def finish(self, is_cut: bool = False) -> list[Fragment]:
        """Return the remaining fragments."""
        self._text.ended, self._text.is_cut = True, is_cut
        return self.push("")


class ReadParts:
    """Divides the text of an answer into parts that are content and parts that are not."""

    def __init__(self, reader: SteppedReader) -> None:
        self._reader, self._unsettled = reader, list[str]()
        self.num_unsettled = self._at = 0  # the characters that are not settled yet, and the settled ones before them

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text. Return the parts that are certain now, each with a flag that says whether the part is content."""
        self._unsettled.append(text)
        self.num_unsettled += len(text)
        self._reader.push(text)
        number, content = self._reader.settled()
        return self._take(number, content)

    def finish(self, is_cut: bool) -> list[tuple[str, bool]]:
        self._reader.finish(is_cut)
        return self._take(self._at + self.num_unsettled, self._reader.settled()[1])

    def _take(self, number: int, content: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
        if number <= self._at:
            return []
        text, first = "".join(self._unsettled), self._at
        parts: list[tuple[str, bool]] = []
        for start, end in (*content, (number, number)):
            parts += [(text[self._at - first : start - first], False), (text[start - first : end - first], True)]
            self._at = max(end, self._at)
        self._unsettled, self.num_unsettled = [text[number - first :]], len(text) - (number - first)
        return [part for part in parts if part[0]]


class TaggedAnswer:
    """Reads an answer of content, reasoning and calls.

    thinking: the tags around reasoning; None if reasoning stays in the content.
    calls_end: whether a call may begin inside reasoning and thereby end the reasoning.
    opened: the reasoning at the end of the prompt, with its opening tag; empty if the prompt ends outside reasoning.
    dropped: tags that never become content, such as control tokens.
    """

    def __init__(
        self,
        text: UnreadText,
        shapes: Sequence[CallShape],
        calls: Calls,
        *,
        thinking: ThinkTags | None,
        calls_end: bool,
        opened: str,
        dropped: Collection[str],
    ) -> None:
        self._shapes, self._calls, self._thinking, self._opened = shapes, calls, thinking, opened
        self._dropped = tuple(dropped)
        self._by_tag = {tag: shape for shape in reversed(shapes) for tag in shape.opens}
        starts = thinking.starts if thinking and thinking.anywhere else ()
        self._in_content = Tags((*self._by_tag, *self._dropped, *starts))
        opens = self._by_tag if calls_end else ()
        self._in_reasoning = Tags((*opens, *self._dropped, *(thinking.ends if thinking else ())))
        self._text, self._content = text, TrimmedText(ContentText, source=text)

    def read(self) -> Steps[None]:
        """Read the whole answer."""
        yield from self._first_reasoning()
        yield from self._bare_calls()
        while True:
            text, tag = self._text.before(self._in_content)
            yield from self._say(text, len(tag))
            if tag in self._by_tag:
                self._text.mark(tag)
                yield from self._call(self._by_tag[tag], tag, self._content)
            elif self._thinking and tag in self._thinking.starts:
                yield from self._reasoning()
            elif not tag:
                if self._text.ended:
                    yield from self._content.end()
                    return
                yield None

    def _say(self, text: str, num_after: int = 0) -> Iterator[Fragment]:
        """Yield `text`, which was read just now, as content. num_after: how many characters were read after `text`."""
        self._content.note(text, num_after)
        yield from self._content.say(text)

    def _first_reasoning(self) -> Steps[None]:
        """Read the reasoning at the start of an answer, if the answer starts with reasoning.

        If `thinking` is None, `opened` becomes content.
        """
        if self._thinking is None:
            yield from self._content.say(self._opened)
            return
        if self._opened:
            yield from self._reasoning()
            return
        self._text.mark("")
        yield from self._text.skip()
        tag = yield from self._text.one_of(*self._thinking.starts)
        space = self._text.unmark()
        if tag:
            yield from self._reasoning()
        else:
            yield from self._say(space)

    def _reasoning(self) -> Steps[None]:
        """Read reasoning to its end, or to the call that ends it."""
        assert self._thinking is not None
        self._content.part()
        reasoning = TrimmedText(ReasoningText, begins=True)
        number = self._calls.number
        while self._calls.number == number:
            text, tag = self._text.before(self._in_reasoning)
            yield from reasoning.say(text)
            if tag in self._by_tag:
                self._text.mark(tag)
                yield from self._call(self._by_tag[tag], tag, reasoning)
            elif tag in self._thinking.ends:
                return
            elif not tag:
                if self._text.ended:
                    return
                yield None

    def _bare_calls(self) -> Steps[None]:
        """Read calls without an opening tag.

        Calls without an opening tag can only be at the start of an answer, or after the reasoning at its start.
        """
        shape = next((shape for shape in self._shapes if shape.bare), None)
        if shape is None:
            return
        self._text.mark("")
        yield from self._text.skip()
        yield from self._call(shape, "", self._content)

    def _call(self, shape: CallShape, tag: str, trimmed: TrimmedText) -> Steps[None]:
        """Read calls. Text that turns out not to be a call is yielded without the `dropped` tags."""
        number = self._calls.number
        yield from shape.read(self._text, tag, self._calls)
        if self._calls.number > number:
            self._content.part()
            trimmed = self._content
        read = self._text.unmark()
        if tag and self._calls.number == number and self._text.is_cut and not self._text.rest:
            return  # the answer was cut before the call's name was known
        trimmed.note(read)
        for dropped in self._dropped:
            read = read.replace(dropped, "")
        yield from trimmed.say(read)


# ---- Answers of several messages. The header of each message names its recipient. ---------------------------------------

_BODY = JsonBody()


@dataclass(frozen=True, slots=True)
class Channels:
    """The format of an answer that is a sequence of messages with headers. The prompt ends inside the first header.

    starts: the tags that begin a header.
    message: the tag that ends a header.
    ends: the tags that end a message.
    to: the pattern that finds the tool's name in a header, as the group `name`.
    reasoning, plain: the patterns of the headers of reasoning and of content. A header that fits neither pattern is itself
    shown as content.
    written_reasoning: the texts that models write before reasoning, and between reasoning and the next header; None if the
    models write no reasoning.
    """

    starts: tuple[str, ...]
    message: str
    ends: tuple[str, ...]
    to: re.Pattern[str]
    reasoning: re.Pattern[str]
    plain: re.Pattern[str]
    written_reasoning: tuple[str, str] | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.starts, self.message, *self.ends)


class ChannelAnswer:
    """Reads an answer that is a sequence of messages. A message's header says if it is reasoning, content or a call.

    thinks: whether to separate reasoning from content.
    """

    def __init__(self, text: UnreadText, channels: Channels, calls: Calls, *, thinks: bool) -> None:
        self._text, self._channels, self._calls, self._thinks = text, channels, calls, thinks
        self._body_tags = Tags(channels.starts + channels.ends)
        self._content = TrimmedText(ContentText, source=text)

    def read(self) -> Steps[None]:
        """Read the whole answer. The answer's text begins inside a header."""
        start = ""
        while (yield from self._text.peek()):
            self._text.mark(start)
            header, message = yield from self._text.upto(Tags((self._channels.message,)), MAX_HEADER)
            self._text.unmark()
            start = yield from self._message(start + header, message)
            while start in self._channels.ends and (yield from self._text.skip()):
                start = yield from self._body(self._content)
        yield from self._content.end()

    def drop_space(self) -> None:
        """Drop the white space at the end of the content read so far."""
        self._content.drop_space()

    def _message(self, header: str, message: str) -> Steps[str]:
        """Read the message that follows a header. Return the tag after the message."""
        channels, found = self._channels, self._channels.to.search(header)
        if message and found and found["name"] in self._calls.tools:
            return (yield from self._call(found["name"]))
        if message and channels.reasoning.search(header) and self._thinks:
            reasoning = TrimmedText(ReasoningText, begins=True)
            end = yield from self._body(reasoning)
            self._content.part()
            return end
        shown = not message or bool(channels.reasoning.search(header)) or not channels.plain.fullmatch(header)
        if shown:
            self._content.note(header + message)
            yield from self._content.say(header + message)
        return (yield from self._body(self._content))

    def _call(self, name: str) -> Steps[str]:
        self._content.part()
        yield self._calls.start(name)
        if (yield from self._text.skip()) == "{":
            yield from _BODY.read(self._text, self._text.take(1), self._calls, {})
        elif not self._text.is_cut:
            yield self._calls.arguments("{}")
        return (yield from self._body(TrimmedText(ContentText), is_said=False))

    def _body(self, trimmed: TrimmedText, is_said: bool = True) -> Steps[str]:
        """Read the text before the next tag, then read the tag. Return the tag, or an empty text at the end of the answer.

        is_said: whether to yield the text; otherwise the text is dropped.
        """
        while True:
            text, tag = self._text.before(self._body_tags)
            trimmed.note(text, len(tag))
            if is_said:
                yield from trimmed.say(text)
            if tag or self._text.ended:
                return tag
            yield None


# ---- Calls that are JSON objects with a name and arguments. -------------------------------------------------------------

FENCES = ("```json", "```")
NO_ARGUMENTS = ("", "null", "[]")  # the values that models write for a call without arguments


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls that are JSON objects with a name and arguments: one object, several, or a list.

    opens, closes: the tags around all calls.
    names, arguments, ids: the keys of the tool's name, of the arguments and of the call's id.
    named: whether the tool's name may itself be the key of the arguments, as in `{"search": {...}}`.
    late_id: whether a call's id may come after its arguments. If the id may come that late, a call is yielded only at its
    end.
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
        """The keys that an object may have until it is certain to be a call. Any other key means that it is not a call."""
        return (*self.names, *self.arguments, *self.ids, "type")

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def read(self, text: UnreadText, tag: str, calls: Calls) -> Steps[None]:
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
    """Reads one call. The call's arguments are held back until the tool's name is known."""

    def __init__(self, shape: JsonCalls, text: UnreadText, calls: Calls) -> None:
        self._shape, self._text, self._calls = shape, text, calls
        self._name = self._id = ""
        self._arguments: list[str] = []
        self._is_started = False

    def read(self) -> Steps[bool]:
        """Read the members of the object. Return whether it is a complete call."""
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
        """Read the key of a member, up to the member's value. Return an empty text if there is no key."""
        name = yield from self._string()
        yield from self._text.skip()
        if (yield from self._text.one_of(":")):
            yield from self._text.skip()
            return name
        return ""

    def _string(self) -> Steps[str]:
        """Read a JSON string of at most `MAX_NAME` characters, and return its text.

        Return an empty text if there is no such string.
        """
        read, tag = yield from self._text.upto(_QUOTE, 1)
        if read or not tag:
            return ""
        read, tag = yield from self._text.upto(_QUOTE, MAX_NAME)
        return _decoded(f'"{read}"') if tag else ""

    def _member(self, key: str) -> Steps[bool]:
        """Read the value of a member. Return whether the object may still be a call."""
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
            said = (_decoded(value) or value.removeprefix('""')).strip()
            self._arguments.append("{}" if said in NO_ARGUMENTS else said)
            return said in NO_ARGUMENTS or said.startswith("{")
        value = yield from json_value(self._text)
        if key in shape.ids and value:
            self._id = _decoded(value) or value[:MAX_NAME]
        return bool(value) and (self._is_started or key in shape.keys)

    def _object(self) -> Steps[bool]:
        """Read the arguments. Return whether the arguments are complete.

        If the tool's name is known and the call's id cannot come later, the arguments are yielded as they arrive. In all
        other cases, the arguments are held back.
        """
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
        """End the object. If the object is a call that was held back, yield the call now.

        Return whether the object is a call.
        """
        if self._name and not self._is_started:
            yield from self._start()
            yield self._calls.arguments("".join(self._arguments) or "{}")
        return self._is_started


_QUOTE = Tags(['"'])


def _decoded(text: str) -> str:
    """Return the text of a JSON string, or an empty text if `text` is not a JSON string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
