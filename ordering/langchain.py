"""For LangChain: a document compressor that puts retrieved documents in the order that reuses the most of what is cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from langchain_core.documents import BaseDocumentCompressor, Document  # pyright: ignore[reportMissingImports]
from pydantic import ConfigDict, Field  # pyright: ignore[reportMissingImports]

from .arrangement import arrange
from .tree import KnowledgeTree

CHARACTERS = 4  # a token, more or less


class CacheOrder(BaseDocumentCompressor):  # pyright: ignore[reportUntypedBaseClass]
    """Behind a retriever, in a `ContextualCompressionRetriever`. keep_first, keep_last: documents that stay in their rank.

    The documents are remembered as served in the order it returns, so a prompt should hold them in that order.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    tree: KnowledgeTree = Field(default_factory=KnowledgeTree)
    keep_first: int = 0
    keep_last: int = 0

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: object = None) -> Sequence[Document]:
        """The same documents in another order; one that comes twice comes once."""
        found = {_key(document): document for document in documents}
        keys = list(found)
        order = [keys[at] for at in arrange(keys, self.tree, "auto", self.keep_first, self.keep_last).order]
        self.tree.insert((key, len(found[key].page_content) // CHARACTERS) for key in order)
        return [found[key] for key in order]


def _key(document: Document) -> str:
    """Its text and its name: another version of a document is another one to a cache."""
    return hashlib.blake2b(f"{document.id}\n{document.page_content}".encode(), digest_size=16).hexdigest()
