"""The origin of a result: machine, versions, commit, date."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe(llama_server: str | None = None) -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, versions, git commit, date and the command line, as JSON values."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": (_output("nvidia-smi", ["--query-gpu=name,memory.total", "--format=csv,noheader"]) or "").splitlines(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "slotcache": _version("slotcache"),
        "llama_cpp_python": _version("llama-cpp-python"),
        "llama_server": _output(llama_server, ["--version"]) if llama_server else None,
        "git_commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ from it; None for an installed package."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists() or not (commit := _output("git", ["-C", str(folder), "rev-parse", "HEAD"])):
        return None
    return commit + ("+" if _output("git", ["-C", str(folder), "status", "--porcelain"]) else "")


def _output(program: str, arguments: Sequence[str]) -> str | None:
    """Return the output of a program; None if it is absent or fails."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # llama-server prints its version to stderr.
    return (done.stdout or done.stderr).strip()
