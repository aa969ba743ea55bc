"""Makes random JSON Schemas whose answers are bounded: no text, list or object is open."""

from random import Random
from typing import Any

PATTERNS = [
    "^[a-z]{2,6}$",
    "^[0-9]{3}-[0-9]{2}$",
    "^(foo|bar|ba[sz])[0-9]?$",
    r"^\w{1,4}@\w{1,4}\.(com|org)$",
    "^[^x]{0,5}$",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6"]
LITERALS = ["red", "dark green", 'quo"ted', "ümlaut", "", 0, -7, 2.5, True, None, ["a", 1], {"k": "v"}]
NAMES = ["name", "age", "id", "tags", "the value", "ключ", "kind", "x-y", 'q"', "a/b~c"]

Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """Return a schema of up to four levels, with some parts in `$defs`."""
    random = Random(seed)
    shared = {f"part{number}": _schema(random, 1, []) for number in range(random.randrange(3))}
    schema = _object(random, 3, [f"#/$defs/{name}" for name in shared])
    return schema | ({"$defs": shared} if shared else {})


def _schema(random: Random, depth: int, references: list[str]) -> Schema:
    kinds = [_text, _text, _integer, _number, _literal, _plain, _union]
    if references:
        kinds += [lambda random, *_: {"$ref": random.choice(references)}] * 2
    if depth > 0:
        kinds += [_object, _object, _array, _tuple, _any_of, _one_of, _nullable, _all_of]
    return random.choice(kinds)(random, depth, references)


def _text(random: Random, *_: object) -> Schema:
    match random.randrange(4):
        case 0:
            return {"type": "string", "pattern": random.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": random.choice(FORMATS)}
    least = random.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + random.randrange(16)}


def _integer(random: Random, *_: object) -> Schema:
    low = random.randrange(-200, 200)
    return random.choice([
        {"type": "integer"},
        {"type": "integer", "minimum": low},
        {"type": "integer", "exclusiveMinimum": low, "maximum": low + random.randrange(1, 10**6)},
        {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": random.choice([2, 5, 10])},
    ])  # fmt: skip


def _number(random: Random, *_: object) -> Schema:
    low = random.randrange(-50, 50) / 4
    return random.choice([{"type": "number"}, {"type": "number", "minimum": low, "maximum": low + 10}])


def _literal(random: Random, *_: object) -> Schema:
    if random.random() < 0.3:
        return {"const": random.choice(LITERALS)}
    return {"enum": random.sample(LITERALS, random.randrange(1, 6))}


def _plain(random: Random, *_: object) -> Schema:
    return {"type": random.choice(["boolean", "null"])}


def _union(random: Random, *_: object) -> Schema:
    return {"type": random.sample(["string", "integer", "boolean", "null"], 2), "maxLength": random.randrange(1, 9)}


def _object(random: Random, depth: int, references: list[str]) -> Schema:
    names = random.sample(NAMES, random.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(random, depth - 1, references) for name in names},
        "required": random.sample(names, random.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _array(random: Random, depth: int, references: list[str]) -> Schema:
    least = random.randrange(3)
    items = _schema(random, depth - 1, references)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + random.randrange(4)}


def _tuple(random: Random, depth: int, references: list[str]) -> Schema:
    first = [_schema(random, depth - 1, references) for _ in range(random.randrange(1, 4))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": random.randrange(len(first) + 1)}


def _any_of(random: Random, depth: int, references: list[str]) -> Schema:
    return {"anyOf": [_schema(random, depth - 1, references) for _ in range(random.randrange(2, 4))]}


def _one_of(random: Random, depth: int, references: list[str]) -> Schema:
    """Return alternatives of which a value fits only one."""
    parts = [_integer, _text, _array, _plain]
    one = [part(random, depth, references) for part in random.sample(parts, 2)]
    return {"oneOf": one}


def _nullable(random: Random, depth: int, references: list[str]) -> Schema:
    return {"anyOf": [_schema(random, depth - 1, references), {"type": "null"}]}


def _all_of(random: Random, depth: int, references: list[str]) -> Schema:
    return {"allOf": [_object(random, depth, references)], "title": "one part"}
