"""The options that all scenarios share: servers, model, repetitions."""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..models import generate
from ..models.shapes import SHAPES, Shape
from .dialect import Sampling
from .error import BenchError

DATA_VARIABLE = "SLOTCACHE_DATA"
LLAMA_SLOTS = 4
BENCH_MODELS = {"dense": "bench", "hybrid": "bench-hybrid"}  # the shapes of the generated models


class _Undecided(Shape):
    """A model whose last layer is zero, so that all texts have the same score."""

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, 0 * values if name == "output_norm.weight" else values) for name, values in super().arrays())


RANKER = _Undecided(layers=2, width=128, heads=4, kv_heads=4, feed_forward=512, vocabulary=4096, merges=3000)


def add_options(parser: argparse.ArgumentParser, context: int = 16384, lanes: int = 4, max_tokens: int = 16) -> None:
    """Add the shared options, with a scenario's own defaults."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF to serve (default: the bench model, generated once)")
    text = "the one that is generated: a Llama, or a hybrid of the Qwen 3.5 kind (default: %(default)s)"
    add("--bench-model", choices=BENCH_MODELS, default="dense", help=text)
    add("--url", help="measure the server that runs there, and start none")
    add("--dialect", choices=("slotcache", "openai", "llama"), default="slotcache", help="API of the server at --url")
    add("--llama-server", metavar="PATH", help="llama-server to compare with; without it that arm is left out")
    add("-c", "--ctx-size", type=int, default=context, help="context of each server, tokens (default: %(default)s)")
    add("-np", "--parallel", type=int, default=lanes, help="lanes of slotcache (default: %(default)s)")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="threads of each server (default: %(default)s)")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="default: %(default)s")
    add("--repack", choices=("on", "off", "default"), default="default", help="weight repacking, the same in every arm")
    add("--max-tokens", type=int, default=max_tokens, help="output of each request (default: %(default)s)")
    add("--rounds", type=int, default=1, help="repeat all arms in turn, report medians (default: %(default)s)")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")
    add("--llama-args", default="", metavar="'...'", help="more flags for llama-server")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def add_clients(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of clients and the pause after each answer."""
    add = parser.add_argument
    add("--concurrency", type=int, default=1, help="clients at a time (default: %(default)s)")
    text = "seconds in which one client reads an answer and the server may do idle work (default: %(default)s)"
    add("--pause", type=float, default=0.2, help=text)


def sampling(args: argparse.Namespace) -> Sampling:
    """Return the sampling of each request: greedy answers of the same length."""
    return Sampling(max_tokens=args.max_tokens)


def bench_model(args: argparse.Namespace) -> Path:
    """Return `--model`, else the bench model in the user's cache, generated on first use. Raises BenchError."""
    if args.model:
        if not args.model.is_file():
            raise BenchError(f"no model at {args.model}")
        return args.model
    name = BENCH_MODELS[getattr(args, "bench_model", "dense")]
    return _generated(name, SHAPES[name])


def ranker_model() -> Path:
    """Return a reranker of TinyBERT's size. It finds all texts equal: only its time counts."""
    return _generated("ranker", RANKER)


def _generated(name: str, shape: Shape) -> Path:
    """Return a model in the user's cache, generated on first use."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotcache"
    path = folder / f"{name}-{generate.version_of(shape)}.gguf"
    if not path.is_file():
        print(f"generating the {name} model {path}", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        generate.generate(path, shape)
    return path


def llama_lanes(args: argparse.Namespace) -> int | None:
    """Return the slots to ask of llama-server; None for its own default number.

    By default its slots share the context. With an explicit number each slot gets a part, too short for these prompts.
    """
    return None if args.parallel == LLAMA_SLOTS else args.parallel


def llama_server(args: argparse.Namespace) -> str | None:
    """Return the llama-server to compare with, None without `--llama-server`. Raises BenchError if it is not a program."""
    if args.llama_server and shutil.which(args.llama_server) is None:
        raise BenchError(f"--llama-server {args.llama_server}: not a program that can be run")
    return args.llama_server
