"""Lets more conversations than slots take turns, and measures whether each is still cached at its next turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from ..client import Run
from ..comparison import Outcome, compare, pace, problems, table
from ..report import Bar, Report, Summary, Table, mean
from ..servers import add_clients, add_options, arms_for, llama_slots
from ..trace import conversations

SLACK = 1
"""The last sampled token of an answer has no KV and is computed with the next turn."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A turn after the first. new: the tokens since the turn before. computed: the tokens that the server computed."""

    session: str
    turn: int
    new: int
    computed: int

    @property
    def is_warm(self) -> bool:
        """Whether only new tokens were computed."""
        return self.computed <= self.new + SLACK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench conversations`."""
    add_options(parser)
    add_clients(parser)
    add = parser.add_argument
    add("--count", type=int, default=20, help="conversations (default: %(default)s)")
    add("--turns", type=int, default=3, help="turns of each (default: %(default)s)")
    add("--words", type=int, default=40, help="words of each user message (default: %(default)s)")
    add("--opening", type=int, default=0, help="words of each first message (default: as --words)")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    """Send all first turns, then all second turns, and so on, with the server's answers as history."""
    queries = conversations(args.count, turns=args.turns, words=args.words, seed=args.seed, opening=args.opening)
    outcomes = compare(arms_for(args, llama_slots=llama_slots(args)), queries, args)
    title = f"conversations: {args.count} of {args.turns} turns, {args.parallel} slots, {pace(args)}"
    own = outcomes[0]
    cold = [turn for run in own.runs for turn in continuations(run) if not turn.is_warm]
    notes = [f"{turn.session} turn {turn.turn}: {turn.computed} computed, {turn.new} new" for turn in cold]
    bar = Bar(4, "turns after the first that computed more than their new tokens + 1", float(len(cold)), 0)
    bars = [bar, *(_next_turns(own, other) for other in outcomes if other.arm.name == "llama-server")]
    tables = [table(title, outcomes), *(_by_turn(outcome) for outcome in outcomes)]
    data = {"arms": [outcome.data() for outcome in outcomes]}
    return Report("conversations", tables, bars=bars, notes=[*problems(outcomes), *notes], data=data)


def continuations(run: Run) -> Iterator[Continuation]:
    """Yield every turn whose previous turn was answered. New tokens are not in the previous prompt and not in its answer."""
    answered = {
        (query.session, query.turn): result
        for query, result in zip(run.queries, run.results, strict=True)
        if result.error is None
    }
    for (session, turn), result in answered.items():
        if before := answered.get((session, turn - 1)):
            new = result.prompt_tokens - before.prompt_tokens - before.completion_tokens
            yield Continuation(session, turn, new, result.computed_tokens)


def _next_turns(own: Outcome, theirs: Outcome) -> Bar:
    """Return the bar on later turns. Its limit is for twelve conversations with first messages of 1,300 tokens."""
    pairs = [[pair for run in of.runs for pair in zip(run.queries, run.results, strict=True)] for of in (own, theirs)]
    mine, others = (Summary.of(result.ttft for query, result in of if query.turn > 1) for of in pairs)
    return Bar(5, "TTFT p50 of turns after the first over llama-server's", mine.p50 / others.p50, 0.6)


def _by_turn(outcome: Outcome) -> Table:
    pairs = [pair for run in outcome.runs for pair in zip(run.queries, run.results, strict=True) if pair[1].error is None]
    new: dict[int, list[int]] = {}
    for run in outcome.runs:
        for turn in continuations(run):
            new.setdefault(turn.turn, []).append(turn.new)
    rows = []
    for number in sorted({query.turn for query, _ in pairs}):
        results = [result for query, result in pairs if query.turn == number]
        ttft = Summary.of(result.ttft for result in results)
        computed = mean([result.computed_tokens for result in results])
        prompt = mean([result.prompt_tokens for result in results])
        rows.append((number, 1000 * ttft.p50, 1000 * ttft.p95, prompt, computed, mean(new.get(number, []))))
    return Table(f"{outcome.arm.name}, by turn", ("turn", "TTFT p50 ms", "p95", "prompt tokens", "computed", "new"), rows)
