"""Scopes: only requests of one scope share KV.

Clients name a shared scope (`cache_scope`). A private scope belongs to one request, and none of its KV is kept. KV that was
computed with LoRA adapters is in a separate scope, even if the scope's name is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_NAME = 256  # characters: a scope's name is a name, not a document
MAX_TEXT = MAX_NAME + 4096  # characters of a scope as text
SEPARATOR = "\0"  # no client's name has it
OF_PROCESS = "@"  # precedes the part of an adapter set's text that only this process knows


@dataclass(frozen=True, slots=True)
class Scope:
    """The key of one tree of prompts.

    adapters: the LoRA adapters that compute its KV, as text; empty: none.
    """

    kind: Literal["shared", "private"]
    name: str
    adapters: str = ""

    @classmethod
    def shared(cls, name: str, adapters: str = "") -> Scope:
        """Return the shared scope with a name, and with the LoRA adapters that compute its KV."""
        return cls("shared", name, adapters)

    @classmethod
    def private(cls, request: int, adapters: str = "") -> Scope:
        """Return the private scope of the request with this id."""
        return cls("private", str(request), adapters)

    @classmethod
    def read(cls, text: str) -> Scope:
        """Return the shared scope with this `text`."""
        name, _, adapters = text.partition(SEPARATOR)
        return cls.shared(name, adapters)

    @property
    def text(self) -> str:
        """The scope as text, as files contain it. Only the text of a shared scope may be used."""
        return f"{self.name}{SEPARATOR}{self.adapters}" if self.adapters else self.name

    @property
    def is_lasting(self) -> bool:
        """Whether the scope's KV stays valid when its adapters are loaded again, in this process or a later one."""
        return OF_PROCESS not in self.adapters

    @property
    def is_shared(self) -> bool:
        """Whether KV of this scope may outlive its request."""
        return self.kind == "shared"

    @property
    def may_outlive(self) -> bool:
        """Whether a later process could use the scope's KV."""
        return self.is_shared and self.is_lasting


def name_in(text: str) -> str:
    """Return the name of a scope, from the scope's `text`."""
    return text.partition(SEPARATOR)[0]
