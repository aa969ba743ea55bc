"""The process in which files are read (see `reader`): started when it is needed first, and again after it has ended."""

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

from ..extract.section import Unreadable
from ..writing import Written
from .messages import SECONDS, Broken, Failed, Line, Stored, Task

# Not `-m`: a checkout that is not installed is no package for another process. The room's own package stays empty here:
# reading needs no numpy, which takes a share of the process's memory.
START = """
import sys, types
for name, path in zip(("slotcache", "slotcache.retrieval"), sys.argv[2:]):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from slotcache.retrieval.reading.reader import main
main(sys.argv[1])
"""
ROOM = Path(__file__).parents[1]
CRASHES = {
    signal.SIGPROF: f"it takes more than {SECONDS:.0f} seconds to read",
    signal.SIGKILL: "it takes too much memory to read",
}


class EndedError(Exception):
    """`may_go_on` ended the reading of a file, which stays in the index as it was."""


class FileReader:
    """Reads files into an index, one after the other. One thread may use it; any thread may interrupt or close it."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, task: Task, may_go_on: Callable[[], bool]) -> Written:
        """Have a file read and stored. Raises Unreadable, sqlite3.OperationalError; EndedError for `may_go_on`.

        may_go_on: called after each batch of chunks; False ends the process.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two files, which says nothing of the next one
        process = self._process = self._process or _start(self._database)
        with suppress(OSError):  # it has ended: there is no answer, then
            _pipe(process.stdin).write(msgspec.json.encode(task) + b"\n")
            _pipe(process.stdin).flush()
        while text := _pipe(process.stdout).readline():
            match msgspec.json.decode(text, type=Line):
                case Stored(num_new, gone):
                    return Written(num_new, gone)
                case Failed(reason):
                    raise Unreadable(reason)
                case Broken(reason):
                    raise sqlite3.OperationalError(reason)
                case _ if not may_go_on():
                    self.close()
                    raise EndedError
        self.close()
        raise Unreadable(_crash(process.returncode))

    def interrupt(self) -> None:
        """Kill the process, from any thread: the file that it reads is unreadable then."""
        if process := self._process:
            process.kill()

    def close(self) -> None:
        """End the process. The next file starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start(database: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", START, str(database), str(ROOM.parent), str(ROOM)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _crash(code: int) -> str:
    """Return why a process ended at a file, by its exit code."""
    if code >= 0:
        return "its reader failed"
    number = signal.Signals(-code)
    return CRASHES.get(number, f"its reader crashed: {number.name}")
