"""The variables that a request and the settings give to the chat template."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..errors import RequestError
from ..flags.setting import SettingsError
from ..settings import Settings
from ..wire.requests import ChatRequest

OWN_FIELDS = ("messages", "tools", "add_generation_prompt")
"""Variables that are fields of a request."""

SWITCHES = ("enable_thinking", "preserve_reasoning")


def settings_variables(settings: Settings) -> dict[str, object]:
    """Return the variables of every request, which a request may change. Raises SettingsError."""
    variables: dict[str, object] = {"preserve_reasoning": settings.reasoning_preserve}
    if settings.reasoning != "auto":
        variables["enable_thinking"] = settings.reasoning == "on"
    if settings.reasoning_effort not in ("", "default"):
        variables["reasoning_effort"] = settings.reasoning_effort
    try:
        given = msgspec.json.decode(settings.chat_template_kwargs or "{}", type=dict[str, object])
    except msgspec.DecodeError as error:
        raise SettingsError(f"--chat-template-kwargs: expected an object of JSON: {error}") from None
    for name in OWN_FIELDS:
        if name in given:
            raise SettingsError(f"--chat-template-kwargs: {name} comes from each request")
    return variables | given


def request_variables(request: ChatRequest, defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the variables of a request. Raises RequestError."""
    given, where = request.chat_template_kwargs, "chat_template_kwargs"
    for name in OWN_FIELDS:
        if name in given:
            raise RequestError(f"{where}.{name}: {name} is a field of the request itself", param=f"{where}.{name}")
    for name in SWITCHES:
        if not isinstance(given.get(name), bool | None):
            raise RequestError(f"{where}.{name}: expected true or false", param=f"{where}.{name}")
    given = {name: value for name, value in given.items() if value is not None or name not in SWITCHES}
    variables = {**defaults, **given}
    effort = request.effort
    if effort == "none":
        variables.pop("reasoning_effort", None)
        variables["enable_thinking"] = False
    elif effort:
        variables["reasoning_effort"] = effort
    return variables
