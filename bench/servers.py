"""The servers that a benchmark compares: their options, start and end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import parent_process
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, TypeVar
from urllib.request import ProxyHandler, Request, build_opener

from ..models.errors import ModelError
from ..slots.child import start_child, stop_child, tie
from .client import Client
from .journal import note
from .report import BenchError, ServerError
from .server_api import ChatApi, CompletionApi, Sampling, ServerApi
from .trace import Query

DATA_VARIABLE = "SLOTCACHE_DATA"
LLAMA_SLOTS = 4
BENCH_MODELS = {"dense": "bench", "hybrid": "bench-hybrid"}  # the shapes of the generated models


def add_options(parser: argparse.ArgumentParser, context: int = 16384, slots: int = 4, max_tokens: int = 16) -> None:
    """Add the options that scenarios share. The defaults depend on the scenario."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF to serve (default: the bench model, generated once)")
    text = "the model to generate: a Llama, or a hybrid like Qwen 3.5 (default: %(default)s)"
    add("--bench-model", choices=BENCH_MODELS, default="dense", help=text)
    add("--url", help="measure the server at this URL, and start none")
    add("--dialect", choices=("slotcache", "openai", "llama"), default="slotcache", help="API of the server at --url")
    add("--llama-server", metavar="PATH", help="llama-server to compare with; without it that arm is left out")
    add("-c", "--ctx-size", type=int, default=context, help="context of each server, tokens (default: %(default)s)")
    add("-np", "--parallel", type=int, default=slots, help="slots of slotcache (default: %(default)s)")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="threads of each server (default: %(default)s)")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="default: %(default)s")
    add("--repack", choices=("on", "off", "default"), default="default", help="weight repacking, the same in every arm")
    add("--max-tokens", type=int, default=max_tokens, help="output of each request (default: %(default)s)")
    add("--rounds", type=int, default=1, help="repeat all arms in turn, report medians (default: %(default)s)")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")
    add("--llama-args", default="", metavar="'...'", help="more flags for llama-server")


def add_clients(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of clients and the pause after each answer."""
    add = parser.add_argument
    add("--concurrency", type=int, default=1, help="clients at a time (default: %(default)s)")
    text = "seconds after each answer of a single client, in which the server may do idle work (default: %(default)s)"
    add("--pause", type=float, default=0.2, help=text)


def sampling(args: argparse.Namespace) -> Sampling:
    """Return the sampling of each request: greedy answers of the same length."""
    return Sampling(max_tokens=args.max_tokens)


def bench_model(args: argparse.Namespace) -> Path:
    """Return `--model`, or the bench model in the user's cache, generated on first use. Raises BenchError."""
    if args.model:
        if not args.model.is_file():
            raise BenchError(f"no model at {args.model}")
        return args.model
    try:  # imported only here: it needs a package that servers do not need
        random_models = import_module(".random_models", __package__)
    except ModuleNotFoundError as error:
        raise BenchError(
            f"the bench model needs {error.name}: pip install 'slotcache[bench]', or name one with -m"
        ) from None
    try:
        return random_models.built_in_model(name=BENCH_MODELS[getattr(args, "bench_model", "dense")])
    except ModelError as error:
        raise BenchError(error) from None


def llama_slots(args: argparse.Namespace) -> int | None:
    """Return the number of slots for llama-server; None for its own default.

    By default, its slots share the context. With an explicit number, each slot has a part of the context, which is too
    short for these prompts.
    """
    return None if args.parallel == LLAMA_SLOTS else args.parallel


def llama_server(args: argparse.Namespace) -> str | None:
    """Return `--llama-server`, or None if it is not given. Raises BenchError if it is not a program."""
    if args.llama_server and shutil.which(args.llama_server) is None:
        raise BenchError(f"--llama-server {args.llama_server}: not a program that can be run")
    return args.llama_server


# ---- Server -------------------------------------------------------------------------------------------------------------
# A server process. It is started for one arm of a benchmark, polled until it is ready, and stopped.

HOST = "127.0.0.1"
TAIL_LINES = 20
CRASH = "Fatal Python error: "  # the start of a crash report, before the stacks of all threads


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server. slots: None for the server's own default. extra: more flags."""

    model: Path
    context: int = 16384
    slots: int | None = None
    threads: int = os.cpu_count() or 1
    flash_attention: str = "auto"
    repack: str = "default"
    """`on` or `off`, or `default` for the engine's own default."""
    extra: tuple[str, ...] = ()

    def flags(self, port: int) -> list[str]:
        """Return the flags that both servers know."""
        slots = ["-np", str(self.slots)] if self.slots else []
        flags = ["--host", HOST, "--port", str(port), "-m", str(self.model), "-c", str(self.context), *slots]
        return [*flags, "-t", str(self.threads), "-fa", self.flash_attention, *self.extra]


def llama_server_command(binary: str, options: ServerOptions, port: int) -> list[str]:
    """Return the command of llama-server with these flags, without its web page."""
    return [binary, *options.flags(port), *llama_repack(options.repack), "--no-webui"]


def llama_repack(repack: str) -> list[str]:
    """Return llama.cpp's flag for `repack`. Without a flag, llama.cpp's programs repack weights."""
    return {"on": ["--repack"], "off": ["--no-repack"]}.get(repack, [])


def slotcache_command(options: ServerOptions, port: int) -> list[str]:
    """Return the command of `slotcache serve` from this Python environment."""
    repack = [] if options.repack == "default" else ["--repack", options.repack]
    return [*own_command(), "serve", *options.flags(port), *repack]


def own_command() -> list[str]:
    """Return the words that start slotcache. In a bare checkout they run the module, which must be importable."""
    script = shutil.which("slotcache", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-m", "slotcache.server.cli"]


def tie_to_parent() -> None:
    """Make this multiprocessing process end when its parent ends."""
    if (parent := parent_process()) is not None:
        tie(os.getpid(), parent.sentinel)


def free_port() -> int:
    """Return a port on which no program listens now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Server:
    """Runs `command` as a context manager. Entering waits until `/health` answers 200.

    Raises ServerError with the end of the log if the process ends first, or if `deadline` seconds pass.
    """

    def __init__(self, command: Sequence[str], port: int, deadline: float = 300.0) -> None:
        self.command, self.deadline = list(command), deadline
        self.url = f"http://{HOST}:{port}"
        with tempfile.NamedTemporaryFile(prefix="slotcache-bench-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None if the process does not run."""
        return self._process.pid if self._process else None

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll() if self._process else None

    @property
    def memory(self) -> int:
        """Bytes of resident memory; 0 if the process has ended."""
        return resident(self.pid) if self.pid else 0

    def __enter__(self) -> Server:
        with self.log.open("wb") as log:
            try:
                # In a new session, ctrl-C reaches only the benchmark, which then stops the server in order.
                self._process = start_child(self.command, is_asked=True, stdout=log, stderr=log, start_new_session=True)
            except OSError as error:
                raise ServerError(f"cannot start {self.command[0]}: {error}") from error
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process and (code := self._process.poll()) is not None:
            print(self._failure(f"{_ended(code)} while it was measured"), file=sys.stderr)
        self.stop()
        if error is None or kind is KeyboardInterrupt:
            self.log.unlink(missing_ok=True)
        else:
            print(f"the server's log is {self.log}", file=sys.stderr)

    def stop(self, patience: float = 10.0) -> None:
        """Ask the process to end, and kill it after `patience` seconds."""
        process, self._process = self._process, None
        if process is not None:
            stop_child(process, patience)

    def tail(self) -> str:
        """Return the last lines of the log. If there is a crash report, return all of it."""
        lines = self.log.read_text(errors="replace").splitlines()
        crash = next((at for at, line in enumerate(lines) if line.startswith(CRASH)), len(lines))
        return "\n".join(lines[min(crash, max(len(lines) - TAIL_LINES, 0)) :])

    def _wait(self) -> None:
        assert self._process is not None
        started, shown = monotonic(), 0
        while not self._is_healthy():
            waited = monotonic() - started
            if (code := self._process.poll()) is not None:
                raise ServerError(self._failure(f"{_ended(code)} before it was ready"))
            if waited > self.deadline:
                raise ServerError(self._failure(f"was not ready after {self.deadline:.0f} s"))
            if waited - shown >= 5:
                shown = int(waited)
                print(f"waiting for {Path(self.command[0]).name}: {shown} s", file=sys.stderr, flush=True)
            sleep(0.05)  # a server may take minutes to load

    def _is_healthy(self) -> bool:
        direct = build_opener(ProxyHandler({}))  # no proxy is needed for a server on this machine
        with contextlib.suppress(OSError), direct.open(f"{self.url}/health", timeout=2) as answer:
            return answer.status == 200
        return False

    def _failure(self, what: str) -> str:
        return f"{' '.join(self.command)}\n{what}; the end of its log ({self.log}):\n{self.tail()}"


def events(url: str, body: Mapping[str, Any], timeout: float) -> Iterator[Any]:
    """Yield the events of a streamed answer. Raises URLError and TimeoutError."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=timeout) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _ended(code: int) -> str:
    """Describe how a process ended: by its exit code, or by the name of a signal."""
    if code >= 0:
        return f"ended with code {code}"
    # Some machines report AMX but forbid its use. Repacked weights use AMX.
    hint = " (try --repack off)" if -code == signal.SIGILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


# ---- The arms of a comparison: a server, which is started for each measurement, and its API. ----------------------------

T = TypeVar("T")

WARM_UP = Query("warm-up", 1, "Say hello.")
"""Sent once to every server and not counted, because the first request of a process is slow."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison.

    command: returns the server's command for a port; None if a server already runs at `url`.
    ahead: queries that are sent before the measurement.
    """

    name: str
    api: ServerApi
    command: Callable[[int], list[str]] | None = None
    url: str = ""
    ahead: tuple[Query, ...] = ()

    def measure(self, sampling: Sampling, work: Callable[[Client], Awaitable[T]]) -> T:
        """Start the server, call `work` with a client, and stop the server. Return the result of `work`."""
        with self.up() as url:
            return asyncio.run(self.work(url, sampling, work))

    @contextmanager
    def up(self) -> Iterator[str]:
        """Yield the server's URL while it runs."""
        if self.command is None:
            yield self.url
            return
        port = free_port()
        with Server(self.command(port), port) as server:
            yield server.url

    def describe(self) -> dict[str, Any]:
        """Return the arm as JSON values."""
        server = {"url": self.url} if self.command is None else {"command": shlex.join(self.command(0))}
        return {"name": self.name, "dialect": repr(self.api), **server}

    async def work(self, url: str, sampling: Sampling, work: Callable[[Client], Awaitable[T]]) -> T:
        """Send the warm-up and the queries of `ahead` to the server at `url`, then call `work` with the client."""
        async with Client(url, self.api, sampling) as client:
            for query in (WARM_UP, *self.ahead):
                if error := (await client.ask(query)).error:
                    raise BenchError(f"{self.name} at {url}: {error}")
            client.name = self.name  # from now on, the journal has its results
            return await work(client)


def arms_for(
    args: argparse.Namespace,
    orders: Sequence[str] = ("auto",),
    llama_slots: int | None = None,
    slotcache_flags: Sequence[str] = (),
) -> list[Arm]:
    """Return an arm of slotcache for each document order, and an arm of llama-server if its path is given.

    With `--url`, there is only the arm of the server that runs there.
    """
    extra = {} if getattr(args, "order_hint", True) else {"order_hint": False}
    if args.url:
        return [Arm(args.url, _api(args.dialect, {"document_order": orders[0]} | extra), url=args.url)]
    model, binary = bench_model(args), llama_server(args)
    own = options_of(args, model, args.parallel, (*slotcache_flags, *shlex.split(args.slotcache_args)))
    names = {order: "slotcache" if order == "auto" else f"slotcache, {order} order" for order in orders}
    apis = {order: _api("slotcache", {"document_order": order} | extra) for order in orders}
    arms = [Arm(names[order], apis[order], lambda port: slotcache_command(own, port)) for order in orders]
    if binary:
        theirs = options_of(args, model, llama_slots, shlex.split(args.llama_args))
        arms.append(Arm("llama-server", CompletionApi(), lambda port: llama_server_command(binary, theirs, port)))
    return arms


def separate_arms(args: argparse.Namespace, ahead: Sequence[Query] = ()) -> list[Arm]:
    """Return the arms to compare separate documents: slotcache with separate attention, then usual arms.

    `--joint` adds the usual slotcache. `--cache-reuse` adds a llama-server that also moves KV, but only within a slot and
    only forwards.

    ahead: queries whose documents the first arm reads before the measurement.
    """
    joint, *theirs = arms_for(args, llama_slots=args.parallel if args.concurrency > 1 else None)
    api = ChatApi(documents_field=True, extra={"documents_attention": "separate"})
    arms = [replace(joint, name="slotcache, separate", api=api, ahead=tuple(ahead))]
    if args.joint and not args.url:
        arms.append(joint)
    if args.cache_reuse:
        flags = copy(args)
        flags.llama_args += f" --cache-reuse {args.cache_reuse}"
        *_, moving = arms_for(flags, llama_slots=args.parallel if args.concurrency > 1 else None)
        theirs.append(replace(moving, name=f"llama-server, --cache-reuse {args.cache_reuse}"))
    return [*arms, *theirs]


def in_rounds(arms: Sequence[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """Yield the number of each round with every arm. Every other round is in reverse order, so that a machine whose speed
    drifts favours no arm.
    """
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            print(f"round {number + 1} of {rounds}: {arm.name}", file=sys.stderr, flush=True)
            note(arm=arm.name, begins_round=number + 1)
            yield number, arm


def measured_in_rounds(
    arms: Sequence[Arm], args: argparse.Namespace, work: Callable[[Client, argparse.Namespace, int], Awaitable[T]]
) -> dict[str, list[T]]:
    """Measure every arm once in each of `--rounds`. work: called with a client, the options and the round's number."""
    found: dict[str, list[T]] = {}
    for number, arm in in_rounds(arms, args.rounds):
        one = arm.measure(sampling(args), lambda client, number=number: work(client, args, number))
        found.setdefault(arm.name, []).append(one)
    return found


def _api(name: str, extra: dict[str, Any]) -> ServerApi:
    if name == "llama":
        return CompletionApi()
    return ChatApi(documents_field=True, extra=extra) if name == "slotcache" else ChatApi()


def options_of(args: argparse.Namespace, model: Path, slots: int | None, extra: Sequence[str]) -> ServerOptions:
    """Return the options of a server by the shared options of the command line."""
    same: dict[str, Any] = {"flash_attention": args.flash_attn, "repack": args.repack, "extra": tuple(extra)}
    return ServerOptions(model, args.ctx_size, slots, args.threads, **same)
