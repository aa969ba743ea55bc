"""The prompt text of documents and of hints about them. No other module writes these texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf

from .document import Document

ASK_FOR_IDS = "After each statement from a document, name the document by its id in brackets, as in [1a2b3c4d5e]."
"""The instruction in a chat whose documents a search found."""
SYNTAX = re.compile(r"[\\\[\]>]")  # characters with a meaning in labels and hints
LABEL_LIKE = re.compile(r"(?<=\n\n) *\[")  # text that reads like the label of a next document


def document_text(document: Document) -> str:
    """Return the prompt text of one document, which is the same at any place of the prompt.

    The id comes first, so that two documents differ from their first tokens on. Two different lists of documents never
    have the same text: brackets in an id get a backslash, and a paragraph that begins with a bracket gets one more space.
    A document with a `form` keeps it.
    """
    if document.form:
        return document.form
    title = f" {document.title}" if document.title else ""
    return f"[{_name(document.id)}]{title}\n{LABEL_LIKE.sub(_indented, document.text)}\n\n"


def order_hint(order: Sequence[Document], rank: Sequence[Document]) -> str:
    """Return a line that gives the model the retrieval rank; "" if `order` is the rank already (RAGBoost, 5.3).

    The line names only the first ids: it stops where the remaining documents already are in rank, which saves tokens and
    loses no information. It belongs after the documents and before the question, where it breaks no shared prefix. It has
    ids, never document text. A document that only the rank has is elsewhere in the prompt: it is named unless it is last.
    """
    return rank_hint([document.id for document in order], [document.id for document in rank])


def rank_hint(order: Sequence[str], ranks: Sequence[str]) -> str:
    """Return the line of `order_hint` for documents by their ids."""
    place = {id: at for at, id in enumerate(order)}
    named = max(len(ranks) - 1, 0)
    while named and place.get(ranks[named - 1], inf) < place.get(ranks[named], -inf):
        named -= 1
    return f"Most relevant: {' > '.join(map(_name, ranks[:named]))}\n\n" if named else ""


def location_hint(ids: Iterable[str]) -> str:
    """Return a line for each document that an earlier turn already shows and this turn leaves out; "" for no ids.

    The lines belong after the new documents and before the order hint. They have ids, never document text.
    """
    lines = "".join(f"See [{_name(id)}] above.\n" for id in ids)
    return f"{lines}\n" if lines else ""


def _name(id: str) -> str:
    """Return an id as labels and hints show it: its end is unambiguous, and no two ids look the same."""
    return SYNTAX.sub(r"\\\g<0>", id)


def _indented(found: re.Match[str]) -> str:
    return f" {found[0]}"
