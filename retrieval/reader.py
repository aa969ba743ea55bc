"""The child process that reads files and cuts them into chunks, within limits of memory and time.

A broken PDF can crash the code that reads it, and a small file can unpack to gigabytes. Such a file ends only the child
process: its transaction is rolled back, the file counts as unreadable, and another process is started. The child process
also cuts and stores the chunks. In the server's process, this work would hold the interpreter's lock, and the engine would
have to wait.

Each line of the input is a `ReadTask`. The process answers with a `ReadStep` after each batch of chunks, and with the result
after each file.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePath

import msgspec

from .chunks import Chunk, Sizes, cut
from .docx import read_docx
from .epub import read_epub
from .files import read_bytes
from .headings import read_org, read_rst
from .html import read_html
from .mail import read_mail
from .markdown import read_markdown, read_table, read_text
from .notebook import read_notebook
from .opendocument import read_opendocument
from .outline import Outline, Unreadable
from .package import OLD_FORMAT
from .pdf import OCR, read_pdf
from .process import TASKS, Broken, Failed, Line, ReadStep, ReadTask, Stored
from .rtf import read_rtf
from .sheets import read_xls, read_xlsx
from .slides import read_pptx
from .writing import MOST_VECTORS, StoredFile, connect, put_file, put_stamp

# ---- The formats by suffix. A file with another suffix is read as text if it is text. -----------------------------------

Format = Callable[[bytes, Outline], None]


def _read_mail(data: bytes, outline: Outline) -> None:
    read_mail(data, outline, _read_as)


def _read_old(format: str) -> Format:
    """Return a reader that rejects an old format, but reads RTF, HTML or text with the same suffix.

    format: the format that the error recommends.
    """

    def read(data: bytes, outline: Outline) -> None:
        if data.lstrip()[:5] == b"{\\rtf":
            read_rtf(data, outline)
        elif data.startswith(OLD_FORMAT):
            raise Unreadable(f"it is in a format that is not read: save it as {format}")
        elif data.lstrip()[:1] == b"<":
            read_html(data, outline)
        else:
            read_text(data, outline)

    return read


def _refuse(reason: str) -> Format:
    """Return a reader that rejects every file."""

    def read(data: bytes, outline: Outline) -> None:
        raise Unreadable(reason)

    return read


PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".heic")

FORMATS: dict[str, Format] = {
    **dict.fromkeys((".md", ".markdown"), read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    ".pdf": read_pdf,
    **dict.fromkeys((".docx", ".docm", ".dotx"), read_docx),
    **dict.fromkeys((".csv", ".tsv"), read_table),
    **dict.fromkeys((".xlsx", ".xlsm", ".xltx"), read_xlsx),
    **dict.fromkeys((".xls", ".xlsb", ".xlt"), read_xls),
    **dict.fromkeys((".pptx", ".pptm", ".ppsx", ".potx"), read_pptx),
    **dict.fromkeys((".odt", ".odp", ".ods", ".ott", ".otp", ".ots", ".fodt", ".fodp", ".fods"), read_opendocument),
    ".epub": read_epub,
    ".ipynb": read_notebook,
    **dict.fromkeys((".eml", ".mht", ".mhtml"), _read_mail),
    ".rtf": read_rtf,
    **dict.fromkeys((".rst", ".rest"), read_rst),
    ".org": read_org,
    **dict.fromkeys((".doc", ".dot"), _read_old("DOCX")),
    **dict.fromkeys((".ppt", ".pps"), _read_old("PPTX")),
    ".msg": _read_old("EML"),
    ".pages": _refuse("it is in a format that is not read: save it as DOCX"),
    ".numbers": _refuse("it is in a format that is not read: save it as XLSX"),
    **dict.fromkeys(PICTURES, _refuse(f"it is a picture: {OCR}")),
}
RECORD_VECTORS = 100  # chunks of a log or a table that get a vector: the word search finds all rows


BYTES = 3 << 29  # the most memory of the process
BATCH = 64  # chunks in a step
NICENESS = 12  # while the engine computes on the same cores, this process gets about 6 % of one core


def main(database: str) -> None:
    """Answer the tasks on standard input until it ends."""
    _bound_memory()
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICENESS)
    connection = None
    for line in sys.stdin.buffer:
        task = TASKS.decode(line)
        _bound_time(task.seconds)
        try:
            connection = connection or connect(Path(database), creates=False)
            answer = _read(task, connection)
        except (sqlite3.Error, OSError) as error:  # errors of the database: `_read` handles the file's
            answer = Broken(str(error))
        _bound_time(0)
        _write(answer)


def _bound_memory() -> None:
    with suppress(ImportError, ValueError):  # Windows has no limits; macOS may refuse the memory limit
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def _bound_time(seconds: float) -> None:
    """Limit the processor time: after so many seconds, a signal ends the process, even inside a library. 0 for no limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _read(task: ReadTask, connection: sqlite3.Connection) -> Line:
    """Read a file and store it in the index. Raises sqlite3.Error."""
    try:
        data = read_bytes(task.root, task.parts)
        digest = blake2b(data, digest_size=16).hexdigest()
        if digest == task.known:
            put_stamp(connection, task.path, task.stamp)
            return Stored()
        outline = _outline(data, PurePath(task.path).suffix.lower())
        chunks = _step_by_step(cut(outline.sections, Sizes.around(task.tokens)))
        file = StoredFile(task.path, digest=digest, stamp=task.stamp, left_out=outline.left_out)
        return Stored(*put_file(connection, file, chunks, RECORD_VECTORS if outline.has_records else MOST_VECTORS))
    except Unreadable as error:
        return Failed(str(error))
    except OSError as error:
        return Failed(f"it cannot be opened: {error.strerror or error}")
    except MemoryError:
        return Failed(f"it takes more than {BYTES >> 20:,} MiB of memory to read")
    except sqlite3.Error:
        raise
    except Exception as error:  # an error in another library must not stop the next file
        return Failed(f"it cannot be read: {type(error).__name__}: {error}")


def _outline(data: bytes, suffix: str) -> Outline:
    """Return the text of a file. Raises Unreadable."""
    outline = Outline()
    _read_as(data, suffix, outline)
    if not outline.has_text:
        raise Unreadable("it has no text")
    return outline


def _read_as(data: bytes, suffix: str, outline: Outline) -> None:
    """Add a file with the reader for its suffix. Raises Unreadable."""
    FORMATS.get(suffix, read_text)(data, outline)


def _step_by_step(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield chunks, and report each batch to the server.

    If the server has ended, the report fails before the file's transaction is committed, so the transaction is rolled back.
    """
    chunks = iter(chunks)
    while batch := list(islice(chunks, BATCH)):
        yield from batch
        _write(ReadStep())


def _write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()
