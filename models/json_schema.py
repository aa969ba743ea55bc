"""Turns JSON Schemas and grammars of other kinds into llguidance's grammars, and tries these in a child process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from threading import Thread, stack_size
from typing import TYPE_CHECKING, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from ..slots.child import start_child
from .trial import command

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


Kind = Literal["json_schema", "regex", "gbnf", "lark"]
MAX_BYTES = 256 << 10  # bytes of a source; a compiled grammar takes some hundred times as much


class GrammarError(ValueError):
    """A grammar cannot be used, or no answer can match it. The error's message says why."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text.

    kind: its language.
    schemas: JSON Schemas as JSON text, by name. A Lark grammar refers to a schema as `@name`.
    may_name_tokens: the grammar may name control tokens, because the server wrote it and not a client.
    """

    kind: Kind
    text: str
    schemas: tuple[tuple[str, str], ...] = ()
    may_name_tokens: bool = False

    @property
    def size(self) -> int:
        """The number of characters in all texts of the grammar."""
        return len(self.text) + sum(len(name) + len(schema) for name, schema in self.schemas)


# ---- Schema -------------------------------------------------------------------------------------------------------------
# Checks of JSON Schemas that llguidance does not make: unknown keywords, misread keywords, endless references.

ONE, LIST, MAP = "one", "list", "map"
INNER = {
    "additionalProperties": ONE, "items": ONE, "additionalItems": ONE, "anyOf": LIST, "oneOf": LIST, "allOf": LIST,
    "prefixItems": LIST, "properties": MAP, "patternProperties": MAP, "$defs": MAP, "definitions": MAP,
}  # fmt: skip
"""Keywords that contain schemas: one schema, a list of schemas, or schemas by name."""
VALUES = frozenset({
    "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
"""Supported keywords that contain no schemas."""
REMARKS = frozenset({
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "markdownDescription", "default", "example",
    "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator", "xml",
    "externalDocs", "strict", "enumNames", "enumDescriptions", "markdownEnumDescriptions", "propertyOrdering",
    "errorMessage",
})  # fmt: skip
"""Keywords that neither allow nor forbid anything."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "nullable": (False,), "uniqueItems": (False,), "unevaluatedProperties": (True,), "unevaluatedItems": (True,),
    "propertyNames": (True, {}, {"type": "string"}),
}  # fmt: skip
"""Unsupported keywords, with the values that change nothing."""
REFERENCES = ("$dynamicRef", "$recursiveRef")  # always refused, because a schema without them has another meaning
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
"""Supported formats."""
PLAIN_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""Formats that any text matches."""
OPEN = ("type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf")
IMPLIED = {
    "properties": "object", "required": "object", "additionalProperties": "object", "patternProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "pattern": "string", "minLength": "string", "maxLength": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
}  # fmt: skip
"""Keywords that apply to values of one type only, with this type."""
EXCLUSIVE = (
    ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), "minimum", 1),
    ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), "maximum", -1),
)
"""Rows: an exclusive bound, the keywords of the opposite bound, the inclusive bound, and its direction.

The direction is 1 for a lower bound and -1 for an upper bound."""
MOST_ROUNDS = 64  # rounds of the search for finite answers: the longest supported chain of references

Schema = dict[str, object]


def check_schema(schema: object) -> None:
    """Raise GrammarError for a schema that llguidance would misread, or that only infinitely long values would match."""
    found = dict(_schemas(schema))
    for path, inner in found.items():
        _check_range(path, inner)
        for pattern in _patterns(inner):
            check_pattern(pattern, f"{path}: the pattern {pattern[:80]!r}")
    if isinstance(schema, dict) and not _Finite(found).holds():
        raise GrammarError("its references go round in a circle: every answer would have no end")


def check_pattern(pattern: str, where: str) -> None:
    """Raise GrammarError for a regular expression that ends inside an escape. llguidance would ignore this error."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError(f"{where} ends with a single \\: expected the character that it escapes")


def _patterns(schema: Schema) -> Iterator[str]:
    pattern, names = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(names, dict):
        yield from names


def _check_range(path: str, schema: Schema) -> None:
    """Raise GrammarError for a range of numbers that llguidance reads as a wider range.

    Example: with `exclusiveMinimum` 3 and `maximum` 3.5, llguidance also allows 3. llguidance misreads a range if the
    excluded bound is an integer, and the other bound is less than 1 away from it and farther from 0.
    """
    if schema.get("type") == "integer":
        return
    for outside, ends, inner, step in EXCLUSIVE:
        bound = schema.get(outside)
        if not isinstance(bound, int | float) or bound % 1 or bound * step < 0:
            continue
        for end in ends:
            value = schema.get(end)
            if isinstance(value, int | float) and min(bound, bound + step) < value < max(bound, bound + step):
                wrong = f"{outside} {bound} beside {end} {value}"
                raise GrammarError(f"{path}: {wrong} is not supported: send {inner} with a fraction")


def add_types(schema: object) -> None:
    """Add to each schema without a type, in place, the type to which its keywords apply.

    The author means this type, although JSON Schema would also allow values of all other types.
    """
    for _, inner in list(_schemas(schema)):
        if inner.keys().isdisjoint(OPEN) and (implied := next((IMPLIED[key] for key in inner if key in IMPLIED), None)):
            inner["type"] = implied


# Keywords that other servers accept are rewritten with supported keywords if possible, and otherwise removed. In a schema
# with `strict: true` at the top, no keyword may be removed.

OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
MOST_WRITTEN = 4 * MAX_BYTES  # characters of a rewritten schema, which nested lists of names would multiply
MOST_UNIQUE = 4  # values of a list without repetitions; all their orders are written out
KINDS = ("string", "number", "boolean", "null", "object", "array")
LOOKING = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bB])")  # look-around, back references, word boundaries


def soften(schema: object) -> list[str]:
    """Rewrite or remove, in place, the keywords that llguidance does not know. Return the removed keywords.

    Raises GrammarError if the schema is neither an object nor a boolean, or if a keyword to remove is a reference or is in a
    strict schema.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema is an object, true or false")
    is_strict = isinstance(schema, dict) and schema.get("strict") is True
    left_out: list[str] = []
    for path, inner in list(_schemas(schema)):
        for rewrite in (_with_property_names, _without_negation, _with_unique_items, _with_null):
            rewrite(inner)
        for keyword in [keyword for keyword in inner if not _is_known(keyword)]:
            if inner[keyword] in NEUTRAL.get(keyword, ()):
                del inner[keyword]
                continue
            if is_strict or keyword in REFERENCES:
                raise GrammarError(f"{path}: {keyword!r} is not supported")
            del inner[keyword]
            left_out.append(f"{keyword!r} at {path}")
        left_out += [f"{what} at {path}" for what in _without_looking(path, inner, is_strict)]
        left_out += [f"{what} at {path}" for what in _without_named_patterns(path, inner, is_strict)]
        form = inner.get("format")
        if isinstance(form, str) and form not in FORMATS:
            del inner["format"]
            left_out += [] if form in PLAIN_FORMATS else [f"the format {form[:80]!r} at {path}"]
    return left_out


def _is_known(keyword: str) -> bool:
    return keyword in INNER or keyword in VALUES or keyword in REMARKS or keyword.startswith("x-")


def _with_property_names(schema: Schema) -> None:
    """If an object names no properties, rewrite its `propertyNames` as `patternProperties` or `properties`."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or any(keyword in schema for keyword in ("properties", "patternProperties", "$ref")):
        return
    rules = {name: value for name, value in names.items() if name not in REMARKS and value != "string"}
    value = schema.get("additionalProperties", True)
    if rules.keys() == {"pattern"} and isinstance(rules["pattern"], str):
        schema["patternProperties"] = {rules["pattern"]: value}
    elif (
        rules.keys() == {"enum"}
        and isinstance(listed := rules["enum"], list)
        and all(isinstance(one, str) for one in listed)
        and len(listed) * len(json.dumps(value)) <= MOST_WRITTEN
    ):
        schema["properties"] = {name: deepcopy(value) for name in listed}
    else:
        return
    schema["additionalProperties"] = False
    schema.setdefault("type", "object")
    del schema["propertyNames"]


def _without_negation(schema: Schema) -> None:
    """Rewrite a `not` of types or of listed values as the remaining types or values."""
    match schema.get("not"):
        case {"type": str() | list() as types, **rest} if not rest:
            excluded = {types} if isinstance(types, str) else set(types)
            own = schema.get("type", list(KINDS))
            own = own if isinstance(own, list) else [own]
            if "integer" in excluded and "number" not in excluded and "number" in own:
                return
            excluded |= {"integer"} if "number" in excluded else set()
            if (left := [kind for kind in own if kind not in excluded]) and excluded <= {*KINDS, "integer"}:
                schema["type"] = left if len(left) > 1 else left[0]
                del schema["not"]
        case {"enum": [*values], **rest} | {"const": values, **rest} if not rest and isinstance(schema.get("enum"), list):
            excluded = values if isinstance(values, list) else [values]
            schema["enum"] = [one for one in schema["enum"] if one not in excluded]  # type: ignore[union-attr]
            del schema["not"]


def _with_unique_items(schema: Schema) -> None:
    """If items have only a few possible values, rewrite `uniqueItems` as an `enum` of all lists without repetitions."""
    items, least, most = schema.get("items"), schema.get("minItems", 0), schema.get("maxItems", MOST_UNIQUE)
    if schema.get("uniqueItems") is not True or not isinstance(items, dict) or "prefixItems" in schema:
        return
    values = [False, True] if items.get("type") == "boolean" else [items["const"]] if "const" in items else items.get("enum")
    if not isinstance(values, list) or not 0 < len(values) <= MOST_UNIQUE:
        return
    if isinstance(least, int) and isinstance(most, int):
        lengths = range(least, min(most, len(values)) + 1)
        schema["enum"] = [list(order) for length in lengths for order in permutations(values, length)]
        for keyword in ("uniqueItems", "items", "minItems", "maxItems"):
            schema.pop(keyword, None)


def _with_null(schema: Schema) -> None:
    """Rewrite OpenAPI's `nullable` as a type or a choice."""
    if schema.get("nullable") is not True:
        return
    del schema["nullable"]
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = types if "null" in types else [*types, "null"]
        if isinstance(values := schema.get("enum"), list) and None not in values:
            schema["enum"] = [*values, None]
    elif isinstance(choices := schema.get("anyOf"), list):
        schema["anyOf"] = [*choices, {"type": "null"}]
    else:
        inner = {
            name: schema.pop(name) for name in [name for name in schema if name not in ("$defs", "definitions", "strict")]
        }
        schema["anyOf"] = [inner, {"type": "null"}]


def _without_looking(path: str, schema: Schema, is_strict: bool) -> Iterator[str]:
    """Remove patterns with look-around, and yield them.

    If the schema is strict, raise GrammarError instead of removing a pattern.
    """
    for keyword in ("pattern", "patternProperties"):
        value = schema.get(keyword)
        patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
        for pattern in filter(LOOKING.search, patterns):
            if is_strict:
                raise GrammarError(f"{path}: the pattern {pattern[:80]!r} looks around, which is not supported")
            yield f"the pattern {pattern[:80]!r}"
            if isinstance(value, dict):
                schema["additionalProperties"] = value.pop(pattern)
            else:
                del schema[keyword]


def _without_named_patterns(path: str, schema: Schema, is_strict: bool) -> Iterator[str]:
    """Remove `patternProperties` if its patterns match no names other than those in `properties`.

    Yield a phrase that names the removed patterns.

    Only objects without additional properties are changed. In an object without additional properties, llguidance would let
    an answer start a name that no text can complete. If the schema is strict, raise GrammarError instead of removing
    anything.
    """
    patterns, named = schema.get("patternProperties"), schema.get("properties", {})
    if schema.get("additionalProperties") is not False or not isinstance(patterns, dict) or not isinstance(named, dict):
        return
    if not patterns or _has_other_names(patterns, named):
        return
    listed = ", ".join(repr(pattern[:80]) for pattern in patterns)
    if is_strict:
        raise GrammarError(f"{path}: patternProperties: no name fits {listed} beside the properties")
    del schema["patternProperties"]
    yield f"patternProperties {listed}"


def _has_other_names(patterns: Iterable[str], named: Iterable[str]) -> bool:
    """Return whether a pattern matches a name that is not in `named`. Return True if a pattern does not compile."""
    closed: Schema = {
        "type": "object",
        "properties": {name: {"const": 0} for name in named},
        "patternProperties": {pattern: {"const": 0} for pattern in patterns},
        "required": list(named),
        "additionalProperties": False,
    }
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(closed), JSON_STYLE)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    before = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}: 0, " for name in named)
    given = list(before.encode("utf-8", "surrogatepass"))
    if matcher.is_error() or matcher.try_consume_tokens(given) < len(given):
        return True
    matcher.compute_bitmask()
    return not matcher.is_error() and matcher.validate_tokens([ord('"')]) == 1


def close_objects(schema: object) -> None:
    """Forbid, in place, the properties that a schema does not name.

    A schema that itself says whether it allows further properties stays as it is.

    llama-server also forbids such properties, because small models invent fields. If two schemas apply to the same object,
    one may name properties that the other does not. So both still allow further properties.
    """
    found = dict(_schemas(schema))
    shared = _shared(found)
    for path, inner in found.items():
        named, required = inner.get("properties"), inner.get("required", [])
        if not isinstance(named, dict) or not named or path in shared or not isinstance(required, list):
            continue
        least = inner.get("minProperties", 0)
        says = any(keyword in inner for keyword in ("additionalProperties", "patternProperties", "unevaluatedProperties"))
        if not says and {*map(str, required)} <= named.keys() and isinstance(least, int) and least <= len(named):
            inner["additionalProperties"] = False


def _shared(found: dict[str, Schema]) -> set[str]:
    """Return the paths of the schemas that apply to the same value as another schema."""
    pending: list[str] = []
    for path, inner in found.items():
        alone = [not OF_OBJECTS.isdisjoint(inner), "$ref" in inner, "anyOf" in inner, "oneOf" in inner]
        if sum(alone) + len(list(_listed(path, inner, "allOf"))) > 1:
            pending += [path, *_beside(path, inner)]
    shared: set[str] = set()
    while pending:
        if (path := pending.pop()) in found and path not in shared:
            shared.add(path)
            pending += _beside(path, found[path])
    return shared


def _beside(path: str, schema: Schema) -> Iterator[str]:
    """Yield the paths of the schemas that `$ref`, `allOf`, `anyOf` and `oneOf` apply to a value of this schema."""
    if isinstance(reference := schema.get("$ref"), str):
        yield reference
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from _listed(path, schema, keyword)


def _listed(path: str, schema: Schema, keyword: str) -> Iterator[str]:
    inner = schema.get(keyword)
    return (f"{path}/{keyword}/{at}" for at in range(len(inner) if isinstance(inner, list) else 0))


def _schemas(schema: object) -> Iterator[tuple[str, Schema]]:
    """Yield a schema and all schemas inside it, each with its path. Inner schemas come before outer schemas."""
    pending: list[tuple[object, str]] = [(schema, "#")]
    order: list[tuple[str, Schema]] = []
    while pending:
        value, path = pending.pop()
        if not isinstance(value, dict):
            continue
        order.append((path, value))
        for keyword, inner in value.items():
            shape = INNER.get(keyword)
            if shape == MAP and isinstance(inner, dict):
                pending += [(one, f"{path}/{keyword}/{_escaped(name)}") for name, one in inner.items()]
            elif shape and isinstance(inner, list):
                pending += [(one, f"{path}/{keyword}/{at}") for at, one in enumerate(inner)]
            elif shape:
                pending.append((inner, f"{path}/{keyword}"))
    return reversed(order)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class _Finite:
    """Finds which schemas have a finite answer.

    schemas: a schema and all schemas inside it, by their paths.
    """

    def __init__(self, schemas: dict[str, Schema]) -> None:
        self._schemas = schemas
        self._finite: set[str] = set()

    def holds(self) -> bool:
        """Return whether the whole schema has a finite answer. References to unknown paths are left to the compiler."""
        for _ in range(MOST_ROUNDS):
            before = len(self._finite)
            for path, schema in self._schemas.items():
                if path not in self._finite and self._ends(path, schema):
                    self._finite.add(path)
            if "#" in self._finite:
                return True
            if len(self._finite) == before:
                return False
        raise GrammarError("its references are too deep")

    def _ends(self, path: str, schema: Schema) -> bool:
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._schemas and reference not in self._finite:
            return False
        if not all(self._known(inner) for inner in _listed(path, schema, "allOf")):
            return False
        for keyword in ("anyOf", "oneOf"):
            choices = list(_listed(path, schema, keyword))
            if choices and not any(self._known(inner) for inner in choices):
                return False
        return "enum" in schema or "const" in schema or self._some_type_ends(path, schema)

    def _some_type_ends(self, path: str, schema: Schema) -> bool:
        kinds = schema.get("type", "any")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if any(kind not in ("object", "array") for kind in kinds):
            return True
        return ("object" in kinds and self._object_ends(path, schema)) or (
            "array" in kinds and self._array_ends(path, schema)
        )

    def _object_ends(self, path: str, schema: Schema) -> bool:
        required, properties = schema.get("required"), schema.get("properties")
        for name in required if isinstance(required, list) else ():
            is_property = isinstance(properties, dict) and name in properties
            inner = f"{path}/properties/{_escaped(str(name))}" if is_property else f"{path}/additionalProperties"
            if not self._known(inner):
                return False
        return True

    def _array_ends(self, path: str, schema: Schema) -> bool:
        needed = schema.get("minItems", 0)
        if not isinstance(needed, int | float) or needed <= 0:
            return True
        first = list(_listed(path, schema, "prefixItems"))[: int(needed)]
        return all(self._known(inner) for inner in first) and (len(first) >= needed or self._known(f"{path}/items"))

    def _known(self, path: str) -> bool:
        """Return whether the schema at a path is known to have a finite answer. A path without a schema allows any value."""
        return path in self._finite or path not in self._schemas


# ---- Definition ---------------------------------------------------------------------------------------------------------
# A source as llguidance's grammar. This runs in a separate process (see `TrialProcess`), since a client determines its time.

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # to build the lexer; llguidance's default is 1,000,000
    step_lexer_fuel=100_000,  # for one mask (some 10 ms), and for the bytes that a grammar may force at once
    max_lexer_states=50_000,  # for each answer; a state takes 1 to 2 kB
    verbose_errors=False,
)
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Write each value in one way only, as Python does.

So no model can write spaces for ever, and the text between two values is known in advance."""
STRICT: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}  # overrides `x-guidance` in a schema
WHITE = r"(?:(?:[ \t\r\n]|\\[nrt]|\[(?:[ \t\r\n]|\\[nrt])+\])(?:[*+?]|\{[0-9]{1,3}(?:,[0-9]{0,3})?\})?)*"
"""A pattern for regular expressions that match only JSON's white space. Rust's class of white space has more characters."""
SEPARATORS = {
    "item_separator": (re.compile(f"{WHITE},{WHITE}"), "a comma, and JSON's white space around it"),
    "key_separator": (re.compile(f"{WHITE}:{WHITE}"), "a colon, and JSON's white space around it"),
    "whitespace_pattern": (re.compile(WHITE), "JSON's white space"),
}
"""The options of `x-guidance` for the text between values: the allowed form, and its description."""
SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

# Lark's texts and patterns, which may contain any character, and its comments.
LARK_TEXT = r'"(?:\\.|[^"\\\x00-\x1f\x7f])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*'
LARK_TOKEN = r"<[^<>\s]+>"
LARK_TEXTS, LARK_TOKENS = re.compile(LARK_TEXT), re.compile(LARK_TOKEN)
LARK_PART = re.compile(f"{LARK_TEXT}|({LARK_TOKEN})")
LARK_REFUSED = re.compile(r"%(?:json|regex|llguidance|lark)\b|@[\w-]+|\[[^\]]*\b(?:temperature|stop)\b[^\]]*\]")
GBNF_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|"', re.DOTALL)


def define(source: GrammarSource, left_out: list[str]) -> str:
    """Return llguidance's grammar for a source. Raises GrammarError.

    left_out: a list to which the parts that are not enforced are added.
    """
    for name, _ in source.schemas:
        if not SCHEMA_NAME.fullmatch(name):
            raise GrammarError(f"{name!r} is no name of a schema")
    first = _schema(source.text, left_out) if source.kind == "json_schema" else DEFINITIONS[source.kind](source)
    if not source.schemas:
        return first
    grammars = json.loads(first)["grammars"]
    for name, text in source.schemas:
        (grammar,) = json.loads(_schema(text, left_out))["grammars"]
        grammars.append(grammar | {"name": name})
    return json.dumps({"grammars": grammars})


def _schema(text: str, left_out: list[str]) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("nested too deeply") from None
    add_types(schema)
    left_out += soften(schema)
    close_objects(schema)
    check_schema(schema)
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}  # a plain `true` cannot have options
    _check_style(schema.get("x-guidance"))
    written = json.dumps(schema)
    if len(written) > MOST_WRITTEN:
        raise GrammarError(f"written out, it has {len(written):,} characters: expected at most {MOST_WRITTEN:,}")
    return LLMatcher.grammar_from_json_schema(written, JSON_STYLE, STRICT)


def _check_style(style: object) -> None:
    """Raise GrammarError for separators that JSON does not allow, since no answer would be JSON."""
    if not isinstance(style, dict):
        return
    for name, (pattern, expected) in SEPARATORS.items():
        given = style.get(name)
        if isinstance(given, str) and not pattern.fullmatch(given):
            raise GrammarError(f"x-guidance.{name} is {given[:80]!r}: expected {expected}")


def _regex(source: GrammarSource) -> str:
    check_pattern(source.text, "it")
    return LLMatcher.grammar_from_regex(source.text)


def _gbnf(source: GrammarSource) -> str:
    try:
        lark = gbnf_to_lark(GBNF_ESCAPE.sub(_character, source.text))
    except RecursionError:
        raise GrammarError("nested too deeply") from None
    except GbnfToLarkError as error:
        raise GrammarError(str(error)) from None
    except Exception as error:  # the converter raises plain exceptions for missing or repeated rules
        raise GrammarError(str(error) or type(error).__name__) from None
    return LLMatcher.grammar_from_lark(lark)


def _character(escape: re.Match[str]) -> str:
    r"""Replace a `\u` escape by its character, or by a `\x` escape in ASCII: the converter drops zeros.

    A zero, half of a surrogate pair, and any other escape stay unchanged.
    """
    code = int(escape[1] or escape[2] or "0", 16)
    if code < 0x80 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return f"\\x{code:02x}" if 0 < code < 0x80 else escape[0]
    return chr(code)


def _lark(source: GrammarSource) -> str:
    if not source.may_name_tokens:
        signs = LARK_TEXTS.sub(" ", source.text)
        if found := LARK_TOKENS.search(signs):
            raise GrammarError(f"{found[0]} names a token: only texts and patterns may be named")
        if found := LARK_REFUSED.search(signs):
            raise GrammarError(f"{found[0]} is not supported")
    return json.dumps({"grammars": [{"lark_grammar": source.text}]})


def without_tokens(source: GrammarSource, stand_in: str) -> GrammarSource:
    """Replace each token's name in a Lark grammar of the server by `stand_in`, a token that the trial's vocabulary has."""
    text = LARK_PART.sub(lambda part: stand_in if part[1] else part[0], source.text)
    return replace(source, text=text)


DEFINITIONS: dict[Kind, Callable[[GrammarSource], str]] = {
    "regex": _regex,
    "gbnf": _gbnf,
    "lark": _lark,
}


# ---- Process ------------------------------------------------------------------------------------------------------------
# The process in which grammars are tried. It is started at the first use, and again after it has ended.

FROM_OUTSIDE = {-getattr(signal, name) for name in ("SIGKILL", "SIGTERM") if hasattr(signal, name)}
"""Exit codes of a process that another process has killed. No limit of the trial does this, so the grammar is retried."""


class TrialProcess:
    """A child process that tries grammars, one at a time. Call `close` at the end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._code = 0  # exit code of the last process that ended during a trial

    def define(self, source: GrammarSource) -> tuple[str, tuple[str, ...]]:
        """Return llguidance's grammar for a source, and the parts that it does not enforce.

        The child process has tried the grammar: it compiles in bounded time. Raises GrammarError.
        """
        line = self._ask(source)
        if not line and self._code in FROM_OUTSIDE:
            line = self._ask(source)
        if not line:
            raise GrammarError("it takes too much time or memory: make it simpler")
        answer = json.loads(line)
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer["grammar"], tuple(answer["left_out"])

    def _ask(self, source: GrammarSource) -> bytes:
        """Return the output line for a source; empty if the process ended while trying it."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two grammars, so this grammar is not the cause
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(source)).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            line = b""
            self.close()
            self._code = process.returncode
        return line

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return start_child(command("models.json_schema"), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


# ---- Compiles grammars in a separate process, with limits of time, memory and depth. ------------------------------------
#
# A grammar of a few hundred bytes can take minutes, gigabytes, or more stack than a thread has, and llguidance cannot be
# stopped. Here such a grammar ends only this process. The server then refuses the grammar and starts another process.
#
# Each line of input is a source. Each line of output is llguidance's grammar for the source, or why the source is refused.

SECONDS = 2.0  # of processor time for one grammar
BYTES = 1 << 30  # memory of the process
STACK = 16 << 20  # bytes: a quarter of the stack with which the server compiles
MOST_FORCED = 32 << 10  # bytes with which every answer would start; the engine has to wait for their tokens
TOKEN = "<|tool|>"  # a token of this process's vocabulary, whose other tokens are single bytes


def main() -> None:
    """Answer each line of stdin until stdin ends."""
    with suppress(ImportError, ValueError):  # Windows has no limits; macOS may refuse this one
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    stack_size(STACK)
    worker = Thread(target=_answer_all, daemon=True)
    worker.start()
    worker.join()


def _bound_time(seconds: float) -> None:
    """Let a signal end the process once it has used `seconds` more of processor time; 0 cancels the limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer_all() -> None:
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        _bound_time(SECONDS)
        answer = _answer(tokenizer, line)
        _bound_time(0)
        print(json.dumps(answer), flush=True)


def _answer(tokenizer: LLTokenizer, line: str) -> dict[str, str | list[str]]:
    fields, left_out = json.loads(line), list[str]()
    source = GrammarSource(**fields | {"schemas": tuple(map(tuple, fields["schemas"]))})
    try:
        grammar = define(source, left_out)
        tried = define(without_tokens(source, TOKEN), []) if source.may_name_tokens else grammar
        check(LLMatcher(tokenizer, tried, log_level=0, limits=LIMITS))
    except GrammarError as error:
        return {"error": str(error)}
    except (ValueError, MemoryError, RecursionError) as error:
        return {"error": f"it cannot be compiled: {error}"}
    return {"grammar": grammar, "left_out": left_out}


def check(matcher: LLMatcher) -> None:
    """Raise GrammarError for a grammar that did not compile, or that no answer can match."""
    if not matcher.is_error():
        if (forced := len(matcher.compute_ff_bytes())) > MOST_FORCED:
            raise GrammarError(f"it begins with a text of {forced:,} bytes: expected at most {MOST_FORCED:,}")
        matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise GrammarError(_plain(matcher.get_error()) or "no answer fits it")


def _plain(error: str) -> str:
    """Return llguidance's message on one line, without its markers."""
    message = " ".join(error.replace("<non-verbose/>", "").split())
    return message if len(message) <= 300 else message[:300] + "..."
