"""Compactions of OpenAI's Responses: the model summarises a history.

The summary is sealed in an item, which later requests send back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from ..chat.body import ResponseChat
from ..chat.sampling_fields import JsonValue
from ..chat.shortened_history import KEPT, MOST_TOKENS, NO_SUMMARY
from ..engine.generation import End
from ..engine.usage import Fields
from ..formats.answer import ContentText, Fragment
from ..http.api_errors import RequestError
from .reply import seal

TRIGGER = "compaction_trigger"  # the type of an input's last item that asks for a summary of the items before it
SUMMARIES = ("compaction", "compaction_summary", "context_compaction")  # types of items with a summary; we write the first
FREE = ("response_format", "json_schema", "grammar", "lark_grammar", "regex", "stop", "documents", "retrieval")
"""Fields of a chat that a summary ignores."""
CUT = "the summary was cut at its limit of tokens: max_output_tokens sets the limit"


def triggers(items: object) -> bool:
    """Return whether the input of a request ends with an item that asks for a summary."""
    last = next((item for item in reversed(items) if item is not None), None) if isinstance(items, list) else None
    return isinstance(last, dict) and last.get("type") == TRIGGER


def summarising(chat: ResponseChat) -> tuple[ResponseChat, tuple[str, ...]]:
    """Return the chat that makes the model write a summary, and a warning if this chat ignores fields of the request.

    The prompt keeps the tools, so that it shares the KV of the history, but the answer cannot call them. Raises
    RequestError if there is nothing to summarise, or if the request's limit of tokens is 0.
    """
    if len(chat.messages) == 1 and chat.previous_response_id is None and chat.conversation is None:
        raise RequestError("input has nothing to summarise: expected at least one message or result", param="input")
    given = [name for name in FREE if getattr(chat, name) not in (None, "", [], False)]
    ignored = {name: None for name in given if name != "response_format" or chat.is_constrained}
    demands = chat.tool_choice not in (None, "auto", "none")
    limit = MOST_TOKENS if chat.limit() < 0 else chat.limit()
    if not limit:
        raise RequestError("max_output_tokens is 0: a summary needs some tokens", param="max_output_tokens")
    fields: Fields = {**ignored, "tool_choice": "none", "store": False, "max_completion_tokens": limit}
    named = ", ".join([*ignored, *(["tool_choice"] if demands else [])])
    return replace(chat, **fields), ((f"{named}: without effect on a compaction",) if named else ())


def kept_items(items: Iterable[JsonValue], suffix: str) -> Iterator[Fields]:
    """Yield the messages that remain when an input is shortened: the messages whose role is in `KEPT`.

    Texts become lists of parts, and missing fields are added. suffix: a part of the ids that are made for items without
    an id.
    """
    for at, item in enumerate(items):
        if isinstance(item, str):
            item = {"role": "user", "content": item}
        if isinstance(item, dict) and (item.get("type") or "message") == "message" and item.get("role") in KEPT:
            given: Fields = {name: value for name, value in item.items() if value is not None}
            if isinstance(text := given.get("content"), str):
                given["content"] = [{"type": "input_text", "text": text}]
            yield {"type": "message", "id": f"msg_{suffix}_input_{at}", "status": "completed"} | given


class CompactionOutput:
    """The output of a compaction: one item with a sealed summary. suffix: a part of the item's id."""

    def __init__(self, suffix: str) -> None:
        self.items: list[Fields] = []
        self._id, self._texts = f"cmp_{suffix}", list[str]()

    def status(self, end: End) -> str:
        """Return `completed`, even if the summary was cut. For a cut summary, the response has a warning."""
        return "completed"

    def push(self, fragment: Fragment) -> Iterator[Fields]:
        """Yield the events for a fragment of the summary.

        No event has the fragment's text: `finish` sends the whole summary, sealed.
        """
        if isinstance(fragment, ContentText):
            if not self._texts:
                yield {"type": "response.output_item.added", "item": self._item(""), "output_index": 0}
                yield {"type": "response.compaction.compacting", "item_id": self._id, "output_index": 0}
            self._texts.append(fragment.text)

    def finish(self, status: str) -> Iterator[Fields]:
        """Yield the last event. Raises RequestError 500 if the model wrote no summary."""
        summary = "".join(self._texts).strip()
        if not summary:
            raise RequestError(NO_SUMMARY, status=500)
        self.items.append(self._item(seal(summary)))
        yield {"type": "response.output_item.done", "item": self.items[0], "output_index": 0}

    def _item(self, sealed: str) -> Fields:
        return {"type": SUMMARIES[0], "id": self._id, "encrypted_content": sealed}


def compaction(response: Mapping[str, JsonValue], kept: Iterable[Fields]) -> Fields:
    """Return the body of a compaction: the kept items of a history, and the summary from `response`."""
    taken = ("id", "created_at", "model", "usage", "timings", "slotcache", "stopping_word", "warnings")
    body: Fields = {"object": "response.compaction", "output": [*kept, *response["output"]]}
    return body | {name: response[name] for name in taken if name in response}
