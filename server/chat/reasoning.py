"""The fields of a request about reasoning.

The fields come from several APIs, and each field has the same meaning on every route.

If two fields contradict each other, the request gets a 400 that names both. One contradiction is allowed, because programs
send it: one field turns reasoning off, and another field sets an amount of reasoning. In this case, the field that sets
the amount has no effect, and a warning names this field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from msgspec import Meta, Struct

from ..config.settings import ReasoningFormat
from ..http.api_errors import RequestError

Effort = Annotated[str, Meta(max_length=32)]
Count = Annotated[int, Meta(ge=0)]
T = TypeVar("T")
OFF = "none"  # as an effort: no reasoning; as a format: reasoning stays in the content
SWITCH = "enable_thinking"  # the variable of chat templates


class ReasoningField(Struct, frozen=True):
    """The field `reasoning` of OpenAI and OpenRouter.

    max_tokens: the most tokens of reasoning. exclude: whether the answer omits the reasoning.
    """

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Count | None = None


class ThinkingField(Struct, frozen=True):
    """Anthropic's field `thinking`, which other APIs also accept.

    display: `omitted` hides the text of the reasoning.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class ReasoningFields(Protocol):
    """The fields of a chat about reasoning."""

    @property
    def reasoning_format(self) -> ReasoningFormat | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def reasoning_budget_tokens(self) -> int | None: ...
    @property
    def thinking_budget_tokens(self) -> int | None: ...
    @property
    def reasoning(self) -> ReasoningField | None: ...
    @property
    def thinking(self) -> ThinkingField | None: ...
    @property
    def think(self) -> bool | str | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def include_reasoning(self) -> bool | None: ...
    @property
    def separate_reasoning(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True)
class AskedReasoning:
    """The reasoning that a request asks for.

    If a value is None, the request does not set it, and the settings and the chat template decide.

    is_on: whether the model reasons.
    effort: how much the model reasons, for templates that support this.
    most: the most tokens of reasoning.
    is_shown: whether the answer shows the reasoning.
    format: the place of the reasoning in the answer.
    wish: the name of the field that asks for reasoning; empty: no field does.
    unused: a warning for each field without effect.
    """

    is_on: bool | None = None
    effort: str | None = None
    most: int | None = None
    is_shown: bool | None = None
    format: ReasoningFormat | None = None
    wish: str = ""
    unused: tuple[str, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether the request asks for reasoning, sets its effort, limit or format, or hides it."""
        return bool(self.is_on or self.effort or self.most is not None or self.is_shown is False or self.format)


def read_reasoning(fields: ReasoningFields) -> AskedReasoning:
    """Return the reasoning that a request asks for. Raises RequestError if two fields contradict each other."""
    given, thinking, think = fields.reasoning or ReasoningField(), fields.thinking, fields.think
    effort = _agreed(
        ("reasoning_effort", fields.reasoning_effort or None),
        ("reasoning.effort", given.effort or None),
        ("think", think if isinstance(think, str) and think else None),
    )
    variable = fields.chat_template_kwargs.get(SWITCH)
    switch = _agreed(
        ("think", think if isinstance(think, bool) else think != OFF if think else None),
        ("enable_thinking", fields.enable_thinking),
        ("reasoning.enabled", given.enabled),
        ("thinking.type", thinking and thinking.type != "disabled"),
        (effort[0], False) if effort and effort[1] == OFF else ("", None),
        (f"chat_template_kwargs.{SWITCH}", variable if isinstance(variable, bool) else None),
    )
    most = _agreed(
        ("reasoning_budget_tokens", _least(fields.reasoning_budget_tokens)),
        ("thinking_budget_tokens", _least(fields.thinking_budget_tokens)),
        ("reasoning.max_tokens", given.max_tokens),
        ("thinking.budget_tokens", thinking and thinking.budget_tokens),
    )
    shown = _agreed(
        ("reasoning.exclude", None if given.exclude is None else not given.exclude),
        ("include_reasoning", fields.include_reasoning),
        ("thinking.display", thinking and thinking.display and thinking.display != "omitted"),
    )
    separated = _agreed(
        ("reasoning_format", fields.reasoning_format and fields.reasoning_format != OFF),
        ("separate_reasoning", fields.separate_reasoning),
    )
    if shown and separated and not (shown[1] or separated[1]):
        raise _contradiction(separated[0], shown[0])
    unused: list[str] = []
    if switch and not switch[1]:
        wishes = [said for said in (effort, most) if said and said[1] not in (OFF, 0)]
        unused = [f"{name} has no effect: {switch[0]} switches reasoning off" for name, _ in wishes]
        effort = most = None
    asked_on = switch if switch and switch[1] else effort
    return AskedReasoning(
        is_on=switch[1] if switch and not switch[0].startswith("chat_template_kwargs") else None,
        effort=effort and effort[1],
        most=most and most[1],
        is_shown=shown and shown[1],
        format=fields.reasoning_format or (None if separated is None else "auto" if separated[1] else OFF),
        wish=asked_on[0] if asked_on else "",
        unused=tuple(unused),
    )


def _agreed(*said: tuple[str, T | None]) -> tuple[str, T] | None:
    """Return the first field that has a value, with this value. Raises RequestError if two values differ."""
    first: tuple[str, T] | None = None
    for name, value in said:
        if value is None:
            continue
        if first is not None and first[1] != value:
            raise _contradiction(first[0], name)
        first = first or (name, value)
    return first


def _contradiction(one: str, other: str) -> RequestError:
    return RequestError(f"{one} and {other} contradict each other: send one of them", param=other)


def _least(budget: int | None) -> int | None:
    """Return a field's limit of reasoning, in tokens; None: the field is unset, or negative, which means no limit."""
    return None if budget is None or budget < 0 else budget


def warnings_of(asked: AskedReasoning, *, knows_reasoning: bool) -> Iterable[str]:
    """Yield a warning if a request asks for reasoning but the chat template has no reasoning.

    `thinking.type` leads to no warning: in Anthropic's API, it permits reasoning without demanding it.
    """
    if asked.wish and asked.wish != "thinking.type" and not knows_reasoning:
        yield f"{asked.wish} has no effect: the chat template knows no reasoning"
