"""`slotcache bench SCENARIO`: measures this server, and others beside it, over HTTP."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from . import machine
from .error import BenchError, Skip
from .offline import arrange, replacement, residency
from .report import Report
from .scenarios import (
    burst,
    cached,
    conversations,
    decode,
    fanout,
    faults,
    history,
    idle,
    mtrag,
    quality,
    soak,
    speculation,
    stall,
    step,
    stress,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A subcommand: its help, its options, and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


SCENARIOS = {
    "burst": Scenario("bursts of questions with overlapping documents", burst.add_arguments, burst.run),
    "mtrag": Scenario("human multi-turn RAG conversations", mtrag.add_arguments, mtrag.run),
    "conversations": Scenario("more conversations than lanes", conversations.add_arguments, conversations.run),
    "decode": Scenario("tokens per second of many streams", decode.add_arguments, decode.run),
    "step": Scenario("what a step costs outside llama.cpp", step.add_arguments, step.run),
    "stall": Scenario("a long prefill among running streams", stall.add_arguments, stall.run),
    "speculation": Scenario(
        "a search in stages, with a server that reads along", speculation.add_arguments, speculation.run
    ),
    "fanout": Scenario("one prompt many times at once", fanout.add_arguments, fanout.run),
    "idle": Scenario("a request's speed beside idle KV", idle.add_arguments, idle.run),
    "stress": Scenario("more clients than lanes, more prompts than cells", stress.add_arguments, stress.run),
    "faults": Scenario("faults and bad clients beside good ones", faults.add_arguments, faults.run),
    "soak": Scenario("mixed load on all routes for hours", soak.add_arguments, soak.run),
    "history": Scenario("a history sent whole, with a document more each turn", history.add_arguments, history.run),
    "cached": Scenario("a prompt that is cached as a whole", cached.add_arguments, cached.run),
    "quality": Scenario("answers of the embedded model, however its documents come", quality.add_arguments, quality.run),
    "arrange": Scenario("what choosing an order and writing the prompt takes", arrange.add_arguments, arrange.run),
    "residency": Scenario("what idle and moved KV costs, without a server", residency.add_arguments, residency.run),
    "replacement": Scenario("which idle KV should leave first, simulated", replacement.add_arguments, replacement.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one scenario and prints its report.

    Exit code 0 (a missed bar is a result, too), 1 where requests failed that must not, 2 for what cannot run, 130 for
    ctrl-C.
    """
    args = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        report = SCENARIOS[args.scenario].run(args)
    except Skip as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    except BenchError as error:
        print(f"slotcache bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"\n{report.text()}")
    if args.json:
        report.write(args.json, machine.describe(getattr(args, "llama_server", None)))
        print(f"\nwritten to {args.json}")
    return int(report.has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slotcache bench", description=__doc__, allow_abbrev=False)
    scenarios = parser.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    for name, scenario in SCENARIOS.items():
        scenario.add_arguments(scenarios.add_parser(name, help=scenario.help, allow_abbrev=False))
    return parser


def _end(signum: int, frame: FrameType | None) -> None:
    """A polite kill ends as ctrl-C does: servers that were started are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
