"""A stream is never silent: its first event comes before the prompt is computed, and pings follow."""

import asyncio
import itertools
import json
import threading
import time
from contextlib import contextmanager

import pytest
from slotcache.server.api.stream import SsePing
from slotcache.server.http.connection import Shortcut

from server.conftest import DEADLINE, blocked, running

ASKED = {"prompt": "A word", "n_predict": 1, "stream": True}
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


def test_a_message_stays_after_a_ping_that_was_made_before_it():
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
        with blocked(server) as go, server.http.stream("POST", "/v1/completions", json=ASKED) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            assert next(lines) == next(lines), "the first event, and a ping"
            go.set()
            assert list(lines)
        assert pings(server, 1.3, sse_ping_interval=-1) == 0


def test_a_client_that_disconnects_between_pings_ends_its_stream(fast):
    asked = ASKED | {"n_predict": 4000, "ignore_eos": True}
    with blocked(fast), fast.http.stream("POST", "/completion", json=asked) as answer:
        lines = filter(None, answer.iter_lines())
        assert next(lines) == next(lines)
    assert fast.http.post("/completion", json=ASKED | {"stream": False}).status_code == 200
