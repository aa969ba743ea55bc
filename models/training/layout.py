"""The server's layout of a conversation: ChatML, documents before the question, each piece tokenised alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ..vocabulary import IM_END, IM_START
from .world.conversation import Conversation, Turn


class Source(Enum):
    """The origin of a piece. Only pieces of the template hold special tokens."""

    TEMPLATE = 0
    CONTENT = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is tokenised alone. sort: of an answer, the kind of its question. first: see Turn."""

    text: str
    source: Source
    sort: str = ""
    first: str = ""


def pieces(conversation: Conversation) -> Iterator[Piece]:
    """Yield the conversation in order. A test compares it with the server's prompt, token by token."""
    start = IM_START
    if conversation.system:
        yield Piece(f"{IM_START}system\n", Source.TEMPLATE)
        yield Piece(conversation.system, Source.CONTENT)
        start = f"{IM_END}\n{IM_START}"
    for turn in conversation.turns:
        yield Piece(f"{start}user\n", Source.TEMPLATE)
        for text in _contents(turn):
            yield Piece(text, Source.CONTENT)
        yield Piece(f"{IM_END}\n{IM_START}assistant\n", Source.TEMPLATE)
        sort = "located" if turn.located and turn.sort == "plain" else turn.sort
        yield Piece(turn.answer, Source.ANSWER, sort, turn.first)
        start = f"{IM_END}\n{IM_START}"


def _contents(turn: Turn) -> Iterator[str]:
    for page in turn.documents:
        title = f" {page.title}" if page.title else ""
        yield f"[{page.id}]{title}\n{page.text}\n\n"
    if turn.above:
        yield "".join(f"See [{name}] above.\n" for name in turn.above) + "\n"
    if turn.rank and (hint := _order_hint([page.id for page in turn.documents], turn.rank)):
        yield hint
    yield turn.question


def _order_hint(order: Sequence[str], rank: Sequence[str]) -> str:
    """Return the shortest beginning of the ranking that determines it, for documents in this order."""
    named = next(n for n in range(len(rank) + 1) if [name for name in order if name not in rank[:n]] == list(rank[n:]))
    return f"Most relevant: {' > '.join(rank[:named])}\n\n" if named else ""
