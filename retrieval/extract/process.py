"""The process in which files are read (see `reader`): started when it is needed first, and again after it has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

import msgspec

from ..chunks import Chunk
from ..files import FoundFile
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
    """Reads one file at a time. One thread at a time may use it; any thread may close it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_busy = False

    def start(self, file: FoundFile, known: str, tokens: int) -> Reading:
        """Begin to read a file. known: its digest in the index. tokens: of a chunk, about. Raises Unreadable."""
        if self._is_busy:  # the last file was given up in the midst of its lines
            self.close()
        process = self._process = self._process or _start()
        self._is_busy = True
        suffix = PurePath(file.path).suffix.lower()
        task = Task(root=str(file.folder.root), parts=file.parts, suffix=suffix, known=known, tokens=tokens)
        try:
            _pipe(process.stdin).write(msgspec.json.encode(task) + b"\n")
            _pipe(process.stdin).flush()
        except OSError:
            raise Unreadable(self._end(process)) from None
        lines = self._lines(process)
        first = next(lines, None)
        assert isinstance(first, Digest)
        return Reading(first.digest, (line.chunks for line in lines if isinstance(line, Chunks)))

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[Line]:
        """Yield the lines about a file up to its end. Raises Unreadable."""
        while text := _pipe(process.stdout).readline():
            line = msgspec.json.decode(text, type=Line)
            if isinstance(line, End):
                self._is_busy = False
                if line.error:
                    raise Unreadable(line.error)
                return
            yield line
        raise Unreadable(self._end(process))

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Return why the process ended, and have another one started for the next file."""
        process.kill()
        process.communicate()
        self._process, self._is_busy = None, False
        if process.returncode >= 0:
            return "its reader failed"
        number = signal.Signals(-process.returncode)
        return CRASHES.get(number, f"its reader crashed: {number.name}")

    def close(self) -> None:
        """End the process."""
        process, self._process, self._is_busy = self._process, None, False
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", START, str(ROOM.parent), str(ROOM)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
