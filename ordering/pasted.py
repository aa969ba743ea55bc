"""Lists of documents that programs paste into a text, found by the programs' templates.

A list is found only if all of it fits the template of a program, from the text before the first document to the end of the
last document. The time is linear in the length of the text: every repetition in a pattern has a limit, and only a few places
in a text are tried as the start of a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from .document import MOST_DOCUMENTS, Document, DocumentError

MOST_TRIES = 16  # lists of one format that are tried in a text: a list that does not fit may be read to the text's end
TOO_LONG = f"a request has at most {MOST_DOCUMENTS:,} documents"
TOO_MANY = f"{MOST_TRIES} lists begin in front of it"
NUMBER = "{number}"  # in a closing: the document's number
SPACE = re.compile(r"\s{0,64}")


@dataclass(frozen=True, slots=True)
class PastedFormat:
    """The template by which a program writes a list of documents into a text.

    mark: a text that each list contains.
    before: matches the text before the first document.
    opening: matches the start of each document. The pattern's groups `number` and `name` are the document's number and name.
    closing: the text at the end of each document; empty: a document ends where the next one begins.
    after: the text after the last document; empty: the list ends with the closing of the last document.
    separator: the text that is usually between two documents.
    has: a pattern that must occur in each document.
    is_fence: whether the documents are in code fences, so that each closing must be a line of its own.
    least: the fewest documents that a list may have.
    """

    name: str
    mark: str
    before: re.Pattern[str]
    opening: re.Pattern[str]
    closing: str = ""
    after: str = ""
    separator: str = "\n"
    has: re.Pattern[str] = field(default_factory=lambda: re.compile(""))
    is_fence: bool = False
    least: int = 1


FORMATS = (
    PastedFormat(
        "open-webui",
        '<source id="',
        re.compile(r"<context>\s{0,64}"),
        re.compile(r'<source id="(?P<number>\d{1,4})"(?: [a-z-]{1,20}="[^"<>\n]{0,400}"){0,6}>'),
        "</source>",
        "</context>",
    ),
    PastedFormat(
        "anythingllm",
        "[END CONTEXT ",
        re.compile(r"Context:\n\s{0,64}"),
        re.compile(r"\[CONTEXT (?P<number>\d{1,4})\]:?\n"),
        f"\n[END CONTEXT {NUMBER}]",
        separator="\n\n",
    ),
    PastedFormat(
        "claude",
        '<document index="',
        re.compile(r"<documents>\s{0,64}"),
        re.compile(r'<document index="(?P<number>\d{1,4})">'),
        "</document>",
        "</documents>",
        has=re.compile(r"<document_contents?>"),
    ),
    PastedFormat(
        "librechat",
        "</filename>",
        re.compile(r"(?:XML tags\.\s{0,64}<context>|to the conversation:)\s{0,64}"),
        re.compile(r"<file>\s{0,64}<filename>(?P<name>[^<>\n]{1,200})</filename>"),
        "</file>",
        separator="\n          ",
        has=re.compile(r"\A\s{0,64}<context>"),
        least=2,
    ),
    PastedFormat(
        "librechat",
        "<contextItem>",
        re.compile(r"</filename>\s{0,64}<context>\s{0,64}"),
        re.compile(r"<contextItem>"),
        "</contextItem>",
        "</context>",
        separator="\n            ",
    ),
    PastedFormat(
        "aider",
        "\n```",
        re.compile(r"(?:the files' contents\.|Do not edit these files!)\s{1,8}"),
        re.compile(r"(?P<name>[^\s`][^\n`]{0,199})\n```[\w+#.-]{0,20}\n"),
        "\n```",
        separator="\n\n",
        is_fence=True,
    ),
    PastedFormat(
        "continue",
        "\n```",
        re.compile(r"(?m:^)(?=```\S)"),
        re.compile(r"```(?:[\w+#-]{1,20} )?(?P<name>(?=[^\s`]{0,199}[./])[^\s`]{1,200})(?: \(\d{1,7}-\d{1,7}\))?\n"),
        "\n```",
        separator="\n\n",
        is_fence=True,
        least=2,
    ),
    PastedFormat(
        "llamaindex",
        "file_path: ",
        re.compile(r"(?m:^)-{21}\n"),
        re.compile(r"(?m:^)(?:page_label: [^\n]{0,100}\n)?file_path: (?P<name>[^\n]{1,200})\n\n"),
        after="\n---------------------",
        separator="\n\n",
    ),
    PastedFormat(
        "llamaindex",
        "Source ",
        re.compile(r"(?m:^)------\n"),
        re.compile(r"(?m:^)Source (?P<number>\d{1,4}):\n"),
        after="\n------",
        separator="\n\n\n",
    ),
    PastedFormat(
        "langchain",
        "Content: ",
        re.compile(r"(?m:^)=========\n"),
        re.compile(r"(?m:^)Content: "),
        after="\n=========",
        separator="\n\n",
        has=re.compile(r"\nSource: [^\n]{1,400}\Z"),
    ),
)
"""The formats, in the order in which they are tried: the first one that fits a text counts."""


@dataclass(frozen=True, slots=True)
class PastedList:
    """A list of documents at positions [start, stop) of a text, in the program's order, without duplicates.

    number_of: the program's number for each document, by the id that replaces the number; empty: the list has no numbers.
    is_named: whether the text of each document shows its id.
    """

    format: str
    start: int
    stop: int
    documents: tuple[Document, ...]
    number_of: Mapping[str, str]
    is_named: bool


@dataclass(frozen=True, slots=True)
class Untouched:
    """Text at position `start` that looks like a list of a known format, but is left as it is.

    why: the reason.
    """

    format: str
    start: int
    why: str


def find_pasted(text: str, most: int = MOST_DOCUMENTS) -> tuple[PastedList | None, list[Untouched]]:
    """Return the list of documents in a text, or None, and the lists that are left as they are.

    most: how many documents the list may have.

    If lists of several formats are found, the format that comes first in `FORMATS` is chosen. If several lists of this
    format are found, the last one is chosen, because an earlier one may be an example.
    """
    found: list[PastedList] = []
    untouched: list[Untouched] = []
    for read in (*(partial(_marked, format) for format in FORMATS), _numbered):
        for one in read(text):
            if isinstance(one, Untouched):
                untouched.append(one)
            else:
                found.append(one)
    if not found:
        return None, untouched
    taken = max((one for one in found if one.format == found[0].format), key=lambda one: one.start)
    if len(taken.documents) > most:
        return None, [*untouched, Untouched(taken.format, taken.start, TOO_LONG)]
    untouched += [
        Untouched(one.format, one.start, "another list of the message was taken") for one in found if one is not taken
    ]
    return taken, [one for one in untouched if not taken.start <= one.start < taken.stop]


# ---- Formats with marks. ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Block:
    """A document of a list in a text.

    body: the document's text between its opening and its closing.
    """

    opening: re.Match[str]
    body: str
    closing: str = ""

    @property
    def heading(self) -> str:
        """The document's opening, with {} in place of its number."""
        return self.opening[0] if self.number is None else "{}".join(self._around_number())

    @property
    def number(self) -> str | None:
        return self.opening.groupdict().get("number")

    @property
    def name(self) -> str | None:
        return self.opening.groupdict().get("name")

    def spelt(self, id: str) -> str:
        """Return the whole document, with an id in place of its number."""
        if self.number is None:
            return f"{self.opening[0]}{self.body}{self.closing}"
        return f"{id.join(self._around_number())}{self.body}{self.closing.replace(NUMBER, id)}"

    def _around_number(self) -> tuple[str, str]:
        start, stop = self.opening.span("number")
        return self.opening[0][: start - self.opening.start()], self.opening[0][stop - self.opening.start() :]


class _Unfit(Exception):
    """A text does not fit a format. The message says why."""


def _marked(format: PastedFormat, text: str) -> Iterator[PastedList | Untouched]:
    """Yield the lists of a format in a text, and the lists that begin like this format but do not fit it."""
    num_tried = end = 0
    for before in format.before.finditer(text) if format.mark in text else ():
        start = before.end()
        if start < end or not format.opening.match(text, start):
            continue
        if num_tried == MOST_TRIES:
            yield Untouched(format.name, start, TOO_MANY)
            return
        try:
            blocks, spaces, end = _closed(format, text, start) if format.closing else _open(format, text, start)
            if len(blocks) < format.least:
                continue
            yield _list(format, text, (start, end), blocks, spaces)
        except _Unfit as unfit:
            yield Untouched(format.name, start, str(unfit))
        num_tried += 1


def _closed(format: PastedFormat, text: str, start: int) -> tuple[list[_Block], list[str], int]:
    """Return the documents of a list in a format with closings. Raises _Unfit.

    Also return the white space after each document, and the position where the last document ends.
    """
    stop = _stop(format, text, start)
    blocks: list[_Block] = []
    spaces: list[str] = []
    at = end = start
    while opening := format.opening.match(text, at, stop):
        closing = format.closing.replace(NUMBER, opening.groupdict().get("number") or "")
        end = text.find(closing, opening.end(), stop)
        if end < 0:
            raise _Unfit("a document has no end")
        blocks.append(_Block(opening, text[opening.end() : end], format.closing))
        if not format.is_fence and format.opening.search(blocks[-1].body):
            raise _Unfit("a document begins within another")
        end += len(closing)
        if format.is_fence and (text[end : end + 1] not in ("", "\n", "\r") or blocks[-1].body.startswith("```")):
            raise _Unfit("a fence stands within a document")
        space = SPACE.match(text, end, stop)
        assert space is not None
        spaces.append(space[0])
        at = space.end()
    if format.after and at < stop:
        raise _Unfit("other text stands between the documents and the end of the list")
    return blocks, spaces, end


def _open(format: PastedFormat, text: str, start: int) -> tuple[list[_Block], list[str], int]:
    """Return the documents of a list in a format without closings. The result is as in `_closed`. Raises _Unfit."""
    stop = _stop(format, text, start)
    blocks: list[_Block] = []
    spaces: list[str] = []
    end = start
    for opening, following in pairwise([*format.opening.finditer(text, start, stop), None]):
        assert opening is not None
        whole = text[opening.end() : following.start() if following else stop]
        blocks.append(_Block(opening, body := whole.rstrip()))
        spaces.append(whole[len(body) :])
        end = opening.end() + len(body)
    return blocks, spaces, end


def _stop(format: PastedFormat, text: str, start: int) -> int:
    """Return the position where the documents of a list must have ended. Raises _Unfit."""
    if not format.after:
        return len(text)
    stop = text.find(format.after, start)
    if stop < 0:
        raise _Unfit(f"it does not end with {format.after.strip()}")
    return stop


def _list(
    format: PastedFormat, text: str, span: tuple[int, int], blocks: Sequence[_Block], spaces: Sequence[str]
) -> PastedList:
    """Check the documents of a list, and return the list.

    spaces: the white space after each document.

    Raises _Unfit.
    """
    if not all(format.has.search(block.body) for block in blocks):
        raise _Unfit("a document lacks a part")
    start, end = span
    if format.is_fence and spaces[-1].count("\n") < 2 and text[end:].strip():
        raise _Unfit("a fence may stand within the last document")
    between = set(spaces[:-1])
    separator = between.pop() if len(between) == 1 else format.separator
    stop = end + len(separator) if text.startswith(separator, end) else end
    return _listed(format.name, (start, stop), blocks, separator)


def _listed(format: str, span: tuple[int, int], blocks: Sequence[_Block], separator: str) -> PastedList:
    """Return documents as a list. Raises _Unfit."""
    if len(blocks) > MOST_DOCUMENTS:
        raise _Unfit(TOO_LONG)
    names = [block.name for block in blocks]
    by_name = None not in names and len(set(names)) == len(names)
    documents: dict[str, Document] = {}
    number_of: dict[str, str] = {}
    for block in blocks:
        try:
            made = Document.parse({"title": block.heading, "text": block.body, "id": block.name if by_name else None})
        except DocumentError:
            raise _Unfit("a document has no text, or half a character") from None
        spelt = block.spelt(made.id)
        document = Document(made.id, spelt, form=spelt + separator)
        if documents.setdefault(document.id, document).key != document.key:
            raise _Unfit("two documents have the same id")
        if block.number is not None:
            number_of.setdefault(document.id, block.number)
    is_named = by_name or bool(number_of)
    return PastedList(format, *span, tuple(documents.values()), number_of, is_named)


# ---- Paragraphs or lines that begin with a number in brackets. ----------------------------------------------------------

NUMBERED = "numbered"
FIRST = re.compile(r"(?:\A|\n\n|:\n)(?=\[[01]\] \S)")
ENTRY = re.compile(r"\[(?P<number>\d{1,3})\] (?=\S)")
CITED = re.compile(r"\[(\d{1,3})\]")
AFTER_LIST = re.compile(r"\s{0,64}(?:\Z|#{1,6} |---|===|</|(?:Question|Query|User|Answer)[^\n:]{0,40}:)")
"""Matches the text that may follow the last entry. Any other text might still be part of the entry."""


def _numbered(text: str) -> Iterator[PastedList | Untouched]:
    """Yield the lists of numbered entries in a text, and the lists whose end is unclear."""
    end = 0
    for num_tried, before in enumerate(FIRST.finditer(text) if "[1] " in text else ()):
        start = before.end()
        if num_tried == MOST_TRIES:
            yield Untouched(NUMBERED, start, TOO_MANY)
            return
        try:
            if start >= end and (found := _entries(text, start)):
                end = found.stop
                yield found
        except _Unfit as unfit:
            yield Untouched(NUMBERED, start, str(unfit))


def _entries(text: str, start: int) -> PastedList | None:
    """Return the list of numbered entries that begins at `start`; None if there is only one entry. Raises _Unfit."""
    line = text.find("\n", start)
    following = ENTRY.match(text, line + 1) if line >= 0 else None
    joint = "\n" if following else "\n\n"
    blocks: list[_Block] = []
    at = end = start
    while (opening := ENTRY.match(text, at)) and (not blocks or int(opening[1]) == int(blocks[-1].opening[1]) + 1):
        if (end := text.find(joint, at)) < 0:
            end = len(text)
        blocks.append(_Block(opening, text[opening.end() : end]))
        at = end + len(joint)
    goes_on = f"\n\n[{int(blocks[-1].opening[1]) + 1}] " in text[end:]
    if len(blocks) < 2 and not goes_on:
        return None
    if goes_on or not AFTER_LIST.match(text, end) or (joint == "\n" and text[end : end + 2].strip()):
        raise _Unfit("where an entry ends is not to be seen")
    numbers = {block.opening[1] for block in blocks}
    if sum(cited[1] in numbers for cited in CITED.finditer(text)) > len(blocks):
        raise _Unfit("the text beside it names its numbers")
    stop = end + len(joint) if text.startswith(joint, end) else end
    return _listed(NUMBERED, (start, stop), blocks, joint)
