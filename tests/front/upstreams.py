"""Small real HTTP servers with faults: each connection gets an answer byte by byte as a test wrote it."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.conftest import DEADLINE

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
HANG = 3600.0  # s: longer than any test waits


@dataclass
class Scripted:
    """An upstream that is up. requests: their heads and bodies, as they came."""

    url: str
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)


@contextmanager
def scripted(*script: bytes | float | str | threading.Event, answer: Callable[[bytes], bytes] | None = None):
    """A server that answers each request by a script, then closes: bytes, a silence in seconds or up to an event, `reset`.

    answer: makes the answer from the request's body instead, and keeps the connection.
    """
    loop = asyncio.new_event_loop()
    up = Scripted("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                up.requests.append((head, body))
                if answer is None:
                    return await play(writer)
                writer.write(answer(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def play(writer: asyncio.StreamWriter) -> None:
        for act in script:
            if isinstance(act, bytes):
                writer.write(act)
                await writer.drain()
                await asyncio.sleep(0.02)
            elif act == "reset":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif isinstance(act, threading.Event):
                while not act.is_set():
                    await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(float(act))

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    up.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield up
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(DEADLINE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE)
        loop.close()


async def stop(server: asyncio.Server) -> None:
    server.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + text.encode() + b'"}}]}\n\n'


def response(status: str, body: bytes, kind: str = "application/json", *more: str) -> bytes:
    """A whole answer with a length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
