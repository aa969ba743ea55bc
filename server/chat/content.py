"""What clients write in a chat, in this server's words: refusals, images, calls of the old form, marks of the cache."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ..http.api_errors import RequestError
from .body import ChatRequest
from .sampling_fields import JsonValue
from .volatile import INSTRUCTIONS

UNREADABLE: Mapping[str, str] = {
    "image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio_url": "audio",
    "video_url": "video", "input_video": "video", "file": "file", "input_file": "file",
}  # fmt: skip
"""Parts of a content that are no text, and what they are."""
MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields that mark how far a prompt may be cached. They are no part of it: a client moves them from turn to turn."""
NOT_SHOWN = "messages: parts that are no text are not shown to the model, a line of text stands for each"
ON = "call_{}"  # the id of a call of the old form, by its message
TTL = re.compile("([0-9]{1,6})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_PIN = 7 * 86_400.0  # seconds

Fields = dict[str, JsonValue]
Breakpoints = Mapping[int, float]
"""By the index of a message: how many seconds the prompt up to its end is pinned; 0: not at all."""


def take(request: ChatRequest) -> tuple[ChatRequest, Breakpoints, tuple[str, ...]]:
    """Return a chat in this server's words, its breakpoints, and a warning for what the model is not shown.

    An image in the last message, if that is a user's, is refused, since the question may be about it. Elsewhere a line of
    text stands for it: a thread that once had an image must go on. A breakpoint counts at the end of its message, that of a
    tool at the end of the instructions, that of the request at the end of the last message. Raises RequestError.
    """
    taken = _Taken(request)
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
    return msgspec.structs.replace(request, **changed) if changed else request, taken.breakpoints, taken.warnings()


class _Taken:
    """The messages of a chat as they are taken. left_out: by kind, the parts that are no text. is_marked: any has a mark.

    unconstrained: the tools whose free text should fit a grammar.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.unconstrained: list[str] = []
        self.left_out, self.is_marked, self.breakpoints = Counter[str](), False, dict[int, float]()
        self._ttl = (request.prompt_cache_options or {}).get("ttl")
        self._last = len(request.messages) - 1
        self.messages = [self._message(message, at) for at, message in enumerate(request.messages)]

    def warnings(self) -> tuple[str, ...]:
        said: list[str] = []
        if self.left_out:
            counted = ", ".join(f"{kind} ({number})" for kind, number in self.left_out.items())
            said.append(f"{NOT_SHOWN}: {counted}")
        if self.unconstrained:
            said.append(UNCONSTRAINED.format(", ".join(self.unconstrained)))
        return tuple(said)

    def functions(self, tools: Sequence[Fields]) -> list[Fields]:
        """Return the tools, each with free text as a function."""
        return [self._function(tool) if _custom_of(tool) else tool for tool in tools]

    def _function(self, tool: Fields) -> Fields:
        custom = _custom_of(tool)
        text, has_grammar = described(custom)
        if has_grammar:
            self.unconstrained.append(str(custom.get("name")))
        function = {"name": custom.get("name"), "description": text, "parameters": TEXT_ARGUMENT}
        return {name: value for name, value in tool.items() if name != "custom"} | {"type": "function", "function": function}

    def mark(self, at: int, control: JsonValue) -> None:
        """Note a breakpoint behind a message. control: may have a time; of several ones the longest counts."""
        times = (control.get("ttl") if isinstance(control, dict) else None, self._ttl)
        self.breakpoints[at] = max(self.breakpoints.get(at, 0.0), *map(seconds_of, times))

    def mark_of(self, at: int, marked: Fields) -> None:
        """Note the breakpoints of a part, a message or a tool."""
        for control in (marked[name] for name in MARKS & marked.keys()):
            self.is_marked = True
            self.mark(at, control)

    def _message(self, message: Fields, at: int) -> Fields:
        changed: Fields = {}
        content = message.get("content")
        if isinstance(content, list):
            is_question = at == self._last and message.get("role") == "user"
            where = f"messages[{at}].content"
            parts = [self._part(part, at, f"{where}[{i}].type", is_question) for i, part in enumerate(content)]
            if parts != content:
                changed["content"] = parts
        if content is None and isinstance(message.get("refusal"), str):
            changed["content"] = message["refusal"]
        if isinstance(call := message.get("function_call"), dict) and not message.get("tool_calls"):
            changed["tool_calls"] = [{"id": ON.format(at), "type": "function", "function": call}]
        if isinstance(calls := message.get("tool_calls"), list) and any(map(_custom_of, calls)):
            changed["tool_calls"] = list(map(_function_call, calls))
        if message.get("role") == "function":
            changed |= {"role": "tool", "tool_call_id": ON.format(at - 1)}
        if not MARKS.isdisjoint(message):
            self.mark_of(at, message)
            message = _without_marks(message)
        if changed:
            message = {name: value for name, value in message.items() if name not in ("refusal", "function_call")} | changed
        return message

    def _part(self, part: JsonValue, at: int, where: str, is_question: bool) -> JsonValue:
        if not isinstance(part, dict):
            return part
        if not MARKS.isdisjoint(part):
            self.mark_of(at, part)
            part = _without_marks(part)
        kind = part.get("type")
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            return {"type": "text", "text": part["refusal"]}
        if not isinstance(kind, str) or kind not in UNREADABLE:
            return part
        if is_question:
            raise RequestError(f"{where} is {kind}: {unsupported(kind)}", param=where)
        self.left_out[UNREADABLE[kind]] += 1
        return {"type": "text", "text": stand_in(kind)}


def seconds_of(ttl: JsonValue) -> float:
    """Return the seconds of a time such as 5m; 0 if it is none."""
    found = TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    return min(float(found[1]) * SECONDS[found[2]], LONGEST_PIN) if found else 0.0


def _lives(options: dict[str, JsonValue] | None) -> bool:
    """Whether the end of the prompt is a breakpoint with a time, as it is where a request says nothing else."""
    return bool(options) and options.get("mode") != "explicit" and seconds_of(options.get("ttl")) > 0


def unsupported(kind: str) -> str:
    """Return why a part of this kind is refused."""
    return f"{UNREADABLE[kind]} input is not supported: this server reads and writes text only"


def stand_in(kind: str) -> str:
    """Return the line of text that stands for a part of this kind."""
    return f"[{UNREADABLE[kind]}: not shown, since this model reads text only]"


# ---- Tools whose calls are a free text: for the model, functions with one text among their arguments. --------------------

INPUT = "input"  # the argument that holds a free text
TEXT_ARGUMENT: Fields = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
"""The arguments of a tool with free text."""
UNCONSTRAINED = "tools: the grammar of {} is shown to the model and not enforced"


def described(tool: Mapping[str, JsonValue]) -> tuple[str, bool]:
    """Return the description of a tool with free text, and whether that has to fit a grammar, which then stands in it."""
    text, form = str(tool.get("description") or ""), tool.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return text, False
    grammar = nested if isinstance(nested := form.get("grammar"), dict) else form  # in a chat, and in a response
    return f"{text}\n\nThe input fits this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}".strip(), True


def custom_names(tools: Sequence[JsonValue] | None) -> frozenset[str]:
    """Return the names of the tools of a chat whose calls are a free text."""
    return frozenset(str(custom.get("name")) for tool in tools or () if (custom := _custom_of(tool)))


def _custom_of(tool: JsonValue) -> Fields:
    """Return what a tool with free text, a call of one or a choice of one says of itself; nothing for all others."""
    custom = tool.get("custom") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    return custom if isinstance(custom, dict) else {}


def _function_call(call: JsonValue) -> JsonValue:
    if not (custom := _custom_of(call)):
        return call
    arguments = json.dumps({INPUT: custom.get(INPUT)}, ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def _function_choice(choice: JsonValue) -> JsonValue:
    """Return a choice among the tools by the functions that stand for them."""
    if custom := _custom_of(choice):
        return {"type": "function", "function": {"name": custom.get("name")}}
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*tools]} as allowed}:
            return choice | {"allowed_tools": allowed | {"tools": list(map(_function_choice, tools))}}
    return choice


def _of_functions(request: ChatRequest) -> Fields:
    """Return the fields of a chat that mean what `functions` and `function_call` mean. Raises RequestError."""
    if request.tools:
        raise RequestError("functions and tools: send one of them", param="functions")
    choice = request.function_call
    return {
        "functions": [],  # which says that calls go back in the old form
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
