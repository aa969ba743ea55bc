"""A chat as the template writes it. Tools and calls that it does not show stand in contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...models.chat.marks import Piece
from ...models.chat.messages import Message
from ...models.chat.sandbox import TemplateError
from ...models.chat.template import ChatTemplate
from ...models.chat.variables import Tools
from ..errors import RequestError
from ..wire.requests import ChatRequest
from .formats.written import Written
from .tools import with_calls, with_definitions

TRIAL = {"name": "trial_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
QUESTION = {"role": "user", "content": "?"}
CALL = {"id": "trial0000", "type": "function", "function": {"name": "trial_tool", "arguments": "{}"}}


class Rendering:
    """The chat template of a loaded model, and what it does not do by itself. written: how the model writes calls."""

    def __init__(self, template: ChatTemplate, written: Written) -> None:
        self._template, self._written = template, written
        self._shows_tools = self._shows([QUESTION], tools=[{"type": "function", "function": TRIAL}])
        self._shows_calls = self._shows([QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}])

    def pieces(self, messages: Sequence[Message], request: ChatRequest) -> list[Piece]:
        """Render a chat. Raises TemplateError; RequestError for variables that are fields of the request."""
        variables = _variables(request)
        if not self._shows_calls:
            messages = [with_calls(message, self._written) for message in messages]
        if not request.tools or self._shows_tools:
            return self._template.pieces(messages, variables, tools=request.tools)
        defined, is_longer = with_definitions(messages, request.tools, self._written)
        pieces = self._template.pieces(defined, variables)
        return [_moved(piece) for piece in pieces] if is_longer else pieces

    def _shows(self, messages: Sequence[Message], tools: Tools | None = None) -> bool:
        """Whether the template shows the trial tool. One that refuses the messages will refuse a client's, too."""
        try:
            pieces = self._template.pieces(messages, tools=tools, add_generation_prompt=False)
        except TemplateError:
            return True
        return any("trial_tool" in piece.text for piece in pieces)


def _moved(piece: Piece) -> Piece:
    """Return a piece of messages behind a new first one, which no client wrote, as a piece of the messages alone."""
    if piece.message is None:
        return piece
    return replace(piece, message=piece.message - 1) if piece.message else Piece(piece.text, None, is_plain=True)


def _variables(request: ChatRequest) -> dict[str, object]:
    """Return the template's variables. Raises RequestError."""
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in request.chat_template_kwargs:
            where = f"chat_template_kwargs.{name}"
            raise RequestError(f"{where}: {name} is a field of the request itself", param=where)
    return request.chat_template_kwargs
