"""`slotcache bench SCENARIO`: measure this server, and other servers beside it, over HTTP."""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType, ModuleType

from . import machine
from .error import BenchError, Skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """A subcommand. Its module has `add_arguments(parser)` and `run(args)`, which returns a Report."""

    module: str
    """Relative to this package."""
    help: str

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def load(self) -> ModuleType:
        """Import the module. Raises BenchError if a part of the project or a package that it needs is not installed."""
        try:
            return import_module(self.module, __package__)
        except ModuleNotFoundError as error:
            missing = error.name or str(error)
            if missing.startswith("slotcache."):
                raise BenchError(f"{self.name} needs {missing}: run it from a checkout of the repository") from None
            raise BenchError(f"{self.name} needs {missing}: pip install 'slotcache[bench]'") from None


# A scenario is imported when it is chosen: scenarios need different packages, and `quality` a folder outside the wheel.
_ALL = (
    Scenario(".scenarios.burst", "bursts of questions with overlapping documents"),
    Scenario(".scenarios.mtrag", "human multi-turn RAG conversations"),
    Scenario(".scenarios.agent", "an agent that reads files by tool calls"),
    Scenario(".scenarios.conversations", "more conversations than lanes"),
    Scenario(".scenarios.decode", "tokens per second of many streams"),
    Scenario(".scenarios.step", "time of a step outside llama.cpp"),
    Scenario(".scenarios.stall", "a long prefill among running streams"),
    Scenario(".scenarios.speculation", "a search in stages, with a server that prefills along"),
    Scenario(".scenarios.fanout", "one prompt many times at once"),
    Scenario(".scenarios.idle", "a request's speed beside idle KV"),
    Scenario(".scenarios.indexing", "a running stream beside the index of a folder"),
    Scenario(".scenarios.stress", "more clients than lanes, more prompts than cells"),
    Scenario(".scenarios.faults", "faults and bad clients beside well-behaved ones"),
    Scenario(".scenarios.soak", "mixed load on all routes for hours"),
    Scenario(".scenarios.history", "a history that grows by a document each turn"),
    Scenario(".scenarios.cached", "a prompt that is cached whole"),
    Scenario(".scenarios.equality", "greedy answers beside llama-server's, with and without a cache"),
    Scenario(".scenarios.front", "the front before llama-server: documents reused, time to the first token"),
    Scenario(".scenarios.relay", "what the front adds to a request and to a chunk"),
    Scenario(".scenarios.replicas", "replicas on Ray Serve, with one router or another"),
    Scenario(".scenarios.facts", "answers about files that an agent has read"),
    Scenario(".scenarios.quality", "answer quality of the embedded model"),
    Scenario(".offline.arrange", "time to choose an order and write the prompt"),
    Scenario(".offline.attention", "documents read separately: likelihood of human answers, without a server"),
    Scenario(".offline.residency", "cost of idle and moved KV, without a server"),
    Scenario(".offline.masks", "time of a grammar at each token, without a server"),
    Scenario(".offline.drafts", "drafts from the prompt: gain, loss and equal texts, without a server"),
    Scenario(".offline.retrieval", "search over documents: recall, time of index and search, without a server"),
    Scenario(".offline.replacement", "eviction policies for idle KV, simulated"),
    Scenario(".offline.fleet", "requests placed on replicas, simulated"),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario and print its report. Return the exit code.

    0: it ran, even if a bar was missed. 1: requests failed that must not. 2: it cannot run. 130: ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else argv
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        chosen = next((name for name in arguments if name in SCENARIOS), None)
        module = SCENARIOS[chosen].load() if chosen else None
        args = _parser(chosen, module).parse_args(arguments)
        assert module is not None  # the parser takes no command line without a scenario
        report = module.run(args)
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


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slotcache bench", description=__doc__, allow_abbrev=False)
    scenarios = parser.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    for name, scenario in SCENARIOS.items():
        subparser = scenarios.add_parser(name, help=scenario.help, allow_abbrev=False)
        if module is not None and name == chosen:
            module.add_arguments(subparser)
    return parser


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like ctrl-C, so that the servers of the benchmark are stopped.

    An event loop has a handler of its own for ctrl-C, which cancels its tasks.
    """
    ctrl_c = signal.getsignal(signal.SIGINT)
    (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(signum, frame)


if __name__ == "__main__":
    sys.exit(main())
