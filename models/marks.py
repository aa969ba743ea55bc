"""Finds a client's texts in a rendered conversation, by rendering it a second time with placeholders for these texts."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from .jinja import TemplateError
from .tokenizer import Spellings

# Models write their reasoning between these tags, and templates drop the reasoning of earlier turns.
REASONING_STARTS = ("<think>", "<seed:think>", "[THINK]", "<|START_THINKING|>")
_REASONING_ENDS = ("</think>", "</seed:think>", "[/THINK]", "<|END_THINKING|>")
REASONING_TAG = re.compile(r"(</?(?:seed:)?think>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>)")

MAX_VALUES = 100_000
"""The most values in a request's fields besides its contents. Each rendering visits every value, also of stored messages."""

DIGITS = 6  # digits of a placeholder's number
T = TypeVar("T")
Part = Literal["content", "reasoning"]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of the rendered conversation.

    Special tokens work only in the template's own text, where `message` is None and `is_plain` is false. In a client's
    texts, special tokens are plain text, so no user and no document can forge them.

    message: the index of the message that the piece comes from; None if it comes from no message.
    is_plain: the piece is a client's text other than content and reasoning (a name, a call, a tool, a variable of the
    template), and contains or may complete a special token.
    part: the part of the message that the piece comes from.
    """

    text: str
    message: int | None
    is_plain: bool = False
    part: Part = "content"


@dataclass(frozen=True, slots=True)
class _Mark:
    """A text that a placeholder stands for.

    message: the index of the text's message; None if the text is neither a content nor reasoning.
    """

    text: str
    message: int | None
    part: Part

    def piece(self, shown: str) -> TextPiece:
        return TextPiece(shown, self.message, self.message is None, self.part)


class Unmarked:
    """Sets no placeholders: every text stays as it is."""

    def content(self, text: str, message: int, is_answer: bool) -> str:
        return text

    def reasoning(self, text: str, message: int) -> str:
        return text

    def values(self, value: T) -> T:
        return value


class Marks(Unmarked):
    """Sets placeholders for the texts of one rendering.

    controls: the spellings of the tokens that only a template may write.
    keeps_tags: placeholders replace only the texts between the reasoning tags of an answer. The reasoning tags stay in the
    text, because some templates look for them.
    """

    def __init__(self, controls: Spellings, keeps_tags: bool = False) -> None:
        self._controls, self._keeps_tags = controls, keeps_tags
        # No author of a message can guess the prefix. No template changes it: digits have no case and need no quotes.
        self._prefix = str(10**19 + secrets.randbelow(10**19))
        self._marked: list[_Mark] = []
        self._num_values = 0

    # ---- before the rendering --------------------------------------------------------------------------------------

    def content(self, text: str, message: int, is_answer: bool) -> str:
        if not (self._keeps_tags and is_answer):
            return self._mark(text, message)
        texts_and_tags = enumerate(REASONING_TAG.split(text))
        return "".join(part if index % 2 else self._mark(part, message) for index, part in texts_and_tags)

    def reasoning(self, text: str, message: int) -> str:
        return self._mark(text, message, "reasoning")

    def values(self, value: T) -> T:
        """Return `value` with placeholders in place of strings that contain or may complete a special token.

        All other strings stay, because templates may compare them. Raises TemplateError.
        """
        try:
            return cast(T, self._marked_strings(value))
        except RecursionError:
            raise TemplateError("the request is nested too deeply for a chat template") from None

    def _mark(self, text: str, message: int | None, part: Part = "content") -> str:
        """Return a placeholder for a text. Blank texts stay as they are, since templates test for empty texts."""
        if not text.strip():
            return text
        self._marked.append(_Mark(text, message, part))
        return f"{self._prefix}{len(self._marked) - 1:0{DIGITS}}"

    def _marked_strings(self, value: object) -> object:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise TemplateError(f"the request has more than {MAX_VALUES:,} values beside its contents")
        if isinstance(value, str):
            return self._mark(value, None) if self._controls.touches(value) else value
        if isinstance(value, Mapping):
            return {self._marked_strings(name): self._marked_strings(inner) for name, inner in value.items()}
        return [self._marked_strings(inner) for inner in value] if isinstance(value, list | tuple) else value

    # ---- after the rendering ---------------------------------------------------------------------------------------

    def cut(self, rendered: str, real: str) -> list[TextPiece] | None:
        """Cut `real` into the client's texts and the template's texts between them.

        The template may show a client's text in a changed form. Try the forms that `_forms` yields, and take the first form
        that is followed by the template's next text. Return None if a text appears in none of its forms.

        rendered: the template's output with placeholders.
        real: the template's output with the texts themselves.
        """
        first, parts = self._split(rendered)
        if not real.startswith(first):
            return None
        pieces, at = [TextPiece(first, None)], len(first)
        for mark, after in parts:
            form = next((form for form in _forms(mark.text) if real.startswith(form + after, at)), None)
            if form is None:
                return None
            at += len(form) + len(after)
            pieces += [mark.piece(form), TextPiece(after, None)]
        return _without_empty(pieces) if at == len(real) else None

    def fill(self, rendered: str) -> list[TextPiece]:
        """Return the pieces of a rendering, with the unchanged text in place of each placeholder."""
        first, parts = self._split(rendered)
        pieces = [TextPiece(first, None)]
        for mark, after in parts:
            pieces += [mark.piece(mark.text), TextPiece(after, None)]
        return _without_empty(pieces)

    def _split(self, rendered: str) -> tuple[str, list[tuple[_Mark, str]]]:
        """Return the text before the first placeholder, and for each placeholder its mark and the text after it."""
        first, *rest = rendered.split(self._prefix)
        parts: list[tuple[_Mark, str]] = []
        for text in rest:
            if (number := text[:DIGITS]).isdecimal() and len(number) == DIGITS:
                parts.append((self._marked[int(number)], text[DIGITS:]))
            elif parts:  # a template has shortened the placeholder
                parts[-1] = (parts[-1][0], parts[-1][1] + self._prefix + text)
            else:
                first += self._prefix + text
        return first, parts


def _without_empty(pieces: list[TextPiece]) -> list[TextPiece]:
    return [piece for piece in pieces if piece.text]


def _forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates show a text. The first form is the unchanged text."""
    yield from _trims(text)
    for tag in _REASONING_ENDS:
        if tag in text:
            yield from _trims(text.rpartition(tag)[2])
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _trims(text: str) -> Iterator[str]:
    yield text
    for characters in (None, "\n"):
        yield text.strip(characters)
        yield text.lstrip(characters)
        yield text.rstrip(characters)
