"""The prompt text of documents: the one place where it is worded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf

from .document import Document

SYNTAX = re.compile(r"[\\\[\]>]")  # what labels and hints are made of, where an id has it
LABEL_LIKE = re.compile(r"(?<=\n\n) *\[")  # where a document's text reads as if the next one began


def document_text(document: Document) -> str:
    """The text of one document in a prompt, the same wherever it stands.

    The id comes first, so that different documents part at their first tokens. Documents that differ, and lists of
    documents that differ, never read the same: an id's brackets get a backslash, and a paragraph of the text that begins
    with a bracket gets one space more.
    """
    title = f" {document.title}" if document.title else ""
    return f"[{_name(document.id)}]{title}\n{LABEL_LIKE.sub(_indented, document.text)}\n\n"


def order_hint(order: Sequence[Document], rank: Sequence[Document]) -> str:
    """One line that tells the model the retrieval ranking, empty where the documents stand in it (RAGBoost, 5.3).

    It names the best ranked documents up to where the rest stand in their rank anyway: fewer tokens, and nothing lost.
    It belongs behind the documents, in front of the question: there it breaks no shared prefix. It holds ids, never
    document text.
    """
    place = {document.id: at for at, document in enumerate(order)}
    ranks = [document.id for document in rank]
    named = max(len(ranks) - 1, 0)
    while named and place.get(ranks[named - 1], inf) < place.get(ranks[named], -inf):
        named -= 1
    return f"Most relevant: {' > '.join(map(_name, ranks[:named]))}\n\n" if named else ""


def location_hint(ids: Iterable[str]) -> str:
    """A line for each document that the conversation already holds and that is not shown again, empty where there is none.

    It belongs behind the new documents, in front of the order hint. It holds ids, never document text.
    """
    lines = "".join(f"See [{_name(id)}] above.\n" for id in ids)
    return f"{lines}\n" if lines else ""


def _name(id: str) -> str:
    """An id as it stands in a label or a hint: where it ends is plain to see, and no two ids read the same."""
    return SYNTAX.sub(r"\\\g<0>", id)


def _indented(found: re.Match[str]) -> str:
    return f" {found[0]}"
