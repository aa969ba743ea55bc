"""Comments in a silent stream."""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
from slotcache.server.api.reply import PING, SsePing

from server.conftest import running

ASKED = {"prompt": "A word", "n_predict": 1, "stream": True}
START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.fixture(scope="module")
def fast(tiny):
    """A server whose comments come much faster than a client may ask for."""
    with running(tiny, sse_ping_interval=0.02) as up:
        yield up


@contextmanager
def busy(server, seconds):
    """Keep the engine from all work for a while."""
    began = threading.Event()
    server.service.engine.inbox.ask(lambda: (began.set(), time.sleep(seconds)))
    assert began.wait(30)
    yield


def comments(server, seconds=0.3, **body):
    """The comments of a stream that is silent for some seconds, and its events."""
    with busy(server, seconds), server.http.stream("POST", "/completion", json=ASKED | body) as answer:
        text = answer.read().decode()
    return text.count(":\n\n"), text.count("data: {")


def test_a_silent_stream_gets_comments(fast):
    silent, events = comments(fast)
    assert silent > 3 and events == 2


@pytest.mark.parametrize("interval", [1e-9, 0.999])
def test_a_client_may_not_ask_for_more_than_one_a_second(server, interval):
    answer = server.http.post("/completion", json=ASKED | {"sse_ping_interval": interval})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "sse_ping_interval"
    assert "expected 1 s or more" in answer.json()["error"]["message"]


def test_no_comment_joins_one_that_is_still_unsent():
    async def stalled():
        """The comments that wait for a client that reads nothing, after 20 of them were due, and those sent at last."""
        sent, waiting, takes, due = [], 0, asyncio.Event(), asyncio.Event()

        async def send(message):
            nonlocal waiting
            if message is PING:
                waiting += 1
                await takes.wait()
            sent.append(message)

        ping = SsePing(send, 0.001)
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


@pytest.mark.parametrize("interval", [-1, 0, 30, None])
def test_it_gets_none_where_none_are_wanted_or_none_is_due(server, interval):
    assert comments(server, 0.1, sse_ping_interval=interval) == (0, 2)


def test_the_setting_is_the_default(tiny):
    with running(tiny, sse_ping_interval=1) as server:
        assert comments(server, 1.3)[0] == 1
        assert comments(server, 1.3, sse_ping_interval=-1)[0] == 0


def test_a_client_that_leaves_between_comments_ends_its_stream(fast):
    asked = ASKED | {"n_predict": 4000, "ignore_eos": True}
    with busy(fast, 0.1), fast.http.stream("POST", "/completion", json=asked) as answer:
        assert next(answer.iter_lines()) == ":"
    assert fast.http.post("/completion", json=ASKED | {"stream": False}).status_code == 200
