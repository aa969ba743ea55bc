"""What the server says when it cannot do what was asked. One shape for all errors, pinned here."""

import httpx
import openai
import pytest

from server.conftest import DEADLINE, REST, running, until

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


def test_an_empty_prompt(server):
    for prompt in ("", []):
        answer = server.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400 and "empty" in answer.json()["error"]["message"]


def test_the_client_library_raises_its_own_errors(server):
    with pytest.raises(openai.BadRequestError, match="messages is empty"):
        server.openai.chat.completions.create(model="tiny", messages=[])


def test_an_api_key(tiny):
    with running(tiny, api_key="secret") as server:
        assert [server.http.get(path).status_code for path in ("/health", "/health/")] == [200, 200]
        for path in ("/v1/models", "/v1/models/", "/v1/conversations/c"):
            refused = server.http.get(path)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert server.http.get("/api/tags").status_code == 401
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "tiny"
        assert "secret" not in server.http.get("/props", headers={"Authorization": "Bearer secret"}).text


def test_a_client_that_goes_away_while_it_waits_for_a_whole_answer(server):
    patience = httpx.Timeout(DEADLINE, read=0.2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json={"messages": USER, "max_tokens": 1500, "ignore_eos": True}, timeout=patience)
    until(lambda: not server.service.open)
    assert server.chat()["usage"]["completion_tokens"] == 4


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
