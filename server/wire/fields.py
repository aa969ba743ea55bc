"""The fields that clients send and no body of this server has: what is refused, what is harmless, what is unknown.

A field of a body is a field of its struct; this table begins where the structs end. A field that would change the answer is
refused, unless its value asks for nothing. Harmless ones are accepted. All others are unknown: each is a warning in the
answer, with the name that it resembles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from reprlib import Repr

import msgspec
from msgspec import Raw, Struct

from ..errors import RequestError
from .requests import ChatRequest, ConversationReference, Json, StreamOptions, TextRequest
from .retrieval import Retrieval

MAX_WARNINGS = 8  # of a request; more unknown fields are counted
MAX_FIELDS = 512  # of a body: each unknown one takes a few microseconds
MAX_NEUTRAL = 64  # bytes of a value that may ask for nothing; a longer one asks for something
MAX_COMPARED = 40  # characters of a name that is compared with all known ones

HARMLESS = frozenset({
    # OpenAI's: for its bills, its caches and its watch over abuse
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "prediction",
    # llama-server's: what it computes faster with, or keeps when it shifts a full context, which is never shifted here
    "backend_sampling", "n_cache_reuse", "n_keep", "n_discard", "speculative.n_max", "speculative.n_min",
    "speculative.p_min", "speculative.type", "speculative.ngram_size_n", "speculative.ngram_size_m",
    "speculative.ngram_min_hits",
    "stream_options.include_obfuscation",
})  # fmt: skip

TEXT_ONLY = "this server reads and writes text only"
OLD_TOOLS = "this form of tools is outdated: send `tools` and `tool_choice`"
BY_TEMPLATE = "the chat template decides it, and no field of a request"
REFUSED: Mapping[str, tuple[tuple[Json, ...], str]] = {
    "audio": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "multimodal_data": (([],), TEXT_ONLY),
    "image_data": (([],), TEXT_ONLY),
    "functions": (([],), OLD_TOOLS),
    "function_call": (("none", "auto"), OLD_TOOLS),
    "web_search_options": ((), "this server searches no web: `retrieval` searches its own documents"),
    "verbosity": (("medium",), "say in the messages how long the answer shall be"),
    "reasoning_control": ((False,), "`reasoning_budget_tokens` bounds a thought"),
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
    "tfs_z": ((1,), "this sampler is outdated, and llama-server has it no more"),
    "penalize_nl": ((False,), "this sampler is outdated, and llama-server has it no more"),
}
"""Fields that would change the answer: the values that ask for nothing, and what to do instead."""

NESTED: Mapping[str, type[Struct]] = {
    "stream_options": StreamOptions,
    "conversation": ConversationReference,
    "retrieval": Retrieval,
}
"""Fields that are objects of their own."""

ELSEWHERE = frozenset({*ChatRequest.__struct_encode_fields__, *TextRequest.__struct_encode_fields__})
"""Fields of the routes that most clients use."""

_shown = Repr()
_shown.maxstring = MAX_COMPARED


def has_nested(body: Struct) -> bool:
    """Return whether a body has a field with fields of its own."""
    return any(isinstance(getattr(body, name, None), nested) for name, nested in NESTED.items())


def unread(body: Mapping[str, Raw], kind: type[Struct], strict: bool) -> tuple[str, ...]:
    """Return a warning for each field that the server does not know. strict: refuse it instead.

    Raises RequestError for a field that would change the answer and cannot.
    """
    if len(body) > MAX_FIELDS:
        raise RequestError(f"the body has {len(body):,} fields: expected at most {MAX_FIELDS}")
    unknown = list(_unread(body, kind))
    if unknown and strict:
        raise RequestError(f"{_warning(unknown[0], kind)}; --strict refuses it", param=unknown[0][:MAX_COMPARED])
    warnings = [f"{_warning(name, kind)}; it has no effect" for name in unknown[:MAX_WARNINGS]]
    if len(unknown) > MAX_WARNINGS:
        warnings.append(f"{len(unknown) - MAX_WARNINGS:,} more fields are not known")
    return tuple(warnings)


def _unread(body: Mapping[str, Raw], kind: type[Struct], within: str = "") -> Iterator[str]:
    """Yield the names of unknown fields, those of nested objects behind a dot. Raises RequestError."""
    known = _names(kind)
    for name, value in body.items():
        path = within + name
        if name not in known and path not in HARMLESS and not _asks_for_nothing(path, value):
            yield path
        elif name in known and name in NESTED and bytes(memoryview(value)[:1]) == b"{":
            yield from _unread(msgspec.json.decode(value, type=dict[str, Raw]), NESTED[name], f"{name}.")


def _asks_for_nothing(name: str, value: Raw) -> bool:
    """Return whether a field that is refused has a value that asks for nothing. Raises RequestError if it asks."""
    if name not in REFUSED:
        return False
    neutral, instead = REFUSED[name]
    if len(value) > MAX_NEUTRAL or msgspec.json.decode(value) not in (None, *neutral):
        raise RequestError(f"{name} is not supported: {instead}", param=name)
    return True


def _warning(name: str, kind: type[Struct]) -> str:
    if name in ELSEWHERE:
        return f"{name} is no field of this route"
    near = _nearest(name, kind) if len(name) <= MAX_COMPARED else None
    return f"{_shown.repr(name)} is not known" + (f": is {near} meant?" if near else "")


@cache
def _names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


@lru_cache(maxsize=256)
def _nearest(name: str, kind: type[Struct]) -> str | None:
    """Return the known field that a name resembles most, if any does."""
    parts = {f"{outer}.{inner}" for outer, inners in NESTED.items() for inner in inners.__struct_encode_fields__}
    found = get_close_matches(name, [*kind.__struct_encode_fields__, *parts, *REFUSED, *HARMLESS], n=1, cutoff=0.75)
    return found[0] if found else None
