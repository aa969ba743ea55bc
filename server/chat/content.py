"""Converts a client's chat to this server's form: unreadable parts, images, old forms of calls and cache breakpoints."""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ...ordering.document import TOOLS, documents_in
from ..http.api_errors import RequestError
from .body import ChatRequest
from .parts import (
    OTHER,
    REASONING,
    ROLES,
    CallPairs,
    counted,
    json_text,
    kind_name,
    listed,
    read_call,
    read_part,
    texts_in,
    unsupported,
)
from .sampling_fields import JsonValue
from .volatile import INSTRUCTIONS

MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields that mark how far to cache a prompt. They are not part of the prompt, since clients move them in each turn."""
NOT_SHOWN = "messages: parts that are no text are not shown to the model, a line of text stands for each"
LEFT_OUT = "messages: parts that cannot be read were left out"
AS_USER = "messages: roles that are not known count as a user's"
NO_TIME = "ttl: {} is no time such as 5m or 1h, so it pins nothing"
LONG_TIME = "ttl: {} is longer than 7d, the longest time of a pin, which counts instead"
NOT_RUN = "tools: {} left out: this server runs no tools, and the model does not see them"
ON = "call_{}"  # the id of a call in the old form, with the index of its message
TTL = re.compile("([0-9]{1,6})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_PIN = 7 * 86_400.0  # most seconds of a pin

Fields = dict[str, JsonValue]
Breakpoints = Mapping[int, float]
"""By the index of a message: the seconds for which the prompt up to the message's end is pinned; 0: no pin."""


def take(request: ChatRequest, takes_documents: bool = False) -> tuple[ChatRequest, Breakpoints, tuple[str, ...]]:
    """Return a chat in this server's form, its cache breakpoints, and warnings about parts that the model does not see.

    If a user's message is the last one, an unreadable part of it is refused, since the question may be about this part.
    In other messages, an unreadable part is replaced by a line of text or dropped, so that the conversation can go on.
    Raises RequestError. takes_documents: whether a tool result that is a list of documents stays a list.

    A message's breakpoint applies at the end of the message, a tool's breakpoint at the end of the instructions, and a
    request's breakpoint at the end of the last message.
    """
    request, hosted = _without_hosted(request)
    taken = _Taken(request, takes_documents)
    changed: Fields = {}
    if taken.messages != request.messages:
        changed["messages"] = taken.messages
    if request.functions is not None:
        changed |= _of_functions(request)
    if custom_names(request.tools):
        changed |= {"tools": taken.functions(request.tools or ()), "tool_choice": _function_choice(request.tool_choice)}
    tools = changed.get("tools", request.tools)
    if tools and any(map(_is_marked_tool, tools)):
        taken.is_marked, changed["tools"] = True, list(map(_without_marks_of_tool, tools))
        if request.messages and request.messages[0].get("role") in INSTRUCTIONS:
            for tool in tools:
                taken.mark_of(0, tool)
                taken.mark_of(0, function if isinstance(function := tool.get("function"), dict) else {})
    if (taken.is_marked or request.cache_control) and request.cache_prompt is None:
        changed["cache_prompt"] = True
    if request.cache_control is not None or _lives(request.prompt_cache_options):
        taken.mark(len(request.messages) - 1, request.cache_control)
    warnings = (*taken.warnings(), *([NOT_RUN.format(hosted)] if hosted else []))
    return msgspec.structs.replace(request, **changed) if changed else request, taken.breakpoints, warnings


class _Taken:
    """The messages of a chat in this server's form.

    is_marked: whether a message or a tool has a cache breakpoint. not_shown: by kind, the number of parts that are
    replaced by a line of text. left_out: by kind, the number of parts that are dropped. unconstrained: the names of the
    tools with a grammar that is not enforced.
    """

    def __init__(self, request: ChatRequest, takes_documents: bool) -> None:
        self.unconstrained: list[str] = []
        self.not_shown, self.left_out, self.roles = Counter[str](), Counter[str](), Counter[str]()
        self.is_marked, self.breakpoints = False, dict[int, float]()
        self._times: dict[str, JsonValue] = {}  # by the text of a warning, the first time that it is about
        self._ttl = (request.prompt_cache_options or {}).get("ttl")
        self._last, self._takes_documents = len(request.messages) - 1, takes_documents
        self._pairs = CallPairs()
        self._check(self._ttl)
        self.messages = [self._message(message, at) for at, message in enumerate(request.messages)]

    def warnings(self) -> tuple[str, ...]:
        kinds = ((NOT_SHOWN, self.not_shown), (LEFT_OUT, self.left_out), (AS_USER, self.roles))
        said = [f"{text}: {counted(kind)}" for text, kind in kinds if kind]
        if self.unconstrained:
            said.append(UNCONSTRAINED.format(listed(self.unconstrained)))
        said += [text.format(reprlib.repr(time)) for text, time in self._times.items()]
        return tuple(said)

    def functions(self, tools: Sequence[Fields]) -> list[Fields]:
        """Return the tools, with a function in place of each tool that takes free text."""
        return [self._function(tool) if _custom_of(tool) else tool for tool in tools]

    def _function(self, tool: Fields) -> Fields:
        custom = _custom_of(tool)
        text, has_grammar = described(custom)
        if has_grammar:
            self.unconstrained.append(str(custom.get("name")))
        function = {"name": custom.get("name"), "description": text, "parameters": TEXT_ARGUMENT}
        return {name: value for name, value in tool.items() if name != "custom"} | {"type": "function", "function": function}

    def mark(self, at: int, control: JsonValue) -> None:
        """Store a breakpoint at the end of a message. control: the breakpoint as the client sent it.

        If a message has several breakpoints, only the longest `ttl` has an effect.
        """
        ttl = control.get("ttl") if isinstance(control, dict) else None
        self._check(ttl)
        self.breakpoints[at] = max(self.breakpoints.get(at, 0.0), seconds_of(ttl), seconds_of(self._ttl))

    def _check(self, ttl: JsonValue) -> None:
        """Store a warning if a `ttl` is not a valid duration, or is longer than `LONGEST_PIN`."""
        seconds = _seconds(ttl)
        if ttl is not None and (seconds is None or seconds > LONGEST_PIN):
            self._times.setdefault(NO_TIME if seconds is None else LONG_TIME, ttl)

    def mark_of(self, at: int, marked: Fields) -> None:
        """Store the breakpoints in the fields of a part, a message or a tool.

        at: the index of the message at whose end the breakpoints apply.
        """
        for control in (marked[name] for name in MARKS & marked.keys() if marked[name] is not None):
            self.is_marked = True
            self.mark(at, control)

    def _message(self, message: Fields, at: int) -> Fields:
        changed: Fields = {}
        role = message.get("role")
        if role not in ROLES and at != self._last:
            self.roles[kind_name(role) if isinstance(role, str) else OTHER] += 1
            role = changed["role"] = "user"
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            changed |= self._content(message, str(role), at)
        if content is None and isinstance(message.get("refusal"), str):
            changed["content"] = message["refusal"]
        if not isinstance(reasoning := message.get("reasoning_content"), str | None):
            changed["reasoning_content"] = texts_in(reasoning)
        changed |= self._calls(message, changed.pop("tool_calls", ()), at)
        if role not in TOOLS and "tool_call_id" in message:
            changed["tool_call_id"] = None
        if role == "function":
            changed |= {"role": "tool", "tool_call_id": ON.format(at - 1)}
        if not MARKS.isdisjoint(message):
            self.mark_of(at, message)
            message = _without_marks(message)
        if changed:
            message = {name: value for name, value in message.items() if name not in ("refusal", "function_call")} | changed
        if None in message.values():
            message = {name: value for name, value in message.items() if value is not None or name == "content"}
        return self._pairs.answer(message) if role in TOOLS else message

    def _calls(self, message: Fields, more: Sequence[Fields], at: int) -> Fields:
        """Return the changed field for a message's calls; empty: no change. more: the calls in the message's content."""
        given = message.get("tool_calls")
        if isinstance(old := message.get("function_call"), dict) and not given:
            given = [{"id": ON.format(at), "type": "function", "function": old}]
        if not given and not more:
            return {}
        listed = [call for call in given if call is not None] if isinstance(given, list) else [given] if given else []
        if message.get("role") != "assistant":
            self.left_out["tool_calls"] += len(listed)
            return {"tool_calls": None}
        calls = [call for one in listed for call in self._call(one)]
        calls = self._pairs.call(calls or more, at) if calls or more else []
        return {} if calls == message.get("tool_calls") else {"tool_calls": calls or None}

    def _content(self, message: Fields, role: str, at: int) -> Fields:
        """Convert a message's content that is not a text. Return the fields of the message that change.

        Only the content, the reasoning and the calls can change. The new content is a text or a list of text parts.
        """
        content, is_result, is_question = message["content"], role in TOOLS, at == self._last and role == "user"
        if not isinstance(content, list):
            if is_question:
                return {}  # a later check refuses the content
            if not isinstance(content, dict):
                return {"content": json_text(content)}
            content = [content]
        if is_result and self._takes_documents and documents_in(message, f"messages[{at}].content"):
            return {}
        reasoning: list[str] = []
        calls: list[Fields] = []
        parts: list[JsonValue] = []
        for i, part in enumerate(content):
            part = self._unmarked(part, at)
            kind = part.get("type") if isinstance(part, dict) else None
            if role == "assistant" and kind == "tool_use":
                calls += self._call(part)
            elif role == "assistant" and isinstance(kind, str) and kind in REASONING:
                reasoning.append(texts_in(part))
            elif is_result and _is_data(part):
                parts.append({"type": "text", "text": json_text(part)})
            else:
                parts += self._part(part, f"messages[{at}].content[{i}].type", is_question)
        changed: Fields = {"content": parts} if parts != message["content"] else {}
        if any(reasoning) and not message.get("reasoning_content"):
            changed["reasoning_content"] = "\n\n".join(filter(None, reasoning))
        return changed | ({"tool_calls": calls} if calls else {})

    def _call(self, call: JsonValue) -> list[Fields]:
        """Return a list with the call in a chat's form; an empty list if the call names no function."""
        read = read_call(_function_call(call))
        if read is None:
            self.left_out["tool_calls"] += 1
        return [read] if read is not None else []

    def _unmarked(self, part: JsonValue, at: int) -> JsonValue:
        if not isinstance(part, dict) or MARKS.isdisjoint(part):
            return part
        self.mark_of(at, part)
        return _without_marks(part)

    def _part(self, part: JsonValue, where: str, is_question: bool) -> list[JsonValue]:
        """Return a list with the text part that replaces a part; an empty list if the part is dropped.

        Raises RequestError if the part is unreadable and belongs to the question.
        """
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return [part]
        read = read_part(part)
        if read.kind and is_question:
            kind = part["type"] if isinstance(part, dict) and isinstance(part.get("type"), str) else OTHER
            raise RequestError(f"{where} is {reprlib.repr(kind)}: {unsupported(kind)}", param=where)
        if read.kind:
            (self.not_shown if read.text else self.left_out)[read.kind] += 1
        return [{"type": "text", "text": read.text}] if read.text else []


def _is_data(part: JsonValue) -> bool:
    """Return whether a part of a tool's result is JSON data instead of a part with a type."""
    if isinstance(part, dict):
        return not isinstance(part.get("type"), str) and part.keys() != {"text"}
    return part is not None and not isinstance(part, str)


def seconds_of(ttl: JsonValue) -> float:
    """Return the seconds of a duration such as 5m, at most `LONGEST_PIN`; 0 for any other value."""
    return min(_seconds(ttl) or 0.0, LONGEST_PIN)


def _seconds(ttl: JsonValue) -> float | None:
    found = TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    return float(found[1]) * SECONDS[found[2]] if found else None


def _lives(options: dict[str, JsonValue] | None) -> bool:
    """Return whether the field `prompt_cache_options` pins the whole prompt.

    The field pins the whole prompt if it has a valid `ttl` and its mode is not `explicit`.
    """
    return bool(options) and options.get("mode") != "explicit" and seconds_of(options.get("ttl")) > 0


# ---- Tools whose calls are free text: the model sees functions with a text as their argument. ----------------------------

INPUT = "input"  # the argument with the free text
TEXT_ARGUMENT: Fields = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
"""The arguments of a tool with free text."""
UNCONSTRAINED = "tools: the grammar of {} is shown to the model and not enforced"


def described(tool: Mapping[str, JsonValue]) -> tuple[str, bool]:
    """Return the description of a tool that takes free text, including its grammar, and whether it has a grammar."""
    text, form = str(tool.get("description") or ""), tool.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return text, False
    grammar = nested if isinstance(nested := form.get("grammar"), dict) else form  # in the form of a chat, or of a response
    return f"{text}\n\nThe input fits this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}".strip(), True


def custom_names(tools: Sequence[JsonValue] | None) -> frozenset[str]:
    """Return the names of the tools that take free text."""
    return frozenset(str(custom.get("name")) for tool in tools or () if (custom := _custom_of(tool)))


def _custom_of(tool: JsonValue) -> Fields:
    """Return the field `custom` of a tool that takes free text, or of a call or a choice of it; else an empty object."""
    custom = tool.get("custom") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    return custom if isinstance(custom, dict) else {}


def _function_call(call: JsonValue) -> JsonValue:
    if not (custom := _custom_of(call)):
        return call
    arguments = json.dumps({INPUT: custom.get(INPUT)}, ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def _function_choice(choice: JsonValue) -> JsonValue:
    """Return a `tool_choice` in which functions replace the tools that take free text."""
    if custom := _custom_of(choice):
        return {"type": "function", "function": {"name": custom.get("name")}}
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*tools]} as allowed}:
            return choice | {"allowed_tools": allowed | {"tools": list(map(_function_choice, tools))}}
    return choice


def _without_hosted(request: ChatRequest) -> tuple[ChatRequest, str]:
    """Return the chat without the tools that a server would have to run, and a text with the types of these tools."""
    hosted = [str(tool["type"]) for tool in request.tools or () if _is_hosted(tool)]
    if not hosted:
        return request, ""
    choice = request.tool_choice
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed]} as given}:
            choice = choice | {"allowed_tools": given | {"tools": [tool for tool in allowed if not _is_hosted(tool)]}}
    tools = [tool for tool in request.tools or () if not _is_hosted(tool)]
    return msgspec.structs.replace(request, tools=tools or None, tool_choice=choice), listed(map(kind_name, hosted))


def _is_hosted(tool: JsonValue) -> bool:
    """Return whether a server would have to run a tool: the tool is no function and takes no free text."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    own = ("function", "custom")
    return isinstance(kind, str) and kind not in own and not any(isinstance(tool.get(name), dict) for name in own)


def _of_functions(request: ChatRequest) -> Fields:
    """Return the fields that replace `functions` and `function_call`. Raises RequestError."""
    if request.tools:
        raise RequestError("functions and tools: send one of them", param="functions")
    choice = request.function_call
    return {
        "functions": [],  # a value other than None, so that the answer shows calls in the old form
        "tools": [{"type": "function", "function": function} for function in request.functions or ()],
        "tool_choice": {"type": "function", "function": choice} if isinstance(choice, dict) else choice,
        "parallel_tool_calls": False,
    }


def _without_marks(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in MARKS}


def _is_marked_tool(tool: Fields) -> bool:
    function = tool.get("function")
    return not MARKS.isdisjoint(tool) or (isinstance(function, dict) and not MARKS.isdisjoint(function))


def _without_marks_of_tool(tool: Fields) -> Fields:
    function = tool.get("function")
    return _without_marks(tool) | ({"function": _without_marks(function)} if isinstance(function, dict) else {})
