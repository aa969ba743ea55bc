"""Reads files in a process of its own, with limits of time and memory, and behind all other work on the CPU.

A broken PDF can crash the code that reads it, and a small file can unpack to gigabytes. Here that ends this process alone:
the file is one that cannot be read, and another process is started. Chunks are cut here, too: in the server's process that
would hold the interpreter's lock, for which the engine would wait.

Each line that comes is a `Task`. The lines that go back are the file's digest, its chunks in batches, and the end.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from hashlib import blake2b
from itertools import islice

import msgspec

from ..chunks import Sizes, cut
from ..files import read_bytes
from .formats import FORMATS
from .messages import SECONDS, Chunks, Digest, End, Line, Task
from .section import Outline, Section, Unreadable
from .text import read_text

BYTES = 3 << 29  # of the process
BATCH = 64  # chunks of a line
NICENESS = 12  # the engine computes on the same cores: beside it about 6 % of one is left for this


def main() -> None:
    """Answer lines until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, in the midst of any code
        _answer(msgspec.json.decode(line, type=Task))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(task: Task) -> None:
    try:
        data = read_bytes(task.root, task.parts)
        digest = blake2b(data, digest_size=16).hexdigest()
        _write(Digest(digest))
        if digest != task.known:
            chunks = cut(_sections(data, task.suffix), Sizes.around(task.tokens))
            while batch := list(islice(chunks, BATCH)):
                _write(Chunks(batch))
    except Unreadable as error:
        _write(End(str(error)))
    except OSError as error:
        _write(End(f"it cannot be opened: {error.strerror or error}"))
    except MemoryError:
        _write(End(f"it takes more than {BYTES >> 20:,} MiB of memory to read"))
    except Exception as error:  # of another library: the next file is read all the same
        _write(End(f"it cannot be read: {type(error).__name__}: {error}"))
    else:
        _write(End())


def _sections(data: bytes, suffix: str) -> list[Section]:
    """Return the sections of a file. Raises Unreadable."""
    outline = Outline()
    FORMATS.get(suffix, read_text)(data, outline)
    if not outline.has_text:
        raise Unreadable("it has no text")
    return outline.sections


def _write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()
