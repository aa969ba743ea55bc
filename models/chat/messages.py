"""The messages of a chat in one shape, before a template's dialect gives them another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .sandbox import TemplateError

Message = Mapping[str, object]
"""A message of OpenAI's API: role, content (a string, a list of text parts or nothing), tool_calls, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message for a template. at: its index among the client's messages.

    texts: its content, each part with the index of the message that it comes from. is_list: the template gets the parts as
    a list. reasoning: of an earlier answer. fields: of the message, all but its role, content and reasoning.
    """

    role: str
    at: int
    texts: tuple[tuple[int, str], ...]
    reasoning: str = ""
    is_list: bool = False
    fields: Message


def read_messages(messages: Sequence[Message], takes_lists: bool) -> list[Said]:
    """Return the messages in one shape; a developer's are a system's.

    takes_lists: the template joins the parts of a list by itself; else each is a line. Raises TemplateError for contents
    that are no text.
    """
    return [_read(at, message, takes_lists) for at, message in enumerate(messages)]


def merge_system(said: Sequence[Said]) -> list[Said]:
    """Put a system message at the front of the message behind it; alone it becomes a user's."""
    if not said or said[0].role != "system":
        return list(said)
    first, *rest = said
    if not rest:
        return [replace(first, role="user")]
    return [replace(rest[0], texts=first.texts + rest[0].texts, is_list=False), *rest[1:]]


def _read(at: int, message: Message, takes_lists: bool) -> Said:
    role, content, reasoning = str(message.get("role")), message.get("content"), message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise TemplateError(f"messages[{at}].reasoning_content must be a string")
    texts = content_texts(content, f"messages[{at}].content")
    is_list = takes_lists and len(texts) > 1
    if not is_list:
        texts = ["\n".join(texts)]
    fields = {name: value for name, value in message.items() if name not in ("role", "content", "reasoning_content")}
    return Said(
        role="system" if role == "developer" else role,
        at=at,
        texts=tuple((at, text) for text in texts),
        reasoning=reasoning or "",
        is_list=is_list,
        fields=fields,
    )


def begun_content(message: Message, where: str) -> str:
    """Return the content that an answer begins with: its parts are paragraphs, as in llama-server. Raises TemplateError."""
    return "\n\n".join(content_texts(message.get("content"), where))


def content_texts(content: object, where: str) -> list[str]:
    """Return the texts of a content: of a string, of nothing, or of OpenAI's list of parts. Raises TemplateError."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise TemplateError(f"{where} must be a string or a list of parts")
    return [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part_text(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = f", not of type {part['type']!r}" if isinstance(part, Mapping) and part.get("type", "text") != "text" else ""
    raise TemplateError(f'{where} must be {{"type": "text", "text": "..."}}{kind}')
