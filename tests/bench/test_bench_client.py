"""The client, against a real server on a real port."""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
from slotcache.bench.client import Client, Result
from slotcache.bench.server_api import ChatApi, CompletionApi, DocumentUse, Sampling, ServerApi
from slotcache.bench.trace import SYSTEM_PROMPT, Query

QUERY = Query("s", 1, "Why?", (("a", "first"), ("b", "second")))
SLOTCACHE = ChatApi(documents_field=True, extra={"document_order": "auto"})


def ask(url: str, api: ServerApi, query: Query = QUERY, history: Any = (), sampling: Any = None) -> Result:
    async def one() -> Result:
        async with Client(url, api, sampling) as client:
            return await client.ask(query, history)

    return asyncio.run(one())


def test_ttft_is_the_first_token_and_not_the_first_event(serve: Any, chat_events: Callable[..., list[Any]]) -> None:
    times: list[float] = []

    async def handler(path: str, body: Any, send: Any) -> None:
        times.append(perf_counter())
        role, *rest = chat_events(["Be", "cause", "."])
        await send(role)
        await asyncio.sleep(0.05)  # a prefill of known length
        times.append(perf_counter())
        for event in rest:
            await send(event)

    result = ask(serve(handler).url, ChatApi())
    assert result.ttft >= times[1] - times[0] >= 0.05
    assert len(result.arrivals) == 3 and result.text == "Because."
    assert list(result.arrivals) == sorted(result.arrivals) and result.arrivals[-1] <= result.latency
    assert len(result.gaps) == 2 and result.error is None and result.status == 200


def test_slotcache_gets_documents_as_a_field_and_reports_their_use(serve: Any, chat_events: Any) -> None:
    used = [{"id": "b", "tokens": 4, "cached_tokens": 4}, {"id": "a", "tokens": 3, "cached_tokens": 0}]
    own = {"slot": 1, "source": "fork", "cached_tokens": 7, "documents": used, "miss": None}

    async def handler(path: str, body: Any, send: Any) -> None:
        for event in chat_events(["x"], prompt=20, cached=7, own=own):
            await send(event)

    server = serve(handler)
    result = ask(server.url, SLOTCACHE, sampling=Sampling(max_tokens=3))
    assert result.documents == (DocumentUse("b", 4, 4), DocumentUse("a", 3, 0))
    assert (result.prompt_tokens, result.cached_tokens, result.computed_tokens) == (20, 7, 13)
    assert result.timings == {"prompt_ms": 1.5}
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["documents"] == [{"id": "a", "text": "first"}, {"id": "b", "text": "second"}]
    assert body["messages"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "Why?"},
    ]
    assert body["cache_prompt"] is True and body["document_order"] == "auto" and body["ignore_eos"] is True
    assert body["max_tokens"] == 3 and body["stream"] is True and body["stream_options"] == {"include_usage": True}


def test_earlier_turns_keep_their_documents(serve: Any, chat_events: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> None:
        for event in chat_events(["x"]):
            await send(event)

    server = serve(handler)
    history = [(QUERY, "Because.")]
    for api in (SLOTCACHE, ChatApi()):
        assert ask(server.url, api, Query("s", 2, "And?", (("c", "third"),)), history).error is None
    (_, own), (_, other) = server.requests
    assert own["messages"][1]["documents"] == [{"id": "a", "text": "first"}, {"id": "b", "text": "second"}]
    assert own["messages"][2] == {"role": "assistant", "content": "Because."}
    assert own["messages"][3] == {"role": "user", "content": "And?"} and own["documents"][0]["id"] == "c"
    assert other["messages"][1]["content"] == "[a]\nfirst\n\n[b]\nsecond\n\nWhy?"
    assert other["messages"][3]["content"] == "[c]\nthird\n\nAnd?" and "documents" not in other


def test_llama_server_renders_first_and_reports_reuse_in_timings(serve: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> Any:
        if path == "/apply-template":
            return {"prompt": f"<{body['messages'][1]['content']}>"}
        await send({"content": "Be", "tokens": [1], "stop": False})
        await send({"content": "", "tokens": [2], "stop": False})
        timings = {"cache_n": 90, "prompt_n": 30, "predicted_n": 2}
        await send(
            {"content": "", "tokens": [], "stop": True, "tokens_predicted": 2, "tokens_cached": 121, "timings": timings}
        )

    server = serve(handler)
    result = ask(server.url, CompletionApi(), sampling=Sampling(max_tokens=2))
    assert [path for path, _ in server.requests] == ["/apply-template", "/completion"]
    body = server.requests[1][1]
    assert body["prompt"] == "<[a]\nfirst\n\n[b]\nsecond\n\nWhy?>"
    assert body["n_predict"] == 2 and body["ignore_eos"] is True and body["cache_prompt"] is True
    assert (result.prompt_tokens, result.cached_tokens, result.completion_tokens) == (120, 90, 2)
    assert len(result.arrivals) == 2 and result.error is None, "a token without text is a token"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (400, {"error": {"message": "prompt has 9 tokens,\n context 8", "type": "x"}}),
            "prompt has 9 tokens, context 8",
        ),
        ((500, {"error": "out of order"}), "out of order"),
        ((502, "no gateway"), "no gateway"),
    ],
)
def test_an_error_answer_is_a_result_with_its_message(serve: Any, answer: Any, message: str) -> None:
    async def handler(path: str, body: Any, send: Any) -> Any:
        return answer

    result = ask(serve(handler).url, ChatApi())
    assert result.status == answer[0] and result.error is not None and message in result.error
    assert result.arrivals == () and result.ttft != result.ttft


@pytest.mark.parametrize("event", [{"error": {"message": "evicted"}}, 'error: {"message": "evicted"}\n\n'])
def test_an_error_in_the_stream_is_an_error(serve: Any, chat_events: Any, event: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> None:
        for sent in [*chat_events(["x"])[:2], event]:
            await send(sent)

    result = ask(serve(handler).url, ChatApi())
    assert result.error == "StreamError: evicted" and result.text == "x"


def test_a_stream_that_breaks_off_is_an_error(serve: Any, chat_events: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> None:
        for event in chat_events(["x"])[:2]:
            await send(event)

    result = ask(serve(handler).url, ChatApi())
    assert result.error == "StreamError: the stream ended before its final event"


def test_a_stream_that_ends_twice_is_an_error(serve: Any, chat_events: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> None:
        role, token, end, *rest = chat_events(["x"])
        for event in [role, token, end, end, *rest]:
            await send(event)

    result = ask(serve(handler).url, ChatApi())
    assert result.error == "StreamError: the stream had 2 final events"


@pytest.mark.parametrize(("reported", "reason"), [("limit", "length"), ("eos", "stop"), ("word", "stop")])
def test_both_dialects_report_why_an_answer_ended(serve: Any, reported: str, reason: str) -> None:
    async def chat(path: str, body: Any, send: Any) -> None:
        await send({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})

    async def native(path: str, body: Any, send: Any) -> Any:
        if path == "/apply-template":
            return {"prompt": "x"}
        await send({"content": "", "stop": True, "stop_type": reported})

    assert ask(serve(chat).url, ChatApi()).finish_reason == reason
    assert ask(serve(native).url, CompletionApi()).finish_reason == reason


def test_a_missing_server_is_an_error() -> None:
    result = ask("http://127.0.0.1:1", CompletionApi())
    assert result.error is not None and "ClientConnectorError" in result.error
