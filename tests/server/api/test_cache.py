"""The cache filled ahead, listed and dropped, as a user sees it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from slotcache.models.times import CPU
from support.architectures import hybrid
from support.on_device import ON_DEVICE

from server.conftest import REST, cached, running, until

DOCUMENTS = [{"id": f"w{number}", "text": f"Text {number} is about the {name} of the town. " * 4} for number, name in
             enumerate(["bakery", "school", "station"])]  # fmt: skip
MESSAGES = [{"role": "user", "content": "What is there?"}]


def contents(server, scope):
    return server.http.get("/v1/cache", params={"scope": scope}).json()


def test_what_was_warmed_is_not_computed_again(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS, "cache_scope": "warm"}
    warmed = server.http.post("/v1/cache/warm", json=body | {"max_tokens": 50}).json()
    assert warmed["object"] == "cache.warm" and warmed["slotcache"]["cached_tokens"] == 0
    again = server.http.post("/v1/cache/warm", json=body).json()
    assert again["slotcache"]["cached_tokens"] == warmed["prompt_tokens"] - REST
    answer = server.chat(**body)
    assert cached(answer) == warmed["prompt_tokens"] - REST
    assert answer["usage"]["prompt_tokens"] == warmed["prompt_tokens"]
    assert cached(server.chat(**body | {"cache_scope": "not warm"})) == 0


def test_what_is_cached_is_listed_by_run_without_its_text(server):
    server.chat(messages=MESSAGES, documents=DOCUMENTS[:2], cache_scope="list")
    listed = contents(server, "list")
    documents = [run for run in listed["runs"] if run["document"]]
    assert len(documents) == 2
    assert listed["tokens"]["device"] + listed["tokens"]["host"] >= sum(run["tokens"] for run in documents) > 0
    assert all(not run["in_use"] and run["frequency"] == 1 for run in documents)
    assert "bakery" not in str(listed)
    assert contents(server, "nobody")["runs"] == []


def test_a_dropped_scope_is_gone_and_others_stay(server):
    for scope in ("drop", "keep"):
        server.chat(messages=MESSAGES, documents=DOCUMENTS, cache_scope=scope)
    dropped = server.http.delete("/v1/cache", params={"scope": "drop"}).json()
    assert dropped["object"] == "cache.dropped" and dropped["tokens"] > 50
    assert contents(server, "drop")["runs"] == []
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


@pytest.mark.parametrize("field", ["n", "n_cmpl"])
def test_a_prompt_is_warmed_once_for_all_its_choices(server, field):
    answer = server.http.post("/v1/cache/warm", json={"messages": MESSAGES, field: 3})
    assert answer.status_code == 200 and answer.json()["prompt_tokens"] > 0, answer.text


def test_a_pinned_prompt_outlives_what_fills_the_cache(tiny):
    with running(tiny, ctx_size=1024, cache_ram=0) as up:
        body = {"messages": MESSAGES, "documents": DOCUMENTS}
        pinned = up.http.post("/v1/cache/warm", json=body | {"pin": True, "ttl": 600}).json()
        assert pinned["pinned_tokens"] == pinned["prompt_tokens"]
        assert f"slotcache_pinned_tokens {pinned['prompt_tokens']}.0" in up.http.get("/metrics").text
        for number in range(6):
            for _ in range(2):
                up.chat(f"Something else, number {number}: " + f"word{number} " * 60, max_tokens=1)
        assert cached(up.chat(**body)) == pinned["prompt_tokens"] - REST
        assert all(run["pinned"] for run in up.http.get("/v1/cache").json()["runs"] if run["document"])
        released = up.http.post("/v1/cache/warm", json=body | {"pin": False}).json()
        assert released["pinned_tokens"] == 0
        assert "slotcache_pinned_tokens 0.0" in up.http.get("/metrics").text


def test_a_ttl_without_a_pin_is_refused(server):
    answer = server.http.post("/v1/cache/warm", json={"messages": MESSAGES, "ttl": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "ttl"
    answer = server.http.post("/v1/cache/warm", json={"messages": MESSAGES, "pin": True, "ttl": -1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "ttl"


def test_snapshots_are_pinned_too(tmp_path):
    with running(hybrid(tmp_path / "hybrid.gguf")) as up:
        messages = [{"role": "user", "content": "A question that is long enough for a state of its own. " * 8}]
        warmed = up.http.post("/v1/cache/warm", json={"messages": messages, "pin": True}).json()
        assert warmed["pinned_tokens"] == warmed["prompt_tokens"] > 0
        cache = up.http.get("/v1/cache").json()
        assert cache["snapshots"][-1]["tokens"] == cache["tokens"]["host"] == warmed["prompt_tokens"]
        assert all(run["pinned"] and run["host"] for run in cache["runs"])
        warmed = up.http.post("/v1/cache/warm", json={"messages": messages, "pin": False}).json()
        assert warmed["slotcache"]["source"] == "snapshot" and warmed["pinned_tokens"] == 0
        body = {"messages": MESSAGES, "documents": DOCUMENTS}
        up.http.post("/v1/cache/warm", json=body)
        foreseen = up.http.post("/v1/documents/order", json=body).json()["cached_tokens"]
        assert foreseen == up.http.post("/v1/cache/warm", json=body).json()["slotcache"]["cached_tokens"] > 0


@pytest.mark.skipif(ON_DEVICE, reason="the times of a device decide")
def test_the_kv_of_those_who_answer_is_set_aside_while_a_prompt_is_computed(tiny):
    long = " ".join(f"word{number}" for number in range(400))
    with running(tiny, flash_attn="on", parallel=3) as server, ThreadPoolExecutor() as pool:
        tree = server.service.engine.scheduler.tree
        tree.costs = replace(tree.costs, swap_from_tokens=CPU.swap_from_tokens, cells_per_run=CPU.cells_per_run)
        questions = [f"{letter} {long}" for letter in "abc"]
        for question in questions:
            server.chat(question, cache_prompt=False, max_tokens=60)
        assert server.metric("slotcache_set_aside_tokens_total") == 0
        answers = list(pool.map(lambda question: server.chat(question, max_tokens=60), questions))
        assert server.metric("slotcache_set_aside_tokens_total") > 100
    assert all(answer["usage"]["completion_tokens"] == 60 for answer in answers)


def test_a_client_finds_its_own_texts_among_the_runs_by_their_ids(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[:2], "cache_scope": "ids", "report_segments": True}
    first, second = server.chat(**body), server.chat(**body | {"messages": [{"role": "user", "content": "Where is it?"}]})
    runs = {run["id"]: run for run in contents(server, "ids")["runs"]}
    assert all(run["parent"] in runs or (run["start"] == 0 and run["parent"] is None) for run in runs.values())
    for run in runs.values():
        above = runs.get(run["parent"])
        assert run["start"] == (above["start"] + above["tokens"] if above else 0)
    ends = {segment["id"]: segment["label"] for segment in segments(first)}
    named = {ends[id] for id in runs if id in ends}
    assert {"document w0", "document w1", "message 0 (user)"} <= named
    common = {one["id"] for one in segments(first)} & {one["id"] for one in segments(second)}
    assert {ends[id] for id in common} >= {"document w0", "document w1"} and "message 0 (user)" not in {
        ends[id] for id in common
    }
    other = server.chat(**body | {"cache_scope": "other ids"})
    assert segments(other)[-1]["id"] == segments(first)[-1]["id"] and contents(server, "nobody")["runs"] == []


def test_the_segments_of_a_prompt_add_up_to_what_was_reused(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS, "cache_scope": "segments", "report_segments": True}
    cold, warm = server.chat(**body), server.chat(**body)
    for answer in (cold, warm):
        parts = segments(answer)
        assert sum(part["tokens"] for part in parts) == answer["usage"]["prompt_tokens"]
        assert sum(sum(part["cached_tokens"].values()) for part in parts) == cached(answer)
        assert all(sum(part["cached_tokens"].values()) <= part["tokens"] for part in parts)
    by_label = {part["label"]: part for part in segments(warm)}
    document = by_label["document w0"]
    assert document["cached_tokens"] in ({"own": document["tokens"]}, {"fork": document["tokens"]})
    assert document["saved_ms"] > 0 and not any(part["saved_ms"] for part in segments(cold))
    assert "segments" not in server.chat(**body | {"report_segments": False})["slotcache"]


def test_runs_that_were_written_to_disk_say_so(tiny, tmp_path):
    body = {"messages": MESSAGES, "documents": DOCUMENTS, "report_segments": True}
    with running(tiny, cache_dir=str(tmp_path)) as up:
        up.chat(**body)
        until(lambda: all(run["disk"] and run["host"] for run in contents(up, "")["runs"]))
    with running(tiny, cache_dir=str(tmp_path)) as up:
        assert not contents(up, "")["runs"], "nothing is read before it is asked for"
        sources = {source for part in segments(up.chat(**body)) for source in part["cached_tokens"]}
        assert sources == {"disk"}
        assert any(run["disk"] for run in contents(up, "")["runs"])
    with running(tiny) as up:
        up.chat(**body)
        assert not any(run["disk"] for run in contents(up, "")["runs"])


def segments(answer):
    return answer["slotcache"]["segments"]
