"""The messages of a chat in a common form.

For each template, the messages are converted to the form that the template expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .jinja import TemplateError

Message = Mapping[str, object]
"""A message of OpenAI's API: role, content (a string, a list of text parts, or nothing), tool_calls, ..."""

Run = tuple[tuple[int | None, str], ...]
"""Adjacent texts, each with the index of its message; None if it belongs to no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateMessage:
    """A message for a template.

    at: the index of the message among the client's messages.
    runs: the content, one run for each part.
    is_list: the template gets the parts as a list. If `is_list` is false, there is at most one part.
    reasoning: the reasoning of an earlier answer.
    fields: the other fields of the message.
    """

    role: str
    at: int
    runs: tuple[Run, ...]
    reasoning: str = ""
    is_list: bool = False
    fields: Message

    @property
    def is_blank(self) -> bool:
        """Whether the content has no visible text."""
        return not any(text.strip() for run in self.runs for _, text in run)


def read_messages(messages: Sequence[Message], takes_lists: bool) -> list[TemplateMessage]:
    """Return the messages in the common form. The role `developer` becomes `system`.

    takes_lists: keep a list of parts, which the template joins itself. If `takes_lists` is false, join the parts of a
    content with line ends.

    Raises TemplateError for contents that are not text.
    """
    return [_read(at, message, takes_lists) for at, message in enumerate(messages)]


def _read(at: int, message: Message, takes_lists: bool) -> TemplateMessage:
    role, content, reasoning = str(message.get("role")), message.get("content"), message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise TemplateError(f"messages[{at}].reasoning_content must be a string")
    texts = content_texts(content, f"messages[{at}].content")
    is_list = takes_lists and len(texts) > 1
    if not is_list:
        texts = ["\n".join(texts)]
    fields = {name: value for name, value in message.items() if name not in ("role", "content", "reasoning_content")}
    return TemplateMessage(
        role="system" if role == "developer" else role,
        at=at,
        runs=tuple(((at, text),) for text in texts),
        reasoning=reasoning or "",
        is_list=is_list,
        fields=fields,
    )


def prefilled_content(message: Message, where: str) -> str:
    """Return the content of an answer that the model is to continue.

    Each part of the content becomes a paragraph, as in llama-server.

    Raises TemplateError.
    """
    return "\n\n".join(content_texts(message.get("content"), where))


def content_texts(content: object, where: str) -> list[str]:
    """Return the texts of a content, which is a string, nothing, or OpenAI's list of parts. Raises TemplateError."""
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
