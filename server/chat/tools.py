"""The tools of a request, and how a chat is rendered with its tools and its template variables."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import msgspec

from ...models.call_arguments import argument_text
from ...models.jinja import TemplateError
from ...models.marks import TextPiece
from ...models.template import ChatTemplate, Message, Tools, Variables
from ..config.settings import Settings, SettingsError
from ..formats.families import CALL_NOTATION, CallNotation
from ..formats.json_text import parameter_types
from ..formats.readers import Types
from ..http.api_errors import RequestError
from .body import ChatRequest
from .reasoning import SWITCH

Schema = Mapping[str, object]
Mode = Literal["auto", "none", "required"]
MAX_TOOLS = 1024  # most tools of one request
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool that an answer may call. parameters: the JSON schema of its arguments, which are a JSON object."""

    name: str
    parameters: Schema


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """How an answer may use tools.

    tools: the tools that the answer may call. mode: whether the answer may, must or must not call tools. parallel:
    whether the answer may have several calls. parses: whether the server separates calls from the content.
    """

    tools: tuple[ToolDefinition, ...] = ()
    mode: Mode = "none"
    parallel: bool = True
    parses: bool = True

    def types(self) -> dict[str, Types]:
        """Return the parameter types of each tool, by its name; empty if answers are not searched for calls."""
        if self.mode == "none" or not self.parses:
            return {}
        return {tool.name: parameter_types(tool.parameters) for tool in self.tools}


def read_tools(request: ChatRequest) -> AllowedTools:
    """Return the tools of a request, and how its answer may use them. Raises RequestError if the request is wrong."""
    given = request.tools or []
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools: {len(given):,} tools, expected at most {MAX_TOOLS:,}", param="tools")
    tools: dict[str, ToolDefinition] = {}
    for at, definition in enumerate(given):
        tool = _read_tool(definition, f"tools[{at}]")
        if tool.name in tools:
            raise RequestError(f"tools[{at}].function.name: another tool is named {tool.name!r}", param=f"tools[{at}]")
        tools[tool.name] = tool
    mode, names = _read_choice(request.tool_choice, tools)
    return AllowedTools(
        tools=tuple(tools[name] for name in names),
        mode=mode if names else "none",
        parallel=request.parallel_tool_calls is not False,
        parses=request.parse_tool_calls is not False,
    )


def _read_tool(definition: Mapping[str, object], where: str) -> ToolDefinition:
    kind, function = definition.get("type") or "function", definition.get("function")
    if kind != "function" or not isinstance(function, dict):
        got = reprlib.repr(kind) if kind != "function" else "no `function`"
        raise RequestError(f'{where} is {got}: expected {{"type": "function", "function": ...}}', param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 128 letters, digits and signs of _-.:/"
        raise RequestError(
            f"{where}.function.name is {reprlib.repr(name)}: expected {expected}", param=f"{where}.function.name"
        )
    if not isinstance(parameters, dict | None):
        raise RequestError(
            f"{where}.function.parameters: expected a JSON schema of an object", param=f"{where}.function.parameters"
        )
    if (parameters or {}).get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters.type is {reprlib.repr((parameters or {})['type'])}: expected 'object'",
            param=f"{where}.function.parameters",
        )
    strict = {"strict": True} if function.get("strict") is True else {}
    return ToolDefinition(name, {"type": "object", "properties": {}} | (parameters or {}) | strict)


def _read_choice(choice: object, tools: Mapping[str, ToolDefinition]) -> tuple[Mode, Sequence[str]]:
    """Return whether the answer may, must or must not call tools, and the names of the tools that it may call.

    Raises RequestError.

    choice: the field `tool_choice`, in OpenAI's or in Anthropic's form.
    """
    match choice:
        case None | "auto" | {"type": "auto"}:
            return "auto", tuple(tools)
        case "none" | {"type": "none"}:
            return "none", tuple(tools)
        case "required" | "any" | {"type": "required" | "any"}:
            if not tools:
                given = choice["type"] if isinstance(choice, dict) else choice
                raise RequestError(f"tool_choice is {given!r}, but there are no tools", param="tool_choice")
            return "required", tuple(tools)
        case {"function": {"name": str(name)}} | {"type": "function" | "tool", "name": str(name)}:
            return "required", _known([name], tools)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            names = _known([_name_of(tool) for tool in allowed], tools)
            return ("required" if mode == "required" else "auto"), names
    raise RequestError(
        f"tool_choice is {reprlib.repr(choice)}: expected 'auto', 'none', 'required', a function's name as "
        '{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", ...}',
        param="tool_choice",
    )


def _name_of(tool: object) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return ""


def _known(names: Sequence[str], tools: Mapping[str, ToolDefinition]) -> Sequence[str]:
    for name in names:
        if name not in tools:
            raise RequestError(f"tool_choice names {reprlib.repr(name)}, which is not among the tools", param="tool_choice")
    return tuple(dict.fromkeys(names))


def with_definitions(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], written: CallNotation
) -> tuple[list[Message], bool]:
    """Return the messages with the tools in the system message, and whether a system message had to be added.

    This function is for templates that do not show tools. written: how the model writes calls.
    """
    definitions = "\n".join(json.dumps(_definition(tool), ensure_ascii=False) for tool in tools)
    example = written.text([("<function-name>", "<args-json-object>")]).replace('"<function-name>"', "<function-name>")
    text = _WORDING.format(definitions=definitions, form=_FORM if written == CALL_NOTATION else "write", example=example)
    return with_instruction(messages, text)


def with_instruction(messages: Sequence[Message], text: str) -> tuple[list[Message], bool]:
    """Return the messages with a text at the end of the system message, and whether a system message had to be added."""
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages], True
    first, *rest = messages
    content = first.get("content")
    if isinstance(content, list):
        return [{**first, "content": [*content, {"type": "text", "text": text}]}, *rest], False
    return [{**first, "content": f"{content or ''}\n\n{text}".strip()}, *rest], False


def _definition(tool: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a tool that a model needs."""
    function = cast("Mapping[str, object]", tool["function"])
    shown = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": shown}


def with_calls(message: Message, written: CallNotation) -> Message:
    """Return a message with its tool calls as text, for templates that do not show calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    text = written.text([_name_and_arguments(function) for function in functions if isinstance(function, dict)])
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{content}\n{text}" if isinstance(content, str) and content else text}


def _name_and_arguments(function: Mapping[str, object]) -> tuple[str, str]:
    return str(function.get("name")), argument_text(function.get("arguments"))


# The wording of Qwen's and Hermes's templates: more models were trained on this wording than on any other.
_WORDING = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{definitions}
</tools>

For each function call, {form}:
{example}"""
_FORM = "return a json object with function name and arguments within <tool_call></tool_call> XML tags"


# ---- The chat template's variables, from a request and from the settings. -----------------------------------------------

OWN_FIELDS = ("messages", "tools", "add_generation_prompt")
"""Variables that come from fields of a request."""

SWITCHES = (SWITCH, "preserve_reasoning")


def settings_variables(settings: Settings) -> dict[str, object]:
    """Return the template variables that the settings define.

    A request may override these variables. Raises SettingsError.
    """
    variables: dict[str, object] = {"preserve_reasoning": settings.reasoning_preserve}
    if settings.reasoning != "auto":
        variables[SWITCH] = settings.reasoning == "on"
    if settings.reasoning_effort not in ("", "default"):
        variables["reasoning_effort"] = settings.reasoning_effort
    try:
        given = msgspec.json.decode(settings.chat_template_kwargs or "{}", type=dict[str, object])
    except msgspec.DecodeError as error:
        raise SettingsError(f"--chat-template-kwargs: expected an object of JSON: {error}") from None
    for name in OWN_FIELDS:
        if name in given:
            raise SettingsError(f"--chat-template-kwargs: {name} comes from each request")
    return variables | given


def request_variables(request: ChatRequest, defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the template variables of a request: its own, and the defaults that it does not set. Raises RequestError."""
    given, where = request.chat_template_kwargs, "chat_template_kwargs"
    for name in OWN_FIELDS:
        if name in given:
            raise RequestError(f"{where}.{name}: {name} is a field of the request itself", param=f"{where}.{name}")
    for name in SWITCHES:
        if not isinstance(given.get(name), bool | None):
            raise RequestError(f"{where}.{name}: expected true or false", param=f"{where}.{name}")
    given = {name: value for name, value in given.items() if value is not None or name not in SWITCHES}
    variables, asked = {**defaults, **given}, request.asked_reasoning
    if asked.is_on is not None:
        variables[SWITCH] = asked.is_on
    if asked.is_on is False and "reasoning_effort" not in given:
        variables.pop("reasoning_effort", None)
    elif asked.effort:
        variables["reasoning_effort"] = asked.effort
    return variables


# ---- A chat as the template writes it. Contents get the tools and calls that the template does not show. ----------------

TRIAL = {"name": "trial_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
QUESTION = {"role": "user", "content": "?"}


class Rendering:
    """Renders chats with a model's template, and adds what the template cannot show.

    written: the notation of the model's calls.
    """

    def __init__(
        self, template: ChatTemplate, written: CallNotation, variables: Variables, *, retrieval_prompt: str = ""
    ) -> None:
        """Keep the values that all chats share.

        variables: the template variables from the settings. retrieval_prompt: the instruction that is added to chats
        that search for documents.
        """
        self._template, self._written, self._variables = template, written, variables
        self._retrieval_prompt = retrieval_prompt
        self._shows_tools = self._shows([QUESTION], tools=[{"type": "function", "function": TRIAL}])
        self._shows_calls = template.shows_calls

    def pieces(self, messages: Sequence[Message], request: ChatRequest, continues: bool = False) -> list[TextPiece]:
        """Render a chat. Raises TemplateError, and RequestError for wrong template variables of the request.

        continues: whether the prompt ends with the text of the last message, so that the model continues this message.
        """
        variables = request_variables(request, self._variables)
        prompts = request.add_generation_prompt is not False
        render = self._template.continued if continues else partial(self._template.pieces, add_generation_prompt=prompts)
        if not self._shows_calls:
            messages = [with_calls(message, self._written) for message in messages]
        is_instructed = is_defined = False  # whether a message was added
        if request.retrieves and self._retrieval_prompt:
            messages, is_instructed = with_instruction(messages, self._retrieval_prompt)
        tools = request.tools
        if tools and not self._shows_tools:
            messages, is_defined = with_definitions(messages, tools, self._written)
            tools = None
        pieces = render(messages, variables, tools=tools)
        return [_moved(piece) for piece in pieces] if is_instructed or is_defined else pieces

    def _shows(self, messages: Sequence[Message], tools: Tools | None = None) -> bool:
        """Return whether the template shows the trial tool; False if the template refuses the messages."""
        try:
            pieces = self._template.pieces(messages, tools=tools, add_generation_prompt=False)
        except TemplateError:
            return False
        return any("trial_tool" in piece.text for piece in pieces)


def _moved(piece: TextPiece) -> TextPiece:
    """Return a piece with the index that its message has in the request.

    A message was added in front of the request's messages. The pieces of the added message become plain text, without an
    index. The index of every other piece is reduced by 1.
    """
    if piece.message is None:
        return piece
    return replace(piece, message=piece.message - 1) if piece.message else TextPiece(piece.text, None, is_plain=True)
