"""`slotcache order` in front of one llama-server, and of two behind nginx: documents reused, time to the first token."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..comparison import Outcome, compare, pace, problems, table
from ..report import Bar, BenchError, Report, mean
from ..server_api import ChatApi
from ..servers import (
    HOST,
    Arm,
    Server,
    ServerOptions,
    add_clients,
    add_options,
    bench_model,
    free_port,
    llama_server,
    llama_server_command,
    own_command,
)
from ..trace import burst

DIRECT, ORDERED = "llama-server", "slotcache order, llama-server"
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
"""As docs/scale.md has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronted(Arm):
    """Engines with programs in front of them. engines: their number; order: the front's `--document-order`; nginx: its path,
    for more than one engine.
    """

    engines: int = 1
    order: str = "auto"
    nginx: str = ""

    @contextmanager
    def up(self) -> Iterator[str]:
        """Yield the front's URL while all run."""
        assert self.command is not None
        with ExitStack() as stack:
            ports = [free_port() for _ in range(self.engines)]
            servers = [stack.enter_context(Server(self.command(port), port)) for port in ports]
            url = servers[0].url
            if self.nginx:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotcache-nginx-")))
                url = stack.enter_context(_proxy(self.nginx, ports, folder)).url
            port = free_port()
            command = [*own_command(), "order", "--upstream", url, "--host", HOST, "--port", str(port)]
            yield stack.enter_context(Server([*command, "--document-order", self.order], port)).url


def _proxy(nginx: str, ports: Sequence[int], folder: Path) -> Server:
    port = free_port()
    servers = " ".join(f"server {HOST}:{one};" for one in ports)
    file = folder / f"{port}.conf"
    file.write_text(NGINX.format(folder=folder, host=HOST, port=port, servers=servers))
    return Server([nginx, "-c", str(file), "-p", str(folder)], port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench front`."""
    add_options(parser)
    add_clients(parser)
    add = parser.add_argument
    add("--queries", type=int, default=100, help="default: %(default)s")
    add("--regions", type=int, default=50, help="regions of documents (default: %(default)s)")
    add("-k", type=int, default=5, help="documents of a query (default: %(default)s)")
    add("--burst", type=int, default=10, help="queries on one region in a row (default: %(default)s)")
    add("--overlap", type=float, default=0.6, help="share of documents kept from query to query (default: %(default)s)")
    add("--seed", type=int, default=1)
    add("--nginx", metavar="PATH", help="nginx, which hashes the affinity header; without it those arms are left out")


def run(args: argparse.Namespace) -> Report:
    """Send the same queries to llama-server as a client without a front would, and through the front."""
    if not (binary := llama_server(args)):
        raise BenchError("front needs --llama-server PATH")
    queries = burst(args.queries, args.regions, burst=args.burst, k=args.k, overlap=args.overlap, seed=args.seed)
    options = ServerOptions(
        bench_model(args),
        context=args.ctx_size,
        threads=args.threads,
        flash_attention=args.flash_attn,
        repack=args.repack,
        extra=tuple(args.llama_args.split()),
    )

    def engine(port: int) -> list[str]:
        return llama_server_command(binary, options, port)

    plain, fields = ChatApi(), ChatApi(documents_field=True)
    pairs = [[Arm(DIRECT, plain, engine), Fronted(ORDERED, fields, engine)]]
    if args.nginx:
        two = [(TWO_AS_FOUND, "retrieval"), (TWO, "auto")]
        pairs.append([Fronted(name, fields, engine, engines=2, order=order, nginx=args.nginx) for name, order in two])
    outcomes = [outcome for pair in pairs for outcome in compare(pair, queries, args)]
    title = (
        f"front: {args.queries} queries, {args.burst} in a row on one of {args.regions} regions, {pace(args)}, k = {args.k}"
    )
    bars = [bar for before, after in zip(outcomes[::2], outcomes[1::2], strict=True) for bar in _bars(before, after, args.k)]
    data = {"arms": [outcome.data() for outcome in outcomes]}
    return Report("front", [table(title, outcomes)], bars=bars, notes=problems(outcomes), data=data)


def _bars(before: Outcome, after: Outcome, k: int) -> list[Bar]:
    name = f"{after.arm.name}: "
    reused = _documents(after, k) / _documents(before, k)
    p50 = after.ttft.p50 / before.ttft.p50
    return [
        Bar(3, f"{name}documents reused over those of {before.arm.name}", reused, 2.5, at_least=True, unit="x"),
        Bar(3, f"{name}TTFT p50 over that of {before.arm.name}", p50, 0.85, unit="x"),
    ]


def _documents(outcome: Outcome, k: int) -> float:
    """Return the documents reused a query, by tokens: the text in front of them is what the poorest hit has cached."""
    results = [result for run in outcome.runs for result in run.answered]
    front = min((result.cached_tokens for result in results if result.cached_tokens), default=0)
    return mean([k * max(result.cached_tokens - front, 0) / (result.prompt_tokens - front) for result in results])
