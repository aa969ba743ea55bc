"""An agent's side of `/v1/chat/completions`: the user's questions, calls of a tool, and the files as its results."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..dialect import Body, ChatDialect, History
from ..text import prose
from ..trace import Query

INSTRUCTIONS = "You are a careful assistant. Read files with the function read_file, and answer from what they say."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Return the text of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "path of the file"}},
                "required": ["path"],
            },
        },
    }
]
ANSWER_WORDS = 60
TEMPLATE = """\
{%- if tools -%}
    {{- '<|im_start|>system\\nFunctions, in <tools></tools>:\\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\\n' + tool | tojson -}}
    {%- endfor -%}
    {{- '\\n</tools>\\nA call is a JSON object in <tool_call></tool_call>:\\n' -}}
    {{- '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' -}}
    {%- if message.role == 'tool' -%}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- else -%}
        {{- message.content or '' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML with tools. Templates without tools are filled in by each server in its own words: prompts would differ."""


@dataclass(frozen=True, slots=True)
class AgentDialect(ChatDialect):
    """The chat of an agent whose queries with documents bring the files that its last answer called for.

    Calls and answers of the history are recorded ones, not the server's: every server gets the same messages. The answers
    are prose, unless the history's are `given` ones.
    """

    given: bool = False

    def messages(self, query: Query, history: History) -> list[Body]:
        messages = [{"role": "system", "content": INSTRUCTIONS}]
        following = [*(asked for asked, _ in history), query][1:]
        for (asked, answer), after in zip(history, following, strict=True):
            text = answer if self.given else prose(f"answer {asked.session} {asked.turn}", ANSWER_WORDS)
            messages += [*_asked(asked), _calls(after) if after.documents else {"role": "assistant", "content": text}]
        return [*messages, *_asked(query)]


@contextmanager
def template_flag() -> Iterator[str]:
    """Yield the flag that makes either server use TEMPLATE, while the context lasts."""
    with TemporaryDirectory(prefix="slotcache-bench-") as folder:
        file = Path(folder) / "agent.jinja"
        file.write_text(TEMPLATE, "utf-8")
        yield shlex.join(["--chat-template-file", str(file)])


def _asked(query: Query) -> list[Body]:
    """Return the messages that a query adds: results of tools, or a question."""
    if not query.documents:
        return [{"role": "user", "content": query.question}]
    return [
        {"role": "tool", "tool_call_id": _call_id(query, at), "content": text}
        for at, (_, text) in enumerate(query.documents)
    ]


def _calls(query: Query) -> Body:
    calls = [
        {
            "id": _call_id(query, at),
            "type": "function",
            "function": {"name": "read_file", "arguments": json.dumps({"path": path})},
        }
        for at, (path, _) in enumerate(query.documents)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _call_id(query: Query, at: int) -> str:
    return f"call_{query.turn}_{at}"
