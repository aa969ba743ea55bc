"""The shapes in which models write tool calls, as readers: a tag opens them, and each call has a name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Protocol

from ..answer import CallArguments, CallStart
from .text import Steps, Text

MAX_NAME = 256  # characters of a tool's name, an id, a parameter's name
Types = Mapping[str, frozenset[str]]
"""The JSON types of each parameter of a tool."""


def plain_id(digest: str) -> str:
    return f"call_{digest[:24]}"


def short_id(digest: str) -> str:
    """Return an id as Mistral's templates demand it: nine letters or digits."""
    return digest[:9]


class Calls:
    """The calls of one answer so far. tools: those that may be called, with their parameters.

    new_id: makes an id of a hexadecimal digest. seed: of the ids; every reading of an answer finds the same ones.
    """

    def __init__(self, tools: Mapping[str, Types], new_id: Callable[[str], str], seed: str) -> None:
        self.tools = tools
        self.number = 0
        self._new_id, self._seed = new_id, seed

    def start(self, name: str, id: str = "") -> CallStart:
        id = id or self._new_id(sha256(f"{self._seed} {self.number}".encode()).hexdigest())
        self.number += 1
        return CallStart(self.number - 1, id, name)

    def arguments(self, text: str) -> CallArguments:
        """Return more of the arguments of the newest call."""
        return CallArguments(self.number - 1, text)


class Shape(Protocol):
    """How a family of models writes calls. opens: the tags, one of which opens calls. bare: they may have no tag."""

    @property
    def opens(self) -> tuple[str, ...]: ...
    @property
    def tags(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> bool: ...

    def read(self, text: Text, tag: str, calls: Calls) -> Steps[None]:
        """Read calls behind their opening tag. What is no call is left unread, or kept behind the text's mark."""
        ...
