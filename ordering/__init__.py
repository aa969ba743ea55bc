"""Documents, and the order of a request's documents that reuses the most cached tokens.

Pure Python, for use with any engine that has a prefix cache:

    >>> from slotcache.ordering import KnowledgeTree, arrange, document_text, order_hint, parse_documents
    >>> tree = KnowledgeTree()
    >>> def context(retrieved):
    ...     rank = parse_documents(retrieved)
    ...     order = [rank[i] for i in arrange([document.key for document in rank], tree).order]
    ...     tree.insert((document.key, len(document.text) // 4) for document in order)
    ...     return "".join(map(document_text, order)) + order_hint(order, rank)
    >>> tides = {"id": "d1", "text": "The moon raises two tides a day."}
    >>> ports = {"id": "d2", "text": "The port closes at low tide."}
    >>> context([tides])
    '[d1]\\nThe moon raises two tides a day.\\n\\n'
    >>> print(context([ports, tides]))
    [d1]
    The moon raises two tides a day.
    <BLANKLINE>
    [d2]
    The port closes at low tide.
    <BLANKLINE>
    Most relevant: d2
    <BLANKLINE>
    <BLANKLINE>
"""

from .document import Document, DocumentError, parse_documents
from .fleet import Fleet, Placement
from .policy import POLICIES, Arrangement, Index, RecencyIndex, Step, arrange
from .prompt import document_text, order_hint
from .tree import KnowledgeTree

__all__ = [
    "POLICIES",
    "Arrangement",
    "Document",
    "DocumentError",
    "Fleet",
    "Index",
    "KnowledgeTree",
    "Placement",
    "RecencyIndex",
    "Step",
    "arrange",
    "document_text",
    "order_hint",
    "parse_documents",
]
