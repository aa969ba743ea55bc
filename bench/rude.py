"""Badly behaved clients: they do not read, they leave, they send slowly or never finish."""

import asyncio
import json
import random
import socket
import struct
from urllib.parse import urlsplit

from .bystanders import PATH

UNREAD = 2048  # bytes of the client's receive buffer
AT_ONCE = 2  # clients that do not read: they must not take all lanes
PACE = 0.5  # s between two clients, and between two bytes of a slow client
PROMISED = 4 << 20  # Content-Length of a body that never ends
SENT = 1 << 20


def _request(length: int) -> bytes:
    lines = (f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _body(question: str, max_tokens: int) -> bytes:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "cache_scope": "rude", "cache_prompt": True}
    return json.dumps(body).encode()


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD)
    connection.settimeout(10)
    connection.connect((parts.hostname, parts.port))
    return connection


async def stall(url: str, count: int, tokens: int) -> list[socket.socket]:
    """Request long streams without reading them, a few at a time. Return the open connections."""
    connections: list[socket.socket] = []
    for number in range(count):
        connection = await asyncio.to_thread(_connected, url)
        body = _body(f"Tell me about number {number}.", tokens)
        await asyncio.to_thread(connection.sendall, _request(len(body)) + body)
        connections.append(connection)
        if number % AT_ONCE:
            await asyncio.sleep(PACE)
    return connections


async def leave(url: str, count: int, seed: int = 0) -> None:
    """Connect and disconnect: within the head, within the body, before the answer, or during it."""
    rng = random.Random(seed)
    for number in range(count):
        connection = await asyncio.to_thread(_connected, url)
        body = _body(f"What is number {number}?", 200)
        whole = _request(len(body)) + body
        part = rng.choice((10, len(whole) - 20, len(whole), len(whole)))
        connection.sendall(whole[:part])
        if part == len(whole) and rng.random() < 0.7:
            await asyncio.to_thread(connection.recv, 1 + rng.randrange(600))
        if rng.random() < 0.5:  # with a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def dawdle(url: str, count: int, patience: float) -> int:
    """Send bodies that never end: half of the clients stop after a part, half send a byte now and then.

    Return the number of connections that the server still holds after `patience` seconds.
    """
    async with asyncio.TaskGroup() as clients:
        held = [clients.create_task(_dawdle(url, number % 2 == 0, patience)) for number in range(count)]
    return sum(task.result() for task in held)


async def _dawdle(url: str, stops: bool, patience: float) -> bool:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    dripping = asyncio.create_task(_send(writer, stops))
    try:
        await asyncio.wait_for(reader.read(), patience)  # reads to the end of the connection, with or without an answer
        return False
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        dripping.cancel()
        writer.close()


async def _send(writer: asyncio.StreamWriter, stops: bool) -> None:
    writer.write(_request(PROMISED) + (b" " * SENT if stops else b""))
    while not stops and not writer.is_closing():  # a closed connection accepts bytes and drops them
        writer.write(b" ")
        await asyncio.sleep(PACE)
