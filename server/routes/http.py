"""What the routes share: the service once it is loaded, bodies in and out, the error shape."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..edge.bodies import Bodies
from ..errors import RequestError
from ..service import Service
from ..settings import Settings
from ..wire import LARGE, R, check_scope, decode
from . import reply


@dataclass(slots=True)
class Host:
    """Holds the service while the server is up. service: None while the model loads."""

    settings: Settings
    bodies: Bodies
    service: Service | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine has ended for good, if it has."""
        return self.service.engine.failure if self.service else None

    def ready(self) -> Service:
        """The service. Raises RequestError 503 while there is none, and once its engine has ended."""
        if self.service is None:
            raise RequestError("the model is loading", status=503, code="loading_model", retry_after=1)
        if self.failure:
            raise RequestError(self.failure, status=503, code="engine_failed")
        return self.service


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else reply.encode(content)


def refusal(error: RequestError) -> Response:
    """An error as OpenAI's clients expect it."""
    return Json(error.body(), status_code=error.status, headers=error.headers)


async def read_body(request: Request, kind: type[R]) -> R:
    """The body as `kind`; its length is `request.state.num_bytes` then. A large one is decoded in a thread.

    Raises RequestError, ClientDisconnect.
    """
    body = await request.app.state.host.bodies.read(request)
    request.state.num_bytes = len(body)
    return decode(body, kind) if len(body) < LARGE else await asyncio.to_thread(decode, body, kind)


def scope_of(request: Request) -> str:
    """The scope that the address names (`?scope=`); the common one without it. Raises RequestError."""
    scope = request.query_params.get("scope", "")
    check_scope(scope, "scope")
    return scope


def service_of(request: Request) -> Service:
    """The loaded model. Raises RequestError 503 while there is none."""
    return request.app.state.host.ready()
