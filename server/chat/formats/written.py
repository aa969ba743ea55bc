"""The forms in which families write their calls, as texts with holes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """How calls are written.

    call: one call, with $name and $arguments, and maybe $id (nine letters or digits) or $number. begin, end: around all
    calls; between: between two of them; None: an answer has one call at most. parameter: one of the arguments, with $key and
    $value, if they are not one JSON object; $kind is its JSON type, and $is_text whether that is a string. separator: stands
    between two parameters. quote: around a value that is a text; None: a text stands in it as in JSON.
    """

    call: str
    between: str | None = None
    begin: str = ""
    end: str = ""
    parameter: str = ""
    separator: str = ""
    quote: str | None = ""
