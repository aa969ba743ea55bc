"""Measures `slotcache order` before a llama-server, before one that reports no tokens, and before nginx with two of them."""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from ..client import Client
from ..comparison import Outcome, compare, pace, problems, table
from ..report import Bar, BenchError, Report, Table, mean, median
from ..server_api import ChatApi
from ..servers import (
    HOST,
    Arm,
    Server,
    add_clients,
    add_options,
    bench_model,
    free_port,
    llama_server,
    llama_server_command,
    options_of,
    own_command,
    sampling,
)
from ..trace import Query, burst, prose, question
from .relaying import copy, program

DIRECT, ORDERED = "llama-server", "slotcache order, llama-server"
MUTE = "slotcache order, llama-server that tells no tokens"
MOST_ASKED = 10  # most questions after the engine has lost its cache
TWO_AS_FOUND, TWO = "retrieval order, nginx, two llama-servers", "slotcache order, nginx, two llama-servers"
NGINX = """daemon off;
pid {folder}/{port}.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder};
    proxy_temp_path {folder};
    fastcgi_temp_path {folder};
    uwsgi_temp_path {folder};
    scgi_temp_path {folder};
    upstream engines {{
        hash $http_x_session_id consistent;
        {servers}
    }}
    server {{
        listen {host}:{port};
        client_max_body_size 32m;
        location / {{ proxy_pass http://engines; proxy_buffering off; proxy_read_timeout 600s; }}
    }}
}}
"""
"""The configuration in docs/scale.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronted(Arm):
    """Engines with programs before them.

    engines: the number of engines.
    order: the front's `--document-order`; empty: no front.
    nginx: the path of nginx, for more than one engine.
    is_mute: whether the front gets no token counts.
    computed: the prompt tokens that the engines computed in each round.
    """

    engines: int = 1
    order: str = "auto"
    nginx: str = ""
    is_mute: bool = False
    computed: list[float] = field(default_factory=list[float])

    @contextmanager
    def up(self) -> Iterator[str]:
        """Yield the front's URL while all programs run."""
        assert self.command is not None
        with ExitStack() as stack:
            ports = [free_port() for _ in range(self.engines)]
            servers = [stack.enter_context(Server(self.command(port), port)) for port in ports]
            url = servers[0].url
            if self.nginx:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotcache-nginx-")))
                url = stack.enter_context(_proxy(self.nginx, ports, folder)).url
            if self.is_mute:
                url = f"http://{HOST}:{stack.enter_context(program(copy, ports[0], 1))}"
            if self.order:
                url = stack.enter_context(_front(url, self.order)).url
            yield url
            self.computed.append(sum(_metric(server.url, "llamacpp:prompt_tokens_total") for server in servers))


def _front(upstream: str, order: str) -> Server:
    port = free_port()
    command = [*own_command(), "order", "--upstream", upstream, "--host", HOST, "--port", str(port)]
    return Server([*command, "--document-order", order], port)


def _metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics") as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.M)
    return float(found[1]) if found else 0.0


def _proxy(nginx: str, ports: Sequence[int], folder: Path) -> Server:
    port = free_port()
    servers = " ".join(f"server {HOST}:{one};" for one in ports)
    file = folder / f"{port}.conf"
    file.write_text(NGINX.format(folder=folder, host=HOST, port=port, servers=servers))
    return Server([nginx, "-c", str(file), "-p", str(folder)], port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench front`."""
    add_options(parser)
    add_clients(parser)
    add = parser.add_argument
    add("--queries", type=int, default=100, help="default: %(default)s")
    add("--regions", type=int, default=50, help="regions of documents (default: %(default)s)")
    add("-k", type=int, default=5, help="documents of a query (default: %(default)s)")
    add("--burst", type=int, default=10, help="queries on one region in a row (default: %(default)s)")
    add("--overlap", type=float, default=0.6, help="share of documents kept from query to query (default: %(default)s)")
    add("--seed", type=int, default=1)
    add("--nginx", metavar="PATH", help="nginx, for arms with two engines; without it, these arms are left out")


def run(args: argparse.Namespace) -> Report:
    """Send the same queries directly to llama-server, and through the front."""
    if not (binary := llama_server(args)):
        raise BenchError("front needs --llama-server PATH")
    queries = burst(args.queries, args.regions, burst=args.burst, k=args.k, overlap=args.overlap, seed=args.seed)
    options = options_of(args, bench_model(args), None, args.llama_args.split())

    def engine(port: int) -> list[str]:
        return [*llama_server_command(binary, options, port), "--metrics"]

    plain, fields = ChatApi(), ChatApi(documents_field=True)
    one = [
        Fronted(DIRECT, plain, engine, order=""),
        Fronted(ORDERED, fields, engine),
        Fronted(MUTE, fields, engine, is_mute=True),
    ]
    outcomes = compare(one, queries, args)
    bars = _bars(outcomes[0], outcomes[1], args.k)
    if args.nginx:
        names = [(TWO_AS_FOUND, "retrieval"), (TWO, "auto")]
        two = [Fronted(name, fields, engine, engines=2, order=order, nginx=args.nginx) for name, order in names]
        outcomes += (found := compare(two, queries, args))
        bars += _bars(found[0], found[1], args.k)
    title = f"front: {args.queries} queries, {args.burst} in a row on one of {args.regions} regions, "
    title += f"{pace(args)}, k = {args.k}"
    number = _found_out(args, engine)
    computed = [median(arm.computed) for arm in one]
    name = "gain in computed tokens where the engine tells none, over where it does"
    bars.append(Bar(6, name, _gain(computed), 0.9, at_least=True))
    bars.append(Bar(6, "questions until a lost cache is found out, where the engine tells nothing", number, 3))
    rows = [(arm.name, round(tokens)) for arm, tokens in zip(one, computed, strict=True)]
    counted = Table("prompt tokens that the engine computed, as it counts them", ("arm", "tokens"), rows)
    data = {"arms": [outcome.data() for outcome in outcomes], "computed": computed, "asked": number}
    return Report("front", [table(title, outcomes), counted], bars=bars, notes=problems(outcomes), data=data)


def _gain(computed: Sequence[float]) -> float:
    """Return the front's saving with a mute engine over its saving with a usual one.

    computed: the computed tokens without the front, with it before a usual engine, and with it before a mute engine.
    """
    direct, ordered, mute = computed
    return (direct - mute) / max(direct - ordered, 1)


def _found_out(args: argparse.Namespace, engine: Callable[[int], list[str]]) -> int:
    """Restart a mute engine. Return how many questions the front needs to notice that the cache is empty."""
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(Server(engine(port), port))
        front = stack.enter_context(_front(f"http://{HOST}:{stack.enter_context(program(copy, port, 1))}", "auto"))

        async def ask(names: Sequence[str]) -> None:
            async with Client(front.url, ChatApi(documents_field=True), sampling(args)) as client:
                for name in names:
                    documents = tuple((f"{name[0]}{at}", prose(f"{name[0]} {at}", 160)) for at in range(args.k))
                    (await client.ask(Query(name, 1, question(name), documents))).answered()

        asyncio.run(ask([f"{letter} cold" for letter in "abcde"]))
        asyncio.run(ask([f"e {number}" for number in range(3)]))
        first.stop()
        stack.enter_context(Server(engine(port), port))
        for number in range(MOST_ASKED):
            asyncio.run(ask([f"e again {number}"]))
            if _metric(front.url, "slotcache_order_stale_total"):
                return number + 1
    return MOST_ASKED + 1


def _bars(before: Outcome, after: Outcome, k: int) -> list[Bar]:
    name = f"{after.arm.name}: "
    reused = _documents(after, k) / max(_documents(before, k), 0.01)
    p50 = after.ttft.p50 / before.ttft.p50
    return [
        Bar(3, f"{name}documents reused over those of {before.arm.name}", reused, 2.5, at_least=True, unit="x"),
        Bar(3, f"{name}TTFT p50 over that of {before.arm.name}", p50, 0.85, unit="x"),
    ]


def _documents(outcome: Outcome, k: int) -> float:
    """Return the mean number of documents that a query reused, estimated from tokens.

    The smallest number of cached tokens is taken as the length of the text before the documents.
    """
    results = [result for run in outcome.runs for result in run.answered]
    front = min((result.cached_tokens for result in results if result.cached_tokens), default=0)
    return mean([k * max(result.cached_tokens - front, 0) / (result.prompt_tokens - front) for result in results])
