"""Prompts that are too long: the refusal says how long they are, and an equal body costs nothing more."""

import logging

import pytest
from slotcache.server.chat.prompt_length import MOST_COUNTED
from slotcache.server.http.log import FIELDS, HEADER

from server.conftest import running, until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def small(tiny):
    with running(tiny, ctx_size=512) as up:
        yield up


def refused(server, path, body):
    answer = server.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded", answer.text
    return error


@pytest.mark.parametrize("size", [600, 40_000, 300_000])
def test_the_refusal_has_the_true_length(small, size):
    words = " ".join(str(at % 977) for at in range(size // 3))
    tokens = len(small.http.post("/tokenize", json={"content": words, "parse_special": False}).json()["tokens"])
    error = refused(small, "/completion", {"prompt": words})
    assert error["n_prompt_tokens"] == tokens > error["n_ctx"] and f"has {tokens} tokens" in error["message"]
    body = {"messages": [{"role": "user", "content": words}], "documents": [words[: size // 2]]}
    counted = small.http.post(f"{CHAT}/input_tokens", json=body).json()["input_tokens"]
    assert refused(small, CHAT, body)["n_prompt_tokens"] == counted > tokens


def test_a_huge_prompt_is_estimated(small):
    words = "some words of a text, " * (MOST_COUNTED // 20)
    tokens = len(small.http.post("/tokenize", json={"content": words}).json()["tokens"])
    error = refused(small, CHAT, {"messages": [{"role": "user", "content": words}]})
    assert "has about" in error["message"] and 0.95 < error["n_prompt_tokens"] / tokens < 1.05


def num_logged(caplog, id):
    """How many lines tell of the end of a request with this id."""
    fields = [getattr(record, FIELDS, {}) for record in caplog.records]
    return sum(one.get("request_id") == id and "status" in one for one in fields)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_an_equal_body_is_refused_again_without_a_look_at_its_text(small, caplog, monkeypatch, path):
    text = f"{path} " + "again " * 3000
    body = {"max_tokens": 4} | (
        {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
    )
    monkeypatch.setitem(small.http.headers, HEADER, path)  # the line of an earlier test's request may come late
    with caplog.at_level(logging.INFO, "slotcache"):
        first = refused(small, path, body)
        built, chat = [], small.service.builder.chat
        monkeypatch.setattr(small.service.builder, "chat", lambda *given: built.append(given) or chat(*given))
        assert [refused(small, path, body) for _ in range(12)] == [first] * 12 and not built
        assert refused(small, path, body | {"temperature": 1.5}) == first and len(built) == 1
        until(lambda: num_logged(caplog, path) == 2)  # the last one is logged behind its answer
    again = [line for line in caplog.messages if "refused again" in line]
    assert [line.split(" times")[0].split()[-1] for line in again] == ["1", "10"]


def test_what_goes_on_from_a_stored_history_is_looked_at_again(small, monkeypatch):
    body = {"messages": [{"role": "user", "content": "again " * 3000}], "conversation": "long"}
    refused(small, CHAT, body)
    built, chat = [], small.service.builder.chat
    monkeypatch.setattr(small.service.builder, "chat", lambda *given: built.append(given) or chat(*given))
    refused(small, CHAT, body)
    assert len(built) == 1


def test_the_list_of_models_has_the_length_under_each_client_s_name(small):
    (entry,) = small.http.get("/v1/models").json()["data"]
    limit = small.service.submitter.limit
    assert entry["meta"]["n_ctx"] == entry["context_length"] == entry["max_model_len"] == limit


def test_any_model_is_served_where_that_is_set(tiny):
    body = {"model": "gpt-5", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with running(tiny, any_model=True) as up:
        assert up.http.get("/v1/models/gpt-5").json()["id"] == "gpt-5"
        assert up.http.post(CHAT, json=body).json()["model"] == "gpt-5"
        assert up.http.post(CHAT, json=body | {"model": None}).json()["model"] == "tiny"
    with running(tiny) as up:
        assert up.http.get("/v1/models/gpt-5").status_code == 404
        assert up.http.post(CHAT, json=body).json()["model"] == "tiny"
