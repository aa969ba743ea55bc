"""Starts the child process that reads files, and exchanges messages with it."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from ..slots.child import start_child
from .files import Stamp
from .outline import Unreadable
from .writing import WriteOutcome

# ---- The lines to the process that reads files, and its answers. --------------------------------------------------------

QUICK = 2.0  # seconds of processor time: a slower file is read after all other files
SECONDS, MOST_SECONDS = 10.0, 60.0  # of processor time, for an empty and a large file; a small file can unpack to much
SECONDS_A_MIB = 10.0  # Word takes 5, text 0.2


def seconds_for(size: int) -> float:
    """Return the processor time that a file of `size` bytes may take."""
    return min(SECONDS + SECONDS_A_MIB * size / (1 << 20), MOST_SECONDS)


class ReadTask(msgspec.Struct):
    """A file to read, with the parts, path and stamp of its `FoundFile`.

    root: the path of its folder in the system's encoding, which may not be UTF-8.
    known: the file's digest in the index; empty for a new file.
    tokens: the approximate size of a chunk.
    seconds: the limit of processor time.
    """

    root: bytes
    parts: tuple[str, ...]
    path: str
    stamp: Stamp
    known: str
    tokens: int
    seconds: float


class ReadStep(msgspec.Struct, tag="step"):
    """The child's answer after each batch of a file's chunks.

    After a `ReadStep`, more answers about the same file follow.
    """


class Stored(msgspec.Struct, tag="stored"):
    """The child's last answer about a file that was read and stored. num_new, gone: as in `WriteOutcome`."""

    num_new: int = 0
    gone: list[int] = []


class Failed(msgspec.Struct, tag="failed"):
    """The child's last answer about a file that cannot be read, with the reason."""

    reason: str


class Broken(msgspec.Struct, tag="broken"):
    """The child's last answer about a file that cannot be stored. reason: the database's error."""

    reason: str


Line = ReadStep | Stored | Failed | Broken
LINES, TASKS = msgspec.json.Decoder(Line), msgspec.json.Decoder(ReadTask)


# `-m` would not find a checkout that is not installed. The package `retrieval` is left empty here, without its
# `__init__`: reading needs no numpy, which would take a share of the process's memory.
START = """
import sys, types, importlib
for name, path in zip(("slotcache", "slotcache.retrieval"), sys.argv[1:3]):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
importlib.import_module("slotcache.retrieval." + sys.argv[3]).main(*sys.argv[4:])
"""
ROOM = Path(__file__).parent


class SlowError(Unreadable):
    """Reading a file takes more processor time than its `ReadTask` allows."""


class EndedError(Exception):
    """`may_go_on` stopped the reading of a file. The index keeps the file's earlier state."""


class FileReader:
    """Reads files into an index, one at a time, in another process.

    One thread may use it; any thread may interrupt or close it.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, task: ReadTask, may_go_on: Callable[[], bool]) -> WriteOutcome:
        """Read and store a file. Raises Unreadable, SlowError, EndedError and sqlite3.OperationalError.

        may_go_on: called after each batch of chunks. If `may_go_on` returns False, the process is ended and EndedError is
        raised.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two files, so the next file is not the cause
        process = self._process = self._process or start_module("reader", str(self._database))
        with suppress(OSError):  # it has ended, so the loop below finds no answer
            _pipe(process.stdin).write(msgspec.json.encode(task) + b"\n")
            _pipe(process.stdin).flush()
        while text := _pipe(process.stdout).readline():
            match LINES.decode(text):
                case Stored(num_new, gone):
                    return WriteOutcome(num_new, gone)
                case Failed(reason):
                    raise Unreadable(reason)
                case Broken(reason):
                    raise sqlite3.OperationalError(reason)
                case _ if not may_go_on():
                    self.close()
                    raise EndedError
        self.close()
        if signal_of(process.returncode) == "SIGPROF":
            raise SlowError(f"it takes more than {task.seconds:.0f} seconds to read")
        raise Unreadable(_crash(process.returncode))

    def interrupt(self) -> None:
        """Kill the process, from any thread. The file that was being read counts as unreadable."""
        if process := self._process:
            process.kill()

    def close(self) -> None:
        """End the process. For the next file, another process is started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def start_module(name: str, *arguments: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that calls `main` of the module `name` of `retrieval`, with these arguments."""
    command = [sys.executable, "-c", START, str(ROOM.parent), str(ROOM), name, *arguments]
    return start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _crash(code: int) -> str:
    """Return the reason why a process ended while it read a file, by the process's exit code."""
    match signal_of(code):
        case "":
            return "its reader failed"
        case "SIGKILL":
            return "it takes too much memory to read"
        case name:
            return f"its reader crashed: {name}"


def signal_of(code: int) -> str:
    """Return the name of the signal that ended a process, by its exit code; empty if it ended by itself."""
    return signal.Signals(-code).name if code < 0 else ""
