"""The prompt text of documents: the one place where it is worded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from .document import Document


def document_text(document: Document) -> str:
    """The text of one document in a prompt, the same wherever it stands.

    The id comes first, so that different documents part at their first tokens.
    """
    title = f" {document.title}" if document.title else ""
    return f"[{document.id}]{title}\n{document.text}\n\n"


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
    return f"Most relevant: {' > '.join(ranks[:named])}\n\n" if named else ""


def location_hint(ids: Iterable[str]) -> str:
    """A line for each document that the conversation already holds and that is not shown again, empty where there is none.

    It belongs behind the new documents, in front of the order hint. It holds ids, never document text.
    """
    lines = "".join(f"See [{name}] above.\n" for name in ids)
    return f"{lines}\n" if lines else ""
