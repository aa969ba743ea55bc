"""A generation is open until the engine has ended it, however slowly its client reads."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from slotcache.server.api.stream import _events
from slotcache.server.app import make_app
from slotcache.server.chat.body import ChatRequest, CompletionRequest
from slotcache.server.chat.conversations import PendingTurn
from slotcache.server.engine.generation import (
    MAX_PROGRESS,
    MAX_UNSENT,
    Delta,
    Failure,
    Generation,
    PromptProgress,
    Unread,
    _deliver,
)
from slotcache.server.http.api_errors import RequestError
from slotcache.server.http.connection import Shortcut
from support.dialects import ALL

from server.conftest import DEADLINE, running, until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is it?"}]
LONG = {"messages": USER, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
PROGRESS = PromptProgress(8, 0, 4, 1.0)
NAME = "m" * 20_000  # of the model, in every chunk: an answer that no socket's buffer takes whole


@contextmanager
def blocked_step(server):
    """The engine stands still in its next step meanwhile."""
    runner, inside, gate = server.service.engine.runner, threading.Event(), threading.Event()
    step = runner.run

    def run(*given):
        inside.set()
        gate.wait(DEADLINE)
        return step(*given)

    runner.run = run
    try:
        assert inside.wait(DEADLINE)
        yield
    finally:
        runner.run = step
        gate.set()


@contextmanager
def stalled(server, **fields):
    """A client of a stream that reads nothing of it; the connection."""
    body = json.dumps(LONG | {"stream": True} | fields).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


def rest(connection):
    """All that a stalled client had to read: the text of the answer, and its last event."""
    received = bytearray()
    while some := connection.recv(1 << 20):
        received += some
    lines = [line[6:] for line in received.decode().replace("\r", "").split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks), chunks[-1]


@pytest.fixture(scope="module")
def narrow(tiny):
    """A server with room for one request."""
    with running(tiny, parallel=1, max_queue=0, alias=NAME, idle_prefill=True) as up:
        yield up


def test_a_client_that_does_not_read_keeps_nobody_out(narrow):
    whole = narrow.http.post(CHAT, json=LONG).json()["choices"][0]["message"]["content"]
    ended = narrow.metric("slotcache_requests_total", end="length")
    with stalled(narrow, conversation="stalled") as connection:
        until(lambda: narrow.metric("slotcache_requests_total", end="length") == ended + 1)
        assert narrow.metric("slotcache_requests_open") == 0
        assert narrow.http.post(CHAT, json=LONG).status_code == 200
        assert narrow.http.get("/v1/conversations/stalled").json()["turns"] == 1
        speculated = narrow.http.post("/v1/speculate", json={"messages": [{"role": "user", "content": "Else?"}]})
        assert speculated.json()["state"] == "started"
        until(lambda: narrow.service.idle.done)
        text, last = rest(connection)
    assert text == whole
    assert last["slotcache"]["conversation"]["remembered"] is True


def test_idle_work_goes_on_beside_a_client_that_does_not_read(narrow):
    until(lambda: narrow.service.idle.done)
    before = narrow.metric("slotcache_idle_prompt_tokens_total")
    with stalled(narrow, cache_scope="idle beside"):
        until(lambda: narrow.metric("slotcache_idle_prompt_tokens_total") > before)


def test_what_waits_for_a_client_that_does_not_read_is_its_text_and_no_more(narrow):
    ended = narrow.metric("slotcache_requests_total", end="length")
    accepted = []
    submit = narrow.service.engine.submit
    narrow.service.engine.submit = lambda generations: (accepted.extend(generations), submit(generations))[1]
    try:
        with stalled(narrow, return_progress=True):
            until(lambda: narrow.metric("slotcache_requests_total", end="length") == ended + 1)
    finally:
        narrow.service.engine.submit = submit
    (generation,) = accepted
    assert generation not in narrow.service.open and not _alive(PendingTurn)  # what was asked is not kept for it

    async def read():
        return [await generation.events.get() for _ in range(generation.events.qsize())]

    assert len(asyncio.run(read())) <= MAX_PROGRESS + 2  # some progress, some text, the end


def test_text_that_is_waited_for_is_offered_at_once_and_all_else_keeps_its_place():
    async def read():
        unread, taken, accepts = Unread(), [], True

        def take_now(delta):
            taken.extend([delta.text] * accepts)
            return accepts

        unread.take_now = take_now
        unread.put(Delta("early"))
        assert (await unread.get(), taken) == (Delta("early"), [])
        reading = asyncio.ensure_future(unread.get())
        await asyncio.sleep(0)
        unread.put(Delta("now"))
        accepts = False
        unread.put(Delta("refused"))
        accepts = True
        unread.put(Delta("behind it"))
        assert taken == ["now"] and [await reading, await unread.get()] == [Delta("refused"), Delta("behind it")]
        gone = asyncio.ensure_future(unread.get())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        unread.put(Delta("late"))
        return taken, unread.qsize()

    assert asyncio.run(read()) == (["now"], 1)


def test_the_first_end_is_the_only_one():
    """A piece that could not be sent ends its stream, though the engine goes on to the end of the answer."""

    def fail(delta):
        raise KeyError(delta.text)

    async def read():
        generation = SimpleNamespace(events=Unread())
        generation.events.take_now, generation.deliver = fail, generation.events.put
        reading = asyncio.ensure_future(generation.events.get())
        await asyncio.sleep(0)
        _deliver(cast(Any, [(generation, Delta("odd")), (generation, Failure(RequestError("a later one")))]))
        return await reading, generation.events.qsize()

    (event, rest) = asyncio.run(read())
    assert isinstance(event, Failure) and event.error.status == 500 and not rest


def test_no_text_of_a_choice_overtakes_the_piece_in_front_of_it():
    """Of several choices, too, while a slow client has yet to take that piece."""

    async def read():
        choices, taken = [SimpleNamespace(events=Unread()) for _ in range(2)], []
        for choice in choices:
            choice.events.take_now = lambda delta: taken.append(delta.text) is None
        events: Any = _events(cast(Any, choices), None)
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        choices[0].events.put(PROGRESS)
        assert await reading == (0, PROGRESS)
        for _ in range(5):
            await asyncio.sleep(0)
        choices[0].events.put(Delta("behind"))
        choices[1].events.put(Delta("of another"))
        assert taken == ["of another"] and await anext(events) == (0, Delta("behind"))
        await events.aclose()

    asyncio.run(read())


@pytest.mark.parametrize("api", ALL, ids=str)
def test_all_text_but_the_first_is_written_past_the_layers_and_none_is_lost(server, monkeypatch, api):
    written, write = [], Shortcut.write
    monkeypatch.setattr(Shortcut, "write", lambda self, data: (written.append(data), write(self, data))[1])
    first = api.ask(server, most=40, stream=True)
    assert len(written) > 20 and all(data in first.content for data in written), first.text
    monkeypatch.setattr(Shortcut, "is_open", property(lambda self: False))
    written.clear()
    second = api.ask(server, most=40, stream=True)
    assert not written and api.join(api.events_of(first)) == api.join(api.events_of(second))


@pytest.mark.parametrize("further", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 3, "temperature": 0.5, "seed": 7}])
def test_a_whole_answer_leaves_the_engine_in_few_pieces_and_is_that_of_a_stream(server, monkeypatch, further):
    sent, deliver = [], Generation.deliver
    monkeypatch.setattr(Generation, "deliver", lambda self, event: (sent.append(event), deliver(self, event))[1])
    asked = LONG | {"max_tokens": 200, "cache_prompt": False} | further
    answer = server.http.post(CHAT, json=asked).json()
    number = len(answer["choices"])
    pieces = [event for event in sent if isinstance(event, Delta)]
    assert len(pieces) <= number * (200 // MAX_UNSENT + 1), len(pieces)
    assert answer["usage"]["completion_tokens"] == 200 * number
    lines = server.http.post(CHAT, json=asked | {"stream": True}).text.splitlines()
    chunks = [choice for line in lines if line.startswith("data: {") for choice in json.loads(line[6:])["choices"]]
    for index, choice in enumerate(answer["choices"]):
        same = [chunk for chunk in chunks if chunk["index"] == index]
        assert choice["message"]["content"] == "".join(chunk["delta"].get("content") or "" for chunk in same)
        reported = [token for chunk in same for token in (chunk.get("logprobs") or {"content": []})["content"]]
        assert (choice.get("logprobs") or {"content": []})["content"] == reported


def test_a_client_that_went_before_it_read_the_end_was_answered(narrow):
    """Its turn is remembered: the engine ended it before the client went."""
    counts = {end: narrow.metric("slotcache_requests_total", end=end) for end in ("length", "cancelled")}
    with stalled(narrow, conversation="gone"):
        until(lambda: narrow.metric("slotcache_requests_total", end="length") == counts["length"] + 1)
    assert narrow.http.get("/v1/conversations/gone").json()["turns"] == 1
    assert narrow.http.post(CHAT, json=LONG | {"max_tokens": 1}).status_code == 200
    assert narrow.metric("slotcache_requests_total", end="cancelled") == counts["cancelled"]


def test_a_place_is_kept_until_the_engine_has_let_go(tiny):
    """A request whose client has gone counts as long as the engine has it: at most to the end of a step."""
    with running(tiny, parallel=1, max_queue=0) as server:
        with contextlib.ExitStack() as pauses:
            body = LONG | {"stream": True, "max_tokens": 4000}
            with httpx.stream("POST", server.url + CHAT, json=body, timeout=DEADLINE) as answer:
                lines = answer.iter_lines()
                next(lines)
                pauses.enter_context(blocked_step(server))
            until(lambda: any(generation.abandoned for generation in server.service.open))
            assert server.http.post(CHAT, json=LONG).status_code == 429
        until(lambda: not server.service.open)
        assert server.metric("slotcache_requests_total", end="cancelled") == 1
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_a_client_that_goes_before_the_first_byte_of_its_stream_cancels_it(tiny):
    with running(tiny) as server:
        body = json.dumps(LONG | {"stream": True, "max_tokens": 7000}).encode()
        head = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "asgi": {}}

        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            if (message := next(received, None)) is None:
                await asyncio.Event().wait()
            return message or {}

        async def send(message):
            raise ConnectionResetError

        answering = make_app(server.host)(head, receive, send)
        with pytest.raises((OSError, ExceptionGroup)):
            asyncio.run_coroutine_threadsafe(answering, server.service.engine.outbox.loop).result(DEADLINE)
        until(lambda: not server.service.open)
        assert server.metric("slotcache_requests_total", end="cancelled") == 1


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_asked_is_not_kept_while_it_is_answered(server, route, stream):
    """Decoded, a body takes 20 times its size; the prompt has all that is needed of it."""
    junk = {"messages": [USER[0] | {"more": [[]] * 1000}]} if route == CHAT else {"prompt": list(range(400, 480))}
    thread = threading.Thread(target=lambda: server.http.post(route, json={**LONG, **junk, "stream": stream}))
    thread.start()
    with blocked_step(server):
        until(lambda: server.service.open)
        until(
            lambda: not any(map(_texts, _alive(ChatRequest | CompletionRequest)))
        )  # once the call that submitted it has returned
        assert server.service.open
    thread.join()


def _texts(asked):
    return asked.messages if isinstance(asked, ChatRequest) else asked.prompt


def _alive(kind):
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, kind)]


def test_an_end_that_cannot_be_concluded_harms_nobody_else(tiny):
    with running(tiny, parallel=2) as server:
        server.service.conversations.remember = lambda *args: 1 / 0
        failed = server.http.post(CHAT, json=LONG | {"conversation": "c"})
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert not server.service.open
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_a_question_after_the_end_is_refused(tiny):
    with running(tiny) as server:
        server.service.engine.stop()
        with pytest.raises(RequestError, match="shutting down"):
            server.service.engine.inbox.ask(lambda: 1).result(timeout=DEADLINE)
        for route in ("/metrics", "/slots", "/v1/cache"):
            assert server.http.get(route, timeout=DEADLINE).status_code == 503
