"""Reads e-mails, and web pages that a browser saved as one file (MHTML)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from email import message_from_bytes
from email.errors import HeaderParseError, MessageError
from email.header import decode_header, make_header
from email.message import Message
from pathlib import PurePath

from selectolax.lexbor import LexborHTMLParser

from .charsets import decode, label_of
from .html import read_markup
from .markdown import add_paragraphs, normalise_lines
from .outline import Outline, Unreadable

Read = Callable[[bytes, str, Outline], None]
"""Adds a file to an outline, given its bytes and its suffix. Raises Unreadable."""

HEADERS = ("From", "To", "Cc", "Date", "Snapshot-Content-Location")
NAMES = {"Snapshot-Content-Location": "Address"}
SAVED = "<Saved by"  # a browser writes this in place of a sender
ATTACHMENT = "embedded_files"
PICTURE = "image/"
MAX_INSIDE = 3  # nested mails
MAX_PARTS = 1000
HALF = 0.5  # of the HTML's letters: a plain text with fewer letters is not the same text
TOO_DEEP = "it has too many mails nested in each other"


def read_mail(data: bytes, outline: Outline, read: Read) -> None:
    """Add a mail: its headers, its text and its attachments. read: adds an attachment. Raises Unreadable."""
    try:
        message = message_from_bytes(data)
        if not message.keys():
            raise Unreadable("it is not a mail: it has no headers")
        _Mail(outline, read).add(message, 0)
    except RecursionError:
        raise Unreadable(TOO_DEEP) from None


class _Mail:
    def __init__(self, outline: Outline, read: Read) -> None:
        self._outline, self._read = outline, read
        self._num_parts = 0
        self._unread: list[str] = []  # names of attachments

    def add(self, message: Message, depth: int) -> None:
        """Add a mail and its attachments. depth: the number of mails around this one."""
        shift = self._outline.shift
        if subject := _header(message, "Subject"):
            self._outline.add_heading(1, subject)
            self._outline.shift = shift + 1
        headers = ((NAMES.get(name, name), _header(message, name)) for name in HEADERS)
        lines = [f"{name}: {value}" for name, value in headers if value and SAVED not in value]
        self._outline.add_block("\n".join(lines), has_lines=True)
        self._add_part(message, depth)
        if self._unread:
            self._outline.add_block(f"Attachments that are not read: {', '.join(self._unread)}")
            self._unread = []
        self._outline.shift = shift

    def _add_part(self, part: Message, depth: int) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise Unreadable(f"it has more than {MAX_PARTS:,} parts")
        kind, inner = part.get_content_type(), _inner(part)
        if kind in ("application/pkcs7-mime", "application/x-pkcs7-mime", "multipart/encrypted"):
            raise Unreadable("it is an encrypted or a signed mail without a text: save it as text")
        if kind == "message/rfc822":
            for mail in inner:
                self._add_inner(mail, depth)
        elif kind == "multipart/alternative":
            self._add_best(inner, depth)
        elif kind == "multipart/related" and inner:
            root = next((child for child in inner if child.get_content_maintype() != "image"), inner[0])
            self._add_part(root, depth)
            self._add_attached([child for child in inner if child is not root], depth)
        elif inner:
            for child in inner:
                self._add_part(child, depth)
        elif part.get_content_disposition() == "attachment" or _filename(part) or not kind.startswith("text/"):
            self._add_attachment(part, depth)
        else:
            self._add_text(part)

    def _add_best(self, parts: Sequence[Message], depth: int) -> None:
        """Add one version of a text: the plain text if it has at least half of the HTML's letters, else the HTML."""
        plain = next((part for part in parts if part.get_content_type() == "text/plain"), None)
        others = [part for part in parts if part.get_content_type() == "text/html" or part.is_multipart()]
        rich = others[-1] if others else None
        if plain is not None and (rich is None or _letters(_plain_text(plain)) >= HALF * _letters(_rich_text(rich))):
            self._add_text(plain)
            self._add_attached(others, depth)
        elif rich is not None:
            self._add_part(rich, depth)
        elif parts:
            self._add_part(parts[-1], depth)

    def _add_attached(self, parts: Sequence[Message], depth: int) -> None:
        """Add only the attachments in parts, not the text."""
        for part in (inner for outer in parts for inner in outer.walk()):
            if part.get_content_disposition() == "attachment" and not part.is_multipart():
                self._add_attachment(part, depth)

    def _add_text(self, part: Message) -> None:
        if part.get_content_type() in ("text/html", "application/xhtml+xml"):
            read_markup(_html(part), self._outline)
        else:
            add_paragraphs(normalise_lines(_plain_text(part)), self._outline, is_file=False)

    def _add_inner(self, mail: Message, depth: int) -> None:
        if depth < MAX_INSIDE:
            unread, self._unread = self._unread, []
            self.add(mail, depth + 1)
            self._unread = unread
        else:
            self._unread.append(_header(mail, "Subject") or "a mail")
            self._outline.leave_out(ATTACHMENT, "".join(_plain_text(part) for part in mail.walk()))

    def _add_attachment(self, part: Message, depth: int) -> None:
        """Add an attached file under its name. If the file cannot be read, only its name is kept."""
        data, name = _bytes(part), _filename(part)
        suffix = PurePath(name).suffix.lower() or (".txt" if part.get_content_type() == "text/plain" else "")
        if suffix == ".eml":
            self._add_inner(message_from_bytes(data), depth)
            return
        inner = Outline()
        try:
            if not part.get_content_type().startswith(PICTURE):
                self._read(data, suffix, inner)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # an error in another library: the mail is read without the attachment
            inner = Outline()
        if not inner.has_text:
            self._unread += [name] if name else []
            self._outline.leave_out(ATTACHMENT, data.decode("latin-1"))
            return
        self._outline.add_heading(1, name)
        self._outline.add_outline(inner)


def _inner(part: Message) -> list[Message]:
    """Return the parts inside a part of a mail.

    If there are no parts inside, return an empty list, even if the type is `multipart`.
    """
    payload = part.get_payload()
    return [inner for inner in payload if isinstance(inner, Message)] if isinstance(payload, list) else []


def _bytes(part: Message) -> bytes:
    data = part.get_payload(decode=True)
    return data if isinstance(data, bytes) else b""


def _filename(part: Message) -> str:
    """Return the file name of a part; empty if it has none or Python cannot read it (a charset with a NUL, for example)."""
    try:
        return _decoded(part.get_filename() or "")
    except ValueError:
        return ""


def _charset(part: Message) -> str:
    try:
        return part.get_content_charset() or ""
    except ValueError:  # a charset with a NUL
        return ""


def _plain_text(part: Message) -> str:
    return decode(_bytes(part), _charset(part))


def _html(part: Message) -> str:
    data = _bytes(part)
    return decode(data, _charset(part) or label_of(data))


def _rich_text(part: Message) -> str:
    """Return the text of the first HTML page in a part; empty if there is none."""
    found = next((inner for inner in part.walk() if inner.get_content_type() == "text/html"), None)
    body = LexborHTMLParser(_html(found)).body if found is not None else None
    return body.text(deep=True) if body is not None else ""


def _letters(text: str) -> int:
    return sum(map(len, text.split()))


def _header(message: Message, name: str) -> str:
    return _decoded(str(message.get(name, "")))


def _decoded(value: str) -> str:
    """Return a decoded header or file name."""
    try:
        text = str(make_header(decode_header(value)))
    except (HeaderParseError, MessageError, LookupError, ValueError):  # an unknown encoding
        text = value
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
