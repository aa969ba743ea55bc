"""A chat with its documents as text, for an upstream that knows no documents."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ..ordering.prompt import document_text, location_hint, order_hint
from ..server.errors import RequestError
from .chat import Chat, Conversation, Fields, Options
from .orders import Placed, Plan

encode = msgspec.json.Encoder().encode
OURS = ("documents", *Options.__struct_fields__)  # fields that the upstream does not know


def check(chat: Chat) -> None:
    """Refuse a history that only slotcache has, and content that no text can stand in front of. Raises RequestError."""
    for turn in chat.turns:
        content = msgspec.json.decode(chat.messages[turn.at].get("content", b"null"))
        if not (turn.result is not None or content is None or isinstance(content, str | list)):
            where = f"messages[{turn.at}].content"
            raise RequestError(f"{where}: expected a string or a list of parts", param=where)
    conversation = chat.options.conversation
    if isinstance(conversation, Conversation) and conversation.history == "new":
        problem = "the upstream keeps no conversations: send the whole history"
        raise RequestError(f"conversation.history is new: {problem}", param="conversation.history")


def write(chat: Chat, plan: Plan, wants_usage: bool) -> bytes:
    """Return the body for the upstream: documents stand in front of the text of their messages. All else is as it was.

    wants_usage: ask for a chunk with the usage.
    """
    messages = [{name: value for name, value in message.items() if name != "documents"} for message in chat.messages]
    for placed in plan.placed:
        message = messages[placed.turn.at]
        result = placed.turn.result
        content = message.get("content", Raw(b"null")) if result is None else Raw(encode(result))
        message["content"] = _with_text(turn_text(placed), content)
    fields: Fields = {name: value for name, value in chat.fields.items() if name not in OURS}
    fields["messages"] = Raw(encode(messages))
    if wants_usage:
        options = chat.stream_options if isinstance(chat.stream_options, dict) else {}
        fields["stream_options"] = Raw(encode(options | {"include_usage": True}))
    return encode(fields)


def turn_text(placed: Placed) -> str:
    """Return the text of a turn's documents with the hints about them."""
    documents = "".join(map(document_text, placed.shown))
    hint = order_hint(placed.shown, placed.documents) if placed.has_hint else ""
    return documents + location_hint(placed.repeated) + hint


def _with_text(text: str, content: Raw) -> Raw:
    """Put a text in front of a message's content: a text, a list of parts, or null."""
    value = msgspec.json.decode(content)
    if isinstance(value, list):
        first = value[0] if value else None
        if isinstance(first, dict) and first.get("type") == "text" and isinstance(first.get("text"), str):
            return Raw(encode([first | {"text": text + first["text"]}, *value[1:]]))
        return Raw(encode([{"type": "text", "text": text}, *value]))
    return Raw(encode(text + value if isinstance(value, str) else text))
