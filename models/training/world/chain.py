"""Questions over two documents: one names a thing, the other tells about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .page import Page
from .wording import Attribute
from .world import Sentence, Thing


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A sentence of one document, and the thing of another document that it names as the value of an attribute."""

    thing: Thing
    attribute: Attribute
    sentence: Sentence
    named: Thing

    @property
    def name(self) -> str:
        """The second thing without its name: `the mayor of Velmora`."""
        return f"the {self.attribute.label} of {self.thing.name}"


def chains(pages: Sequence[Page]) -> list[Chain]:
    """Return the chains among these pages."""
    things = {page.thing.bare: page.thing for page in pages}
    return [
        Chain(page.thing, attribute, sentence, things[value])
        for page in pages
        for sentence in page.sentences
        for attribute, value in sentence.facts
        if attribute.label and value in things and things[value] is not page.thing
    ]
