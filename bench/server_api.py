"""The APIs of servers under test: how a request contains a query's documents, and which fields of an answer have figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import ClientSession

from ..ordering.document import Document
from ..ordering.prompt import document_text
from .trace import SYSTEM_PROMPT, Query

Body = dict[str, Any]
History = Sequence[tuple[Query, str]]
"""The earlier turns of a conversation, each with the server's real answer."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The fields of a request besides its prompt. Decoding is greedy. With `ignore_eos` all answers have the same length."""

    max_tokens: int = 16
    ignore_eos: bool = True
    cache_prompt: bool = True


@dataclass(frozen=True, slots=True)
class DocumentUse:
    """The server's report about one document, in tokens."""

    id: str
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One event of a stream. A figure is None if the event lacks it."""

    text: str = ""
    has_token: bool = False
    finish_reason: str | None = None
    """Only in the final event: `length` or another reason."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    documents: tuple[DocumentUse, ...] = ()
    timings: Mapping[str, float] | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


class ServerApi(Protocol):
    """An API that builds the request of a query and reads the events of the answer."""

    async def prepare(self, http: ClientSession, query: Query, history: History, sampling: Sampling) -> tuple[str, Body]:
        """Return the path and the JSON body of a query's request. This is not timed. Raises aiohttp.ClientError."""
        ...

    def read(self, event: Body) -> StreamChunk:
        """Return one decoded event of the stream."""
        ...


def question_with_documents(query: Query) -> str:
    """Return the user message for a server without a documents field: documents in retrieval order, in slotcache's words."""
    documents = (document_text(Document(name, text)) for name, text in query.documents)
    return "".join(documents) + query.question


@dataclass(frozen=True, slots=True)
class ChatApi:
    """OpenAI's `/v1/chat/completions`.

    documents_field: send documents in slotcache's field. Otherwise they are text in the user message.
    extra: more fields of each request.
    own_scope: give each session its own cache scope, so that sessions share no KV.
    """

    documents_field: bool = False
    extra: Mapping[str, Any] | None = None
    own_scope: bool = False

    async def prepare(self, http: ClientSession, query: Query, history: History, sampling: Sampling) -> tuple[str, Body]:
        body: Body = {"model": "default", "messages": self.messages(query, history), "max_tokens": sampling.max_tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if self.documents_field:
            body["cache_prompt"] = sampling.cache_prompt
            # The documents of the last turn are at the top level of the request.
            body |= {key: value for key, value in body["messages"][-1].items() if key == "documents"}
            body["messages"][-1].pop("documents", None)
        if self.own_scope:
            body["cache_scope"] = query.session
        return "/v1/chat/completions", body | dict(self.extra or {})

    def messages(self, query: Query, history: History) -> list[Body]:
        """Return the messages of a query, including its history."""
        return _messages(query, history, _with_field if self.documents_field else _with_text)

    def read(self, event: Body) -> StreamChunk:
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        usage, timings, own = event.get("usage") or {}, event.get("timings") or {}, event.get("slotcache") or {}
        details = usage.get("prompt_tokens_details") or {}
        return StreamChunk(
            text=text,
            has_token=bool(text or delta.get("reasoning_content") or delta.get("tool_calls")),
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=_first(details.get("cached_tokens"), own.get("cached_tokens"), timings.get("cache_n")),
            completion_tokens=_first(usage.get("completion_tokens"), timings.get("predicted_n")),
            documents=tuple(
                DocumentUse(used["id"], used["tokens"], used["cached_tokens"]) for used in own.get("documents") or ()
            ),
            timings=timings or None,
        )


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """llama-server's own `/completion`. A separate request applies the chat template beforehand.

    `timings.cache_n` is the number of cached tokens.
    """

    async def prepare(self, http: ClientSession, query: Query, history: History, sampling: Sampling) -> tuple[str, Body]:
        messages = _messages(query, history, _with_text)
        async with http.post("/apply-template", json={"messages": messages}, raise_for_status=True) as answer:
            rendered = await answer.json()
        asked = {"prompt": rendered["prompt"], "n_predict": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        return "/completion", asked | {"cache_prompt": sampling.cache_prompt, "temperature": 0, "stream": True}

    def read(self, event: Body) -> StreamChunk:
        text, timings = event.get("content") or "", event.get("timings") or {}
        final = bool(event.get("stop"))
        cached = timings.get("cache_n")
        return StreamChunk(
            text=text,
            has_token=bool(text or event.get("tokens")),
            finish_reason={"limit": "length"}.get(event.get("stop_type", ""), "stop") if final else None,
            # `tokens_cached` is not read: it is the length of the slot, not the number of reused tokens.
            prompt_tokens=timings["prompt_n"] + cached if cached is not None else None,
            cached_tokens=cached,
            completion_tokens=event.get("tokens_predicted") if final else None,
            timings=timings or None,
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request, as a server's /apply-template and /tokenize return it."""

    text: str
    tokens: tuple[int, ...]

    @classmethod
    async def of(cls, http: ClientSession, body: Body) -> Prompt:
        """Ask a server for the prompt of a chat. body: the body of the chat's request. Raises aiohttp.ClientError."""
        async with http.post("/apply-template", json=body, raise_for_status=True) as answer:
            text = (await answer.json())["prompt"]
        asked = {"content": text, "add_special": True, "parse_special": True}
        async with http.post("/tokenize", json=asked, raise_for_status=True) as answer:
            return cls(text, tuple((await answer.json())["tokens"]))


def _messages(query: Query, history: History, user: Callable[[Query], Body]) -> list[Body]:
    messages: list[Body] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for asked, answer in history:
        messages += [user(asked), {"role": "assistant", "content": answer}]
    return [*messages, user(query)]


def _with_text(query: Query) -> Body:
    return {"role": "user", "content": question_with_documents(query)}


def _with_field(query: Query) -> Body:
    documents = [{"id": name, "text": text} for name, text in query.documents]
    return {"role": "user", "content": query.question} | ({"documents": documents} if documents else {})


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
