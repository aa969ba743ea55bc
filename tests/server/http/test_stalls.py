"""Clients that do not move: bodies and heads that never end, answers that nobody reads."""

import asyncio
import json
import logging
import socket
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from slotcache.server.api.stream import SsePing
from slotcache.server.http.connection import Connection
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.conftest import running, until

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500, "ignore_eos": True, "stream": True}
LARGE = 8 << 20  # bytes
TEXT = json.dumps({"content": "Hello " * 40_000}).encode()  # its answer is longer
NEVER = 1e6  # seconds
STREAMS = 5


@pytest.fixture
def server(tiny):
    with running(tiny, max_body=16) as up:
        yield up


@contextmanager
def connected(server):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", server.http.base_url.port))
        yield client


def head(path, length):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def answer(client):
    """All that comes until the server closes."""
    received = bytearray()
    while piece := client.recv(1 << 20):
        received += piece
    return bytes(received)


def serves(server):
    return server.http.post("/tokenize", json={"content": "Hello"}).status_code == 200


def connections(server):
    return len(server.uvicorn.server_state.connections)


def test_a_body_that_stops_is_a_408(server):
    server.host.bodies.patience = 0.05
    with connected(server) as client:
        client.sendall(head("/tokenize", 1000) + b'{"content"')
        said = answer(client)
    assert b" 408 " in said and b"timeout_error" in said and b"10 bytes came" in said
    assert serves(server)


def test_a_body_that_trickles_is_a_408(server):
    server.host.bodies.patience, server.host.bodies.rate = 0.2, 1e9
    with connected(server) as client:
        client.sendall(head("/tokenize", LARGE))
        with pytest.raises(OSError):  # the server closes while it is sent
            for _ in range(LARGE):
                client.sendall(b" " * 10)
    assert serves(server)


def test_unfinished_bodies_have_a_bound_together(server):
    server.host.bodies.patience = NEVER
    room = server.host.bodies.room
    with connected(server) as one, connected(server) as two:
        server.host.bodies.room = LARGE
        for client in (one, two):
            client.sendall(head("/tokenize", LARGE) + b" " * (LARGE - 1000))
        until(lambda: server.host.bodies.room < LARGE // 2)
        one.setblocking(False)
        two.setblocking(False)
        said = []
        until(lambda: said.extend(received(client) for client in (one, two)) or any(b" 503 " in text for text in said))
        assert sum(b" 503 " in text for text in said) == 1
        assert serves(server), "small bodies are always let in"
    until(lambda: server.host.bodies.room == LARGE)
    assert room == 4 * 16 << 20


def received(client):
    try:
        return client.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_a_client_that_disconnects_within_its_body_is_no_error(server, caplog):
    with caplog.at_level(logging.INFO), connected(server) as client:
        client.sendall(head("/tokenize", LARGE) + b" " * 100_000)
        until(lambda: server.host.bodies.room < 4 * 16 << 20)
        client.close()
        until(lambda: server.host.bodies.room == 4 * 16 << 20 and connections(server) == 0)
    assert serves(server) and "Traceback" not in caplog.text and "Exception" not in caplog.text


@pytest.mark.parametrize("sent", [b"", b"POST /toke", b"POST /tokenize HTTP/1.1\r\nHost: loc"])
def test_a_head_that_never_ends_closes_the_connection(server, monkeypatch, sent):
    monkeypatch.setattr(Connection, "head", 0.05)
    with connected(server) as client:
        client.sendall(sent)
        assert answer(client) == b""
    assert serves(server)


def test_a_body_that_goes_on_after_its_answer_closes_the_connection(server, monkeypatch):
    monkeypatch.setattr(Connection, "head", 0.05)
    with connected(server) as client:
        client.sendall(head("/health", LARGE))
        assert b" 405 " in client.recv(1 << 16)
        client.sendall(b" ")
        answer(client)
    assert serves(server)


def test_a_connection_that_is_used_again_is_not_closed(server, monkeypatch):
    monkeypatch.setattr(Connection, "head", NEVER)
    with connected(server) as client:
        for piece in (b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n\r\n") * 3:
            client.sendall(piece)
            if piece.endswith(b"\r\n\r\n"):
                said = client.recv(1 << 16)
                while not said.endswith(b"}"):
                    said += client.recv(1 << 16)
                assert all(connection._head_timer is None for connection in list(server.uvicorn.server_state.connections))


@pytest.fixture
def narrow(monkeypatch):
    """The system keeps little of what a client has not read."""
    made = Connection.connection_made

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)


def test_an_answer_that_nobody_reads_is_let_go(server, narrow, monkeypatch):
    monkeypatch.setattr(Connection, "patience", 0.2)
    with connected(server) as client:
        client.sendall(head("/tokenize", len(TEXT)) + TEXT)
        client.recv(1)
        until(lambda: connections(server) == 0)
        said = answer(client)
    assert 0 < len(said) < len(TEXT), "the rest was dropped"
    assert serves(server)


def test_a_stream_that_nobody_reads_ends_its_generation(server, narrow, monkeypatch):
    monkeypatch.setattr(Connection, "patience", 0.2)
    body = json.dumps(CHAT).encode()
    with connected(server) as client:
        client.sendall(head("/v1/chat/completions", len(body)) + body)
        client.recv(1)
        until(lambda: connections(server) == 0 and not server.service.open)
    assert serves(server)


def test_comments_that_nobody_reads_take_no_memory(tiny, narrow, monkeypatch):
    # As in `slotcache bench endurance --only unread`: they come every millisecond, and the server waits for ever.
    monkeypatch.setattr(Connection, "patience", NEVER)
    beats, beat = Counter(), SsePing._beat
    monkeypatch.setattr(SsePing, "_beat", lambda self: (beats.update([self]), beat(self))[1])
    body = json.dumps(CHAT | {"max_tokens": 100}).encode()
    # Each chunk holds the model's name: with a long one, few of them fill what the system keeps.
    with running(tiny, sse_ping_interval=0.001, alias="a" * 8192) as server, ExitStack() as clients:
        for _ in range(STREAMS):
            clients.enter_context(connected(server)).sendall(head("/v1/chat/completions", len(body)) + body)
        until(lambda: not server.service.open and len(beats) == STREAMS)
        until(lambda: all(map(is_paused, list(server.uvicorn.server_state.connections))))
        beats.clear()
        until(lambda: len(beats) == STREAMS and min(beats.values()) >= 200)
        assert tasks(server) < 10 * STREAMS, "each stream has few, and one that waits for its client"
        unsent = [one.transport.get_write_buffer_size() for one in server.uvicorn.server_state.connections]
        assert len(unsent) == STREAMS and max(unsent) < 64 << 10


def is_paused(connection):
    return connection.flow.write_paused


def tasks(server):
    """The tasks of the server's event loop, which counts them itself."""

    async def count():
        return len(asyncio.all_tasks())

    loop = next(iter(server.uvicorn.server_state.connections)).loop
    return asyncio.run_coroutine_threadsafe(count(), loop).result(30)


def test_what_a_slow_reader_must_take(server, narrow, monkeypatch):
    monkeypatch.setattr(Connection, "patience", 100.0)
    monkeypatch.setattr(Connection, "rate", 10.0)
    with connected(server) as client:
        client.sendall(head("/tokenize", len(TEXT)) + TEXT)
        client.recv(1)
        (connection,) = server.uvicorn.server_state.connections
        until(lambda: connection.transport.get_write_buffer_size())
        left = connection.transport.get_write_buffer_size()
        connection.loop.call_soon_threadsafe(connection._check_progress, left + 1000)
        connection.loop.call_soon_threadsafe(connection._check_progress, left + 1000)
        assert serves(server) and connection in server.uvicorn.server_state.connections
        connection.loop.call_soon_threadsafe(connection._check_progress, left + 999)
        until(lambda: connection not in server.uvicorn.server_state.connections)


def test_others_have_their_turn_between_chunks_of_one_byte(server, monkeypatch):
    # Each takes as long to parse as a whole piece would, and the loop does nothing else meanwhile.
    bites, parse = [], H11Protocol.data_received
    monkeypatch.setattr(H11Protocol, "data_received", lambda self, data: (bites.append(len(data)), parse(self, data))[1])
    text = b'{"content": "Hello"' + b" " * 20_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    with connected(server) as client:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        client.sendall(head + chunks)
        assert b" 200 " in answer(client)
    assert sum(bites) == len(head) + len(chunks)
    assert max(bites) <= 8 << 10
