"""When something goes wrong in the engine's thread: who fails, who does not, and that each open request ends once."""

import asyncio
import json
import math
import threading

import httpx
import numpy as np
import pytest
from slotcache.models.errors import RunnerError
from slotcache.models.runner import States
from slotcache.models.sampling_params import Sampling
from slotcache.ordering import Document
from slotcache.server.chat.body import CompletionRequest
from slotcache.server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from slotcache.server.engine.generation import Failure
from slotcache.server.http.api_errors import RequestError
from slotcache.server.service.submitter import Prepared
from slotcache.slots.check import check

from server.conftest import DEADLINE, blocked, running, until

CHAT = "/v1/chat/completions"
LONG = {
    "messages": [{"role": "user", "content": "Tell me"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "cache_prompt": True,
}


class Stream:
    """A streamed answer that is read by a thread of its own. events: decoded; "[DONE]" as it is."""

    def __init__(self, server, body=LONG):
        self.events, self.began = [], threading.Event()
        self._server, self._body = server, body
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        with httpx.stream("POST", self._server.url + CHAT, json=self._body, timeout=DEADLINE) as answer:
            for line in answer.iter_lines():
                if line:
                    text = line.removeprefix("data: ")
                    self.events.append(text if text == "[DONE]" else json.loads(text))
                    if len(self.events) > 2:
                        self.began.set()
        self.began.set()

    def whole(self):
        self._thread.join(DEADLINE)
        return self.events

    @property
    def text(self):
        chunks = [event for event in self.whole() if event != "[DONE]" and "choices" in event]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    @property
    def finals(self):
        """The final events: one, if all is well."""
        named = [event for event in self.whole() if event != "[DONE]"]
        return [event for event in named if "error" in event or event["choices"][0]["finish_reason"]]


def unarrangeable():
    """A prompt whose documents cannot be ordered: the exhaustive policy takes eight."""
    names = [Document(f"d{at}", f"text {at}") for at in range(9)]
    tokens = tuple(tokens_of(at + 10) for at in range(9))
    return ChatPrompt([Fixed(tokens_of(5), "system"), DocumentSet(tuple(names), tokens, "oracle", None)])


def tokens_of(token):
    return np.array([token] * 3, np.int32)


def events_of(server, prompt):
    """Everything that one prompt's generation says, submitted in the server's event loop."""

    async def collect():
        (generation,) = server.service.submit(
            Prepared("", (prompt,), CompletionRequest(prompt="", max_tokens=2, cache_prompt=True), Sampling())
        )
        return await asyncio.wait_for(generation.events.get(), DEADLINE)

    loop = server.service.engine.outbox.loop
    return asyncio.run_coroutine_threadsafe(collect(), loop).result(DEADLINE)


def test_a_request_whose_documents_cannot_be_arranged_fails_alone(tiny):
    with running(tiny, parallel=2) as server:  # and no step fails
        alone = Stream(server).text
        beside = Stream(server)
        assert beside.began.wait(DEADLINE)
        event = events_of(server, unarrangeable())
        assert isinstance(event, Failure) and event.error.status == 500
        assert beside.text == alone and len(beside.finals) == 1
        assert server.chat("Tell me")["timings"]["cache_n"] > 0, "the cache was dropped"


def test_an_engine_that_cannot_go_on_ends_every_request_once_and_the_server_with_it(tiny, monkeypatch):
    with running(tiny, parallel=1, failed_steps=1) as server:
        engine, host = server.service.engine, server.host
        with blocked(server):
            streams = [Stream(server), Stream(server)]
            until(lambda: len(server.service.open) == 2)
            monkeypatch.setattr(engine.scheduler, "recover", lambda *given: 1 / 0)
            monkeypatch.setattr(engine.runner, "run", lambda *given: 1 / 0)
        for stream in streams:
            assert [event["error"]["type"] for event in stream.finals] == ["server_error"]
            assert stream.events[-1] == "[DONE]"
        assert "ZeroDivisionError" in engine.failure and host.failure == engine.failure
        with pytest.raises(RequestError, match="ended") as refused:
            host.ready()
        assert refused.value.status == 503
        until(lambda: not engine._thread.is_alive())
        with pytest.raises(RequestError):
            engine.inbox.ask(lambda: 1).result(1)
        until(lambda: _is_down(server.url))  # nobody asked it to


def _is_down(url):
    try:
        httpx.get(url + "/health", timeout=DEADLINE)
    except httpx.TransportError:
        return True
    return False


def has_copies(engine):
    """Whether all idle KV has a copy in host memory, as some idle time makes it."""
    tree = engine.scheduler.tree
    return engine.inbox.ask(lambda: 0 < tree.device.num_ready <= tree.host.num_tokens).result(DEADLINE)


def test_what_the_cache_decided_and_nobody_did_is_forgotten(tiny, monkeypatch):
    with running(tiny, failed_steps=1) as server:
        server.chat("Hello there")
        engine = server.service.engine
        until(lambda: has_copies(engine))
        run = engine.runner.run

        def fail_once():
            monkeypatch.setattr(engine.runner, "run", lambda *given: 1 / 0)
            try:
                engine.scheduler.tree.evict()
                engine.carry_out()
            finally:
                monkeypatch.setattr(engine.runner, "run", run)

        with pytest.raises(ZeroDivisionError):
            engine.inbox.ask(fail_once).result(DEADLINE)
        engine.inbox.ask(lambda: check(engine.scheduler)).result(DEADLINE)
        assert server.chat("Hello there")["timings"]["cache_n"] > 0, "the copies that were made were dropped"


def test_a_request_that_cannot_be_started_ends_like_those_that_run(tiny, monkeypatch):
    with running(tiny, failed_steps=1) as server:
        tree = server.service.engine.scheduler.tree
        claim = tree.claim
        monkeypatch.setattr(tree, "claim", lambda *arguments, **named: 1 / 0)
        failed = server.http.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}]})
        assert failed.status_code == 500
        monkeypatch.setattr(tree, "claim", claim)
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_a_request_whose_end_fails_has_one_final_event(tiny, monkeypatch):
    with running(tiny, parallel=1, failed_steps=1) as server:
        engine = server.service.engine
        finish = engine.scheduler.finish

        def fail_once(request):
            monkeypatch.setattr(engine.scheduler, "finish", finish)
            raise ZeroDivisionError

        monkeypatch.setattr(engine.scheduler, "finish", fail_once)
        stream = Stream(server, LONG | {"max_tokens": 8})
        assert [event["error"]["type"] for event in stream.finals] == ["server_error"]
        until(lambda: not engine.generations.samplers)
        assert server.chat()["usage"]["completion_tokens"] == 4 and not engine.generations.samplers


def test_one_that_asks_a_stopped_engine_is_answered(tiny):
    with running(tiny) as server:
        server.service.engine.stop()
        with pytest.raises(RequestError, match="shutting down"):
            server.service.engine.inbox.ask(lambda: 1).result(DEADLINE)


def test_a_warm_up_that_fails_leaves_nothing_in_the_way_of_the_first_request(tiny, monkeypatch):
    def fail(*_):
        raise RunnerError("no memory for a copy")

    monkeypatch.setattr(States, "_copy", fail)
    with running(tiny) as up:
        assert up.chat()["usage"]["completion_tokens"] == 4
        assert up.service.engine.scheduler.tree.host.max_bytes == 0


@pytest.mark.parametrize(("setting", "seconds"), [(200, 0.2), (0, math.inf)])
def test_streams_wait_as_long_as_the_setting_says(tiny, setting, seconds):
    with running(tiny, max_stall=setting) as server:
        assert server.service.engine.scheduler.budget.max_stall == seconds
