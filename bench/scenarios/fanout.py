"""Sends the same prompt in many requests at once, and measures whether it is computed only once."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from time import perf_counter

from ..client import Client, PromptSizer
from ..report import Bar, Report, Table, median
from ..servers import add_options, arms_for, measured_in_rounds


@dataclass(frozen=True, slots=True)
class Burst:
    """One round of requests.

    prompt: the tokens of the prompt.
    once: the most tokens that one request computed. All rounds share a prefix, so it is less than `prompt`.
    computed: the tokens that all requests computed together.
    seconds: the time until all requests have ended.
    """

    prompt: int
    once: int
    computed: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench fanout`."""
    add_options(parser, context=32768, slots=8, max_tokens=8)
    add = parser.add_argument
    add("--requests", type=int, default=8, help="requests at once (default: %(default)s)")
    add("--prompt-tokens", type=int, default=2600, help="length of the prompt (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Send a new text in every round, which no server has cached."""
    arms = arms_for(args, llama_slots=args.parallel)
    bursts = measured_in_rounds(arms, args, _burst)
    own, theirs = bursts[arms[0].name], bursts.get("llama-server")
    rows = [
        (name, of[0].prompt, *(median([getattr(one, field) for one in of]) for field in ("once", "computed", "seconds")))
        for name, of in bursts.items()
    ]
    title = f"fanout: {args.requests} requests with one prompt, {args.parallel} slots"
    table = Table(title, ("arm", "prompt tokens", "computed by one", "computed in all", "seconds"), rows)
    bars = [Bar(4, "tokens computed over one prompt", median([one.computed / one.once for one in own]), 1.02)]
    if theirs:
        ratio = median([one.seconds for one in own]) / median([one.seconds for one in theirs])
        bars.append(Bar(4, "total time over llama-server's", ratio, 0.2))
    return Report("fanout", [table], bars=bars, data={"arms": [arm.describe() for arm in arms], "bursts": repr(bursts)})


async def _burst(client: Client, args: argparse.Namespace, number: int) -> Burst:
    query = (await PromptSizer.of(client)).query(f"fanout {number}", args.prompt_tokens)
    request = await client.prepare(query)
    began = perf_counter()
    results = await asyncio.gather(*(client.send(request) for _ in range(args.requests)))
    seconds = perf_counter() - began
    computed = [result.answered().computed_tokens for result in results]
    return Burst(results[0].prompt_tokens, max(computed), sum(computed), seconds)
