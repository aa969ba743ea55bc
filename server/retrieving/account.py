"""The account of a chat whose documents were found: what was found, and what the answer cites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from ...retrieval import Hit
from ..chat.answer import Content, Reader
from ..chat.history import Chat
from ..chat.parts import DocumentSet
from .citations import Sources
from .sources import Fields, results


@dataclass(frozen=True, slots=True)
class Findings:
    """The hits of a chat's search. index: a field that says how far the index was, if it was not up to date."""

    hits: Sequence[Hit]
    index: Fields


Found = Findings | None
"""What was found for a chat; None for a chat that asks for no search."""


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """found: the ids of the documents that were found, in rank. retrieved: the same for the client. sources: all of the
    prompt. reader: makes readers of an answer. index: as in `Findings`.
    """

    found: Sequence[str]
    retrieved: list[Fields]
    sources: Sources
    reader: Callable[[], Reader]
    index: Fields

    @classmethod
    def of(cls, found: Findings, chat: Chat) -> Self:
        """Make the account of a chat, in a thread: it takes time as the documents are long."""
        sets = [part for part in chat.prompt.parts if isinstance(part, DocumentSet)]
        sources = Sources(document for one in sets for document in one.documents)
        ids, retrieved = [hit.chunk.id for hit in found.hits], results(found.hits, with_text=False)
        return cls(ids, retrieved, sources, chat.shown_reader, index=found.index)

    def fields(self, text: str) -> Fields:
        """Return the fields of the report. text: of the model; the citations' places are those in its content."""
        reader = self.reader()
        fragments = [*reader.push(text), *reader.finish()]
        content = "".join(fragment.text for fragment in fragments if isinstance(fragment, Content))
        citations = [one.shown() for one in self.sources.cited(content)]
        return {"retrieved": self.retrieved, "citations": citations, **self.index}
