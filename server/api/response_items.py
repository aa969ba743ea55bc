"""Items of OpenAI's Responses as messages of a chat, and back.

Reasoning, an answer and its calls are items of their own there, and one message here: the one that the model wrote. A
history may hold anything: what can be read is read, what cannot is left out and counted. Only the question is refused.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ...models.call_arguments import argument_text
from ..chat.content import INPUT, UNREADABLE, unsupported
from ..chat.sampling_fields import JsonValue
from ..chat.shortened_history import QUESTION, summary_message
from ..http.api_errors import RequestError
from .compaction import SUMMARIES, TRIGGER
from .reply import unseal
from .response_tools import CalledTool, free_text, function_name

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {  # kinds of parts: their field
    "input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text",
    "reasoning_text": "text",
}  # fmt: skip
IMAGES = {"computer_screenshot": "image"}  # kinds of parts that a chat has under another name
SEALED = "encrypted_content"  # a field, and a part of nothing else
PARTS = frozenset({*TEXTS, *UNREADABLE, *IMAGES, SEALED})

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
NAMED, LONGEST_NAME = 8, 40  # kinds in a warning, and the characters of one
TYPES = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}

MARK = "prompt_cache_breakpoint"  # of a part
Item = Mapping[str, JsonValue]
ChatMessages = list[dict[str, JsonValue]]


@dataclass(frozen=True, slots=True)
class TakenItems:
    """The messages that items make. left_out: by kind, what was not shown as it was sent."""

    messages: ChatMessages
    left_out: Counter[str]

    def warnings(self) -> Iterator[str]:
        if self.left_out:
            counted = ", ".join(f"{kind} ({number})" for kind, number in islice(self.left_out.items(), NAMED))
            more = f", and {len(self.left_out) - NAMED:,} more" if len(self.left_out) > NAMED else ""
            yield f"input: not shown to the model, or only their text: {counted}{more}"


def take_items(items: Sequence[JsonValue]) -> TakenItems:
    """Return the messages that items make. Raises RequestError for a question that cannot be read.

    The question is the last item, if it is a message of the user. An item becomes the same wherever it stands.
    """
    reader = _ItemReader()
    for at, item in enumerate(items):
        reader.take(item, f"input[{at}]", at, is_last=at == len(items) - 1)
    return TakenItems(reader.messages, reader.left_out)


class _ItemReader:
    """Reads items into messages. left_out: as in `TakenItems`."""

    def __init__(self) -> None:
        self.messages: ChatMessages = []
        self.left_out = Counter[str]()
        self._unanswered = OrderedDict[str, None]()  # ids of calls without an output so far

    def take(self, item: JsonValue, where: str, at: int, *, is_last: bool) -> None:
        """Read an item. at: its place, from which a call without an id gets one. Raises RequestError."""
        if isinstance(item, str):
            item = {"role": "user", "content": item}
        if not isinstance(item, dict):
            self._leave_out(item)
            return
        match item.get("type") or "message":
            case "message":
                self._take_message(item, where, is_last)
            case "reasoning":
                self._take_reasoning(item)
            case "function_call" | "custom_tool_call":
                self._take_call(item, at)
            case "function_call_output" | "custom_tool_call_output":
                self._take_output(item)
            case kind if kind in SUMMARIES:
                if summary := self._unseal(item):
                    self.messages.append(summary_message(summary))
            case kind if kind == TRIGGER and is_last:
                self.messages.append(dict(QUESTION))
            case "item_reference" if is_last:
                expected = "expected the item itself: nothing is looked up"
                raise RequestError(f"{where}.type is item_reference: {expected}", param=f"{where}.type")
            case _:
                self._take_other(item)

    def _take_message(self, item: Item, where: str, is_last: bool) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            if is_last:
                wrong = f"{where}.role is {reprlib.repr(role)}: expected one of {', '.join(ROLES)}"
                raise RequestError(wrong, param=f"{where}.role")
            self._take_other({**item, "type": role} if isinstance(role, str) else item)
            return
        read = self._content(content, f"{where}.content", is_question=is_last and role == "user")
        if role == "assistant":
            _answer(self.messages, "content", "tool_calls").update({"content": read} | _mark(content))
        else:
            self._add({"role": role, "content": read} | _mark(content), item)

    def _take_reasoning(self, item: Item) -> None:
        """Take reasoning: as it is, as a summary, or sealed by this server."""
        for name in ("content", "summary"):
            given = item.get(name)
            parts = given if isinstance(given, list) else [given]
            if texts := [text for part in parts if (text := _text(part)) is not None]:
                text = "\n".join(texts)
                break
        else:
            text = self._unseal(item)
        if text:
            _answer(self.messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _unseal(self, item: Item) -> str:
        """Return what this server sealed in an item; empty for what another one did, which is left out."""
        sealed = item.get(SEALED)
        text = unseal(sealed) if isinstance(sealed, str) else ""
        if not text and (sealed or item["type"] in SUMMARIES):
            self._leave_out(item)
        return text

    def _take_call(self, item: Item, at: int) -> None:
        name, namespace = item.get("name"), item.get("namespace")
        if not isinstance(name, str):
            self._leave_out(item)
            return
        if item["type"] == "custom_tool_call":
            arguments = json.dumps({INPUT: _value_text(item.get(INPUT))}, ensure_ascii=False)
        else:
            given = item.get("arguments")
            arguments = given if isinstance(given, str) else argument_text(given)
        id = next((id for id in (item.get("call_id"), item.get("id")) if isinstance(id, str)), f"call_{at}")
        self._unanswered[id] = None
        message = _answer(self.messages)
        message["content"] = message["content"] or None
        function = {"name": function_name(name, namespace if isinstance(namespace, str) else None), "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})

    def _take_output(self, item: Item) -> None:
        """Take the result of a call; without an id, of the first one that has none yet."""
        output, id = item.get("output"), item.get("call_id")
        if isinstance(id, str):
            self._unanswered.pop(id, None)
        else:
            id = self._unanswered.popitem(last=False)[0] if self._unanswered else ""
        parts = output if isinstance(output, list) else [output]
        content = self._content(output) if all(map(_is_part, parts)) else _value_text(output)
        self._add({"role": "tool", "tool_call_id": id, "content": content} | _mark(output), item)

    def _take_other(self, item: Item) -> None:
        """Take an item of another kind: what it has as its content is a user's text."""
        self._leave_out(item)
        if (content := self._content(item.get("content"))) != "":
            self._add({"role": "user", "content": content}, item)

    def _add(self, message: dict[str, JsonValue], item: Item) -> None:
        if item.get("documents") is not None:
            message["documents"] = item["documents"]
        self.messages.append(message)

    def _content(self, content: JsonValue, where: str = "", is_question: bool = False) -> str | list[dict[str, JsonValue]]:
        """Return a content as a text, or as several parts. is_question: all of it must be readable. Raises RequestError."""
        if isinstance(content, str):
            return content
        if isinstance(content, dict):
            content = [content]
        if not isinstance(content, list):
            if is_question:
                raise RequestError(f"{where}: expected a text or a list of parts", param=where)
            return _value_text(content)
        taken = (self._part(part, f"{where}[{at}]", is_question) for at, part in enumerate(content))
        parts = [part for part in taken if part is not None]
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        return parts[0]["text"] if is_text else parts or ""

    def _part(self, part: JsonValue, where: str, is_question: bool) -> dict[str, JsonValue] | None:
        """Return a part as a chat has it; None for one with nothing in it that a model could have read."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            kind = None
        elif kind in IMAGES:
            kind = IMAGES[kind]
        if kind not in UNREADABLE and (text := _text(part)) is not None:
            return {"type": "text", "text": text}
        if is_question and part is not None:
            if kind in TEXTS:
                raise RequestError(f"{where}.{TEXTS[kind]}: expected a text", param=f"{where}.{TEXTS[kind]}")
            problem = f"{unsupported(kind)}: " if kind is not None and kind in UNREADABLE else ""
            expected = f"{problem}expected one of {', '.join(TEXTS)}"
            raise RequestError(f"{where}.type is {reprlib.repr(kind)}: {expected}", param=f"{where}.type")
        if kind in UNREADABLE:
            return {"type": kind}
        name = self._leave_out(part)
        if not isinstance(part, dict) or kind in TEXTS or kind == SEALED:
            return None
        return {"type": "text", "text": f"[{name}: not shown, since this model reads text only]"}

    def _leave_out(self, value: JsonValue) -> str:
        """Count what is not shown as it was sent; return its kind."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is None and isinstance(value, dict) and "id" in value:
            kind = "item_reference"
        name = kind[:LONGEST_NAME] if isinstance(kind, str) else TYPES[type(value)]
        self.left_out[name] += 1
        return name


def _text(part: JsonValue) -> str | None:
    """Return the text of a part; None for one that has none."""
    if isinstance(part, dict):
        kind = part.get("type")
        part = part.get(TEXTS.get(kind, "text") if isinstance(kind, str) else "text")
    return part if isinstance(part, str) else None


def _is_part(value: JsonValue) -> bool:
    """Whether a value in an output is a part of a content, and not just any value of a tool."""
    kind = value.get("type") if isinstance(value, dict) else None
    return value is None or isinstance(value, str) or (isinstance(kind, str) and kind in PARTS)


def _value_text(value: JsonValue) -> str:
    """Return a value of any type as a text: nothing for null, JSON for an object."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _answer(messages: ChatMessages, *taken: str) -> dict[str, JsonValue]:
    """Return the message of the model that an item belongs to: the last one, or a new one if that has one of `taken`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _mark(content: JsonValue) -> dict[str, JsonValue]:
    """Return the field of a message that marks its end, if any of its parts is marked."""
    parts = content if isinstance(content, list) else ()
    return {MARK: {}} if any(isinstance(part, dict) and part.get(MARK) is not None for part in parts) else {}


# ---- messages to items -------------------------------------------------------------------------------------------------


def items_of(
    messages: Sequence[Item], suffix: str, called: Mapping[str, CalledTool] | None = None
) -> list[dict[str, JsonValue]]:
    """Return the items that messages are made of. suffix: of their ids, with their number behind it. called: its tools."""
    items: list[dict[str, JsonValue]] = []
    customs: set[str] = set()  # ids of the calls with a free text
    for message in messages:
        for item in _items(message, called or {}, customs):
            prefix = PREFIXES.get(item["type"], "fco")
            items.append({"id": f"{prefix}_{suffix}_{len(items)}", "status": "completed"} | item)
    return items


def _items(message: Item, called: Mapping[str, CalledTool], customs: set[str]) -> list[dict[str, JsonValue]]:
    """customs: ids of calls with a free text, to which those of the message are added."""
    role, content = message.get("role"), message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}] if content else []
    texts = [part.get("text", "") for part in parts]
    if role in ("tool", "function"):
        output = texts[0] if len(texts) == 1 else [{"type": "input_text", "text": text} for text in texts]
        id = message.get("tool_call_id", "")
        kind = "custom_tool_call_output" if id in customs else "function_call_output"
        return [{"type": kind, "call_id": id, "output": output}]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}]
    items: list[dict[str, JsonValue]] = []
    if reasoning := message.get("reasoning_content"):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]})
    if texts:
        shown = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
        items.append({"type": "message", "role": "assistant", "content": shown})
    for call in message.get("tool_calls") or []:
        id, name, arguments = call.get("id", ""), call["function"]["name"], call["function"]["arguments"]
        tool = called.get(name) or CalledTool(name)
        if tool.is_custom:
            customs.add(id)
            items.append({"type": "custom_tool_call", "call_id": id, INPUT: free_text(arguments)} | tool.named())
        else:
            items.append({"type": "function_call", "call_id": id, "arguments": arguments} | tool.named())
    return items
