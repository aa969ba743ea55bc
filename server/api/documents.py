"""Files that clients upload: `POST /v1/documents/read` returns their text, or keeps them for searches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from email.message import Message

from starlette.requests import Request
from starlette.responses import Response

from ...models.model import Model
from ..engine.usage import Fields
from ..http.api_errors import RequestError
from ..http.bodies import Reservation
from ..http.threads import give_way
from ..search.attachments import Attachment, Attachments
from ..search.folder import EMBEDDING
from .endpoint import scope_of, service_of, vectors_of, while_connected
from .reply import JsonReply, encode

NEVER, AUTO, ALWAYS = SEARCH = ("never", "auto", "always")
SHARE = 3  # a file that takes more than a third of the context is large
MOST_LETTERS = 4 << 20  # letters of a file whose text is returned; a longer file can only be kept for searches
MOST_COUNTED = 1 << 20  # letters of a file that are tokenised; for the rest, the number of tokens is estimated
FORM, MOST_FIELDS = "multipart/form-data", 16
MOST_HEAD = 4 << 10  # bytes of a field's head: Python parses its parameters in quadratic time


async def read(request: Request) -> Response:
    """Read a file and return its text in parts, or keep it for searches (`?search=`)."""
    scope, wish = scope_of(request), request.query_params.get("search", NEVER)
    if wish not in SEARCH:
        raise RequestError(f"search is {wish[:80]!r}: expected one of {', '.join(SEARCH)}", param="search")
    vectors, limit = vectors_of(request), 0 if wish == NEVER else service_of(request).submitter.limit
    files, file = _files_of(request), await _take(request)
    try:
        await while_connected(request, files.read(file))
        sample = await asyncio.to_thread(_measure, file)
        size = sum(map(len, sample))
        file.tokens = await vectors.threads.run(size, _count, vectors.model, sample) * file.letters // max(size, 1)
        if wish == ALWAYS or (wish == AUTO and file.tokens > limit // SHARE):
            files.keep(scope, file)
            return JsonReply(_kept(files, file))
        if file.letters > MOST_LETTERS:
            reason = f"{file.name} has {file.letters:,} letters, and at most {MOST_LETTERS:,} are returned"
            raise RequestError(f"{reason}: search=auto keeps it here for chats to search", status=413, param="search")
        return JsonReply(await asyncio.to_thread(lambda: encode(_shown(file) | {"id": None, "parts": [*_parts(file)]})))
    finally:
        files.release(file)


async def show(request: Request) -> Response:
    """Show the state of a file that is kept for searches (`?scope=`)."""
    files = _files_of(request)
    return JsonReply(_kept(files, files.find(scope_of(request), request.path_params["id"])))


async def forget(request: Request) -> Response:
    """Delete a file that is kept for searches (`?scope=`)."""
    id, scope = request.path_params["id"], scope_of(request)
    _files_of(request).forget(scope, id)
    return JsonReply({"id": id, "object": "document.deleted", "deleted": True, "scope": scope})


def _files_of(request: Request) -> Attachments:
    return request.app.state.app.attachments


def _shown(file: Attachment) -> Fields:
    about: Fields = {"object": "document", "id": file.id, "name": file.name, "kind": file.kind}
    return about | {"letters": file.letters, "tokens": file.tokens, "left_out": file.left_out}


def _kept(files: Attachments, file: Attachment) -> Fields:
    """Return the state of a kept file, and the stages of a search in it (by words only, or also by vectors)."""
    state: Fields = {"state": file.state, "stages": files.stages(file)}
    if file.state == EMBEDDING:
        state["progress"] = {"unit": "documents", "done": file.num_vectors, "total": file.num_embedded}
    return _shown(file) | state | ({"error": file.error} if file.error else {})


def _parts(file: Attachment) -> Iterator[Fields]:
    return (part._asdict() for part in file.parts())


def _measure(file: Attachment) -> list[str]:
    """Count the letters of a file. Return the file's first texts, up to `MOST_COUNTED` letters.

    The caller estimates the number of the file's tokens from the returned texts.
    """
    sample: list[str] = []
    file.letters = 0
    for part in file.parts():
        file.letters += len(part.text)
        if file.letters <= MOST_COUNTED:
            sample.append(part.text)
    return sample


def _count(model: Model, texts: list[str]) -> int:
    num_tokens = 0
    for text in texts:
        num_tokens += len(model.tokenize(text))
        give_way()
    return num_tokens


# ---- The body: one file as it is, or as a field of a form. --------------------------------------------------------------


async def _take(request: Request) -> Attachment:
    """Read the body of a request, and store its file on disk. Raises RequestError, ClientDisconnect."""
    bodies, kind = request.app.state.app.bodies, request.headers.get("content-type", "")
    with Reservation(bodies) as room:
        body = await bodies.read(request, room)
        if kind.lower().startswith(FORM):
            name, data = await asyncio.to_thread(_file_in, body, kind)
        else:
            name, data = "", body
        del body
        name = request.query_params.get("filename", name)
        if not name:
            raise RequestError("filename is missing: send the file's name as ?filename=", param="filename")
        return await _files_of(request).take(name, data)


def _file_in(body: bytes, kind: str) -> tuple[str, bytes]:
    """Return the file's name and its bytes from the field `file` of a form. Raises RequestError."""
    try:
        boundary = _header("content-type", kind[:MOST_HEAD]).get_boundary()
        if boundary:
            fields = (b"\r\n" + body).split(f"\r\n--{boundary}".encode(errors="replace"), MOST_FIELDS + 1)[1:]
            for at, field in enumerate(fields[:MOST_FIELDS]):
                head, end, _ = field[:MOST_HEAD].partition(b"\r\n\r\n")
                about = _disposition(head)
                if end and about.get_param("name", header="content-disposition") == "file":
                    if at + 1 == len(fields):
                        raise RequestError("the form ends within its field `file`", param="file")
                    return about.get_filename() or "file", field[len(head) + len(end) :]
    except ValueError as error:  # a parameter whose number has 5,000 digits, or whose charset has a NUL
        raise RequestError(f"the form's headers cannot be read: {str(error)[:80]}", param="file") from None
    raise RequestError(f"expected a field `file` among the first {MOST_FIELDS} of the form", param="file")


def _disposition(head: bytes) -> Message:
    """Return the content-disposition header of a form's field, or an empty message if the field has none.

    The header has the name of the field and the name of the file.
    """
    for line in head.decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.lower() == "content-disposition":
            return _header("content-disposition", value.strip())
    return Message()


def _header(name: str, value: str) -> Message:
    """Return an email message with this one header, because Python's email package can parse a header's parameters."""
    message = Message()
    message[name] = value
    return message
