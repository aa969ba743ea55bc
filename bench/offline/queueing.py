"""The queue, simulated: many requests that wait at once for little memory, with the real scheduler and no model."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time
from typing import ParamSpec, TypeVar

import numpy as np

from ...models.times import CPU
from ...ordering.document import Document
from ...server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from ...slots.prefix_tree import PrefixTree
from ...slots.request import Job, Request
from ...slots.scheduler import Scheduler
from ...slots.scope import Scope
from ..journal import note
from ..report import Bar, Report, Table, percentile
from ..trace import Query, burst

CELLS = 2200  # for six and a half prompts
SLOTS = 4
SYSTEM, DOCUMENT, QUESTION, ANSWER = 10, 64, 8, 16  # tokens
STEP, TOKEN = 0.005, 0.001  # seconds of a step, and of each of its tokens
SCOPE = Scope.shared("")
WAYS = (
    ("first come, retrieval order", "retrieval", 0),
    ("first come, exact order", "auto", 0),
    ("window of 8", "auto", 8),
    ("window of 32", "auto", 32),
)
LEAST = {64: 0.40, 256: 0.38}  # share of tokens cached
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """cached: share of the prompts' tokens. overtaken: the most that one request was. p50, p95: seconds to the first token.

    choosing: microseconds of processor time an admission, to choose a request and its order of documents.
    """

    cached: float
    overtaken: int
    p50: float
    p95: float
    choosing: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench queue`."""
    add = parser.add_argument
    add("--waiting", default="64,256,1024", help="numbers of requests that wait at once (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Serve the shuffled burst trace, all of it waiting at once, with each way to choose the next request."""
    rows, bars = [], []
    for number in (int(number) for number in args.waiting.split(",")):
        found: dict[str, Served] = {}
        for name, policy, window in WAYS:
            print(f"  {number} waiting: {name}", file=sys.stderr, flush=True)
            one = found[name] = serve(number, policy, window, args.seed)
            rows.append((number, name, one.cached, one.overtaken, one.p50, one.p95, one.choosing))
            note(waiting=number, way=name, **asdict(one))
        usual, fifo = found["window of 8"], found["first come, retrieval order"]
        if number in LEAST:
            bars.append(Bar(1, f"{number} waiting: share of tokens cached", usual.cached, LEAST[number], at_least=True))
        bars.append(Bar(1, f"{number} waiting: TTFT p95 over first come's", usual.p95 / fifo.p95, 1.2, unit="x"))
        if number == 256:
            bars.append(Bar(1, f"{number} waiting: choosing, an admission", usual.choosing, 200, unit=" us"))
    columns = ("waiting", "next", "cached", "overtaken at most", "TTFT p50 s", "p95", "choosing us")
    title = f"queue: the burst trace shuffled, {SLOTS} slots, {CELLS} cells, prompts of {_num_tokens()} tokens"
    return Report("queue", [Table(title, columns, rows)], bars)


def serve(number: int, policy: str, window: int, seed: int = 0) -> Served:
    """Serve so many requests, all waiting at once; return what came of it."""
    scheduler = Scheduler(PrefixTree(CELLS, 32, costs=CPU), num_slots=SLOTS, window=window)
    prompts = _prompts(number, policy, seed)
    jobs = [scheduler.submit(Request(at, prompt, ANSWER, SCOPE)) for at, prompt in enumerate(prompts)]
    queue, timer = scheduler.waiting, _Timer()
    queue.next, queue.take = timer.timed(queue.next), timer.timed(queue.take)
    now, first = 0.0, dict[Job, float]()
    while not scheduler.idle:
        plan = scheduler.plan()
        now += STEP + TOKEN * plan.num_tokens
        for job, _ in scheduler.commit(plan, [SYSTEM] * sum(span.logits for span in plan.spans)):
            first.setdefault(job, now)
            if job.num_tokens == job.num_prompt + ANSWER:
                scheduler.finish(job)
    waits = list(first.values())
    return Served(
        cached=sum(job.reuse.cached for job in jobs) / sum(job.num_prompt for job in jobs),
        overtaken=max(job.reuse.num_overtaken for job in jobs),
        p50=percentile(waits, 0.5),
        p95=percentile(waits, 0.95),
        choosing=1e6 * timer.seconds / number,
    )


class _Timer:
    """Adds up the processor time of calls: other processes use the machine, too."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **options: P.kwargs) -> T:
            began = thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds += thread_time() - began

        return timed


def _num_tokens() -> int:
    return len(burst(1)[0].documents) * DOCUMENT + SYSTEM + QUESTION


def prompts_of(queries: Iterable[Query], policy: str) -> list[ChatPrompt]:
    """Return the prompts of queries. policy: of the order of their documents."""
    texts: dict[str, np.ndarray] = {}

    def tokens(text: str, size: int) -> np.ndarray:
        start = len(texts) * DOCUMENT  # no text is longer
        return texts.setdefault(text, np.arange(start, start + size, dtype=np.int32))

    prompts: list[ChatPrompt] = []
    for query in queries:
        documents = tuple(Document(name, name) for name, _ in query.documents)
        found = DocumentSet(documents, tuple(tokens(document.id, DOCUMENT) for document in documents), policy, None)
        system, question = Fixed(tokens("system", SYSTEM), "system"), Fixed(tokens(query.session, QUESTION), "question")
        prompts.append(ChatPrompt([system, found, question]))
    return prompts


def _prompts(number: int, policy: str, seed: int) -> list[ChatPrompt]:
    prompts = prompts_of(burst(number, seed=seed), policy)
    random.Random(seed).shuffle(prompts)
    return prompts
