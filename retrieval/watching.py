"""Notice of changes below folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

from watchfiles import watch

from .files import Folder, directories

DEBOUNCE = 500  # ms: changes that follow each other faster are one notice
SETTLING = 1000  # ms until the first notice: of changes before the watch stood
RETRY = 5.0  # seconds until a folder that is gone is looked for again


def changes(folders: Sequence[Folder], stop: Event) -> Iterator[None]:
    """Yield at the start and after each change below the folders, until `stop` is set.

    The caller looks for what has changed. Raises OSError where the system allows no more watches.
    """
    while not stop.is_set():
        with suppress(FileNotFoundError):
            yield from _changes_below(_watched(folders), folders, stop)
            continue
        stop.wait(RETRY)


def _changes_below(watched: set[Path], folders: Sequence[Folder], stop: Event) -> Iterator[None]:
    """Yield as `changes` does, until there are other folders to watch.

    Each folder is watched by itself: a watch of a folder with all below it would follow the links in it.
    """
    is_first = True
    notices = watch(
        *watched,
        watch_filter=None,
        stop_event=stop,
        debounce=DEBOUNCE,
        rust_timeout=SETTLING,
        yield_on_timeout=True,
        raise_interrupt=False,
        recursive=False,
    )
    for found in notices:
        if found or is_first:
            yield
            if watched != _watched(folders):
                return
        is_first = False


def _watched(folders: Sequence[Folder]) -> set[Path]:
    return {path for folder in folders for path in directories(folder)}
