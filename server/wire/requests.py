"""The bodies of requests: their fields, with types and bounds."""

from __future__ import annotations

import reprlib
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta, Struct

from ...slots.scope import MAX_NAME, SEPARATOR
from ..errors import RequestError
from ..settings import ORDERS, Attention, Draft, ReasoningFormat
from .adapters import AdapterList
from .grammar import GrammarOptions
from .retrieval import Retrieval
from .sampling import Json

HistoryKind = Literal["auto", "whole", "new"]
Effort = Annotated[str, Meta(max_length=32)]
Count = Annotated[int, Meta(ge=0)]
MAX_MESSAGE = 4096  # characters of a text that ends a thought
Choices = Annotated[int, Meta(ge=1, le=128)]
MAX_STOPS, MAX_STOP = 64, 1024  # stop strings, characters of one: each is looked for at every token

MAX_PATHS = 256  # `response_fields`: each is looked up in the body of each choice


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class Options(GrammarOptions, Struct, frozen=True):
    """The common fields of chat and text completions: OpenAI's, then llama-server's, then our own."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: Choices | None = None
    prompt_cache_key: str | None = None

    n_predict: int | None = None
    n_cmpl: Choices | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1)] = -1
    return_progress: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False
    verbose: bool | None = None
    sse_ping_interval: Annotated[float, Meta(ge=-1.0)] | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_PATHS)] = []
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Meta(ge=-1)] = -1
    lora: AdapterList | None = None

    cache_scope: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    document_order: str | None = None
    dedup: Literal["auto", "off"] | None = None
    order_hint: bool | None = None
    keep_first: Annotated[int, Meta(ge=0)] = 0
    keep_last: Annotated[int, Meta(ge=0)] = 0
    report_segments: bool = False
    draft: Draft | None = None

    def __post_init__(self) -> None:
        """Take llama-server's name of `n`."""
        if self.n is None and self.n_cmpl is not None:
            msgspec.structs.force_setattr(self, "n", self.n_cmpl)

    def check(self) -> None:
        """Refuse options that the server would ignore although they change the answer. Raises RequestError."""
        if self.document_order is not None and self.document_order not in ORDERS:
            order, known = reprlib.repr(self.document_order), ", ".join(ORDERS)
            raise RequestError(f"document_order is {order}: expected one of {known}", param="document_order")
        stops = self.stops()
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in stops):
            raise RequestError(f"stop: expected at most {MAX_STOPS} texts of at most {MAX_STOP:,} characters", param="stop")
        check_scope(self.cache_scope, "cache_scope")
        self.check_sampling()

    @property
    def opts_in(self) -> bool:
        """Whether the request asks for the cache in another way than by `cache_prompt`."""
        return bool(self.prompt_cache_key)

    def without_texts(self) -> Self:
        """Return the options without the texts that they belong to, which may take much memory."""
        return self

    def limit(self, default: int = -1) -> int:
        """Return the most tokens to generate: the default, if the request sets no limit; -1: no limit."""
        for name in ("max_completion_tokens", "max_tokens", "n_predict"):
            if (value := getattr(self, name)) is not None:
                if value < -1:
                    raise RequestError(
                        f"{name} is {reprlib.repr(value)}: expected 0 or more, or -1 for no limit", param=name
                    )
                return default if value == -1 else value
        return default

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Reasoning(Struct, frozen=True):
    """OpenAI's `reasoning` of a response."""

    effort: Effort | None = None


class ConversationReference(Struct, frozen=True):
    """A conversation by its id. history: whether `messages` are all of it or only the new ones; auto: by their roles."""

    id: str
    history: HistoryKind = "auto"


class ChatRequest(Options, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`. documents: of the last user message; any user message may have its own.

    documents_attention: whether documents see each other. link_tokens: of those that do not, the first ones that do.
    retrieval: whether the server's documents are searched for the last question, and how.
    conversation, previous_response_id: the history that the messages continue. store: store this answer, as in OpenAI's API.
    """

    messages: list[dict[str, Json]]
    documents: list[Json] | None = None
    documents_attention: Attention | None = None
    link_tokens: Literal[0, 8, 16, 32] | None = None
    retrieval: bool | Retrieval | None = None
    conversation: str | ConversationReference | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Json]] | None = None
    tool_documents: Literal["auto", "off"] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    parse_tool_calls: bool | None = None
    reasoning_format: ReasoningFormat | None = None
    reasoning_effort: Effort | None = None
    reasoning_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None
    thinking_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None
    reasoning_budget_message: Annotated[str, Meta(max_length=MAX_MESSAGE)] | None = None
    chat_template_kwargs: dict[str, Json] = {}
    reasoning: Reasoning | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt: an answer either goes on or begins",
                param="add_generation_prompt",
            )

    @property
    def retrieves(self) -> bool:
        """Whether the server's documents are searched for it."""
        return self.retrieval not in (None, False)

    @property
    def effort(self) -> str | None:
        """How much the model shall reason: `none`, `low`, ...; None: as the chat template has it."""
        return self.reasoning_effort or (self.reasoning and self.reasoning.effort) or None

    @property
    def shows_begun(self) -> bool:
        """Whether the answer has the text of the message that it continues: as in llama-server, unless `echo` says."""
        return not (self.stream and self.continue_final_message) if self.echo is None else self.echo

    def for_next_turn(self) -> Self:
        """Return the request without its messages, and without what it says of them."""
        return msgspec.structs.replace(
            self, messages=[], documents=None, add_generation_prompt=None, continue_final_message=None
        )

    @property
    def opts_in(self) -> bool:
        continues = self.conversation is not None or self.previous_response_id is not None
        return super().opts_in or continues or self.retrieves

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
    """llama-server's `POST /completion`. prompt: a text or token ids."""

    prompt: str | list[Json] | dict[str, Json]

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, prompt="")


class TextRequest(CompletionRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`. echo: the answer begins with the prompt. suffix: the text behind the answer."""

    echo: bool = False
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.echo and (self.suffix is not None or self.logprobs is not None):
            other = "logprobs" if self.suffix is None else "suffix"
            raise RequestError(f"echo and {other}: this server takes only one of the two", param="echo")

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, prompt="", suffix=None)


def check_scope(scope: str, where: str) -> None:
    """Raise RequestError for a scope that is too long."""
    if SEPARATOR in scope:
        raise RequestError(f"{where} has a NUL: expected a name", param=where)
    if len(scope) > MAX_NAME:
        raise RequestError(f"{where} has {len(scope):,} characters: expected at most {MAX_NAME}", param=where)
