"""How the answers of a loaded model are read, and the grammar that they must fit."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial

from ...models.chat.marks import Piece
from ...models.grammar.source import Source
from ...models.model import Model
from ..errors import RequestError
from ..wire.grammar import Wanted
from ..wire.requests import ChatRequest
from .answer import Reader
from .formats.families import detect
from .formats.grammar import GrammarWriter
from .tools import ToolUse


class Answers:
    """The form of a model's answers. source: of its chat template."""

    def __init__(self, source: str, model: Model) -> None:
        self.format = detect(source)
        self.spelt = self.format.spelled(model.tokenizer.controls.words)
        """The control tokens that readers need to see."""
        self._ids = {spelling: int(model.tokenize(spelling, special=True)[0]) for spelling in self.spelt}

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

    def wanted(self, request: ChatRequest, use: ToolUse, pieces: Sequence[Piece]) -> Wanted | None:
        """Return the grammar of an answer, if it must fit one: behind a thought, its calls or the form of its content.

        Raises RequestError.
        """
        given, may_call = request.wanted(), use.mode != "none"
        if given is not None and given.source.kind != "json_schema":
            if may_call:
                raise RequestError(f"{given.field} and tools: send one of them, or tool_choice: none", param=given.field)
            return given
        if given is None and use.mode != "required":
            return None
        thought = self.format.thought(_opening(pieces))
        if given is not None and not (may_call or thought or any(self.format.around)):
            return given
        writer, choices = GrammarWriter(self._ids), []
        if may_call:
            tools = [(tool.name, tool.parameters) for tool in use.tools]
            choices.append(writer.calls(self.format.written, tools, use.parallel))
        if given is not None and use.mode != "required":
            writer.schemas["answer"] = given.source.text
            before, after = self.format.around
            choices.append(f"{writer.text(before)} @answer {writer.text(after)}")
        body = f"({' | '.join(choices)})"
        if thought:
            start, end, is_open = thought
            body = f"{writer.thought('', end)} {body}" if is_open else f"{writer.thought(start, end)}? {body}"
        source = Source("lark", writer.lark(body), tuple(writer.schemas.items()), may_name_tokens=True)
        return Wanted("tools" if given is None else given.field, source)

    def closing(self, request: ChatRequest, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the end of a thought that the prompt opens where the answer may have none: a client's own grammar."""
        thought = self.format.thought(_opening(pieces))
        given = request.wanted() if request.is_constrained else None
        if not thought or not thought[2] or given is None or given.source.kind == "json_schema":
            return []
        return [Piece(f"{thought[1]}\n\n", None)]


def _opening(pieces: Sequence[Piece]) -> str:
    """Return the end of a prompt: the last text of the template's own, and what stands behind it."""
    last = next((at for at in reversed(range(len(pieces))) if pieces[at].message is None and not pieces[at].is_plain), 0)
    return "".join(piece.text for piece in pieces[last:])
