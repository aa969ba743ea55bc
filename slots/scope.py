"""Scopes: only requests of one scope share KV.

A shared scope is named by clients (`cache_scope`). A private scope belongs to one request: nothing of it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_NAME = 256  # characters: a scope's name is a name, not a document


@dataclass(frozen=True, slots=True)
class Scope:
    """The key of one tree of prompts."""

    kind: Literal["shared", "private"]
    name: str

    @classmethod
    def shared(cls, name: str) -> Scope:
        """The scope that clients name."""
        return cls("shared", name)

    @classmethod
    def private(cls, request: int) -> Scope:
        """The scope of one request, by its id."""
        return cls("private", str(request))

    @property
    def is_shared(self) -> bool:
        """Whether KV of this scope may outlive its request."""
        return self.kind == "shared"
