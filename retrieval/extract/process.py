"""The process in which files are read (see `reader`): started when it is needed first, and again after it has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from ..chunks import Chunk
from .messages import SECONDS, Chunks, Digest, End, Line, Task
from .section import Unreadable

# Not `-m`: a checkout that is not installed is no package for another process. The room's own package stays empty here:
# reading needs no numpy, which takes a share of the process's memory.
START = """
import sys, types
for name, path in zip(("slotcache", "slotcache.retrieval"), sys.argv[1:]):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from slotcache.retrieval.extract.reader import main
main()
"""
AHEAD = 4  # files that may wait
ROOM = Path(__file__).parents[1]
CRASHES = {
    signal.SIGPROF: f"it takes more than {SECONDS:.0f} seconds to read",
    signal.SIGKILL: "it takes too much memory to read",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that is being read. digest: of its bytes. batches: its chunks, in order; iterating raises Unreadable."""

    digest: str
    batches: Iterator[list[Chunk]]


class FileReader:
    """Reads files in the order in which they were asked for. One thread may use it; any thread may interrupt or close it.

    The process works on the next files while the caller stores the chunks of this one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: deque[Task] = deque()  # sent, without an end yet; the first one is being read
        self._is_begun = False  # to be read by the caller

    def prepare(self, task: Task) -> None:
        """Ask for a file that `start` is called for later. At most `AHEAD` may wait, or the pipe could fill."""
        process = self._process = self._process or _start()
        self._tasks.append(task)
        with suppress(OSError):  # it has ended: the next read finds that out
            _pipe(process.stdin).write(msgspec.json.encode(task) + b"\n")
            _pipe(process.stdin).flush()

    def start(self, task: Task) -> Reading:
        """Begin to read a file. Raises Unreadable."""
        if self._is_begun or (self._tasks and self._tasks[0] != task):  # earlier files were given up
            self.close()
        if not self._tasks:
            self.prepare(task)
        self._is_begun = True
        lines = self._lines()
        first = next(lines, None)
        assert isinstance(first, Digest)
        return Reading(first.digest, (line.chunks for line in lines if isinstance(line, Chunks)))

    def _lines(self) -> Iterator[Line]:
        """Yield the lines about a file up to its end. Raises Unreadable."""
        process = self._process
        assert process is not None
        while text := _pipe(process.stdout).readline():
            line = msgspec.json.decode(text, type=Line)
            if isinstance(line, End):
                self._is_begun = False
                self._tasks.popleft()
                if line.error:
                    raise Unreadable(line.error)
                return
            yield line
        raise Unreadable(self._restart(process))

    def _restart(self, process: subprocess.Popen[bytes]) -> str:
        """Return why the process ended at the first of its tasks, and have another one started for the others."""
        _, *others = self._tasks or (None,)
        self.close()
        for task in others:
            self.prepare(task)
        if process.returncode >= 0:
            return "its reader failed"
        number = signal.Signals(-process.returncode)
        return CRASHES.get(number, f"its reader crashed: {number.name}")

    def interrupt(self) -> None:
        """Kill the process, from any thread: the file that it reads is unreadable then."""
        if process := self._process:
            process.kill()

    def close(self) -> None:
        """End the process, and forget its tasks."""
        process, self._process, self._is_begun = self._process, None, False
        self._tasks.clear()
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", START, str(ROOM.parent), str(ROOM)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
