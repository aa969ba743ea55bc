"""What stands in front of documents is computed during the search for them, by engines that know no documents."""

import json
import threading

import pytest
from server.conftest import DEADLINE, running, until
from slotcache.front import state
from slotcache.models.demo import FILE

from front.conftest import ordering
from front.test_learning import metric
from front.upstreams import response, scripted

SYSTEM = {"role": "system", "content": "Answer from the papers, briefly, and say where it stands in them. " * 12}
ASKED = {"role": "user", "content": "What is it made of?"}
ANSWER = response("200 OK", b'{"choices":[{"message":{"role":"assistant","content":"Stone"}}]}')


def documents(*names):
    return [{"id": name, "text": f"Paper {name} says much about {name}. " * 8} for name in names]


def speculate(front, *messages, **fields):
    answer = front.http.post("/v1/speculate", json={"messages": messages} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["state"]


def cached(answer):
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def asked():
    """The bodies that reach an engine of others, and a front of it."""
    bodies = []

    def answer(body):
        bodies.append(json.loads(body))
        return ANSWER

    with scripted(answer=answer) as upstream, ordering(upstream.url, dialect="openai") as front:
        yield bodies, front


def test_the_engine_has_the_system_prompt_when_the_documents_are_found(front):
    assert speculate(front, SYSTEM, ASKED, cache_prompt=True) == "started"
    until(lambda: metric(front, "warmed") == 1)
    answer = front.chat(messages=[SYSTEM, ASKED], documents=documents("a", "b"))
    assert cached(answer) > 100
    assert speculate(front, SYSTEM, ASKED, documents=documents("a")) == "skipped", "the engine has it"


def test_it_is_a_request_of_one_token_without_the_documents(asked):
    bodies, front = asked
    fields = {"id": "turn", "stream": True, "max_tokens": 90, "documents": documents("a"), "model": "m", "temperature": 0.5}
    assert speculate(front, SYSTEM, {**ASKED, "documents": documents("b")}, **fields) == "started"
    until(lambda: metric(front, "warmed") == 1)
    (body,) = bodies
    assert body == {"messages": [SYSTEM, ASKED], "model": "m", "temperature": 0.5, "max_tokens": 1, "stream": False}
    assert speculate(front, SYSTEM, {"role": "user", "content": "Another?"}, model="m") == "skipped"
    assert speculate(front, SYSTEM, ASKED, model="other", max_completion_tokens=9) == "started"
    until(lambda: metric(front, "warmed") == 2)
    assert bodies[1]["max_completion_tokens"] == 1 and "max_tokens" not in bodies[1]


def test_documents_of_earlier_turns_stand_as_they_were_sent(asked):
    bodies, front = asked
    history = [SYSTEM, {**ASKED, "documents": documents("a", "b")}, {"role": "assistant", "content": "Stone."}]
    front.chat(messages=history[:2])
    assert speculate(front, *history, {"role": "user", "content": "And the roof?"}) == "started"
    until(lambda: metric(front, "warmed") == 1)
    first, ahead = bodies
    assert ahead["messages"][:2] == first["messages"] and len(ahead["messages"]) == 4
    answer = front.chat(messages=[*history, {"role": "user", "content": "And the roof?"}], documents=documents("c"))
    assert answer.headers["x-slotcache-order"].endswith("expected=2/3")


def test_nothing_is_sent_where_there_is_nothing_in_front_or_a_prompt_waits(asked, monkeypatch):
    bodies, front = asked
    assert speculate(front, ASKED) == "skipped"
    waiting = front.host.prefills.begin()
    assert speculate(front, SYSTEM, ASKED) == "skipped"
    waiting.end()
    monkeypatch.setattr(state, "LARGEST_WARM_UP", 100)
    assert speculate(front, SYSTEM, ASKED) == "skipped"
    assert bodies == [] and metric(front, "warmed") == 0


def test_an_engine_that_refuses_or_is_away_costs_the_head_start_only():
    with (
        scripted(answer=lambda body: response("503 Busy", b"{}")) as upstream,
        ordering(upstream.url, dialect="openai") as front,
    ):
        assert speculate(front, SYSTEM, ASKED) == "started"
        until(lambda: upstream.requests and not front.host.prefills.num_waiting)
        assert metric(front, "warmed") == 0
        assert speculate(front, SYSTEM, ASKED) == "started", "it does not have it"
    with ordering("http://127.0.0.1:9", dialect="openai") as front:
        assert speculate(front, SYSTEM, ASKED) == "started"
        until(lambda: not front.host.prefills.num_waiting)


HISTORY = [SYSTEM, {**ASKED, "documents": documents("a", "b")}, {"role": "assistant", "content": "Stone."}]


@pytest.mark.parametrize("is_away", [False, True])
def test_documents_of_earlier_turns_that_never_reached_the_engine_are_not_expected_there(is_away):
    answers = [response("503 Busy", b"{}")] if is_away else []
    with (
        scripted(answer=lambda body: answers.pop() if answers else ANSWER) as upstream,
        ordering(upstream.url, dialect="openai") as front,
    ):
        waiting = None if is_away else front.host.prefills.begin()
        state = speculate(front, *HISTORY, {"role": "user", "content": "And the roof?"})
        assert state == ("started" if is_away else "skipped")
        if waiting is not None:
            waiting.end()
        until(lambda: not (len(front.host.orders) or front.host.prefills.num_waiting))
        assert front.chat(messages=HISTORY[:2]).headers["x-slotcache-order"].endswith("expected=0/2")


def test_a_turn_ahead_goes_where_its_chat_goes():
    with scripted(answer=lambda body: ANSWER) as upstream, ordering(upstream.url, dialect="openai") as front:
        front.chat(messages=HISTORY[:2])
        assert speculate(front, *HISTORY, {"role": "user", "content": "And the roof?"}) == "started"
        until(lambda: metric(front, "warmed") == 1)
        heads = [head.lower().split(b"\r\n") for head, body in upstream.requests if body]
    chat, ahead = ([line for line in head if line.startswith(b"x-session-id: ")] for head in heads)
    assert chat == ahead != []


def test_the_number_under_way_is_bounded_and_they_end_with_the_front(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(state, "MOST_WARM_UPS", 0)
    with scripted(gate) as upstream, ordering(upstream.url, dialect="openai") as front:
        assert speculate(front, SYSTEM, ASKED) == "skipped"
        monkeypatch.setattr(state, "MOST_WARM_UPS", 1)
        assert speculate(front, SYSTEM, ASKED) == "started"
        until(lambda: upstream.requests, DEADLINE)


def test_one_that_hangs_holds_up_its_own_model_alone():
    with scripted(threading.Event()) as upstream, ordering(upstream.url, dialect="openai") as front:
        assert speculate(front, SYSTEM, ASKED, model="a") == "started"
        until(lambda: upstream.requests, DEADLINE)
        assert speculate(front, {**SYSTEM, "content": 12 * "Another. "}, ASKED, model="a") == "skipped"
        assert speculate(front, SYSTEM, ASKED, model="b") == "started"
        waiting = front.host.prefills.begin()
        assert speculate(front, SYSTEM, ASKED, model="c") == "skipped", "a client waits"
        waiting.end()
        assert speculate(front, SYSTEM, ASKED, model="c") == "started"
    assert not (front.host.prefills.num_waiting or front.host.prefills.warming)


def test_slotcache_does_it_itself():
    with running(FILE) as engine, ordering(engine.url) as front:
        assert speculate(front, SYSTEM, ASKED, documents=documents("a", "b")) == "started"
        until(lambda: engine.metric("slotcache_idle_prompt_tokens_total") > 100)
        assert metric(front, "warmed") == 0


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"messages":[1]}', b'{"messages":[{"role":"user"}],"id":3}'])
def test_what_is_no_chat_is_refused(asked, body):
    bodies, front = asked
    answer = front.http.post("/v1/speculate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and bodies == []
