"""The grammar of calls and reasoning in Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ...models.json_schema import MAX_BYTES, GrammarError
from .families import HOLE, CallNotation
from .json_text import TEXT, ParameterType, parameter_types

ANY = r"/(.|\n)*/"
NOTHING: Mapping[str, str] = MappingProxyType({})
Definitions = Sequence[tuple[str, Mapping[str, object]]]
"""Tools: the name and the JSON schema of the arguments of each."""


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A piece of a text. token: in Lark, if it is a control token."""

    text: str
    token: str = ""

    @property
    def lark(self) -> str:
        return self.token or _quoted(self.text)


@dataclass(slots=True)
class GrammarWriter:
    """Writes one grammar. controls: the ids of the control tokens that may stand in it, by their spelling."""

    controls: Mapping[str, int]
    schemas: dict[str, str] = field(default_factory=dict)  # JSON text by name
    _rules: list[str] = field(default_factory=list)
    _size: int = 0  # characters of the schemas

    def calls(self, written: CallNotation, tools: Definitions, parallel: bool) -> str:
        """Add the rules of one call of these tools or, if they may be `parallel`, of several; return their name."""
        one = self.rule(" | ".join(self._call(written, name, schema) for name, schema in tools))
        several = f" ({self.text(written.between)} {one})*" if parallel and written.between is not None else ""
        return self.rule(f"{self.text(written.begin)} {one}{several} {self.text(written.end)}")

    def reasoning(self, start: str, end: str) -> str:
        """Add the rule of reasoning, with the white space behind it, between tags; return its name. start: may be empty."""
        return self.rule(f'{self.text(start)} {self._free(self._parts(end))} "\\n"? "\\n"?')

    def lark(self, start: str) -> str:
        """Return the grammar of answers that are `start`."""
        return "\n".join((f"start: {start}", "TEXT: /(.|\\n)+/", *self._rules))

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, form: str, filled: Mapping[str, str] = NOTHING) -> str:
        """Return a text of the family's as a piece of Lark, in which control tokens are tokens. filled: as in `_parts`."""
        return _joined(self._parts(form, filled))

    def _parts(self, form: str, filled: Mapping[str, str] = NOTHING) -> list[GrammarPart]:
        """Cut a form at the control tokens in it. filled: a client's texts for its holes, which never are tokens."""
        parts = [GrammarPart("")]
        for at, piece in enumerate(HOLE.split(form) if filled else [form]):
            for part in [GrammarPart(filled[piece])] if at % 2 else self._cut(piece):
                if part.token or parts[-1].token:
                    parts.append(part)
                else:
                    parts[-1] = GrammarPart(parts[-1].text + part.text)
        return [part for part in parts if part.text]

    def _cut(self, text: str) -> list[GrammarPart]:
        tokens = sorted(filter(None, self.controls), key=len, reverse=True)
        texts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return [GrammarPart(text, f"<[{self.controls[text]}]>" if text in self.controls else "") for text in texts]

    def _schema(self, schema: object, root: Mapping[str, object]) -> str:
        """Return a reference to a schema. root: where it refers to. Raises GrammarError: all together are too long."""
        shared = {name: root[name] for name in ("$defs", "definitions", "strict") if name in root}
        name = f"s{len(self.schemas)}"
        text = json.dumps({**shared, **schema} if isinstance(schema, dict) else schema)
        self._size += len(text)  # each schema repeats what is shared, so many of them may be far larger than their request
        if self._size > MAX_BYTES:
            raise GrammarError(f"their schemas have {self._size:,} characters or more: expected at most {MAX_BYTES:,}")
        self.schemas[name] = text
        return f"@{name}"

    def _call(self, written: CallNotation, name: str, schema: Mapping[str, object]) -> str:
        whole = self._schema(schema, schema)  # compiled in each case: a family that writes no JSON refuses the same schemas
        holes = {
            "name": lambda: _quoted(name),
            "id": lambda: "/[a-zA-Z0-9]{9}/",
            "number": lambda: "/[0-9]/",
            "arguments": lambda: self._parameters(written, schema) if written.parameter else whole,
        }
        pieces = HOLE.split(written.call)
        return " ".join(holes[piece]() if at % 2 else self.text(piece) for at, piece in enumerate(pieces) if piece)

    def _parameters(self, written: CallNotation, schema: Mapping[str, object]) -> str:
        """Return the parameters: those that are required, and then those of the others that the model chooses."""
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        names = [name for name in properties if name in needed]
        others = [name for name in properties if name not in needed]
        types, between = parameter_types(schema), self.text(written.separator)

        def parameter(name: str) -> str:
            return self.rule(self._parameter(written, (name, properties[name]), types[name], schema))

        if names or not written.separator:
            first = f" {between} ".join(map(parameter, names))
            return self.rule(" ".join((first, *(f"({between} {parameter(name)})?" for name in others))) or '""')
        # Without one that is required, any of the others may be the first, which has no separator in front of it.
        alone = behind = self.rule('""')
        for name in reversed(others):
            one = parameter(name)
            alone = self.rule(f"{one} {behind} | {alone}")
            behind = self.rule(f"({between} {one})? {behind}")
        return alone

    def _parameter(
        self,
        written: CallNotation,
        parameter: tuple[str, object],
        wanted: ParameterType,
        root: Mapping[str, object],
    ) -> str:
        (key, schema), kind = parameter, next(iter(sorted(wanted.kinds)), "string")
        is_text = not wanted.kinds or "string" in wanted.kinds
        known = {"key": key, "kind": "string" if is_text else kind, "is_text": str(is_text).lower()}
        before, _, after = written.parameter.partition("$value")
        if not is_text or written.quote is None:
            return f"{self.text(before, known)} {self._schema(schema, root)} {self.text(after, known)}"
        before, end = self.text(before + written.quote, known), self._parts(written.quote + after, known)
        if wanted.kinds == TEXT and (choices := _choices(schema)):
            return f"{before} ({' | '.join(map(_quoted, choices))}) {_joined(end)}"
        return f"{before} {self._free(end, schema)}"

    def _free(self, end: Sequence[GrammarPart], schema: object = None) -> str:
        """Return free text up to a tag, and the tag."""
        first, *rest = end
        most = schema.get("maxLength") if isinstance(schema, dict) else None
        if isinstance(most, int) and 0 <= most <= MAX_LENGTH:
            character = first.text.lstrip()[0]
            return f"/[^\\x{ord(character):02x}]{{0,{most}}}/ {_joined(end)}"
        if first.token:
            return f"TEXT? {_joined(end)}"
        return f"{self.rule(f'{ANY} {first.lark}', '[lazy]')} {_joined(rest)}"


MAX_LENGTH = 4096  # characters of a bounded text: more make the grammar too large, so it is free


def _choices(schema: object) -> list[str]:
    """Return the texts that a schema allows, if it lists them."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _joined(parts: Sequence[GrammarPart]) -> str:
    return " ".join(part.lark for part in parts) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
