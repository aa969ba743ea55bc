"""Parts of messages, from any server: tool calls, results of calls, and the texts that replace unknown parts.

A conversation that another server started can go on here, even if it contains parts that this server does not know. The
text that replaces a part depends only on this part, so it is the same in each turn.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .sampling_fields import JsonValue

Fields = dict[str, JsonValue]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
UNREADABLE: Mapping[str, str] = {
    "image_url": "image", "input_image": "image", "image": "image", "input_audio": "audio", "audio_url": "audio",
    "video_url": "video", "input_video": "video", "file": "file", "input_file": "file", "document": "file",
    "computer_screenshot": "image", "image_generation_call": "image",
}  # fmt: skip
"""Types of parts that are not text, each with its kind."""
TEXTS = {
    "text": "text", "input_text": "text", "output_text": "text", "summary_text": "text", "reasoning_text": "text",
    "refusal": "refusal", "compaction": "content",
}  # fmt: skip
"""Types of parts that are text, each with the field that has the text."""
REASONING = frozenset({"thinking", "reasoning", "reasoning_content", "reasoning_text"})
SILENT = frozenset({"redacted_thinking"})  # encrypted: only the server that wrote it can read it
SHOWN = frozenset({
    "name", "tool_name", "title", "filename", "description", "url", "uri", "query", "text", "thinking", "reasoning",
    "summary", "content", "output", "result", "stdout", "stderr", "lines", "message", "error_code", "queries", "code",
    "logs",
})  # fmt: skip
"""Fields in another server's parts with text for a model. Other fields contain ids, numbers or encrypted text."""
WRITTEN = frozenset({"input", "arguments", "action"})  # fields that a model wrote: shown as JSON
MOST_SHOWN = 8192  # most characters shown of another server's part
MOST_LEVELS = 16  # most levels of a part that are searched for texts
MOST_KINDS, LONGEST_NAME = 8, 64  # most kinds in a warning; most characters of a name
OTHER = "other"  # the kind of a part without a name
NAME = re.compile(r"[\w.:-]{1,64}", re.ASCII)


def unsupported(kind: str) -> str:
    """Return the reason why a part of this type is refused."""
    if kind not in UNREADABLE:
        return "this server cannot read it: expected text"
    return f"{UNREADABLE[kind]} input is not supported: this server reads and writes text only"


def stand_in(kind: str) -> str:
    """Return the line of text that replaces a part of this type."""
    return f"[{UNREADABLE[kind]}: not shown, since this model reads text only]"


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A part as the model sees it.

    text: the text that the model sees; empty: it sees nothing. kind: the kind of the part for a warning; empty: the part
    needs no warning.
    """

    text: str
    kind: str = ""


def read_part(part: JsonValue) -> ReadPart:
    """Return the text for a part: its own text, a line for an image or a file, or `[type: the texts in the part]`."""
    if part is None or isinstance(part, str):
        return ReadPart(part or "")
    if not isinstance(part, dict):
        return ReadPart("", OTHER)
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str):
        return ReadPart("", OTHER)
    field = TEXTS.get(kind, kind)
    text = part.get(field)
    if kind in SILENT:
        return ReadPart("")
    if kind in TEXTS and (isinstance(text, str) or (text is None and field in part)):
        return ReadPart(text or "")
    if kind in UNREADABLE and not (kind == "document" and _is_text(part.get("source"))):
        return ReadPart(stand_in(kind), UNREADABLE[kind])
    name = kind_name(kind)
    found = texts_in(part).strip()
    if len(found) > MOST_SHOWN:
        found = f"{found[:MOST_SHOWN]}..."
    return ReadPart(f"[{name}: {found}]" if found else "", name)


def kind_name(kind: str) -> str:
    """Return the type of a part or a tool, or `OTHER` if the type is not fit for texts and warnings."""
    return kind if NAME.fullmatch(kind) else OTHER


def counted(kinds: Counter[str]) -> str:
    """Return the kinds and their counts as a text for a warning."""
    named = [f"{kind} ({number})" for kind, number in list(kinds.items())[:MOST_KINDS]]
    return ", ".join([*named, f"{len(kinds) - MOST_KINDS} more"] if len(kinds) > MOST_KINDS else named)


def listed(names: Iterable[str]) -> str:
    """Return names as a text for a warning: each name once, and at most `MOST_KINDS` names."""
    known = list(dict.fromkeys(names))
    shown = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in known[:MOST_KINDS]]
    return ", ".join([*shown, f"{len(known) - MOST_KINDS:,} more"] if len(known) > MOST_KINDS else shown)


def texts_in(value: JsonValue) -> str:
    """Return the readable texts in a value, each on its own line."""
    return "\n".join(filter(str.strip, _texts(value, "text", MOST_LEVELS)))


def _texts(value: JsonValue, field: str, levels: int) -> Iterator[str]:
    if field in WRITTEN and value is not None:
        yield value if isinstance(value, str) else json_text(value)
    elif isinstance(value, str):
        if field in SHOWN:
            yield value
    elif levels and isinstance(value, list):
        for one in value:
            yield from _texts(one, field, levels - 1)
    elif levels and isinstance(value, dict):
        for name, one in value.items():
            yield from _texts(one, "text" if name == "data" and _is_text(value) else name, levels - 1)


def _is_text(source: JsonValue) -> bool:
    """Return whether the source of a document is text."""
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def json_text(value: JsonValue) -> str:
    """Return a value as JSON; empty if the value is nested too deeply."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        return ""


# ---- Calls and their results. -------------------------------------------------------------------------------------------


def read_call(call: JsonValue) -> Fields | None:
    """Return a call in the form of a chat; None: it names no function. call: a call, or a part of type `tool_use`."""
    if not isinstance(call, dict):
        return None
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        return None
    if function is not call and "arguments" in function and None not in (*call.values(), *function.values()):
        return call
    arguments = next((function[field] for field in ("arguments", "input", "args") if function.get(field) is not None), {})
    named = {"name": name, "arguments": arguments if isinstance(arguments, str) else json_text(arguments)}
    return {"id": call.get("id"), "type": "function", "function": named}


class CallPairs:
    """Matches tool results with the calls of the newest answer that has calls."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # the names of the called tools, by the ids of the calls
        self._open: dict[str, None] = {}  # ids of the calls without a result, in order
        self._waiting: dict[str | None, deque[str]] = {}  # ids by the name of the tool; None: of all tools

    def call(self, calls: Sequence[Fields], at: int) -> list[Fields]:
        """Store the calls of an answer, and return them, each with an id. at: the index of the answer's message."""
        # The ids have 9 letters and digits, as Mistral's templates demand.
        named = [_with_id(call, f"call{at:03}{number:02}") for number, call in enumerate(calls)]
        self._names = {call["id"]: call["function"]["name"] for call in named}
        self._open = dict.fromkeys(self._names)
        self._waiting = {None: deque(self._names)}
        for id, name in self._names.items():
            self._waiting.setdefault(name, deque()).append(id)
        return named

    def answer(self, result: Fields) -> Fields:
        """Return a tool's message with the id of the call that it answers.

        If the message names the id of a known call, it answers this call. A message with no known id answers the first
        call without a result. If the message names a tool, only calls of this tool count.
        """
        given, name = result.get("tool_call_id"), result.get("name")
        id = given if isinstance(given, str) else "" if given is None else json_text(given)
        if id not in self._names and (found := self._first(name if isinstance(name, str) and name else None)):
            result = {"name": self._names[found]} | {field: value for field, value in result.items() if value is not None}
            id = found
        self._open.pop(id, None)
        if id == given:
            return result
        rest = {field: value for field, value in result.items() if field != "tool_call_id"}
        return rest | ({"tool_call_id": id} if id else {})

    def _first(self, name: str | None) -> str | None:
        """Return the id of the first call without a result; None: there is none. name: the called tool; None: any tool."""
        waiting = self._waiting.get(name, deque())
        while waiting and waiting[0] not in self._open:
            waiting.popleft()
        return waiting[0] if waiting else None


def _with_id(call: Fields, made: str) -> Fields:
    """Return a call whose id is a text. made: the id that a call without an id gets."""
    id = call.get("id")
    if isinstance(id, str) and id:
        return call
    return {**call, "id": made if id in (None, "") else json_text(id)}
