"""The closed loop: order, history, concurrency."""

import asyncio
from itertools import pairwise
from time import monotonic
from typing import Any

from slotcache.bench.client import Client, Run, drive
from slotcache.bench.server_api import ChatApi
from slotcache.bench.trace import Query, conversations


def run(url: str, queries: list[Query], concurrency: int, pause: float = 0.0) -> Run:
    async def work() -> Run:
        async with Client(url, ChatApi()) as client:
            return await drive(client, queries, concurrency, pause=pause)

    return asyncio.run(work())


def test_turns_of_a_session_follow_each_other_with_real_answers(serve: Any, chat_events: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> None:
        for event in chat_events([f"answer to {len(body['messages'])}"]):
            await send(event)

    server = serve(handler)
    queries = conversations(count=3, turns=3)
    driven = run(server.url, queries, concurrency=8)
    assert [result.text for result in driven.results] == ["answer to 2"] * 3 + ["answer to 4"] * 3 + ["answer to 6"] * 3
    last = next(body for _, body in server.requests if body["messages"][-1]["content"] == queries[6].question)
    assert [message["content"] for message in last["messages"][1:]] == [
        queries[0].question, "answer to 2", queries[3].question, "answer to 4", queries[6].question,
    ]  # fmt: skip
    assert driven.errors == [] and len(driven.answered) == 9


def test_concurrency_is_the_number_of_clients(serve: Any, chat_events: Any) -> None:
    running, most, full = 0, 0, asyncio.Event()

    async def handler(path: str, body: Any, send: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 300)  # passes only if three run at once
        for event in chat_events(["x"]):
            await send(event)
        running -= 1

    queries = [Query(f"q{i}", 1, f"{i}?") for i in range(12)]
    driven = run(serve(handler).url, queries, concurrency=3)
    assert driven.errors == [] and most == 3


def test_one_client_sends_in_order_and_outlives_an_error(serve: Any, chat_events: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> Any:
        if body["messages"][-1]["content"] == "1?":
            return 400, {"error": {"message": "no"}}
        for event in chat_events(["x"]):
            await send(event)

    server = serve(handler)
    driven = run(server.url, [Query(f"q{i}", 1, f"{i}?") for i in range(4)], concurrency=1)
    assert [body["messages"][-1]["content"] for _, body in server.requests] == ["0?", "1?", "2?", "3?"]
    assert driven.errors == ["StreamError: no"] and len(driven.answered) == 3
    assert driven.seconds == sum(result.latency for result in driven.results)


def test_answers_are_read_before_the_next_query_and_that_time_is_not_counted(serve: Any, chat_events: Any) -> None:
    times = []

    async def handler(path: str, body: Any, send: Any) -> None:
        times.append(monotonic())
        for event in chat_events(["x"]):
            await send(event)

    driven = run(serve(handler).url, [Query(f"q{i}", 1, f"{i}?") for i in range(3)], concurrency=1, pause=0.2)
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(times)) and len(times) == 3
    assert driven.seconds == sum(result.latency for result in driven.results)
