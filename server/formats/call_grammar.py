"""Writes the grammar of tool calls and reasoning in llguidance's dialect of Lark."""

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
"""The name of each tool, and the JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A control token, or a text without control tokens.

    token: the control token in Lark's notation; empty if the part is a text without control tokens.
    """

    text: str
    token: str = ""

    @property
    def lark(self) -> str:
        return self.token or _quoted(self.text)


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """The tags around a call's parameters.

    opens: the tag before a name.
    key_end: the tag between a name and its value.
    closes: the tag after a value.
    end: the tag after the last parameter.
    after_value: further lines that may follow `closes`. For a reader, `closes` ends a value only if `opens`, `end` or one of
    these lines follows.
    """

    opens: str
    key_end: str
    closes: str
    end: str
    after_value: frozenset[str]

    @classmethod
    def of(cls, written: CallNotation) -> ParameterTags:
        """Return the tags of a notation that has no separator between parameters."""
        before, _, closes = written.parameter.partition("$value")
        opens, _, key_end = before.partition("$key")
        begin, _, after_arguments = written.call.partition("$arguments")
        end, *rest = after_arguments.split("\n")
        around = (begin.partition("$name")[0], *rest, written.begin, written.end, *written.after_call)
        lines = frozenset(line for text in around for line in text.split("\n") if line)
        return cls(opens, key_end, closes, end, lines)


@dataclass(slots=True)
class GrammarWriter:
    """Writes one grammar.

    controls: the text and the id of each control token that the grammar may use.
    """

    controls: Mapping[str, int]
    schemas: dict[str, str] = field(default_factory=dict)  # JSON text by name
    _rules: list[str] = field(default_factory=list)
    _texts: dict[tuple[str, str], str] = field(default_factory=dict)  # rules for texts, by the tags that end the texts
    _size: int = 0  # characters of the schemas

    def calls(self, written: CallNotation, tools: Definitions, parallel: bool) -> str:
        """Add a rule for calls of these tools, and return its name. parallel: whether an answer may have several calls."""
        one = self.rule(" | ".join(self._call(written, name, schema) for name, schema in tools))
        several = f" ({self.text(written.between)} {one})*" if parallel and written.between is not None else ""
        return self.rule(f"{self.text(written.begin)} {one}{several} {self.text(written.end)}")

    def reasoning(self, start: str, end: str) -> str:
        """Add a rule for the tag `start`, reasoning, the tag `end`, and up to two line breaks. Return the rule's name.

        start: the opening tag; empty if the prompt already contains it.
        """
        return self.rule(f'{self.text(start)} {self._free(self._parts(end))} "\\n"? "\\n"?')

    def lark(self, start: str) -> str:
        """Return the grammar. start: the expression in Lark that a whole answer must match."""
        return "\n".join((f"start: {start}", "TEXT: /(.|\\n)+/", *self._rules))

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return the rule's name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, form: str, filled: Mapping[str, str] = NOTHING) -> str:
        """Return an expression in Lark for `form`, a text in a family's notation.

        The expression matches a control token in `form` as a token, and all other text as letters.

        filled: a client's texts for the holes of `form`. The client's texts are matched as letters, even if they contain a
        control token.
        """
        return _joined(self._parts(form, filled))

    def _parts(self, form: str, filled: Mapping[str, str] = NOTHING) -> list[GrammarPart]:
        """Divide `form` into control tokens and the texts between them. filled: see `text`."""
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
        """Add a schema, and return a reference to it. Raises GrammarError if all schemas together are too long.

        root: the tool's whole schema, with the definitions to which `schema` may refer.
        """
        shared = {name: root[name] for name in ("$defs", "definitions", "strict") if name in root}
        name = f"s{len(self.schemas)}"
        text = json.dumps({**shared, **schema} if isinstance(schema, dict) else schema)
        self._size += len(text)  # each schema repeats the shared definitions, so the sum may far exceed the request
        if self._size > MAX_BYTES:
            raise GrammarError(f"their schemas have {self._size:,} characters or more: expected at most {MAX_BYTES:,}")
        self.schemas[name] = text
        return f"@{name}"

    def _call(self, written: CallNotation, name: str, schema: Mapping[str, object]) -> str:
        whole = self._schema(schema, schema)  # in any case, so that families without JSON arguments refuse the same schemas
        holes = {
            "name": lambda: _quoted(name),
            "id": lambda: "/[a-zA-Z0-9]{9}/",
            "number": lambda: "/[0-9]/",
            "arguments": lambda: self._parameters(written, schema) if written.parameter else whole,
        }
        call = written.call
        if written.parameter and not written.separator:
            tags = ParameterTags.of(written)
            holes["arguments"] = lambda: self._tagged(tags, schema)
            call = call.replace(f"$arguments{tags.end}", "$arguments")
        pieces = HOLE.split(call)
        return " ".join(holes[piece]() if at % 2 else self.text(piece) for at, piece in enumerate(pieces) if piece)

    def _tagged(self, tags: ParameterTags, schema: Mapping[str, object]) -> str:
        """Return the rule for parameters between tags, up to and including `tags.end`.

        The required parameters come first, and optional ones may follow. A string ends where a reader would end it: at a
        closing tag that is followed by the next parameter or by `tags.end`.
        """
        properties, names, others = _named(schema)
        types = parameter_types(schema)
        # Each parameter has two rules. The first ends with the tag that opens the next parameter, the second with the call.
        ways = {key: self._between_tags(tags, (key, properties[key]), types[key], schema) for key in (*names, *others)}
        first = self.text(tags.opens)
        needed = " ".join((first, *(ways[key][0] for key in names)))
        ends = [f"{needed} {self._chosen([ways[key] for key in others])[1]}"] if others else []
        if names:
            ends.append(" ".join((first, *(ways[key][0] for key in names[:-1]), ways[names[-1]][1])))
        else:
            ends.append(self.text(tags.end))
        return self.rule(" | ".join(ends))

    def _chosen(self, ways: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Return two rules for optional parameters. Any of the parameters may be missing, but their order is fixed.

        The first rule matches any number of the parameters, even none. After a match of the first rule, a further parameter
        must follow. The second rule matches at least one parameter, and ends with the tag after the last parameter. Each
        rule consists of a rule for the first half of the parameters and one for the second half. Halving the parameters in
        this way keeps the nesting of the rules shallow. If instead each parameter's rule contained the rule of the next
        parameter, each parameter would add a level.
        """
        if len(ways) == 1:
            return self.rule(f"{ways[0][0]}?"), ways[0][1]
        (first, first_end), (second, second_end) = (
            self._chosen(half) for half in (ways[: len(ways) // 2], ways[len(ways) // 2 :])
        )
        return self.rule(f"{first} {second}"), self.rule(f"{first_end} | {first} {second_end}")

    def _between_tags(
        self, tags: ParameterTags, parameter: tuple[str, object], wanted: ParameterType, root: Mapping[str, object]
    ) -> tuple[str, str]:
        """Return two rules for one parameter. Both rules start with the parameter's name.

        The first rule ends with `tags.opens`, which opens another parameter. The second rule ends with `tags.end`.
        """
        (key, schema), kind = parameter, next(iter(sorted(wanted.kinds)), "string")
        is_text = not wanted.kinds or "string" in wanted.kinds
        known = {"key": key, "kind": "string" if is_text else kind, "is_text": str(is_text).lower()}
        name, after = self.text("$key" + tags.key_end, known), self._parts(tags.closes, known)
        choices = _choices(schema) if wanted.kinds == TEXT else []
        if not is_text:
            value = f"{self._schema(schema, root)} {_joined(after)}"
        elif choices:
            value = f"({' | '.join(map(_quoted, choices))}) {_joined(after)}"
        elif _most(schema) is not None or any(part.token for part in self._parts(tags.closes + tags.opens + tags.end)):
            value = self._free(after, schema)
        else:
            closer = "".join(part.text for part in after)
            if not tags.end.startswith(tags.opens):  # otherwise the text does not show which of the two tags it is
                ends = [self._until(tags, closer, tag) for tag in (tags.opens, tags.end)]
                return self.rule(f"{name} {ends[0]}"), self.rule(f"{name} {ends[1]}")
            value = self._until(tags, closer, "")
        value = self.rule(f"{name} {value}")
        return self.rule(f"{value} {self.text(tags.opens)}"), self.rule(f"{value} {self.text(tags.end)}")

    def _until(self, tags: ParameterTags, closer: str, tail: str) -> str:
        """Return the rule for a string and the tag that closes it.

        The rule ends the string where a reader of the answer would end it.

        closer: the closing tag.
        tail: the tag that follows the closing tag; empty if the caller adds this tag itself.
        """
        if (rule := self._texts.get((closer, tail))) is None:
            broken = "|".join(_pattern(tag) for tag in (tags.opens, tags.end) if not closer.startswith(tag))
            after = "|".join(map(_pattern, sorted({tags.opens, tags.end, *tags.after_value})))
            ended = rf"\n({broken})|{_pattern(closer.strip())}[ \t\r\n]*({after})"
            safe = rf"{ANY} & ~/(.|\n)*({ended})(.|\n)*/"
            if tags.key_end.endswith("\n"):
                safe = rf"{safe} & ~/({broken})(.|\n)*/"
            terminal = f"SAFE{len(self._texts)}"
            self._rules.append(f"{terminal}: {safe}")
            rule = self._texts[closer, tail] = self.rule(f"{terminal} {_quoted(closer + tail)}", "[lazy]")
        return rule

    def _parameters(self, written: CallNotation, schema: Mapping[str, object]) -> str:
        """Return the rule for parameters with a separator between them.

        The required parameters come first. Any of the optional parameters may follow, in a fixed order. If no parameter is
        required, any of the optional ones may come first.
        """
        properties, names, others = _named(schema)
        types, between = parameter_types(schema), self.text(written.separator)

        def parameter(name: str) -> str:
            return self.rule(self._parameter(written, (name, properties[name]), types[name], schema))

        if names:
            first = f" {between} ".join(map(parameter, names))
            return self.rule(" ".join((first, *(f"({between} {parameter(name)})?" for name in others))))
        # Without required parameters, any optional one may come first. It has no separator before it.
        alone = after = self.rule('""')
        for name in reversed(others):
            one = parameter(name)
            alone = self.rule(f"{one} {after} | {alone}")
            after = self.rule(f"({between} {one})? {after}")
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
        """Return an expression for any text and the tag `end` after it. A `maxLength` of `schema` limits the text."""
        first, *rest = end
        if (most := _most(schema)) is not None:
            character = first.text.lstrip()[0]
            return f"/[^\\x{ord(character):02x}]{{0,{most}}}/ {_joined(end)}"
        if first.token:
            return f"TEXT? {_joined(end)}"
        return f"{self.rule(f'{ANY} {first.lark}', '[lazy]')} {_joined(rest)}"


MAX_LENGTH = 4096  # characters: a larger `maxLength` is ignored, since it would make the grammar too large


def _named(schema: Mapping[str, object]) -> tuple[dict[str, object], list[str], list[str]]:
    """Return the properties of a schema, the names of its required properties, and the names of its other properties."""
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return properties, [name for name in properties if name in needed], [name for name in properties if name not in needed]


def _most(schema: object) -> int | None:
    """Return a schema's `maxLength`, or None if the schema has no `maxLength` of at most `MAX_LENGTH`."""
    most = schema.get("maxLength") if isinstance(schema, dict) else None
    return most if isinstance(most, int) and 0 <= most <= MAX_LENGTH else None


def _pattern(text: str) -> str:
    """Return a regular expression in Lark that matches exactly this text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _choices(schema: object) -> list[str]:
    """Return the strings that a schema lists in `const` or `enum`."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _joined(parts: Sequence[GrammarPart]) -> str:
    return " ".join(part.lark for part in parts) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
