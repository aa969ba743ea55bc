"""A chat as the template writes it. Tools and calls that it does not show stand in contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...models.chat.marks import Piece
from ...models.chat.messages import Message
from ...models.chat.sandbox import TemplateError
from ...models.chat.template import ChatTemplate
from ...models.chat.variables import Tools, Variables
from ..wire.requests import ChatRequest
from .formats.written import Written
from .tools import with_calls, with_definitions, with_instruction
from .variables import request_variables

TRIAL = {"name": "trial_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
QUESTION = {"role": "user", "content": "?"}
CALL = {"id": "trial0000", "type": "function", "function": {"name": "trial_tool", "arguments": "{}"}}


class Rendering:
    """The chat template of a loaded model, and what it does not do by itself. written: how the model writes calls."""

    def __init__(
        self, template: ChatTemplate, written: Written, variables: Variables, *, retrieval_prompt: str = ""
    ) -> None:
        """variables: of every request, which a request may change. retrieval_prompt: for chats whose documents are found."""
        self._template, self._written, self._variables = template, written, variables
        self._retrieval_prompt = retrieval_prompt
        self._shows_tools = self._shows([QUESTION], tools=[{"type": "function", "function": TRIAL}])
        self._shows_calls = self._shows([QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}])

    def pieces(self, messages: Sequence[Message], request: ChatRequest, continues: bool = False) -> list[Piece]:
        """Render a chat. continues: up to the end of its last message, which the model is to go on with.

        Raises TemplateError; RequestError for variables that are fields of the request.
        """
        variables = request_variables(request, self._variables)
        prompts = request.add_generation_prompt is not False
        render = self._template.continued if continues else partial(self._template.pieces, add_generation_prompt=prompts)
        if not self._shows_calls:
            messages = [with_calls(message, self._written) for message in messages]
        is_instructed = is_defined = False  # by a message that the client did not send
        if request.retrieves and self._retrieval_prompt:
            messages, is_instructed = with_instruction(messages, self._retrieval_prompt)
        tools = request.tools
        if tools and not self._shows_tools:
            messages, is_defined = with_definitions(messages, tools, self._written)
            tools = None
        pieces = render(messages, variables, tools=tools)
        return [_moved(piece) for piece in pieces] if is_instructed or is_defined else pieces

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
