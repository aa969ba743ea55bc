"""Agents with tools over files: recorded tasks, turn by turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from ..client import Result, Run
from ..comparison import Outcome, compare, pace, problems, table
from ..report import Bar, BenchError, Report, Skip, Summary, Table
from ..server_api import Body, ChatApi, History
from ..servers import DATA_VARIABLE, Arm, add_clients, add_options, arms_for, sampling
from ..trace import Query, prose

# ---- The API ------------------------------------------------------------------------------------------------------------
# An agent's side of `/v1/chat/completions`: the user's questions, calls of a tool, and the files as its results.

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
class AgentApi(ChatApi):
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


# ---- Tasks --------------------------------------------------------------------------------------------------------------
# The tasks of ClawTasks: what a user asks of an agent turn by turn, and the files that it reads for each turn.

File = tuple[str, str]
"""The path as the user writes it, and the text."""

_PATH = re.compile(r"[\w/]+\.(?:txt|py)\b")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of the user, and the files that it names, in that order."""

    question: str
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation of a user with an agent."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All files, in the order of reading."""
        return tuple(file for turn in self.turns for file in turn.files)


def read_tasks(path: Path, characters: int = 0) -> list[Task]:
    """Return the tasks whose files are all in the data, in the order of their names.

    path: the folder with `claw-tasks/` and `data/workspace/`, or its parent. characters: length of a read, to whole lines;
    0 for whole files. Raises OSError if a folder is missing, ValueError if no task is left.
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
    """Return `count` of the tasks at equal distances; all of them for 0."""
    count = min(count or len(tasks), len(tasks))
    return [tasks[at * len(tasks) // count] for at in range(count)]


def queries(tasks: Sequence[Task]) -> Iterator[Query]:
    """Yield the requests of an agent: for each turn the user's question, and then the files, if it reads some.

    A query that brings files has no question of its own.
    """
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


REWRITTEN, AS_SENT, THEIRS = "slotcache, tool_documents", "slotcache", "llama-server"
ASKED = {"tools": TOOLS}
CACHED = ASKED | {"cache_prompt": True}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request as a server's /apply-template and /tokenize return it."""

    text: str
    tokens: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench agent`."""
    add_options(parser, context=32768)
    add_clients(parser)
    add_data(parser, tasks=6, characters=12000)


def add_data(parser: argparse.ArgumentParser, tasks: int, characters: int) -> None:
    """Add the options for the tasks and their files."""
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with clawtasks/")
    add("--tasks", type=int, default=tasks, help="number of tasks, 0 for all (default: %(default)s)")
    text = "characters of each file that a call returns, 0 for whole files (default: %(default)s)"
    add("--characters", type=int, default=characters, help=text)


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the tasks that the options choose. Raises Skip without data, BenchError for data that is something else."""
    if not args.data or not Path(args.data).is_dir():
        raise Skip(f"{args.scenario} needs --data PATH or {DATA_VARIABLE}: a folder that holds clawtasks/")
    if args.url:
        raise BenchError(f"{args.scenario} starts servers with a chat template of its own: leave --url out")
    try:
        return read_tasks(Path(args.data), args.characters)
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"--data {args.data}: {error}") from error


def run(args: argparse.Namespace) -> Report:
    """Send the requests of all tasks, and compare the prompts of slotcache with those of llama-server."""
    tasks = spread(tasks_of(args), args.tasks)
    trace = list(queries(tasks))
    with template_flag() as flag:
        arms = agent_arms(args, flag)
        outcomes = compare(arms, trace, args)
        unlike = asyncio.run(_unlike(arms, outcomes, args)) if arms[-1].name == THEIRS else []
    size = f"up to {args.characters:,} characters of a file" if args.characters else "whole files"
    title = f"agent: {len(tasks)} tasks, {len(trace)} requests, {size}, {pace(args)}"
    data = {"tasks": [task.name for task in tasks], "unlike": unlike, "arms": [outcome.data() for outcome in outcomes]}
    notes = [*problems(outcomes), *unlike[:5]]
    tables = [table(title, outcomes), _computed(outcomes)]
    return Report("agent", tables, bars=_bars(outcomes, unlike), notes=notes, data=data, has_failed=bool(notes))


def agent_arms(args: argparse.Namespace, flag: str) -> list[Arm]:
    """Return slotcache with `tool_documents`, without it, and llama-server if its path is given."""
    own, theirs = f"{flag} {args.slotcache_args}", f"{flag} {args.llama_args}"
    shown = argparse.Namespace(**vars(args) | {"slotcache_args": own, "llama_args": theirs})
    rewritten, as_sent, *others = arms_for(shown, ("auto", "retrieval"))
    return [
        replace(rewritten, name=REWRITTEN, api=AgentApi(extra=CACHED | {"tool_documents": "auto"})),
        replace(as_sent, name=AS_SENT, api=AgentApi(extra=CACHED)),
        *(replace(arm, api=AgentApi(extra=ASKED)) for arm in others),
    ]


def _computed(outcomes: Sequence[Outcome]) -> Table:
    columns = ("arm", "prompt tokens", "computed", "longest prompt", "questions: TTFT p50 ms", "files: p50", "turns: p50")
    rows = []
    for outcome in outcomes:
        longest = max((result.prompt_tokens for run in outcome.runs for result in run.answered), default=0)
        tokens = [int(outcome.total(name)) for name in ("prompt_tokens", "computed_tokens")]
        waits = (_p50(outcome, _questions), _p50(outcome, _files), _p50(outcome, _turns))
        rows.append((outcome.arm.name, *tokens, longest, *(1000 * wait for wait in waits)))
    return Table("requests with a question, those that bring files, and turns of both", columns, rows)


def _p50(outcome: Outcome, waits: Callable[[Run], Iterable[float]]) -> float:
    return Summary.median_of([Summary.of(waits(run)) for run in outcome.runs]).p50


def _questions(run: Run) -> list[float]:
    return [result.ttft for query, result in zip(run.queries, run.results, strict=True) if not query.documents]


def _files(run: Run) -> list[float]:
    return [result.ttft for query, result in zip(run.queries, run.results, strict=True) if query.documents]


def _turns(run: Run) -> list[float]:
    """Return the seconds from each question to the first token of its answer, with the call of the tool between them."""
    turns: dict[tuple[str, int], list[Result]] = {}
    for query, result in zip(run.queries, run.results, strict=True):
        turns.setdefault((query.session, query.turn), []).append(result)
    return [sum(call.latency for call in calls) + answer.ttft for *calls, answer in turns.values()]


async def _unlike(arms: Sequence[Arm], outcomes: Sequence[Outcome], args: argparse.Namespace) -> list[str]:
    """Return one line for each request of slotcache, as sent, whose prompt is not llama-server's to the token."""
    compared = [(arm, outcome) for arm, outcome in zip(arms, outcomes, strict=True) if arm.name in (AS_SENT, THEIRS)]
    prompts = [await _prompts(arm, outcome.runs[0].queries, args) for arm, outcome in compared]
    results = [outcome.runs[0].results for _, outcome in compared]
    unlike = []
    for query, *both in zip(outcomes[0].runs[0].queries, *prompts, *results, strict=True):
        own, theirs, *used = both
        if own != theirs or any(_is_other(result, theirs) for result in used):
            counts = [len(own.tokens), len(theirs.tokens), *(result.prompt_tokens for result in used)]
            unlike.append(f"{query.session}, turn {query.turn}: prompts of {', '.join(map(str, counts))} tokens")
    return unlike


def _is_other(result: Result, prompt: Prompt) -> bool:
    return not result.error and result.prompt_tokens != len(prompt.tokens)


async def _prompts(arm: Arm, asked: Sequence[Query], args: argparse.Namespace) -> list[Prompt]:
    prompts, history = [], dict[str, list[tuple[Query, str]]]()
    with arm.up() as url:
        async with aiohttp.ClientSession(url, raise_for_status=True) as http:
            for query in asked:
                before = history.setdefault(query.session, [])
                _, body = await arm.api.prepare(http, query, before, sampling(args))
                before.append((query, ""))
                prompts.append(await _prompt(http, {name: body[name] for name in ("messages", "tools")}))
    return prompts


async def _prompt(http: aiohttp.ClientSession, body: dict[str, Any]) -> Prompt:
    text = (await _post(http, "/apply-template", body))["prompt"]
    tokens = await _post(http, "/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return Prompt(text, tuple(tokens["tokens"]))


async def _post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=body) as answer:
        return await answer.json()


def _bars(outcomes: Sequence[Outcome], unlike: Sequence[str]) -> list[Bar]:
    if outcomes[-1].arm.name != THEIRS:
        return []
    own, _, theirs = outcomes
    if problems(outcomes):
        return [Bar(4, "computed tokens, of llama-server's", nan, 0.6)]
    figures = (
        ("computed tokens", own.total("computed_tokens"), theirs.total("computed_tokens")),
        ("TTFT p50 of requests that bring files", _p50(own, _files), _p50(theirs, _files)),
        ("p50 from a question to the first token of its answer", _p50(own, _turns), _p50(theirs, _turns)),
    )
    return [
        *(Bar(4, f"{name}, of llama-server's", mine / other, 0.6) for name, mine, other in figures),
        Bar(4, "prompts as sent that are not llama-server's, to the token", float(len(unlike)), 0),
    ]
