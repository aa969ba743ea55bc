"""Finds tags and JSON values in text that arrives in pieces, and converts the values of tools' parameters to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isinf
from typing import TypeVar

from ...models.json_schema import IMPLIED, OPEN
from .answer import Fragment

T = TypeVar("T")
Steps = Generator[Fragment | None, None, T]
"""A reader that yields fragments, and None whenever it needs more text. It never yields None after the end of the text."""

SPACE = " \t\r\n"
MAX_SPACE = 64  # the most characters of white space between two tags


class Tags:
    """Tags to find in a text. If two tags begin at the same position of the text, the longer tag is found."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.tags = tuple(sorted(filter(None, set(tags)), key=len, reverse=True))
        self._longest = len(self.tags[0]) if self.tags else 0
        self._prefixes = frozenset(tag[:length] for tag in self.tags for length in range(1, len(tag)))
        # `(?!)` matches nowhere.
        self._any = re.compile("|".join(map(re.escape, self.tags)) or "(?!)")
        self._first = re.compile("|".join(re.escape(first) for first in {tag[0] for tag in self.tags}) or "(?!)")

    def __contains__(self, tag: str) -> bool:
        return tag in self.tags

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Return the position of the first tag from `at` on, and the tag.

        If no whole tag is found, the returned tag is empty, and the position is the start of an incomplete tag at the end of
        the text. If there is no incomplete tag either, the position is the end of the text.

        ended: whether no more text will come.
        """
        prefix_at = len(text) if ended else self._prefix_at(text, at)
        found = self._any.search(text, at)
        return (found.start(), found[0]) if found and found.start() < prefix_at else (prefix_at, "")

    def _prefix_at(self, text: str, at: int) -> int:
        """Return the position of an incomplete tag at the end of the text.

        If the text has no incomplete tag at its end, return the text's length.
        """
        for found in self._first.finditer(text, max(at, len(text) - self._longest + 1)):
            if text[found.start() :] in self._prefixes:
                return found.start()
        return len(text)


class UnreadText:
    """The part of an answer's text that is not read yet. Text that was read is dropped, unless it was read since `mark`.

    ended: whether no more text will come.
    is_cut: whether the answer ended at a limit.
    num_read: characters read so far.
    content: the start and end positions of content in the read text.
    waits_at: the position in the read text after which it is still unknown what is content; None if nothing is unknown.
    """

    __slots__ = ("_at", "_marked_at", "_read", "_unread", "content", "ended", "is_cut", "num_read", "waits_at")

    def __init__(self) -> None:
        self.ended = self.is_cut = False
        self._unread, self._at = "", 0
        self._read: list[str] | None = None
        self._marked_at = self.num_read = 0
        self.content: list[tuple[int, int]] = []
        self.waits_at: int | None = None

    def add(self, text: str) -> None:
        self._unread, self._at = self._unread[self._at :] + text, 0

    # ---- take text that has arrived ----------------------------------------------------------------------------------

    @property
    def rest(self) -> str:
        """The unread text that has arrived."""
        return self._unread[self._at :]

    def take(self, length: int) -> str:
        """Read and return `length` characters, or fewer if fewer have arrived."""
        taken = self._unread[self._at : self._at + length]
        self._at += len(taken)
        self.num_read += len(taken)
        if self._read is not None and taken:
            self._read.append(taken)
        return taken

    def back(self, length: int) -> None:
        """Make the last `length` characters unread again. These characters must have been read since the last `add`."""
        self._at -= length
        self.num_read -= length

    @property
    def num_settled(self) -> int:
        """The number of read characters that are settled.

        A character is settled once it is known whether it is content. While text is marked (see `mark`), no character after
        the start of the marked text is settled.
        """
        settled = self.num_read if self._read is None else self._marked_at
        return settled if self.waits_at is None else min(settled, self.waits_at)

    def before(self, tags: Tags) -> tuple[str, str]:
        """Read the text before the next tag, then read the tag, and return both.

        If there is no whole tag, the returned tag is empty, and an incomplete tag at the end of the text stays unread. At
        the end of an answer that was not cut, an incomplete tag counts as text.
        """
        place, tag = tags.find(self._unread, self._at, self.ended and not self.is_cut)
        text = self.take(place - self._at)
        self.take(len(tag))
        return text, tag

    def mark(self, text: str) -> None:
        """Keep `text`, which was read just before this call, and all text that is read from now on."""
        self._read, self._marked_at = [text], self.num_read - len(text)

    def unmark(self) -> str:
        """Remove the mark. Return the text that was kept since `mark`."""
        read, self._read = "".join(self._read or ()), None
        return read

    # ---- wait for text -----------------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. At the end of the answer, return an empty text."""
        while self._at == len(self._unread):
            if self.ended:
                return ""
            yield None
        return self._unread[self._at]

    def skip(self, characters: str = SPACE) -> Steps[str]:
        """Read all following characters that are in `characters`.

        Return the next character without reading it. At the end of the answer, return an empty text.
        """
        while (character := (yield from self.peek())) and character in characters:
            end = self._at + 1
            while end < len(self._unread) and self._unread[end] in characters:
                end += 1
            self.take(end - self._at)
        return character

    def one_of(self, *tags: str) -> Steps[str]:
        """Read and return the tag that comes next, the longest if several fit.

        If none of `tags` comes next, return an empty text.

        If the answer was cut within a tag, the incomplete tag is dropped.
        """
        longest = max(map(len, tags), default=0)
        while True:
            rest = self._unread[self._at : self._at + longest]
            is_partial = any(len(tag) > len(rest) and tag.startswith(rest) for tag in tags)
            if self.ended or not is_partial:
                break
            yield None
        found = max((len(tag) for tag in tags if tag and rest.startswith(tag)), default=0)
        if is_partial and not found and self.is_cut:
            self._unread = self._unread[: self._at]
        return self.take(found)

    def after_space(self, tags: Collection[str], stays: Collection[str] = ()) -> Steps[str | None]:
        """Read white space and the tag after it, and return the tag.

        If the answer ends before a tag, return an empty text. If anything else comes next, return None and read nothing.

        stays: further tags, which are returned but stay unread if they follow the white space.
        """
        known = (*tags, *stays)
        window = MAX_SPACE + max(map(len, known))
        while True:
            rest = self._unread[self._at : self._at + window]
            bare = rest.lstrip(SPACE)
            space, is_partial = len(rest) - len(bare), any(tag.startswith(bare) and tag != bare for tag in known)
            if space > MAX_SPACE:
                return None
            if self.ended or not is_partial:
                break
            yield None
        tag = max((tag for tag in known if bare.startswith(tag)), key=len, default="")
        if not tag and not (self.ended and (not bare or (is_partial and self.is_cut))):
            return None
        self.take(space + (0 if tag in stays else len(tag)))
        return tag

    def upto(self, tags: Tags, most: int, stays: Collection[str] = ()) -> Steps[tuple[str, str]]:
        """Read the text before the next tag, then read the tag, and return both.

        If no tag begins within `most` characters, read only `most` characters, or fewer if the answer ends before that, and
        return an empty tag.

        stays: the tags among `tags` that are returned but stay unread.
        """
        parts: list[str] = []
        while True:
            place, tag = tags.find(self._unread, self._at, self.ended)
            is_near = place - self._at <= most
            part = self.take(min(place - self._at, most))
            parts.append(part)
            most -= len(part)
            if tag or self.ended or not is_near:
                tag = tag if is_near else ""
                return "".join(parts), tag if tag in stays else self.take(len(tag))
            yield None


# ---- Values in a model's text. JSON is passed on unchanged, and other notations are converted to JSON. ------------------

TEXT = frozenset({"string"})
MAX_SCHEMAS = 64  # schemas that are read for the type of one parameter
_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class JsonSpan:
    """Finds the end of a JSON value that arrives in pieces.

    The search only counts brackets and quotes, and checks nothing else.
    """

    __slots__ = ("_depth", "_escaped", "_quoted", "_started", "ended")

    _IN_TEXT = re.compile(r'["\\]')
    _NESTED = re.compile(r'["{}\[\]]')
    _OUTSIDE = re.compile(r'["{}\[\],\s]')

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._quoted = self._escaped = self._started = False

    def feed(self, text: str) -> int:
        """Read a piece of text. Return how many of the piece's characters belong to the JSON value."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            signs = self._IN_TEXT if self._quoted else self._NESTED if self._depth else self._OUTSIDE
            found = signs.search(text, at)
            if not found:
                self._started = True
                return len(text)
            self._started = self._started or found.start() > at
            at = self._step(found[0], found.start())
            if self.ended:
                return at
        return at

    def _step(self, character: str, at: int) -> int:
        """Read the quote, backslash, bracket, comma or space at position `at`.

        Return the position after this character, or `at` if the value ended before this character.
        """
        if self._quoted:
            self._escaped, self._quoted = character == "\\", character == "\\"
            self.ended = not self._quoted and not self._depth
        elif character == '"':
            self._quoted = self._started = True
        elif character in "{[":
            self._depth += 1
            self._started = True
        elif self._depth:
            self._depth -= character in "}]"
            self.ended = not self._depth
        elif self._started or character not in SPACE:
            self.ended = True
            return at
        return at + 1


def json_value(text: UnreadText) -> Steps[str]:
    """Read a JSON value, and return its text. The text may be malformed."""
    span, parts = JsonSpan(), []
    while True:
        parts.append(text.take(span.feed(text.rest)))
        if span.ended or text.ended:
            return "".join(parts).strip()
        yield None


def escape(text: str) -> str:
    """Escape a text for use inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True)
class ParameterType:
    """The values that a schema allows for a parameter.

    kinds: the allowed JSON types. An empty set allows all types.
    texts: the allowed strings, in one or more sets; None if all strings are allowed.
    """

    kinds: frozenset[str] = frozenset()
    texts: tuple[frozenset[str], ...] | None = None

    @property
    def is_free_text(self) -> bool:
        """Whether the value must be a string, and any string is allowed."""
        return self.kinds == TEXT and self.texts is None

    def lists(self, text: str) -> bool:
        """Whether the schema lists this string."""
        return self.texts is not None and any(text in listed for listed in self.texts)


ANY = ParameterType()
FREE_TEXT = ParameterType(TEXT)
WORD = ParameterType(frozenset({"string", "integer", "number", "boolean", "null"}))


def typed(text: str, wanted: ParameterType = ANY) -> str:
    """Convert to JSON a value that was written without quotes. A value that fits no wanted type becomes a string."""
    bare = text.strip()
    inside = bare[1:-1] if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'" else None
    said = _unquoted(bare) if inside is not None and bare[0] == '"' else None
    for choice in (text, bare, said, inside):
        if choice is not None and wanted.lists(choice):
            return quoted(choice)
    if not wanted.kinds:
        bare = _WORDS.get(bare, bare)
        return bare if is_json(bare) and not bare.startswith('"') else quoted(text)
    kinds, takes_text = wanted.kinds - TEXT, "string" in wanted.kinds
    value = _of_kind(bare, kinds)
    if value is None and said is not None and not takes_text:
        value = _of_kind(said.strip(), kinds)
    if value is not None:
        return value
    return quoted(said if said is not None and takes_text and kinds else text)


def literal(word: str, wanted: ParameterType) -> str:
    """Convert a word without quotes to JSON. The word comes from a notation in which strings have quotes.

    The words null and None become null. Any other word that fits a wanted type becomes a value of this type. A word that
    fits no wanted type becomes a number, a boolean or a string.
    """
    if not wanted.kinds or word in ("None", "null"):
        return typed(word, WORD)
    value = typed(word, wanted)
    return value if not value.startswith('"') or "string" in wanted.kinds else typed(word, WORD)


def is_json(text: str, kinds: Collection[str] = ()) -> bool:
    """Return whether a text is a JSON value. kinds: the allowed types; empty if all types are allowed."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return False
    kind = _type(value)
    return not kinds or kind in kinds or (kind == "integer" and "number" in kinds)


def quoted(text: str) -> str:
    return f'"{escape(text)}"'


_WORDS = {"True": "true", "False": "false", "None": "null"}
_NAMES = {"boolean": {"true": "true", "false": "false"}, "null": {"null": "null", "none": "null"}}
_NUMBER = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?(?P<power>[eE][+-]?[0-9]{1,3})?")
LONGEST_NUMBER = 400  # the most characters of a number that is rewritten for JSON


def _of_kind(bare: str, kinds: frozenset[str]) -> str | None:
    """Convert a value to JSON if the value has one of the types in `kinds`. Otherwise return None.

    The value may differ from JSON's notation, as `TRUE`, `.5` and `(1, 2)` do.
    """
    if not kinds:
        return None
    if is_json(bare, kinds):
        return bare
    for kind in kinds & _NAMES.keys():
        if word := _NAMES[kind].get(bare.lower()):
            return word
    if ("number" in kinds or "integer" in kinds) and (number := _number(bare, "number" in kinds)):
        return number
    written = _from_python(bare) if bare[:1] in ("[", "(", "{") else None
    return written if written is not None and is_json(written, kinds) else None


def _number(bare: str, may_be_broken: bool) -> str | None:
    """Return a number in JSON's notation, such as 0.5 for .5. Return None if the text is not a number.

    may_be_broken: whether the number may have a fraction. If a fraction is not allowed, 5.0 becomes 5, and 5.5 gives None.
    """
    found = _NUMBER.fullmatch(bare) if len(bare) <= LONGEST_NUMBER else None
    if found is None or not (found["whole"] or found["part"]) or isinf(float(bare)):
        return None
    if not may_be_broken:
        number = Decimal(bare)
        return str(int(number)) if number == number.to_integral_value() else None
    whole, part = found["whole"].lstrip("0") or "0", f".{found['part']}" if found["part"] else ""
    return f"{'-' * (found['sign'] == '-')}{whole}{part}{found['power'] or ''}"


_LITERAL = re.compile(
    r"""\s+|(?P<sign>[\[\](){}:,])|(?P<word>[^\s\[\](){}:,'"]+)"""
    r"""|'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)\"""",
    re.DOTALL,
)
_SIGNS = {"(": "[", ")": "]", ",": ", ", ":": ": "}
_IN_QUOTES = re.compile(r"(?P<code>\\u[0-9a-fA-F]{4})|\\x(?P<byte>[0-9a-fA-F]{2})|\\(?P<escaped>.)|[^\\]+", re.DOTALL)
ESCAPES = {"b": "\b", "f": "\f", "/": "/", "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
"""The meaning of each escape, by the character after the backslash."""


def _from_python(text: str) -> str | None:
    """Convert a list or an object from Python's notation to JSON.

    Return None if a string in the text has no closing quote.
    """
    parts: list[str] = []
    at = 0
    while at < len(text):
        if (found := _LITERAL.match(text, at)) is None:
            return None
        at, kind = found.end(), found.lastgroup
        if kind is None:
            continue
        part = found[kind]
        if kind == "sign":
            if part in ")]}" and parts and parts[-1] == ", ":
                parts.pop()
            parts.append(_SIGNS.get(part, part))
        elif kind == "word":
            parts.append(_WORDS.get(part) or _number(part, True) or part)
        else:
            parts.append(f'"{_IN_QUOTES.sub(_in_json, part)}"')
    return "".join(parts)


def _in_json(found: re.Match[str]) -> str:
    """Convert a piece of a quoted Python string to the notation of a JSON string."""
    text = chr(int(found["byte"], 16)) if found["byte"] else ESCAPES.get(found["escaped"], found[0])
    return found["code"] or escape(text)


def _unquoted(text: str) -> str | None:
    """Return the text of a JSON string.

    Return None if `text` is not a JSON string, or if it contains half of a surrogate pair.
    """
    try:
        value = json.loads(text, strict=False)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    if isinf(value := float(number)):
        raise ValueError(f"{number} is too large for a number")
    return value


def parameter_types(schema: object) -> dict[str, ParameterType]:
    """Return the type of each parameter of a tool. A parameter whose schema gives no type gets `ANY`.

    schema: the tool's schema.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    schemas = _Schemas(schema)
    return {name: schemas.type(value) for name, value in properties.items()} if isinstance(properties, dict) else {}


class _Schemas:
    """Finds the types of one tool's parameters. A reference that several parameters share is resolved only once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._meanings: dict[str, object] = {}  # by reference
        self._listed: dict[int, ParameterType] = {}  # the type of each list of values, by the id() of the list

    def type(self, schema: object) -> ParameterType:
        """Return the type that a schema allows. Return `ANY` if the schema has too many parts, or if a part has no type."""
        kinds: set[str] = set()
        texts: list[frozenset[str]] = []
        is_free = False  # whether strings outside `texts` are allowed
        asked = [schema]
        for _ in range(MAX_SCHEMAS):
            if not asked:
                return ParameterType(frozenset(kinds), None if is_free or not texts else tuple(texts))
            schema = asked.pop()
            if not isinstance(schema, dict):
                return ANY
            if (inner := self._inner(schema)) is not None:
                asked += inner
                continue
            listed, named = self._values(schema), self._kinds(schema)
            if listed is None and not named:
                return ANY
            found = named or (listed.kinds if listed else frozenset())
            kinds |= found
            if listed is not None:
                texts += listed.texts or ()
            is_free |= listed is None and "string" in found
            if schema.get("nullable") is True:
                kinds.add("null")
        return ANY

    def _inner(self, schema: Mapping[str, object]) -> list[object] | None:
        """Return the inner schemas that give the type. Return None if `schema` itself gives the type.

        If `schema` has a `$ref`, return the schema to which `$ref` points. If `schema` has neither `$ref` nor `type`, return
        the schemas of `anyOf` or `oneOf`, or the only schema of `allOf`.
        """
        if isinstance(reference := schema.get("$ref"), str):
            return [self._meant(reference)]
        if "type" in schema:
            return None
        choices = schema.get("anyOf") or schema.get("oneOf")
        if not isinstance(choices, list) and isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
            choices = parts
        return choices[:MAX_SCHEMAS] if isinstance(choices, list) else None

    def _kinds(self, schema: Mapping[str, object]) -> frozenset[str]:
        """Return the types that a schema gives or that its keywords imply."""
        if "type" in schema:
            kinds = schema["type"]
            listed = kinds[:MAX_SCHEMAS] if isinstance(kinds, list) else [kinds]
            return frozenset(kind for kind in listed if isinstance(kind, str))
        implied = next((IMPLIED[key] for key in schema if key in IMPLIED), None) if schema.keys().isdisjoint(OPEN) else None
        return frozenset(filter(None, [implied]))

    def _values(self, schema: Mapping[str, object]) -> ParameterType | None:
        """Return the type of the values that a schema lists, or None if the schema lists no values."""
        if "const" in schema:
            return _type_of([schema["const"]])
        values = schema.get("enum")
        if not isinstance(values, list):
            return None
        if id(values) not in self._listed:
            self._listed[id(values)] = _type_of(values)
        return self._listed[id(values)]

    def _meant(self, reference: str) -> object:
        """Return the schema to which a reference such as `#/$defs/Place` points, or None if there is no such schema."""
        if reference not in self._meanings:
            meant = self._root
            for name in reference.removeprefix("#/").split("/"):
                meant = meant.get(name) if isinstance(meant, dict) else None
            self._meanings[reference] = meant
        return self._meanings[reference]


def _type_of(values: Sequence[object]) -> ParameterType:
    """Return the type that allows these values.

    The type's `kinds` are the JSON types of the values, and its `texts` has the strings among the values.
    """
    return ParameterType(frozenset(map(_type, values)), (frozenset(text for text in values if isinstance(text, str)),))


def _type(value: object) -> str:
    return "null" if value is None else _TYPES.get(type(value), "object")
