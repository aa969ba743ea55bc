"""Answers about facts in files that an agent has read: is it still known what `tool_documents` does not show again?"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from ..agent_tasks import TOOLS, Task, template_flag
from ..client import Client, EncodedRequest, Result
from ..report import Bar, BenchError, Progress, Report, Table, f1, mean
from ..servers import Arm, add_options
from ..trace import Query
from .agent import AS_SENT, REWRITTEN, AgentApi, add_data, agent_arms, tasks_of

WAYS = {AS_SENT: "off", REWRITTEN: "auto"}
FACT = re.compile(r"^[ -]*([A-Z][A-Za-z0-9 /()'-]{3,50}): (\S.{0,60})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the file that was read last. history: the queries so far, with their answers.

    name: the words before the answer in the file's line; the model's answer begins with them.
    """

    history: tuple[tuple[Query, str], ...]
    text: str
    name: str
    answer: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench facts`."""
    add_options(parser, context=8192, max_tokens=24)
    add_data(parser, tasks=3, characters=2500)
    parser.add_argument("--questions", type=int, default=200, help="of all that the files allow (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Ask each question in both ways, one after the other, on one server."""
    tasks = tasks_of(args)
    if args.model is None:
        raise BenchError("facts needs -m MODEL: the weights of the bench model are random, so its answers mean nothing")
    asked = _chosen(list(_questions(_richest(tasks, args.tasks))), args)
    with template_flag() as flag, (arm := agent_arms(args, flag)[0]).up() as url:
        answers = asyncio.run(_measure(arm, url, asked, args.max_tokens))
    return _report(asked, answers)


def _richest(tasks: Sequence[Task], count: int) -> list[Task]:
    """Return the tasks with the most facts, `count` of them or all for 0. Tasks that read the same files count once."""
    distinct = {tuple(sorted(path for path, _ in task.files)): task for task in tasks}.values()
    return sorted(distinct, key=lambda task: -sum(len(_facts(text)) for _, text in task.files))[: count or None]


def _questions(tasks: Sequence[Task]) -> Iterator[Question]:
    """Yield a question for each fact of each file, once it is read; the first one is answered in the history."""
    for task in tasks:
        history: list[tuple[Query, str]] = []
        for number, (path, text) in enumerate(task.files, 1):
            facts = _facts(text)
            name, value = facts[0] if facts else ("text", "")
            history.append((Query(task.name, number, f"Read {path}. {_asks(name, path)}"), ""))
            history.append((Query(task.name, number, "", ((path, text),)), f"{name}: {value}"))
            yield from (Question(tuple(history), _asks(name, path), name, value) for name, value in facts[1:])


def _asks(name: str, path: str) -> str:
    return f"What is the {name} in {path}?"


def _facts(text: str) -> list[tuple[str, str]]:
    """Return name and value of each line that is both, if the text has the name once."""
    found = FACT.findall(text)
    times = Counter(name for name, _ in found)
    return [(name, value) for name, value in found if times[name] == 1]


def _chosen(questions: Sequence[Question], args: argparse.Namespace) -> list[Question]:
    """Return a sample in the order of the tasks, so that questions about one history follow each other."""
    if not questions:
        raise BenchError(f"--data {args.data}: no line of the files is a name and a value")
    places = range(len(questions))
    return [questions[at] for at in sorted(Random(args.seed).sample(places, min(args.questions, len(places))))]


async def _measure(arm: Arm, url: str, asked: Sequence[Question], max_tokens: int) -> dict[str, list[Result]]:
    answers: dict[str, list[Result]] = {way: [] for way in WAYS}
    async with Client(url, arm.api, name=arm.name) as client:
        with Progress("both ways in turn", len(asked) * len(WAYS)) as progress:
            for question in asked:
                for way, results in answers.items():
                    results.append(result := await client.send(_request(question, WAYS[way], max_tokens)))
                    if result.error:
                        raise BenchError(f"{question.text}: {result.error}")
                    progress.step(f"{way}: {result.text!r} for {question.answer!r}")
    return answers


def _request(question: Question, tool_documents: str, max_tokens: int) -> EncodedRequest:
    newest = question.history[-1][0]
    asked = Query(newest.session, newest.turn + 1, question.text)
    begun = {"role": "assistant", "content": f"{question.name}:"}  # a small model answers in other words otherwise
    body = {
        "messages": [*AgentApi(given=True).messages(asked, question.history), begun],
        "tools": TOOLS,
        "tool_documents": tool_documents,
        "cache_prompt": True,
        "cache_scope": tool_documents,
        "max_tokens": max_tokens,
        "stop": ["\n"],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return EncodedRequest("/v1/chat/completions", json.dumps(body).encode(), f"{question.text}, {tool_documents}")


def _report(asked: Sequence[Question], answers: dict[str, list[Result]]) -> Report:
    scores = {
        way: [f1(one.answer, result.text.removeprefix(f"{one.name}:")) for one, result in zip(asked, results, strict=True)]
        for way, results in answers.items()
    }
    rows = [
        (
            way,
            mean(scores[way]),
            mean([float(score == 1) for score in scores[way]]),
            sum(result.prompt_tokens for result in results),
            sum(result.computed_tokens for result in results),
        )
        for way, results in answers.items()
    ]
    columns = ("way", "F1", "all words", "prompt tokens", "computed")
    loss = mean(scores[AS_SENT]) - mean(scores[REWRITTEN])
    data = [
        {"question": question.text, "answer": question.answer} | {way: answers[way][at].text for way in WAYS}
        for at, question in enumerate(asked)
    ]
    return Report(
        "facts",
        [Table(f"facts: {len(asked)} questions about files that were read", columns, rows)],
        bars=[Bar(4, "loss of F1 by tool_documents", loss, 0.02)],
        data={"questions": data},
    )
