"""Decodes files.

Several ways to find the encoding are tried in this order: a byte order mark, bytes that are typical of UTF-16, ISO-2022-JP
or UTF-8, a label in the file, and a comparison of the texts that several encodings give. The first way that succeeds
decides.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from unicodedata import category

from charset_normalizer import from_bytes

from .languages import votes_of
from .outline import Unreadable
from .terms import words_of

MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
SAMPLE = 8192  # bytes that show whether a file is text or binary data
CONTROL_BYTES = bytes({*range(32), 127} - {8, 9, 10, 11, 12, 13, 27})
MOST_CONTROLS = 0.02  # of the bytes of a text: a file with more control bytes is binary
SHIFTS = (b"\x1b$B", b"\x1b$@")  # escape sequences of ISO-2022-JP, whose bytes are all ASCII
ASKED = 1 << 15  # bytes from which an encoding is guessed, of lines that are not ASCII
LATIN = ("cp1252", "cp1250", "cp1254", "iso8859_2", "cp1257")
GUESSED = ("gb18030", "big5", "cp932", "euc_jp", "cp949", "cp1251", "koi8_r", "cp1253", "cp1255", "cp1256")
"""The encodings to try without a label: `LATIN`, where the first wins a tie, and `GUESSED` for all other scripts."""

IN_A_ROW = re.compile(rb"[\x80-\xff]+")
LATIN_IN_A_ROW = 2  # most bytes beyond ASCII in a row, on average: other scripts have whole words of them
NO_LATIN = re.compile(rb"[\x81-\x83\x88\x89\x8b\x8d\x8f\x90\x98\x9b\x9d]")  # bytes that Latin texts hardly have
MOST_SIGNS = 0.1  # the most of these, as a share of the bytes beyond ASCII


def decode(data: bytes, label: str = "") -> str:
    """Return a file's text. label: the encoding that the file names; empty if it names none.

    Raises Unreadable for binary data, and if the encoding cannot be found.
    """
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    if b"\0" in data[:SAMPLE]:
        return data.decode(_wide(data[:SAMPLE]), "replace")
    if data.isascii() and any(shift in data for shift in SHIFTS):
        return data.decode("iso2022_jp_2", "replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return _mostly_utf8(data) or data.decode(codec_of(label) or _guess(data), "replace")


def _wide(sample: bytes) -> str:
    """Return the encoding of UTF-16 text without a byte order mark: `utf-16-le` or `utf-16-be`.

    Raises Unreadable if the sample is not UTF-16 text.

    sample: the start of a file. Since the sample has zero bytes, the file is UTF-16 text or binary data.
    """
    zeros = sample[1::2].count(0), sample[::2].count(0)
    order = ("utf-16-le", "utf-16-be") if zeros[0] >= zeros[1] else ("utf-16-be", "utf-16-le")
    for encoding in order:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(sample)
        except UnicodeDecodeError:
            continue
        if not any(category(letter) in ("Cc", "Cn", "Co") for letter in set(text) - set("\t\n\v\f\r")):
            return encoding
    raise Unreadable("it is binary, and of no format that is read")


def _mostly_utf8(data: bytes) -> str:
    """Return the text of damaged UTF-8, with U+FFFD for damaged letters; empty if most letters beyond ASCII are damaged."""
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd") - data.count("\ufffd".encode())
    letters = len(text) - len(text.encode("ascii", "ignore"))
    return text if letters - bad >= bad else ""


def _guess(data: bytes) -> str:
    """Return the likeliest encoding of a text. Raises Unreadable."""
    sample = data[:SAMPLE]
    if len(sample) - len(sample.translate(None, CONTROL_BYTES)) > MOST_CONTROLS * len(sample):
        raise Unreadable("it is binary, and of no format that is read")
    lines: list[bytes] = []
    size = 0
    for line in data.splitlines(keepends=True):
        if not line.isascii():
            lines.append(line[: ASKED - size])
            size += len(line)
            if size >= ASKED:
                break
    text = b"".join(lines)
    runs = IN_A_ROW.findall(text)
    size = sum(map(len, runs))
    encodings: Sequence[str] = LATIN
    if size > LATIN_IN_A_ROW * len(runs) or len(NO_LATIN.findall(text)) > MOST_SIGNS * size:
        encodings = [match.encoding for match in from_bytes(text, cp_isolation=[*GUESSED], enable_fallback=False)]
    if not encodings:
        raise Unreadable("its encoding is not known: save it as UTF-8")
    return max(encodings, key=lambda encoding: _likelihood(text.decode(encoding, "replace")))  # of equal scores, the first


def _likelihood(text: str) -> tuple[int, int]:
    """Return a score of a decoded text. The right encoding should give the text with the highest score.

    The score is the number of different frequent words of one language. Of two texts with equal scores, the text with fewer
    signs inside words is better.
    """
    signs = sum(
        sign > "\x7f" and not sign.isalpha() and before.isalpha() and after.isalpha()
        for before, sign, after in zip(text, text[1:], text[2:], strict=False)
    )
    return max(votes_of(words_of(text)).values(), default=0), -signs


# ---- Labels: the encodings that a page names, as WHATWG's Encoding Standard reads them. ---------------------------------

LABELS = {
    "x-sjis": "cp932",
    "x-x-big5": "big5",
    "cn-big5": "big5",
    "x-gbk": "gbk",
    "gb_2312": "gbk",
    "x-euc-jp": "euc_jp",
    "windows-31j": "cp932",
    "gb_2312-80": "gbk",
    "csgb2312": "gbk",
    "windows-874": "cp874",
    "dos-874": "cp874",
    "koi": "koi8_r",
    "koi8": "koi8_r",
    "koi8-ru": "koi8_u",
    "logical": "iso8859_8",
    "iso-8859-8-i": "iso8859_8",
    "iso-8859-8-e": "iso8859_8",
    "iso-8859-6-i": "iso8859_6",
    "iso-8859-6-e": "iso8859_6",
    "sun_eu_greek": "iso8859_7",
    "x-mac-roman": "mac_roman",
    "x-mac-cyrillic": "mac_cyrillic",
    "x-mac-ukrainian": "mac_cyrillic",
    "unicode-1-1-utf-8": "utf-8",
    "x-unicode20utf8": "utf-8",
    **{f"x-cp125{number}": f"cp125{number}" for number in range(9)},
}
"""Labels that Python does not know."""

READ_AS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "utf-16": "utf-8",  # in UTF-16, the label itself could not be read
    "utf-16-le": "utf-8",
    "utf-16-be": "utf-8",
    "utf-32": "utf-8",
    "utf-7": "",  # a way to hide text
    **dict.fromkeys(("unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined"), ""),  # Python's own
}
"""By Python's name of an encoding: the larger encoding to use instead; empty if the encoding is refused."""

MARKUP = re.compile(rb"<(?:!--|(?P<skipped>script|style|title|textarea)\b|(?P<meta>meta)[\s/])", re.I)
CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.I)
DECLARATION = re.compile(rb"\s{0,100}<\?xml\b[^>]{0,200}?\bencoding\s*=\s*[\"']([\w.:-]{1,40})")
LABELLED = 1 << 20  # bytes of a page in which a label is looked for
META = 1000  # bytes of a `<meta>` element


def codec_of(label: str) -> str:
    """Return Python's name of the encoding that a label means in a web page; empty for an unknown label."""
    label = label.strip().lower()
    try:
        info = codecs.lookup(LABELS.get(label, label))
    except (LookupError, ValueError):
        return ""
    return READ_AS.get(info.name, info.name) if getattr(info, "_is_text_encoding", True) else ""


def label_of(page: bytes) -> str:
    """Return the encoding that a page names in its XML declaration or in a `<meta>`; empty if there is none.

    Labels in comments and scripts do not count.
    """
    if declared := DECLARATION.match(page):
        return declared[1].decode()
    at = 0
    while found := MARKUP.search(page, at, LABELLED):
        at = found.end()
        if found["meta"]:
            at = page.find(b">", at, at + META) + 1 or at + META
            if named := CHARSET.search(page, found.end(), at):
                return named[1].decode()
        else:
            close = b"</" + found["skipped"] if found["skipped"] else b"-->"
            at = _end(page, close, at)
            if at < 0:
                break
    return ""


def _end(page: bytes, close: bytes, at: int) -> int:
    """Return the end of a comment or an element, ignoring case; -1 if it never ends."""
    found = re.compile(re.escape(close), re.I).search(page, at, LABELLED)
    return found.end() if found else -1
