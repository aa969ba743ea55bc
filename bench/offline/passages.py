"""Makes an index of MT-RAG's passages: chunks, vectors, and the turns with the passages that people marked as relevant."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ...models.embedding import EmbedderSettings, EmbeddingModel, normalised
from ...models.model import Model
from ...models.model_files import cache_folder
from ...retrieval.chunks import Chunk, count_tokens, embedded_text
from ...retrieval.index import prefixes_of
from ...retrieval.store import Store
from ...retrieval.writing import StoredFile

MAX_TOKENS = 512  # tokens of a passage that the embedder reads


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation. questions: all questions up to this turn. relevant: the chunks that people marked."""

    questions: tuple[str, ...]
    relevant: frozenset[int]


def load_passages(folder: Path) -> list[Passage]:
    """Return all passages. Raises FileNotFoundError."""
    rows = _rows(folder / "documents.jsonl.gz")
    return [Passage(row["id"], row["title"], row["text"].strip() or row["title"] or row["id"]) for row in rows]


def load_turns(folder: Path, numbers: dict[str, int]) -> list[Turn]:
    """Return the turns with relevant passages. numbers: the chunk of each passage. Raises FileNotFoundError."""
    relevant: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for line in (folder / "qrels.tsv").read_text().splitlines()[1:]:
        session, turn, passage = line.split("\t")
        relevant[session, int(turn)].add(numbers[passage])
    questions: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for row in _rows(folder / "tasks.jsonl"):
        questions[row["session"]][int(row["turn"])] = row["question"]
    return [
        Turn(tuple(text for at, text in sorted(questions[session].items()) if at <= turn), frozenset(found))
        for (session, turn), found in relevant.items()
    ]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


def put_passages(store: Store, passages: Sequence[Passage]) -> dict[str, int]:
    """Store each passage as a chunk. Return the chunks' numbers by the passages' ids. Equal passages share a chunk."""
    chunks = [Chunk(row.title, row.text, count_tokens(row.text), None, start=0, stop=len(row.text)) for row in passages]
    store.put_file(StoredFile("passages"), chunks)
    return {passage.id: store.numbers(chunk.id)[0] for passage, chunk in zip(passages, chunks, strict=True)}


def write_sources(passages: Sequence[Passage], folder: Path) -> int:
    """Write the passages of each source to a file. Return the number of files."""
    sources: defaultdict[str, list[Passage]] = defaultdict(list)
    for passage in passages:
        sources[passage.id.split("_")[0].split("-")[0]].append(passage)
    for name, parts in sources.items():
        text = "\n\n".join(part.text for part in parts)
        (folder / f"{name}.md").write_text(f"# {parts[0].title or name}\n\n{text}\n")
    return len(sources)


class QueryEmbedder:
    """An embedding model, and the vectors of all passages, which are computed once and stored in the user's cache."""

    def __init__(self, path: Path, threads: int) -> None:
        self._model = Model(path)
        about = (self._model.metadata(f"general.{key}") or "" for key in ("name", "architecture"))
        self._prefixes = prefixes_of(*about)
        self._embedder = EmbeddingModel(self._model, EmbedderSettings(max_tokens=MAX_TOKENS, threads=threads))
        self._digest = blake2b(path.read_bytes(), digest_size=8).hexdigest()

    def close(self) -> None:
        self._embedder.close()
        self._model.close()

    async def embed(self, text: str) -> np.ndarray:
        """Return the unit vector (width,) of a query. Only the end of a long query counts."""
        return self._vector(self._prefixes.query + text, from_start=True)

    def _vector(self, text: str, from_start: bool = False) -> np.ndarray:
        tokens = self._embedder.shortened(self._embedder.tokens(text), from_start)
        return normalised(self._embedder.vectors([tokens])[0], 2)

    def vectors(self, passages: Sequence[Passage]) -> np.ndarray:
        """Return the vectors (passages, width), float16. After a stopped run, only the missing vectors are computed."""
        texts = [self._prefixes.document + embedded_text(passage.title, passage.text) for passage in passages]
        contents = blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        path, shape = cache / f"passages-{contents}-{self._digest}.npy", (len(texts), self._embedder.width)
        if not path.is_file():
            np.lib.format.open_memmap(path, "w+", np.float16, shape).flush()
        kept = np.lib.format.open_memmap(path, "r+")
        missing = np.flatnonzero(~kept.any(axis=1)).tolist()
        for done, at in enumerate(missing):
            if done % 500 == 0:
                kept.flush()
                print(f"vectors: {len(missing) - done:,} of {len(texts):,} passages left", file=sys.stderr, flush=True)
            kept[at] = self._vector(texts[at])
        kept.flush()
        return np.array(kept)
