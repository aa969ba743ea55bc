"""The error of a request in the form of each API, and the responses to requests that are refused or fail.

Each error has a status and, in OpenAI's form, the type next to it:

  400 invalid_request_error       a wrong type, no text, or a prompt longer than the context; `param` names the field
  401 authentication_error        the API key is missing or wrong
  403 permission_error            an unknown host or web page, or documents of another scope
  404 not_found_error             no such route or model; an answer or a conversation that is not stored
  405 invalid_request_error       the path does not support the method; the header Allow lists those it does
  408 timeout_error               a body that arrived too slowly
  413 invalid_request_error       a body larger than --max-body, compressed or not, or with too many elements
  415 invalid_request_error       a web page's body that is not JSON; an encoding that is not supported
  429 rate_limit_error            the queue is full; the header Retry-After says when to try again
  500 server_error                the engine failed
  501 not_supported_error         a route that needs another model or other settings
  503 unavailable_error           loading, shutting down, or no room for another large body
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
MESSAGE_TYPES = {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""The types that Anthropic's API gives to these statuses. A status without a type in either table is an `api_error`."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long. The error's details have `n_prompt_tokens` and `n_ctx`."""
MAX_COMPARED = 60  # characters: a longer path is not compared with the paths of all routes


class RequestError(Exception):
    """An error for the client.

    param: the path of the wrong field in the body.
    code: the error's name for programs, such as `context_length_exceeded`.
    retry_after: seconds after which the client may try again.
    details: further fields of the error in the body.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
        **details: object,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers, self.details = dict(headers or {}), details
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    @property
    def type(self) -> str:
        """The type of the error in OpenAI's API."""
        return TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, object]:
        """Return the body of the error in OpenAI's form, which most routes use."""
        error = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": error | {"code": self.code or self.status} | self.details}

    def message_body(self) -> dict[str, object]:
        """Return the body of the error in Anthropic's form, for the routes of its Messages API."""
        kind, message = MESSAGE_TYPES.get(self.status) or TYPES.get(self.status, "api_error"), self.message
        if self.code == TOO_LONG:  # Claude Code reads both numbers and compacts its history
            num_tokens, most = self.details["n_prompt_tokens"], int(str(self.details["n_ctx"])) - 1
            message = f"prompt is too long: {num_tokens} tokens > {most} maximum: {message}"
        about = {"message": message, "param": self.param, "code": self.code or self.status}
        return {"type": "error", "error": about | self.details | {"type": kind}}

    def ollama_body(self) -> dict[str, object]:
        """Return the body of the error in Ollama's form, for the routes of its API."""
        words = "the input length exceeds the context length: " if self.code == TOO_LONG else ""  # clients search for this
        return {"error": words + self.message}


def too_long(num_tokens: int, limit: int, about: bool = False) -> RequestError:
    """Return the error for a prompt that leaves no room for an answer.

    limit: the size of the context in tokens.
    about: whether `num_tokens` is an estimate.
    """
    return RequestError(
        f"the prompt has {'about ' if about else ''}{num_tokens} tokens, which exceeds the available context size of "
        f"{limit}: shorten it to {limit - 1} or start the server with a larger --ctx-size",
        code="context_length_exceeded",
        type="exceed_context_size_error",  # llama-server's; the code is OpenAI's
        n_prompt_tokens=num_tokens,
        n_ctx=limit,
    )


def unknown_model(name: str, known: Iterable[str]) -> RequestError:
    """Return the error for a model that is not served. known: the names of the served models."""
    message = f"no model {name[:80]!r} is served here: expected {', '.join(known)}"
    return RequestError(message, status=404, code="model_not_found")


def no_route(path: str, known: Sequence[str] = ()) -> RequestError:
    """Return the error for a path without a route. The error names the most similar of the `known` paths."""
    near = get_close_matches(path, known, n=1, cutoff=0.8) if len(path) <= MAX_COMPARED else []
    return RequestError(f"no such route: {path}" + (f" (did you mean {near[0]}?)" if near else ""), status=404)


def reason_of(error: Exception) -> str:
    """Return the message of an error.

    If the error has no message, as is usual for a MemoryError, return the type of the error.
    """
    return str(error) or type(error).__name__


def not_loaded(error: Exception) -> RequestError:
    """Return the error for a request whose model was unloaded and cannot be loaded again."""
    return RequestError(f"the model could not be loaded again: {reason_of(error)}", status=503, code="loading_failed")


def failed(error: Exception, program: str = "server") -> RequestError:
    """Return the error for a request that ended with an unexpected exception.

    program: the name of the program that failed, for the message.
    """
    return RequestError(f"the {program} failed: {type(error).__name__}", status=500)


# ---- Responses to requests that are refused, before they reach a route or by a route. -----------------------------------

MESSAGES, OLLAMA = "/v1/messages", "/api/"  # paths of Anthropic's API and of Ollama's


def refusal(error: RequestError, path: str) -> Response:
    """Return an error as a response in the form of the path's API: OpenAI's, Anthropic's or Ollama's."""
    if path.startswith(OLLAMA):
        body = error.ollama_body()
    else:
        body = error.message_body() if path == MESSAGES or path.startswith(f"{MESSAGES}/") else error.body()
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def handlers(program: str) -> dict[Any, ExceptionHandler]:
    """Return the handlers of the errors that an application's routes raise.

    program: the application's name in the message of an unexpected error.
    """

    def fail(request: Request, error: Exception) -> Response:
        answer = refusal(failed(error, program), request.scope["path"])
        answer.headers["Connection"] = "close"  # uvicorn gets the error, too, and closes the connection
        return answer

    return {RequestError: _refuse, HTTPException: _refuse, ClientDisconnect: _let_go, Exception: fail}


def _refuse(request: Request, error: Exception) -> Response:
    path = request.scope["path"]  # not the path of the URL, which depends on the client's `Host`
    if isinstance(error, HTTPException) and error.status_code == 405 and request.method == "OPTIONS":
        return Response(headers=error.headers)  # with `Allow`; another layer has already answered preflights of pages
    request.state.error = error
    if isinstance(error, HTTPException):
        status, detail, headers = error.status_code, error.detail, error.headers or {}
        if status == 405:
            detail = f"{path} takes no {request.method}: expected {headers.get('Allow', 'another method')}"
        error = no_route(path, _paths(request)) if status == 404 else RequestError(detail, status=status, headers=headers)
    assert isinstance(error, RequestError)
    return refusal(error, path)


def _paths(request: Request) -> list[str]:
    """Return the paths of an application's routes, written as in the documentation."""
    return [route.path.replace(":path}", "}") for route in request.app.routes if isinstance(route, Route)]


def _let_go(request: Request, error: Exception) -> Response:
    """Return a response for a client that disconnected while it sent its body.

    The client cannot read this response, so only the log shows its status.
    """
    return Response(status_code=499)
