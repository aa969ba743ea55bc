"""Search over folders of documents: files are read, cut into chunks, indexed, kept up to date, and searched in stages.

The package needs no model. Without an embedding model, it searches only by words:

    >>> import asyncio, tempfile
    >>> from pathlib import Path
    >>> from slotcache.retrieval import Index, Query
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "tides.md").write_text("# Tides\\n\\nThe moon raises two tides a day.\\n")
    >>> index = Index([folder], folder.with_suffix(".db"))
    >>> index.refresh()
    True
    >>> for hit in asyncio.run(index.search().hits(Query(text="How many tides are there?"))):
    ...     print(hit.chunk.places[0].path, hit.chunk.title, hit.chunk.text, sep=" | ")
    tides.md | Tides | The moon raises two tides a day.
    >>> index.close()

With an `Embedder`, `refresh` also embeds the chunks. A call of `index.search(embed=...)` searches by words and by vectors,
and fuses the two rankings.
"""

from .chunks import Chunk, Sizes, cut
from .files import Folder, FoundFile, SkippedFile, changes
from .index import Embedder, Index, Prefixes, Progress, Scan, prefixes_of
from .ranking import FUSED, LEXICAL, PROVISIONAL, RERANKED, Hit, Query, Search, Stage
from .writing import FAILED, INDEXED, SKIPPED, Place, StoredChunk, StoredFile

__all__ = [
    "FAILED",
    "FUSED",
    "INDEXED",
    "LEXICAL",
    "PROVISIONAL",
    "RERANKED",
    "SKIPPED",
    "Chunk",
    "Embedder",
    "Folder",
    "FoundFile",
    "Hit",
    "Index",
    "Place",
    "Prefixes",
    "Progress",
    "Query",
    "Scan",
    "Search",
    "Sizes",
    "SkippedFile",
    "Stage",
    "StoredChunk",
    "StoredFile",
    "changes",
    "cut",
    "prefixes_of",
]
