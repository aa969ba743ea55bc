"""The response to a request that is refused, in front of the routes and in them."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ..errors import RequestError


def refusal(error: RequestError) -> Response:
    """Return an error as OpenAI's clients expect it."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
