"""Cuts sections into chunks, the units of search and of KV reuse.

A heading and everything below it are one chunk if they fit. If they do not fit, the text under the heading is cut between
paragraphs. Chunks never overlap, because repeated text would need KV twice.

An edit should change only the chunks near it, so that the KV and the vectors of other chunks stay valid. So a small chunk is
never filled up with text of the next section. The place of a cut depends on the paragraphs near the cut, not on the number
of paragraphs before the cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise, takewhile

from ..ordering.document import Document
from .outline import Block, Section

BYTES_PER_TOKEN = 4  # roughly, in most vocabularies and languages
BETWEEN_HEADINGS = " > "
SENTENCE_END = re.compile(r"(?<=[.!?。！？…])[\"')\]»”’]?\s+")
LINE_END = re.compile(r"\n")
PARAGRAPH = "\n\n"
WORD = re.compile(r"\w+")
MAX_HASHED, HASHED_WORDS = 400, 8  # the first characters and words of a piece, which are hashed


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file. title: its heading path. page, start, stop: its place, as in `Block`.

    id: the first digits of a hash of the title and the text. The place is not hashed, so a chunk keeps its id when it moves.
    """

    title: str
    text: str
    tokens: int
    page: int | None
    start: int
    stop: int

    @property
    def document(self) -> Document:
        """Return the chunk as a document of a prompt."""
        return Document.parse({"title": self.title, "text": self.text})

    @property
    def id(self) -> str:
        return self.document.id


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of chunks, in tokens.

    least: if possible, the text after a cut has at least so many tokens.
    first, most: if possible, each chunk of a long text has at least `first` and at most `most` tokens. A heading with
    everything below it, or a single list, table or piece of code, is not cut if it has at most `most` tokens.
    whole_file: a file with at most so many tokens is one chunk.
    """

    least: int
    first: int
    most: int
    whole_file: int

    @classmethod
    def around(cls, tokens: int) -> Sizes:
        """Return the sizes of chunks of about `tokens` tokens. Raises ValueError below 32."""
        if tokens < 32:
            raise ValueError(f"chunks of {tokens} tokens are too small to search: expected at least 32")
        return cls(least=tokens * 2 // 5, first=tokens * 3 // 5, most=tokens * 7 // 6, whole_file=2 * tokens)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block, or a part of a long block. glue: the text between this piece and the piece before it."""

    text: str
    tokens: int
    start: int
    stop: int
    page: int | None
    glue: str = PARAGRAPH


def embedded_text(title: str, text: str) -> str:
    """Return the text of a chunk as an embedder or a reranker reads it."""
    return f"{title}\n{text}" if title else text


def count_tokens(text: str) -> int:
    """Estimate the number of tokens in a text without a vocabulary."""
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    return -(-size // BYTES_PER_TOKEN)


def cut(sections: Sequence[Section], sizes: Sizes) -> Iterator[Chunk]:
    """Yield the chunks of a file in order."""
    filled = [_Sized(section) for section in sections if section.blocks or section.headings]
    if not filled:
        return
    if sum(section.tokens for section in filled) <= sizes.whole_file:
        yield _subtree(filled, _shared_depth(filled))
    else:
        yield from _cut_tree(filled, 0, sizes)


class _Sized:
    """A section with its number of tokens, which is counted only once."""

    __slots__ = ("blocks", "headings", "page", "tokens")

    def __init__(self, section: Section) -> None:
        self.headings, self.blocks, self.page = section.headings, section.blocks, section.page
        self.tokens = sum(count_tokens(text) for text in (*section.headings[-1:], *(block.text for block in section.blocks)))


def _cut_tree(sections: Sequence[_Sized], depth: int, sizes: Sizes) -> Iterator[Chunk]:
    """Yield the chunks of sections whose first `depth` headings are the same."""
    if depth and sum(section.tokens for section in sections) <= sizes.most:
        yield _subtree(sections, depth)
        return
    own = int(len(sections[0].headings) == depth)
    if own:
        yield from _cut_section(sections[0], sizes)
    starts = [at for at, section in enumerate(sections) if len(section.headings) == depth + 1]
    for start, stop in pairwise([*starts, len(sections)]):
        yield from _cut_tree(sections[start:stop], depth + 1, sizes)


def _shared_depth(sections: Sequence[_Sized]) -> int:
    """Return the number of headings that all sections share."""
    paths = [section.headings for section in sections]
    least, greatest = min(paths), max(paths)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(least, greatest, strict=False))
    return sum(1 for _ in same)


def _subtree(sections: Sequence[_Sized], depth: int) -> Chunk:
    """Return sections as one chunk.

    The chunk's title is the first `depth` headings, and its text contains the inner headings.
    """
    pieces: list[_Piece] = []
    if not any(section.blocks or len(section.headings) > depth for section in sections):
        depth -= 1  # the heading is the only text
    for section in sections:
        if len(section.headings) > depth:
            heading = f"{'#' * (len(section.headings) - depth + 1)} {section.headings[-1]}"
            start = section.blocks[0].start if section.blocks else pieces[-1].stop if pieces else 0
            pieces.append(_Piece(heading, count_tokens(heading), start, start, page=section.page))
        pieces += map(_piece, section.blocks)
    return _chunk(sections[0].headings[:depth], pieces)


def _cut_section(section: _Sized, sizes: Sizes) -> Iterator[Chunk]:
    pieces: list[_Piece] = []
    for block in section.blocks:
        if block.head and count_tokens(block.text) > sizes.most:
            yield from _cut_pieces(section.headings, pieces, sizes)
            yield from _cut_table(section.headings, block, sizes)
            pieces = []
        else:
            pieces += _split(block, sizes.most)
    yield from _cut_pieces(section.headings, pieces, sizes)


def _cut_pieces(headings: Sequence[str], pieces: Sequence[_Piece], sizes: Sizes, head: str = "") -> Iterator[Chunk]:
    """Yield pieces as chunks. head: a text to repeat before each chunk except the first."""
    start = 0
    for stop in _cuts(pieces, sizes):
        place = pieces[start]
        first = [_Piece(head, count_tokens(head), place.start, place.start, page=place.page)] if head and start else []
        yield _chunk(headings, [*first, *pieces[start:stop]])
        start = stop


def _cut_table(headings: Sequence[str], block: Block, sizes: Sizes) -> Iterator[Chunk]:
    """Yield a table that is too long for a chunk, cut between rows. Each chunk has the head with the columns' names."""
    head = block.head.encode(errors="replace")[: sizes.most * BYTES_PER_TOKEN // 2].decode(errors="ignore")
    room = sizes.most - count_tokens(head)
    rows = Sizes(least=0, first=min(sizes.first, room), most=room, whole_file=room)
    yield from _cut_pieces(headings, [*_split(block, room)], rows, head)


def _cuts(pieces: Sequence[_Piece], sizes: Sizes) -> Iterator[int]:
    """Yield the end of each chunk: the index of the next chunk's first piece.

    Of all pieces that `sizes` allows as the next chunk's first piece, the piece with the least hash is chosen. An edit
    elsewhere does not change the hashes of these pieces, so later cuts stay where they were.
    """
    ends = [0, *accumulate(piece.tokens for piece in pieces)]
    start = 0
    while start < len(pieces):
        if ends[-1] - ends[start] <= sizes.most:
            yield len(pieces)
            return
        fitting = start + 1
        while ends[fitting + 1] - ends[start] <= sizes.most:
            fitting += 1
        places = [at for at in range(start + 1, fitting + 1) if ends[at] - ends[start] >= sizes.first] or [fitting]
        places = [at for at in places if ends[-1] - ends[at] >= sizes.least] or places
        places = [at for at in places if pieces[at].glue == PARAGRAPH] or places
        start = min(places, key=lambda at: (_hash(pieces[at]), at))
        yield start


def _hash(piece: _Piece) -> bytes:
    """Hash the first words of a piece. Punctuation and spaces are left out, since they differ between file formats."""
    words = (found[0] for found in islice(WORD.finditer(piece.text, 0, MAX_HASHED), HASHED_WORDS))
    return blake2b(" ".join(words).encode(errors="surrogatepass"), digest_size=8).digest()


def _piece(block: Block) -> _Piece:
    return _Piece(block.text, count_tokens(block.text), block.start, block.stop, page=block.page)


def _split(block: Block, most: int) -> Iterator[_Piece]:
    """Yield a block whole if it fits, else its lines or sentences. A line that is too long is cut between words."""
    whole = _piece(block)
    if whole.tokens <= most:
        yield whole
        return
    glue, length = PARAGRAPH, block.stop - block.start
    for start, stop in _parts(block, most):
        text = block.text[start:stop]
        place = (block.start + min(start, length), block.start + min(stop, length))
        yield _Piece(text, count_tokens(text), *place, page=block.page, glue=glue)
        glue = "\n" if block.has_lines else " "


def _parts(block: Block, most: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each part of a long block's text."""
    text, start = block.text, 0
    ends = LINE_END if block.has_lines else SENTENCE_END
    for stop, after in chain((match.span() for match in ends.finditer(text)), [(len(text), len(text))]):
        if count_tokens(text[start:stop]) > most:
            yield from _slices(text, start, stop, most)
        elif stop > start:
            yield start, stop
        start = after


def _slices(text: str, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield parts of at most `size` characters, which end at a space if possible."""
    while start < stop:
        end = min(start + size, stop)
        blank = text.rfind(" ", start + 1, end) if end < stop else -1
        end = blank if blank > 0 else end
        yield start, end
        start = end + (blank > 0)


def _chunk(headings: Iterable[str], pieces: Sequence[_Piece]) -> Chunk:
    text = pieces[0].text + "".join(piece.glue + piece.text for piece in pieces[1:])
    page = next((piece.page for piece in pieces if piece.page is not None), None)
    return Chunk(
        title=BETWEEN_HEADINGS.join(headings),
        text=text.strip(),
        tokens=count_tokens(text),
        page=page,
        start=min(piece.start for piece in pieces),
        stop=max(piece.stop for piece in pieces),
    )
