"""A small HTTP server with scripted answers on a real port, for tests of HTTP clients."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

PATIENCE = 300.0  # s: only what never comes about takes as long, also on a busy machine
Send = Callable[[Any], Awaitable[None]]
Handler = Callable[[str, dict[str, Any], Send], Awaitable[Any]]


class FakeServer:
    """Answers each request with `handler(path, body, send)`: streams the sent events, or answers with the returned value.

    A returned (status, value) pair is an error answer. requests: (path, body) in order of arrival.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._answering: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def stop(self) -> None:
        """Stop after every disconnect was noticed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(PATIENCE)
            self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        if self._answering:
            await asyncio.wait(self._answering, timeout=PATIENCE)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering = asyncio.current_task()
        assert answering
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            sizes = (int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
            body = json.loads(await reader.readexactly(next(sizes, 0)) or b"{}")
            self.requests.append((path, body))
            await self._until_gone(reader, asyncio.create_task(self._handle(path, body, writer)))
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _until_gone(self, reader: asyncio.StreamReader, handling: asyncio.Task[None]) -> None:
        """End the handler when its client disconnects, as a real server does."""
        gone = asyncio.create_task(reader.read())
        done, pending = await asyncio.wait({handling, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=PATIENCE)
        if handling in done:
            handling.result()

    async def _handle(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        streaming = False

        async def send(event: Any) -> None:
            nonlocal streaming
            if not streaming:
                writer.write(_head(200, "text/event-stream"))
                streaming = True
            data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            writer.write(data.encode())
            await writer.drain()

        answer = await self.handler(path, body, send)
        if not streaming:
            status, value = answer if isinstance(answer, tuple) else (200, answer)
            writer.write(_head(status, "application/json") + json.dumps(value).encode())
            await writer.drain()


def _head(status: int, kind: str) -> bytes:
    return f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], FakeServer]]:
    """Start fake servers, and stop them after the test."""
    servers: list[FakeServer] = []

    def start(handler: Handler) -> FakeServer:
        servers.append(server := FakeServer(handler))
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def chat_events() -> Callable[..., list[Any]]:
    """Return the events of a chat answer: the role, each token, the end, then the figures."""

    def events(tokens: list[str], prompt: int = 10, cached: int = 0, own: dict[str, Any] | None = None) -> list[Any]:
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        texts = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in tokens]
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        last = {"choices": [], "usage": usage, "timings": {"prompt_ms": 1.5}} | ({"slotcache": own} if own else {})
        return [role, *texts, end, last, "data: [DONE]\n\n"]

    return events
