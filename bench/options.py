"""The options every scenario shares: which servers, which model, how often."""

import argparse
import os
import shutil
import sys
from hashlib import sha256
from pathlib import Path

from ..models import generate
from .dialect import Sampling
from .error import BenchError

DATA_VARIABLE = "SLOTCACHE_DATA"
LLAMA_SLOTS = 4


def add_options(parser: argparse.ArgumentParser, context: int = 16384, lanes: int = 4, max_tokens: int = 16) -> None:
    """Adds the shared options, with a scenario's own defaults."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF to serve (default: the bench model, generated once)")
    add("--url", help="measure the server that runs there, and start none")
    add("--dialect", choices=("slotcache", "openai", "llama"), default="slotcache", help="what --url speaks")
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
    """How many clients there are, and how long they read."""
    add = parser.add_argument
    add("--concurrency", type=int, default=1, help="clients at a time (default: %(default)s)")
    text = "seconds for which one client reads an answer, and a server may do something ahead (default: %(default)s)"
    add("--pause", type=float, default=0.2, help=text)


def sampling(args: argparse.Namespace) -> Sampling:
    """What each request asks for: equally long greedy answers."""
    return Sampling(max_tokens=args.max_tokens)


def bench_model(args: argparse.Namespace) -> Path:
    """`--model`, else the bench model from the user's cache, which is generated when it is not there yet."""
    if args.model:
        if not args.model.is_file():
            raise BenchError(f"no model at {args.model}")
        return args.model
    shape = generate.SHAPES["bench"]
    version = sha256(repr(shape).encode() + Path(generate.__file__).read_bytes()).hexdigest()[:12]
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotcache" / f"bench-{version}.gguf"
    if not path.is_file():
        print(f"generating the bench model {path}", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        generate.generate(path, shape)
    return path


def llama_lanes(args: argparse.Namespace) -> int | None:
    """None for as many slots as llama-server has by default: they share its context, and one that is told gives each a
    part of it, too short for what slotcache's lanes are asked."""
    return None if args.parallel == LLAMA_SLOTS else args.parallel


def llama_server(args: argparse.Namespace) -> str | None:
    """The llama-server to compare with, checked; None where none was asked for."""
    if args.llama_server and shutil.which(args.llama_server) is None:
        raise BenchError(f"--llama-server {args.llama_server}: not a program that can be run")
    return args.llama_server
