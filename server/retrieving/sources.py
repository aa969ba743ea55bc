"""The documents of `--docs` as JSON: folders, files, and one document with its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...retrieval import INDEXED, Hit, StoredChunk, StoredFile
from ...retrieval.files import Folder
from ..errors import RequestError
from .library import EMBEDDING, READY, Library

Fields = dict[str, object]
NEIGHBOURS = 2  # on each side of a document


def collections(library: Library, after: str, limit: int) -> Fields:
    """Return the folders with the files of a page, by path: `limit` of those after a path. Reads the index."""
    files = list(library.index.store.files(after, limit + 1).values())
    page = files[:limit]
    shown: Fields = {
        "object": "sources",
        "collections": [_collection(library, folder, page) for folder in library.folders],
        "next": page[-1].path if len(files) > limit else None,
    }
    return shown | ({"read_ahead": library.beginnings.shown()} if library.beginnings else {})


def _collection(library: Library, folder: Folder, files: Iterable[StoredFile]) -> Fields:
    keeper = library.keeper
    shown: Fields = {
        "path": str(folder.root),
        "state": keeper.state,
        "stages": library.stages,
        "progress": _progress(library),
        "files": [_file(file) for file in files if _is_in(folder, file.path)],
    }
    named: Fields = {"error": keeper.error, "questions": library.questions}
    return shown | {name: value for name, value in named.items() if value}


def index_state(library: Library) -> Fields:
    """Return how far an index is that is not up to date, as a field of an answer; no field for one that is."""
    state = library.keeper.state
    return {} if state == READY else {"index": {"state": state, **_progress(library)}}


def _is_in(folder: Folder, path: str) -> bool:
    return not folder.name or path == folder.name or path.startswith(f"{folder.name}/")


def _progress(library: Library) -> Fields:
    """Return how far the index of all folders is: in documents while vectors are computed, else in files."""
    now = library.index.progress
    if library.keeper.state == EMBEDDING:
        return {"unit": "documents", "done": now.vectors, "total": now.chunks}
    return {"unit": "files", "done": now.files - now.files_left, "total": now.files}


def _file(file: StoredFile) -> Fields:
    shown: Fields = {"path": file.path, "state": file.state}
    if file.state != INDEXED:
        return shown | {"error": file.reason}
    return shown | {"chunks": file.num_chunks, "vectors": file.num_vectors}


def document(library: Library, id: str) -> Fields:
    """Return a document with its text and its neighbours in the file. Reads the index. Raises RequestError 404."""
    around = library.index.expand(id, NEIGHBOURS, NEIGHBOURS)
    own = next((at for at, chunk in enumerate(around) if chunk.id == id), None)
    if own is None:
        raise RequestError(f"no document {id[:80]!r} is in the index: its file may have changed", status=404)
    neighbours = [{"offset": at - own, **_text(chunk)} for at, chunk in enumerate(around) if at != own]
    places = [{"path": place.path, "page": place.page} for place in around[own].places]
    return _text(around[own]) | place_of(around[own]) | {"places": places, "neighbours": neighbours}


def _text(chunk: StoredChunk) -> Fields:
    return {"id": chunk.id, "title": chunk.title, "text": chunk.text}


def place_of(chunk: StoredChunk) -> Fields:
    """Return the first place of a document."""
    place = chunk.places[0]
    return {"path": place.path, "page": place.page, "start": place.start, "stop": place.stop}


def results(hits: Sequence[Hit], with_text: bool) -> list[Fields]:
    """Return what a search found, in rank."""
    return [
        {"id": hit.chunk.id, "title": hit.chunk.title}
        | ({"text": hit.chunk.text} if with_text else {})
        | place_of(hit.chunk)
        | {"score": round(hit.score, 4), "lexical_rank": hit.lexical_rank, "vector_rank": hit.vector_rank}
        for hit in hits
    ]
