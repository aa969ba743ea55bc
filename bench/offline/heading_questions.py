"""Makes questions from a folder's headings. A heading is removed from the text; as a question, it must find its section."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from ...retrieval.chunks import Chunk, Sizes, cut
from ...retrieval.files import FoundFile, folders_of, read_bytes, walk
from ...retrieval.languages import WORDS
from ...retrieval.outline import Outline, Section, Unreadable
from ...retrieval.reader import FORMATS, read_text
from ...retrieval.store import Store
from ...retrieval.writing import StoredFile

LEAST_WORDS, LEAST_LETTERS = 3, 250  # words of a heading, and letters of the text below it
NO_QUESTION = re.compile(r"[()`<>=]|^.{120}")  # matches headings that are code or a paragraph
NUMBER = re.compile(r"^[\d.]+\s+")
MOST_OF_FILE, MOST_RELEVANT = 8, 8  # questions of a file, and relevant chunks of a question
TAKEN = "Section"  # replaces a heading that became a question
STOP = frozenset(WORDS["en"].split())
START = 60  # first letters of a block or a chunk, by which the block's chunks are found


@dataclass(frozen=True, slots=True)
class HeadingQuestion:
    """A question. text: a heading. relevant: the numbers of the chunks with text of the heading's section."""

    text: str
    relevant: frozenset[int]


def put_folder(store: Store, folder: Path, tokens: int = 300) -> list[HeadingQuestion]:
    """Store a folder's files without the headings that became questions. Return the questions, in the files' order.

    The same folder always gives the same questions.
    """
    files = dict(_files(folder))
    chosen = _chosen(files)
    taken = re.compile("|".join(map(re.escape, sorted({path[-1] for _, path in chosen}, key=len, reverse=True))), re.I)
    questions: list[HeadingQuestion] = []
    for name, sections in files.items():
        paths = [path for of, path in chosen if of == name]
        without = [_without(section, paths, taken) for section in sections]
        chunks = [*cut(without, Sizes.around(tokens))]
        store.put_file(StoredFile(name), chunks)
        for path in paths:
            own = [new for new, section in zip(without, sections, strict=True) if section.headings == path]
            texts = [block.text for section in own for block in section.blocks]
            ids = {chunk.id for chunk in chunks if _has_text_of(chunk, texts)}
            numbers = frozenset(chain.from_iterable(map(store.numbers, ids)))
            questions.append(HeadingQuestion(NUMBER.sub("", path[-1]), numbers))
    return [question for question in questions if 0 < len(question.relevant) <= MOST_RELEVANT]


def _files(folder: Path) -> Iterator[tuple[str, list[Section]]]:
    for root in folders_of([folder]):
        found = (file for file in walk(root) if isinstance(file, FoundFile))
        for file in sorted(found, key=lambda one: one.path):
            outline = Outline()
            with suppress(Unreadable, OSError):
                data = read_bytes(os.fsencode(root.root), file.parts)
                FORMATS.get(Path(file.path).suffix.lower(), read_text)(data, outline)
                yield file.path, outline.sections


def _chosen(files: dict[str, list[Section]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the headings that become questions, with their files. Such a heading is unique and has distinctive words, and
    its section has enough text and no subsections.
    """
    counts = Counter(section.headings[-1].lower() for sections in files.values() for section in sections if section.headings)
    chosen: list[tuple[str, tuple[str, ...]]] = []
    for name, sections in files.items():
        parents = {section.headings[:depth] for section in sections for depth in range(len(section.headings))}
        fit = [
            section.headings
            for section in sections
            if section.headings
            and section.headings not in parents
            and counts[section.headings[-1].lower()] == 1
            and not NO_QUESTION.search(section.headings[-1])
            and len(_content_words(section.headings[-1])) >= LEAST_WORDS
            and sum(len(block.text) for block in section.blocks) >= LEAST_LETTERS
        ]
        chosen += [(name, path) for path in sorted(fit, key=_hash)[:MOST_OF_FILE]]
    return chosen


def _content_words(heading: str) -> list[str]:
    return [word for word in re.findall(r"[^\W\d_]{2,}", heading) if word.lower() not in STOP]


def _hash(path: tuple[str, ...]) -> bytes:
    return blake2b("\0".join(path).encode(), digest_size=8).digest()


def _without(section: Section, paths: Sequence[tuple[str, ...]], taken: re.Pattern[str]) -> Section:
    """Return a section without the headings that became questions. Its text may also name headings of other sections."""
    headings = tuple(TAKEN if section.headings[: at + 1] in paths else one for at, one in enumerate(section.headings))
    blocks = [replace(block, text=taken.sub(TAKEN, block.text)) for block in section.blocks]
    return Section(headings, section.page, blocks)


def _has_text_of(chunk: Chunk, texts: Sequence[str]) -> bool:
    """Whether a text contains the start of the chunk, or the chunk contains the start of a text.

    Short texts do not count, because they may be anywhere.
    """
    start = chunk.text[:START]
    return any(text[:START] in chunk.text or (len(start) == START and start in text) for text in texts if len(text) >= START)
