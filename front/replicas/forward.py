"""A request that reaches an application by another way than a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from ...server.edge.refusal import refusal
from ...server.errors import RequestError

REPLICA = "x-slotcache-replica"
LOOPBACK = ("127.0.0.1", 0)


@dataclass(frozen=True, slots=True)
class Forward:
    """A request with its whole body. path: decoded. query: as it was sent. only: the replica that it is for; empty: any."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""
    only: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes, only: str = "") -> Forward:
        """Make it of an ASGI request. A prefix of the path that routed it here is taken off."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return cls(scope["method"], path or "/", scope["query_string"], scope["headers"], body=body, only=only)

    def scope(self) -> Scope:
        """Return the ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # uvicorn's: applications look for a disconnect themselves
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": [*self.headers],
            "client": LOOPBACK,
            "server": LOOPBACK,
            "state": {},
        }


class Answering:
    """An application's answer to one request."""

    def __init__(self, app: ASGIApp, forward: Forward) -> None:
        self._app, self._forward = app, forward
        self._messages: list[Message] = []
        self._news, self._is_left, self._is_read = asyncio.Event(), asyncio.Event(), False

    async def messages(self) -> AsyncGenerator[list[Message], None]:
        """Yield the answer as it comes, some ASGI messages at a time. To the application, its end is the client's leave."""
        work = asyncio.ensure_future(self._app(self._forward.scope(), self._receive, self._send))
        work.add_done_callback(lambda _: self._news.set())
        try:
            while not work.done() or self._messages:
                await self._news.wait()
                self._news.clear()
                taken, self._messages = self._messages, []
                if taken:
                    yield taken
        finally:
            self._is_left.set()
            await asyncio.wait((work,))
        work.result()

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._forward.body, "more_body": False}
        await self._is_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_left.is_set():
            raise OSError("the client has left")
        self._messages.append(message)
        self._news.set()


def meant_for(replica: str, app: ASGIApp, forward: Forward) -> ASGIApp:
    """Return a replica's application; for a request that is for another replica, which has just left, a refusal."""
    return app if forward.only in ("", replica) else refusal(unknown(forward.only), forward.path)


def unknown(replica: str) -> RequestError:
    """Make the error of a request for a replica that is not up."""
    return RequestError(f"{REPLICA}: no replica {replica[:80]!r}: GET /v1/replicas lists those that are up", status=404)


def lost(replica: str) -> RequestError:
    """Make the error of a request whose replica ended before its answer did."""
    return RequestError(
        f"the replica {replica} ended before its answer did: send the request again", status=502, code="replica_lost"
    )
