"""The prompt text of documents, and the lines of hints about them. No other module writes these texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf

from .document import Document

ASK_FOR_IDS = "After each statement from a document, name the document by its id in brackets, as in [1a2b3c4d5e]."
"""The instruction to the model in a chat for which a search has found documents."""
SYNTAX = re.compile(r"[\\\[\]>]")  # characters with a meaning in labels and hints
LABEL_LIKE = re.compile(r"(?<=\n\n) *\[")  # text that reads like the label of a next document


def document_text(document: Document) -> str:
    """Return the prompt text of one document, which is the same at any place of the prompt.

    The id comes first, so that two documents already differ in their first tokens. Two different lists of documents never
    have the same text: a backslash is put before brackets in an id, and one more space before a paragraph that begins with a
    bracket. If a document has a `form`, that is its text.
    """
    if document.form:
        return document.form
    title = f" {document.title}" if document.title else ""
    return f"[{_name(document.id)}]{title}\n{LABEL_LIKE.sub(_indented, document.text)}\n\n"


def order_hint(order: Sequence[Document], rank: Sequence[Document]) -> str:
    """Return a line that tells the model the retrieval rank; "" if `order` is the rank already (RAGBoost, 5.3).

    The line names only the best ids: it stops where the remaining documents are already in rank, which saves tokens and
    loses no information. Put the line after the documents and before the question, where it breaks no shared prefix. It has
    ids, never document text. A document of `rank` that is not in `order` is elsewhere in the prompt: the line names it,
    unless it has the last rank.
    """
    return rank_hint([document.id for document in order], [document.id for document in rank])


def rank_hint(order: Sequence[str], ranks: Sequence[str]) -> str:
    """Return the line of `order_hint`, from the ids of the documents."""
    place = {id: at for at, id in enumerate(order)}
    named = max(len(ranks) - 1, 0)
    while named and place.get(ranks[named - 1], inf) < place.get(ranks[named], -inf):
        named -= 1
    return f"Most relevant: {' > '.join(map(_name, ranks[:named]))}\n\n" if named else ""


def location_hint(ids: Iterable[str]) -> str:
    """Return a line for each document that an earlier turn already shows and this turn leaves out; "" for no ids.

    Put these lines after the new documents and before the order hint. They have ids, never document text.
    """
    lines = "".join(f"See [{_name(id)}] above.\n" for id in ids)
    return f"{lines}\n" if lines else ""


def _name(id: str) -> str:
    """Return an id as labels and hints show it: its end is unambiguous, and no two ids look the same."""
    return SYNTAX.sub(r"\\\g<0>", id)


def _indented(found: re.Match[str]) -> str:
    return f" {found[0]}"
