"""Real servers on real ports, in threads of this process."""

import asyncio
import faulthandler
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from slotcache.models.times import MIN_ROWS, MIN_ROWS_OF_DEVICE
from slotcache.server import load
from slotcache.server.app import AppState
from slotcache.server.config.settings import Settings
from slotcache.server.serve import Server, make_server, run
from support.on_device import ON_DEVICE, idle_leaves
from support.ports import free_port

DEADLINE = 200.0  # s: only what never comes about takes as long, also on a busy machine
REST = MIN_ROWS_OF_DEVICE if ON_DEVICE else MIN_ROWS
"""Tokens of each prompt that these servers compute: they run without flash attention."""


@dataclass
class Running:
    """A server that is up. service: its inside, for state that no route shows. uvicorn: its HTTP server.

    thread: the event loop's.
    """

    url: str
    http: httpx.Client
    openai: openai.OpenAI
    host: AppState
    uvicorn: Server
    thread: threading.Thread

    @property
    def service(self) -> Any:
        return self.host.service

    @property
    def vectors(self) -> Any:
        return self.host.vectors

    @property
    def folder_index(self) -> Any:
        return self.host.folder_index

    def chat(self, content: object = "What is it?", **fields: Any):
        """One chat completion, greedy and short unless told otherwise; the decoded answer."""
        messages = fields.pop("messages", None) or [{"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
        answer = self.http.post("/v1/chat/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name, **labels):
        wanted = name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.split(" ")[0] == wanted), 0.0)


def idle_tokens(server):
    """The tokens that a server has computed in idle time."""
    return server.metric("slotcache_idle_prompt_tokens_total")


def text_of(answer):
    """The text of a chat's answer."""
    return answer["choices"][0]["message"]["content"]


def cached(answer):
    """The tokens of its prompt that were reused."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def is_mapped(file):
    """Whether this process has a file in its memory."""
    return str(file) in Path("/proc/self/maps").read_text()


@contextmanager
def running(model, failed_steps: Any = 0, is_timed: Any = not ON_DEVICE, **changed):
    """A server of `model` with some settings changed, stopped at the end. failed_steps: broken invariants count, too.

    is_timed: whether it times its device: its times decide whether idle KV moves, and other cells round otherwise. One in
    software takes minutes, and its times decide nothing of use.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not is_timed:
            patch.setattr(load, "learn_costs", lambda context, *_: idle_leaves(context))
        with _running(model, **changed) as up:
            engine = up.service and up.service.engine  # an encoder has none
            yield up
    assert engine is None or engine.num_failed_steps == failed_steps


@contextmanager
def _running(model, **changed):
    usual: dict[str, Any] = {
        "port": free_port(),
        "ctx_size": 8192,
        "flash_attn": "off",
        "check": True,
        "threads": 1,
        "idle_prefill": False,
    }
    settings = Settings(**(usual | changed))
    with serving(*make_server(settings), model, settings.port) as up:
        if up.host.service:  # these models compute a prompt in less time than a busy machine takes to read a file
            up.service.engine.fetches.least = 10 * DEADLINE
        yield up


@contextmanager
def serving(server, host, model, port):
    """A server that was made, in a thread."""
    thread = threading.Thread(target=lambda: asyncio.run(run(server, host, model)))
    thread.start()
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=DEADLINE) as http, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        try:
            until(lambda: host.vectors is not None)
            yield Running(url, http, client, host, server, thread)
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            assert not thread.is_alive(), stacks()


def until(condition, deadline=DEADLINE):
    """Wait for something that another thread brings about. To ask costs the server time: later, it is asked less often."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < deadline, f"it never came about\n{stacks()}"
        time.sleep(min(0.005 + waited / 50, 0.03))


def stacks():
    """What each thread of this process does."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


@contextmanager
def blocked(server):
    """Keep the engine from all work. Yields an event that lets it go on."""
    began, go = threading.Event(), threading.Event()
    server.service.engine.inbox.ask(lambda: (began.set(), go.wait(DEADLINE)))
    assert began.wait(DEADLINE)
    try:
        yield go
    finally:
        go.set()


@contextmanager
def blocked_load(weights):
    """Let the next load of these weights wait until the block ends. Yields two events: it has begun; it may go on."""
    began, may_end = threading.Event(), threading.Event()

    def wait():
        began.set()
        assert may_end.wait(DEADLINE)

    weights.on_load.append(wait)
    try:
        yield began, may_end
    finally:
        may_end.set()
        weights.on_load.remove(wait)


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny) as up:
        yield up
