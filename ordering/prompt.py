"""The prompt text of documents: the one place where it is worded."""

from __future__ import annotations

from collections.abc import Sequence

from .document import Document


def document_text(document: Document) -> str:
    """The text of one document in a prompt, the same wherever it stands.

    The id comes first, so that different documents part at their first tokens.
    """
    title = f" {document.title}" if document.title else ""
    return f"[{document.id}]{title}\n{document.text}\n\n"


def order_hint(order: Sequence[Document], rank: Sequence[Document]) -> str:
    """One line that tells the model the retrieval ranking, empty where the documents stand in it (RAGBoost, 5.3).

    It belongs behind the documents, in front of the question: there it breaks no shared prefix. It holds ids, never
    document text.
    """
    if [document.id for document in order] == [document.id for document in rank]:
        return ""
    return f"By relevance: {' > '.join(document.id for document in rank)}\n\n"
