"""Converts items of OpenAI's Responses to messages of a chat, and back.

In Responses, reasoning, an answer and its calls are separate items; in a chat they are one message of the model. Items
of the history that cannot be read are left out and counted. If the input ends with a message of the user that cannot be
read, the request is refused.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..chat.content import INPUT, MARKS
from ..chat.parts import counted, json_text, kind_name, read_part, texts_in, unsupported
from ..chat.sampling_fields import JsonValue
from ..chat.shortened_history import QUESTION, summary_message
from ..http.api_errors import RequestError
from .compaction import SUMMARIES, TRIGGER
from .reply import unseal
from .response_tools import CalledTool, free_text, function_name

ROLES = ("user", "assistant", "system", "developer")
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc", "compaction": "cmp"}
TOOL_LISTS = frozenset({"additional_tools", "mcp_list_tools"})  # types of items that list tools of another server
REFERENCE = "item_reference"
LEFT_OUT = "input: items that cannot be read were left out: {}"

Item = Mapping[str, JsonValue]
ChatMessages = list[dict[str, JsonValue]]


@dataclass(frozen=True, slots=True)
class TakenItems:
    """The messages made from items. left_out: the number of items that were left out, by the type of the item."""

    messages: ChatMessages
    left_out: Counter[str]

    def warnings(self) -> Iterator[str]:
        if self.left_out:
            yield LEFT_OUT.format(counted(self.left_out))


def take_items(items: Sequence[JsonValue]) -> TakenItems:
    """Return the messages made from items. Raises RequestError if the question is not text.

    The question is the last item that is not null, if this item is a message of the user. In later requests, the question
    is a part of the history. A question in the history must become the same message as before, so that the prompts have a
    common prefix.
    """
    reader = _ItemReader()
    last = next((at for at in reversed(range(len(items))) if items[at] is not None), None)
    for at, item in enumerate(items):
        reader.take(item, f"input[{at}]", is_last=at == last)
    return TakenItems(reader.messages, reader.left_out)


class _ItemReader:
    """Reads items into messages. left_out: the number of left-out items, by type."""

    def __init__(self) -> None:
        self.messages: ChatMessages = []
        self.left_out = Counter[str]()

    def take(self, item: JsonValue, where: str, *, is_last: bool) -> None:
        if isinstance(item, str):
            item = {"role": "user", "content": item}
        if not isinstance(item, dict):
            if item is not None:
                self._leave_out(item)
            return
        kind = item.get("type") or (REFERENCE if "role" not in item and "id" in item else "message")
        match kind:
            case "message":
                if is_last:
                    _check_question(item, where)
                self._take_message(item)
            case "reasoning":
                self._take_reasoning(item)
            case "function_call" | "custom_tool_call":
                self._take_call(item)
            case "function_call_output" | "custom_tool_call_output":
                output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
                self._add(output, item)
            case kind if kind in SUMMARIES:
                if summary := self._unseal(item):
                    self.messages.append(summary_message(summary))
            case kind if kind == TRIGGER and is_last:
                self.messages.append(dict(QUESTION))
            case kind if kind == REFERENCE and is_last:
                expected = "expected the item itself: nothing is looked up"
                raise RequestError(f"{where}.type is {REFERENCE}: {expected}", param=f"{where}.type")
            case _:
                self._take_other(item, kind)

    def _take_message(self, item: Item) -> None:
        role, content = item.get("role"), _content(item.get("content"))
        if role == "assistant":
            _answer(self.messages, "content", "tool_calls")["content"] = [*content] if isinstance(content, list) else content
        else:
            self._add({"role": role, "content": content}, item)

    def _take_reasoning(self, item: Item) -> None:
        """Add the reasoning of an item to the model's message.

        The reasoning is the item's text, or else its summary, or else the text that this server sealed in the item.
        """
        if text := texts_in(item.get("content")) or texts_in(item.get("summary")) or self._unseal(item):
            _answer(self.messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _unseal(self, item: Item) -> str:
        """Return the text that this server sealed in an item; empty if the item has none.

        If the text cannot be unsealed, or if a summary has no text, count the item as left out.
        """
        sealed = item.get("encrypted_content")
        text = unseal(sealed) if isinstance(sealed, str) else ""
        if not text and (sealed or item["type"] in SUMMARIES):
            self._leave_out(item)
        return text

    def _take_call(self, item: Item) -> None:
        name, namespace, arguments = (item.get(field) for field in ("name", "namespace", "arguments"))
        if not isinstance(name, str) or not name.strip():
            self._leave_out(item)
            return
        if item["type"] == "custom_tool_call":
            text = item.get(INPUT)
            arguments = json.dumps({INPUT: text if isinstance(text, str) else _json_of(text)}, ensure_ascii=False)
        message = _answer(self.messages)
        message["content"] = message["content"] or None
        function = {"name": function_name(name, namespace if isinstance(namespace, str) else None), "arguments": arguments}
        id = next((id for id in (item.get("call_id"), item.get("id")) if isinstance(id, str)), None)
        message.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})

    def _take_other(self, item: Item, kind: JsonValue) -> None:
        """Add an item of a type that no other method takes, such as the result of a tool on another server.

        The item becomes a part of the content of the model's message. If the item has no text, leave it out.
        """
        if not isinstance(kind, str) or kind in TOOL_LISTS or not read_part(item).text:
            self._leave_out(item)
            return
        message = _answer(self.messages)
        if not isinstance(message["content"], list):
            message["content"] = [message["content"]] if message["content"] else []
        message["content"].append(item)  # the list is this reader's own, never a client's

    def _add(self, message: dict[str, JsonValue], item: Item) -> None:
        if item.get("documents") is not None:
            message["documents"] = item["documents"]
        self.messages.append(message)

    def _leave_out(self, item: JsonValue) -> None:
        kind = (item.get("type") or REFERENCE) if isinstance(item, dict) else item
        self.left_out[kind_name(kind if isinstance(kind, str) else "")] += 1


def _check_question(item: Item, where: str) -> None:
    """Raise RequestError if a message has an unknown role, or if it is the user's and its content cannot be read."""
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        wrong = f"{where}.role is {reprlib.repr(role)}: expected one of {', '.join(ROLES)}"
        raise RequestError(wrong, param=f"{where}.role")
    if role != "user" or isinstance(content, str):
        return
    if not isinstance(content, list | dict):
        raise RequestError(f"{where}.content: expected a text or a list of parts", param=f"{where}.content")
    for at, part in enumerate(content if isinstance(content, list) else [content]):
        if kind := read_part(part).kind:
            given = part.get("type", kind) if isinstance(part, dict) else kind
            place = f"{where}.content[{at}].type"
            raise RequestError(f"{place} is {reprlib.repr(given)}: {unsupported(str(given))}", param=place)


def _content(content: JsonValue) -> JsonValue:
    """Return the content of a message in the form of a chat. If the content is a single part with text, return the text."""
    part = content[0] if isinstance(content, list) and len(content) == 1 else content
    if isinstance(part, dict) and isinstance(part.get("type"), str) and MARKS.isdisjoint(part):
        read = read_part(part)
        return [part] if read.kind else read.text
    return "" if content is None else content


def _json_of(value: JsonValue) -> str:
    return "" if value is None else json_text(value)


def _answer(messages: ChatMessages, *taken: str) -> dict[str, JsonValue]:
    """Return the model's message to which an item belongs: the last message, or else a new message.

    A new message is added if the last message is not the model's, or already has one of the fields in `taken`.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# ---- messages to items -------------------------------------------------------------------------------------------------


def items_of(
    messages: Sequence[Item], suffix: str, called: Mapping[str, CalledTool] | None = None
) -> list[dict[str, JsonValue]]:
    """Return the items for messages.

    suffix: the part of the items' ids before their number. called: by the function's name in the chat, the tools whose
    calls differ from calls of functions.
    """
    items: list[dict[str, JsonValue]] = []
    customs: set[str] = set()  # ids of the calls with a free text
    for message in messages:
        for item in _items(message, called or {}, customs):
            prefix = PREFIXES.get(item["type"], "fco")
            items.append({"id": f"{prefix}_{suffix}_{len(items)}", "status": "completed"} | item)
    return items


def _items(message: Item, called: Mapping[str, CalledTool], customs: set[str]) -> list[dict[str, JsonValue]]:
    """Return the items of a message.

    customs: the ids of the earlier calls with free text. The ids of this message's calls with free text are added to
        `customs`.
    """
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
        id, name, given = call.get("id", ""), call["function"]["name"], call["function"].get("arguments")
        arguments = given if isinstance(given, str) else json_text({} if given is None else given)
        tool = called.get(name) or CalledTool(name)
        if tool.is_custom:
            customs.add(id)
            items.append({"type": "custom_tool_call", "call_id": id, INPUT: free_text(arguments)} | tool.named())
        else:
            items.append({"type": "function_call", "call_id": id, "arguments": arguments} | tool.named())
    return items
