"""What the server says when it cannot do what was asked. One shape for all errors, pinned here."""

import json
import threading

import httpx
import openai
import pytest
from slotcache.server.api.chat import ChatReply
from slotcache.server.api.completions import NativeReply, TextReply
from slotcache.server.api.messages import MessagesReply
from slotcache.server.api.ollama import OllamaReply
from slotcache.server.api.responses import ResponsesReply

from server.conftest import DEADLINE, REST, held, running, until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny, ctx_size=2048) as up:
        yield up


def test_the_error_body(server):
    answer = server.http.post(CHAT, json={"messages": USER, "temperature": "hot"})
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {
            "message": "temperature: Expected `float | null`, got `str`",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": 400,
        }
    }


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "missing required field"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "expected one of system"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "expected a text"),
        ({"messages": [*USER, 7]}, "messages[1]", "Expected `object`"),
        ({"messages": USER, "max_tokens": -5}, "max_tokens", "0 or more"),
        ({"messages": USER, "repeat_penalty": 0.0}, "repeat_penalty", "> 0.0"),
        ({"messages": USER, "n": 0}, "n", ">= 1"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"messages": USER, "response_format": {"type": "sound"}}, "response_format.type", "expected text, json_object"),
        ({"messages": USER, "grammar": "root ::= ("}, "grammar", "Expected"),
        ({"messages": USER, "logit_bias": {"99999": 1}}, "logit_bias", "expected an id"),
        ({"messages": USER, "document_order": "best"}, "document_order", "expected one of auto"),
        ({"messages": USER, "best": "middle"}, "best", "expected one of free, first, last"),
        ({"messages": USER, "best": "last", "keep_last": 2}, "best", "keep_last is 2"),
        ({"messages": USER, "best_price_ms": -0.5}, "best_price_ms", ">= 0.0"),
        (
            {"messages": USER, "document_order": "oracle"},
            "document_order",
            "expected one of auto, retrieval, sorted, greedy",
        ),
        (
            {"messages": USER, "document_order": "recency"},
            "document_order",
            "expected one of auto, retrieval, sorted, greedy",
        ),
        ({"messages": USER, "document_order": "x" * 10_000}, "document_order", "expected one of auto"),
        ({"messages": USER, "n": 10**18}, "n", "<= 128"),
        ({"messages": USER, "documents": [{"id": "a"}]}, "documents[0].text", "missing"),
        ({"messages": USER, "documents": [""]}, "documents[0]", "empty"),
        ({"messages": USER, "documents": {"id": "a"}}, "documents", "Expected `array"),
        ({"messages": [USER[0] | {"documents": [{}]}]}, "messages[0].documents[0].text", "missing"),
        ({"messages": [{"role": "system", "content": "x"}], "documents": ["y"]}, "documents", "last user message"),
        ({"messages": USER, "documents": ["x"] * 10_001}, "documents", "10,000 that a request may have"),
        (
            {"messages": [USER[0] | {"documents": ["x"] * 5001}] * 2},
            "messages[1].documents",
            "10,000 that a request may have",
        ),
        ({"messages": USER * 10_001}, "messages", "are 10,001: a request may have 10,000"),
        ({"messages": USER, "cache_scope": "x" * 10_000}, "cache_scope", "expected at most 256"),
    ],
)
def test_what_is_wrong_and_where(server, body, param, says):
    answer = server.http.post(CHAT, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and says in error["message"]


def test_malformed_json(server):
    answer = server.http.post(CHAT, content='{"messages": [')
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "malformed_json"


def test_a_prompt_that_is_too_long_names_both_lengths(server):
    answer = server.http.post("/v1/completions", json={"prompt": list(range(100, 130)) * 100})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] == 3000 and error["n_ctx"] == 2048
    assert "3000" in error["message"] and "2048" in error["message"]


def test_an_answer_ends_where_the_context_does(server):
    answer = server.http.post(
        "/v1/completions", json={"prompt": list(range(100, 130)) * 68, "ignore_eos": True, "temperature": 0}
    ).json()
    assert answer["usage"] == {
        "prompt_tokens": 2040,
        "completion_tokens": 8,
        "total_tokens": 2048,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_empty_prompt(server):
    for prompt in ("", []):
        answer = server.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400 and "empty" in answer.json()["error"]["message"]


def test_unknown_routes_and_methods(server):
    missing = server.http.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert server.http.get(CHAT).status_code == 405


def test_the_client_library_raises_its_own_errors(server):
    with pytest.raises(openai.BadRequestError, match="messages is empty"):
        server.openai.chat.completions.create(model="tiny", messages=[])


def test_a_body_that_is_too_large(tiny):
    with running(tiny, max_body=1) as server:
        answer = server.http.post(CHAT, content=b'{"x": "' + b"y" * (1 << 20) + b'"}')
        assert answer.status_code == 413 and "--max-body" in answer.json()["error"]["message"]
        assert server.http.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200


def test_an_api_key(tiny):
    with running(tiny, api_key="secret") as server:
        assert server.http.get("/health").status_code == 200
        for path in ("/v1/models", "/v1/conversations/c"):
            refused = server.http.get(path)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "tiny"
        assert "secret" not in server.http.get("/props", headers={"Authorization": "Bearer secret"}).text


def test_a_full_queue_answers_429_and_the_rest_finish(tiny):
    with running(tiny, parallel=1, max_queue=1) as server:
        results = []

        def ask():
            with httpx.stream("POST", server.url + CHAT, json=LONG, timeout=DEADLINE) as answer:
                results.append((answer.status_code, answer.read(), answer.headers))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        with held(server):
            for thread in threads:
                thread.start()
            until(lambda: len(server.service.open) == 2)
            refused = server.http.post(CHAT, json=LONG)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for thread in threads:
            thread.join()
        assert [status for status, *_ in results] == [200, 200]
        assert server.metric("slotcache_requests_total", end="refused") == 1


LONG = {"messages": USER, "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


def test_a_client_that_goes_away_frees_its_slot(server):
    with httpx.stream("POST", server.url + CHAT, json=LONG, timeout=DEADLINE) as answer:
        next(answer.iter_lines())
    until(lambda: not server.service.open)
    until(lambda: not server.http.get("/slots").json()[0]["is_processing"])
    assert server.metric("slotcache_requests_total", end="cancelled") >= 1


def test_a_client_that_goes_away_while_it_waits_for_a_whole_answer(server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=LONG | {"stream": False}, timeout=0.2)
    until(lambda: not server.service.open)
    assert server.chat()["usage"]["completion_tokens"] == 4


def test_shutting_down_ends_every_stream(tiny):
    with running(tiny, parallel=1) as server:
        answer = server.http.send(server.http.build_request("POST", CHAT, json=LONG), stream=True)
        lines = answer.iter_lines()
        next(lines)
        server.service.engine.stop()
        events = [line.removeprefix("data: ") for line in lines if line]
        refused = server.http.post(CHAT, json={"messages": USER})
        assert refused.status_code == 503 and not server.service.open
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["type"] == "unavailable_error"


def test_a_step_that_fails_ends_what_runs_and_the_server_goes_on(tiny, monkeypatch):
    with running(tiny, failed_steps=3, parallel=1) as server:
        runner = server.service.engine.runner
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda *given: 1 / 0)
        failed = server.http.post(CHAT, json={"messages": USER})
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        monkeypatch.setattr(runner, "run", run)
        assert server.chat()["timings"]["cache_n"] == 0
        assert server.chat()["timings"]["prompt_n"] == REST


MESSAGES = {"messages": USER, "max_tokens": 3}
STREAMS = {
    "/completion": (NativeReply, {"prompt": "Hello", "n_predict": 3}),
    "/v1/completions": (TextReply, {"prompt": ["Hello", "there"], "max_tokens": 3, "n": 2}),
    CHAT: (ChatReply, MESSAGES),
    "/v1/messages": (MessagesReply, MESSAGES),
    "/v1/responses": (ResponsesReply, {"input": "Hello", "max_output_tokens": 3}),
    "/api/chat": (OllamaReply, {"messages": USER, "options": {"num_predict": 3}}),
    "/api/generate": (OllamaReply, {"prompt": "Hello", "options": {"num_predict": 3}}),
}


@pytest.mark.parametrize("step", ["begin", "delta", "end", "close"])
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_the_server_fails_in_ends_with_an_error_of_its_api(server, path, step, monkeypatch, caplog):
    """A connection that breaks off would be tried again by the clients of most APIs."""
    (form, body), name = STREAMS[path], server.host.service.name

    def fail(*given):
        raise KeyError("odd")

    monkeypatch.setattr(form, step, fail)
    with server.http.stream("POST", path, json=body | {"model": name, "stream": True, "ignore_eos": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if "{" in line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    failed = [event for event, line in zip(events, lines, strict=True) if "the server failed" in line]
    assert failed == events[-1:]
    assert not any("finish_reason" in line and '"finish_reason":null' not in line for line in lines) or step == "close"
    assert "KeyError: 'odd'" in caplog.text
    until(lambda: not server.host.service.open)


def test_a_slash_at_the_end_of_a_path_changes_nothing(server):
    body = {"messages": USER, "max_tokens": 2, "temperature": 0}
    for path in ("/health", "/v1/models", "/api/tags", "/api/version", "/props"):
        answers = [server.http.get(spelt, follow_redirects=False) for spelt in (path, f"{path}/")]
        assert [answer.status_code for answer in answers] == [200, 200] and answers[0].json() == answers[1].json(), path
    for path in (CHAT, "/chat/completions", "/v1/messages"):
        answers = [server.http.post(spelt, json=body, follow_redirects=False) for spelt in (path, f"{path}/")]
        assert [answer.status_code for answer in answers] == [200, 200], path
    assert server.http.post("/v1/messages/", json={}).json()["type"] == "error"  # in the shape of its API
    assert server.http.post("/api/chat/", json={}).json().keys() == {"error"}
    assert server.http.get("/nothing/").status_code == 404


def test_a_name_may_end_with_a_slash(server):
    named = server.http.post(CHAT, json={"messages": USER, "max_tokens": 1, "conversation": "a/"})
    assert named.status_code == 200 and server.http.get("/v1/conversations/a/").status_code == 200
    assert server.http.get("/v1/conversations/a").status_code == 404


def test_a_slash_at_the_end_needs_the_key_as_well(tiny):
    with running(tiny, api_key="secret") as up:
        assert up.http.get("/v1/models/").status_code == 401 and up.http.get("/health/").status_code == 200
