"""What embedding models were trained to see in front of a query and of a document."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The texts in front of a query and of a document; none by default."""

    query: str = ""
    document: str = ""


TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
RETRIEVE = "Represent this sentence for searching relevant passages: "
FAMILIES = {
    r"\be5-.*instruct\b": Prefixes(f"{TASK} "),
    r"\be5-": Prefixes("query: ", "passage: "),
    r"\bqwen3-embedding\b": Prefixes(TASK),
    r"\bbge-(small|base|large)-en\b": Prefixes(RETRIEVE),
    r"\bbge-(small|base|large)-zh\b": Prefixes("为这个句子生成表示以用于检索相关文章："),
    r"\bmxbai-embed-large\b": Prefixes(RETRIEVE),
    r"\barctic-embed-[lm]-v2": Prefixes("query: "),
    r"\barctic-embed\b": Prefixes(RETRIEVE),
    r"\bnomic-(embed-text|bert)\b": Prefixes("search_query: ", "search_document: "),
    r"\bgemma-embedding\b": Prefixes("task: search result | query: ", "title: none | text: "),
}
"""By a pattern of a model's name or architecture, as their model cards say. The first one that is found counts."""


def prefixes_of(name: str, architecture: str) -> Prefixes:
    """Return the prefixes of a model by `general.name` and `general.architecture` of its GGUF file."""
    about = re.sub(r"[\s_]+", "-", f"{name} {architecture}".lower())
    return next((prefixes for pattern, prefixes in FAMILIES.items() if re.search(pattern, about)), Prefixes())
