"""The variables that chat templates read beside the messages, under all the names that they have there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

Variables = Mapping[str, object]
Tools = Sequence[Mapping[str, object]]

_PRESERVE = {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False, "drop_thinking": False}
"""Whether earlier reasoning stays in the prompt: its names in templates, and the values that keep it."""


def make_variables(given: Variables, tools: Tools | None, *, thinks: bool, takes_functions: bool) -> dict[str, object]:
    """Return the variables of one prompt: ours, then the given ones, each under all of its names.

    thinks: `enable_thinking` where it is not given. takes_functions: the template reads `functions` and no `tools`.
    """
    now = datetime.now()
    variables: dict[str, object] = {
        "strftime_now": now.strftime,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "enable_thinking": thinks,
        "preserve_reasoning": True,
    }
    if tools:
        variables["tools"] = tools
    if takes_functions:
        functions = [tool.get("function") for tool in tools or ()]
        variables["functions"] = json.dumps(functions, ensure_ascii=False, indent=4) if functions else ""
    variables |= given
    if isinstance(keeps := variables["preserve_reasoning"], bool):
        variables = {name: value if keeps else not value for name, value in _PRESERVE.items()} | variables
    if "reasoning_effort" in variables:
        variables.setdefault("reasoning_strength", variables["reasoning_effort"])
    return variables
