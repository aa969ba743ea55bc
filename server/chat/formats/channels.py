"""Answers of several messages, each with a header that says for whom it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..answer import Content, Thought
from .bodies import JsonBody
from .calls import Calls
from .headed import MAX_HEADER
from .reader import Spoken
from .text import Steps, Tags, Text

_BODY = JsonBody()


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages one behind the other. The first one's header begins in the prompt.

    starts: what begins a header; message: what ends it. ends: what ends a message. to: finds the tool in a header, as the
    group `name`. thought, plain: fit the headers of thoughts, and of content; any other header is content itself.
    written_thought: the tags around a thought and up to the next header, if there are thoughts.
    """

    starts: tuple[str, ...]
    message: str
    ends: tuple[str, ...]
    to: re.Pattern[str]
    thought: re.Pattern[str]
    plain: re.Pattern[str]
    written_thought: tuple[str, str] | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.starts, self.message, *self.ends)


class ChannelAnswer:
    """Messages, each of the kind that its header says. thinks: thoughts are told from content."""

    def __init__(self, text: Text, channels: Channels, calls: Calls, *, thinks: bool) -> None:
        self._text, self._channels, self._calls, self._thinks = text, channels, calls, thinks
        self._body_tags = Tags(channels.starts + channels.ends)
        self._content = Spoken(Content)

    def read(self) -> Steps[None]:
        """Read the answer, which begins in a header."""
        start = ""
        while (yield from self._text.peek()):
            header, message = yield from self._text.upto(Tags((self._channels.message,)), MAX_HEADER)
            start = yield from self._message(start + header, message)
            while start in self._channels.ends and (yield from self._text.skip()):
                start = yield from self._body(self._content)
        yield from self._content.end()

    def drop_space(self) -> None:
        """Drop the white space at the end of the content so far."""
        self._content.drop_space()

    def _message(self, header: str, message: str) -> Steps[str]:
        """Read the message of a header; return the tag behind it."""
        channels, found = self._channels, self._channels.to.search(header)
        if message and found and found["name"] in self._calls.tools:
            return (yield from self._call(found["name"]))
        if message and channels.thought.search(header) and self._thinks:
            thought = Spoken(Thought, begins=True)
            end = yield from self._body(thought)
            self._content.part()
            return end
        shown = not message or bool(channels.thought.search(header)) or not channels.plain.fullmatch(header)
        yield from self._content.say(header + message if shown else "")
        return (yield from self._body(self._content))

    def _call(self, name: str) -> Steps[str]:
        self._content.part()
        yield self._calls.start(name)
        if (yield from self._text.skip()) == "{":
            yield from _BODY.read(self._text, self._text.take(1), self._calls, {})
        else:
            yield self._calls.arguments("{}")
        return (yield from self._body(Spoken(Content), is_said=False))

    def _body(self, spoken: Spoken, is_said: bool = True) -> Steps[str]:
        """Read text up to the next tag, and the tag; empty at the end of the text."""
        while True:
            text, tag = self._text.before(self._body_tags)
            if is_said:
                yield from spoken.say(text)
            if tag or self._text.ended:
                return tag
            yield None
