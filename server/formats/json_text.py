"""Tool calls as JSON text in pieces, and the values of parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable
from typing import TypeVar

from .answer import Fragment

T = TypeVar("T")
Steps = Generator[Fragment | None, None, T]
"""Reading in steps: each yields a fragment, or None where more text is needed. It yields no None once the text has ended."""

SPACE = " \t\r\n"


class Tags:
    """Strings that mark places in a text. Where two of them begin at one place, the longer one counts."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.tags = tuple(sorted(filter(None, set(tags)), key=len, reverse=True))
        self._longest = len(self.tags[0]) if self.tags else 0
        self._begun = frozenset(tag[:length] for tag in self.tags for length in range(1, len(tag)))
        # `(?!)` fits nowhere.
        self._any = re.compile("|".join(map(re.escape, self.tags)) or "(?!)")
        self._first = re.compile("|".join(re.escape(first) for first in {tag[0] for tag in self.tags}) or "(?!)")

    def __contains__(self, tag: str) -> bool:
        return tag in self.tags

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Return the place of the first tag behind `at`, and the tag.

        The tag is empty where none is whole: then the place is the earliest at which one may have begun.
        """
        begun = len(text) if ended else self._begun_at(text, at)
        found = self._any.search(text, at)
        return (found.start(), found[0]) if found and found.start() < begun else (begun, "")

    def _begun_at(self, text: str, at: int) -> int:
        """Return where the longest end of the text begins that more text may make a tag."""
        for found in self._first.finditer(text, max(at, len(text) - self._longest + 1)):
            if text[found.start() :] in self._begun:
                return found.start()
        return len(text)


class UnreadText:
    """The unread text of an answer. Text that was read is dropped, but for what was read since a `mark`.

    ended: no more will come. is_cut: since the answer reached its limit.
    """

    __slots__ = ("_at", "_read", "_unread", "ended", "is_cut")

    def __init__(self) -> None:
        self.ended = self.is_cut = False
        self._unread, self._at = "", 0
        self._read: list[str] | None = None

    def add(self, text: str) -> None:
        self._unread, self._at = self._unread[self._at :] + text, 0

    # ---- take what is here -------------------------------------------------------------------------------------------

    @property
    def rest(self) -> str:
        """The unread text that is here."""
        return self._unread[self._at :]

    def take(self, length: int) -> str:
        """Read as many characters."""
        taken = self._unread[self._at : self._at + length]
        self._at += length
        if self._read is not None and taken:
            self._read.append(taken)
        return taken

    def before(self, tags: Tags) -> tuple[str, str]:
        """Read up to the next tag and the tag itself; without one, up to where it may begin. Returns both.

        What may be the beginning of a tag is text at the end of an answer, unless that is cut.
        """
        place, tag = tags.find(self._unread, self._at, self.ended and not self.is_cut)
        text = self.take(place - self._at)
        self.take(len(tag))
        return text, tag

    def mark(self, text: str) -> None:
        """Begin to keep what is read. text: what was read just before."""
        self._read = [text]

    def unmark(self) -> str:
        """Return what was read since the mark."""
        read, self._read = "".join(self._read or ()), None
        return read

    # ---- wait for what comes -----------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Return the next character, unread; empty at the end."""
        while self._at == len(self._unread):
            if self.ended:
                return ""
            yield None
        return self._unread[self._at]

    def skip(self, characters: str = SPACE) -> Steps[str]:
        """Read all next characters of this kind; return the one behind them, unread; empty at the end."""
        while (character := (yield from self.peek())) and character in characters:
            self.take(len(self.rest) - len(self.rest.lstrip(characters)))
        return character

    def one_of(self, *tags: str) -> Steps[str]:
        """Read one of these tags, if one comes next, the longest one; return it, or an empty text."""
        while True:
            rest = self.rest
            longer = not self.ended and any(len(tag) > len(rest) and tag.startswith(rest) for tag in tags)
            if not longer:
                return self.take(max((len(tag) for tag in tags if tag and rest.startswith(tag)), default=0))
            yield None

    def upto(self, tags: Tags, most: int) -> Steps[tuple[str, str]]:
        """Read up to the next tag, and the tag; return both. The tag is empty if none begins within `most` characters.

        Then `most` characters are read, or as many as are left.
        """
        parts: list[str] = []
        while True:
            place, tag = tags.find(self._unread, self._at, self.ended)
            is_near = place - self._at <= most
            part = self.take(min(place - self._at, most))
            parts.append(part)
            most -= len(part)
            if tag or self.ended or not is_near:
                return "".join(parts), self.take(len(tag)) if is_near else ""
            yield None


# ---- Values in a model's text: JSON passed on as it stands, and other notations written as JSON. ------------------------

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


def json_value(text: UnreadText) -> Steps[str]:
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
