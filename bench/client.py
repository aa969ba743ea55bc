"""A streaming client that measures a server from outside, over HTTP."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

import aiohttp

from .dialect import Chunk, Dialect, DocumentUse, History, Sampling
from .error import BenchError
from .trace import Query

STALL_SECONDS = 600
"""A request fails after this time without a byte: a hung server must not hang the bench."""

JSON = {"Content-Type": "application/json"}
UNREADY = (aiohttp.ClientError, TimeoutError, KeyError, ValueError)
"""Errors of the preparation of a request."""


class StreamError(Exception):
    """A stream that reported an error or ended without its final event."""


@dataclass(frozen=True, slots=True)
class Result:
    """One request, seen from outside. Times are seconds of the client's monotonic clock, lengths are tokens.

    arrivals: of the chunks that carried a token, counted from `started`, the moment just before sending. documents: in the
    order of use, if the server reports it. error: one line; None if the request succeeded.
    """

    started: float
    latency: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    documents: tuple[DocumentUse, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    status: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token; not a number if no token came."""
        return self.arrivals[0] if self.arrivals else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the server had to compute."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request that is encoded and ready to send."""

    path: str
    body: bytes


class _Stream:
    """The part of an answer that has arrived. If a figure comes twice, the last value counts."""

    def __init__(self, dialect: Dialect, started: float, on_token: Callable[[float], None] | None) -> None:
        self._dialect, self._started, self._on_token = dialect, started, on_token
        self._received: list[tuple[float, bytes]] = []
        self._rest = b""
        self._num_final = 0
        self.arrivals: list[float] = []
        self.text: list[str] = []
        self.figures: dict[str, Any] = {}

    def receive(self, data: bytes) -> None:
        """Store bytes that just arrived; decode them now only if `on_token` waits for tokens, else at the end.

        Client and server share a machine: decoding JSON during the answer would slow the server.
        """
        self._received.append((perf_counter(), data))
        if self._on_token:
            self.read()

    def read(self) -> None:
        """Decode the stored bytes. Raises StreamError if an event reports an error."""
        received, self._received = self._received, []
        for at, data in received:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._read_line(line.rstrip(b"\r"), at)

    def end(self) -> None:
        """Check a complete answer. Raises StreamError if it had no final event or more than one."""
        self.read()
        if not self._num_final:
            raise StreamError("the stream ended before its final event")
        if self._num_final > 1:
            raise StreamError(f"the stream had {self._num_final} final events")

    def _read_line(self, line: bytes, at: float) -> None:
        kind, _, data = line.partition(b":")
        if kind not in (b"data", b"error") or data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if kind == b"error" or "error" in event:
            raise StreamError(_message(data))
        chunk = self._dialect.read(event)
        if chunk.has_token:
            self.arrivals.append(at - self._started)
            if self._on_token:
                self._on_token(at)
        self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self._num_final += chunk.is_final
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "timings"):
            if (value := getattr(chunk, name)) is not None:
                self.figures[name] = value
        if chunk.documents:
            self.figures["documents"] = chunk.documents


class Client:
    """Sends queries to the server at `url` in its dialect. An async context manager; requests may run side by side."""

    def __init__(self, url: str, dialect: Dialect, sampling: Sampling | None = None) -> None:
        self.url = url
        self.dialect = dialect
        self.sampling = sampling or Sampling()

    async def __aenter__(self) -> "Client":
        # A new connection for each request: the server may close an idle connection just before the next request uses it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        # trust_env is off by default: a proxy between the bench and a server on this machine would be measured too.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=STALL_SECONDS)
        self.http = aiohttp.ClientSession(self.url, connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()

    async def prepare(self, query: Query, history: History = (), sampling: Sampling | None = None) -> EncodedRequest:
        """Return the encoded request of a query. Raises aiohttp.ClientError."""
        path, body = await self.dialect.prepare(self.http, query, history, sampling or self.sampling)
        return EncodedRequest(path, json.dumps(body).encode())

    async def ask(
        self,
        query: Query,
        history: History = (),
        sampling: Sampling | None = None,
        on_token: Callable[[float], None] | None = None,
    ) -> Result:
        """Prepare and send a query. An error is a result with an `error`, never an exception."""
        try:
            request = await self.prepare(query, history, sampling)
        except UNREADY as error:
            return Result(perf_counter(), 0.0, error=_one_line(error))
        return await self.send(request, on_token)

    async def send(self, request: EncodedRequest, on_token: Callable[[float], None] | None = None) -> Result:
        """Stream one answer. The clock starts just before sending; `on_token` gets the clock's reading at every token."""
        status, problem = 0, None
        started = perf_counter()
        stream = _Stream(self.dialect, started, on_token)
        try:
            async with self.http.post(request.path, data=request.body, headers=JSON) as response:
                status = response.status
                if status != 200:
                    raise StreamError(_message(await response.read()))
                async for data in response.content.iter_any():
                    stream.receive(data)
            latency = perf_counter() - started
            stream.end()
        except (aiohttp.ClientError, TimeoutError, StreamError, ValueError) as error:
            problem, latency = _one_line(error), perf_counter() - started
        return Result(
            started,
            latency,
            tuple(stream.arrivals),
            text="".join(stream.text),
            status=status,
            error=problem,
            **stream.figures,
        )

    async def gauge(self, name: str) -> float:
        """Return a value of slotcache's `/metrics`. Raises BenchError if the server has no value of this name."""
        async with self.http.get("/metrics") as answer:
            text = await answer.text()
        found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
        if not found:
            raise BenchError(f"/metrics has no {name}: this measures slotcache only")
        return float(found[0])


def _message(body: bytes) -> str:
    """Return the message of an OpenAI-style error body, else the whole body."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body.decode(errors="replace")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
