"""What waits for a silent upstream is bounded, in number and in memory; the rest is told to come again."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from server.conftest import until
from slotcache.front.state import MOST_PROBES

from front.conftest import USUAL, free_port, ordering
from front.test_hosting import is_up
from front.upstreams import DONE, END, STREAM, chunk, event, response, scripted

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "?"}]}
SILENCE = 3600.0  # s: no answer comes before the end of a test
BODIES = {
    "plain": ("/v1/completions", lambda text: {"prompt": text}),
    "chat": (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}),
    "documents": (CHAT, lambda text: QUESTION | {"documents": [text]}),
}


@contextmanager
def waiting(port: int, path: str, body: bytes | dict[str, Any] = b"", method: str = "POST") -> Iterator[socket.socket]:
    """A request that is sent whole; its answer is still to come."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        about = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{about}\r\n\r\n".encode() + data)
        yield connection


@pytest.mark.parametrize(("kind", "number"), [("plain", 12), ("chat", 3), ("documents", 3)])
def test_many_large_bodies_before_a_silent_upstream_take_little_memory(kind, number):
    path, make = BODIES[kind]
    port, body, refused = free_port(), json.dumps(make("x" * 30_000_000)).encode(), []
    with scripted(SILENCE) as upstream, running(upstream.url, port) as process, ExitStack() as open_ones:
        for at in range(number):
            asked = open_ones.enter_context(waiting(port, path, body))
            until(lambda at=at, asked=asked: len(upstream.requests) + len(refused) > at or has_come(asked, refused))
        assert 1 <= len(upstream.requests) <= 4 and len(refused) == number - len(upstream.requests)
        for answer in refused:
            assert answer.startswith(b"HTTP/1.1 503") and re.search(rb"(?i)\r\nretry-after: \d+\r\n", answer)
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        most = int(peak[1]) if peak else 0
        assert 0 < most < 250 << 10, f"{most >> 10} MiB"


def has_come(connection, answers):
    """Whether an answer has begun; then it is one of `answers`."""
    connection.settimeout(0.01)
    try:
        answers.append(connection.recv(1 << 16))
    except TimeoutError:
        return False
    return True


@contextmanager
def running(upstream, port):
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "slotcache.server.cli", "order", "--upstream", upstream, "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*command, "--dialect", "openai"], env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: is_up(port))
            yield process
        finally:
            process.kill()


def test_one_more_request_than_may_be_relayed_comes_again():
    with (
        scripted(SILENCE) as upstream,
        ordering(upstream.url, dialect="openai", max_relayed=2) as front,
        waiting(front.port, CHAT, QUESTION),
    ):
        with waiting(front.port, "/v1/models", method="GET"):
            until(lambda: len(upstream.requests) == 2)
            for path in (CHAT, "/v1/completions"):
                answer = front.http.post(path, json=QUESTION)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1") and "--max-relayed" in answer.text
            assert front.http.get("/metrics").status_code == 200
        until(lambda: front.host.room.num_relayed == 1)
        with waiting(front.port, CHAT, QUESTION):
            until(lambda: len(upstream.requests) == 3)


def test_questions_for_health_keep_no_request_out():
    """Anybody may ask them."""
    with (
        scripted(SILENCE) as upstream,
        ordering(upstream.url, dialect="openai", max_relayed=1) as front,
        ExitStack() as asked,
    ):
        for _ in range(MOST_PROBES):
            asked.enter_context(waiting(front.port, "/health", method="GET"))
        until(lambda: len(upstream.requests) == MOST_PROBES)
        answer = front.http.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        with waiting(front.port, CHAT, QUESTION):
            until(lambda: len(upstream.requests) == MOST_PROBES + 1)


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_a_body_takes_no_room_once_the_upstream_answers(kind):
    path, make = BODIES[kind]
    body = make("x" * 900_000) | {"stream": True}
    with (
        scripted(STREAM, chunk(event("one")), SILENCE) as upstream,
        ordering(upstream.url, hosting={"max_body": 1}, dialect="openai") as front,
        ExitStack() as open_ones,
    ):
        for _ in range(8):  # twice as many as there is room for
            connection = open_ones.enter_context(waiting(front.port, path, body))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert front.host.room.bodies.room == 4 << 20 and front.host.room.num_relayed == 8


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_takes_no_room_once_its_answer_has_ended(kind):
    path, make = BODIES[kind]
    with (
        scripted(STREAM, chunk(DONE), END) as upstream,
        ordering(upstream.url, hosting={"max_body": 1}, dialect="openai") as front,
    ):
        for _ in range(8):
            assert front.http.post(path, json=USUAL | make("x" * 900_000)).content == DONE
        until(lambda: front.host.room.num_relayed == 0)
        assert front.host.room.bodies.room == 4 << 20
        assert json.loads(upstream.requests[-1][1]).keys() >= {"prompt" if kind == "plain" else "messages"}


def test_an_answer_for_which_there_is_no_room_is_relayed_as_it_comes():
    body = b'{"text":"' + b"x" * 300_000 + b'"}'
    with (
        scripted(response("200 OK", body)) as whole,
        scripted(response("200 OK", body)[:-9]) as broken,
        ordering(whole.url, hosting={"max_body": 1}) as front,
        ordering(broken.url, hosting={"max_body": 1}) as other,
    ):
        assert other.http.get("/v1/models").status_code == 502, "it was held until it would be whole"
        front.host.room.bodies.room = other.host.room.bodies.room = 100_000
        assert front.http.get("/v1/models").content == body
        with other.http.stream("GET", "/v1/models") as answer:
            assert answer.status_code == 200
    assert front.host.room.bodies.room == other.host.room.bodies.room == 100_000
