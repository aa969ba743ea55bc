"""A request's speed beside idle KV: does what nobody needs just now slow down those who run?"""

import argparse
from dataclasses import dataclass, replace

from .arms import Arm, arms_for
from .client import Client
from .error import BenchError
from .options import add_options, sampling
from .prompt import PromptSizer
from .report import Bar, Report, Table
from .stats import median

FILLING = 3000  # tokens of each prompt that fills the pool


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second, medians."""

    prefill: float
    decode: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench idle`."""
    add_options(parser, max_tokens=48)
    add = parser.add_argument
    add("--idle", type=int, default=12_000, help="idle cells (default: %(default)s)")
    add("--prompt-tokens", type=int, default=800, help="of the request that is measured (default: %(default)s)")
    add("--repeats", type=int, default=5, help="times it is measured (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """With idle KV moved to host memory, as by default, and with idle KV left on the device."""
    arms = {
        "moved to host memory": arms_for(args)[0],
        "left on the device": arms_for(args, slotcache_flags=("--idle-cells", str(args.ctx_size)))[0],
    }
    speeds = {name: _measured(arm, args) for name, arm in arms.items()}
    rows = [
        (
            name,
            empty.prefill,
            full.prefill,
            full.prefill / empty.prefill,
            empty.decode,
            full.decode,
            full.decode / empty.decode,
        )
        for name, (empty, full) in speeds.items()
    ]
    columns = ("idle KV", "prefill/s, empty", "beside it", "ratio", "decode/s, empty", "beside it", "ratio")
    table = Table(f"idle: {args.idle:,} idle tokens, a pool of {args.ctx_size:,} cells", columns, rows)
    bars = [
        Bar(6, "prefill speed beside idle KV over that of an empty pool", float(rows[0][3]), 0.9, at_least=True),
        Bar(6, "the same of decode", float(rows[0][6]), 0.9, at_least=True),
    ]
    return Report("idle", [table], bars, (), {"arms": [arm.describe() for arm in arms.values()], "speeds": repr(speeds)})


def _measured(arm: Arm, args: argparse.Namespace) -> tuple[Speed, Speed]:
    async def work(client: Client) -> tuple[Speed, Speed]:
        sizer = await PromptSizer.of(client)
        empty = await _speed(client, sizer, args, "empty")
        for number in range(args.idle // FILLING):
            filled = replace(client.sampling, max_tokens=1)
            if (result := await client.ask(sizer.query(f"filling {number}", FILLING), sampling=filled)).error:
                raise BenchError(result.error)
        return empty, await _speed(client, sizer, args, "beside")

    return arm.measure(sampling(args), work)


async def _speed(client: Client, sizer: PromptSizer, args: argparse.Namespace, name: str) -> Speed:
    """Of requests that leave nothing behind and reuse nothing."""
    prefills, gaps = [], []
    alone = replace(client.sampling, cache_prompt=False)
    for number in range(args.repeats):
        result = await client.ask(sizer.query(f"{name} {number}", args.prompt_tokens), sampling=alone)
        if result.error:
            raise BenchError(result.error)
        prefills.append(result.prompt_tokens / result.ttft)
        gaps += result.gaps
    return Speed(median(prefills), 1 / median(gaps))
