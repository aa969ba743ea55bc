"""Decodes JSON into structs. Errors name the wrong field.

A struct lists the known fields of a body. The tables in this module divide the fields that are not in the struct into four
kinds:

- A field that changes the content, form or rules of the answer is refused, unless its value is a no-op.
- A field for a preference (style, length, cost, another server's tools) leads to a warning in the answer.
- A field that changes no answer is accepted.
- An unknown field leads to a warning that suggests a similar known name.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, lru_cache
from reprlib import Repr
from threading import Lock
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.inspect import AnyType, CollectionType, Field, FloatType, StrType, StructType, Type, UnionType, type_info

from ..http.api_errors import RequestError
from ..http.json_body import as_unicode, check_elements
from .body import ChatRequest, Options, TextRequest
from .sampling_fields import JsonValue, SamplingOptions

NO_EFFECT = "; it has no effect"
MAX_WARNINGS = 8  # most warnings about unknown fields; further unknown fields are only counted
MAX_FIELDS = 512  # most fields of a body: each unknown field takes a few microseconds
MAX_NEUTRAL = 64  # most bytes of a value that may be a no-op
MAX_COMPARED = 40  # most characters of a name that is compared with all known names

HARMLESS = frozenset({
    # OpenAI's: for billing, caches and the detection of abuse
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "prediction", "moderation",
    # Anthropic's, for the same purposes
    "inference_geo", "user_profile_id", "workspace_id", "diagnostics", "billing_policy", "fallback_credit_token",
    # llama-server's: for speed, and for shifting a full context, which this server never does
    "backend_sampling", "n_cache_reuse", "n_keep", "n_discard", "speculative.n_max", "speculative.n_min",
    "speculative.p_min", "speculative.type", "speculative.ngram_size_n", "speculative.ngram_size_m",
    "speculative.ngram_min_hits",
    "stream_options.include_obfuscation",
    # Ollama's: for loading and computing a model, which this server's flags decide
    "options.num_keep", "options.num_batch", "options.num_gpu", "options.main_gpu", "options.num_thread", "options.use_mmap",
    "options.use_mlock", "options.low_vram", "options.numa", "options.f16_kv", "options.vocab_only", "options.logits_all",
    "options.embedding_only",
})  # fmt: skip

TEXT_ONLY = "this server reads and writes text only"
SCHEMA_FIELDS = "send a schema as `response_format` or `json_schema`, a grammar as `grammar`, `lark_grammar` or `regex`"
OUTDATED = "this sampler is outdated, and llama-server has it no more"
BY_TEMPLATE = "the chat template decides it, and no field of a request"
REFUSED: Mapping[str, tuple[tuple[JsonValue, ...], str]] = {
    "audio": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "multimodal_data": (([],), TEXT_ONLY),
    "image_data": (([],), TEXT_ONLY),
    "reasoning_control": ((False,), "`reasoning_budget_tokens` bounds a thought"),
    "thread": ((), "send the whole history, or use `/v1/responses` with `previous_response_id`"),
    "chat_template": (("",), "--chat-template-file sets one for all requests"),
    "best_of": ((1,), "send `n`, and choose among the choices"),
    "reasoning_in_content": ((False,), "`reasoning_format` says where reasoning stands"),
    "chat_format": ((), BY_TEMPLATE),
    "chat_parser": ((), BY_TEMPLATE),
    "generation_prompt": ((), BY_TEMPLATE),
    "preserved_tokens": (([],), BY_TEMPLATE),
    "n_indent": ((0,), "a `grammar` can ask for an indentation"),
    "grammar_lazy": ((False,), "a `lark_grammar` can let free text stand in front"),
    "grammar_triggers": (([],), "a `lark_grammar` can let free text stand in front"),
    "guided_json": ((), "send it as `json_schema`"),
    "guided_regex": (("",), "send it as `regex`"),
    "guided_choice": (([],), "send a `json_schema` with an `enum`, or a `regex`"),
    "guided_grammar": (("",), "send it as `grammar` or `lark_grammar`"),
    "ebnf": (("",), "send it as `grammar`"),
    "structured_outputs": ((), SCHEMA_FIELDS),
    "structural_tag": (("",), SCHEMA_FIELDS),
    "format": (("",), SCHEMA_FIELDS),
    "output_format": ((), SCHEMA_FIELDS),
    "tfs_z": ((1,), OUTDATED),
    "penalize_nl": ((False,), OUTDATED),
}
"""Fields that a client depends on, each with its no-op values, and with advice on what to do instead."""

WHOLE = "nothing is left out of a prompt: one that is too long is a 400"
LENGTH = "say in the messages how long the answer shall be"
WISHES: Mapping[str, tuple[tuple[JsonValue, ...], str]] = {
    "verbosity": (("medium",), LENGTH),
    "text.verbosity": (("medium",), LENGTH),
    "truncation": (("disabled",), WHOLE),
    "options.penalize_newline": ((False,), OUTDATED),
    "options.tfs_z": ((1,), OUTDATED),
    "web_search_options": ((), "this server searches no web: `retrieval` searches its own documents"),
    "mcp_servers": (([],), "this server runs no tools: run them in the client"),
    "compaction": ((), "shorten the history in the client"),
    "speed": (("standard",), "each answer is as fast as it can be"),
    "fallbacks": (([],), "one model is served"),
}
"""Fields that a client can do without, each with its no-op values, and with what the server does instead."""


class ToolChoiceFields(Struct):
    """The fields of a `tool_choice`, if it is an object."""

    type: JsonValue = None
    name: JsonValue = None
    function: JsonValue = None
    custom: JsonValue = None
    namespace: JsonValue = None
    allowed_tools: JsonValue = None
    mode: JsonValue = None
    tools: JsonValue = None


class JsonSchemaFields(Struct):
    name: JsonValue = None
    description: JsonValue = None
    schema: JsonValue = None
    strict: JsonValue = None


class ResponseFormatFields(JsonSchemaFields):
    """The fields of a `response_format`. A schema may stand next to the type."""

    type: JsonValue = None
    json_schema: JsonSchemaFields | None = None


class FunctionCallFields(Struct):
    """The fields of a `function_call`, if it is an object."""

    name: JsonValue = None


class CacheOptionFields(Struct):
    """The fields of `prompt_cache_options`, and of a chat's `cache_control`."""

    type: JsonValue = None
    mode: JsonValue = None
    ttl: JsonValue = None


OPEN: Mapping[str, type[Struct]] = {
    "tool_choice": ToolChoiceFields,
    "response_format": ResponseFormatFields,
    "function_call": FunctionCallFields,
    "prompt_cache_options": CacheOptionFields,
    "cache_control": CacheOptionFields,
}
"""Objects that are not decoded into a struct, with their known fields. The table `OPEN` of a body adds further objects."""

ELSEWHERE = frozenset({*ChatRequest.__struct_encode_fields__, *TextRequest.__struct_encode_fields__})
"""Fields of the routes that most clients use."""

_shown = Repr()
_shown.maxstring = MAX_COMPARED


@cache
def nested(kind: type[Struct]) -> Mapping[str, type[Struct]]:
    """Return the structs that list the known fields of nested objects, by the name of the object's field in the body."""
    inner = {name: _takes(field.type, StructType) for name, field in _fields_of(kind).items()}
    opened = {**OPEN, **getattr(kind, "OPEN", {})}
    return {name: about.cls if about else opened[name] for name, about in inner.items() if about or name in opened}


def has_nested(body: Struct, kind: type[Struct]) -> bool:
    """Return whether a body contains one of the nested objects that `nested` lists."""
    return any(isinstance(getattr(body, name, None), Struct | dict) for name in nested(kind))


def unread(body: Mapping[str, Raw], kind: type[Struct], strict: bool) -> tuple[str, ...]:
    """Return a warning for each unknown field. strict: whether an unknown field raises RequestError instead.

    Raises RequestError for a field that this module refuses, even without `strict`.
    """
    if len(body) > MAX_FIELDS:
        raise RequestError(f"the body has {len(body):,} fields: expected at most {MAX_FIELDS}")
    unknown = list(_unread(body, kind))
    if unknown and strict:
        raise RequestError(f"{_warning(unknown[0], kind)}; --strict refuses it", param=unknown[0][:MAX_COMPARED])
    warnings = [f"{_warning(name, kind)}{'' if name in WISHES else NO_EFFECT}" for name in unknown[:MAX_WARNINGS]]
    if len(unknown) > MAX_WARNINGS:
        warnings.append(f"{len(unknown) - MAX_WARNINGS:,} more fields are not known")
    return tuple(warnings)


def _unread(body: Mapping[str, Raw], kind: type[Struct], within: str = "") -> Iterator[str]:
    """Yield the name of each unknown field, such as `outer.inner` in a nested object.

    Raises RequestError for a field that this module refuses.
    """
    known, objects = _names(kind), nested(kind)
    for name, value in body.items():
        path = within + name
        if name not in known and path not in HARMLESS and not _asks_for_nothing(path, value):
            yield path
        elif name in objects and bytes(memoryview(value)[:1]) == b"{":
            inner = msgspec.json.decode(value, type=dict[str, Raw])
            if issubclass(objects[name], Options):  # a body in a body
                yield from (f"{name}.{one}" for one in _unread(inner, objects[name]))
            else:
                yield from _unread(inner, objects[name], f"{path}.")


def _asks_for_nothing(name: str, value: Raw) -> bool:
    """Return whether a field has a no-op value, by the tables REFUSED and WISHES.

    If the field is in neither table, return False.

    Raises RequestError if a field in REFUSED has another value.
    """
    if name not in REFUSED and name not in WISHES:
        return False
    neutral, instead = REFUSED.get(name) or WISHES[name]
    asks = len(value) > MAX_NEUTRAL or msgspec.json.decode(value) not in (None, *neutral)
    if asks and name in REFUSED:
        raise RequestError(f"{name} is not supported: {instead}", param=name)
    return not asks


def _warning(name: str, kind: type[Struct]) -> str:
    if name in WISHES:
        return f"{name} has no effect: {WISHES[name][1]}"
    if name in ELSEWHERE:
        return f"{name} is no field of this route"
    near = _nearest(name, kind) if len(name) <= MAX_COMPARED else None
    return f"{_shown.repr(name)} is not known" + (f" (did you mean {near}?)" if near else "")


@cache
def _names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


@lru_cache(maxsize=256)
def _nearest(name: str, kind: type[Struct]) -> str | None:
    """Return the known field that is most similar to a name; None: no field is similar."""
    parts = {f"{outer}.{inner}" for outer, inners in nested(kind).items() for inner in inners.__struct_encode_fields__}
    found = get_close_matches(name, [*kind.__struct_encode_fields__, *parts, *REFUSED, *WISHES, *HARMLESS], n=1, cutoff=0.75)
    return found[0] if found else None


# ---- Decode bodies and check types. A wrong type is a 400 that names the field. -----------------------------------------

LARGE = 64 << 10  # bytes from which a body is decoded outside the event loop, because it takes long
COLLECTOR = Lock()
"""Locked while the garbage collector is off, so that one decoder does not turn it on while another decoder works. The lock
also guards the first use of each kind of body, which msgspec does not guard (`slots.store.record_file.HEADS`)."""
MAX_COLONS = 1 << 17  # most colons in a body whose fields are checked one by one; this many take 0.1 s
UNCHECKED = "the body is too large to look for unknown fields in it"
MOST_OTHERS, LONGEST_MESSAGE = 4, 200  # most wrong fields in an error after the first; most characters about each of them
LOOSE = re.compile("got `(null|float)`")  # values that llama-server accepts and msgspec does not
R = TypeVar("R", bound=Struct)
T = TypeVar("T")
A = TypeVar("A", bound=Type)


def decode_request(body: bytes, kind: type[R], strict: bool = False) -> tuple[R, tuple[str, ...]]:
    """Decode a client's body. Return the result with a warning for each field that has no effect. Raises RequestError.

    strict: whether a field without effect raises RequestError instead.
    """
    decoded, warnings = _decode_request(body, kind, strict)
    if not isinstance(decoded, Options):
        return decoded, warnings
    unused = decoded.unused()
    if unused and strict:
        raise RequestError(f"{unused[0]}; --strict refuses it", param=unused[0].split()[0])
    return decoded, (*warnings, *decoded.warnings(), *unused)


def _decode_request(body: bytes, kind: type[R], strict: bool) -> tuple[R, tuple[str, ...]]:
    """Decode a body. Return the result with a warning for each unknown field. Raises RequestError.

    strict: whether an unknown field raises RequestError instead.
    """
    check_elements(body)
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Most bodies have only known fields, so one pass is enough.
        decoded: R = _decode(body, _exact(kind))  # type: ignore[assignment]
        if not has_nested(decoded, kind):
            return decoded, ()
    body = as_unicode(body)
    decoded = _decode_loosely(body, kind)
    if body.count(b":") > MAX_COLONS:
        return decoded, (UNCHECKED,)
    return decoded, unread(_decode(body, dict[str, Raw]), kind, strict)


@cache
def _exact(kind: type[Struct]) -> type[Struct]:
    """Return a struct that has the fields of `kind` and refuses all others."""
    return msgspec.defstruct(kind.__name__, (), bases=(kind,), forbid_unknown_fields=True)


def decode(body: bytes, kind: type[R]) -> R:
    """Decode a body. Raises RequestError; its text names the wrong field and the expected type."""
    check_elements(body)
    return _decode_loosely(as_unicode(body), kind)


def _decode_loosely(body: bytes, kind: type[R]) -> R:
    """Decode a body, also with values that llama-server accepts and msgspec refuses. Raises RequestError."""
    try:
        try:
            return _decode(body, kind)
        except msgspec.ValidationError as error:
            if LOOSE.search(str(error)) is None:
                raise
            return msgspec.convert(tightened(_decode(body, dict[str, JsonValue]), kind), kind)
    except msgspec.ValidationError as error:
        where, message = _named(error)
        others = _also_wrong(body, kind, where) if where and len(body) < LARGE else ()
        raise RequestError("; ".join((message, *others)), param=where or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="malformed_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply: expected fewer levels", code="malformed_json") from None


def _named(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the path of the wrong field (empty: the body itself), and a message that starts with the path."""
    message, *path = re.split(r" - at `\$([^`]*)`\Z", str(error))  # only at the end, since a value may look like a path
    where = "".join(path).lstrip(".") or _field_named(message)
    return where, f"{where or 'the body'}: {message}"


def _also_wrong(body: bytes, kind: type, first: str) -> Iterator[str]:
    """Yield an error message for each further wrong field of a body, at most one for each field at the top level.

    first: the path of the wrong field that is known already.
    """
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        values, where = tightened(_decode(body, dict[str, JsonValue]), kind), first
        removed = set[str]()
        while len(removed) < MOST_OTHERS and (name := re.split(r"[.\[]", where)[0]) in values:
            del values[name]
            removed.add(name)
            try:
                msgspec.convert(values, kind)
                return
            except msgspec.ValidationError as error:
                where, message = _named(error)
            if where not in removed:  # otherwise the field is required, and only missing because it was removed
                yield message[:LONGEST_MESSAGE]


def _decode(body: bytes, kind: type[T]) -> T:
    """Decode with the garbage collector off: it would scan all objects whenever their number has grown by 25 %."""
    with COLLECTOR:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return msgspec.json.decode(body, type=kind)
        finally:
            if enabled:
                gc.enable()


def tightened(values: dict[str, JsonValue], kind: type) -> dict[str, JsonValue]:
    """Convert values of a body and its objects: what llama-server accepts becomes what msgspec accepts.

    A field that is null becomes unset. Nulls are removed from lists. 4.0 becomes the integer 4. A list of texts to embed
    keeps its nulls, so that the list is refused later. If nulls were removed from such a list, the embeddings after them
    would get wrong indexes.
    """
    for name, field in _fields_of(kind).items():
        value = values.get(name)
        if value is None and not field.required:
            values.pop(name, None)
        elif isinstance(value, float) and value.is_integer() and not _takes(field.type, FloatType):
            values[name] = int(value)
        elif isinstance(value, dict) and (inner := _takes(field.type, StructType)):
            values[name] = tightened(value, inner.cls)
        elif isinstance(value, list) and (listed := _takes(field.type, CollectionType)):
            values[name] = _tightened_list(value, listed.item_type, keeps_texts=not issubclass(kind, SamplingOptions))
    return values


def _tightened_list(values: list[JsonValue], item: Type, *, keeps_texts: bool) -> list[JsonValue]:
    """Return a list without nulls, with `tightened` objects. keeps_texts: whether a list of texts stays as it is."""
    if isinstance(item, AnyType) or (keeps_texts and isinstance(item, StrType)):
        return values
    inner = _takes(item, StructType)
    return [tightened(one, inner.cls) if inner and isinstance(one, dict) else one for one in values if one is not None]


@cache
def _fields_of(kind: type) -> dict[str, Field]:
    about = type_info(kind)
    assert isinstance(about, StructType)
    return {field.encode_name: field for field in about.fields}


def _takes(about: Type, wanted: type[A]) -> A | None:
    """Return the first type of class `wanted` among the types that a field may have; None: there is none."""
    if isinstance(about, UnionType):
        return next((each for each in about.types if isinstance(each, wanted)), None)
    return about if isinstance(about, wanted) else None


def _field_named(message: str) -> str:
    found = re.search(r"field `(\w+)`", message)
    return found[1] if found else ""


MAX_TEXTS = 2048  # most texts of a request, as in OpenAI's API


def check_number(num_texts: int, name: str) -> None:
    """Raise RequestError if a request has no text or too many texts. name: the field with the texts."""
    if not num_texts:
        raise RequestError(f"{name} is empty: expected at least one text", param=name)
    if num_texts > MAX_TEXTS:
        raise RequestError(f"{name} has {num_texts:,} texts: expected at most {MAX_TEXTS:,}", param=name)
