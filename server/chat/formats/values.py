"""Values in a model's text: JSON passed on as it stands, and other notations written as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from .text import SPACE, Steps, Text

TEXT = frozenset({"string"})
MAX_SCHEMAS = 64  # schemas that are looked at for the types of one parameter
_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class JsonSpan:
    """Finds the end of a JSON value as its text comes. It counts brackets and quotes, and checks nothing else."""

    __slots__ = ("_begun", "_depth", "_escaped", "_quoted", "ended")

    _IN_TEXT = re.compile(r'["\\]')
    _NESTED = re.compile(r'["{}\[\]]')
    _OUTSIDE = re.compile(r'["{}\[\],\s]')

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._quoted = self._escaped = self._begun = False

    def feed(self, text: str) -> int:
        """Take text; return how much of it belongs to the value."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            signs = self._IN_TEXT if self._quoted else self._NESTED if self._depth else self._OUTSIDE
            found = signs.search(text, at)
            if not found:
                self._begun = True
                return len(text)
            self._begun = self._begun or found.start() > at
            at = self._step(found[0], found.start())
            if self.ended:
                return at
        return at

    def _step(self, character: str, at: int) -> int:
        """Take a character that counts; return the place behind it, or its own if the value ended before it."""
        if self._quoted:
            self._escaped, self._quoted = character == "\\", character == "\\"
            self.ended = not self._quoted and not self._depth
        elif character == '"':
            self._quoted = self._begun = True
        elif character in "{[":
            self._depth += 1
            self._begun = True
        elif self._depth:
            self._depth -= character in "}]"
            self.ended = not self._depth
        elif self._begun or character not in SPACE:
            self.ended = True
            return at
        return at + 1


def json_value(text: Text) -> Steps[str]:
    """Read a JSON value; return its text, which may be no JSON after all."""
    span, parts = JsonSpan(), []
    while True:
        parts.append(text.take(span.feed(text.rest)))
        if span.ended or text.ended:
            return "".join(parts).strip()
        yield None


def escape(text: str) -> str:
    """Return a text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str, types: Collection[str] = ()) -> bool:
    """Whether a text is JSON, of one of these types if there are any."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    kind = _type(value)
    return not types or kind in types or (kind == "integer" and "number" in types)


def typed(text: str, types: Collection[str]) -> str:
    """Return a value that was written without quotes as JSON. types: by the schema; none of them: any."""
    bare = _WORDS.get(text.strip(), text.strip())
    wanted = [kind for kind in types if kind != "string"]
    fits = is_json(bare, wanted) and not (not types and bare.startswith('"'))
    return bare if fits else f'"{escape(text)}"'


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parameter_types(schema: object) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter of a tool; empty where the schema does not say."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    schemas = _Schemas(schema)
    return {name: schemas.types(value) for name, value in properties.items()} if isinstance(properties, dict) else {}


class _Schemas:
    """Finds the types of the parameters of one tool. What many of them refer to is looked at once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._meanings: dict[str, object] = {}  # by reference
        self._listed: dict[int, frozenset[str]] = {}  # types of a schema that lists its values, by the id of the list

    def types(self, schema: object) -> frozenset[str]:
        """Return the types that a schema allows; empty where it does not say, or not within a few steps."""
        found: set[str] = set()
        asked = [schema]
        for _ in range(MAX_SCHEMAS):
            if not asked:
                return frozenset(found)
            schema = asked.pop()
            if not isinstance(schema, dict):
                return frozenset()
            if isinstance(reference := schema.get("$ref"), str):
                asked.append(self._meant(reference))
            elif "type" in schema:
                kinds = schema["type"]
                listed = kinds[:MAX_SCHEMAS] if isinstance(kinds, list) else [kinds]
                found.update(kind for kind in listed if isinstance(kind, str))
            elif isinstance(choices := schema.get("anyOf") or schema.get("oneOf"), list):
                asked += choices[:MAX_SCHEMAS]
            elif "const" in schema:
                found.add(_type(schema["const"]))
            elif isinstance(values := schema.get("enum"), list):
                found |= self._types_of(values)
            else:
                return frozenset()
        return frozenset()

    def _types_of(self, values: list[object]) -> frozenset[str]:
        if id(values) not in self._listed:
            self._listed[id(values)] = frozenset(map(_type, values))
        return self._listed[id(values)]

    def _meant(self, reference: str) -> object:
        """Return what a reference such as `#/$defs/Place` means; None if it means nothing here."""
        if reference not in self._meanings:
            meant = self._root
            for name in reference.removeprefix("#/").split("/"):
                meant = meant.get(name) if isinstance(meant, dict) else None
            self._meanings[reference] = meant
        return self._meanings[reference]


def _type(value: object) -> str:
    return "null" if value is None else _TYPES.get(type(value), "object")
