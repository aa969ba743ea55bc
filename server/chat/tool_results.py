"""Tool results as documents, if the client asks for it: lists of documents are ordered, and repeated text is shown once.

The text of a result in the prompt depends only on the result and earlier messages, so the prompts of a conversation keep
their common prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from ...models.template import Message
from ...ordering.document import TOOLS, beside_documents, documents_in

LEAST = 200  # least characters of a repetition: a reference takes 30 tokens
EVERY, LONGEST = 4, 64  # approximate mean lines of a block, without blank lines; most lines
QUOTE = 40  # most characters of a line that a reference quotes
VALUE = 100  # most characters of a line with a name and a value


def rewrite(messages: Sequence[Message]) -> tuple[list[Message], dict[int, tuple[str, ...]]]:
    """Return the messages as a prompt shows them, and the names of the earlier results that each message refers to.

    The names of the results are by the index of the message that refers to them.
    """
    shown, referred = list(messages), dict[int, tuple[str, ...]]()
    texts = ResultTexts()
    for at, message in enumerate(messages):
        if message["role"] not in TOOLS:
            continue
        texts.number += 1
        if found := documents_in(message, f"messages[{at}]"):
            shown[at] = {**message, "content": beside_documents(message) or _place_of(len(found))}
        elif len(text := text_of(message.get("content"))) >= LEAST:
            written = texts.show(text)
            shown[at] = {**message, "content": written.text}
            if written.results:
                referred[at] = written.results
    return shown, referred


def make_places(messages: Sequence[Message], documents: Mapping[int, int]) -> list[Message]:
    """Give a short text to each tool message that has documents but no content, since templates drop empty messages.

    documents: the number of documents in a message, by the message's index.
    """
    shown = list(messages)
    for at, number in documents.items():
        if number and messages[at]["role"] in TOOLS and not messages[at].get("content"):
            shown[at] = {**messages[at], "content": _place_of(number)}
    return shown


def _place_of(number: int) -> str:
    return f"{number} documents" if number != 1 else "1 document"


@dataclass(frozen=True, slots=True)
class WrittenResult:
    """The text of a tool result as a prompt shows it.

    results: the names of the earlier results that the text refers to.
    """

    text: str
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepeatedLines:
    """Lines that are repeated: lines [start, stop) of the tool result that showed them first.

    number: the number of the tool result that showed the lines first, from 1.
    """

    number: int
    start: int
    stop: int


@dataclass(slots=True)
class ResultTexts:
    """The text of all tool results in a conversation so far, in blocks of lines.

    number: the number of the newest result, from 1.
    """

    number: int = 0
    _seen: dict[str, RepeatedLines] = field(default_factory=dict)

    def show(self, text: str) -> WrittenResult:
        """Return the text of a result as the prompt shows it.

        Consecutive lines that repeat an earlier result become a reference to it, if they have at least `LEAST` characters.
        """
        pieces, results, new = [f"[result {self.number}]\n"], dict[str, None](), list[tuple[str, int]]()
        for source, blocks in self._runs(text):
            block = "".join(written for written, _ in blocks)
            if source is None or len(block) < LEAST:
                pieces.append(block)
                new += blocks
                continue
            results[f"result {source.number}"] = None
            pieces.append(_reference(source, block))
        for block, start in new:
            self._seen.setdefault(block, RepeatedLines(self.number, start, start + block.count("\n") + (block[-1:] != "\n")))
        return WrittenResult("".join(pieces), tuple(results))

    def _runs(self, text: str) -> Iterator[tuple[RepeatedLines | None, list[tuple[str, int]]]]:
        """Yield runs of consecutive blocks, each with the lines of an earlier result that it repeats; None: it repeats none.

        If earlier results do not have all blocks of this result, the blocks that list values count as new. A block that
        lists values is short, and a model that looks for a value of a file finds it best in the text of this file.
        """
        blocks = list(blocks_of(text))
        is_known = all(block in self._seen for block, _ in blocks)
        source: RepeatedLines | None = None
        run: list[tuple[str, int]] = []
        for block, start in blocks:
            found = self._seen.get(block) if is_known or not lists_values(block) else None
            if found and source and (found.number, found.start) == (source.number, source.stop):
                source = replace(source, stop=found.stop)
            else:
                if run:
                    yield source, run
                source, run = found, []
            run.append((block, start))
        if run:
            yield source, run


def blocks_of(text: str) -> Iterator[tuple[str, int]]:
    """Yield a text in blocks of lines, each with the number of its first line, from 0.

    A block is a paragraph with the blank line after it. A long paragraph is also cut after each line whose checksum has a
    certain value. The cuts depend on the lines and not on their position, so equal passages of two texts have equal
    blocks.
    """
    lines: list[str] = []
    start = filled = 0  # filled: lines of the block that are not blank
    for at, line in enumerate(text.splitlines(keepends=True)):
        lines.append(line)
        filled += bool(line.strip())
        ends = filled and not line.strip()
        if not ends and filled >= EVERY:
            ends = crc32(line.encode("utf-8", "replace")) % EVERY == 0
        if ends or len(lines) == LONGEST:
            yield "".join(lines), start
            lines, start, filled = [], at + 1, 0
    if lines:
        yield "".join(lines), start


def lists_values(block: str) -> bool:
    """Return whether at least half of a block's lines have a name and a value, such as `Availability: 99.9 %`."""
    lines = [line for line in block.splitlines() if line.strip()]
    return 2 * sum(map(_has_value, lines)) >= len(lines) > 0


def _has_value(line: str) -> bool:
    name, _, value = line.partition(": ")
    return bool(name.strip() and value.strip()) and len(line) <= VALUE


def _reference(source: RepeatedLines, text: str) -> str:
    lines = [line for line in text.split("\n") if line.strip()] or [text]
    first, last = lines[0].strip()[:QUOTE], lines[-1].strip()[-QUOTE:]
    size = source.stop - source.start
    count = f"{size} lines" if size > 1 else "a line"
    return f'[{count} as in result {source.number}, from "{first}" to "{last}"]\n'


def text_of(content: object) -> str:
    """Return the text of a content, which is a text or a list of text parts; empty if the content has other parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "\n".join(map(str, texts)) if len(texts) == len(parts) else ""
