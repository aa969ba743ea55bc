"""Tells one model from another: a digest of every byte of its files.

Reading a whole model takes seconds to minutes, so a file's digest is kept in the user's cache directory. Its name holds the
file's device, inode, size and times of its last change: when any of them differs, the file is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from .errors import ModelError

logger = logging.getLogger("slotcache")
CHUNK = 64 << 20  # bytes that one thread reads before it takes the next
PIECE = 1 << 20  # bytes of it in memory
LARGE = 2 << 30  # bytes from which the user is told why the start takes longer
MOST_KEPT = 64  # files in a folder of the cache directory; the oldest leaves
PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")

Stamp = tuple[int, ...]
"""Device, inode, size, and the times of the last change of content and of metadata, ns."""


def digest(files: Iterable[Path]) -> str:
    """Return a digest over all bytes of these files in this order, 32 hexadecimal digits. Raises ModelError."""
    try:
        each = "".join(map(_digest_of, files))
    except OSError as error:
        raise ModelError(f"cannot read the model {error.filename}: {error.strerror}") from None
    return hashlib.blake2b(each.encode(), digest_size=16).hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return the files of a model: one, or all parts if it is split ("...-00001-of-00003.gguf")."""
    found = PART.fullmatch(path.name)
    count = int(found[2]) if found else 1
    parts = [path.with_name(f"{found[1]}-{number:05}-of-{found[2]}.gguf") for number in range(1, count + 1)] if found else []
    return [part for part in parts if part.exists()] or [path]


def stamp(path: Path) -> Stamp:
    """Return values that change with a file's content. Raises OSError."""
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Raise ModelError if a file is not as it was when it got its stamp."""
    for path, before in stamps.items():
        try:
            after = stamp(path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        if after != before:
            raise ModelError(f"{path} changed since it was loaded: start again")


def cache_folder() -> Path:
    """Return our folder in the user's cache directory; for a user without a home, a folder that cannot be made."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotcache"
    except RuntimeError:
        return Path(os.devnull) / "slotcache"


def _digest_of(path: Path) -> str:
    before = stamp(path)
    kept = cache_folder() / "digests" / "-".join(map(str, before))
    if known := _read_kept(kept):
        return known
    found = _compute(path, before[2])
    if stamp(path) != before:
        raise ModelError(f"{path} changed while it was read: start again when it is complete")
    with contextlib.suppress(OSError):  # without a cache directory, it is computed at every start
        keep(kept, found)
    return found


def _compute(path: Path, size: int) -> str:
    began = perf_counter()
    if size > LARGE:
        logger.info("reading all of %s (%.1f GiB), once, to know its KV from another model's", path.name, size / 2**30)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        chunks = pool.map(lambda at: _chunk(path, at), range(0, size, CHUNK))
        found = hashlib.blake2b(b"".join(chunks) + size.to_bytes(8), digest_size=16).hexdigest()
    if size > LARGE:
        logger.info("read %s in %.0f s", path.name, perf_counter() - began)
    return found


def _chunk(path: Path, at: int) -> bytes:
    """Return the digest of the CHUNK bytes from `at` on."""
    summed = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        for _ in range(CHUNK // PIECE):
            summed.update(file.read(PIECE))
    return summed.digest()


def _read_kept(path: Path) -> str | None:
    try:
        text = path.read_bytes()[:33].decode("ascii", "replace")
    except OSError:
        return None
    return text if re.fullmatch("[0-9a-f]{32}", text) else None


def keep(path: Path, found: str) -> None:
    """Write a file of the cache directory; of those in its folder, the oldest leave. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{secrets.token_hex(8)}")
    try:
        aside.write_text(found)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)[:-MOST_KEPT]:
        old.unlink(missing_ok=True)
