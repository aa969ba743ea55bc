"""From settings to the documents of `--docs`."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from ...models.demo.corpus import SUGGESTED
from ...models.digest import cache_folder
from ...models.model import Model
from ...retrieval import Index
from ..flags.setting import SettingsError
from ..settings import Settings
from ..vectors.vectors import Vectors
from .library import Keeper, Library
from .models import Embedding, Reranking, can_search

logger = logging.getLogger("slotcache.docs")
MOST_SERVERS = 16  # with the same documents on one machine: each has an index of its own
ROOM = 0.5  # of a prompt's tokens, for the documents of a question


def load_library(settings: Settings, vectors: Vectors, limit: int, is_busy: Callable[[], bool]) -> Library | None:
    """Open the index of --docs; None without --docs. Raises SettingsError. limit: tokens of a prompt and its answer.

    is_busy: as in `Keeper`.
    """
    paths = [Path(path) for path in settings.docs.split("\n") if path]
    if not paths:
        return None
    computer, ranker = vectors.embedding, vectors.reranking
    embedding = Embedding.of(computer, settings) if computer and can_search(computer) else None
    embedder = embedding.for_index() if embedding else None
    try:
        name = _name([str(path.expanduser().resolve(strict=True)) for path in paths], embedder.name if embedder else "")
        folder = Path(settings.docs_db).expanduser() if settings.docs_db else cache_folder() / "docs"
        database, lock = _free_file(folder, f"{name}-{settings.chunk_tokens}")
        index = Index(paths, database, embedder=embedder, chunk_tokens=settings.chunk_tokens)
    except FileNotFoundError as error:
        raise SettingsError(f"--docs {error.filename}: there is no such file or folder") from None
    except (OSError, sqlite3.Error, ValueError) as error:
        raise SettingsError(f"the index of --docs cannot be opened: {error}") from None
    if embedding is None:
        logger.info("--docs are searched by words alone: --embedding-model FILE adds vectors")
    elif any(astuple(embedding.prefixes)):
        logger.info("queries are embedded behind %r, documents behind %r", *astuple(embedding.prefixes))
    bundled = paths == [bundled_folder()]
    return Library(
        index=index,
        scope=settings.docs_scope,
        top_k=settings.docs_top_k,
        room=int(ROOM * limit),
        embedding=embedding,
        reranking=Reranking(ranker) if ranker else None,
        keeper=Keeper(index, watches=settings.docs_watch, is_busy=is_busy),
        lock=lock,
        questions=SUGGESTED if bundled else (),
    )


def check_read_ahead(settings: Settings, model: Model) -> None:
    """Raise SettingsError for --read-ahead where nothing could be read ahead."""
    hindrances = {
        "it needs documents: --docs": not settings.docs,
        "it needs host memory, and --cache-ram is 0": not settings.cache_ram,
        "this model generates no text": not model.can_chat,
    }
    if settings.read_ahead and (found := next((text for text, holds in hindrances.items() if holds), None)):
        raise SettingsError(f"--read-ahead: {found}")


def bundled_folder() -> Path:
    """Return the folder of the documents that come with the built-in model."""
    return cache_folder() / "demo"


def _name(paths: list[str], embedder: str) -> str:
    """Return a name for the index of folders, another one for each embedder."""
    return hashlib.blake2b("\0".join([*paths, embedder]).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _free_file(folder: Path, name: str) -> tuple[Path, int]:
    """Return a file for an index that no running server has, and the descriptor of its lock. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(MOST_SERVERS):
        file = folder / f"{name}{f'-{number}' if number else ''}.db"
        with suppress(BlockingIOError):
            return file, _lock(file.with_suffix(".lock"))
    raise OSError(f"{MOST_SERVERS} servers have an index of these folders in {folder}")


def _lock(file: Path) -> int:
    """Lock a file until its descriptor is closed. Raises BlockingIOError if it is locked."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
