"""The forms in which families write their calls, as texts with holes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HOLE = re.compile(r"\$([a-z_]+)")


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

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls, each a name and arguments as JSON text, as the family writes them."""
        return self.begin + (self.between or "\n").join(self._one(*call) for call in calls) + self.end

    def _one(self, name: str, arguments: str) -> str:
        shown = self._parameters(arguments) if self.parameter else arguments
        holes = {"name": name, "arguments": shown, "id": "000000000", "number": "0"}
        return HOLE.sub(lambda hole: holes[hole[1]], self.call)

    def _parameters(self, arguments: str) -> str:
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(values, Mapping):
            return arguments
        return self.separator.join(self._parameter(key, value) for key, value in values.items())

    def _parameter(self, key: str, value: object) -> str:
        is_text = isinstance(value, str)
        in_json = json.dumps(value, ensure_ascii=False)
        shown = f"{self.quote}{value}{self.quote}" if is_text and self.quote is not None else in_json
        holes = {"key": key, "value": shown, "kind": "string" if is_text else "object", "is_text": str(is_text).lower()}
        return HOLE.sub(lambda hole: holes[hole[1]], self.parameter)


CALL = Written('<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>', between="\n")
"""The form that more models were trained on than on any other."""
