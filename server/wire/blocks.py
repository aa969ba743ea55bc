"""Content blocks of Anthropic's Messages, and the messages of a chat that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from ...ordering.document import Document, DocumentError
from ...ordering.prompt import document_text
from ..errors import RequestError
from .requests import Json
from .sealed import unseal

Messages = list[dict[str, Json]]
FAILED = "Error: "  # in front of the result of a tool that failed: no template has a place of its own for that


class CacheControl(Struct, frozen=True):
    """A point up to which a prompt may be cached. Here it only says that the request may be."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class Block(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One block of a content."""

    cache_control: CacheControl | None = None


class Text(Block, frozen=True, kw_only=True, tag="text"):
    text: str


class Thinking(Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinking(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Reasoning that only the server which wrote it can read; this server writes none."""

    data: str = ""


class ToolUse(Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Json]


class PlainSource(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class BlocksSource(Struct, frozen=True, kw_only=True, tag_field="type", tag="content"):
    content: str | list[Text]


class DocumentBlock(Block, frozen=True, kw_only=True, tag="document"):
    """A document of plain text."""

    source: PlainSource | BlocksSource
    title: str | None = None
    context: str | None = None

    def document(self) -> dict[str, str]:
        text = self.source.data if isinstance(self.source, PlainSource) else _joined(self.source.content)
        return _document(text if self.context is None else f"{self.context}\n\n{text}", self.title)


class SearchResult(Block, frozen=True, kw_only=True, tag="search_result"):
    """A document that a search of the client found."""

    source: str
    title: str
    content: list[Text]

    def document(self) -> dict[str, str]:
        return _document(_joined(self.content), self.title) | {"id": self.source}


class Image(Block, frozen=True, kw_only=True, tag="image"):
    """Refused, with a message that says so."""


class ToolResult(Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | DocumentBlock | SearchResult | Image] = ""
    is_error: bool = False


Content = str | list[Text | Thinking | RedactedThinking | ToolUse | ToolResult | DocumentBlock | SearchResult | Image]


class Said(Struct, frozen=True):
    """A message: of the user, with results of tools, or of the model. documents: as in a message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: Content = ""
    documents: list[Json] | None = None


def messages_of(said: Sequence[Said], orders_documents: bool) -> Messages:
    """Return the messages of a chat. orders_documents: blocks with documents become ordered documents.

    Else they are texts in their place. Raises RequestError.
    """
    messages: Messages = []
    for at, message in enumerate(said):
        where = f"messages[{at}]"
        if isinstance(message.content, str):
            made: Messages = [{"role": message.role, "content": message.content}]
        elif message.role == "assistant":
            made = [_answer(message.content, where)]
        else:
            made = list(_request(message, orders_documents, where))
        messages += made if message.documents is None else _with_documents(made, message, where)
    return messages


def _with_documents(messages: Messages, said: Said, where: str) -> Messages:
    """Return the messages made of one, with its field `documents`: at its last text, else at its last result of a tool.

    Raises RequestError.
    """
    messages = messages or [{"role": said.role, "content": ""}]
    holder = next((message for message in reversed(messages) if message["role"] == said.role), messages[-1])
    if said.documents and holder.get("documents"):
        raise RequestError(f"{where}.documents: and blocks with documents: give one of them", param=f"{where}.documents")
    holder["documents"] = said.documents or holder.get("documents", [])
    return messages


def system_text(system: str | list[Text]) -> Json:
    """Return the content of the system's message."""
    return system if isinstance(system, str) else _parts([block.text for block in system])


def wants_cache(contents: Iterable[object]) -> bool:
    """Return whether any block has `cache_control`."""
    return any(_is_marked(block) for content in contents if isinstance(content, list) for block in content)


def _is_marked(block: Json) -> bool:
    if isinstance(block, ToolResult) and isinstance(block.content, list) and any(map(_is_marked, block.content)):
        return True
    return block.cache_control is not None


def _answer(blocks: Sequence[Block], where: str) -> dict[str, Json]:
    """Return the message of the model. What another server has redacted is left out: nobody here can read it."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Json]] = []
    for at, block in enumerate(blocks):
        match block:
            case Text():
                texts.append(block.text)
            case Thinking():
                thoughts.append(block.thinking or unseal(block.signature, f"{where}.content[{at}].signature"))
            case ToolUse():
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedThinking():
                pass
            case _:
                raise _misplaced(block, f"{where}.content[{at}]", "the user")
    message: dict[str, Json] = {"role": "assistant", "content": _parts(texts) if any(texts) or not calls else None}
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    return message | ({"tool_calls": calls} if calls else {})


def _request(message: Said, orders_documents: bool, where: str) -> Iterator[dict[str, Json]]:
    """Yield the messages of the user: a message for each result of a tool, and for the texts between them."""
    texts: list[str] = []
    documents: list[dict[str, str]] = []

    def spoken() -> Iterator[dict[str, Json]]:
        if texts or documents:
            said: dict[str, Json] = {"role": message.role, "content": _parts(texts)}
            yield said | ({"documents": documents.copy()} if documents else {})
        texts.clear()
        documents.clear()

    for at, block in enumerate(message.content):
        match block:
            case Text():
                texts.append(block.text)
            case DocumentBlock() | SearchResult() if orders_documents:
                documents.append(block.document())
            case DocumentBlock() | SearchResult():
                texts.append(_shown(block, f"{where}.content[{at}]"))
            case ToolResult():
                yield from spoken()
                result = _result(block, orders_documents, f"{where}.content[{at}]")
                yield {"role": "tool", "tool_call_id": block.tool_use_id} | result
            case Image():
                raise _unseen(f"{where}.content[{at}]")
            case _:
                raise _misplaced(block, f"{where}.content[{at}]", "the model")
    yield from spoken()


def _result(block: ToolResult, orders_documents: bool, where: str) -> dict[str, Json]:
    """Return the content of a tool's message, and its documents. Raises RequestError."""
    content = [Text(text=block.content)] if isinstance(block.content, str) else block.content
    documents = [one.document() for one in content if orders_documents and isinstance(one, DocumentBlock | SearchResult)]
    texts = [
        _text(one, f"{where}.content[{at}]")
        for at, one in enumerate(content)
        if not (orders_documents and isinstance(one, DocumentBlock | SearchResult))
    ]
    if block.is_error:
        texts = [FAILED + (texts[0] if texts else ""), *texts[1:]]
    return {"content": _parts(texts)} | ({"documents": documents} if documents else {})


def _text(block: Text | DocumentBlock | SearchResult | Image, where: str) -> str:
    if isinstance(block, Image):
        raise _unseen(where)
    return block.text if isinstance(block, Text) else _shown(block, where)


def _unseen(where: str) -> RequestError:
    return RequestError(f"{where}.type is image: image input is not supported", param=f"{where}.type")


def _shown(block: DocumentBlock | SearchResult, where: str) -> str:
    """Return a document as a text of its message, as documents stand in prompts. Raises RequestError."""
    try:
        return document_text(Document.parse(block.document(), where))
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None


def _parts(texts: Sequence[str]) -> Json:
    """Return texts as a content: one as it is, several as parts."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _joined(content: str | Sequence[Text]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _document(text: str, title: str | None) -> dict[str, str]:
    return {"text": text, "title": title or ""}


def _misplaced(block: object, where: str, author: str) -> RequestError:
    kind = type(block).__struct_config__.tag if isinstance(block, Struct) else "a block"
    return RequestError(f"{where}.type is {kind}: only {author} writes such blocks", param=f"{where}.type")
