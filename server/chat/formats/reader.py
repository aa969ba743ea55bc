"""Answers whose parts stand between tags, and the reader that takes the steps of any answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ..answer import Content, Fragment, Thought
from .calls import Calls, Shape
from .text import SPACE, Steps, Tags, Text


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags around a thought. anywhere: thoughts may come behind content, too."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    anywhere: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return self.starts + self.ends

    def last(self, text: str) -> tuple[int, int]:
        """Return the places of the last tag that begins a thought, and of the last that ends one; -1 for none."""
        return max(map(text.rfind, self.starts)), max(map(text.rfind, self.ends))


@dataclass(slots=True)
class Spoken:
    """Text as fragments of one kind, without the white space around calls and thoughts.

    begins: whether white space at the beginning is left out.
    """

    kind: type[Content] | type[Thought]
    begins: bool = False
    _held: list[str] = field(default_factory=list)

    def say(self, text: str) -> Iterator[Fragment]:
        """Yield text; white space at its end waits for the text behind it."""
        said = text.rstrip(SPACE)
        if said:
            text = "".join(self._held) + text
            said = text[: len(text.rstrip(SPACE))]
            yield self.kind(said.lstrip(SPACE) if self.begins else said)
            self._held, self.begins = [text[len(said) :]], False
        elif not self.begins:
            self._held.append(text)

    def end(self) -> Iterator[Fragment]:
        """Yield the white space at the end."""
        if space := "".join(self._held):
            yield self.kind(space)
        self._held = []

    def drop_space(self) -> None:
        """Drop the white space at the end."""
        self._held = []

    def part(self) -> None:
        """Drop the white space at the end, and that of the text to come."""
        self._held, self.begins = [], True


class SteppedReader:
    """Takes the steps of reading an answer, as far as its text has come."""

    def __init__(self, text: Text, steps: Steps[None]) -> None:
        self._text, self._steps = text, steps

    def push(self, text: str) -> list[Fragment]:
        """Add text and return the fragments that are settled by it."""
        self._text.add(text)
        fragments: list[Fragment] = []
        for fragment in self._steps:
            if fragment is None:
                break
            fragments.append(fragment)
        return fragments

    def finish(self) -> list[Fragment]:
        """Return what was held back."""
        self._text.ended = True
        return self.push("")


class TaggedAnswer:
    """Reads content, a thought and calls.

    thinking: None leaves thoughts in the content. calls_end: a call ends the thought in which it begins. opened: what the
    prompt already holds of a thought, with its tag. dropped: tags that never are content, such as control tokens.
    """

    def __init__(
        self,
        text: Text,
        shapes: Sequence[Shape],
        calls: Calls,
        *,
        thinking: Thinking | None,
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
        self._in_thought = Tags((*opens, *self._dropped, *(thinking.ends if thinking else ())))
        self._text, self._content = text, Spoken(Content)

    def read(self) -> Steps[None]:
        """Read the answer."""
        yield from self._first_thought()
        yield from self._bare_calls()
        while True:
            text, tag = self._text.before(self._in_content)
            yield from self._content.say(text)
            if tag in self._by_tag:
                self._text.mark(tag)
                yield from self._call(self._by_tag[tag], tag, self._content)
            elif self._thinking and tag in self._thinking.starts:
                yield from self._thought()
            elif not tag:
                if self._text.ended:
                    yield from self._content.end()
                    return
                yield None

    def _first_thought(self) -> Steps[None]:
        """Read the thought that an answer begins with, if it does."""
        if self._thinking is None:
            yield from self._content.say(self._opened)
            return
        if self._opened:
            yield from self._thought()
            return
        self._text.mark("")
        yield from self._text.skip()
        tag = yield from self._text.one_of(*self._thinking.starts)
        space = self._text.unmark()
        if tag:
            yield from self._thought()
        else:
            yield from self._content.say(space)

    def _thought(self) -> Steps[None]:
        """Read a thought to its end, or to the call that ends it."""
        assert self._thinking is not None
        self._content.part()
        thought = Spoken(Thought, begins=True)
        number = self._calls.number
        while self._calls.number == number:
            text, tag = self._text.before(self._in_thought)
            yield from thought.say(text)
            if tag in self._by_tag:
                self._text.mark(tag)
                yield from self._call(self._by_tag[tag], tag, thought)
            elif tag in self._thinking.ends:
                return
            elif not tag:
                if self._text.ended:
                    return
                yield None

    def _bare_calls(self) -> Steps[None]:
        """Read calls without a tag, which an answer can only begin with."""
        shape = next((shape for shape in self._shapes if shape.bare), None)
        if shape is None:
            return
        self._text.mark("")
        yield from self._text.skip()
        yield from self._call(shape, "", self._content)

    def _call(self, shape: Shape, tag: str, spoken: Spoken) -> Steps[None]:
        """Read calls. The text of what is none is said as it stands."""
        number = self._calls.number
        yield from shape.read(self._text, tag, self._calls)
        if self._calls.number > number:
            self._content.part()
            spoken = self._content
        read = self._text.unmark()
        for dropped in self._dropped:
            read = read.replace(dropped, "")
        yield from spoken.say(read)
