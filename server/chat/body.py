"""The bodies of requests for chats and text completions: messages, tools, documents, grammars, retrieval."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta, Struct

from ...models.json_schema import GrammarSource, Kind
from ...ordering.policy import BEST_PLACES, ORDERS
from ...slots.scope import MAX_NAME, SEPARATOR
from ..config.settings import Attention, Draft, ReasoningFormat, Volatile
from ..formats.answer import GrammarSpec
from ..http.api_errors import RequestError
from .reasoning import AskedReasoning, Effort, ReasoningField, ThinkingField, read_reasoning
from .sampling_fields import JsonValue, SamplingOptions, Window

# ---- The LoRA adapters of a request. ------------------------------------------------------------------------------------

MOST_ADAPTERS, MOST_SCALE = 64, 1e4  # most adapters of a request; largest scale of an adapter

Scale = Annotated[float, Meta(ge=-MOST_SCALE, le=MOST_SCALE)]


class AdapterScale(Struct, frozen=True):
    """The number of a LoRA adapter, and its scale."""

    id: Annotated[int, Meta(ge=0)]
    scale: Scale


AdapterList = Annotated[list[AdapterScale], Meta(max_length=MOST_ADAPTERS)]


class AdapterScales(Struct, frozen=True):
    """`POST /lora-adapters`: this object, or a bare list as in llama-server.

    Adapters that are not in the list get the scale 0.
    """

    adapters: AdapterList


# ---- The fields of a request for the form of its answer. ----------------------------------------------------------------

TEXT_KINDS: dict[str, Kind] = {"grammar": "gbnf", "lark_grammar": "lark", "regex": "regex"}
"""The fields that contain a grammar as text, each with the grammar's language."""


class GrammarOptions(SamplingOptions, Struct, frozen=True):
    """The fields for sampling, and for the grammar or schema that the answer must fit.

    A request may set at most one grammar or schema. `response_format` is OpenAI's field, `json_schema` and `grammar` are
    llama-server's, and `lark_grammar` and `regex` are our own.
    """

    response_format: dict[str, JsonValue] | None = None
    json_schema: dict[str, JsonValue] | bool | None = None
    grammar: str | None = None
    lark_grammar: str | None = None
    regex: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must fit a grammar or a schema."""
        return bool(self._given())

    def grammar_spec(self) -> GrammarSpec | None:
        """Return the grammar that the answer must fit; None: any answer fits. Raises RequestError.

        A schema is encoded as JSON here, which takes time if the schema is large.
        """
        given = self._given()
        if not given:
            return None
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} both say what the answer must be: send one", param=given[1])
        (field,) = given
        if field in TEXT_KINDS:
            return GrammarSpec(field, GrammarSource(TEXT_KINDS[field], getattr(self, field)))
        if field == "json_schema":
            return GrammarSpec(field, _schema_source(self.json_schema))
        return self._response_format(self.response_format or {})

    def _given(self) -> list[str]:
        names = ("json_schema", *TEXT_KINDS)
        given = [name for name in names if getattr(self, name) not in (None, "")]
        form = self.response_format or {"type": "text"}
        return given if form.get("type") == "text" and not _has_schema(form) else ["response_format", *given]

    def _response_format(self, given: dict[str, JsonValue]) -> GrammarSpec:
        """Return the grammar of a response_format. Raises RequestError.

        The schema is in the field `schema`, or in `json_schema.schema` as in OpenAI's API.
        """
        field, kind = "response_format", given.get("type")
        if kind == "text":
            raise RequestError(
                "response_format.type is 'text', and it has a schema: expected json_schema", param=f"{field}.type"
            )
        if kind not in ("json_object", "json_schema"):
            wrong = f"response_format.type is {reprlib.repr(kind)}: expected text, json_object or json_schema"
            raise RequestError(wrong, param="response_format.type")
        if kind == "json_schema" and "json_schema" in given:
            field, given = "response_format.json_schema", given["json_schema"]
            if not isinstance(given, dict):
                raise RequestError(f"{field}: expected an object", param=field)
        schema = given.get("schema")
        if schema is None and kind == "json_schema":
            raise RequestError(f"{field}.schema is missing", param=f"{field}.schema")
        if isinstance(schema, dict) and given.get("strict") is True:
            schema = schema | {"strict": True}
        return GrammarSpec(f"{field}.schema", _schema_source({"type": "object"} if schema in (None, {}) else schema))


def _has_schema(form: dict[str, JsonValue]) -> bool:
    return any(form.get(name) is not None for name in ("schema", "json_schema"))


def _schema_source(schema: JsonValue) -> GrammarSource:
    return GrammarSource("json_schema", msgspec.json.encode(schema).decode())


# ---- The fields of a search in documents. -------------------------------------------------------------------------------

MAX_TOP_K = 100
MAX_PATHS, MAX_PATH, MAX_ATTACHED = 100, 4096, 16

TopK = Annotated[int, Meta(ge=1, le=MAX_TOP_K)]
Paths = Annotated[list[Annotated[str, Meta(max_length=MAX_PATH)]], Meta(max_length=MAX_PATHS)]


SearchBy = Literal["words", "vectors"]


class Retrieval(Struct, frozen=True, kw_only=True):
    """The options of the search for a chat's documents.

    query: the text to search for; None: the last question. paths: the files and folders to search in; empty: all of
    --docs. by: search only by words or only by vectors; None: by both. documents: the ids of the attached files to
    search. folder: whether to search --docs; None: only if `documents` is empty.
    """

    top_k: TopK | None = None
    query: str | None = None
    paths: Paths = []
    min_score: float | None = None
    by: SearchBy | None = None
    documents: Annotated[list[Annotated[str, Meta(max_length=MAX_NAME)]], Meta(max_length=MAX_ATTACHED)] = []
    folder: bool | None = None

    @property
    def searches_folder(self) -> bool:
        return not self.documents if self.folder is None else self.folder


HistoryKind = Literal["auto", "whole", "new"]
MAX_MESSAGE = 4096  # most characters of the text after reasoning that reached its limit
Choices = Annotated[int, Meta(ge=1, le=128)]
MAX_STOPS, MAX_STOP = 64, 1024  # most stop strings, and characters of each: each new token is searched for all of them

MAX_OPERATIONS = 256  # most entries of `response_fields`: each is looked up in the body of each choice
OF_DOCUMENTS = ("document_order", "best", "best_price_ms", "dedup", "order_hint", "keep_first", "keep_last")
LEAST_PING = 1.0  # least seconds between two pings of a stream
SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class Options(GrammarOptions, Struct, frozen=True):
    """The fields that chats and text completions share, in this order: OpenAI's, llama-server's, our own."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: Choices | None = None
    prompt_cache_key: str | None = None
    promptCacheKey: str | None = None
    prompt_cache_options: dict[str, JsonValue] | None = None
    session_id: SessionId | None = None

    n_predict: int | None = None
    n_cmpl: Choices | None = None
    t_max_predict_ms: Window = -1
    return_progress: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False
    verbose: bool | None = None
    sse_ping_interval: Annotated[float, Meta(ge=-1.0)] | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_OPERATIONS)] = []
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Meta(ge=-1)] = -1
    lora: AdapterList | None = None

    cache_scope: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    document_order: str | None = None
    best: str | None = None
    best_price_ms: Annotated[float, Meta(ge=0.0)] | None = None
    dedup: Literal["auto", "off"] | None = None
    order_hint: bool | None = None
    keep_first: Annotated[int, Meta(ge=0)] = 0
    keep_last: Annotated[int, Meta(ge=0)] = 0
    report_segments: bool = False
    draft: Draft | None = None

    def __post_init__(self) -> None:
        """Set `n` from llama-server's name for it, and `prompt_cache_key` from opencode's name."""
        if self.n is None and self.n_cmpl is not None:
            msgspec.structs.force_setattr(self, "n", self.n_cmpl)
        if self.prompt_cache_key is None and self.promptCacheKey is not None:
            msgspec.structs.force_setattr(self, "prompt_cache_key", self.promptCacheKey)

    def check(self) -> None:
        """Check the rules that the fields' types cannot express. Raises RequestError."""
        for name, known in (("document_order", ORDERS), ("best", BEST_PLACES)):
            if (given := getattr(self, name)) is not None and given not in known:
                wrong = f"{name} is {reprlib.repr(given)}: expected one of {', '.join(known)}"
                raise RequestError(wrong, param=name)
        if self.best == "last" and (self.keep_first or self.keep_last):
            kept = "keep_first" if self.keep_first else "keep_last"
            wrong = f"best is last and {kept} is {getattr(self, kept)}: both say what stands there, send one of them"
            raise RequestError(wrong, param="best")
        stops = self.stops()
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in stops):
            raise RequestError(f"stop: expected at most {MAX_STOPS} texts of at most {MAX_STOP:,} characters", param="stop")
        if self.sse_ping_interval is not None and 0 < self.sse_ping_interval < LEAST_PING:
            wrong = f"sse_ping_interval is {self.sse_ping_interval:g}: expected {LEAST_PING:g} s or more, or -1 for none"
            raise RequestError(wrong, param="sse_ping_interval")
        check_scope(self.cache_scope, "cache_scope")
        self.check_sampling()

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each part of the request that even --strict only ignores. Raises RequestError."""
        yield from ()

    def unused(self) -> tuple[str, ...]:
        """Return a warning for each field that has no effect on the request's route. Raises RequestError.

        With --strict, `decode_request` refuses a request that has such a field.
        """
        return ()

    def of_documents(self) -> tuple[str, ...]:
        """Return a warning for each field about documents that the request sets.

        This method is for routes whose prompts have no documents.
        """
        given = (name for name in OF_DOCUMENTS if getattr(self, name) not in (None, 0))
        return tuple(f"{name} is no field of this route; it has no effect" for name in given)

    @property
    def opts_in(self) -> bool:
        """Whether the request sets a field, other than `cache_prompt`, that turns the prompt cache on."""
        return bool(self.prompt_cache_key or self.prompt_cache_options or self.session_id)

    def caches(self, default: bool) -> bool:
        """Return whether the request may read and fill the cache. default: the result if no field of the request decides."""
        return default or self.opts_in if self.cache_prompt is None else self.cache_prompt

    @property
    def session(self) -> str:
        """The client's name for a series of requests that continue each other; empty: it has no name."""
        return self.session_id or self.prompt_cache_key or ""

    def without_texts(self) -> Self:
        """Return the request without its texts, which may take much memory."""
        return self

    def limit(self, default: int = -1) -> int:
        """Return the most tokens to generate; -1: no limit. Raises RequestError.

        default: the result if the request sets no limit, or sets it to -1.
        """
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


class ConversationReference(Struct, frozen=True):
    """A conversation's id.

    history: whether `messages` are the whole history or only the new messages; auto: the roles of the messages decide.
    """

    id: str
    history: HistoryKind = "auto"


class ChatFields(Options, frozen=True, kw_only=True):
    """The fields of chats in every API: our own fields, and each API's fields about reasoning.

    volatile: what to do with instructions that change between requests.
    """

    volatile: Volatile | None = None
    documents: list[JsonValue] | None = None
    documents_attention: Attention | None = None
    retrieval: bool | Retrieval | None = None
    tool_documents: Literal["auto", "off"] | None = None
    documents_in_text: Literal["auto", "off"] | None = None
    chat_template_kwargs: dict[str, JsonValue] = {}
    reasoning_format: ReasoningFormat | None = None
    reasoning_effort: Effort | None = None
    reasoning_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None
    thinking_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None
    reasoning_budget_message: Annotated[str, Meta(max_length=MAX_MESSAGE)] | None = None
    reasoning: ReasoningField | None = None
    thinking: ThinkingField | None = None
    think: bool | Effort | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @property
    def asked_reasoning(self) -> AskedReasoning:
        """The reasoning that the request asks for in any API's fields. Raises RequestError if two fields disagree."""
        return read_reasoning(self)

    def unused(self) -> tuple[str, ...]:
        return (*super().unused(), *self.asked_reasoning.unused)

    @property
    def is_named(self) -> bool:
        """Whether the request names a session or a scope, so that its instructions do not mix with another client's."""
        return bool(self.session or self.cache_scope)


class OpenAIFields(ChatFields, frozen=True, kw_only=True):
    """The fields that OpenAI's Chat Completions and Responses have in common."""

    conversation: str | ConversationReference | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None


class ChatRequest(OpenAIFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`.

    documents: the documents of the last user message; each user message may also have its own documents.
    documents_attention: whether documents attend to each other. retrieval: whether and how to search the server's
    documents for the last question. conversation, previous_response_id: the history that the messages continue. store:
    whether to store the answer, as in OpenAI's API. on_disconnect: whether a stream goes on if its client disconnects.
    """

    messages: list[dict[str, JsonValue]]
    on_disconnect: Literal["cancel", "finish"] = "cancel"
    functions: list[dict[str, JsonValue]] | None = None
    function_call: Literal["none", "auto"] | dict[str, JsonValue] | None = None
    cache_control: dict[str, JsonValue] | None = None
    parse_tool_calls: bool | None = None
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
    def outlives_client(self) -> bool:
        """Whether the answer is finished even if the client disconnects."""
        return self.on_disconnect == "finish"

    def check_outliving(self, stores: bool) -> None:
        """Raise RequestError if the request is to be finished without its client, but its answer cannot be fetched later.

        An answer can be fetched later if it is a stream with one choice and will be stored. stores: whether the answer
        will be stored.
        """
        if self.outlives_client and not (stores and self.stream and (self.n or 1) == 1):
            wrong = "on_disconnect is finish: expected a stream with one choice whose answer is stored with its conversation"
            raise RequestError(wrong, param="on_disconnect")

    @property
    def retrieves(self) -> bool:
        """Whether the chat searches for documents."""
        return self.retrieval not in (None, False)

    @property
    def shows_prefilled(self) -> bool:
        """Whether the answer repeats the start that the request gave it.

        The field `echo` decides. If the request has no `echo`, the answer repeats its start, except in a stream with
        `continue_final_message`, as in llama-server.
        """
        return not (self.stream and self.continue_final_message) if self.echo is None else self.echo

    def for_next_turn(self) -> Self:
        """Return the request without its messages and the fields about these messages."""
        return msgspec.structs.replace(
            self, messages=[], documents=None, add_generation_prompt=None, continue_final_message=None
        )

    @property
    def opts_in(self) -> bool:
        continues = self.conversation is not None or self.previous_response_id is not None
        return super().opts_in or continues or self.retrieves

    def prefill_only(self) -> Self:
        """Return the request, changed so that its prompt is cached and no tokens are generated."""
        return msgspec.structs.replace(
            self, cache_prompt=True, n=None, n_cmpl=None, max_tokens=0, max_completion_tokens=None, n_predict=None
        )

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, messages=[], documents=None, tools=None)


class WarmRequest(ChatRequest, frozen=True, kw_only=True):
    """`POST /v1/cache/warm`.

    pin: true pins the prompt, so that it is evicted last; false ends its pin; None changes nothing. ttl: the seconds
    until the pin ends; None: the pin ends when the server stops.
    """

    pin: bool | None = None
    ttl: Annotated[float, Meta(gt=0.0)] | None = None

    def check(self) -> None:
        super().check()
        if self.ttl is not None and not self.pin:
            raise RequestError("ttl says how long a prompt stays pinned: send pin: true with it", param="ttl")


class DocumentsOrderRequest(ChatRequest, frozen=True, kw_only=True):
    """`POST /v1/documents/order`.

    Without messages, the documents are ordered as if they came with the first message of a chat.
    """

    messages: list[dict[str, JsonValue]] = []


class SpeculateRequest(ChatRequest, frozen=True, kw_only=True):
    """`POST /v1/speculate`: prefill a chat while the search for its documents still runs.

    id: the client's name for the chat's new turn. documents: the documents that the search has found so far.
    """

    id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] = "default"


class CompletionRequest(Options, frozen=True, kw_only=True):
    """llama-server's `POST /completion`. prompt: a text, token ids, or a list of both."""

    prompt: str | list[JsonValue] | dict[str, JsonValue]

    def unused(self) -> tuple[str, ...]:
        return (*super().unused(), *self.of_documents())

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, prompt="")


class TextRequest(CompletionRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`.

    echo: whether the answer starts with the prompt. suffix: the text after a gap, which the answer fills; None: no gap.
    """

    echo: bool = False
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.suffix is not None:
            raise RequestError("echo and suffix: this server takes only one of the two", param="echo")

    def without_texts(self) -> Self:
        return msgspec.structs.replace(self, prompt="", suffix=None)


def check_scope(scope: str, where: str) -> None:
    """Raise RequestError if a scope contains a NUL character or is longer than `MAX_NAME`.

    where: the name of the scope's field.
    """
    if SEPARATOR in scope:
        raise RequestError(f"{where} has a NUL: expected a name", param=where)
    if len(scope) > MAX_NAME:
        raise RequestError(f"{where} has {len(scope):,} characters: expected at most {MAX_NAME}", param=where)


# ---- The body of `POST /infill`. ----------------------------------------------------------------------------------------


class OtherFile(Struct, frozen=True):
    """A file of the project, other than the file with the gap."""

    text: str
    filename: str = "tmp"


class InfillRequest(Options, frozen=True, kw_only=True):
    """`POST /infill`: fill the gap between two texts.

    input_prefix, input_suffix: the text before and after the gap, as a text, token ids, or a list of both. prompt: the
    first words in the gap, which the answer continues. input_extra: other files of the project.
    """

    input_prefix: str | list[JsonValue]
    input_suffix: str | list[JsonValue]
    prompt: str = ""
    input_extra: tuple[OtherFile, ...] = ()

    def unused(self) -> tuple[str, ...]:
        return (*super().unused(), *self.of_documents())

    @classmethod
    def between(cls, prompt: JsonValue, request: TextRequest) -> Self:
        """Return the infill request for a text completion with a suffix. prompt: the text before the gap."""
        suffix, scope = request.suffix or "", request.cache_scope
        return cls(input_prefix=prompt, input_suffix=suffix, max_tokens=request.limit(), cache_scope=scope)

    def without_texts(self) -> Self:
        """Return the request without its texts, which may take much memory."""
        return msgspec.structs.replace(self, input_prefix="", input_suffix="", prompt="", input_extra=())


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, JsonValue]


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class OllamaOptions(SamplingOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Ollama's `options`: the sampling fields, and the most tokens of the answer and of the context."""

    stop: str | list[str] | None = None
    num_predict: int | None = None
    num_ctx: int | None = None

    def for_chat(self) -> dict[str, JsonValue]:
        """Return the options as fields of a chat, without `num_ctx`.

        As in Ollama, a `num_predict` of 0 or less sets no limit.
        """
        given = msgspec.to_builtins(self)
        given.pop("num_ctx", None)
        if (most := given.pop("num_predict", None)) is not None:
            given["max_completion_tokens"] = most if most > 0 else -1
        return given


class TextFormat(Struct, frozen=True):
    """The form of an answer. name, description, strict, schema: only for the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: dict[str, JsonValue] | None = None

    def for_chat(self) -> dict[str, JsonValue]:
        """Return the form as the `response_format` of a chat. Raises RequestError."""
        if self.type != "json_schema":
            return {"type": self.type, "schema": self.schema}
        if self.schema is None:
            raise RequestError("text.format.schema: expected a JSON schema", param="text.format.schema")
        named = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in named.items() if value is not None}
        return {"type": "json_schema", "json_schema": given | {"schema": self.schema}}


class TextConfig(Struct, frozen=True):
    format: TextFormat | None = None


class ResponseChat(ChatRequest, frozen=True, kw_only=True):
    """The chat of a `POST /v1/responses`.

    messages: the new messages, without the messages of earlier turns. instructions: the instructions, which apply to this
    turn only.
    """

    instructions: str | None = None

    def without_texts(self) -> Self:
        return msgspec.structs.replace(super().without_texts(), instructions=None)
