"""The adapters on the real types of retrieval libraries; skipped if these are not installed."""

import pytest


def test_langchain_documents_reuse_the_order_served_before():
    documents = pytest.importorskip("langchain_core.documents")
    from slotcache.ordering.langchain import CacheOrder

    a, b, c, d = (documents.Document(page_content=f"Text of {name}. " * 20, id=name) for name in "abcd")
    order = CacheOrder()
    assert [one.id for one in order.compress_documents([a, b, c], "?")] == ["a", "b", "c"]
    assert [one.id for one in order.compress_documents([c, d, a, b], "?")] == ["a", "b", "c", "d"]
    assert [one.id for one in order.compress_documents([d, a, a], "?")] == ["a", "d"]
    assert CacheOrder(tree=order.tree, keep_first=1).compress_documents([d, b, a], "?")[0].id == "d"
    changed = documents.Document(page_content="Another text.", id="a")
    assert [one.id for one in order.compress_documents([b, changed], "?")] == ["b", "a"]


def test_llamaindex_nodes_reuse_the_order_served_before():
    schema = pytest.importorskip("llama_index.core.schema")
    from slotcache.ordering.llamaindex import CacheOrder

    def scored(name):
        return schema.NodeWithScore(node=schema.TextNode(text=f"Text of {name}. " * 20, id_=name), score=0.5)

    def ids(nodes):
        return [one.node.node_id for one in nodes]

    a, b, c, d = map(scored, "abcd")
    order = CacheOrder()
    assert ids(order.postprocess_nodes([a, b, c], query_str="?")) == ["a", "b", "c"]
    assert ids(order.postprocess_nodes([c, d, a, b], query_str="?")) == ["a", "b", "c", "d"]
    assert ids(CacheOrder(tree=order.tree, keep_first=1).postprocess_nodes([d, b, a], query_str="?"))[0] == "d"
