"""Streams that are finished without their clients: `on_disconnect`."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from slotcache.server.api.chat import ChatReply

from ..conftest import DEADLINE, blocked, running, until

CHAT = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": True}
FINISH = {"on_disconnect": "finish"}
ROUTE = "/v1/chat/completions"


def body_of(name, text="Tell a story.", **fields):
    messages = [{"role": "user", "content": text}]
    return CHAT | FINISH | {"conversation": {"id": name, "history": "new"}, "messages": messages} | fields


@contextmanager
def started(server, body):
    """A stream whose first event has come. Yields the answer's id; the connection is closed at the end."""
    with server.http.stream("POST", ROUTE, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        first = next(line for line in answer.iter_lines() if line.startswith("data: "))
        yield json.loads(first[6:])["id"]


def unattended(server, body):
    """Begin a stream and leave it. Returns the answer's id, once it goes on without a client or has ended."""
    with blocked(server), started(server, body) as id:
        pass
    return id


@contextmanager
def going_on(server, name, **fields):
    """A stream that goes on without its client, while the engine stands still. Yields the answer's id."""
    with blocked(server):
        with started(server, body_of(name, **fields)) as id:
            pass
        until(lambda: any(one.is_unattended for one in server.service.open))
        yield id


def whole(server, id, **query):
    """Wait for the end of an answer that goes on. Returns the whole of it."""
    until(lambda: server.http.get(f"{ROUTE}/{id}", params=query).json().get("status") != "in_progress")
    return server.http.get(f"{ROUTE}/{id}", params=query)


def test_an_answer_is_finished_and_kept_when_its_client_has_gone(server):
    with blocked(server), started(server, body_of("gone")) as id:
        assert server.http.get(f"{ROUTE}/{id}").json()["status"] == "in_progress"
    until(lambda: not server.service.open)
    reported = whole(server, id).json()
    assert reported["object"] == "chat.completion" and reported["usage"]["completion_tokens"] == 40
    stored = server.http.get("/v1/conversations/gone").json()
    assert stored["last_response_id"] == id
    assert stored["messages"][-1]["content"] == reported["choices"][0]["message"]["content"] != ""
    assert reported["slotcache"]["conversation"]["remembered"] is True


def test_an_answer_whose_client_stays_is_kept_as_it_was_streamed(server):
    with server.http.stream("POST", ROUTE, json=body_of("stays")) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    reported = whole(server, events[0]["id"]).json()
    assert reported["choices"][0]["message"]["content"] == text
    assert reported["slotcache"] == events[-1]["slotcache"]


def test_a_whole_answer_is_made_beside_other_requests(server, monkeypatch):
    goes_on, make = threading.Event(), ChatReply.whole
    monkeypatch.setattr(ChatReply, "whole", lambda *given: goes_on.wait(DEADLINE) and make(*given))
    id = unattended(server, body_of("beside"))
    until(lambda: not server.service.open)
    with ThreadPoolExecutor(1) as threads:
        try:
            assert server.http.get("/health", timeout=20).status_code == 200
            asked = threads.submit(server.http.get, f"{ROUTE}/{id}")
        finally:
            goes_on.set()
    assert asked.result().json()["usage"]["completion_tokens"] == 40, "who asks for it waits"


def test_an_answer_that_cannot_be_kept_whole_ends_all_the_same(server, monkeypatch):
    def fails(*asked):
        raise OSError("no room")

    monkeypatch.setattr(server.service.conversations, "attach", fails)
    with server.http.stream("POST", ROUTE, json=body_of("full"), timeout=20) as answer:
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines and any('"finish_reason":"length"' in line for line in lines)


def test_the_content_so_far_is_shown(server):
    with server.http.stream("POST", ROUTE, json=body_of("so far", max_tokens=1000)) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        first = next(event for event in lines if event["choices"][0]["delta"].get("content"))
        with blocked(server):
            so_far = server.http.get(f"{ROUTE}/{first['id']}").json()
            assert so_far["status"] == "in_progress" and so_far["choices"][0]["finish_reason"] is None
            (choice,) = so_far["choices"]
            assert choice["message"]["content"].startswith(first["choices"][0]["delta"]["content"])
        server.http.delete(f"{ROUTE}/{first['id']}")


def test_without_the_field_an_answer_ends_with_its_connection(server):
    id = unattended(server, body_of("ends", on_disconnect="cancel"))
    until(lambda: not server.service.open)
    assert server.http.get(f"{ROUTE}/{id}").status_code == 404
    assert server.http.get("/v1/conversations/ends").status_code == 404


def test_of_a_conversation_one_answer_goes_on(server):
    with going_on(server, "one", max_tokens=3000) as first:
        with started(server, body_of("one", "And another.")) as second:
            pass
        until(lambda: sum(one.is_unattended and not one.abandoned for one in server.service.open) == 1)
    assert whole(server, second).status_code == 200
    until(lambda: not server.service.open)
    assert server.http.get(f"{ROUTE}/{first}").status_code == 404


def test_half_of_the_queue_is_left_to_those_who_stay(tiny):
    with running(tiny, parallel=1, max_queue=3) as server:
        with blocked(server):
            for number in (1, 2, 3):
                with started(server, body_of(f"c{number}", max_tokens=3000)):
                    pass
                until(lambda number=number: sum(one.is_unattended for one in server.service.open) == number)
            first, *others = server.service.open
            assert first.abandoned and not any(one.abandoned for one in others), "the one that was left first ends"
            for one in others:
                server.http.delete(f"{ROUTE}/{one.id}")
        until(lambda: not server.service.open)


def test_an_answer_that_goes_on_can_be_stopped(server):
    with going_on(server, "stop", max_tokens=3000) as id:
        assert server.http.delete(f"{ROUTE}/{id}", params={"scope": "another"}).status_code == 404
        assert server.http.delete(f"{ROUTE}/{id}").json()["deleted"] is True
    until(lambda: not server.service.open)
    assert server.http.get(f"{ROUTE}/{id}").json()["error"]["code"] == "response_not_found"
    assert server.http.delete(f"{ROUTE}/{id}").status_code == 404


def test_a_client_that_still_reads_is_informed_of_the_stop(server):
    with blocked(server), server.http.stream("POST", ROUTE, json=body_of("told")) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        id = json.loads(next(lines)[6:])["id"]
        assert server.http.delete(f"{ROUTE}/{id}").status_code == 200
        assert json.loads(list(lines)[-1][6:])["error"]["code"] == "answer_stopped"


def test_a_forgotten_conversation_has_no_answer_that_goes_on(server):
    with going_on(server, "forgotten", max_tokens=3000):
        assert server.http.delete("/v1/conversations/forgotten").json()["deleted"] is True
    until(lambda: not server.service.open)
    assert server.http.get("/v1/conversations/forgotten").status_code == 404


def test_a_stored_answer_can_be_deleted(server):
    id = unattended(server, body_of("deleted"))
    assert whole(server, id).status_code == 200
    assert server.http.delete(f"{ROUTE}/{id}").json() == {"id": id, "object": "chat.completion.deleted", "deleted": True}
    assert server.http.get(f"{ROUTE}/{id}").status_code == 404


@pytest.mark.parametrize(
    "fields",
    [{"stream": False}, {"n": 2}, {"conversation": None}, {"store": False}, {"cache_prompt": False}],
    ids=lambda fields: next(iter(fields)),
)
def test_an_answer_that_nobody_could_fetch_is_refused(server, fields):
    answer = server.http.post(ROUTE, json=body_of("refused") | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "on_disconnect"


def test_scopes_do_not_see_each_other(server):
    id = unattended(server, body_of("scoped", cache_scope="mine"))
    assert whole(server, id, scope="mine").status_code == 200
    assert server.http.get(f"{ROUTE}/{id}").status_code == 404
    assert server.http.get(f"/v1/responses/{id}", params={"scope": "mine"}).status_code == 404


def test_nothing_piles_up_for_a_client_that_has_gone(server):
    with going_on(server, "piles", logprobs=True, top_logprobs=5):
        (generation,) = server.service.open
    until(lambda: not server.service.open)
    assert generation.events.qsize() == 0
