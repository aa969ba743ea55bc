"""A request beside idle KV, compared with an empty pool: with idle KV moved to host memory, and kept on the device."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from ..client import Client, PromptSizer
from ..report import Bar, BenchError, Progress, Report, Table, median
from ..servers import Arm, add_options, arms_for, sampling

EMPTY, MOVED, KEPT = "empty pool", "idle KV, default", "idle KV, kept on the device"
CELLS_USED = "slotcache_cells_used"
OVERLAP = 32
"""Output tokens of the requests that leave idle KV: enough that all of these requests run at the same time."""
FIGURES = ("idle_cells", "prefill", "decode")
REQUIRED = 0.9


@dataclass(frozen=True, slots=True)
class Speed:
    """One request: idle cells at its start, tokens per second of its prefill and of its decode."""

    idle_cells: int
    prefill: float
    decode: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench idle`."""
    add_options(parser, context=16384, max_tokens=128)
    add = parser.add_argument
    add("--idle", type=int, default=12000, help="idle cells (default: %(default)s)")
    add("--prompt-tokens", type=int, default=1000, help="prompt of the measured requests (default: %(default)s)")
    add("--pause", type=float, default=1.0, help="seconds for which KV is idle before a request (default: %(default)s)")
    add("--repeats", type=int, default=5, help="measured requests of each arm (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Three servers take turns. Before each measured request, one request per slot leaves its KV idle."""
    speeds = asyncio.run(_in_turn(_arms(args), args))
    middle = {name: [median([getattr(one, figure) for one in of]) for figure in FIGURES] for name, of in speeds.items()}
    _, *empty = middle[EMPTY]
    rows = [
        (name, round(idle), *(value for pair in zip(of, empty, strict=True) for value in (pair[0], pair[0] / pair[1])))
        for name, (idle, *of) in middle.items()
    ]
    columns = ("arm", "idle cells", "prefill tokens/s", "of empty", "decode tokens/s", "of empty")
    title = f"idle: a request of {args.prompt_tokens} tokens and {args.max_tokens} of output in {args.ctx_size:,} cells, "
    title += f"KV idle for {args.pause:.1f} s"
    bars = [
        Bar(6, f"{figure} beside idle KV over that in an empty pool", own / alone, REQUIRED, at_least=True)
        for figure, own, alone in zip(FIGURES[1:], middle[MOVED][1:], empty, strict=True)
    ]
    few = [f"{name}: only {round(middle[name][0])} cells were idle" for name in (MOVED, KEPT) if _is_few(middle, name, args)]
    data = {name: [asdict(one) for one in of] for name, of in speeds.items()}
    return Report("idle", [Table(title, columns, rows)], bars=bars, notes=few, data=data)


def _is_few(middle: dict[str, list[float]], name: str, args: argparse.Namespace) -> bool:
    return middle[name][0] < REQUIRED * args.idle


def _arms(args: argparse.Namespace) -> list[Arm]:
    if args.url:
        raise BenchError("idle compares three settings of slotcache, and starts each: leave --url out")
    alone = ("--idle-prefill", "off")  # idle prefill would move the idle KV before the measured request starts
    flags = {EMPTY: alone, MOVED: alone, KEPT: (*alone, "--idle-cells", str(args.ctx_size))}
    return [replace(arms_for(args, slotcache_flags=more)[0], name=name) for name, more in flags.items()]


async def _in_turn(arms: Sequence[Arm], args: argparse.Namespace) -> dict[str, list[Speed]]:
    turn, all_warm = asyncio.Lock(), asyncio.Barrier(len(arms))
    with ExitStack() as servers, Progress("all arms in turn", len(arms) * args.repeats) as progress:
        urls = [servers.enter_context(arm.up()) for arm in arms]

        async def one(arm: Arm, url: str) -> list[Speed]:
            async def work(client: Client) -> list[Speed]:
                sizer, speeds = await PromptSizer.of(client), []
                await all_warm.wait()
                for number in range(args.repeats):
                    async with turn:
                        if arm.name != EMPTY:
                            await _leave_idle(client, sizer, args)
                            await asyncio.sleep(args.pause)
                        speeds.append(await _measure(client, sizer, args, number))
                    progress.step(f"{arm.name}: {speeds[-1].prefill:.0f}, {speeds[-1].decode:.0f} tokens/s")
                return speeds

            return await arm.work(url, sampling(args), work)

        found = await asyncio.gather(*(one(arm, url) for arm, url in zip(arms, urls, strict=True)))
        return {arm.name: speeds for arm, speeds in zip(arms, found, strict=True)}


async def _leave_idle(client: Client, sizer: PromptSizer, args: argparse.Namespace) -> None:
    """Run one request per slot, all at the same time: a later request would move the idle KV of an earlier one."""
    length = args.idle // args.parallel - OVERLAP + round(sizer.fixed)  # the fixed part is shared and counts once
    queries = [sizer.query(f"idle {number}", length) for number in range(args.parallel)]
    some = replace(client.sampling, max_tokens=OVERLAP)
    for result in await asyncio.gather(*(client.ask(query, sampling=some) for query in queries)):
        if result.error:
            raise BenchError(f"a request that leaves idle KV: {result.error}")


async def _measure(client: Client, sizer: PromptSizer, args: argparse.Namespace, number: int) -> Speed:
    query = sizer.query(f"measured {number}", args.prompt_tokens)
    idle = await client.gauge(CELLS_USED)
    result = await client.ask(query, sampling=replace(client.sampling, cache_prompt=False))
    if result.error:
        raise BenchError(result.error)
    decode = (result.completion_tokens - 1) / (result.latency - result.ttft)
    return Speed(round(idle), result.prompt_tokens / result.ttft, decode)
