"""Reads RTF documents as headings and blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .charsets import codec_of
from .outline import BETWEEN_CELLS, Outline, Unreadable
from .package import lines_of

TOKEN = re.compile(
    rb"\\(?P<word>[A-Za-z]{1,32})(?P<number>-?[0-9]{1,9})? ?|\\'(?P<byte>[0-9A-Fa-f]{2})|\\(?P<sign>[^A-Za-z])"
    rb"|(?P<group>[{}])|[\r\n\0]+|(?P<text>[^\\{}\r\n\0]+)",
    re.S,
)
CHARSETS = {
    **{2: "symbol", 77: "mac_roman", 128: "cp932", 129: "cp949", 130: "johab", 134: "gb18030", 136: "big5hkscs"},
    **{161: "cp1253", 162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257", 204: "cp1251"},
    **{222: "cp874", 238: "cp1250", 255: "cp437"},
}
"""The encodings of fonts, by character set number."""
SIGNS = {
    **{"tab": "\t", "line": "\n", "emdash": "—", "endash": "–", "emspace": " ", "enspace": " ", "qmspace": " "},
    **{"lquote": "‘", "rquote": "’", "ldblquote": "“", "rdblquote": "”", "bullet": "•", "page": " ", "lbr": "\n"},
}
ESCAPES = {b"~": "\u00a0", b"_": "-", b"\\": "\\", b"{": "{", b"}": "}", b"\t": "\t"}
UNREAD = {
    *("colortbl", "fldinst", "nonshppict", "objdata", "filetbl", "revtbl", "rsidtbl", "template", "bkmkstart", "bkmkend"),
    *("xe", "tc", "shprslt", "ftnsep", "ftnsepc", "aftnsep", "aftnsepc", "private", "generator", "info", "themedata"),
}
LEFT_OUT = {"pict": "pictures", "annotation": "comments"}
"""Groups whose text is left out on purpose, mapped to the kind under which it is counted."""
EDGES = {f"{edge}{kind}" for edge in ("header", "footer") for kind in ("", "l", "r", "f")}
STARRED = {"shpinst", "shptxt", "annotation", "shppict", "listtext", "pntext", "footnote"}
"""Groups that later versions of RTF added, marked for old readers to skip. This reader reads them."""
HEADING = re.compile(r"heading (\d)")
LEVELS = 9
UTF_8 = 65001  # the Windows code page of UTF-8
MAX_GROUPS = 10_000  # nested groups


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a group.

    kind: what its text is used for; empty for text of the document.
    codec: the encoding of its font; empty for the default.
    skipped: how many fallback characters to skip after each Unicode character.
    hidden: empty if the text is kept; otherwise the kind of left-out text, under which its letters are counted.
    """

    kind: str = ""
    codec: str = ""
    skipped: int = 1
    hidden: str = ""


@dataclass(slots=True)
class _Paragraph:
    """The properties of a paragraph, which `pard` resets. level: the level of a heading, from 1; 0 for text."""

    level: int = 0
    is_cell: bool = False


def read_rtf(data: bytes, outline: Outline) -> None:
    """Add the headings and blocks of an RTF document. Raises Unreadable."""
    if not data.lstrip()[:5] == b"{\\rtf":
        raise Unreadable("it is not an RTF document")
    _RtfReader(outline).read(data)


class _RtfReader:
    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._state, self._stack = _State(), [_State()]
        self._codec = "cp1252"  # the file's encoding
        self._codecs: dict[int, str] = {}  # encodings of fonts, by number
        self._levels: dict[int, int] = {}  # heading levels of styles, by number
        self._font = self._default_font = self._style = self._to_skip = 0
        self._is_starred = False
        self._bytes = bytearray()  # not decoded yet, because a letter may have several bytes
        self._texts: dict[str, list[str]] = {}  # the current texts, by kind
        self._notes: list[str] = []  # footnotes of the current paragraph
        self._waiting: list[str] = []  # notes to add after the list or the table
        self._num_notes = 0
        self._edges: dict[str, None] = {}
        self._paragraph = _Paragraph()
        self._marker = ""
        self._items: list[str] = []
        self._cells: list[str] = []
        self._rows: list[str] = []

    def read(self, data: bytes) -> None:
        for token in TOKEN.finditer(data):
            if token["text"] is not None:
                self._add_bytes(token["text"])
            elif token["byte"] is not None:
                self._add_bytes(bytes([int(token["byte"], 16)]))
            elif token["group"]:
                self._flush_bytes()
                self._to_skip = 0
                self._begin() if token["group"] == b"{" else self._end()
            elif token["word"]:
                number = int(token["number"]) if token["number"] else None
                self._add_word(token["word"].decode(), number)
            elif token["sign"]:
                self._add_sign(token["sign"])
        self._end_paragraph()
        self._flush()
        for text in self._edges:
            self._outline.add_block(text)

    # ---- groups --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if len(self._stack) > MAX_GROUPS:
            raise Unreadable(f"it has more than {MAX_GROUPS:,} nested groups")
        self._stack.append(self._state)
        self._is_starred = False

    def _end(self) -> None:
        kind = self._state.kind
        self._state = self._stack.pop() if len(self._stack) > 1 else self._state
        if kind != self._state.kind or kind == "stylesheet":
            self._end_kind(kind)

    def _end_kind(self, kind: str) -> None:
        """Use the text of a finished group that is not part of a paragraph."""
        text = " ".join(self._take(kind).split())
        if kind == "stylesheet":
            if named := HEADING.match(text.lower()):
                self._levels[self._style] = int(named[1])
        elif kind == "footnote":
            self._num_notes += 1
            self._notes.append(f"[{self._num_notes}] {text}")
            self._texts.setdefault(self._state.kind, []).append(f"[{self._num_notes}]")
        elif kind == "listtext":
            self._marker = text if any(letter.isalnum() for letter in text) else "-"
        elif kind in EDGES:
            if text in self._edges:
                self._outline.leave_out("running_heads", text)
            elif text:
                self._edges[text] = None
        elif kind in LEFT_OUT:
            self._outline.leave_out(LEFT_OUT[kind], text)

    def _take(self, kind: str) -> str:
        """Return the collected text of a kind, and reset it."""
        text = "".join(self._texts.pop(kind, []))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    # ---- text ----------------------------------------------------------------------------------------------------------

    def _add_bytes(self, text: bytes) -> None:
        if self._to_skip:
            skipped = min(self._to_skip, len(text))
            self._to_skip -= skipped
            text = text[skipped:]
        self._bytes += text

    def _flush_bytes(self) -> None:
        if self._bytes:
            codec = self._state.codec or self._codecs.get(self._default_font, "") or self._codec
            text = self._bytes.decode("latin-1" if codec == "symbol" else codec, "replace")
            self._bytes.clear()
            self._add(text)

    def _add(self, text: str) -> None:
        state = self._state
        if state.kind in ("unread", "fonttbl"):
            return
        if state.hidden and not state.kind:
            self._outline.leave_out(state.hidden, text)
            return
        self._texts.setdefault(state.kind, []).append(text)

    def _add_sign(self, sign: bytes) -> None:
        self._flush_bytes()
        if sign == b"*":
            self._is_starred = True
        elif sign in b"\r\n":
            self._end_paragraph()
        elif text := ESCAPES.get(sign, ""):
            self._add(text)

    def _add_word(self, word: str, number: int | None) -> None:
        self._flush_bytes()
        if self._is_starred:
            self._is_starred = False
            if word not in STARRED and word not in LEFT_OUT:
                self._state = replace(self._state, kind="unread")
                return
        if self._state.kind == "unread":
            return
        if word == "u":
            self._add(chr((number or 0) & 0xFFFF))
            self._to_skip = self._state.skipped
        elif text := SIGNS.get(word):
            self._add(text)
        elif word in UNREAD:
            self._state = replace(self._state, kind="unread")
        elif word in LEFT_OUT or word in EDGES or word in ("fonttbl", "stylesheet", "footnote"):
            self._state = replace(self._state, kind=word)
        elif word in ("listtext", "pntext"):
            self._state = replace(self._state, kind="listtext")
        elif word in ("v", "deleted"):
            kind = "hidden" if word == "v" else "deleted"
            self._state = replace(self._state, hidden=kind if number != 0 else "")
        elif word == "plain":
            self._state = replace(self._state, hidden="", codec="")
        else:
            self._add_property(word, 0 if number is None else number)

    def _add_property(self, word: str, number: int) -> None:
        """Apply a property to the following letters or the current paragraph."""
        kind = self._state.kind
        if word == "ansicpg":
            self._codec = codec_of("utf-8" if number == UTF_8 else f"cp{number}") or self._codec
        elif word == "deff":
            self._default_font = number
        elif word == "mac":
            self._codec = "mac_roman"
        elif word == "uc":
            self._state = replace(self._state, skipped=max(number, 0))
        elif word == "f":
            self._font = number
            self._state = replace(self._state, codec=self._codecs.get(number, ""))
        elif word == "fcharset" and kind == "fonttbl":
            self._codecs[self._font] = CHARSETS.get(number, "")
        elif word == "s" and kind == "stylesheet":
            self._style = number
        elif word == "outlinelevel" and kind == "stylesheet":
            self._levels.setdefault(self._style, number + 1 if number < LEVELS else 0)
        elif word in ("par", "sect", "cell", "row", "nestcell", "nestrow"):
            self._end_part(word)
        elif not kind and word == "pard":
            self._paragraph = _Paragraph()
        elif not kind and word == "intbl":
            self._paragraph.is_cell = True
        elif not kind and word == "s":
            self._paragraph.level = self._levels.get(number, 0)
        elif not kind and word == "outlinelevel":
            self._paragraph.level = number + 1 if number < LEVELS else 0

    # ---- paragraphs ----------------------------------------------------------------------------------------------------

    def _end_part(self, word: str) -> None:
        if self._state.kind or word == "nestcell" or (word == "par" and self._paragraph.is_cell):
            self._add(" ")
        elif word == "cell":
            self._cells.append(" ".join(self._take("").split()))
            self._marker = ""
        elif word == "row":
            line = BETWEEN_CELLS.join(self._cells).rstrip(BETWEEN_CELLS)
            self._rows += [line] if line else []
            self._waiting += self._notes
            self._cells, self._notes = [], []
        elif word == "nestrow":
            self._add(" ")
        else:
            self._end_paragraph()

    def _end_paragraph(self) -> None:
        text = lines_of(self._take(""))
        marker, self._marker = self._marker, ""
        if not text:
            return
        notes, self._notes = self._notes, []
        if self._rows or not marker or self._paragraph.level:
            self._flush()
        if self._paragraph.level:
            numbered = f"{marker} " if any(letter.isalnum() for letter in marker) else ""
            self._outline.add_heading(self._paragraph.level, numbered + text)
        elif marker:
            self._items.append(f"{marker} {text}")
        else:
            self._outline.add_block(text, has_lines="\n" in text)
        self._waiting += notes
        if not self._items:
            self._add_notes()

    def _flush(self) -> None:
        """Add the current list or table, then its notes."""
        if self._cells:
            self._rows.append(BETWEEN_CELLS.join(self._cells).rstrip(BETWEEN_CELLS))
        for lines, head in ((self._rows, "".join(self._rows[:1])), (self._items, "")):
            self._outline.add_block("\n".join(lines), has_lines=True, head=head)
        self._rows, self._items, self._cells = [], [], []
        self._add_notes()

    def _add_notes(self) -> None:
        for note in self._waiting:
            self._outline.add_block(note)
        self._waiting = []
