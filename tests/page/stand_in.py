"""A server that answers with what a test has written, behind the real page: for texts that no model can be made to say."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from server.conftest import until
from slotcache.server.routes import page
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

PROPS = {"model_alias": "stand-in", "ui_settings": {"sources": False}}
TIMES = {"cache_n": 90, "prompt_n": 10, "queue_ms": 1.0, "prompt_ms": 9.0, "predicted_n": 9, "predicted_per_second": 99.0}
REPORT = {
    "lane": 0,
    "source": "fork",
    "cached_tokens": 90,
    "miss": {"at": 90, "why": "message 0 (user) is not cached here"},
    "segments": [
        {"label": "message 0 (user)", "id": "1", "tokens": 100, "cached_tokens": {"fork": 40, "host": 50}, "saved_ms": 9.0}
    ],
}


@dataclass
class StandIn:
    """answer: pieces of the next answer. report: its `slotcache`. pause: s between two pieces.

    asked, searched: the bodies that came.
    """

    url: str
    answer: tuple = ("Yes.",)
    report: dict[str, object] = field(default_factory=dict)
    pause: float = 0.0
    asked: list[dict[str, object]] = field(default_factory=list)
    searched: list[dict[str, object]] = field(default_factory=list)

    async def chat(self, request):
        self.asked.append(await request.json())
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self):
        head = {"id": f"chatcmpl-{len(self.asked)}"}
        for piece in self.answer:
            yield event(head | {"choices": [{"delta": {"content": piece}}]})
            await asyncio.sleep(self.pause)
        report = REPORT | self.report | {"conversation": {"remembered": True}}
        yield event(head | {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": TIMES, "slotcache": report})
        yield b"data: [DONE]\n\n"


@contextmanager
def standing_in(props=PROPS, routes=()):
    """A stand-in on a port of its own. routes: more of them, or other ones."""
    up = StandIn("")
    usual = [
        Route("/", page.show),
        Route("/page/{path:path}", page.show),
        Route("/props", lambda request: JSONResponse(props)),
        Route("/v1/chat/completions", up.chat, methods=["POST"]),
        Route("/v1/speculate", lambda request: JSONResponse({}), methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=[*routes, *usual]), port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        up.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield up
    finally:
        server.should_exit = True
        thread.join(30)


def event(body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"
