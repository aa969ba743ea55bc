"""For LlamaIndex: a postprocessor that puts retrieved nodes in the order that reuses the most of what is cached."""

from __future__ import annotations

import hashlib

from llama_index.core.bridge.pydantic import ConfigDict, Field  # pyright: ignore[reportMissingImports]
from llama_index.core.postprocessor.types import BaseNodePostprocessor  # pyright: ignore[reportMissingImports]
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle  # pyright: ignore[reportMissingImports]

from .arrangement import arrange
from .tree import KnowledgeTree

CHARACTERS = 4  # a token, more or less


class CacheOrder(BaseNodePostprocessor):  # pyright: ignore[reportUntypedBaseClass]
    """One of a query engine's `node_postprocessors`, the last. keep_first, keep_last: nodes that stay in their rank.

    The nodes are remembered as served in the order it returns, so a prompt should hold them in that order.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    tree: KnowledgeTree = Field(default_factory=KnowledgeTree)
    keep_first: int = 0
    keep_last: int = 0

    @classmethod
    def class_name(cls) -> str:
        return "CacheOrder"

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        """The same nodes in another order; one that comes twice comes once."""
        found = {_key(node): node for node in nodes}
        keys = list(found)
        order = [keys[at] for at in arrange(keys, self.tree, "auto", self.keep_first, self.keep_last).order]
        self.tree.insert((key, len(_text(found[key])) // CHARACTERS) for key in order)
        return [found[key] for key in order]


def _text(node: NodeWithScore) -> str:
    return node.node.get_content(metadata_mode=MetadataMode.LLM)


def _key(node: NodeWithScore) -> str:
    """Its text and its name: another version of a node is another one to a cache."""
    return hashlib.blake2b(f"{node.node.node_id}\n{_text(node)}".encode(), digest_size=16).hexdigest()
