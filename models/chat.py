"""A model's chat template, rendered in pieces that keep their origin: the template, or one of the messages."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar, cast

from .spellings import Spellings
from .template import Template, TemplateError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for models that bring no template."""

# Models write their reasoning between such tags, and templates drop it from earlier turns.
_REASONING_ENDS = ("</think>", "</seed:think>", "[/THINK]", "<|END_THINKING|>")
_REASONING_TAG = re.compile(r"(</?(?:seed:)?think>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>)")

MAX_VALUES = 100_000
"""Values in a request's fields beside its contents: each rendering visits all of them, also those of stored messages."""

T = TypeVar("T")
Message = Mapping[str, object]
"""A message of OpenAI's API: role, content (a string, a list of text parts or nothing), tool_calls, ..."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the rendered conversation.

    With `message` None it is the template's own text, in which special tokens work. Else it is content of
    `messages[message]`, in which they are only text, so that no user and no document can forge them. They are only text,
    too, in a piece that `is_plain`: other text of a client (names, calls, tools, arguments of the template) that contains
    or may complete a special token.
    """

    text: str
    message: int | None
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Differences in the messages that templates expect."""

    parts: bool = False
    """Contents are lists of parts, even if they are only text."""
    text_arguments: bool = False
    """A tool call's arguments are JSON text (as in the API), not the decoded object (as in training)."""
    nones: bool = True
    """`tools` and `documents` are defined, as None, if the request has none."""

    def adapt(self, message: Message, content: str) -> dict[str, object]:
        shown: dict[str, object] = {**message, "content": content}
        if content and self.parts:
            shown["content"] = [{"type": "text", "text": content}]
        calls = message.get("tool_calls")
        if isinstance(calls, list) and not self.text_arguments:
            shown["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return shown


class ChatTemplate:
    """A Jinja chat template as models carry it (`tokenizer.chat_template`), with the helpers that templates rely on.

    `bos` and `eos` are the texts of those tokens, `controls` the spellings of the tokens that only a template may write.
    Raises TemplateError with the line at which the source is not Jinja.
    """

    def __init__(self, source: str, bos: str, eos: str, controls: Spellings | None = None) -> None:
        self.source = source
        self._template = Template(source)
        self._controls = controls or Spellings(())
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._dialect = self._learn_arguments(self._learn_contents())

    def knows(self, name: str) -> bool:
        """Whether the template reads a variable, or a field of a message, of this name: `tools`, `enable_thinking`, ..."""
        return name in self._template.names

    def pieces(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: object,
    ) -> list[Piece]:
        """Render the conversation; the joined pieces are the template's output. `extra` goes to the template.

        Each content, and each other string of a client that touches a special token, is rendered as a placeholder. The
        placeholder is then replaced by the form in which the template shows the real content: as it is, trimmed, without
        its reasoning, or quoted for JSON. If the template changes it in another way, the content stands as it is. Raises
        TemplateError.
        """
        contents = [_text_of(message.get("content"), f"messages[{i}].content") for i, message in enumerate(messages)]
        # One clock for every rendering of this request.
        settings = {**extra, "add_generation_prompt": add_generation_prompt, "strftime_now": datetime.now().strftime}
        if tools:
            settings["tools"] = tools
        real = self._render(settings, messages, contents)
        whole = _Marks(contents, self._controls)
        marked = self._render(settings, messages, whole.contents, marks=whole)
        pieces = whole.cut(marked, real)
        if pieces is None and any(map(_REASONING_TAG.search, contents)):
            # The template looks for the tags, so this rendering keeps them.
            answers = [message.get("role") == "assistant" for message in messages]
            tagged = _Marks(contents, self._controls, answers)
            pieces = tagged.cut(self._render(settings, messages, tagged.contents, marks=tagged), real)
        return whole.fill(marked) if pieces is None else pieces

    def _render(
        self,
        settings: Mapping[str, object],
        messages: Sequence[Message],
        contents: Sequence[str],
        dialect: _Dialect | None = None,
        marks: _Marks | None = None,
    ) -> str:
        dialect = dialect or self._dialect
        shown = [dialect.adapt(*pair) for pair in zip(messages, contents, strict=True)]
        if marks:
            settings = {name: marks.mark(value) for name, value in settings.items()}
            shown = [{**marks.mark(message | {"content": None}), "content": message["content"]} for message in shown]
        variables: dict[str, object] = {"tools": None, "documents": None} if dialect.nones else {}
        return self._template.render(variables | {**self._tokens, **settings, "messages": shown})

    def _learn_contents(self) -> _Dialect:
        """Find the first dialect in which the template shows a user's content."""
        dialects = [_Dialect(parts=parts, nones=nones) for parts in (False, True) for nones in (True, False)]
        shows = (dialect for dialect in dialects if "needle" in self._try({"role": "user"}, "needle", dialect))
        return next(shows, _Dialect())

    def _learn_arguments(self, dialect: _Dialect) -> _Dialect:
        """Choose text for a tool call's arguments if the template renders only text well."""

        def render_call(arguments: object) -> str:
            call = {"id": "trial0000", "type": "function", "function": {"name": "trial", "arguments": arguments}}
            return self._try({"role": "assistant", "tool_calls": [call]}, "", replace(dialect, text_arguments=True))

        as_object = render_call({"needle": 1})
        # No model was trained on a dict as Python prints it.
        fits = "needle" in as_object and "{'needle'" not in as_object
        return replace(dialect, text_arguments=not fits and "needle" in render_call('{"needle": 1}'))

    def _try(self, message: Message, content: str, dialect: _Dialect) -> str:
        settings = {"add_generation_prompt": False, "strftime_now": datetime.now().strftime}
        try:
            return self._render(settings, [message], [content], dialect)
        except TemplateError:
            return ""


class _Marks:
    """Placeholders for contents and other strings of a client, and their replacement in a rendered text."""

    def __init__(self, contents: Sequence[str], controls: Spellings, tagged: Sequence[bool] | None = None) -> None:
        """`tagged`: whether, in each message, reasoning tags stay and only the text between them is marked."""
        self._controls = controls
        # The writer of a message cannot guess it, and no template changes it: digits have no case and need no quotes.
        self._prefix = str(10**19 + secrets.randbelow(10**19))
        self._marked: list[tuple[int | None, str]] = []
        self._num_values = 0
        self.contents = [
            self._mark_between_tags(message, content) if tagged and tagged[message] else self._mark(message, content)
            for message, content in enumerate(contents)
        ]

    def mark(self, value: T) -> T:
        """Put placeholders for the strings in `value` that touch special tokens.

        All other strings stay, because templates may compare them. Raises TemplateError.
        """
        try:
            return cast(T, self._marked_strings(value))
        except RecursionError:
            raise TemplateError("the request is nested too deeply for a chat template") from None

    def _marked_strings(self, value: object) -> object:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise TemplateError(f"the request has more than {MAX_VALUES:,} values beside its contents")
        if isinstance(value, str):
            return self._mark(None, value) if self._controls.touches(value) else value
        if isinstance(value, Mapping):
            return {self._marked_strings(name): self._marked_strings(inner) for name, inner in value.items()}
        return [self._marked_strings(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _mark(self, message: int | None, text: str) -> str:
        # Templates test for empty content: empty must stay empty.
        if not text.strip():
            return text
        self._marked.append((message, text))
        return f"{self._prefix}{len(self._marked) - 1:06}"

    def _mark_between_tags(self, message: int, content: str) -> str:
        texts_and_tags = enumerate(_REASONING_TAG.split(content))
        return "".join(part if index % 2 else self._mark(message, part) for index, part in texts_and_tags)

    def _split(self, rendered: str) -> tuple[str, list[tuple[int | None, str, str]]]:
        """Return the text up to the first placeholder; then for each its message, its text, and the text behind it."""
        first, *rest = re.split(f"{self._prefix}([0-9]{{6}})", rendered)
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return first, [(*self._marked[int(number)], after) for number, after in pairs]

    def cut(self, rendered: str, real: str) -> list[Piece] | None:
        """Cut `real` at the contents, each in the first form that fits the text around it; None: no form fits."""
        first, parts = self._split(rendered)
        if not real.startswith(first):
            return None
        pieces, at = [Piece(first, None)], len(first)
        for message, content, after in parts:
            form = next((form for form in _forms(content) if real.startswith(form + after, at)), None)
            if form is None:
                return None
            at += len(form) + len(after)
            pieces += [Piece(form, message, message is None), Piece(after, None)]
        return _without_empty(pieces) if at == len(real) else None

    def fill(self, rendered: str) -> list[Piece]:
        """Return the rendering with every content as it is."""
        first, parts = self._split(rendered)
        pieces = [Piece(first, None)]
        for message, content, after in parts:
            pieces += [Piece(content, message, message is None), Piece(after, None)]
        return _without_empty(pieces)


def _without_empty(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.text]


def _forms(content: str) -> Iterator[str]:
    """Yield the forms that templates give a content, the least change first."""
    yield from _trims(content)
    for tag in _REASONING_ENDS:
        if tag in content:
            yield from _trims(content.rpartition(tag)[2])
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield json.dumps(content)[1:-1]


def _trims(text: str) -> Iterator[str]:
    yield text
    for characters in (None, "\n"):
        yield text.strip(characters)
        yield text.lstrip(characters)
        yield text.rstrip(characters)


def _text_of(content: object, where: str) -> str:
    """Return a content as text: of a string, of nothing, or of OpenAI's list of parts, with a line for each part."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TemplateError(f"{where} must be a string or a list of parts")
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = f", not of type {part['type']!r}" if isinstance(part, Mapping) and part.get("type", "text") != "text" else ""
    raise TemplateError(f'{where} must be {{"type": "text", "text": "..."}}{kind}')


def _with_parsed_arguments(call: object) -> object:
    """Decode the JSON text of a tool call's arguments. Unchanged if it is no object."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
