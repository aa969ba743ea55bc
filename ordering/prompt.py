"""The prompt text of documents, and the lines of hints about them.

No other module writes prompt texts of documents, or such hints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf

from .document import Document

ASK_FOR_IDS = "After each statement from a document, name the document by its id in brackets, as in [1a2b3c4d5e]."
"""The instruction to the model in a chat whose documents a search has found."""
SYNTAX = re.compile(r"[\\\[\]>]")  # characters with a meaning in labels and hints
LABEL_LIKE = re.compile(r"(?<=\n\n) *\[")  # text that reads like the label of a next document


def document_text(document: Document) -> str:
    """Return the prompt text of one document, which is the same at any place in a prompt.

    The id comes first, so that two documents differ in their first tokens. A backslash is put before each bracket in an id,
    and a space before a paragraph that begins with a bracket, even if spaces precede the bracket. Thanks to these additions,
    two different lists of documents never have the same text. If the document has a `form`, this is its text.
    """
    if document.form:
        return document.form
    title = f" {document.title}" if document.title else ""
    return f"[{_name(document.id)}]{title}\n{LABEL_LIKE.sub(_indented, document.text)}\n\n"


def order_hint(order: Sequence[Document], rank: Sequence[Document]) -> str:
    """Return a line that tells the model the retrieval rank; "" if `order` is the rank already (RAGBoost, 5.3).

    The line begins with the document of best rank, and stops as soon as the remaining documents are already in rank.
    Stopping early saves tokens and loses no information. Put the line after the documents and before the question, where it
    breaks no shared prefix. The line contains ids, but no text of documents.

    order: the documents in the order of the prompt.
    rank: the documents in retrieval rank. A document that is not in `order` is elsewhere in the prompt. The line also names
        a document that is elsewhere, unless that document has the last rank.
    """
    return rank_hint([document.id for document in order], [document.id for document in rank])


def rank_hint(order: Sequence[str], ranks: Sequence[str]) -> str:
    """Return the line of `order_hint`. The arguments are the ids of the documents."""
    place = {id: at for at, id in enumerate(order)}
    named = max(len(ranks) - 1, 0)
    while named and place.get(ranks[named - 1], inf) < place.get(ranks[named], -inf):
        named -= 1
    return f"Most relevant: {' > '.join(map(_name, ranks[:named]))}\n\n" if named else ""


def location_hint(ids: Iterable[str]) -> str:
    """Return a line for each document that this turn leaves out because an earlier turn shows it; "" for no ids.

    Put these lines after the new documents and before the order hint. The lines contain ids, but no text of documents.
    """
    lines = "".join(f"See [{_name(id)}] above.\n" for id in ids)
    return f"{lines}\n" if lines else ""


def _name(id: str) -> str:
    """Escape the special characters of an id.

    Labels and hints with an escaped id show where the id ends, and different ids stay different.
    """
    return SYNTAX.sub(r"\\\g<0>", id)


def _indented(found: re.Match[str]) -> str:
    return f" {found[0]}"
