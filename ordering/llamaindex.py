"""For LlamaIndex: a postprocessor that orders retrieved nodes for the most reuse of cached tokens."""
# pyright: standard

from __future__ import annotations

import hashlib

from llama_index.core.bridge.pydantic import ConfigDict, Field  # pyright: ignore[reportMissingImports]
from llama_index.core.postprocessor.types import BaseNodePostprocessor  # pyright: ignore[reportMissingImports]
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle  # pyright: ignore[reportMissingImports]

from .policy import arrange
from .tree import KnowledgeTree

CHARACTERS = 4  # of a token, roughly


class CacheOrder(BaseNodePostprocessor):  # pyright: ignore[reportUntypedBaseClass]
    """A postprocessor for the end of a query engine's `node_postprocessors`.

    Put the nodes into the prompt in the returned order, since the tree assumes this.

    keep_first, keep_last: how many nodes at each end stay in place.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    tree: KnowledgeTree = Field(default_factory=KnowledgeTree)
    keep_first: int = 0
    keep_last: int = 0

    @classmethod
    def class_name(cls) -> str:
        return "CacheOrder"

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        """Return the nodes in their new order, without duplicates."""
        found = {_key(node): node for node in nodes}
        keys = list(found)
        arranged = arrange(keys, self.tree, keep_first=self.keep_first, keep_last=self.keep_last)
        order = [keys[rank] for rank in arranged.order]
        self.tree.insert((key, len(_text(found[key])) // CHARACTERS) for key in order)
        return [found[key] for key in order]


def _text(node: NodeWithScore) -> str:
    return node.node.get_content(metadata_mode=MetadataMode.LLM)


def _key(node: NodeWithScore) -> str:
    """Return a hash of id and text. If a node's text changes, so does its hash, and a cache sees a new node."""
    return hashlib.blake2b(f"{node.node.node_id}\n{_text(node)}".encode(), digest_size=16).hexdigest()
