"""npm's builds of llama.cpp in this environment: their folders, the builds to try, and why a build was rejected."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

from ..slots.store.private_folder import written_aside
from . import cards
from .cards import BUILDS, CARD_BUILDS
from .model_files import stamp
from .trial import command, failure

logger = logging.getLogger("slotcache")
FOLDER = Path(os.environ.get("SLOTCACHE_BUILDS") or Path(sys.prefix, "llama.cpp"))
"""The folder where `make serve` and `slotcache install` put builds. Tests choose another folder with SLOTCACHE_BUILDS."""
PACKAGES = {"cpu": "linux-x64", "vulkan": "linux-x64-vulkan", "cuda": "linux-x64-cuda", "cuda12": "linux-x64"}
BACKEND_OF_CUDA12 = "linux-x64-cuda-ext/bins/linux-x64-cuda/fallback/libggml-cuda.so"

PATIENCE = 300  # s for the trial on a card, where kernels are compiled at their first use
LOG_EVERY = 15  # s between two lines of the log


@dataclass(frozen=True, slots=True)
class InstalledBuilds:
    """The result of `slotcache install`.

    asked: the build that the user named, or `auto`.
    builds: the builds to try, in order. A start of the server tries these builds before the Python packages with llama.cpp.
    passed_over: the names of the rejected builds, each with the reason.
    """

    asked: str = ""
    builds: tuple[str, ...] = CARD_BUILDS
    passed_over: Mapping[str, str] = field(default_factory=dict)


def installed_builds() -> InstalledBuilds:
    """Return the result of the last `slotcache install`. Without an installation, `builds` has all builds for cards."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        kept = json.loads((FOLDER / "installed.json").read_text())
        passed_over = {str(build): str(reason) for build, reason in kept["passed_over"].items()}
        return InstalledBuilds(str(kept["asked"]), tuple(b for b in kept["builds"] if b in BUILDS), passed_over)
    return InstalledBuilds()


def keep_installed(found: InstalledBuilds) -> None:
    """Write the result of an installation to a file, for later starts. Raises OSError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with written_aside(FOLDER / "installed.json") as file:
        file.write(json.dumps(asdict(found)).encode())


def package_folder(build: str) -> Path:
    return FOLDER / build / "node_modules/@node-llama-cpp" / PACKAGES[build]


def library_folder(build: str) -> Path:
    return package_folder(build) / "bins" / PACKAGES[build]


def finish(build: str) -> None:
    """Link the backend for CUDA 12, which comes in a separate package, into the library's folder. Raises OSError."""
    link = library_folder(build) / "libggml-cuda.so"
    if build == "cuda12" and not link.exists():
        link.symlink_to(Path("../../..", BACKEND_OF_CUDA12))


def failure_on_card(build: str, *, again: bool = False) -> str:
    """Return why a build cannot compute on a card of this machine: see `library_failure_on_card`."""
    folder = library_folder(build)
    if not folder.is_dir():
        return f"{folder} is missing"
    return library_failure_on_card(next(folder.glob("libllama.*so"), folder), again=again)


def library_failure_on_card(library: Path, *, again: bool = False, goes_on: Callable[[], bool] = lambda: True) -> str:
    """Return why a library cannot compute on a card of this machine; "" if it passes a trial, now or at an earlier start.

    A trial may take PATIENCE seconds, so its result is stored. A new trial runs after the cards or their drivers change.

    again, goes_on: as in `trial.failure`.
    """
    root, folder = cards.root_folder(), library if library.is_dir() else library.parent
    runtimes = [cards.runtime(version, root) for version, _ in cards.RUNTIMES.values()]
    plugin = Path(os.environ.get("GGML_BACKEND_PATH") or os.devnull)
    also = cards.drivers(root), runtimes, stamp(plugin) if plugin.is_file() else None
    # Otherwise ggml would print a backtrace after the reason.
    environment = os.environ | {"SLOTCACHE_LLAMA": str(folder), "GGML_NO_BACKTRACE": "1"}
    return failure(
        library,
        "on-card",
        command("models.gate", "card"),
        env=environment,
        also=also,
        patience=PATIENCE,
        keeps=True,
        again=again,
        goes_on=TrialProgress(folder, goes_on),
    )


class TrialProgress:
    """Called during a trial: returns whether the trial may go on, and logs from time to time that it still runs."""

    def __init__(self, folder: Path, goes_on: Callable[[], bool]) -> None:
        self._folder, self._goes_on = folder, goes_on
        self._began, self._due = monotonic(), 0.0

    def __call__(self) -> bool:
        if (seconds := monotonic() - self._began) >= self._due:
            self._due += LOG_EVERY
            line = "trying the llama.cpp of %s on the card, once for this driver: %.0f s so far, %d at most"
            logger.info(line, self._folder, seconds, PATIENCE)
        return self._goes_on()
