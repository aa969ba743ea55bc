"""Decodes bodies with their types checked. A wrong type is a 400 that names the field."""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.inspect import Field, FloatType, StructType, Type, UnionType, type_info

from ..edge.bodies import check_elements
from ..errors import RequestError
from .fields import has_nested, unread
from .sampling import Json

LARGE = 64 << 10  # bytes of a body that takes long to decode: not in the event loop
COLLECTOR = Lock()  # held while the garbage collector is off: two decoders must not turn it on for each other
MAX_COLONS = 1 << 17  # in a body whose fields are looked at one by one: this many take 0.1 s
UNCHECKED = "the body is too large to look for unknown fields in it"
LOOSE = re.compile("got `(null|float)`")  # values that llama-server takes where msgspec does not
R = TypeVar("R", bound=Struct)
T = TypeVar("T")
A = TypeVar("A", bound=Type)


def decode_request(body: bytes, kind: type[R], strict: bool = False) -> tuple[R, tuple[str, ...]]:
    """Decode a client's body; return it, and a warning for each field that is not known. strict: as in `unread`.

    Raises RequestError.
    """
    check_elements(body)
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Most bodies are as they should be, and need no second look.
        decoded: R = _decode(body, _exact(kind))  # type: ignore[assignment]
        if not has_nested(decoded):
            return decoded, ()
    decoded = decode(body, kind)
    if body.count(b":") > MAX_COLONS:
        return decoded, (UNCHECKED,)
    return decoded, unread(_decode(body, dict[str, Raw]), kind, strict)


@cache
def _exact(kind: type[Struct]) -> type[Struct]:
    """Return a kind of body that has no other fields than this one."""
    return msgspec.defstruct(kind.__name__, (), bases=(kind,), forbid_unknown_fields=True)


def decode(body: bytes, kind: type[R]) -> R:
    """Decode a body. Raises RequestError that names the wrong field and the expected type."""
    check_elements(body)
    try:
        try:
            return _decode(body, kind)
        except msgspec.ValidationError as error:
            if LOOSE.search(str(error)) is None:
                raise
            return msgspec.convert(tightened(_decode(body, dict[str, Json]), kind), kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`").lstrip(".") or _field_named(message)
        raise RequestError(f"{where or 'the body'}: {message}", param=where or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="malformed_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply: expected fewer levels", code="malformed_json") from None


def _decode(body: bytes, kind: type[T]) -> T:
    """Decode with the garbage collector off: it would scan all objects each time that their number grows by a quarter."""
    with COLLECTOR:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return msgspec.json.decode(body, type=kind)
        finally:
            if enabled:
                gc.enable()


def tightened(values: dict[str, Json], kind: type) -> dict[str, Json]:
    """Return the fields of a body as msgspec takes them, where llama-server takes more.

    null is a field that is not set, and 4.0 is the integer 4. So it is in the body itself and in its objects of known
    fields; lists are left as they are.
    """
    for name, field in _fields_of(kind).items():
        value = values.get(name)
        if value is None and not field.required:
            values.pop(name, None)
        elif isinstance(value, float) and value.is_integer() and not _takes(field.type, FloatType):
            values[name] = int(value)
        elif isinstance(value, dict) and (inner := _takes(field.type, StructType)):
            values[name] = tightened(value, inner.cls)
    return values


@cache
def _fields_of(kind: type) -> dict[str, Field]:
    about = type_info(kind)
    assert isinstance(about, StructType)
    return {field.encode_name: field for field in about.fields}


def _takes(about: Type, wanted: type[A]) -> A | None:
    """Return the type among those of a field that is of the wanted kind, if any."""
    if isinstance(about, UnionType):
        return next((each for each in about.types if isinstance(each, wanted)), None)
    return about if isinstance(about, wanted) else None


def _field_named(message: str) -> str:
    found = re.search(r"field `(\w+)`", message)
    return found[1] if found else ""
