"""The client of a benchmark, which sends many requests at a time, with prompts of a given size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import TracebackType
from typing import Any

import aiohttp

from .journal import note
from .report import BenchError
from .server_api import DocumentUse, History, Sampling, ServerApi, StreamChunk
from .trace import Query, prose

STALL_SECONDS = 600
"""A request fails after this time without a byte, so that a hung server does not hang the bench."""

JSON = {"Content-Type": "application/json"}
UNREADY = (aiohttp.ClientError, TimeoutError, KeyError, ValueError)
"""Errors while a request is prepared."""


class StreamError(Exception):
    """A stream reported an error, or ended without its final event."""


@dataclass(frozen=True, slots=True)
class Result:
    """One request, as its client saw it. Times are in seconds, lengths in tokens.

    started: the time just before the request was sent, on the client's monotonic clock.
    arrivals: the seconds from `started` to each chunk with a token.
    documents: the documents in the order of the prompt, if the server reports them.
    error: the error in one line; None if the request succeeded.
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

    def answered(self) -> Result:
        """Return this result. Raises BenchError if the request failed."""
        if self.error:
            raise BenchError(self.error)
        return self

    @property
    def ttft(self) -> float:
        """Seconds to the first token; not a number if no token arrived."""
        return self.arrivals[0] if self.arrivals else float("nan")

    @property
    def figures(self) -> dict[str, Any]:
        """All figures as JSON values, except `started`. Times are rounded to 0.1 ms."""
        return {
            "latency": round(self.latency, 4),
            "arrivals": [round(arrival, 4) for arrival in self.arrivals],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "text": self.text,
            "documents": [[used.id, used.tokens, used.cached_tokens] for used in self.documents],
            "timings": dict(self.timings),
            "error": self.error,
        }

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
    """A request that is encoded and ready to send. session, turn: session and turn of its query, for the journal."""

    path: str
    body: bytes
    session: str = ""
    turn: int = 0


class _Stream:
    """The received part of an answer. If a figure arrives twice, the last value counts."""

    def __init__(self, api: ServerApi, started: float, on_token: Callable[[float], None] | None) -> None:
        self._api, self._started, self._on_token = api, started, on_token
        self._received: list[tuple[float, bytes]] = []
        self._rest = b""
        self._num_final = 0
        self.arrivals: list[float] = []
        self.text: list[str] = []
        self.figures: dict[str, Any] = {}

    def receive(self, data: bytes) -> None:
        """Store bytes that just arrived. They are decoded now only if `on_token` waits for tokens, otherwise at the end.

        Client and server share a machine, so decoding JSON during the answer would slow the server.
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
        chunk = self._api.read(event)
        if chunk.has_token:
            self.arrivals.append(at - self._started)
            if self._on_token:
                self._on_token(at)
        self._add(chunk)

    def _add(self, chunk: StreamChunk) -> None:
        self.text.append(chunk.text)
        self._num_final += chunk.is_final
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "timings"):
            if (value := getattr(chunk, name)) is not None:
                self.figures[name] = value
        if chunk.documents:
            self.figures["documents"] = chunk.documents


class Client:
    """Sends queries to the server at `url` through its API. An async context manager. Requests may run at the same time.

    name: the name of the arm, under which the journal stores each result. If it is empty, the journal stores no result.
    """

    def __init__(self, url: str, api: ServerApi, sampling: Sampling | None = None, name: str = "") -> None:
        self.url, self.name = url, name
        self.api = api
        self.sampling = sampling or Sampling()

    async def __aenter__(self) -> Client:
        # Each request has a new connection. The server may close an idle connection just before the next request uses it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        # trust_env stays off: a proxy between the bench and a server on this machine would be measured too.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=STALL_SECONDS)
        self.http = aiohttp.ClientSession(self.url, connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()

    async def prepare(self, query: Query, history: History = (), sampling: Sampling | None = None) -> EncodedRequest:
        """Return the encoded request of a query. Raises aiohttp.ClientError."""
        path, body = await self.api.prepare(self.http, query, history, sampling or self.sampling)
        return EncodedRequest(path, json.dumps(body).encode(), query.session, query.turn)

    async def ask(
        self,
        query: Query,
        history: History = (),
        sampling: Sampling | None = None,
        on_token: Callable[[float], None] | None = None,
    ) -> Result:
        """Prepare and send a query. An error gives a result with an `error`, never an exception."""
        try:
            request = await self.prepare(query, history, sampling)
        except UNREADY as error:
            return Result(perf_counter(), 0.0, error=_one_line(error))
        return await self.send(request, on_token)

    async def send(self, request: EncodedRequest, on_token: Callable[[float], None] | None = None) -> Result:
        """Stream one answer. The clock starts just before sending. `on_token` gets the time of each token on this clock."""
        status, problem = 0, None
        started = perf_counter()
        stream = _Stream(self.api, started, on_token)
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
        figures = stream.figures | {"text": "".join(stream.text), "status": status, "error": problem}
        result = Result(started, latency, tuple(stream.arrivals), **figures)
        if self.name:
            note(arm=self.name, session=request.session, turn=request.turn, **result.figures)
        return result

    async def gauge(self, name: str) -> float:
        """Return a value from slotcache's `/metrics`. Raises BenchError if the server has no value with this name."""
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


# ---- A closed loop, in which each client waits for an answer before its next query, and an open loop. -------------------


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a trace, one for each query, in the order of the trace. seconds: the time of the whole run."""

    queries: tuple[Query, ...]
    results: tuple[Result, ...]
    seconds: float

    @property
    def answered(self) -> list[Result]:
        """The results without an error."""
        return [result for result in self.results if result.error is None]

    @property
    def errors(self) -> list[str]:
        """The errors, in the order of the trace."""
        return [result.error for result in self.results if result.error is not None]


@dataclass(slots=True)
class _Line:
    """The waiting queries, in order. A turn waits for the answer to the session's previous turn, and has it as history."""

    queries: Sequence[Query]
    waiting: list[int] = field(init=False)
    busy: set[str] = field(default_factory=set)
    history: dict[str, list[tuple[Query, str]]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.queries)))

    async def take(self) -> int | None:
        """Return the index of the first query whose session is idle; None if no query is left."""
        async with self.changed:
            while self.waiting:
                for index in self.waiting:
                    if self.queries[index].session not in self.busy:
                        self.waiting.remove(index)
                        self.busy.add(self.queries[index].session)
                        return index
                await self.changed.wait()
            return None

    async def answered(self, index: int, result: Result) -> None:
        query = self.queries[index]
        async with self.changed:
            self.busy.discard(query.session)
            self.history.setdefault(query.session, []).append((query, result.text))
            self.changed.notify_all()


async def drive(
    client: Client,
    queries: Sequence[Query],
    concurrency: int = 1,
    on_result: Callable[[int, Result], None] | None = None,
    turn: AbstractAsyncContextManager[Any] | None = None,
    pause: float = 0.0,
) -> Run:
    """Send `queries` in order, with `concurrency` clients.

    The turns of a session follow each other, with the server's real answers as history. With one client, the seconds of the
    run are the sum of its queries' seconds.

    turn: a lock that several arms share. A query runs only with this lock, so the arms take turns, and a machine whose speed
    drifts slows all arms equally.
    pause: seconds after each answer, in which a user would read it. The server may do idle work in this time, so that the
    work does not slow the next query.
    """
    line, results = _Line(queries), [Result(0.0, 0.0, error="not sent")] * len(queries)
    prepared = await _prepare_openings(client, queries)

    async def work() -> None:
        while (index := await line.take()) is not None:
            async with turn or nullcontext():
                request = prepared.pop(index, None)
                if request is not None:
                    result = await client.send(request)
                else:
                    result = await client.ask(queries[index], line.history.get(queries[index].session, ()))
                await asyncio.sleep(pause)
            results[index] = result
            if on_result:
                on_result(index, result)
            await line.answered(index, result)

    started = perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(work())
    alone = turn is not None or concurrency == 1
    seconds = sum(result.latency for result in results) if alone else perf_counter() - started
    return Run(tuple(queries), tuple(results), seconds)


async def drive_open(client: Client, queries: Sequence[Query], arrivals: Sequence[float]) -> Run:
    """Send each query at its arrival time, even if earlier queries have no answer yet (an open loop).

    arrivals: the seconds from the start to each query. Requests are prepared before the start, so queries have no history.
    """
    prepared = await _prepare_openings(client, queries)

    async def work(index: int) -> Result:
        await asyncio.sleep(max(0.0, started + arrivals[index] - perf_counter()))
        request = prepared.get(index)
        return await (client.ask(queries[index]) if request is None else client.send(request))

    started = perf_counter()
    results = await asyncio.gather(*map(work, range(len(queries))))
    return Run(tuple(queries), tuple(results), perf_counter() - started)


async def _prepare_openings(client: Client, queries: Sequence[Query]) -> dict[int, EncodedRequest]:
    """Prepare the requests that need no history, before the clock of the run starts. Return them by index."""
    first: dict[str, int] = {}
    for index, query in enumerate(queries):
        first.setdefault(query.session, index)
    prepared: dict[int, EncodedRequest] = {}
    for index in first.values():
        try:
            prepared[index] = await client.prepare(queries[index])
        except UNREADY:
            continue  # it is prepared again later, and then its result has the error
    return prepared


# ---- Prompts of a given length in tokens, for servers that can only be reached over HTTP. -------------------------------

PROBES = (100, 400)
"""The words of two prompts. Their lengths in tokens give the tokens per word, and those of system prompt and template."""


class PromptSizer:
    """Makes queries with a given number of prompt tokens, to within one or two percent."""

    def __init__(self, per_word: float, fixed: float) -> None:
        self.per_word, self.fixed = per_word, fixed

    @classmethod
    async def of(cls, client: Client) -> PromptSizer:
        """Measure two prompts on the server. Raises BenchError if a request fails or the server reports no prompt length."""
        once = replace(client.sampling, max_tokens=1, cache_prompt=False)
        lengths: list[int] = []
        for words in PROBES:
            result = await client.ask(Query("probe", 1, _text(f"probe {words}", words)), sampling=once)
            if result.error or not result.prompt_tokens:
                raise BenchError(f"the server does not report the length of a prompt: {result.error or 'no usage'}")
            lengths.append(result.prompt_tokens)
        per_word = (lengths[1] - lengths[0]) / (PROBES[1] - PROBES[0])
        return cls(per_word, lengths[0] - per_word * PROBES[0])

    def query(self, seed: str, tokens: int) -> Query:
        """Return a query with about `tokens` prompt tokens in all. Queries of different seeds share no prefix."""
        words = max(1, round((tokens - self.fixed) / self.per_word))
        return Query(seed, 1, _text(seed, words))


def _text(seed: str, words: int) -> str:
    return " ".join([f"{seed}:", *prose(seed, words).split()[:words]])
