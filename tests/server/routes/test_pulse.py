"""Comments in a silent stream."""

import threading
import time
from contextlib import contextmanager

import pytest

from server.conftest import running

ASKED = {"prompt": "A word", "n_predict": 1, "stream": True}


@contextmanager
def busy(server, seconds):
    """Keep the engine from all work for a while."""
    began = threading.Event()
    server.service.engine.inbox.ask(lambda: (began.set(), time.sleep(seconds)))
    assert began.wait(5)
    yield


def comments(server, seconds=0.3, **body):
    """The comments of a stream that is silent for some seconds, and its events."""
    with busy(server, seconds), server.http.stream("POST", "/completion", json=ASKED | body) as answer:
        text = answer.read().decode()
    return text.count(":\n\n"), text.count("data: {")


def test_a_silent_stream_gets_comments(server):
    silent, events = comments(server, sse_ping_interval=0.02)
    assert silent > 3 and events == 2


@pytest.mark.parametrize("interval", [-1, 0, 30, None])
def test_it_gets_none_where_none_are_wanted_or_none_is_due(server, interval):
    assert comments(server, 0.1, sse_ping_interval=interval) == (0, 2)


def test_the_setting_is_the_default(tiny):
    with running(tiny, sse_ping_interval=1) as server:
        assert comments(server, 1.3)[0] == 1
        assert comments(server, 1.3, sse_ping_interval=-1)[0] == 0


def test_a_client_that_leaves_between_comments_ends_its_stream(server):
    asked = ASKED | {"sse_ping_interval": 0.02, "n_predict": 4000, "ignore_eos": True}
    with busy(server, 0.1), server.http.stream("POST", "/completion", json=asked) as answer:
        assert next(answer.iter_lines()) == ":"
    assert server.http.post("/completion", json=ASKED | {"stream": False}).status_code == 200
