"""What an answer must be, as a client or the server says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "gbnf", "lark"]
MAX_BYTES = 256 << 10  # of a source: a compiled grammar takes some hundred times as much


class GrammarError(ValueError):
    """A grammar that cannot be used, or that no answer fits. The message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as text. kind: its language.

    schemas: JSON Schemas as JSON text by name; a Lark grammar refers to one as `@name`. may_name_tokens: it is the
    server's own and may name control tokens; a client's may not.
    """

    kind: Kind
    text: str
    schemas: tuple[tuple[str, str], ...] = ()
    may_name_tokens: bool = False

    @property
    def size(self) -> int:
        """Characters of all its texts."""
        return len(self.text) + sum(len(name) + len(schema) for name, schema in self.schemas)
