"""Jinja as chat templates use it, in a sandbox: a template comes with a model file, from whoever made that."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 24
"""What a template may write, and the longest string or list it may make by multiplication."""

MAX_BITS = 1 << 12
"""The largest whole number it may make by multiplication."""


class TemplateError(ValueError):
    """The template refuses these messages, or is itself at fault; says which, for whoever sent the messages."""


class Template:
    """A compiled template. Raises TemplateError with the line where the source is not Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno} of the chat template: {error.message}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text it makes of these. Raises TemplateError, whatever goes wrong."""
        written, parts = 0, []
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                written += len(part)
                if written > MAX_CHARACTERS:
                    raise TemplateError(f"the chat template writes more than {MAX_CHARACTERS} characters")
        except TemplateError:
            raise
        except Exception as error:  # a template can fail in every way that Python can
            raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """No attribute that leads out of the template, no change to what it is given, no number or string without end."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _is_too_large(operator, left, right):
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _is_too_large(operator: str, left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return bits > MAX_BITS
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sequence) and isinstance(times, int):
            return len(value) * times > MAX_CHARACTERS
    return False


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is only what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """With the helpers that templates are written for: those of Hugging Face's `apply_chat_template`."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the models saw it in training: Jinja's own filter would escape `<` and `&` for HTML, and sort the keys."""
    value = list(value) if isinstance(value, Iterator) else value  # what `map` and `select` give
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
