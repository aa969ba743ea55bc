"""A server that plays a stream at a steady pace behind the real page: for long streams, whose pieces a test has written."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from server.conftest import until
from slotcache.server import app
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

PROPS = {"model_alias": "player", "ui_settings": {"sources": False}}
TIMES = {"cache_n": 90, "prompt_n": 10, "queue_ms": 1.0, "prompt_ms": 9.0, "predicted_n": 9, "predicted_per_second": 99.0}
REPORT = {
    "cached_tokens": 90,
    "miss": {"at": 90, "why": "message 0 (user) is not cached here"},
    "segments": [
        {"label": "message 0 (user)", "id": "1", "tokens": 100, "cached_tokens": {"fork": 40, "host": 50}, "saved_ms": 9.0}
    ],
    "conversation": {"remembered": True},
}


@dataclass
class Player:
    """pieces: of each answer. pause: s between two of them. report: of each answer."""

    pieces: tuple[str, ...]
    pause: float
    report: dict[str, object]
    url: str = ""

    async def play(self, request):
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self):
        for piece in self.pieces:
            yield _event({"choices": [{"delta": {"content": piece}}]})
            await asyncio.sleep(self.pause)
        yield _event({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": TIMES, "slotcache": self.report})
        yield b"data: [DONE]\n\n"


@contextmanager
def playing(pieces, pause, **reported):
    """A player on a port of its own. reported: further fields of the report."""
    player = Player(tuple(pieces), pause, REPORT | reported)
    routes = [
        Route("/", app.show),
        Route("/page/{path:path}", app.show),
        Route("/props", lambda request: JSONResponse(PROPS)),
        Route("/health", lambda request: JSONResponse({"status": "ok"})),
        Route("/v1/chat/completions", player.play, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        player.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield player
    finally:
        server.should_exit = True
        thread.join(30)


def _event(body):
    return b"data: " + json.dumps({"id": "chatcmpl-1"} | body).encode() + b"\n\n"
