"""A streaming client that measures a server from outside, over HTTP, like anybody else."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

import httpx

from .dialect import Chunk, Dialect, DocumentUse, History, Sampling
from .trace import Query

STALL_SECONDS = 600
"""No byte for so long and a request counts as failed: a hung server must not hang the bench."""


class StreamError(Exception):
    """A stream that told of an error, or ended without its final event."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one request looked like from outside. Times are seconds of the client's monotonic clock, lengths are tokens.

    `arrivals` are those of the chunks that carried a token, measured from `started`, the moment just before sending.
    `documents` are in the order used, where the server tells it. `error` is one line, None when all went well.
    """

    started: float
    latency: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    documents: tuple[DocumentUse, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    status: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token; not a number when there was none."""
        return self.arrivals[0] if self.arrivals else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens that followed each other."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens the server had to compute."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class _Stream:
    """What has arrived so far; the last word on a figure counts."""

    arrivals: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    is_final: bool = False

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.is_final |= chunk.is_final
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "timings"):
            if (value := getattr(chunk, name)) is not None:
                self.figures[name] = value
        if chunk.documents:
            self.figures["documents"] = chunk.documents


class Client:
    """Sends queries to the server at `url` in its dialect. An async context manager; requests may run side by side."""

    def __init__(self, url: str, dialect: Dialect, sampling: Sampling | None = None) -> None:
        self.dialect = dialect
        self.sampling = sampling or Sampling()
        # A connection for each request: a kept one may have been closed by the server just before it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # trust_env: a proxy between the bench and a server on this machine would be measured too.
        self.http = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(STALL_SECONDS, connect=10), limits=limits, trust_env=False
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def prepare(self, query: Query, history: History = (), sampling: Sampling | None = None) -> httpx.Request:
        """The request of a query, encoded and ready to send. Raises httpx.HTTPError."""
        path, body = await self.dialect.prepare(self.http, query, history, sampling or self.sampling)
        return self.http.build_request("POST", path, json=body)

    async def ask(
        self,
        query: Query,
        history: History = (),
        sampling: Sampling | None = None,
        on_token: Callable[[float], None] | None = None,
    ) -> Result:
        """Prepares and sends. An error is a result with an `error`, never an exception."""
        try:
            request = await self.prepare(query, history, sampling)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            return Result(perf_counter(), 0.0, error=_one_line(error))
        return await self.send(request, on_token)

    async def send(self, request: httpx.Request, on_token: Callable[[float], None] | None = None) -> Result:
        """Streams one answer. The clock starts just before sending; `on_token` gets its reading at every token."""
        stream, status, problem = _Stream(), 0, None
        started = perf_counter()
        try:
            response = await self.http.send(request, stream=True)
            try:
                status = response.status_code
                if status != 200:
                    raise StreamError(_message(await response.aread()))
                await self._read(response, stream, started, on_token)
            finally:
                await response.aclose()
        except (httpx.HTTPError, StreamError, ValueError) as error:
            problem = _one_line(error)
        return Result(
            started,
            perf_counter() - started,
            tuple(stream.arrivals),
            text="".join(stream.text),
            status=status,
            error=problem,
            **stream.figures,
        )

    async def _read(
        self, response: httpx.Response, stream: _Stream, started: float, on_token: Callable[[float], None] | None
    ) -> None:
        async for line in response.aiter_lines():
            now = perf_counter()
            kind, _, data = line.partition(":")
            if kind not in ("data", "error") or data.strip() == "[DONE]":
                continue
            event = json.loads(data)
            if kind == "error" or "error" in event:
                raise StreamError(_message(data.encode()))
            chunk = self.dialect.read(event)
            if chunk.has_token:
                stream.arrivals.append(now - started)
                if on_token:
                    on_token(now)
            stream.add(chunk)
        if not stream.is_final:
            raise StreamError("the stream ended before its final event")


def _message(body: bytes) -> str:
    """The message of an error body shaped as OpenAI's, else the body."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body.decode(errors="replace")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
