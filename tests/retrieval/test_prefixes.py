"""The texts in front of queries and documents, by what GGUF files say of their models."""

import pytest
from slotcache.retrieval import Prefixes, prefixes_of

QWEN = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
BGE = "Represent this sentence for searching relevant passages: "
KNOWN = {
    ("e5-small-v2", "bert"): Prefixes("query: ", "passage: "),
    ("Multilingual E5 Large", "bert"): Prefixes("query: ", "passage: "),
    ("multilingual-e5-large-instruct", "bert"): Prefixes(f"{QWEN} "),
    ("nomic-embed-text-v1.5", "nomic-bert"): Prefixes("search_query: ", "search_document: "),
    ("", "nomic-bert-moe"): Prefixes("search_query: ", "search_document: "),
    ("snowflake-arctic-embed-m-long", "nomic-bert"): Prefixes(BGE),
    ("Snowflake Arctic Embed L v2.0", "bert"): Prefixes("query: "),
    ("bge_small_en_v1.5", "bert"): Prefixes(BGE),
    ("Qwen3 Embedding 0.6B", "qwen3"): Prefixes(QWEN),
    ("embeddinggemma-300m", "gemma-embedding"): Prefixes("task: search result | query: ", "title: none | text: "),
}
NONE = {
    ("bge-m3", "bert"),
    ("all-MiniLM-L6-v2", "bert"),
    ("Qwen3 0.6B", "qwen3"),
    ("gte-small", "bert"),
    ("phase5-x", "bert"),
    ("", ""),
}


@pytest.mark.parametrize(("about", "expected"), [*KNOWN.items(), *((about, Prefixes()) for about in sorted(NONE))])
def test_prefixes_of_a_model(about, expected):
    assert prefixes_of(*about) == expected
