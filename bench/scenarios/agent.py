"""Measures agents with tools over files. The recorded tasks are sent turn by turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import aiohttp

from ..agent_tasks import TOOLS, Task, queries, read_tasks, spread, template_flag
from ..client import Result, Run
from ..comparison import Outcome, compare, pace, problems, table
from ..report import Bar, BenchError, Report, Skip, Summary, Table
from ..server_api import Body, ChatApi, History, Prompt
from ..servers import DATA_VARIABLE, Arm, add_clients, add_options, arms_for, sampling
from ..trace import Query, prose
from . import replay
from .replay import add_replay

# ---- The API ------------------------------------------------------------------------------------------------------------
# An agent's use of `/v1/chat/completions`: the user's questions, calls of a tool, and files as results.

INSTRUCTIONS = "You are a careful assistant. Read files with the function read_file, and answer from what they say."
ANSWER_WORDS = 60


@dataclass(frozen=True, slots=True)
class AgentApi(ChatApi):
    """The chat of an agent. A query with documents sends them as the files that the last answer called for.

    Calls and answers in the history come from the recording, not from the server, so every server gets the same messages.

    given: use the history's answers. Otherwise the answers are generated prose.
    """

    given: bool = False

    def messages(self, query: Query, history: History) -> list[Body]:
        messages = [{"role": "system", "content": INSTRUCTIONS}]
        following = [*(asked for asked, _ in history), query][1:]
        for (asked, answer), after in zip(history, following, strict=True):
            text = answer if self.given else prose(f"answer {asked.session} {asked.turn}", ANSWER_WORDS)
            messages += [*_asked(asked), _calls(after) if after.documents else {"role": "assistant", "content": text}]
        return [*messages, *_asked(query)]


def _asked(query: Query) -> list[Body]:
    """Return the messages that a query adds: the results of a tool, or a question."""
    if not query.documents:
        return [{"role": "user", "content": query.question}]
    texts = enumerate(text for _, text in query.documents)
    return [{"role": "tool", "tool_call_id": _call_id(query, at), "content": text} for at, text in texts]


def _calls(query: Query) -> Body:
    functions = ({"name": "read_file", "arguments": json.dumps({"path": path})} for path, _ in query.documents)
    calls = [{"id": _call_id(query, at), "type": "function", "function": of} for at, of in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _call_id(query: Query, at: int) -> str:
    return f"call_{query.turn}_{at}"


# ---- The comparison -----------------------------------------------------------------------------------------------------

REWRITTEN, AS_SENT, THEIRS = "slotcache, tool_documents", "slotcache", "llama-server"
ASKED = {"tools": TOOLS}
CACHED = ASKED | {"cache_prompt": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench agent`."""
    add_options(parser, context=32768)
    add_clients(parser)
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with clawtasks/")
    add("--tasks", type=int, default=6, help="number of tasks, 0 for all (default: %(default)s)")
    text = "characters of each file that a call returns, 0 for whole files (default: %(default)s)"
    add("--characters", type=int, default=12000, help=text)
    add_replay(parser)


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the tasks of the data. Raises Skip if the data is missing, BenchError if it is something else."""
    if not args.data or not Path(args.data).is_dir():
        raise Skip(f"{args.scenario} needs --data PATH or {DATA_VARIABLE}: a folder that holds clawtasks/")
    if args.url:
        raise BenchError(f"{args.scenario} starts servers with a chat template of its own: leave --url out")
    try:
        return read_tasks(Path(args.data), args.characters)
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"--data {args.data}: {error}") from error


def run(args: argparse.Namespace) -> Report:
    """Send the requests of all tasks, and compare slotcache's prompts with llama-server's prompts."""
    tasks = spread(tasks_of(args), args.tasks)
    if args.replay:
        return replay.run(args)
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
    """Return arms of slotcache with and without `tool_documents`, and of llama-server if its path is given."""
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
    """Return the seconds from each question to the first token of its answer, including the tool call between them."""
    turns: dict[tuple[str, int], list[Result]] = {}
    for query, result in zip(run.queries, run.results, strict=True):
        turns.setdefault((query.session, query.turn), []).append(result)
    return [sum(call.latency for call in calls) + answer.ttft for *calls, answer in turns.values()]


async def _unlike(arms: Sequence[Arm], outcomes: Sequence[Outcome], args: argparse.Namespace) -> list[str]:
    """Return one line for each request whose unchanged prompt differs between slotcache and llama-server, token by token."""
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
                prompts.append(await Prompt.of(http, {name: body[name] for name in ("messages", "tools")}))
    return prompts


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
