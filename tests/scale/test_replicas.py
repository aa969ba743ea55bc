"""Two replicas on Ray Serve: placement, state that one of them holds, scopes, streams, and one that is killed."""

import json
import os
import signal
import threading
import time
from collections import Counter

import httpx
import openai
import pytest

from scale.conftest import KEY, PAGE, REPLICA, USUAL, client

pytest.importorskip("ray")
PLACED = "x-slotcache-placed"
BACK = 30.0  # s in which a replica that was killed is replaced


def documents(name, number=3):
    return [{"id": f"{name}{at}", "text": f"The {name} house number {at} is red. " * 12} for at in range(number)]


def cached(answer):
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_questions_go_where_their_documents_are(replicas):
    replicas.http.delete("/v1/cache").raise_for_status()
    first = {name: replicas.chat(documents=documents(name)) for name in ("barn", "mill", "inn", "hut")}
    homes = {name: answer.headers[REPLICA] for name, answer in first.items()}
    assert set(Counter(homes.values()).values()) == {2}, "new documents fill the emptier cache"
    for name, home in homes.items():
        again = replicas.chat("Why?", documents=documents(name)[::-1])
        assert again.headers[REPLICA] == home and "3 documents" in again.headers[PLACED]
        assert cached(again) > 0.6 * again.json()["usage"]["prompt_tokens"]


def test_scopes_share_no_kv_on_any_replica(replicas):
    shown = documents("tower")
    for scope in ("one", "two"):
        assert cached(replicas.chat(documents=shown, cache_scope=scope)) == 0, "another scope's is not reused"
    for name in replicas.names():
        alone = replicas.http.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "?"}],
                "documents": shown,
                "cache_scope": "three",
                "max_tokens": 2,
            },
            headers={REPLICA: name},
        )
        assert alone.headers[REPLICA] == name and cached(alone) == 0
    again = replicas.chat(documents=shown, cache_scope="two")
    assert cached(again) > 0
    replicas.http.delete("/v1/cache", params={"scope": "two"}).raise_for_status()
    assert cached(replicas.chat(documents=shown, cache_scope="two")) == 0, "all replicas have dropped it"


def test_conversations_stay_where_they_are_and_are_shown_and_deleted(replicas):
    for number in range(4):
        id = f"conversation-{number}"
        first = replicas.chat("One", conversation=id)
        for turn in (2, 3):
            replicas.chat(documents=documents("noise", turn))  # the least busy and the emptiest one changes
            later = replicas.chat("More", conversation={"id": id, "history": "new"})
            assert later.headers[REPLICA] == first.headers[REPLICA]
            assert later.json()["slotcache"]["conversation"]["turns"] == turn
        assert replicas.http.get(f"/v1/conversations/{id}").json()["turns"] == 3
        assert replicas.http.get(f"/v1/conversations/{id}", params={"scope": "other"}).status_code == 404
        assert replicas.http.delete(f"/v1/conversations/{id}").json()["deleted"]
        assert replicas.http.get(f"/v1/conversations/{id}").status_code == 404


def test_responses_continue_and_are_shown_and_deleted(replicas):
    api = openai.OpenAI(base_url=f"{replicas.url}/v1", api_key=KEY)
    for _ in range(3):
        first = api.responses.create(model="any", input="Hello", max_output_tokens=4)
        events = api.responses.create(
            model="any", input="More", previous_response_id=first.id, max_output_tokens=4, stream=True
        )
        created, *_ = events
        assert created.type == "response.created"
        second = created.response
        assert api.responses.retrieve(second.id).previous_response_id == first.id
        assert len(api.responses.input_items.list(second.id).data) == 3
        api.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(second.id)


def test_streams_come_as_they_are_made_and_end_with_their_client(replicas):
    body = {"messages": [{"role": "user", "content": "Go"}], "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with replicas.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        name, lines = stream.headers[REPLICA], stream.iter_lines()
        for _ in range(20):
            next(lines)

    def is_cancelled():
        metrics = replicas.http.get("/metrics", headers={REPLICA: name}).text
        return 'slotcache_requests_total{end="cancelled"} 1.0' in metrics

    replicas.until(is_cancelled, 20)


def test_errors_are_the_servers_own(replicas):
    for body in (b"{", b'{"messages": []}', b'{"messages": [{"role": "user", "content": "x"}], "documents": 5}'):
        refused = replicas.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    unknown = replicas.http.get("/health", headers={REPLICA: "nobody"})
    assert unknown.status_code == 404 and "no replica" in unknown.json()["error"]["message"]
    keyless = replicas.http.post("/v1/chat/completions", json={}, headers={"Authorization": ""})
    assert keyless.status_code == 401
    for path in ("/v1/models", "/v1/replicas"):
        rebound = replicas.http.get(path, headers={"Host": "a.page.example"})
        assert rebound.status_code == 403 and "--allowed-hosts" in rebound.json()["error"]["message"]
    lost = replicas.chat(previous_response_id="resp_unknown")
    assert lost.status_code == 404 and lost.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("path", ["/v1/replicas", "/v1/models"])
def test_a_page_may_ask_where_it_is_allowed(replicas, path):
    may = "Access-Control-Allow-Origin"
    answer = replicas.http.get(path, headers={"Origin": PAGE})
    assert answer.status_code == 200 and answer.headers[may] == PAGE
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "GET", "Authorization": ""}
    before = replicas.http.options(path, headers=preflight)
    assert before.status_code == 200 and before.headers[may] == PAGE
    foreign = replicas.http.get(path, headers={"Origin": "https://other.example"})
    assert foreign.status_code == 403 and may not in foreign.headers


def test_a_replica_that_hangs_does_not_delay_new_conversations(replicas):
    kept = replicas.chat("One", conversation="kept-by-the-other")
    hung = next(iter(replicas.names() - {kept.headers[REPLICA]}))
    flying = {"messages": [{"role": "user", "content": "Go"}], "stream": True, "max_tokens": 3500, "ignore_eos": True}
    with replicas.http.stream("POST", "/v1/chat/completions", json=flying, headers={REPLICA: hung}) as stream:
        next(stream.iter_lines())  # it has more to do now, and new conversations go to the other one
        os.kill(replicas.engines()[hung], signal.SIGSTOP)
        try:
            began = time.monotonic()
            first = replicas.chat("One", conversation="begun-beside-one-that-hangs")
            assert first.status_code == 200 and first.headers[REPLICA] == kept.headers[REPLICA]
            assert time.monotonic() - began < 15
            assert replicas.names() == {kept.headers[REPLICA]}
        finally:
            os.kill(replicas.engines()[hung], signal.SIGCONT)
    replicas.until(lambda: hung in replicas.names())


def test_the_body_of_a_stranger_is_not_read(replicas):
    """Else clients without a key could take all the room that large bodies have, and each one's would go to a replica."""
    for key, status in (("", 401), (f"Bearer {KEY}", 413)):
        answer = replicas.http.post(
            "/v1/chat/completions", content=b" " * (33 << 20), headers={"Authorization": key}, timeout=60
        )
        assert answer.status_code == status


def test_the_number_of_replicas_may_follow_the_load():
    from slotcache.front.ray_app import app

    (engines,) = app({"replicas": 1, "max_replicas": 3, "parallel": 2, "threads": 1})._bound_deployment.init_args[:1]
    config = engines._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 3, 2)
    assert config.downscale_delay_s == 600


def test_requests_do_not_wait_without_limit():
    """While no replica is up, each of them holds its body in the ingress."""
    from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
        BackPressureError,
        DeploymentUnavailableError,
    )
    from slotcache.front.ray_app import BESIDE, app, turned_away

    (engines,) = app({"replicas": 3, "parallel": 2, "max_queue": 8, "threads": 1})._bound_deployment.init_args[:1]
    config = engines._bound_deployment._deployment_config
    assert config.max_ongoing_requests == 10 + BESIDE
    assert config.max_queued_requests == 3 * config.max_ongoing_requests
    for error, status in ((BackPressureError(1, 1), 429), (DeploymentUnavailableError("engines"), 503)):
        refused = turned_away(error)
        assert refused.status == status and refused.headers == {"Retry-After": "1"}


def test_a_killed_replica_costs_what_it_was_computing_and_no_more(replicas):
    """kill -9 under load: what was in flight there fails with one error, all else is answered, and another one comes."""
    conversation = "lost"
    victim = replicas.chat("One", conversation=conversation).headers[REPLICA]
    for id in ("kept", "seen"):
        body = USUAL | {"messages": [{"role": "user", "content": "One"}], "conversation": id}
        replicas.http.post("/v1/chat/completions", json=body, headers={REPLICA: victim}).raise_for_status()
    before = replicas.names()
    flying = {"messages": [{"role": "user", "content": "Go"}], "stream": True, "max_tokens": 3500, "ignore_eos": True}
    end = threading.Event()
    outcomes: list[tuple[str, float, str]] = []

    def ask(number):
        with client(replicas.url) as http:
            while not end.is_set():
                began = time.monotonic()
                try:
                    body = {"messages": [{"role": "user", "content": f"{number} {began}"}], "max_tokens": 2}
                    answer = http.post("/v1/chat/completions", json=body)
                    code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
                    outcomes.append((code, began, answer.headers.get(REPLICA, "")))
                except httpx.HTTPError as error:
                    outcomes.append((repr(error), began, ""))

    def occupy(number):
        """A long stream at the victim, cut off by its end."""
        with (
            client(replicas.url) as http,
            http.stream("POST", "/v1/chat/completions", json=flying, headers={REPLICA: victim}) as stream,
        ):
            lines = [line for line in stream.iter_lines() if line]
            ends[number] = lines[-2:]

    ends: dict[int, list[str]] = {}
    occupied = [threading.Thread(target=occupy, args=(number,)) for number in range(2)]
    askers = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in (*occupied, *askers):
        thread.start()
    replicas.until(lambda: len(outcomes) > 10)
    replicas.kill(victim)
    at = time.monotonic()
    for thread in occupied:
        thread.join(60)
    after = replicas.chat("More", conversation={"id": conversation, "history": "new"})
    (name,) = replicas.until(lambda: replicas.names() - before, BACK)
    assert replicas.http.get("/v1/models", headers={REPLICA: name}).status_code == 200
    back = time.monotonic() - at
    end.set()
    for thread in askers:
        thread.join(60)
    assert back <= BACK
    for lines in ends.values():
        assert json.loads(lines[0].removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert lines[1] == "data: [DONE]"
    failed = [(code, began - at) for code, began, _ in outcomes if code]
    assert all(code == "replica_lost" and began < 0 for code, began in failed), f"only what was in flight: {failed}"
    assert len(failed) <= len(askers)
    assert after.status_code == 200 and after.headers[REPLICA] != victim
    assert "begins anew" in after.headers[PLACED] and after.json()["slotcache"]["conversation"]["turns"] == 1
    assert replicas.http.get(f"/v1/conversations/{conversation}").json()["turns"] == 1
    kept = replicas.chat("More", conversation={"id": "kept", "history": "new"})
    assert kept.json()["slotcache"]["conversation"]["turns"] == 2, "its folder is that of the replica that was killed"
    assert kept.headers[REPLICA] == name and "begins anew" not in kept.headers[PLACED]
    assert replicas.http.get("/v1/conversations/seen").headers[REPLICA] == name
    replicas.http.delete(f"/v1/conversations/{conversation}").raise_for_status()
    for one in replicas.names():
        assert replicas.http.get(f"/v1/conversations/{conversation}", headers={REPLICA: one}).status_code == 404
