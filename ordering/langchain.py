"""For LangChain: a document compressor that orders retrieved documents for the most reuse of cached tokens."""
# pyright: standard

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from langchain_core.documents import BaseDocumentCompressor, Document  # pyright: ignore[reportMissingImports]
from pydantic import ConfigDict, Field  # pyright: ignore[reportMissingImports]

from .policy import arrange
from .tree import KnowledgeTree

CHARACTERS = 4  # of a token, roughly


class CacheOrder(BaseDocumentCompressor):  # pyright: ignore[reportUntypedBaseClass]
    """A compressor for a `ContextualCompressionRetriever`.

    Put the documents into the prompt in the returned order, since the tree assumes this.

    keep_first, keep_last: how many documents at each end stay in place.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    tree: KnowledgeTree = Field(default_factory=KnowledgeTree)
    keep_first: int = 0
    keep_last: int = 0

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: object = None) -> Sequence[Document]:
        """Return the documents in their new order, without duplicates."""
        found = {_key(document): document for document in documents}
        keys = list(found)
        arranged = arrange(keys, self.tree, keep_first=self.keep_first, keep_last=self.keep_last)
        order = [keys[rank] for rank in arranged.order]
        self.tree.insert((key, len(found[key].page_content) // CHARACTERS) for key in order)
        return [found[key] for key in order]


def _key(document: Document) -> str:
    """Return a hash of id and text. If a document's text changes, so does its hash, and a cache sees a new document."""
    return hashlib.blake2b(f"{document.id}\n{document.page_content}".encode(), digest_size=16).hexdigest()
