"""`slotcache bench`: measure this server over HTTP, and compare it with other servers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..slots.child import ends_in_order
from . import journal
from . import report as machine
from .report import BenchError, Skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """A subcommand. Its module has `add_arguments(parser)` and `run(args)`, which returns a Report."""

    name: str
    module: str
    """Its name, relative to this package."""
    help: str

    def load(self) -> ModuleType:
        """Import the module. Raises BenchError if a package that it needs is not installed."""
        try:
            return import_module(self.module, __package__)
        except ModuleNotFoundError as error:
            raise BenchError(f"{self.name} needs {error.name or error}: pip install 'slotcache[bench]'") from None


# A scenario is imported only when it is chosen, because scenarios need different packages.
_ALL = (
    Scenario("burst", ".scenarios.burst", "bursts of questions with overlapping documents"),
    Scenario("mtrag", ".scenarios.mtrag", "human multi-turn RAG conversations"),
    Scenario("agent", ".scenarios.agent", "an agent that reads files by tool calls"),
    Scenario("conversations", ".scenarios.conversations", "more conversations than slots"),
    Scenario("decode", ".scenarios.decoding", "tokens per second of many streams"),
    Scenario("step", ".scenarios.step", "time of a step outside llama.cpp"),
    Scenario("stall", ".scenarios.stall", "a long prefill among running streams"),
    Scenario("speculation", ".scenarios.speculation", "a search in stages, with a server that prefills along"),
    Scenario("fanout", ".scenarios.fanout", "one prompt many times at once"),
    Scenario("disk", ".scenarios.disk_tier", "KV on disk: what comes back, after a kill, with very many records"),
    Scenario("indexing", ".scenarios.indexing", "a running stream beside the index of a folder"),
    Scenario(
        "endurance", ".scenarios.endurance", "faults, rude clients and hours of mixed load beside well-behaved clients"
    ),
    Scenario("models", ".scenarios.swaps", "several models in turn on one device: what comes back after a swap"),
    Scenario("cached", ".scenarios.cached", "a prompt that is cached whole"),
    Scenario("front", ".scenarios.front", "the front before llama-server: documents reused, time to the first token"),
    Scenario("relay", ".scenarios.relaying", "what the front adds to a request and to a chunk"),
    Scenario("replicas", ".scenarios.replicas", "replicas on Ray Serve, with one router or another"),
    Scenario("paper", ".scenarios.paper", "the evaluations of the papers, in their shapes"),
    Scenario("answers", ".offline.answers", "what reuse does to answers, with trained weights, without a server"),
    Scenario("retrieval", ".offline.retrieval", "search over documents: recall, time of index and search, without a server"),
    Scenario("replacement", ".offline.replacement", "eviction policies for idle KV, simulated"),
    Scenario("queue", ".offline.queueing", "many requests that wait for little memory, simulated"),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario and print its report. Return the exit code.

    0: the scenario ran, even if a bar was missed. 1: requests failed that must not fail. 2: the scenario cannot run. 130:
    ctrl-C, SIGTERM or SIGHUP ended it.
    """
    with ends_in_order():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(arguments: Sequence[str]) -> int:
    kept = None
    try:
        chosen = next((name for name in arguments if name in SCENARIOS), None)
        module = SCENARIOS[chosen].load() if chosen else None
        args = _parser(chosen, module).parse_args(arguments)
        assert module is not None  # the parser takes no command line without a scenario
        about = machine.describe(getattr(args, "llama_server", None)) if args.json else {}
        kept = journal.begin(args.json, args.scenario, about) if args.json else None
        report = module.run(args)
        print(f"\n{report.text()}")
        if args.json:
            report.write(args.json, about)
            print(f"\nwritten to {args.json}")
        journal.end(is_finished=True)
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
        journal.end(is_finished=False)  # after a finished run there is no journal to end
        if kept is not None and kept.path.exists():
            print(f"what was measured before the end is in {kept.path}", file=sys.stderr)
    return int(report.has_failed)


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slotcache bench", description=__doc__, allow_abbrev=False)
    scenarios = parser.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    for name, scenario in SCENARIOS.items():
        subparser = scenarios.add_parser(name, help=scenario.help, allow_abbrev=False)
        if module is not None and name == chosen:
            module.add_arguments(subparser)
            subparser.add_argument("--json", type=Path, metavar="OUT", help="write everything measured to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
