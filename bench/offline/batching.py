"""A batch, simulated: what its prompts compute in one order or another, with the real scheduler and no model."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ...models.times import CPU
from ...ordering.policy import POLICIES, arrange
from ...ordering.tree import KnowledgeTree
from ...server.chat.chat_prompt import ChatPrompt
from ...server.service.batch import AHEAD, BatchLine, in_order
from ...slots.job import Job
from ...slots.prefix_tree import PrefixTree
from ...slots.request import Request
from ...slots.scheduler import Scheduler
from ..journal import note
from ..report import Bar, Report, Table
from ..simulated import ANSWER, CELLS, DOCUMENT, QUESTION, SCOPE, SLOTS, STEP, SYSTEM, TOKEN, prompts_of
from ..trace import Query, burst

MOST = 1.05  # tokens computed, over the fewest that any shipped order needs
UNLIMITED = 1 << 20  # documents
WINDOW = 8  # the default


@dataclass(frozen=True, slots=True)
class Outcome:
    """computed: tokens of the batch's prompts. seconds: until its last answer."""

    computed: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench batch`."""
    add = parser.add_argument
    add("--requests", type=int, default=500, help="lines of the batch (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Answer the shuffled burst trace as one batch, in the order of its lines and in the planned one."""
    queries = burst(args.requests, seed=args.seed)
    random.Random(args.seed).shuffle(queries)
    plan = planned(queries)
    floor = min(_distinct(order, policy) for order in (queries, plan) for policy in POLICIES)
    ways = {
        "line by line, retrieval order": (queries, "retrieval", SLOTS),
        "line by line": (queries, "auto", SLOTS),
        f"{AHEAD} lines ahead": (queries, "auto", SLOTS + AHEAD),
        "planned": (plan, "auto", SLOTS + AHEAD),
    }
    rows, found = [], {}
    for name, (order, policy, ahead) in ways.items():
        print(f"  {name}", file=sys.stderr, flush=True)
        one = found[name] = answer(prompts_of(order, policy), ahead)
        rows.append((name, one.computed, one.computed / floor, one.seconds))
        note(way=name, **asdict(one))
    title = (
        f"batch: {args.requests} prompts of the burst trace shuffled, {SLOTS} slots, {CELLS} cells; floor {floor:,} tokens"
    )
    table = Table(title, ("order", "tokens computed", "over the floor", "seconds"), rows)
    bar = Bar(1, "tokens computed, over the floor", found["planned"].computed / floor, MOST, unit="x")
    return Report("batch", [table], [bar])


def planned(queries: Sequence[Query]) -> list[Query]:
    """Return queries in the order in which a batch of them is answered."""
    lines = [BatchLine(at, str(at), "/v1/chat/completions", _body(query)) for at, query in enumerate(queries)]
    return [queries[line.number] for line in in_order(lines)]


def answer(prompts: Sequence[ChatPrompt], ahead: int) -> Outcome:
    """Serve a batch, so many of its prompts at a time."""
    scheduler = Scheduler(PrefixTree(CELLS, 32, costs=CPU), num_slots=SLOTS, window=WINDOW)
    jobs: list[Job] = []
    now, num_open = 0.0, 0
    while len(jobs) < len(prompts) or not scheduler.idle:
        while len(jobs) < len(prompts) and num_open < ahead:
            jobs.append(scheduler.submit(Request(len(jobs), prompts[len(jobs)], ANSWER, SCOPE)))
            num_open += 1
        plan = scheduler.plan()
        now += STEP + TOKEN * plan.num_tokens
        for job, _ in scheduler.commit(plan, [SYSTEM] * sum(span.logits for span in plan.spans)):
            if job.num_tokens == job.num_prompt + ANSWER:
                scheduler.finish(job)
                num_open -= 1
    return Outcome(sum(job.num_prompt - job.reuse.cached for job in jobs), now)


def _distinct(queries: Sequence[Query], policy: str) -> int:
    """Return how many different tokens the prompts have, in an order of documents that knows all prompts before."""
    tree = KnowledgeTree(UNLIMITED)
    for query in queries:
        keys = [name for name, _ in query.documents]
        tree.insert((keys[at], DOCUMENT) for at in arrange(keys, tree, policy).order)
    return SYSTEM + len(tree) * DOCUMENT + len(queries) * QUESTION


def _body(query: Query) -> bytes:
    documents = [{"id": name, "text": text} for name, text in query.documents]
    return msgspec.json.encode({"messages": [{"role": "user", "content": query.question}], "documents": documents})
