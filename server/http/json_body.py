"""Checks that a JSON body is valid Unicode and does not have more elements than any context can hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import Raw

from .api_errors import RequestError

MAX_COMMAS, MAX_BRACKETS = 1 << 20, 1 << 18  # of a body; decoding so many stops all other threads for 0.1 s
MAX_TEXTS = 2 * (MAX_COMMAS + MAX_BRACKETS)  # quotes: each comma or bracket may bring a name and a value
ELEMENTS = {"commas": ((b",",), MAX_COMMAS), "brackets": ((b"[", b"{"), MAX_BRACKETS), "texts": ((b'"',), MAX_TEXTS)}
WINDOW = 256 << 10  # bytes of one search, during which other threads wait


def check_elements(*texts: bytes, what: str = "the body", param: str | None = None) -> None:
    """Raise RequestError 413 if JSON texts have more elements (lists, objects, numbers, strings) than fit into any context.

    A string counts as one element. If the string is itself decoded as JSON, as a call's arguments are, check it separately.

    what: the name of the texts in the error's message.
    param: the error's `param`.
    """
    if sum(map(len, texts)) <= MAX_BRACKETS or _is_small(_count(texts)):
        return
    found = _count(piece for text in texts for piece in outside_strings(text))
    for name, (_, most) in ELEMENTS.items():
        if found[name] > most:
            raise RequestError(f"{what} has too many {name}: expected at most {most:,}", status=413, param=param)


def _count(texts: Iterable[bytes]) -> Counter[str]:
    """Count the elements of texts. Stop the count once the texts have too many elements."""
    found = Counter[str]()
    for text in texts:
        found.update({name: sum(map(text.count, marks)) for name, (marks, _) in ELEMENTS.items()})
        if not _is_small(found):
            break
    return found


def _is_small(found: Mapping[str, int]) -> bool:
    return all(found[name] <= most for name, (_, most) in ELEMENTS.items())


def outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield JSON text in pieces. Each string becomes one quotation mark (`"`), or nothing if a piece ends within it."""
    is_inside, cut = False, b""
    for start in range(0, len(text), WINDOW):
        # Once pairs of backslashes and then escaped quotes are removed, each remaining quote begins or ends a string.
        window = (cut + text[start : start + WINDOW]).replace(rb"\\", b"").replace(rb"\"", b"")
        cut = b"\\" if window.endswith(b"\\") else b""  # it may escape the first quote of the next window
        parts = window.split(b'"')
        yield b'"'.join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


# ---- Unicode: invalid bodies are repaired if the repair is clear, and refused otherwise. --------------------------------

MARK = b"\xef\xbb\xbf"  # the byte-order mark that some programs write at the start of a file
MOST_LEVELS = 8  # of a field's path in an error; each level takes one more search
LONGEST_PATH = 80  # characters

_HIGH, _LOW = (rb"\\u[dD]%b[0-9a-fA-F]{2}" % half for half in (rb"[89abAB]", rb"[c-fC-F]"))
LONE = re.compile(rb"%b(?!%b)|%b(?<!%b%b)" % (_HIGH, _LOW, _LOW, _HIGH, _LOW))
"""Matches the escape of one half of a surrogate pair if the other half is not next to it."""
LONGEST = len(rb"\ud83d\ude00")


def as_unicode(body: bytes) -> bytes:
    """Return a body without its byte-order mark, and with U+FFFD for each lone half of a surrogate pair.

    JavaScript creates lone halves when it cuts a text within a pair, and sends them as escapes. Raises RequestError for
    bytes that are not UTF-8. The error names the first wrong byte and the field with it.
    """
    text = body.removeprefix(MARK)
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            field, at = _field_of_no_text(text), error.start
            where = f"byte {at + len(body) - len(text):,} of the body{f', in {field},' if field else ''}"
            message = f"{where} is 0x{text[at]:02x}, which is not valid UTF-8 there: send UTF-8"
            raise RequestError(message, param=field or None, code="malformed_json") from None
    return whole_characters(text)


def whole_characters(text: bytes) -> bytes:
    """Return JSON text with U+FFFD in place of each lone half of a surrogate pair. The text's length stays the same."""
    if not any(begin in text for begin in (rb"\ud", rb"\uD")):
        return text
    escapes, whole = text.replace(rb"\\", b"  "), bytearray()  # in `escapes`, each backslash begins an escape
    for start in range(0, len(text), WINDOW):
        for found in LONE.finditer(escapes, start, start + WINDOW + LONGEST):
            if found.start() < start + WINDOW:  # the search also saw the text after this match
                whole = whole or bytearray(text)
                whole[found.start() : found.start() + 6] = rb"\ufffd"
    return bytes(whole) or text


def _field_of_no_text(body: bytes) -> str:
    """Return the path of the first value that is not UTF-8, such as `messages[1].content`.

    Return an empty text if the path is unknown.
    """
    path, value = "", body
    for _ in range(MOST_LEVELS):
        inner = _inner(value)
        name = next((name for name, one in inner.items() if not _is_text(one)), None)
        if name is None:
            break
        path, value = path + name, inner[name]
    return path.lstrip(".")[:LONGEST_PATH]


def _inner(value: bytes) -> dict[str, bytes]:
    """Return the values in an object or a list, by the steps that lead to them in a path (`.name` or `[1]`).

    Return an empty dict if `value` is neither an object nor a list, or if it cannot be decoded.
    """
    try:
        if value.lstrip()[:1] == b"[":
            return {f"[{at}]": bytes(one) for at, one in enumerate(msgspec.json.decode(value, type=list[Raw]))}
        return {f".{name}": bytes(one) for name, one in msgspec.json.decode(value, type=dict[str, Raw]).items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
