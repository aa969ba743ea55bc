"""Minimal chat templates, each with the limits of a known model's template, and histories with a letter per message."""

import json
import os
from pathlib import Path
from typing import Any

ALTERNATES = """\
{%- if messages[0].role == "system" %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = "", messages %}{% endif %}
{%- set ns = namespace(turn=0) %}
{%- for m in rest if not (m.role == "tool" or m.tool_calls) %}
{%- if (m.role == "user") != (ns.turn % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endfor %}
{{- "<<" + system + ">>" if system }}
{%- for m in rest %}
{%- for call in m.tool_calls or [m] if call.tool_call_id or call.function %}
{%- if (call.tool_call_id or call.id or "") | length != 9 %}{{ raise_exception("id of 9 letters") }}{% endif %}{% endfor %}
{%- if m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}{% for call in m.tool_calls %}[CALL]{{ call.id }}{{ call.function | tojson }}{% endfor %}
{%- elif m.role == "tool" %}[RESULT]{{ m.tool_call_id }}:{{ m.content }}
{%- elif m.role == "assistant" %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
"""Like Mistral's: only the first message may be a system message, turns are strict, ids have nine letters, and a message
with calls has no text."""

NO_SYSTEM = """\
{%- for m in messages %}
{%- if m.role not in ("user", "assistant") %}{{ raise_exception("no such role") }}{% endif %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{{- "<" + m.role + ">" + m.content | trim + "<end>" }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
"""Like Gemma's: no system message and no tools."""

ASKED = """\
{%- set ns = namespace(asked=false) %}
{%- for m in messages if m.role == "user" and not m.content.startswith("<tool_response>") %}
{%- set ns.asked = true %}{% endfor %}
{%- if not ns.asked %}{{ raise_exception("no question") }}{% endif %}
{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("the system must be first") }}{% endif %}
{{- "<" + m.role + ">" + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({% for key, value in call.function.arguments | items %}
{{- key }}={{ value }}{% endfor %}){% endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
"""Like Qwen 3.5's: it needs a question, and only the first message may be a system message. Calls have objects."""

LOSES = """\
{%- if messages[0].role in ("system", "developer") %}<system>{{ messages[0].content }}<end>{% endif %}
{%- set ns = namespace(name="") %}
{%- for m in messages %}
{%- if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}<call {{ ns.name }}>
{{- m.tool_calls[0].function.arguments | tojson }}<end>
{%- if m.tool_calls | length > 1 %}{{ raise_exception("one call at once") }}{% endif %}
{%- elif m.role == "assistant" %}<assistant>{{ m.content }}<end>
{%- elif m.role == "user" %}<user>{{ m.content }}<end>
{%- elif m.role == "tool" %}{% if not ns.name %}{{ raise_exception("a result of no call") }}{% endif %}
{{- "<result " + ns.name + ">" + m.content + "<end>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
"""Like gpt-oss's: later system messages are lost, and an answer has one call."""

MOVES = """\
{%- set ns = namespace(system="") %}
{%- for m in messages if m.role == "system" %}{% set ns.system = ns.system + m.content + ";" %}{% endfor %}
{{- ns.system }}
{%- for m in messages if m.role != "system" %}{{ "<" + m.role + ">" + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name + " " + call.function.arguments }}{% endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
"""Like DeepSeek's: all system messages are at the start. Calls have texts."""

TAKES = """\
{%- for m in messages %}{{ "<" + m.role + ">" + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
"""Like ChatML: it accepts everything."""

SMALL = {
    name: source
    for name, source in globals().items()
    if name in ("ALTERNATES", "NO_SYSTEM", "ASKED", "LOSES", "MOVES", "TAKES")
}
FOLDER = os.environ.get("SLOTCACHE_TEMPLATES", "")
REAL = {file.stem: file.read_text("utf-8") for file in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def history(letters: str, id: str = "call0000{}") -> tuple[list[dict[str, Any]], list[str]]:
    """Return a history, and its texts.

    letters: the messages. s, u, a: a system message, a user's message, an answer. c, d: an answer with one call, with two.
    r: the result of the first call without a result. n: the same without an id. o: a result of an unknown call.
    id: the pattern of the calls' ids.
    """
    messages: list[dict[str, Any]] = []
    words: list[str] = []
    ids: list[str] = []
    num_calls = 0

    def word() -> str:
        words.append(f"needle{len(words):02}x")
        return words[-1]

    for letter in letters:
        if letter in ROLES:
            messages.append({"role": ROLES[letter], "content": word()})
        elif letter in "cd":
            calls: list[dict[str, Any]] = []
            for _ in range(1 + (letter == "d")):
                ids.append(id.format(num_calls))
                num_calls += 1
                function = {"name": "look", "arguments": json.dumps({"city": word()})}
                calls.append({"id": ids[-1], "type": "function", "function": function})
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif letter == "n":
            del ids[:1]
            messages.append({"role": "tool", "content": word()})
        else:
            of = ids.pop(0) if letter == "r" and ids else f"gone0000{len(words) % 10}"
            messages.append({"role": "tool", "tool_call_id": of, "content": word()})
    return messages, words
