"""Tasks for an agent with tools: a user's questions about files, the tool that reads the files, and the chat template."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from .trace import Query

_PATH_OF_FILE = {"type": "object", "properties": {"path": {"type": "string", "description": "path of the file"}}}
_PARAMETERS = _PATH_OF_FILE | {"required": ["path"]}
_READ = {"name": "read_file", "description": "Return the text of a file.", "parameters": _PARAMETERS}
TOOLS = [{"type": "function", "function": _READ}]
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
"""ChatML with tools. With a template without tools, each server would write tools in its own words, so prompts would
differ."""


@contextmanager
def template_flag() -> Iterator[str]:
    """Yield the flag that makes either server use TEMPLATE. The template's file exists within the context."""
    with TemporaryDirectory(prefix="slotcache-bench-") as folder:
        file = Path(folder) / "agent.jinja"
        file.write_text(TEMPLATE, "utf-8")
        yield shlex.join(["--chat-template-file", str(file)])


# ---- Tasks --------------------------------------------------------------------------------------------------------------
# The tasks of ClawTasks: a user's questions to an agent turn by turn, and the files that the agent reads for each turn.

File = tuple[str, str]
"""The path of a file as the user writes it, and its text."""

_PATH = re.compile(r"[\w/]+\.(?:txt|py)\b")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of the user, and the files that it names, in their order in the question."""

    question: str
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation of a user with an agent."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All files, in the order in which they are read."""
        return tuple(file for turn in self.turns for file in turn.files)


def read_tasks(path: Path, characters: int = 0) -> list[Task]:
    """Return the tasks whose files are all in the data, sorted by name.

    path: the folder with `claw-tasks/` and `data/workspace/`, or its parent folder.
    characters: the characters read from each file, rounded to whole lines; 0: all.

    Raises OSError if a folder is missing, ValueError if the data has no such task.
    """
    folder = path / "clawtasks" if (path / "clawtasks").is_dir() else path
    texts = {file.name: _cut(file.read_text("utf-8"), characters) for file in sorted((folder / "data/workspace").iterdir())}
    rows = [row for file in (folder / "claw-tasks").glob("*/tasks.json") for row in json.loads(file.read_text("utf-8"))]
    tasks = [
        Task(row["name"], tuple(_turn(question, texts) for question in row["turns"]))
        for row in sorted(rows, key=lambda row: row["name"])
        if all(_name(path) in texts for question in row["turns"] for path in _PATH.findall(question))
    ]
    if not tasks:
        raise ValueError(f"no tasks in {folder}/claw-tasks")
    return tasks


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Return `count` tasks at equal distances in the list; 0: all tasks."""
    count = min(count or len(tasks), len(tasks))
    return [tasks[at * len(tasks) // count] for at in range(count)]


def queries(tasks: Sequence[Task]) -> Iterator[Query]:
    """Yield an agent's requests: for each turn a query with the question, then a query with the files if there are any."""
    for task in tasks:
        for number, turn in enumerate(task.turns, 1):
            yield Query(task.name, number, turn.question)
            if turn.files:
                yield Query(task.name, number, "", turn.files)


def _turn(question: str, texts: dict[str, str]) -> Turn:
    return Turn(question, tuple((path, texts[_name(path)]) for path in dict.fromkeys(_PATH.findall(question))))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _cut(text: str, characters: int) -> str:
    """Return the whole lines within the first `characters`, at least one."""
    if not characters or len(text) <= characters:
        return text
    end = text.rfind("\n", 0, characters) + 1 or text.find("\n") + 1
    return text[:end] if end else text
