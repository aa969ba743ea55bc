"""How a family of models writes its answers, and the reader of one answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ..answer import Plain, Reader
from .calls import Calls, Shape, Types, plain_id
from .channels import ChannelAnswer, Channels
from .reader import SteppedReader, TaggedAnswer, Thinking
from .text import Text
from .written import CALL, Written


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table of families.

    signs: texts that all stand in the templates of the family. shapes: how its calls are read; written: how a grammar has
    them written. around: the tags around content; noise: others of that kind. calls_end_thoughts: a call may begin in a
    thought, which it ends.
    """

    name: str
    signs: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    thinking: Thinking | None = None
    channels: Channels | None = None
    noise: tuple[str, ...] = ()
    written: Written = CALL
    around: tuple[str, str] = ("", "")
    calls_end_thoughts: bool = False
    new_id: Callable[[str], str] = plain_id

    def fits(self, source: str) -> bool:
        return all(sign in source for sign in self.signs)

    @property
    def tags(self) -> frozenset[str]:
        """All tags that readers look for."""
        thinking, channels = self.thinking.tags if self.thinking else (), self.channels.tags if self.channels else ()
        return frozenset((*thinking, *channels, *self.noise, *(tag for shape in self.shapes for tag in shape.tags)))

    def spelled(self, controls: Iterable[str]) -> frozenset[str]:
        """Return the control tokens, of those spelt so, that readers need to see: those that a tag is made of."""
        tags = self.tags
        return frozenset(control for control in controls if control and any(control in tag for tag in tags))

    def reader(
        self,
        tools: Mapping[str, Types],
        *,
        seed: str,
        thinks: bool = True,
        opened: str = "",
        controls: Collection[str] = (),
    ) -> Reader:
        """Return the reader of one answer.

        tools: those that may be called. seed: of the calls' ids. thinks: thoughts are told from content. opened: the end of
        the prompt, from where the answer's own tags begin. controls: the control tokens that are `spelled` in its text:
        they never become content.
        """
        text, calls, shapes = Text(), Calls(tools, self.new_id, seed), self.shapes if tools else ()
        if self.channels:
            messages = ChannelAnswer(text, self.channels, calls, thinks=thinks)
            reader = SteppedReader(text, messages.read())
            reader.push(opened[max(opened.rfind(self.channels.starts[0]), 0) :])
            messages.drop_space()
            return reader
        if not (shapes or self.thinking or self.noise or controls):
            return Plain()
        shown = self.thinking.tags if self.thinking and not thinks else ()
        answer = TaggedAnswer(
            text,
            shapes,
            calls,
            thinking=self.thinking if thinks else None,
            calls_end=self.calls_end_thoughts,
            opened=self._opened(opened),
            dropped={*self.noise, *controls}.difference(shown),
        )
        return SteppedReader(text, answer.read())

    def _opened(self, prompt: str) -> str:
        """Return the open thought with which a prompt ends, with its tag; empty if none is open."""
        if self.thinking is None:
            return ""
        start, end = self.thinking.last(prompt)
        return prompt[start:] if start > end else ""

    @property
    def thinks_anywhere(self) -> bool:
        """Whether thoughts may come behind content, too."""
        return self.channels is not None or (self.thinking is not None and self.thinking.anywhere)

    @property
    def breaks(self) -> tuple[str, ...]:
        """The tags of calls that end a thought."""
        return tuple(tag for shape in self.shapes for tag in shape.opens) if self.calls_end_thoughts else ()

    def thought(self, prompt: str) -> tuple[str, str, bool] | None:
        """Return the tags of the thought that an answer may begin with, and whether the prompt's end opens it already.

        None if it has none, or if the prompt closes it.
        """
        if self.channels:
            return self.channels.written_thought and (*self.channels.written_thought, False)
        if self.thinking is None:
            return None
        start, end = self.thinking.last(prompt)
        return None if end > start else (self.thinking.starts[0], self.thinking.ends[0], start >= 0)
