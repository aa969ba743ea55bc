"""Tries a library in a separate process, because the library may crash.

Stores the trial's result, which holds for the library's files and this CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..slots.child import run_child
from .model_files import cache_folder, keep, stamp

PATIENCE = 60  # s
PASSED = "passed"  # the line that a trial prints, after any output of the library
FAILED = "failed: "  # the prefix of a stored reason
LONGEST = 1000  # characters of a reason
COMPLAINS = "llama.cpp: "  # the prefix of an error that llama.cpp logs during a trial
CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP")
"""Signals that a process causes itself. Other signals come from outside, such as ctrl-C or a lack of memory."""
CPU_INFO = Path("/proc/cpuinfo")
INSTRUCTIONS = re.compile(r"sse|ssse|avx|amx|fma|f16c|bmi|abm|adx|movbe|popcnt|gfni|vaes|vpclmul|sha_")  # among x86's flags
DOOR = Path(__file__).with_name("llama.py")  # the module that calls a library
SEARCHED = ("LD_LIBRARY_PATH", "LD_PRELOAD", "GGML_BACKEND_PATH")  # where a library looks for other libraries


# ---- Commands that run a module of this package in a separate process. --------------------------------------------------

PACKAGE_ROOT = Path(__file__).parents[1]
# Not `-m`: in another process, a checkout that is not installed is no package.
START = """
import sys, types
from importlib import import_module
package = types.ModuleType("slotcache")
package.__path__ = [sys.argv[1]]
sys.modules["slotcache"] = package
import_module(sys.argv[2]).main(*sys.argv[3:])
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls `main(*arguments)` of a module in a new process.

    The flag -P keeps the process from importing modules from its working folder.

    module: the module's name below this package.
    """
    return [sys.executable, "-P", "-c", START, str(PACKAGE_ROOT), f"slotcache.{module}", *arguments]


# ---- Trials -------------------------------------------------------------------------------------------------------------


def failure(
    library: Path,
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    also: object = None,
    patience: float = 0,
    keeps: bool = False,
    again: bool = False,
    goes_on: Callable[[], bool] | None = None,
) -> str:
    """Return why a library fails a trial; "" if it passes, now or at an earlier start with these files on this CPU.

    env: the environment of the child process; by default the environment of this process.
    also: further values that the result depends on. Different values of `also` must have different reprs.
    patience: the most seconds of the trial; PATIENCE by default.
    keeps: store a failure, too. If a failure is stored, the returned reason names the file to remove for another trial.
    again: ignore a stored failure, and run the trial.
    goes_on: as in `run_child`.
    """
    kept = cache_folder() / "libraries" / f"{name}-{_key(library, also)}"
    known = _read(kept)
    if known is not None and not (known and again):
        return known
    reason, is_own = _tried(command, env, patience or PATIENCE, goes_on)
    if reason and not (keeps and is_own):
        return reason
    try:
        keep(kept, f"{FAILED}{reason}" if reason else PASSED)
    except OSError:  # without a cache directory, each start tries the library
        return reason
    return _with_place(reason, kept)


def _read(kept: Path) -> str | None:
    """Return the stored result: why a library failed, or "" if it passed.

    Return None if no result is stored, or if the file is damaged.
    """
    with contextlib.suppress(OSError, ValueError):
        text = kept.read_bytes().decode()
        if text == PASSED:
            return ""
        if text.startswith(FAILED):
            return _with_place(text.removeprefix(FAILED), kept)
    return None


def _with_place(reason: str, kept: Path) -> str:
    return f"{reason} (kept in {kept}: remove it to try again)" if reason else ""


def _tried(
    command: Sequence[str], env: Mapping[str, str] | None, patience: float, goes_on: Callable[[], bool] | None
) -> tuple[str, bool]:
    """Return why a trial failed; "" if it passed. Also return whether the library itself caused the failure."""
    try:
        done = run_child(command, timeout=patience, env=env, goes_on=goes_on)
    except subprocess.TimeoutExpired:
        if goes_on is not None and not goes_on():
            return "was not tried to its end", False
        return f"did not end within {patience:g} s", True
    except OSError as error:
        return f"could not be tried: {error}", False
    said = (done.stderr if done.returncode else done.stdout).decode("utf-8", "replace").splitlines()
    if done.returncode < 0:
        parts = ("ended the process", signal.strsignal(-done.returncode), _last_words(said))
        return ": ".join(filter(None, parts)), -done.returncode in (getattr(signal, name, 0) for name in CRASHES)
    if done.returncode or PASSED not in said:
        return said[-1][:LONGEST] if said else "ended the process without a word", True
    return "", True


def _last_words(said: Sequence[str]) -> str:
    """Return the last error that llama.cpp logged before a crash, without continuation lines; else the last output."""
    errors = [line.removeprefix(COMPLAINS) for line in said if line.startswith(COMPLAINS)]
    words = [line for line in errors if not line[:1].isspace()] or [line for line in said if line.strip()]
    return words[-1].strip()[:LONGEST] if words else ""


def _key(library: Path, also: object = None) -> str:
    """Return a digest of everything on which a trial's result depends. Computing the digest loads no library."""
    folders = {library.parent, library.resolve().parent}
    near = [path for folder in folders for path in folder.iterdir() if re.search("llama|ggml", path.name) and path.is_file()]
    parts = sorted(map(stamp, [*near, DOOR])), instructions(), [os.environ.get(name) for name in SEARCHED]
    parts = parts if also is None else (*parts, also)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def instructions(cpu_info: Path = CPU_INFO) -> list[str]:
    """Return Linux's names of this CPU's instruction sets, sorted. On other systems, return only the name of the CPU.

    Linux's other flags for x86 CPUs are left out, since they change with the kernel.
    """
    with contextlib.suppress(OSError):
        for line in cpu_info.read_text().splitlines():
            title, _, names = line.partition(":")
            if title.strip() in ("flags", "Features"):
                return sorted(name for name in names.split() if title[0] == "F" or INSTRUCTIONS.match(name))
    return [platform.processor()]
