"""Prompts that are too long: the refusal says how long they are, and an equal body costs nothing more."""

import logging
import re

import pytest
from slotcache.server.chat.prompt_length import MOST_COUNTED
from slotcache.server.chat.text_prompt import MOST_TEXTS
from slotcache.server.http.log import FIELDS, HEADER
from support.dialects import ALL, MESSAGES, OF, RESPONSES, Ollama

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


@pytest.fixture(scope="module")
def large(tiny):
    with running(tiny, ctx_size=131072) as up:
        yield up


@pytest.mark.parametrize("size", [600, 40_000, 300_000])
def test_the_refusal_has_the_true_length(small, size):
    words = " ".join(str(at % 977) for at in range(size // 3))
    tokens = len(small.http.post("/tokenize", json={"content": words, "parse_special": False}).json()["tokens"])
    error = refused(small, "/completion", {"prompt": words})
    assert error["n_prompt_tokens"] == tokens > error["n_ctx"] and f"has {tokens} tokens" in error["message"]
    assert f"size of {error['n_ctx']}" in error["message"]
    body = {"messages": [{"role": "user", "content": words}], "documents": [words[: size // 2]]}
    counted = small.http.post(f"{CHAT}/input_tokens", json=body).json()["input_tokens"]
    assert refused(small, CHAT, body)["n_prompt_tokens"] == counted > tokens


def test_a_huge_prompt_is_estimated(small):
    words = "some words of a text, " * (MOST_COUNTED // 20)
    tokens = len(small.http.post("/tokenize", json={"content": words}).json()["tokens"])
    error = refused(small, CHAT, {"messages": [{"role": "user", "content": words}]})
    assert "has about" in error["message"] and 0.95 < error["n_prompt_tokens"] / tokens < 1.05


def calls(monkeypatch, server):
    """Count the calls of llama.cpp that tokenise, in a list."""
    made, tokenizer = [], server.service.model.tokenizer
    call = type(tokenizer)._call
    monkeypatch.setattr(
        type(tokenizer), "_call", lambda self, text, special: made.append(len(text)) or call(self, text, special)
    )
    return made


@pytest.mark.parametrize("api", ALL, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_each_api_has_the_words_that_its_clients_look_for(small, api, stream):
    """Claude Code compacts at these numbers, and others at these words."""
    answer = api.ask(small, "word " * 3000, stream=stream)
    message, error = api.refused(answer), answer.json()["error"]
    if isinstance(api, Ollama):
        assert message.startswith("the input length exceeds the context length: the prompt has ")
        return
    assert error["code"] == "context_length_exceeded" and "exceeds the available context size" in message
    assert 3000 < error["n_prompt_tokens"] < 7000
    if api is MESSAGES:
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
        assert found and [int(found[1]), int(found[2])] == [error["n_prompt_tokens"], error["n_ctx"] - 1]


def test_the_length_of_texts_that_are_not_tokenised_is_the_least_that_they_have(small):
    """By the longest of them alone the estimate would be less than the context has."""
    error = refused(small, "/completion", {"prompt": [5, *["a" * 30, *"bcdefghij" * 60]]})
    assert error["n_prompt_tokens"] >= 542 > error["n_ctx"]


@pytest.mark.parametrize("prompt", [["a", 5] * 100_000, [5, "", "a"] * 100_000, [{"prompt_string": ["a", 5] * 50_000}]])
def test_texts_and_ids_that_are_too_many_are_refused_before_they_are_tokenised(small, monkeypatch, prompt):
    made = calls(monkeypatch, small)
    error = refused(small, "/completion", {"prompt": prompt})
    assert error["n_prompt_tokens"] >= 50_000 and len(made) <= 1, "the sample for the estimate"
    assert "has about" in error["message"]


def test_ids_that_are_too_many_are_counted(small, monkeypatch):
    made = calls(monkeypatch, small)
    assert refused(small, "/completion", {"prompt": [5] * 70_000})["n_prompt_tokens"] == 70_000 and not made


def test_of_many_prompts_none_is_tokenised_after_one_that_is_too_long(small, monkeypatch):
    made = calls(monkeypatch, small)
    refused(small, "/completion", {"prompt": ["word " * 1000] * 100})
    assert len(made) == 1


@pytest.mark.parametrize(
    "path", ["/completion", CHAT, f"{CHAT}/input_tokens", "/v1/messages/count_tokens", "/apply-template"]
)
@pytest.mark.parametrize("as_documents", [False, True])
def test_a_large_prompt_is_tokenised_until_it_is_too_long(large, monkeypatch, path, as_documents):
    text, made = "some words of a text, " * (2 * MOST_COUNTED // 22), calls(monkeypatch, large)
    if path == "/completion":
        body = {"prompt": text}
    elif as_documents and "messages/" not in path:
        texts = [f"{at} {text[: len(text) // 40]}" for at in range(40)]
        body = {"messages": [{"role": "user", "content": "?", "documents": texts[at::2]} for at in range(2)]}
    else:
        body = {"messages": [{"role": "user", "content": text}]}
    error = refused(large, path, body)
    assert "has about" in error["message"] and error["n_prompt_tokens"] > error["n_ctx"]
    if "messages/" in path:
        assert re.match(r"prompt is too long: \d+ tokens > \d+ maximum", error["message"])
    assert sum(made) < 0.6 * len(text), "as far as the context goes, and the sample"


def test_a_text_for_its_tokens_may_be_longer_than_the_context_and_has_few_texts_among_its_ids(small):
    text = "some words of a text, " * 20_000
    assert len(small.http.post("/tokenize", json={"content": text}).json()["tokens"]) > 10 * 512
    answer = small.http.post("/tokenize", json={"content": ["a", 5] * (MOST_TEXTS + 1)})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "content"
    assert len(small.http.post("/tokenize", json={"content": ["a", 5] * MOST_TEXTS}).json()["tokens"]) == 2 * MOST_TEXTS


def num_logged(caplog, id):
    """How many lines tell of the end of a request with this id."""
    fields = [getattr(record, FIELDS, {}) for record in caplog.records]
    return sum(one.get("request_id") == id and "status" in one for one in fields)


@pytest.mark.parametrize("api", [OF[CHAT], RESPONSES, MESSAGES], ids=str)
def test_an_equal_body_is_refused_again_without_a_look_at_its_text(small, caplog, monkeypatch, api):
    path, body = api.path, api.body(f"{api} " + "again " * 3000)
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
