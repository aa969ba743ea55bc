"""What waits for idle time is bounded, and holds what is needed of an answer and no more."""

from collections import deque
from contextlib import contextmanager

import httpx
import pytest
from slotcache.server.service import idle
from slotcache.server.service.ahead import LikelyPrompts
from slotcache.server.service.idle import Backlog
from slotcache.slots.scope import Scope
from support.weighing import weight

from server.conftest import DEADLINE, running, until

JUNK = [[]] * 90_000  # 0.27 MB as JSON, 5 MB decoded
USER = {"role": "user", "content": "What is it?"}


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny, parallel=2, idle_prefill=True) as up:
        yield up


@contextmanager
def busy(server):
    """A long request keeps idle work from going on meanwhile."""
    body = {"messages": [USER], "max_tokens": 7000, "ignore_eos": True, "stream": True, "cache_prompt": False}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield
        assert server.service.open


@pytest.mark.parametrize("where", ["messages", "tools", "chat_template_kwargs", "response_format"])
def test_an_answer_waits_for_idle_time_as_small_as_its_request_was(server, where):
    fields = {
        "messages": {"messages": [USER | {"more": JUNK}]},
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "more": JUNK}}]},
        "chat_template_kwargs": {"chat_template_kwargs": {"more": JUNK}},
        "response_format": {"response_format": {"type": "text", "more": JUNK}},
    }[where]
    until(lambda: server.service.idle.done)
    with busy(server):
        server.chat(**fields, cache_scope=where)
        assert not server.service.idle.done
        real = weight(*server.service.idle._answers)
        assert 270_000 < real < 600_000
        assert real / 1.5 < server.metric("slotcache_idle_bytes") < real * 1.5
    until(lambda: server.service.idle.done)
    assert server.metric("slotcache_idle_bytes") == 0


def test_answers_that_wait_for_idle_time_are_bounded_in_bytes(tiny, monkeypatch):
    monkeypatch.setattr(idle, "MAX_BYTES", 1 << 20)
    with running(tiny, parallel=2, idle_prefill=True) as server, busy(server):
        for number in range(6):
            server.chat(messages=[USER | {"more": JUNK}], cache_scope=str(number))
        assert [ahead.scope.name for ahead in server.service.idle._answers] == ["3", "4", "5"]
        assert server.metric("slotcache_idle_bytes") <= 1 << 20


def work(name, num_bytes=10):
    return LikelyPrompts(Scope.shared(name), deque(), num_bytes)


def names(backlog):
    return [item.scope.name for item in backlog]


def test_the_oldest_are_let_go():
    backlog = Backlog(3, 100)
    for name in "abcd":
        backlog.add(work(name))
    assert names(backlog) == ["b", "c", "d"] and backlog.num_bytes == 30
    backlog.add(large := work("large", 85))
    assert names(backlog) == ["d", "large"] and backlog.num_bytes == 95
    backlog.add(work("too large", 101))
    assert names(backlog) == ["d", "large"] and names((backlog.oldest, backlog.next)) == ["d", "large"]
    backlog.remove(large)
    backlog.remove(large)
    assert len(backlog) == 1 and backlog.num_bytes == 10


def test_the_turn_is_the_newest_ones_or_the_oldest_ones():
    for oldest_first, expected in ((False, "b"), (True, "a")):
        backlog = Backlog(3, 100, oldest_first=oldest_first)
        for name in "ab":
            backlog.add(work(name))
        assert backlog.next.scope.name == expected
