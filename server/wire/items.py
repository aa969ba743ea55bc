"""Items of OpenAI's Responses as messages of a chat, and back.

Reasoning, an answer and its calls are items of their own there, and one message here: the one that the model wrote.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence

from ..errors import RequestError
from .requests import Json
from .sealed import unseal

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}  # kinds of parts: their field

Item = Mapping[str, Json]
Messages = list[dict[str, Json]]


def messages_of(items: Sequence[Item]) -> Messages:
    """Return the messages that items make. Raises RequestError."""
    messages: Messages = []
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type", "message")
        take = _TAKE.get(kind) if isinstance(kind, str) else None
        if take is None:
            expected = ", ".join(_TAKE)
            raise RequestError(f"{where}.type is {reprlib.repr(kind)}: expected one of {expected}", param=f"{where}.type")
        take(messages, item, where)
    return messages


def items_of(messages: Sequence[Item], suffix: str) -> list[dict[str, Json]]:
    """Return the items that messages are made of. suffix: of their ids, with their number behind it."""
    items: list[dict[str, Json]] = []
    for message in messages:
        for item in _items(message):
            prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(item["type"], "fco")
            items.append({"id": f"{prefix}_{suffix}_{len(items)}", "status": "completed"} | item)
    return items


# ---- items to messages -------------------------------------------------------------------------------------------------


def _take_message(messages: Messages, item: Item, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        expected = ", ".join(ROLES)
        raise RequestError(f"{where}.role is {reprlib.repr(role)}: expected one of {expected}", param=f"{where}.role")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        _answer(messages, "content", "tool_calls")["content"] = content
        return
    message: dict[str, Json] = {"role": role, "content": content}
    if "documents" in item:
        message["documents"] = item["documents"]
    messages.append(message)


def _take_reasoning(messages: Messages, item: Item, where: str) -> None:
    """Take reasoning: as it is, as a summary, or sealed by this server. What another server has sealed cannot be read."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.{name}: expected a list of parts", param=f"{where}.{name}")
        if parts:
            text = "\n".join(_text(part, "text", f"{where}.{name}[{at}]") for at, part in enumerate(parts))
            break
    else:
        sealed = item.get("encrypted_content")
        text = unseal(sealed, f"{where}.encrypted_content") if isinstance(sealed, str) else ""
    if text:
        _answer(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text


def _take_call(messages: Messages, item: Item, where: str) -> None:
    id, name, arguments = (_text(item, field, where) for field in ("call_id", "name", "arguments"))
    message = _answer(messages)
    message["content"] = message["content"] or None
    calls = message.setdefault("tool_calls", [])
    calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _take_output(messages: Messages, item: Item, where: str) -> None:
    content = _content(item.get("output"), f"{where}.output")
    message: dict[str, Json] = {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content}
    if "documents" in item:
        message["documents"] = item["documents"]
    messages.append(message)


_TAKE: dict[str, Callable[[Messages, Item, str], None]] = {
    "message": _take_message,
    "reasoning": _take_reasoning,
    "function_call": _take_call,
    "function_call_output": _take_output,
}


def _answer(messages: Messages, *taken: str) -> dict[str, Json]:
    """Return the message of the model that an item belongs to: the last one, or a new one if that has one of `taken`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Json, where: str) -> str | list[dict[str, Json]]:
    """Return a content as a text, or as several text parts. Raises RequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected a text or a list of parts", param=where)
    texts = [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _part(part: Json, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in TEXTS:
        problem = "image input is not supported: " if kind == "input_image" else ""
        raise RequestError(
            f"{where}.type is {reprlib.repr(kind)}: {problem}expected one of {', '.join(TEXTS)}", param=f"{where}.type"
        )
    return _text(part, TEXTS[kind], where)


def _text(item: Json, field: str, where: str) -> str:
    text = item.get(field) if isinstance(item, dict) else None
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field}: expected a text", param=f"{where}.{field}")
    return text


# ---- messages to items -------------------------------------------------------------------------------------------------


def _items(message: Item) -> list[dict[str, Json]]:
    role, content = message.get("role"), message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}] if content else []
    texts = [part.get("text", "") for part in parts]
    if role in ("tool", "function"):
        output = texts[0] if len(texts) == 1 else [{"type": "input_text", "text": text} for text in texts]
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": output}]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}]
    items: list[dict[str, Json]] = []
    if thought := message.get("reasoning_content"):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
    if texts:
        shown = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
        items.append({"type": "message", "role": "assistant", "content": shown})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        named = {"call_id": call.get("id", ""), "name": function["name"], "arguments": function["arguments"]}
        items.append({"type": "function_call"} | named)
    return items
