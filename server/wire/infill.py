"""The body of `POST /infill`."""

from __future__ import annotations

from typing import Self

import msgspec
from msgspec import Struct

from .requests import Json, Options, TextRequest


class OtherFile(Struct, frozen=True):
    """Another text of the same project."""

    text: str
    filename: str = "tmp"


class InfillRequest(Options, frozen=True, kw_only=True):
    """`POST /infill`: the text in front of a gap and behind it. prompt: the start of what fills it.

    Each is a text; the two around the gap may also be token ids, or both mixed. input_extra: other files of the project.
    """

    input_prefix: str | list[Json]
    input_suffix: str | list[Json]
    prompt: str = ""
    input_extra: tuple[OtherFile, ...] = ()

    @classmethod
    def between(cls, prompt: Json, request: TextRequest) -> Self:
        """Return the request to fill the gap between a prompt and the suffix of its completion."""
        suffix, scope = request.suffix or "", request.cache_scope
        return cls(input_prefix=prompt, input_suffix=suffix, max_tokens=request.limit(), cache_scope=scope)

    def without_texts(self) -> Self:
        """Return the options without the texts that they belong to, which may take much memory."""
        return msgspec.structs.replace(self, input_prefix="", input_suffix="", prompt="", input_extra=())
