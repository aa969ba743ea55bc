"""The bodies of requests: their fields, with types and bounds."""

from __future__ import annotations

import re
import reprlib
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from ...models.sampling import Sampling
from ...slots.scope import MAX_NAME
from ..errors import RequestError
from ..settings import ORDERS

Json = Any  # a decoded value whose type is not checked here: msgspec knows no `object`
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
HistoryKind = Literal["auto", "whole", "new"]
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
MAX_STOPS, MAX_STOP = 64, 1024  # stop strings, characters of one: each is looked for at every token
MAX_BIASES = 1 << 15  # tokens of a logit_bias: they are made into a sampler in the event loop


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class Options(Struct, frozen=True):
    """The common fields of chat and text completions: OpenAI's, then llama-server's, then our own."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: bool | int | None = None
    response_format: dict[str, Json] | None = None

    n_predict: int | None = None
    top_k: Int32 | None = None
    min_p: Share | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=0, le=65536)] | None = None
    ignore_eos: bool = False
    return_progress: bool = False
    cache_prompt: bool | None = None

    cache_scope: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    document_order: str | None = None
    dedup: Literal["auto", "off"] | None = None
    order_hint: bool | None = None
    keep_first: Annotated[int, Meta(ge=0)] = 0
    keep_last: Annotated[int, Meta(ge=0)] = 0

    def check(self) -> None:
        """Refuse options that the server would ignore although they change the answer. Raises RequestError."""
        if self.logprobs:
            raise RequestError("logprobs are not supported: leave them out", param="logprobs")
        if (self.response_format or {}).get("type", "text") != "text":
            raise RequestError("only response_format {'type': 'text'} is supported", param="response_format")
        if self.document_order is not None and self.document_order not in ORDERS:
            order, known = reprlib.repr(self.document_order), ", ".join(ORDERS)
            raise RequestError(f"document_order is {order}: expected one of {known}", param="document_order")
        stops = self.stops()
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in stops):
            raise RequestError(f"stop: expected at most {MAX_STOPS} texts of at most {MAX_STOP:,} characters", param="stop")
        check_scope(self.cache_scope, "cache_scope")

    def without_texts(self) -> Self:
        """Return the options without the texts that they belong to, which may take much memory."""
        raise NotImplementedError

    def limit(self) -> int:
        """Return the most tokens to generate; -1 if the request sets no limit, as in llama-server."""
        for name in ("max_completion_tokens", "max_tokens", "n_predict"):
            if (value := getattr(self, name)) is not None:
                if value < -1:
                    raise RequestError(
                        f"{name} is {reprlib.repr(value)}: expected 0 or more, or -1 for no limit", param=name
                    )
                return value
        return -1

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, ends: frozenset[int], num_vocab: int) -> Sampling:
        """Return the sampling parameters: the request's fields of the same names, and llama-server's defaults."""
        names = [field.name for field in fields(Sampling) if field.name not in ("logit_bias", "banned")]
        return Sampling(
            **{name: value for name in names if (value := getattr(self, name)) is not None},
            logit_bias=self._biases(num_vocab),
            banned=ends if self.ignore_eos else frozenset(),
        )

    def _biases(self, num_vocab: int) -> dict[int, float]:
        given, biases = self.logit_bias or {}, {}
        if len(given) > MAX_BIASES:
            raise RequestError(
                f"logit_bias names {len(given):,} tokens: expected at most {MAX_BIASES:,}", param="logit_bias"
            )
        for token, bias in given.items():
            if not re.fullmatch("[0-9]{1,9}", token) or int(token) >= num_vocab:
                raise RequestError(
                    f"logit_bias names token {reprlib.repr(token)}: expected an id from 0 to {num_vocab - 1}",
                    param="logit_bias",
                )
            biases[int(token)] = bias
        return biases


class ConversationReference(Struct, frozen=True):
    """A conversation by its id. history: whether `messages` are all of it or only the new ones; auto: by their roles."""

    id: str
    history: HistoryKind = "auto"


class ChatRequest(Options, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`. documents: of the last user message; any user message may have its own.

    conversation, previous_response_id: the history that the messages continue. store: store this answer, as in OpenAI's API.
    """

    messages: list[dict[str, Json]]
    documents: list[Json] | None = None
    conversation: str | ConversationReference | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Json]] | None = None
    chat_template_kwargs: dict[str, Json] = {}

    def prefill_only(self) -> Self:
        """Return a request that caches the prompt and generates nothing."""
        return msgspec.structs.replace(
            self, cache_prompt=True, n=None, max_tokens=0, max_completion_tokens=None, n_predict=None
        )

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, messages=[], documents=None, tools=None)


class WarmRequest(ChatRequest, frozen=True, kw_only=True):
    """`POST /v1/cache/warm`. pin: keep the prompt; false: unpin it. ttl: seconds; without it, until the server stops."""

    pin: bool | None = None
    ttl: Annotated[float, Meta(gt=0.0)] | None = None

    def check(self) -> None:
        super().check()
        if self.ttl is not None and not self.pin:
            raise RequestError("ttl says how long a prompt stays pinned: send pin: true with it", param="ttl")


class OrderRequest(ChatRequest, frozen=True, kw_only=True):
    """`POST /v1/documents/order`. Without messages, the documents are ordered for a first question."""

    messages: list[dict[str, Json]] = []


class SpeculateRequest(ChatRequest, frozen=True, kw_only=True):
    """`POST /v1/speculate`. id: a name for the turn; documents: the search results so far, if any."""

    id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] = "default"


class CompletionRequest(Options, frozen=True, kw_only=True):
    """`POST /v1/completions` and llama-server's `POST /completion`. prompt: a text or token ids."""

    prompt: str | list[Json] | dict[str, Json]

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, prompt="")


def check_scope(scope: str, where: str) -> None:
    """Raise RequestError for a scope that is too long."""
    if len(scope) > MAX_NAME:
        raise RequestError(f"{where} has {len(scope):,} characters: expected at most {MAX_NAME}", param=where)
