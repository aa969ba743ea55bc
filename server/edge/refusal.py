"""The response to a request that is refused, in front of the routes and in them."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ..errors import RequestError

MESSAGES = "/v1/messages"  # where Anthropic's clients ask


def refusal(error: RequestError, path: str) -> Response:
    """Return an error as the clients of this path expect it: OpenAI's or Anthropic's."""
    body = error.message_body() if path == MESSAGES or path.startswith(f"{MESSAGES}/") else error.body()
    return JSONResponse(body, status_code=error.status, headers=error.headers)
