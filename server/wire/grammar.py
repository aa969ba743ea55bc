"""The fields of a request that say what its answer must be."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from ...models.grammar.source import Kind, Source
from ..errors import RequestError
from .sampling import Json, SamplingOptions

TEXT_KINDS: dict[str, Kind] = {"grammar": "gbnf", "lark_grammar": "lark", "regex": "regex"}
"""The fields that hold a grammar as text, and its language."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar, and the field that it comes from, for errors."""

    field: str
    source: Source


class GrammarOptions(SamplingOptions, Struct, frozen=True):
    """How tokens are sampled, and what they must make: at most one of these fields, in OpenAI's and llama-server's names."""

    response_format: dict[str, Json] | None = None
    json_schema: dict[str, Json] | bool | None = None
    grammar: str | None = None
    lark_grammar: str | None = None
    regex: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether the answer has to fit anything."""
        return bool(self._given())

    def wanted(self) -> Wanted | None:
        """Return the grammar that the answer must fit. It may write a large schema as text. Raises RequestError."""
        given = self._given()
        if not given:
            return None
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} both say what the answer must be: send one", param=given[1])
        (field,) = given
        if field in TEXT_KINDS:
            return Wanted(field, Source(TEXT_KINDS[field], getattr(self, field)))
        if field == "json_schema":
            return Wanted(field, _schema_source(self.json_schema))
        return self._response_format(self.response_format or {})

    def _given(self) -> list[str]:
        names = ("json_schema", *TEXT_KINDS)
        given = [name for name in names if getattr(self, name) not in (None, "")]
        is_text = self.response_format is None or self.response_format.get("type", "text") == "text"
        return given if is_text else ["response_format", *given]

    def _response_format(self, given: dict[str, Json]) -> Wanted:
        """Return the grammar of a response_format: its schema, or as in OpenAI's API the one in its json_schema."""
        field, kind = "response_format", given.get("type")
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
        return Wanted(f"{field}.schema", _schema_source({"type": "object"} if schema in (None, {}) else schema))


def _schema_source(schema: Json) -> Source:
    return Source("json_schema", msgspec.json.encode(schema).decode())
