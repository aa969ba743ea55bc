"""Jinja for chat templates, in a sandbox, because a template comes with a model file and cannot be trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from jinja2 import TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 24
"""The longest text that a template may write, and the longest string or list that it may create by multiplication."""

MAX_BITS = 1 << 12
"""The bits of the largest integer that a template may compute by multiplication."""


MAX_STEPS = 300_000
"""The most iterations of loops and calls of macros in one rendering; they take about a second."""

BETWEEN = 256
"""The steps of a rendering between two calls of `between`; they take about a millisecond."""

_STEP, _LIST = "_slotcache_step", "_slotcache_list"


class TemplateError(ValueError):
    """The template refuses these messages, or the template itself is wrong. The error's message says what is wrong."""


class Template:
    """A compiled template.

    names: the variables, fields and keys that the template reads.

    Raises TemplateError, with the line of the error, if the source is not Jinja.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.names = frozenset(_names(tree)) - {_STEP, _LIST}
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno} of the chat template: {error.message}") from None
        except Exception as error:  # too deep for Python, a number too long for Python, ...
            raise TemplateError(f"the chat template cannot be compiled: {error or type(error).__name__}") from None

    def render(self, variables: Mapping[str, object], between: Callable[[], None] | None = None) -> str:
        """Return the rendered text. Raises TemplateError for any failure.

        between: called every few milliseconds.
        """
        written, parts = 0, []
        try:
            for part in self._template.generate({**variables, _STEP: _Steps(between), _LIST: _OwnList}):
                parts.append(part)
                written += len(part)
                if written > MAX_CHARACTERS:
                    raise TemplateError(f"the chat template writes more than {MAX_CHARACTERS} characters")
        except TemplateError:
            raise
        except Exception as error:  # a template can fail in every way in which Python can
            raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """Keeps templates from reaching Python's internals, changing their variables, and creating huge numbers or strings."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template.

        Add a counter of steps to the template's loops and macros, and turn the template's list literals into `_OwnList`s.
        """
        template = super()._parse(source, name, filename)
        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            node.body.insert(0, nodes.ExprStmt(_call(_STEP, [], node.lineno), lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(_call(_STEP, [], node.lineno), node.test, lineno=node.lineno)
        return _OwnLists().visit(template)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Allow `append` and `pop` on lists that the template itself created. A template cannot change a client's values."""
        if isinstance(obj, _OwnList) and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if _is_too_large(operator, left, right):
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Steps:
    """Counts the steps of one rendering."""

    def __init__(self, between: Callable[[], None] | None) -> None:
        self._count, self._between = 0, between

    def __call__(self) -> bool:
        self._count += 1
        if self._between is not None and self._count % BETWEEN == 0:
            self._between()
        if self._count > MAX_STEPS:
            raise TemplateError(f"the chat template takes more than {MAX_STEPS} steps")
        return True


class _Nothing(Undefined):
    """An undefined value.

    A string plus an undefined value is the unchanged string: templates rely on this for optional fields of tools.
    """

    def _added(self, other: object) -> object:
        return other if isinstance(other, str | Undefined) else self._fail_with_undefined_error()

    __add__ = __radd__ = _added


class _OwnList(list[object]):
    """A list that the template itself created."""

    def __add__(self, other: object) -> _OwnList:
        return _OwnList(super().__add__(other)) if isinstance(other, list) else NotImplemented


class _OwnLists(NodeTransformer):
    """Turns each list literal of a template into an `_OwnList`."""

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _call(_LIST, [node], node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
    """Return a call of one of our functions."""
    fields = (nodes.Name(name, "load", lineno=line), arguments, [], None, None)
    return nodes.Call(*fields, lineno=line)


def _is_too_large(operator: str, left: object, right: object) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return bits > MAX_BITS
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sequence) and isinstance(times, int):
            return len(value) * times > MAX_CHARACTERS
    return False


def _names(tree: nodes.Template) -> Iterator[str]:
    """Yield the names of variables and fields, and all string constants, since some of them are keys."""
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        match node:
            case nodes.Name(name=str(name)) | nodes.Getattr(attr=str(name)) | nodes.Const(value=str(name)):
                yield name


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training.

    This server ignores the two tags, and renders the content between them.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the helpers of Hugging Face's `apply_chat_template`, which templates rely on."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=_Nothing)
    environment.filters["tojson"] = _to_json
    environment.filters["safe"] = str  # nothing is escaped; Jinja's own filter would cause texts added later to be escaped
    environment.globals["raise_exception"] = _raise
    return environment


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in a model's training data. Jinja's own filter would escape `<` and `&` for HTML, and sort keys."""
    value = list(value) if isinstance(value, Iterator) else value  # the result of `map` or `select`
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
