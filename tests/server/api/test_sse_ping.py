"""A stream is never silent: its first event comes before the prompt is computed, and pings follow."""

import asyncio
import itertools
import json
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from slotcache.server.api.stream import SsePing
from slotcache.server.http.connection import Shortcut

from server.conftest import DEADLINE, held, running

ASKED = {"prompt": "A word", "n_predict": 1, "stream": True}
MESSAGES = {"messages": [{"role": "user", "content": "A word"}], "max_tokens": 1, "stream": True}
RESPONSE = {"input": "A word", "max_output_tokens": 1, "stream": True}
ROUTES = {
    "/v1/completions": (ASKED, ["text_completion"] * 2),
    "/v1/chat/completions": (MESSAGES, ["chat.completion.chunk"] * 2),
    "/v1/messages": (MESSAGES, ["message_start", "ping", "ping"]),
    "/v1/responses": (RESPONSE, ["response.created", "response.in_progress", "response.in_progress"]),
}
"""Bodies, and the kinds of the events that come while the engine computes nothing: the first, and a ping."""
START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.fixture(scope="module")
def fast(tiny):
    """A server whose pings come much faster than a client may ask for."""
    with running(tiny, sse_ping_interval=0.02) as up:
        yield up


@contextmanager
def busy(server, seconds):
    """Keep the engine from all work for a while."""
    began = threading.Event()
    server.service.engine.inbox.ask(lambda: (began.set(), time.sleep(seconds)))
    assert began.wait(DEADLINE)
    yield


def pings(server, seconds=0.3, **body):
    """The pings of a stream that is silent for some seconds: chunks without text, but for the first event."""
    with busy(server, seconds), server.http.stream("POST", "/v1/completions", json=ASKED | body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    first, *others, text, last = [event["choices"][0] for event in events]
    assert last["finish_reason"] and text["text"] and all(one == first for one in others)
    return len(others)


@pytest.mark.parametrize("path", ROUTES)
def test_events_come_while_the_prompt_waits(fast, path):
    body, expected = ROUTES[path]
    with held(fast) as go, fast.http.stream("POST", path, json=body) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        early = [next(events) for _ in expected]
        go.set()
        rest = list(events)
    assert [event.get("type", event.get("object")) for event in early] == expected
    assert rest and "error" not in rest[-1]
    if path == "/v1/responses":
        numbers = [event["sequence_number"] for event in (*early, *rest)]
        assert numbers == list(range(len(numbers)))
    if path == "/v1/messages":
        first, last = early[0]["message"]["usage"], rest[-2]["usage"]
        assert first["input_tokens"] == last["input_tokens"] > 0 and first["output_tokens"] == 0


@pytest.mark.parametrize("path", ROUTES)
def test_what_can_be_refused_is_refused_before_the_first_event(fast, path):
    body, _ = ROUTES[path]
    long = "A word. " * 9000
    too_long = {name: long for name in ("prompt", "input") if name in body} or {
        "messages": [{"role": "user", "content": long}]
    }
    for wrong in (too_long, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}):
        assert fast.http.post(path, json=body | wrong).status_code == 400


def test_a_silent_stream_gets_pings(fast):
    with held(fast) as go, fast.http.stream("POST", "/v1/completions", json=ASKED) as answer:
        events = (json.loads(line[6:])["choices"][0] for line in answer.iter_lines() if line.startswith("data: {"))
        first, *others = [next(events) for _ in range(5)]
        go.set()
        *_, text, last = events
    assert all(one == first for one in others) and text["text"] and last["finish_reason"]


def test_native_streams_have_comments_instead(fast):
    with held(fast) as go, fast.http.stream("POST", "/completion", json=ASKED) as answer:
        lines = answer.iter_lines()
        early = [next(lines) for _ in range(2)]
        go.set()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert early == [":", ""] and all(event["tokens"] for event in events[:-1]) and events[-1]["stop"]


def test_every_stream_begins_before_its_prompt_is_computed(tiny):
    """Those whose parsers look for tokens in each piece, with a comment or an empty line."""
    asked = {"/completion": ASKED, "/infill": ASKED | {"input_prefix": "A", "input_suffix": "word"}}
    ollama = MESSAGES | {"model": "any", "options": {"num_predict": 1}}
    asked |= {
        "/api/chat": ollama,
        "/api/generate": ollama | {"prompt": "A word"},
        **{path: ROUTES[path][0] for path in ROUTES},
    }
    with running(tiny, sse_ping_interval=-1, any_model=True) as server:
        for path, body in asked.items():
            with held(server) as go, server.http.stream("POST", path, json=body) as answer:
                if answer.status_code == 501:
                    continue  # a model that cannot fill gaps
                lines = answer.iter_lines()
                assert next(lines).startswith((":", "data: ", "event: ", "{")), path
                go.set()
                assert list(lines), path


def test_a_full_queue_is_refused_before_the_first_event(tiny):
    with running(tiny, parallel=1, max_queue=0) as server, held(server) as go, ExitStack() as open_streams:
        first = open_streams.enter_context(server.http.stream("POST", "/v1/completions", json=ASKED))
        lines = filter(None, first.iter_lines())
        next(lines)
        assert server.http.post("/completion", json=ASKED).status_code == 429
        go.set()
        assert [*lines][-1] == "data: [DONE]"


@pytest.mark.parametrize("interval", [1e-9, 0.999])
def test_a_client_may_not_ask_for_more_than_one_ping_a_second(server, interval):
    answer = server.http.post("/completion", json=ASKED | {"sse_ping_interval": interval})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "sse_ping_interval"
    assert "expected 1 s or more" in answer.json()["error"]["message"]


def test_no_ping_joins_one_that_is_still_unsent():
    async def stalled():
        """The pings that wait for a client that reads nothing, after 20 of them were due, and those sent at last."""
        sent, waiting, takes, due = [], 0, asyncio.Event(), asyncio.Event()

        async def send(message):
            nonlocal waiting
            if message.get("body") == b"ping":
                waiting += 1
                await takes.wait()
            sent.append(message)

        ping = SsePing(send, 0.001, lambda: [b"ping"])
        beat, beats = ping._beat, 0

        def counted():
            nonlocal beats
            beats += 1
            beat()
            if beats == 20:
                due.set()

        ping._beat = counted
        await ping.send(START)
        await due.wait()
        most = waiting
        takes.set()
        await ping.send(END)
        return most, sent

    most, sent = asyncio.run(stalled())
    assert most == 1 and sent[0] is START and sent[-1] is END


def test_a_message_stays_behind_a_ping_that_was_made_before_it():
    async def numbered():
        """The numbers of what is sent where a ping waits as the last message comes."""
        numbers, sent, made, takes = itertools.count(), [], asyncio.Event(), asyncio.Event()

        def number():
            made.set()
            return [b"%d" % next(numbers)]

        async def send(message):
            if message.get("more_body"):
                await takes.wait()
            sent.append(message.get("body"))

        ping = SsePing(send, 0.001, number)
        await ping.send(START)
        await made.wait()
        last = asyncio.ensure_future(ping.send(END | {"body": b"%d" % next(numbers)}))
        asyncio.get_running_loop().call_soon(takes.set)
        await last
        return sent

    assert asyncio.run(numbered()) == [None, b"0", b"1"]


def test_text_is_not_written_past_a_ping_that_was_made_before_it(fast, monkeypatch):
    """The ping is sent in a later turn of the event loop than it is made in."""
    monkeypatch.setattr(SsePing, "is_sending", property(lambda self: True))
    monkeypatch.setattr(Shortcut, "write", lambda self, data: pytest.fail("it was"))
    asked = ASKED | {"n_predict": 9, "ignore_eos": True}
    with fast.http.stream("POST", "/completion", json=asked) as answer:
        assert sum(line.startswith("data: ") for line in answer.iter_lines()) >= 9


@pytest.mark.parametrize("interval", [-1, 0, 30, None])
def test_it_gets_none_where_none_are_wanted_or_none_is_due(server, interval):
    assert pings(server, 0.1, sse_ping_interval=interval) == 0


def test_the_setting_is_the_default(tiny):
    with running(tiny, sse_ping_interval=1) as server:
        assert pings(server, 1.3) >= 1
        assert pings(server, 1.3, sse_ping_interval=-1) == 0


def test_a_client_that_leaves_between_pings_ends_its_stream(fast):
    asked = ASKED | {"n_predict": 4000, "ignore_eos": True}
    with held(fast), fast.http.stream("POST", "/completion", json=asked) as answer:
        lines = filter(None, answer.iter_lines())
        assert next(lines) == next(lines)
    assert fast.http.post("/completion", json=ASKED | {"stream": False}).status_code == 200
