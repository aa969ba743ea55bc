"""More connections than places: who waits longest for its client makes room, and nobody who is at work."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import aiohttp
import httpx
import pytest
import uvicorn
from slotcache.front.cli import make_server as make_front
from slotcache.front.settings import FrontSettings
from slotcache.server.config.settings import Settings
from slotcache.server.http.connection import MOST_GATHERED, Connection, GatheringTransport
from slotcache.server.http.connections import ListeningServer, most_connections

from server.conftest import blocked, running, until

PLACES = 8
NEVER = 1e6  # seconds
HALF = b"POST /tokenize HTTP/1.1\r\nHost: loc"
BODY = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
CHAT = "/v1/chat/completions"
CHATTED = {"messages": [{"role": "user", "content": "A word?"}], "max_tokens": 4, "ignore_eos": True, "stream": True}
ASKED = {"prompt": "A word", "n_predict": 5, "ignore_eos": True, "stream": True}


@pytest.fixture
def server(tiny):
    with running(tiny) as up:
        up.http.close()
        until(lambda: not up.uvicorn.server_state.connections)
        up.uvicorn.server_state.most = PLACES
        yield up
        assert len(up.uvicorn.server_state.connections) <= PLACES


@contextmanager
def opened(server, number, sent=b""):
    with ExitStack() as open_ones:
        clients = [open_ones.enter_context(socket.create_connection(address(server), 30)) for _ in range(number)]
        for client in clients:
            client.sendall(sent)
        yield clients


def address(server):
    return "127.0.0.1", httpx.URL(server.url).port


def is_closed(client):
    """Whether the server has closed a connection."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def asks(server, path="/health"):
    return httpx.get(server.url + path, timeout=30).status_code == 200


def streaming(server):
    """A stream whose answer has not begun."""
    body = json.dumps(ASKED).encode()
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return opened(server, 1, head + body)


class Written:
    """What connections write from now on, by call of the system."""

    def __init__(self, monkeypatch):
        self.pieces, real = [], _SelectorSocketTransport.write

        def write(transport, data):
            self.pieces.append(bytes(data))
            real(transport, data)

        monkeypatch.setattr(_SelectorSocketTransport, "write", write)


def test_an_answer_is_written_with_its_head_and_the_last_event_with_the_end(server, monkeypatch):
    written = Written(monkeypatch)
    assert httpx.post(server.url + "/tokenize", json={"content": "A word"}).json()["tokens"]
    (whole,) = written.pieces
    assert whole.startswith(b"HTTP/1.1 200") and whole.endswith(b"}")
    written.pieces.clear()
    with httpx.stream("POST", server.url + CHAT, json=CHATTED) as answer:
        events = answer.read()
    first, last = written.pieces[0], written.pieces[-1]  # one piece, if all was ready at once
    assert first.startswith(b"HTTP/1.1 200") and b'"role":"assistant"' in first
    assert b'"finish_reason":"length"' in last and last.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert len(written.pieces) <= 2 + CHATTED["max_tokens"] and events.endswith(b"data: [DONE]\n\n")


def test_what_is_too_much_to_gather_goes_out_in_the_same_turn_and_nothing_when_it_is_aborted(monkeypatch):
    async def write():
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        gathering = GatheringTransport(writer.transport, asyncio.get_running_loop())
        written = Written(monkeypatch)
        for _ in range(1000):
            gathering.write(b"x" * 1000)
        assert 1_000_000 - MOST_GATHERED < len(b"".join(written.pieces)) < 1_000_000
        await asyncio.sleep(0)
        assert len(b"".join(written.pieces)) == 1_000_000 and len(written.pieces) <= 1_000_000 // MOST_GATHERED + 1
        gathering.write(b"last")
        gathering.abort()
        await asyncio.sleep(0)
        assert len(b"".join(written.pieces)) == 1_000_000
        theirs.close()

    asyncio.run(write())


def test_a_client_that_half_closes_gets_the_answers_that_were_made_at_once(server):
    for number in (1, 5):
        with opened(server, 1, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * number) as (client,):
            client.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: client.recv(4096), b"")).count(b"HTTP/1.1 200 OK") == number


@pytest.mark.parametrize("asked", [CHATTED, CHATTED | {"stream": False}], ids=["stream", "whole"])
def test_a_client_that_half_closes_is_disconnected_as_one_that_closes_is(server, asked):
    body = json.dumps(asked | {"max_tokens": 4000}).encode()
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    with blocked(server) as go, opened(server, 1, head + body) as (client,):
        until(lambda: len(server.service.open) == 1)
        client.shutdown(socket.SHUT_WR)
        until(lambda: not server.uvicorn.server_state.connections)
        assert b'"usage"' not in b"".join(iter(lambda: client.recv(4096), b""))
        go.set()
    until(lambda: not server.service.open)
    with httpx.Client(base_url=server.url, timeout=30) as http:
        assert 'slotcache_requests_total{end="cancelled"} 1' in http.get("/metrics").text


def test_an_answer_that_ends_as_its_connection_makes_room_is_whole():
    asked, goes_on = Event(), Event()

    async def answer(scope, receive, send):
        await receive()
        asked.set()
        goes_on.wait(30)  # the turn of the event loop in which another client connects
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
        await send({"type": "http.response.body", "body": b"answer"})

    config = uvicorn.Config(answer, loop="asyncio", http=Connection, ws="none", lifespan="off", log_config=None)
    server, listening = ListeningServer(config, 1), socket.create_server(("127.0.0.1", 0))
    serving = Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    serving.start()
    try:
        until(lambda: server.started)
        with socket.create_connection(listening.getsockname(), 30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert asked.wait(30)
            with socket.create_connection(listening.getsockname(), 30):
                goes_on.set()
                assert b"".join(iter(lambda: client.recv(4096), b"")).endswith(b"answer")
    finally:
        server.should_exit = True
        serving.join(30)


@pytest.mark.parametrize("sent", [b"", HALF, BODY], ids=["nothing", "half a head", "half a body"])
def test_connections_that_wait_make_room_the_longest_waiting_first(server, sent):
    with opened(server, PLACES, sent) as first:
        until(lambda: len(server.uvicorn.server_state.connections) == PLACES)
        with opened(server, 3, sent) as later:
            until(lambda: sum(map(is_closed, first)) == 3)
            assert asks(server)
            assert not any(map(is_closed, later)) and [is_closed(one) for one in first] == [True] * 4 + [False] * 4


def test_a_connection_that_is_kept_alive_makes_room(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        (kept_alive,) = server.uvicorn.server_state.connections
        with opened(server, PLACES, HALF):
            until(lambda: kept_alive not in server.uvicorn.server_state.connections)
            assert client.get("/health").status_code == 200, "it asks again on a new connection"


def test_an_open_answer_is_not_closed_and_new_connections_wait_for_a_place(server, caplog):
    with ExitStack() as streams, blocked(server) as go:
        clients = [streams.enter_context(streaming(server))[0] for _ in range(PLACES)]
        until(lambda: len(server.service.open) == PLACES)
        later = streams.enter_context(opened(server, 2, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        until(lambda: "at work" in caplog.text)
        assert not any(map(is_closed, [*clients, *later]))
        go.set()
        for client in clients:
            client.settimeout(30)
            assert b'"stop":true' in whole(client)
        for client in later:
            client.settimeout(30)
            assert client.recv(12) == b"HTTP/1.1 200"
    assert caplog.text.count("at work") == 1


def whole(client):
    received = b""
    while piece := client.recv(1 << 16):
        received += piece
    return received


def test_a_body_that_makes_progress_is_not_closed_and_one_that_stops_is(server, monkeypatch):
    text = json.dumps({"content": "Hello " * 10_000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text)
    monkeypatch.setattr(Connection, "credit", NEVER)
    monkeypatch.setattr(Connection, "rate", 0.001)
    with opened(server, 1, head) as (moving,):
        (connection,) = until_some(lambda: [one for one in server.uvicorn.server_state.connections if one.cycle])
        moving.sendall(text[:1000])
        until(lambda: connection._progresses_until)
        monkeypatch.setattr(Connection, "credit", 0.0)
        with opened(server, 2 * PLACES, BODY) as stopped:
            until(lambda: sum(map(is_closed, stopped)) == PLACES + 1)
            assert asks(server) and not is_closed(moving)
            moving.setblocking(True)
            moving.sendall(text[1000:])
            assert b" 200 " in whole(moving)


def until_some(found):
    until(found)
    return found()


def test_what_is_closed_to_make_room_leaves_one_line_in_the_log(server, caplog):
    with caplog.at_level("INFO"), opened(server, 10 * PLACES, BODY):
        until(lambda: "the longest idle ones" in caplog.text)
        assert asks(server)
        assert caplog.text.count("the longest idle ones") == 1 and "/tokenize" not in caplog.text


@pytest.mark.parametrize(
    ("limit", "each", "most"), [(1024, 1, 768), (1024, 2, 384), (256, 1, 192), (64, 1, 8), (1 << 20, 1, 2048), (-1, 2, 2048)]
)
def test_the_limit_lies_well_below_that_of_descriptors(monkeypatch, limit, each, most):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert resource.RLIM_INFINITY == -1 and most_connections(each) == most


def test_the_front_has_the_limit_too(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    front, _ = make_front(FrontSettings(upstream="http://127.0.0.1:1"), Settings())
    assert front.server_state.most == 384  # type: ignore[attr-defined]


SERVES = """
import asyncio, logging, os, resource, sys
import uvicorn
from slotcache.server.http.connection import Connection
from slotcache.server.http.connections import ListeningServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})

logging.basicConfig(level="INFO")
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, used + 20))
config = uvicorn.Config(app, port=int(sys.argv[1]), loop="asyncio", http=Connection, log_config=None, ws="none")
asyncio.run(ListeningServer(config, 10_000).serve())
"""


def test_without_descriptors_it_logs_one_line_and_goes_on(tmp_path):
    # The limit on connections is far too high here, as if something else had taken the descriptors.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", SERVES, str(port)], stderr=out)
    try:
        until(lambda: "running on" in log.read_text() or process.poll() is not None)
        with ExitStack() as open_ones:
            for _ in range(100):
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 30)).sendall(HALF)
            until(lambda: "cannot be accepted now" in log.read_text())
            assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).text == "served"
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).text == "served"
    finally:
        process.terminate()
        process.wait(30)
    said = log.read_text()
    assert said.count("cannot be accepted now") == 1 and "Traceback" not in said and len(said) < 2000


def test_an_idle_connection_outlives_its_use_by_python_s_clients(server):
    """A request on one that the server is about to close would fail."""

    async def aiohttp_keeps():
        async with aiohttp.TCPConnector() as connector:
            return connector._keepalive_timeout or 0.0

    front, _ = make_front(FrontSettings(upstream="http://127.0.0.1:1"), Settings())
    for stays in (server.uvicorn.config.timeout_keep_alive, front.config.timeout_keep_alive):
        assert stays > (httpx.Limits().keepalive_expiry or 0) and stays > asyncio.run(aiohttp_keeps())
