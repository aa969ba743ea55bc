"""How the answers of a loaded model are read: the format of its family, and what a request wants of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ...models.chat.marks import Piece
from .answer import Reader
from .formats.families import detect
from .tools import ToolUse


class Readers:
    """Makes readers. source: of the chat template. controls: the spellings of the model's control tokens."""

    def __init__(self, source: str, controls: Collection[str]) -> None:
        self.format = detect(source)
        self.spelt = self.format.spelled(controls)
        """The control tokens that readers need to see."""

    def reader(self, use: ToolUse, thinks: bool, pieces: Sequence[Piece]) -> Callable[[], Reader]:
        """Return a maker of readers of one answer: all find the same ids of calls.

        thinks: thoughts are told from content. pieces: the prompt's, whose end may open a thought.
        """
        return partial(
            self.format.reader,
            use.types(),
            seed=secrets.token_hex(16),
            thinks=thinks,
            opened=_opening(pieces),
            controls=self.spelt,
        )


def _opening(pieces: Sequence[Piece]) -> str:
    """Return the end of a prompt: the last text of the template's own, and what stands behind it."""
    last = next((at for at in reversed(range(len(pieces))) if pieces[at].message is None and not pieces[at].is_plain), 0)
    return "".join(piece.text for piece in pieces[last:])
