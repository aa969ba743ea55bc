"""Lists, reads and watches the files of folders."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from posixpath import normpath
from threading import Event
from unicodedata import category

from watchfiles import watch

MAX_BYTES = 64 << 20  # larger files are not read
CONTROLS = {"Cc", "Cs", "Zl", "Zp"}  # Unicode categories: control characters, undecoded bytes, line ends
LINK = "it is a link: links are not followed"
DATABASE = re.compile(r".*\.(db|sqlite3?)(-wal|-shm|-journal)?|[0-9a-f]{16}-\d+(-\d+)?\.lock", re.IGNORECASE)
"""Names of databases, which change all the time. One of them may be the index itself, which changes with each read file."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder to read, or one file.

    name: the first part of the paths of the folder's files; empty if the index has no other folder.
    """

    root: Path
    name: str = ""

    def shown(self, parts: tuple[str, ...]) -> str:
        """Return the path of a file as users see it. Control characters are escaped, and each file has a different path.

        Backslashes in names are escaped too, so that an escaped control character differs from a name with the same letters.
        """
        path = "/".join((self.name, *parts) if self.name else parts)
        return path if _is_plain(path) and "\\" not in path else "".join(map(_escaped, path))


@dataclass(frozen=True, slots=True)
class Stamp:
    """Values that change when a file changes: its size in bytes, and the times when its content and its metadata last
    changed, in ns.
    """

    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0


NEVER_READ = Stamp()


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read. parts: the names from the root to the file; empty if the root is the file."""

    folder: Folder
    parts: tuple[str, ...]
    stamp: Stamp

    @property
    def path(self) -> str:
        return self.folder.shown(self.parts or (self.folder.root.name,))


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file or a folder that is not read, and the reason."""

    path: str
    reason: str
    stamp: Stamp = NEVER_READ


def folders_of(paths: Sequence[Path]) -> list[Folder]:
    """Return the folders to read, with different names if there are several. Raises FileNotFoundError."""
    roots = list(dict.fromkeys(path.expanduser().resolve(strict=True) for path in paths))
    if len(roots) == 1:
        return [Folder(roots[0])]
    names: dict[str, Path] = {}
    for root in roots:
        name = next(name for name in _names(root) if name not in names)
        names[name] = root
    return [Folder(root, name) for name, root in names.items()]


def _names(root: Path) -> Iterator[str]:
    yield root.name
    for number in range(2, 1_000_000):
        yield f"{root.name}-{number}"


def path_in(folders: Sequence[Folder], asked: str) -> str:
    """Return the path of a file or folder in the index; empty for the whole index.

    asked: a path in the index, or a path on this machine. The path may contain `.` and `..`, and may begin and end with
    slashes.
    """
    path = normpath(asked)
    for folder in folders:
        root = str(folder.root)
        if path == root or path.startswith(f"{root}/"):
            parts = tuple(path[len(root) + 1 :].split("/")) if path != root else ()
            return folder.shown(parts or (() if folder.root.is_dir() else (folder.root.name,)))
    return "" if path == "." else path.strip("/")


def walk(folder: Folder) -> Iterator[FoundFile | SkippedFile]:
    """Yield all files below a folder, in the order of their names. Links and dot files are skipped."""
    if not folder.root.is_dir():
        yield _file(folder, (), folder.root.stat())
        return
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        parts = waiting.pop()
        try:
            found = sorted(_entries(folder.root.joinpath(*parts)), key=lambda entry: entry.name)
        except OSError as error:
            yield SkippedFile(folder.shown(parts) or ".", _cannot_be_opened(error))
            continue
        below: list[tuple[str, ...]] = []
        for entry in found:
            inner = (*parts, entry.name)
            try:
                if reason := _reason(entry):
                    yield SkippedFile(folder.shown(inner), reason)
                elif entry.is_dir(follow_symlinks=False):
                    below.append(inner)
                else:
                    yield _file(folder, inner, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # it was removed in the meantime
            except OSError as error:
                yield SkippedFile(folder.shown(inner), _cannot_be_opened(error))
        waiting += reversed(below)


def directories(folder: Folder) -> Iterator[Path]:
    """Yield the folders of the files that `walk` finds."""
    if not folder.root.is_dir():
        yield folder.root.parent
        return
    waiting = [folder.root]
    while waiting:
        path = waiting.pop()
        found: list[os.DirEntry[str]] = []
        try:
            found = _entries(path)
        except OSError:
            if path != folder.root:
                continue  # it cannot be watched either; its parent folder reports a change of its mode
        yield path
        for entry in found:
            with suppress(OSError):
                if not _reason(entry) and entry.is_dir(follow_symlinks=False):
                    waiting.append(path / entry.name)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder. Raises OSError, also if the folder can be listed but not entered."""
    with os.scandir(os.path.join(path, ".")) as entries:
        return list(entries)


def _reason(entry: os.DirEntry[str]) -> str:
    """Return the reason to skip an entry because of its name or because it is a link; empty if there is none."""
    if not _is_plain(entry.name):
        return "its name has control characters or is not UTF-8"
    if entry.name.startswith("."):
        return "its name begins with a dot"
    if entry.is_symlink():
        return LINK
    is_database = DATABASE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
    return "it is a database, which is not read" if is_database else ""


def _file(folder: Folder, parts: tuple[str, ...], about: os.stat_result) -> FoundFile | SkippedFile:
    file = FoundFile(folder, parts, Stamp(about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    reason = _unfit(about)
    return SkippedFile(file.path, reason, file.stamp) if reason else file


def _unfit(about: os.stat_result) -> str:
    """Return the reason not to read a file; empty if it can be read."""
    if not stat.S_ISREG(about.st_mode):
        return "it is not a regular file"
    if about.st_size > MAX_BYTES:
        return f"it has {about.st_size >> 20:,} MiB: at most {MAX_BYTES >> 20} are read"
    return "" if about.st_size else "it is empty"


def read_bytes(root: str | bytes, parts: tuple[str, ...]) -> bytes:
    """Return a file's bytes. Raises OSError, also if a part of its path has become a link or a device."""
    with _open(root, parts) if os.open in os.supports_dir_fd else _open_looked_at(root, parts) as file:
        if reason := _unfit(os.fstat(file.fileno())):
            raise OSError(reason)
        return file.read(MAX_BYTES)


def _open(root: str | bytes, parts: tuple[str, ...]) -> BufferedReader:
    """Open a file folder by folder, so that no folder can become a link meanwhile. Raises OSError."""
    folder = os.open(root, os.O_RDONLY | os.O_NONBLOCK)
    for at, name in enumerate(parts, 1):
        kind = os.O_NONBLOCK if at == len(parts) else os.O_DIRECTORY
        try:
            inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return os.fdopen(folder, "rb")


def _open_looked_at(root: str | bytes, parts: tuple[str, ...]) -> BufferedReader:
    """Open a file by its path, for Windows, where `_open` cannot work. Raises OSError, also for a link.

    If a part of the path becomes a link after it was checked, the link is followed.
    """
    path = Path(os.fsdecode(root))
    for name in parts:
        path /= name
        if path.is_symlink():
            raise OSError(LINK)
    if reason := _unfit(path.stat()):  # opening a pipe would wait
        raise OSError(reason)
    return path.open("rb")


def _is_plain(name: str) -> bool:
    return name.isprintable() or not any(category(letter) in CONTROLS for letter in name)


def _escaped(letter: str) -> str:
    if letter != "\\" and _is_plain(letter):
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def _cannot_be_opened(error: OSError) -> str:
    return f"it cannot be opened: {error.strerror or error}"


# ---- Notice of changes below folders. -----------------------------------------------------------------------------------

DEBOUNCE = 500  # ms: changes in faster succession give one notice
SETTLING = 1000  # ms until the first notice, which covers changes before the watch began
RETRY = 5.0  # seconds between two looks for a folder that is gone


def changes(folders: Sequence[Folder], stop: Event) -> Iterator[None]:
    """Yield at the start and after each change below the folders, until `stop` is set.

    The caller has to find the changed files. Raises OSError if the system allows no more watches.
    """
    while not stop.is_set():
        with suppress(FileNotFoundError):
            yield from _changes_below(_watched(folders), folders, stop)
            continue
        stop.wait(RETRY)


def _changes_below(watched: set[Path], folders: Sequence[Folder], stop: Event) -> Iterator[None]:
    """Yield as `changes` does, until the set of folders to watch changes.

    Each folder has its own watch, because a recursive watch would follow links.
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
