"""Runs the real scheduler without a model, and measures the scheduling and the reuse of prompts with documents."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import ParamSpec, TypeVar

import numpy as np

from ..models.times import CPU
from ..ordering.document import Document
from ..server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from ..slots.job import Job
from ..slots.prefix_tree import PrefixTree
from ..slots.request import Request
from ..slots.scheduler import Scheduler
from ..slots.scope import Scope
from .report import percentile
from .trace import Query, burst

CELLS = 2200  # enough for six and a half prompts
SLOTS = 4
SYSTEM, DOCUMENT, QUESTION, ANSWER = 10, 64, 8, 16  # tokens
STEP, TOKEN = 0.005, 0.001  # simulated seconds of a step, and of each token in it
SCOPE = Scope.shared("")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """The figures of a simulation.

    cached: the share of the prompts' tokens that were cached.
    overtaken: the most requests that overtook one request.
    p50, p95: percentiles of TTFT, in simulated seconds.
    choosing: microseconds of processor time per request to choose the next request and the order of its documents.
    scheduling: microseconds of processor time per request for submitting, finishing, and planning and committing steps.
    """

    cached: float
    overtaken: int
    p50: float
    p95: float
    choosing: float
    scheduling: float


def serve(prompts: Sequence[ChatPrompt], window: int, arrivals: Sequence[float] = ()) -> Served:
    """Serve the prompts and return the figures.

    window: the most requests that may overtake a request.
    arrivals: the arrival of each prompt in seconds, ascending; empty if all prompts arrive at once.
    """
    scheduler = Scheduler(PrefixTree(CELLS, 32, costs=CPU), num_slots=SLOTS, window=window)
    choosing, scheduling = _Timer(), _Timer()
    queue = scheduler.waiting
    queue.next, queue.take = choosing.timed(queue.next), choosing.timed(queue.take)
    submit, finish = scheduling.timed(scheduler.submit), scheduling.timed(scheduler.finish)
    plan_step, commit = scheduling.timed(scheduler.plan), scheduling.timed(scheduler.commit)
    coming = deque(zip(arrivals or [0.0] * len(prompts), prompts, strict=True))
    now, arrived, first = 0.0, dict[Job, float](), dict[Job, float]()
    while coming or not scheduler.idle:
        if scheduler.idle:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, prompt = coming.popleft()
            arrived[submit(Request(len(arrived), prompt, ANSWER, SCOPE))] = at
        plan = plan_step()
        now += STEP + TOKEN * plan.num_tokens
        for job, _ in commit(plan, [SYSTEM] * sum(span.logits for span in plan.spans)):
            first.setdefault(job, now)
            if job.num_tokens == job.num_prompt + ANSWER:
                finish(job)
    waits = [first[job] - at for job, at in arrived.items()]
    return Served(
        cached=sum(job.reuse.cached for job in arrived) / sum(job.num_prompt for job in arrived),
        overtaken=max(job.reuse.num_overtaken for job in arrived),
        p50=percentile(waits, 0.5),
        p95=percentile(waits, 0.95),
        choosing=1e6 * choosing.seconds / len(prompts),
        scheduling=1e6 * scheduling.seconds / len(prompts),
    )


class _Timer:
    """Adds up the processor time of calls. Wall time would include other processes."""

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


def num_tokens() -> int:
    """Return the number of tokens in a prompt of the burst trace."""
    return len(burst(1)[0].documents) * DOCUMENT + SYSTEM + QUESTION


def prompts_of(queries: Iterable[Query], policy: str) -> list[ChatPrompt]:
    """Return the prompts of queries. policy: the order of their documents."""
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


def shuffled(number: int, policy: str, seed: int = 0) -> list[ChatPrompt]:
    """Return `number` prompts of the burst trace, shuffled."""
    prompts = prompts_of(burst(number, seed=seed), policy)
    random.Random(seed).shuffle(prompts)
    return prompts
