"""LangChain documents in the order that reuses the most: python examples/langchain.py

Needs langchain-core. The order is predicted from the documents that were served before, so it also helps in front of
engines other than slotcache. With a retriever, put CacheOrder into a ContextualCompressionRetriever.
"""

from langchain_core.documents import Document  # pyright: ignore[reportMissingImports]
from slotcache.ordering.langchain import CacheOrder

TIDES, MOON, PORTS = (
    Document(id=name, page_content=text)
    for name, text in (
        ("tides", "The moon raises two tides a day."),
        ("moon", "The moon takes 27 days for its way around the earth."),
        ("ports", "The port closes at low tide."),
    )
)
RETRIEVED = (("Why are there tides?", [TIDES, MOON]), ("When does the port close?", [PORTS, TIDES]))

order = CacheOrder()
for question, documents in RETRIEVED:
    ordered = order.compress_documents(documents, question)
    print(f"> {question}\n  {' '.join(str(document.id) for document in ordered)}")
