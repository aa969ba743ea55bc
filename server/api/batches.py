"""OpenAI's files and batches: bodies and handlers; and how a line of a batch asks a route of this server."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message

from ...slots.scope import MAX_NAME
from ..http.api_errors import RequestError
from ..http.bodies import read_form
from ..service.batch import Ask, BatchLine, LineAnswer
from ..service.batch_files import Batches
from .endpoint import beside_others, page
from .reply import JsonReply

PURPOSE = "batch"
Text = Annotated[str, Meta(max_length=512)]


class BatchRequest(Struct, frozen=True):
    """`POST /v1/batches`. The lines of the file all ask `endpoint`."""

    input_file_id: Annotated[str, Meta(max_length=MAX_NAME)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, Text], Meta(max_length=16)] | None = None


def asking(app: Starlette, owner: str) -> Ask:
    """Return what asks a route of this server for a line of a batch, without a connection."""
    routes = ExceptionMiddleware(app.router, handlers=app.exception_handlers)

    async def ask(line: BatchLine) -> LineAnswer:
        id = f"req-{secrets.token_hex(8)}"
        body: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
        answer: list[Message] = []

        async def receive() -> Message:
            return body.pop() if body else await asyncio.Future()  # its client never leaves

        async def send(message: Message) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": line.url,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": app,
            "state": {"request_id": id, "owner": owner, "batch": True},
        }
        await routes(scope, receive, send)
        start, *rest = answer
        return LineAnswer(start["status"], id, Raw(b"".join(message["body"] for message in rest)))

    return ask


async def upload(request: Request) -> Response:
    """Store a file of lines for a batch: a form with `file` and `purpose`."""
    batches = _batches(request)
    body = await request.app.state.app.bodies.read(request)
    request.state.num_bytes = len(body)
    form = await beside_others(request, lambda: read_form(request.headers.get("content-type", ""), body))
    if "file" not in form:
        raise RequestError("file is missing: expected a file in the form", param="file")
    if (purpose := form.get("purpose", ("", b""))[1]) != PURPOSE.encode():
        raise RequestError(f"purpose is {purpose[:80].decode('utf-8', 'replace')!r}: expected {PURPOSE}", param="purpose")
    name, content = form["file"]
    batches.files.check_room(len(content))
    file = await batches.files.add(_owner(request), name[:MAX_NAME], PURPOSE, content)
    return JsonReply(file.public())


async def list_files(request: Request) -> Response:
    """List the files of this key (`?purpose=`, `?limit=`, `?order=`, `?after=`)."""
    purpose, owner = request.query_params.get("purpose"), _owner(request)
    files = [file for file in _batches(request).files.files.values() if file.owner == owner]
    return JsonReply(page([file.public() for file in files if purpose in (None, file.purpose)], request))


async def show_file(request: Request) -> Response:
    """Show what is known of a file."""
    return JsonReply(_batches(request).files.file(_owner(request), request.path_params["id"]).public())


async def file_content(request: Request) -> Response:
    """Send the content of a file."""
    files = _batches(request).files
    file = files.file(_owner(request), request.path_params["id"])
    return FileResponse(files.path(file), media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Delete a file. One that an unfinished batch reads stays."""
    files = _batches(request).files
    file = files.file(_owner(request), request.path_params["id"])
    if reader := next((one for one in files.batches.values() if one.is_open and one.input_file_id == file.id), None):
        raise RequestError(f"{reader.id} reads this file: cancel it first", param="id")
    files.delete(file)
    return JsonReply({"id": file.id, "object": "file", "deleted": True})


async def create(request: Request, asked: BatchRequest) -> Response:
    """Answer the lines of a file while no other request needs the engine."""
    batches, owner = _batches(request), _owner(request)
    input = batches.files.file(owner, asked.input_file_id)
    return JsonReply(batches.create(owner, asked.endpoint, input, asked.completion_window, asked.metadata).public())


async def list_batches(request: Request) -> Response:
    """List the batches of this key (`?limit=`, `?after=`)."""
    batches, owner = _batches(request).files.batches.values(), _owner(request)
    return JsonReply(page([batch.public() for batch in batches if batch.owner == owner], request))


async def show(request: Request) -> Response:
    """Show a batch: its status, and how many of its lines are answered."""
    return JsonReply(_batches(request).files.batch(_owner(request), request.path_params["id"]).public())


async def cancel(request: Request) -> Response:
    """End a batch; the answers that it has become its files."""
    batches = _batches(request)
    batch = batches.files.batch(_owner(request), request.path_params["id"])
    batches.cancel(batch)
    return JsonReply(batch.public())


def _batches(request: Request) -> Batches:
    """Return the batches. Raises RequestError 503 while the model loads, 501 on a replica."""
    state = request.app.state.app
    state.loaded()
    if state.batches is None:
        raise RequestError("a replica stores no files: ask a server of its own", status=501)
    return state.batches


def _owner(request: Request) -> str:
    return request.state.owner
