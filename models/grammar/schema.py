"""Checks of a JSON Schema that llguidance does not make: unknown keywords, and references without an end."""

from __future__ import annotations

from collections.abc import Iterator

from .source import GrammarError

ONE, LIST, MAP = "one", "list", "map"
INNER = {
    "additionalProperties": ONE, "items": ONE, "additionalItems": ONE, "anyOf": LIST, "oneOf": LIST, "allOf": LIST,
    "prefixItems": LIST, "properties": MAP, "patternProperties": MAP, "$defs": MAP, "definitions": MAP,
}  # fmt: skip
"""Keywords with schemas inside, and how these stand there."""
VALUES = frozenset({
    "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
"""Keywords that are honoured, without schemas inside."""
REMARKS = frozenset({
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "markdownDescription", "default", "example",
    "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator", "xml",
    "externalDocs", "strict",
})  # fmt: skip
"""Keywords that allow and forbid nothing."""
NEUTRAL = {"nullable": False, "uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Keywords that are not supported, with the value that changes nothing."""
OPEN = ("type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf")
IMPLIED = {
    "properties": "object", "required": "object", "additionalProperties": "object", "patternProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "pattern": "string", "minLength": "string", "maxLength": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
}  # fmt: skip
"""Keywords that only make sense for one type, and the type."""
MOST_ROUNDS = 64  # of looking for answers with an end: as many as references that each need the one behind them

Schema = dict[str, object]


def check_schema(schema: object) -> None:
    """Raise GrammarError for a keyword that would be ignored, and for a schema whose every answer would have no end."""
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema is an object, true or false")
    found = dict(_schemas(schema, "#"))
    for path, inner in found.items():
        for keyword, value in inner.items():
            known = keyword in INNER or keyword in VALUES or keyword in REMARKS or keyword.startswith("x-")
            if not known and (keyword not in NEUTRAL or value != NEUTRAL[keyword]):
                raise GrammarError(f"{path}: {keyword!r} is not supported")
    if isinstance(schema, dict) and not _Finite(found).holds():
        raise GrammarError("its references go round in a circle: every answer would have no end")


def add_types(schema: object) -> None:
    """Give each schema without a type the one that its keywords are for, in place: its author means values of that type.

    JSON Schema would allow values of all other types, too.
    """
    for _, inner in list(_schemas(schema, "#")):
        if inner.keys().isdisjoint(OPEN) and (implied := next((IMPLIED[key] for key in inner if key in IMPLIED), None)):
            inner["type"] = implied


def _schemas(schema: object, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield each schema in a schema with its path, the inner ones first."""
    pending: list[tuple[object, str]] = [(schema, path)]
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
    """Finds the schemas that some answer with an end fits, by the paths of the schemas in it."""

    def __init__(self, schemas: dict[str, Schema]) -> None:
        self._schemas = schemas
        self._finite: set[str] = set()

    def holds(self) -> bool:
        """Return whether the whole schema is one. References that are not found here are left to the compiler."""
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
        if not all(self._known(inner) for inner in self._inner(path, schema, "allOf")):
            return False
        for keyword in ("anyOf", "oneOf"):
            choices = self._inner(path, schema, keyword)
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
        first = self._inner(path, schema, "prefixItems")[: int(needed)]
        return all(self._known(inner) for inner in first) and (len(first) >= needed or self._known(f"{path}/items"))

    def _known(self, path: str) -> bool:
        """Return whether the schema at a path is known to have an end. Where none stands, all is allowed."""
        return path in self._finite or path not in self._schemas

    def _inner(self, path: str, schema: Schema, keyword: str) -> list[str]:
        inner = schema.get(keyword)
        return [f"{path}/{keyword}/{at}" for at in range(len(inner))] if isinstance(inner, list) else []
