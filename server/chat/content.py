"""What clients write in a chat, in this server's words: refusals, images, calls of the old form, marks of the cache."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

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
    """The messages of a chat as they are taken. left_out: by kind, the parts that are no text. is_marked: any has a mark."""

    def __init__(self, request: ChatRequest) -> None:
        self.left_out, self.is_marked, self.breakpoints = Counter[str](), False, dict[int, float]()
        self._ttl = (request.prompt_cache_options or {}).get("ttl")
        self._last = len(request.messages) - 1
        self.messages = [self._message(message, at) for at, message in enumerate(request.messages)]

    def warnings(self) -> tuple[str, ...]:
        if not self.left_out:
            return ()
        counted = ", ".join(f"{kind} ({number})" for kind, number in self.left_out.items())
        return (f"messages: parts that are no text are not shown to the model, a line of text stands for each: {counted}",)

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
