"""Converts tools of OpenAI's Responses to functions of a chat, and the model's calls to calls of these tools.

A function in a namespace becomes a function whose name joins both names. A tool with free text becomes a function with
one text as its argument. A tool that only OpenAI runs is left out with a warning, since an answer can do without it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...models.call_arguments import decode_json
from ..chat.content import INPUT, TEXT_ARGUMENT, UNCONSTRAINED, described
from ..chat.parts import listed
from ..chat.sampling_fields import JsonValue
from ..engine.usage import Fields
from ..http.api_errors import RequestError

HOSTED = re.compile(
    "(web_search|web_search_preview|file_search|code_interpreter|image_generation|computer|computer_use|computer_use_preview|"
    "local_shell|shell|apply_patch|mcp|tool_search|programmatic_tool_calling)(_[0-9_]+)?"
)
"""The types of tools that OpenAI runs or that only its models know. A type may end with the date of its version."""
BETWEEN = "__"  # separates namespace and name in the name of a function
MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}  # tool choices by their names
Tool = Mapping[str, JsonValue]
Choice = str | dict[str, JsonValue] | None


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as its client knows it. is_custom: whether the tool takes free text instead of an object."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function(self) -> str:
        """The name of the function that stands for the tool in the chat."""
        return function_name(self.name, self.namespace)

    def named(self) -> Fields:
        """Return the fields with which a call names the tool."""
        named: Fields = {"name": self.name}
        return named if self.namespace is None else named | {"namespace": self.namespace}


def function_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request.

    functions: the functions for the chat; None: the request has no field for tools.
    called: by the function's name in the chat, the tools whose calls differ from calls of functions: tools in a namespace,
        and tools that take free text.
    hosted: the types of the tools that were left out, because only OpenAI runs them.
    unconstrained: the tools whose free text should fit a grammar. A tool's grammar is not enforced: it only becomes a part
        of the tool's description.
    """

    functions: list[dict[str, JsonValue]] | None = None
    called: dict[str, CalledTool] = field(default_factory=dict)
    hosted: dict[str, None] = field(default_factory=dict)
    unconstrained: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tools: Sequence[JsonValue] | None) -> ResponseTools:
        """Read the tools of a request. A null in the list is skipped. Raises RequestError."""
        if tools is None:
            return cls()
        read = cls(functions=[])
        for at, tool in enumerate(tools):
            if tool is not None:
                read._add(tool if isinstance(tool, dict) else {}, f"tools[{at}]")
        return read

    def warnings(self, choice: Choice) -> Iterator[str]:
        """Yield warnings about what is ignored: tools, grammars of tools, and `choice` if it demands an ignored tool."""
        if self.hosted:
            yield f"tools: {listed(self.hosted)} left out: this server runs no tools, and the model does not see them"
        if self.unconstrained:
            yield UNCONSTRAINED.format(listed(self.unconstrained))
        if self._is_hosted(choice):
            yield "tool_choice has no effect: it demands a tool that was left out, so the model chooses among the others"

    def choice(self, choice: Choice) -> Choice:
        """Return a `tool_choice` in the form of a chat, with the names that the functions have in the chat."""
        if self._is_hosted(choice):
            return "auto"
        match choice:
            case str(mode) | {"type": str(mode)} if mode in MODES:
                return MODES[mode]
            case {"type": "function" | "custom", "name": str(name)}:
                return {"type": "function", "function": {"name": function_name(name, _namespace(choice))}}
            case {"type": "allowed_tools", "tools": [*allowed]}:
                tools = [
                    {"type": "function", "name": function_name(str(tool.get("name")), _namespace(tool))}
                    for tool in self._known(allowed)
                ]
                return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        return choice

    def _is_hosted(self, choice: Choice) -> bool:
        """Return whether a choice demands a tool that only OpenAI runs, although the request also has other tools."""
        kind = choice.get("type") if isinstance(choice, dict) else None
        return bool(self.functions) and isinstance(kind, str) and HOSTED.fullmatch(kind) is not None

    def _known(self, allowed: Sequence[JsonValue]) -> Iterator[Tool]:
        """Yield the allowed tools that were not left out."""
        return (tool for tool in allowed if isinstance(tool, dict) and tool.get("type") not in self.hosted)

    def _add(self, tool: Tool, where: str, namespace: str | None = None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            name, inner = _name(tool, where), tool.get("tools")
            if not isinstance(inner, list):
                raise RequestError(f"{where}.tools: expected a list of tools", param=f"{where}.tools")
            for at, one in enumerate(inner):
                self._add(one if isinstance(one, dict) else {}, f"{where}.tools[{at}]", name)
        elif kind in ("function", "custom"):
            self._add_called(tool, CalledTool(_name(tool, where), namespace, kind == "custom"))
        elif isinstance(kind, str) and HOSTED.fullmatch(kind):
            self.hosted[kind] = None
        else:
            expected = "function or custom, tools that the client runs, or a namespace of them"
            raise RequestError(f"{where}.type is {reprlib.repr(kind)}: expected {expected}", param=f"{where}.type")

    def _add_called(self, tool: Tool, called: CalledTool) -> None:
        assert self.functions is not None
        if called.is_custom or called.namespace is not None:
            self.called[called.function] = called
        function = {name: value for name, value in tool.items() if name not in ("type", "format")}
        function["name"] = called.function
        if called.is_custom:
            text, has_grammar = described(tool)
            function |= {"parameters": TEXT_ARGUMENT, "description": text}
            if has_grammar:
                self.unconstrained.append(called.name)
        self.functions.append({"type": "function", "function": function})


def _name(tool: Tool, where: str) -> str:
    if not isinstance(name := tool.get("name"), str):
        raise RequestError(f"{where}.name: expected a text", param=f"{where}.name")
    return name


def _namespace(tool: Tool) -> str | None:
    return namespace if isinstance(namespace := tool.get("namespace"), str) else None


# ---- The free text in the arguments of a call, read while the arguments arrive. -----------------------------------------

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HALF, _OTHER = (rf"\\u[dD][{half}][0-9a-fA-F]{{2}}" for half in ("89abAB", "c-fC-F"))
_NO_OTHER = r"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
_WHOLE = re.compile(  # whole characters and whole escapes; a surrogate pair is whole with both halves
    rf'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_HALF}(?:{_OTHER}|{_NO_OTHER}))*'
)


class FreeText:
    """Reads the free text of one call while the call's arguments arrive.

    The arguments should be a JSON object that starts with the field `input`, which has the text. If the arguments have
    another form, `push` returns nothing, and `finish` returns the result of `free_text`.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._unread, self._is_open, self._length = "", False, 0

    def push(self, arguments: str) -> str:
        """Add the next piece of JSON. Return the next part of the free text: all whole characters that have arrived."""
        self._arguments.append(arguments)
        self._unread += arguments
        if not self._is_open and (opening := _OPENING.match(self._unread)):
            self._unread, self._is_open = self._unread[opening.end() :], True
        if not self._is_open:
            return ""
        whole = _WHOLE.match(self._unread)
        assert whole is not None
        self._unread = self._unread[whole.end() :]
        text = _decoded(whole[0])
        self._length += len(text)
        return text

    def finish(self) -> str:
        """Return the rest of the free text."""
        arguments = "".join(self._arguments)
        if self._is_open:
            try:
                return str(decode_json(arguments)[INPUT])[self._length :]
            except (ValueError, TypeError, KeyError, RecursionError):
                return ""  # the arguments were cut
        return free_text(arguments)


def free_text(arguments: str) -> str:
    """Return the free text in the complete arguments of a call.

    If the arguments are a JSON object whose only value is a text, return this text. Return any other arguments unchanged.
    """
    try:
        given = decode_json(arguments)
    except (ValueError, RecursionError):
        return arguments
    values = list(given.values()) if isinstance(given, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


def _decoded(escaped: str) -> str:
    try:
        return decode_json(f'"{escaped}"')
    except ValueError:
        return escaped  # an escape that JSON does not have
