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

Found = Sequence[Hit] | None
"""What was found for a chat; None for a chat that asks for no search."""


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """found: the ids of the documents that were found, in rank. retrieved: the same for the client. sources: all of the
    prompt. reader: makes readers of an answer.
    """

    found: Sequence[str]
    retrieved: list[Fields]
    sources: Sources
    reader: Callable[[], Reader]

    @classmethod
    def of(cls, hits: Sequence[Hit], chat: Chat) -> Self:
        """Make the account of a chat, in a thread: it takes time as the documents are long."""
        sets = [part for part in chat.prompt.parts if isinstance(part, DocumentSet)]
        sources = Sources(document for one in sets for document in one.documents)
        return cls([hit.chunk.id for hit in hits], results(hits, with_text=False), sources, chat.shown_reader)

    def fields(self, text: str) -> Fields:
        """Return the fields of the report. text: of the model; the citations' places are those in its content."""
        reader = self.reader()
        fragments = [*reader.push(text), *reader.finish()]
        content = "".join(fragment.text for fragment in fragments if isinstance(fragment, Content))
        return {"retrieved": self.retrieved, "citations": [one.shown() for one in self.sources.cited(content)]}
