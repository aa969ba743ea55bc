"""A source as llguidance's grammar. Runs in a process of its own (see `trial`), since its time is the client's choice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from .schema import add_types, check_schema
from .source import GrammarError, Kind, Source

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # to build the lexer; 1,000,000 would be llguidance's
    step_lexer_fuel=100_000,  # of one mask: some 10 ms, and bytes that a grammar may force at once
    max_lexer_states=50_000,  # 1 to 2 kB each, for each answer
    verbose_errors=False,
)
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One spelling of each value, as Python writes it: without a choice of spaces, no model writes spaces for ever, and what
stands between two values is known ahead."""
STRICT: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}  # whatever `x-guidance` in a schema says
SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

# Of Lark: texts and patterns, which may hold any sign, and comments.
LARK_TEXT = r'"(?:\\.|[^"\\\x00-\x1f\x7f])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*'
LARK_TOKEN = r"<[^<>\s]+>"
LARK_TEXTS, LARK_TOKENS = re.compile(LARK_TEXT), re.compile(LARK_TOKEN)
LARK_PART = re.compile(f"{LARK_TEXT}|({LARK_TOKEN})")
LARK_REFUSED = re.compile(r"%(?:json|regex|llguidance|lark)\b|@[\w-]+|\[[^\]]*\b(?:temperature|stop)\b[^\]]*\]")
GBNF_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|"', re.DOTALL)


def define(source: Source) -> str:
    """Return llguidance's grammar for a source. Raises GrammarError."""
    for name, _ in source.schemas:
        if not SCHEMA_NAME.fullmatch(name):
            raise GrammarError(f"{name!r} is no name of a schema")
    first = DEFINITIONS[source.kind](source)
    if not source.schemas:
        return first
    grammars = json.loads(first)["grammars"]
    for name, text in source.schemas:
        (grammar,) = json.loads(_schema(text))["grammars"]
        grammars.append(grammar | {"name": name})
    return json.dumps({"grammars": grammars})


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("nested too deeply") from None
    add_types(schema)
    check_schema(schema)
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}  # a plain `true` takes no options
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), JSON_STYLE, STRICT)


def _gbnf(source: Source) -> str:
    try:
        lark = gbnf_to_lark(GBNF_ESCAPE.sub(_character, source.text))
    except RecursionError:
        raise GrammarError("nested too deeply") from None
    except GbnfToLarkError as error:
        raise GrammarError(str(error)) from None
    except Exception as error:  # the converter raises plain ones for rules that are missing or stand twice
        raise GrammarError(str(error) or type(error).__name__) from None
    return LLMatcher.grammar_from_lark(lark)


def _character(escape: re.Match[str]) -> str:
    r"""Return the character of a `\u` escape, which the converter would spell without its zeros; all else as it stands."""
    code = int(escape[1] or escape[2] or "0", 16)
    if code < 0x80 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return f"\\x{code:02x}" if 0 < code < 0x80 else escape[0]
    return chr(code)


def _lark(source: Source) -> str:
    if not source.may_name_tokens:
        signs = LARK_TEXTS.sub(" ", source.text)
        if found := LARK_TOKENS.search(signs):
            raise GrammarError(f"{found[0]} names a token: only texts and patterns may be named")
        if found := LARK_REFUSED.search(signs):
            raise GrammarError(f"{found[0]} is not supported")
    return json.dumps({"grammars": [{"lark_grammar": source.text}]})


def without_tokens(source: Source, stand_in: str) -> Source:
    """Return a Lark grammar of the server's own with another token's name for each: for a vocabulary without them."""
    text = LARK_PART.sub(lambda part: stand_in if part[1] else part[0], source.text)
    return replace(source, text=text)


DEFINITIONS: dict[Kind, Callable[[Source], str]] = {
    "json_schema": lambda source: _schema(source.text),
    "regex": lambda source: LLMatcher.grammar_from_regex(source.text),
    "gbnf": _gbnf,
    "lark": _lark,
}
