"""Returns the arguments of a tool call in a history as an object, even if the model or the client wrote something else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+(?P<end>"?)|[{}\[\]]')
_CUT_ESCAPE = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_CUT_WORD = re.compile(r'[^\s,:\[\]{}"]+\Z')
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # halves of characters: a lone one is allowed in JSON, but not in a text
_JSON = json.JSONDecoder(strict=False)
_CLOSERS = {"{": "}", "[": "]"}


def decode_json(text: str) -> Any:
    """Decode JSON, in which strings may contain line breaks. A lone half of a surrogate pair becomes U+FFFD.

    Raises ValueError and RecursionError.
    """
    value = _JSON.decode(text)
    if "\\u" not in text or _HALVES.search(text) is None:
        return value
    return _JSON.decode(json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def argument_object(arguments: object) -> dict[str, object]:
    """Return the arguments of a call as an object.

    An empty value means no arguments. JSON that was cut off is completed, so that its content stays visible. Arguments that
    are no JSON object become the single argument `arguments`.
    """
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        if not arguments and not isinstance(arguments, int | float):
            return {}
        return {"arguments": json.dumps(arguments, ensure_ascii=False)}
    try:
        value = decode_json(arguments)
    except (ValueError, RecursionError):
        value = _completed(arguments) if arguments.strip() else {}
        return {"arguments": arguments} if value is None else value
    if isinstance(value, dict):
        return value
    return {} if value is None or value in ("", []) else {"arguments": arguments}


def argument_text(arguments: object) -> str:
    """Return the arguments of a call as the JSON text of an object.

    A text that already is the JSON of an object is returned unchanged.
    """
    if isinstance(arguments, str):
        try:
            if isinstance(json.loads(arguments), dict):
                return arguments
        except (ValueError, RecursionError):
            pass
    return json.dumps(argument_object(arguments), ensure_ascii=False)


def _completed(text: str) -> dict[str, object] | None:
    """Close the string and the brackets of JSON text that was cut off.

    Return the completed object; None if `text` is no object that was cut off.
    """
    closers = list[str]()
    for token in _TOKEN.finditer(text):
        if token["end"] is None:
            if token[0] in _CLOSERS:
                closers.append(_CLOSERS[token[0]])
            elif not closers or closers.pop() != token[0]:
                return None
        elif not token["end"]:  # the text ends inside a string, maybe inside an escape
            text = text[: token.end()] + '"' if _CUT_ESCAPE.fullmatch(text, token.end()) else text
            break
    if not closers:
        return None
    text, end = text.rstrip(), "".join(reversed(closers))
    for start in (text, _CUT_WORD.sub("null", text), f"{text}null", f"{text}: null", text.removesuffix(",")):
        try:
            value = decode_json(start + end)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None
