"""How the answers of a loaded model are read, and the grammar that they must fit."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...models.chat.marks import Piece
from ...models.grammar.source import GrammarError, Source
from ...models.model import Model
from ...models.thought import ThoughtLimit
from ..errors import RequestError
from ..settings import Settings
from ..wire.grammar import Wanted
from ..wire.requests import ChatRequest
from .answer import Plain, Reader
from .formats.families import detect
from .formats.grammar import GrammarWriter
from .tools import ToolUse


@dataclass(frozen=True, slots=True)
class Form:
    """The form of one answer. reader: makes a reader of its text. spelt: the control tokens that stand in that text.

    wanted: the grammar that it must fit. thought: the limit of its thoughts.
    """

    reader: Callable[[], Reader] = Plain
    spelt: frozenset[str] = frozenset()
    wanted: Wanted | None = None
    thought: ThoughtLimit | None = None


PLAIN = Form()


class Answers:
    """The form of a model's answers. source: of its chat template. settings: the defaults of a request's options."""

    def __init__(self, source: str, model: Model, settings: Settings) -> None:
        self._settings = settings
        self._model, self.format = model, detect(source)
        self.spelt = self.format.spelled(model.tokenizer.controls.words)
        """The control tokens that readers need to see."""
        self._ids = {spelling: int(model.tokenize(spelling, special=True)[0]) for spelling in self.spelt}

    def of(self, request: ChatRequest, use: ToolUse, pieces: Sequence[Piece]) -> Form:
        """Return the form of a request's answers. pieces: the prompt's; its end may open a thought. Raises RequestError."""
        reader = partial(
            self.format.reader,
            use.types(),
            seed=secrets.token_hex(16),  # all readers of an answer find the same ids of calls
            thinks=(request.reasoning_format or self._settings.reasoning_format) != "none",
            opened=_opening(pieces),
            controls=self.spelt,
        )
        return Form(reader, self.spelt, self._wanted(request, use, pieces), self._limit(request, use, pieces))

    def _wanted(self, request: ChatRequest, use: ToolUse, pieces: Sequence[Piece]) -> Wanted | None:
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
            try:
                choices.append(writer.calls(self.format.written, tools, use.parallel))
            except GrammarError as error:
                raise RequestError(f"tools: {error}", param="tools", code="invalid_grammar") from None
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
        """Return the end of a thought that the prompt opens, where the answer may have none.

        It has no token for one, or its thought would have to fit a client's own grammar.
        """
        thought, (most, message) = self.format.thought(_opening(pieces)), self._budget(request)
        if not thought or not thought[2] or (most and not self._has_own_grammar(request)):
            return []
        return [*([Piece(message, None, is_plain=True)] if message else []), Piece(f"{thought[1]}\n\n", None)]

    def _limit(self, request: ChatRequest, use: ToolUse, pieces: Sequence[Piece]) -> ThoughtLimit | None:
        """Return the limit of an answer's thoughts. A client's own grammar leaves no place for them. Raises RequestError."""
        thought, (most, message) = self.format.thought(_opening(pieces)), self._budget(request)
        if most < 0 or not thought or self._has_own_grammar(request):
            return None
        start, end, is_open = thought
        if end in message:
            raise RequestError(f"it must not have the tag {end}, which follows it", param="reasoning_budget_message")
        return ThoughtLimit(
            most=most,
            start=start.encode(),
            end=end.encode(),
            calls=tuple(tag.encode() for tag in self.format.breaks) if use.types() else (),
            is_open=is_open,
            anywhere=self.format.thinks_anywhere and not (request.is_constrained or use.mode == "required"),
            closing=(*self._model.tokenize(message).tolist(), *self._model.tokenize(end, special=True).tolist()),
            piece=self._model.piece_with(self.spelt),
        )

    def _has_own_grammar(self, request: ChatRequest) -> bool:
        """Whether the client sent a grammar that is no schema: the whole answer must fit it."""
        given = request.wanted() if request.is_constrained else None
        return given is not None and given.source.kind != "json_schema"

    def _budget(self, request: ChatRequest) -> tuple[int, str]:
        """Return the most tokens of a thought, -1 for no limit, and the text in front of its end."""
        asked, message = (request.reasoning_budget_tokens, request.thinking_budget_tokens), request.reasoning_budget_message
        most = next((tokens for tokens in asked if tokens is not None and tokens >= 0), self._settings.reasoning_budget)
        return most, self._settings.reasoning_budget_message if message is None else message


def _opening(pieces: Sequence[Piece]) -> str:
    """Return the end of a prompt: the last text of the template's own, and what stands behind it."""
    last = next((at for at in reversed(range(len(pieces))) if pieces[at].message is None and not pieces[at].is_plain), 0)
    return "".join(piece.text for piece in pieces[last:])
