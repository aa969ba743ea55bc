"""Measures replicas on Ray Serve with different routers: by documents, at random, by characters."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..client import Client, Result, Run, drive
from ..comparison import Outcome, problems, table
from ..report import Bar, BenchError, Progress, Report, Table, mean
from ..server_api import ChatApi
from ..servers import HOST, Arm, bench_model, sampling
from ..trace import Query, burst

APP = "slotcache.front.ray_app:app"
DOCUMENTS, RANDOM, CHARACTERS = "by documents", "at random", "by characters"
ROUTERS: dict[str, str | None] = {
    DOCUMENTS: None,  # the application's own
    # Without a session in the request, this router hashes a random id.
    RANDOM: "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
    # `ray.serve.llm.request_router` has the same class, but needs vLLM or SGLang.
    CHARACTERS: "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter",
}
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
START = "import ray; ray.init('local', include_dashboard=False); from ray.serve.scripts import cli; cli()"
"""`serve run` with its own Ray, independent of any other Ray on this machine, and without the dashboard's ten processes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench replicas`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF to serve (default: the bench model, generated once)")
    add("--replicas", type=int, default=2, help="default: %(default)s")
    add("--queries", type=int, default=72, help="default: %(default)s")
    add("--regions", type=int, default=8, help="regions of documents (default: %(default)s)")
    add("--burst", type=int, default=10, help="queries on one region in a row (default: %(default)s)")
    add("--concurrency", type=int, default=4, help="clients at a time (default: %(default)s)")
    add("-c", "--ctx-size", type=int, default=16384, help="cells of each replica (default: %(default)s)")
    add("-np", "--parallel", type=int, default=4, help="slots of each replica (default: %(default)s)")
    add("--max-tokens", type=int, default=16, help="output of each request (default: %(default)s)")
    add("--seeds", type=int, default=5, help="traces, each driven in all arms (default: %(default)s)")
    add("--routers", default=",".join(ROUTERS), help="some of the arms (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Drive each trace in all arms. Only the router differs: all arms have the same engines, which order documents.

    An arm sends all traces to the same replicas, because Ray takes long to start. No document is in two traces.
    """
    if find_spec("ray") is None:
        raise BenchError("replicas needs ray: pip install 'slotcache[ray]'")
    unknown = [name for name in args.routers.split(",") if name not in ROUTERS]
    if unknown:
        raise BenchError(f"--routers {unknown[0]}: expected some of {', '.join(ROUTERS)}")
    traces = [burst(args.queries, args.regions, burst=args.burst, seed=seed) for seed in range(args.seeds)]
    with tempfile.TemporaryDirectory(prefix="slotcache-ray-") as folder:
        names, api = args.routers.split(","), ChatApi(documents_field=True)
        arms = [Arm(name, api, partial(_command, args, name, Path(folder))) for name in names]
        outcomes = [Outcome(arm, arm.measure(sampling(args), partial(_drive, traces, args, arm.name))) for arm in arms]
        data = {"arms": [outcome.data() for outcome in outcomes]}
    title = f"{args.replicas} replicas, {args.concurrency} clients, {args.queries} queries, {args.burst} in a row on one of "
    title += f"{args.regions} regions, {args.seeds} seeds"
    tables = [table(title, outcomes), _each(outcomes)]
    failed = problems(outcomes)
    return Report("replicas", tables, bars=_bars(outcomes), notes=failed, data=data, has_failed=bool(failed))


async def _drive(traces: Sequence[Sequence[Query]], args: argparse.Namespace, name: str, client: Client) -> tuple[Run, ...]:
    """Drive the traces one after the other, after all replicas are ready."""
    while await _number(client) < args.replicas:
        await asyncio.sleep(0.5)
    runs: list[Run] = []
    with Progress(name, sum(map(len, traces))) as progress:

        def show(_: int, result: Result) -> None:
            progress.step(result.error or f"TTFT {1000 * result.ttft:.0f} ms, {result.cached_tokens} cached")

        for queries in traces:
            runs.append(await drive(client, queries, args.concurrency, show))
    return tuple(runs)


async def _number(client: Client) -> int:
    """Return the number of replicas that are ready."""
    async with client.http.get("/v1/replicas") as answer:
        return len((await answer.json())["data"]) if answer.status == 200 else 0


def _each(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with the figures of each seed."""
    columns = ("arm", *(f"seed {seed}" for seed in range(len(outcomes[0].runs))), "mean")
    rows: list[tuple[Any, ...]] = []
    for figure, name in ((_share, "cached share"), (_latency, "latency s")):
        for outcome in outcomes:
            values = [figure(one) for one in outcome.runs]
            rows.append((f"{outcome.arm.name}, {name}", *values, mean(values)))
    return Table("each seed", columns, rows)


def _bars(outcomes: Sequence[Outcome]) -> list[Bar]:
    found = {outcome.arm.name: outcome for outcome in outcomes}
    if DOCUMENTS not in found:
        return []

    def ratio(figure: Callable[[Run], float], other: str) -> float:
        ours, theirs = ([figure(one) for one in found[name].runs] for name in (DOCUMENTS, other))
        return mean(ours) / mean(theirs)

    names = [name for name in (RANDOM, CHARACTERS) if name in found]
    bars = [Bar(1, f"cached share over that of placement {name}", ratio(_share, name), 1.1, at_least=True) for name in names]
    slower = [Bar(1, "mean latency over that of random placement", ratio(_latency, RANDOM), 1.0)] if RANDOM in found else []
    return bars + slower


def _share(run: Run) -> float:
    """Return the share of the prompts' tokens that were cached."""
    return sum(one.cached_tokens for one in run.answered) / max(sum(one.prompt_tokens for one in run.answered), 1)


def _latency(run: Run) -> float:
    return mean([one.latency for one in run.answered])


def _command(args: argparse.Namespace, router: str, folder: Path, port: int) -> list[str]:
    """Return the command of Ray Serve with one router. It needs a file, because Ray's proxy reads its port only there."""
    settings = {name: getattr(args, name) for name in ("replicas", "parallel", "ctx_size")}
    settings["model"] = str(bench_model(args).resolve())
    if ROUTERS[router]:
        settings["router"] = ROUTERS[router]
    app = {"name": "slotcache", "route_prefix": "/", "import_path": APP, "args": settings}
    file = folder / f"{port}.yaml"
    file.write_text(json.dumps({"http_options": {"host": HOST, "port": port}, "applications": [app]}))
    variables = [f"{name}={os.environ.get(name, value)}" for name, value in ENVIRONMENT.items()]
    return ["env", *variables, sys.executable, "-c", START, "run", str(file)]
