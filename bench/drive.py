"""A closed loop: each client sends its next query when its last one is answered."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .client import UNREADY, Client, EncodedRequest, Result
from .trace import Query


@dataclass(frozen=True, slots=True)
class Run:
    """A driven trace: one result for each query, in the order of the trace, and the seconds of the whole run."""

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
    """Queries that wait, in order. The next turn of a session waits for the last answer, which becomes history."""

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

    The turns of a session follow each other, with the server's real answers as history. turn: a lock that several drives
    share; a query runs only while it is held, so that the arms take turns and a machine whose speed drifts slows all arms
    equally. pause: seconds after each answer, in which a user would read it and the server may do idle work; the next query
    is then not slowed by that work. With one client, the run's seconds are the sum of its queries' seconds.
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


async def _prepare_openings(client: Client, queries: Sequence[Query]) -> dict[int, EncodedRequest]:
    """Return the requests that need no history, by index, prepared before the clock of the run starts."""
    first: dict[str, int] = {}
    for index, query in enumerate(queries):
        first.setdefault(query.session, index)
    prepared: dict[int, EncodedRequest] = {}
    for index in first.values():
        try:
            prepared[index] = await client.prepare(queries[index])
        except UNREADY:
            continue  # sent later without preparation, it fails again and its result holds the error
    return prepared
