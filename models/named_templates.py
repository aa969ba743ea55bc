"""Chat templates by name, for models with a missing or wrong template."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for models without a template."""

_ROLES = ("system", "user", "assistant", "tool")
_MESSAGES = """\
{%- set system = namespace(text='') -%}
{%- for message in messages -%}
    {%- set turn = turns[message.role] or turns.user -%}
    {%- set content = message.content | trim if message.role in trims else message.content -%}
    {%- if inside and message.role == 'system' -%}
        {%- set system.text = system.text + inside[0] + content + inside[1] -%}
    {%- else -%}
        {{- turn[0] -}}
        {%- if message.role == 'user' -%}
            {{- system.text -}}
            {%- set system.text = '' -%}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
            {{- '\\n</tool_call>' -}}
        {%- endfor -%}
        {{- turn[1] -}}
    {%- endif -%}
{%- endfor -%}
"""


def names() -> list[str]:
    """Return the names of all templates."""
    return list(_rows())


def named_template(name: str) -> str | None:
    """Return the Jinja source of a template; None for an unknown name."""
    row = _rows().get(name)
    return None if row is None else _source(row)


def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("named.toml").read_text("utf-8"))


def _source(row: Mapping[str, Any]) -> str:
    common = row.get("turn")
    turns = {role: row.get(role) or [text.replace("{role}", role) for text in common or ()] for role in _ROLES}
    values = {"turns": turns, "trims": row.get("trim", []), "inside": row.get("inside", [])}
    lines = [f"{{%- set {name} = {_written(value)} -%}}" for name, value in values.items()]
    before = row.get("start", "")
    generation = row.get("generation", turns["assistant"][0])
    parts = [*lines, f"{{{{- {_written(before)} -}}}}"]
    if "default_system" in row:
        text = turns["system"][0] + row["default_system"] + turns["system"][1]
        parts.append(f"{{%- if messages[0].role != 'system' -%}}{{{{- {_written(text)} -}}}}{{%- endif -%}}")
    prompt = f"{{%- if add_generation_prompt -%}}{{{{- {_written(generation)} -}}}}{{%- endif -%}}"
    return "\n".join([*parts, _MESSAGES + prompt])


def _written(value: object) -> str:
    """Return a value in Jinja's notation."""
    return json.dumps(value, ensure_ascii=False)
