"""Measures the time that `slotcache order` adds to requests and chunks, compared with a proxy that copies bytes."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

from ..journal import note
from ..report import Bar, Report, Table, median
from ..servers import HOST, Server, free_port, own_command, tie_to_parent

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
LAST = b"0\r"  # the line before the end of a chunked answer
STAMP = b"stamp:"
COUNTS = (b'"usage"', b'"timings"')  # fields with numbers of tokens
Body = dict[str, Any]
DIRECT, BARE, FRONT = "direct", "a proxy that copies bytes", "slotcache order"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench relay`."""
    add = parser.add_argument
    add("--requests", type=int, default=200, help="requests of each arm in a round (default: %(default)s)")
    add("--chunks", type=int, default=400, help="chunks of each arm's long stream in a round (default: %(default)s)")
    add("--gap", type=float, default=5.0, help="ms between two chunks (default: %(default)s)")
    add("--streams", type=int, default=0, metavar="N", help="streams beside the measured requests (default: %(default)s)")
    add("--rounds", type=int, default=5, help="rounds, each with all arms in turn (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure all arms in turn: the time of a short answer, and the time from sending a chunk to its arrival."""
    documents = [{"id": f"d{number}", "text": "word " * 250} for number in range(5)]
    bodies = {
        "plain": {"messages": [{"role": "user", "content": "?" * 6000}], "stream": True},
        "documents": {"messages": [{"role": "user", "content": "?"}], "documents": documents, "stream": True},
    }
    found: dict[str, dict[str, list[float]]] = {}
    with program(_engine) as engine, program(copy, engine) as bare, _front(engine) as front:
        arms = {DIRECT: engine, BARE: bare, FRONT: front}
        for number in range(args.rounds):
            for name, port in arms.items() if number % 2 == 0 else reversed(arms.items()):
                figures = found.setdefault(name, {"plain": [], "documents": [], "lag": []})
                asyncio.run(_measure(port, bodies, args, figures))
                note(arm=name, round=number, medians={kind: median(of) for kind, of in figures.items()})
    rows = [
        (name, *(1000 * median(figures[kind]) for kind in ("plain", "documents", "lag"))) for name, figures in found.items()
    ]
    columns = ("arm", "a plain request ms", "one with 5 documents ms", "a chunk's way ms")
    by_name = {row[0]: row[1:] for row in rows}
    beside = [ours - theirs for ours, theirs in zip(by_name[FRONT], by_name[BARE], strict=True)]
    bars = [
        Bar(3, "ms a request more than the proxy, with documents", beside[1], 3.0),
        Bar(3, "ms a plain request more than the proxy", beside[0], 3.0),
        Bar(3, "ms a chunk more than the proxy", beside[2], 0.2),
    ]
    table = Table(f"relay: medians, {args.streams} streams beside", columns, rows)
    return Report("relay", [table], bars=bars, data={"arms": found})


async def _measure(port: int, bodies: dict[str, Body], args: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    """Add to `figures` the seconds of short answers and of the way of each chunk, while other streams run."""
    asked = bodies["plain"] | {"max_tokens": args.chunks, "gap": args.gap / 1000}

    async def stream() -> None:
        while True:
            await _ask(port, asked)

    beside = [asyncio.create_task(stream()) for _ in range(args.streams)]
    try:
        for kind, body in bodies.items():
            for _ in range(args.requests):
                figures[kind].append((await _ask(port, body | {"max_tokens": 1}))[0])
        figures["lag"] += (await _ask(port, asked))[1]
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def _ask(port: int, body: Body) -> tuple[float, list[float]]:
    """Send a request. Return the seconds of the answer, and the seconds from each chunk's time stamp to its arrival."""
    data, lags = json.dumps(body).encode(), list[float]()
    began = perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    rest, lines = b"", list[bytes]()
    while LAST not in lines and (data := await reader.read(1 << 16)):
        now = perf_counter_ns()
        *lines, rest = (rest + data).split(b"\n")
        stamps = (line.partition(STAMP)[2].partition(b";")[0] for line in lines)
        lags += [(now - int(stamp)) / 1e9 for stamp in stamps if stamp]
    seconds = perf_counter() - began
    writer.close()
    return seconds, lags


@contextmanager
def _front(engine: int) -> Iterator[int]:
    port = free_port()
    upstream = f"http://{HOST}:{engine}"
    command = [*own_command(), "order", "--upstream", upstream, "--dialect", "openai", "--host", HOST, "--port", str(port)]
    with Server(command, port):
        yield port


@contextmanager
def program(serve: Callable[..., Awaitable[None]], *arguments: int) -> Iterator[int]:
    """Run a server in another process. Yield its port."""
    port = free_port()
    process = get_context("spawn").Process(target=_run, args=(serve, port, *arguments), daemon=True)
    process.start()
    try:
        _wait_for(port)
        yield port
    finally:
        process.terminate()
        process.join()


def _run(serve: Callable[..., Awaitable[None]], *arguments: int) -> None:
    tie_to_parent()

    async def main() -> None:
        await serve(*arguments)

    asyncio.run(main())


def _wait_for(port: int) -> None:
    for _ in range(200):
        try:
            return socket.create_connection((HOST, port)).close()
        except OSError:
            sleep(0.05)
    raise OSError(f"nothing listens on port {port}")


async def _engine(port: int) -> None:
    """Answer each request with a stream. Each chunk contains the time at which it was sent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = json.loads(await reader.readexactly(int(lengths[0][15:]))) if lengths else {}
                if not body:
                    writer.write(HEALTH)
                    continue
                writer.write(HEAD)
                for _ in range(body["max_tokens"]):
                    said = STAMP + str(perf_counter_ns()).encode() + b";"
                    _write(writer, b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % said)
                    await writer.drain()  # raises if the client has disconnected
                    await asyncio.sleep(body.get("gap", 0))
                _write(writer, b'data: {"choices":[],"usage":{"prompt_tokens":900}}\n\ndata: [DONE]\n\n')
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, HOST, port) as server:
        await server.serve_forever()


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def copy(port: int, engine: int, is_mute: int = 0) -> None:
    """Copy the bytes of each connection to the engine and back. is_mute: remove token counts from answers."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                for name in COUNTS if is_mute else ():
                    data = data.replace(name, b'"' + b"_" * (len(name) - 2) + b'"')
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(HOST, engine)
        await asyncio.gather(pump(reader, forth), pump(back, writer))

    async with await asyncio.start_server(relay, HOST, port) as server:
        await server.serve_forever()
