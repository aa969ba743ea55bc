"""Fronts and upstreams on real ports, in threads of this process."""

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
import uvicorn
from server.conftest import DEADLINE, free_port, running, until
from slotcache.front.cli import make_server
from slotcache.front.settings import FrontSettings
from slotcache.front.state import FrontState
from slotcache.models.demo import FILE
from slotcache.server.config.settings import Settings


@dataclass
class Ordering:
    """A front that is up. host: its inside. server: its HTTP server."""

    url: str
    http: httpx.Client
    host: FrontState
    server: uvicorn.Server

    @property
    def port(self):
        return self.host.settings.port

    @property
    def openai(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def chat(self, content="What is it?", **fields):
        """A chat completion, greedy and short unless told otherwise; the response."""
        messages = fields.pop("messages", None) or [{"role": "user", "content": content}]
        return self.http.post("/v1/chat/completions", json=USUAL | {"messages": messages} | fields)


USUAL = {"max_tokens": 4, "temperature": 0, "cache_prompt": True}


@contextmanager
def ordering(upstream, hosting=None, **changed):
    """A front of the upstream at a URL, with some settings changed."""
    port = free_port()
    settings = FrontSettings(**({"upstream": upstream, "port": port} | changed))
    server, host = make_server(settings, Settings(port=port, ui=False, **(hosting or {})))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=DEADLINE) as http:
        try:
            until(lambda: server.started)
            yield Ordering(url, http, host, server)
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            assert not thread.is_alive()


@pytest.fixture(scope="package")
def engine():
    """A server of the embedded model, which a front takes for llama-server: it tells `timings.cache_n`."""
    with running(FILE) as up:
        yield up


@pytest.fixture
def front(engine):
    with ordering(engine.url, dialect="llama") as up:
        yield up
