"""The arms of a comparison: a server, started fresh for each measurement, and its dialect."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .client import Client
from .dialect import ChatDialect, CompletionDialect, Dialect, Sampling
from .error import BenchError
from .options import bench_model, llama_server
from .server import Server, ServerOptions, free_port, llama_server_command, slotcache_command
from .trace import Query

T = TypeVar("T")

WARM_UP = Query("warm-up", 1, "Say hello.")
"""Sent once to every server, uncounted: the first request of a process pays for its start."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison. command: the server's command line for a port; None for a server that runs at `url`.

    ahead: queries that are sent before the measurement.
    """

    name: str
    dialect: Dialect
    command: Callable[[int], list[str]] | None = None
    url: str = ""
    ahead: tuple[Query, ...] = ()

    def measure(self, sampling: Sampling, work: Callable[[Client], Awaitable[T]]) -> T:
        """Start the server, run `work` with a client of it, stop the server."""
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
        return {"name": self.name, "dialect": repr(self.dialect), **server}

    async def work(self, url: str, sampling: Sampling, work: Callable[[Client], Awaitable[T]]) -> T:
        """Run `work` with a client of the server at `url`, after one uncounted request, and those that are sent ahead."""
        async with Client(url, self.dialect, sampling) as client:
            for query in (WARM_UP, *self.ahead):
                if error := (await client.ask(query)).error:
                    raise BenchError(f"{self.name} at {url}: {error}")
            return await work(client)


def arms_for(
    args: argparse.Namespace,
    orders: Sequence[str] = ("auto",),
    llama_lanes: int | None = None,
    slotcache_flags: Sequence[str] = (),
) -> list[Arm]:
    """Return slotcache once for each document order, and llama-server if its path is given; with `--url` only one arm."""
    extra = {} if getattr(args, "order_hint", True) else {"order_hint": False}
    if args.url:
        return [Arm(args.url, _dialect(args.dialect, {"document_order": orders[0]} | extra), url=args.url)]
    model, binary = bench_model(args), llama_server(args)
    own = _options(args, model, args.parallel, (*slotcache_flags, *shlex.split(args.slotcache_args)))
    arms = [
        Arm(
            "slotcache" if order == "auto" else f"slotcache, {order} order",
            _dialect("slotcache", {"document_order": order} | extra),
            lambda port: slotcache_command(own, port),
        )
        for order in orders
    ]
    if binary:
        theirs = _options(args, model, llama_lanes, shlex.split(args.llama_args))
        arms.append(Arm("llama-server", CompletionDialect(), lambda port: llama_server_command(binary, theirs, port)))
    return arms


def separate_arms(args: argparse.Namespace, ahead: Sequence[Query] = ()) -> list[Arm]:
    """Return slotcache with documents read separately, slotcache as it is, and llama-server with both of its ways.

    ahead: queries whose documents the first arm reads before the measurement. `--cache-reuse` lets llama-server move KV,
    too, but only that of the same slot, and forwards.
    """
    joint, *theirs = arms_for(args, llama_lanes=args.parallel if args.concurrency > 1 else None)
    dialect = ChatDialect(documents_field=True, extra={"documents_attention": "separate"})
    arms = [replace(joint, name="slotcache, separate", dialect=dialect, ahead=tuple(ahead))]
    if args.joint and not args.url:
        arms.append(joint)
    if args.cache_reuse:
        flags = copy(args)
        flags.llama_args += f" --cache-reuse {args.cache_reuse}"
        *_, moving = arms_for(flags, llama_lanes=args.parallel if args.concurrency > 1 else None)
        theirs.append(replace(moving, name=f"llama-server, --cache-reuse {args.cache_reuse}"))
    return [*arms, *theirs]


def in_rounds(arms: Sequence[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """Yield every arm once a round, backwards in every other round, so that a drifting machine speed favours no arm."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            print(f"round {number + 1} of {rounds}: {arm.name}", file=sys.stderr, flush=True)
            yield number, arm


def _dialect(name: str, extra: dict[str, Any]) -> Dialect:
    if name == "llama":
        return CompletionDialect()
    return ChatDialect(documents_field=True, extra=extra) if name == "slotcache" else ChatDialect()


def _options(args: argparse.Namespace, model: Any, lanes: int | None, extra: Sequence[str]) -> ServerOptions:
    return ServerOptions(
        model,
        context=args.ctx_size,
        lanes=lanes,
        threads=args.threads,
        flash_attention=args.flash_attn,
        repack=args.repack,
        extra=tuple(extra),
    )
