"""Calls with a header that names the tool, in front of their arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .bodies import Body
from .calls import Calls
from .text import Steps, Tags, Text

MAX_HEADER = 512  # characters between the tag that opens a call and its arguments


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """A tag, a header with the tool's name, the arguments, a closing tag.

    sections, section_ends: tags around all calls. starts, closes: tags around each call; more: what may stand in place of
    the start of a call that follows another. header: the groups `name` and, if the call has one, `id`; inner: tags in it.
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

    def read(self, text: Text, tag: str, calls: Calls) -> Steps[None]:
        """Read calls behind their opening tag. What is no call is left unread, or kept behind the text's mark."""
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

    def _call(self, text: Text, calls: Calls) -> Steps[bool]:
        """Read one call; whether it was one."""
        header, begin = yield from text.upto(Tags(self.body.begins), MAX_HEADER)
        found = self.header.fullmatch(header)
        name = found["name"].strip() if begin and found else ""
        if not found or name not in calls.tools:
            return False
        text.unmark()
        yield calls.start(name, (found.groupdict().get("id") or "").strip())
        yield from self.body.read(text, begin, calls, calls.tools[name])
        return True
