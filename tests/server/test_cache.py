"""The cache filled ahead, listed and dropped, as a user sees it."""

import pytest

DOCUMENTS = [{"id": f"w{number}", "text": f"Text {number} is about the {name} of the town. " * 4} for number, name in
             enumerate(["bakery", "school", "station"])]  # fmt: skip
MESSAGES = [{"role": "user", "content": "What is there?"}]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def holdings(server, scope):
    return server.http.get("/v1/cache", params={"scope": scope}).json()


def test_what_was_warmed_is_not_computed_again(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS, "cache_scope": "warm"}
    warmed = server.http.post("/v1/cache/warm", json=body | {"max_tokens": 50}).json()
    assert warmed["object"] == "cache.warm" and warmed["slotcache"]["cached_tokens"] == 0
    again = server.http.post("/v1/cache/warm", json=body).json()
    assert again["slotcache"]["cached_tokens"] == warmed["prompt_tokens"] - 1
    answer = server.chat(**body)
    assert cached(answer) == warmed["prompt_tokens"] - 1
    assert answer["usage"]["prompt_tokens"] == warmed["prompt_tokens"]
    assert cached(server.chat(**body | {"cache_scope": "not warm"})) == 0


def test_what_is_cached_is_listed_by_run_without_its_text(server):
    server.chat(messages=MESSAGES, documents=DOCUMENTS[:2], cache_scope="list")
    listed = holdings(server, "list")
    documents = [run for run in listed["runs"] if run["document"]]
    assert len(documents) == 2
    assert listed["tokens"]["device"] + listed["tokens"]["host"] >= sum(run["tokens"] for run in documents) > 0
    assert all(not run["in_use"] and run["frequency"] == 1 for run in documents)
    assert "bakery" not in str(listed)
    assert holdings(server, "nobody")["runs"] == []


def test_a_dropped_scope_is_gone_and_others_stay(server):
    for scope in ("drop", "keep"):
        server.chat(messages=MESSAGES, documents=DOCUMENTS, cache_scope=scope)
    dropped = server.http.delete("/v1/cache", params={"scope": "drop"}).json()
    assert dropped["object"] == "cache.dropped" and dropped["tokens"] > 50
    assert holdings(server, "drop")["runs"] == []
    assert cached(server.chat(messages=MESSAGES, documents=DOCUMENTS, cache_scope="drop")) == 0
    assert cached(server.chat(messages=MESSAGES, documents=DOCUMENTS, cache_scope="keep")) > 50
    assert server.http.delete("/v1/cache", params={"scope": "nobody"}).json()["tokens"] == 0


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/cache"), ("DELETE", "/v1/cache")])
def test_a_scope_that_is_too_long_is_refused(server, method, path):
    answer = server.http.request(method, path, params={"scope": "x" * 300})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "scope"


def test_a_prompt_that_cannot_fit_cannot_be_warmed(server):
    body = {"messages": [{"role": "user", "content": "word " * 9000}]}
    answer = server.http.post("/v1/cache/warm", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
