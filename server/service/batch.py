"""Batches: a file has one request in each line, and the answers are written to another file.

No client waits for the answers, so the requests run in an order in which they share as much KV as possible. Lines and
answers have OpenAI's form. Each answer is written as soon as it is complete, so a server that is killed and started again
computes no finished line twice. An invalid line does not affect the other lines.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from ...ordering.clusters import depth_first
from ...ordering.document import Document, DocumentError, find_documents
from ..http.api_errors import RequestError
from ..http.json_body import as_unicode, check_elements

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
AHEAD = 64  # lines that wait in the queue in addition to the running lines; the queue prefers lines that share documents
BUSY = (429, 503)  # statuses of a server that may have room later
PAUSE = 1.0  # s until a line is tried again after such a status
COSTLY = b'"code":"loading_failed"'  # with this error each try loads a model, so the pause doubles
LONGEST = 60.0  # s: the longest pause
MOST_ORDERED = 16  # only so many documents of a line decide its place: the time for this grows with their square

encode = msgspec.json.Encoder().encode


class LineError(Struct, frozen=True):
    """The error of an invalid line, in OpenAI's form. line: the line's number, from 1."""

    code: str
    message: str
    line: int


class NoLines(Exception):
    """The file has no valid line. The exception's message is the error of the first line."""


class _Line(Struct, frozen=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: Raw


LINES, STREAMS = msgspec.json.Decoder(_Line), Raw(b"true")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of a batch.

    number: the line's number, from 1.
    body: the request as JSON.
    error: why the line is invalid; None if it is valid.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: LineError | None = None

    @property
    def key(self) -> str | int:
        """The key of the line's answer: the `custom_id`, or the line's number if the line is invalid."""
        return self.number if self.custom_id is None or self.error else self.custom_id


def read_lines(data: bytes) -> list[BatchLine]:
    """Return the lines of a batch, except blank ones. Raises NoLines if no line is valid."""
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, text in enumerate(data.splitlines(), 1):
        if text.strip():
            lines.append(line := _read_line(number, text, seen))
            if line.custom_id is not None:
                seen.add(line.custom_id)
    if all(line.error for line in lines):
        first = next((line.error.message for line in lines if line.error), "the file is empty: expected one request a line")
        raise NoLines(first)
    return lines


def _read_line(number: int, text: bytes, seen: set[str]) -> BatchLine:
    def wrong(code: str, message: str) -> BatchLine:
        return BatchLine(number, error=LineError(code, f"line {number}: {message}", number))

    try:
        check_elements(text)
        line = LINES.decode(as_unicode(text))
        fields = msgspec.json.decode(line.body, type=dict[str, Raw])
    except RequestError as error:
        return wrong("invalid_line", error.message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return wrong("invalid_line", f"{error}: expected custom_id, method, url and body")
    if fields.get("stream") == STREAMS:
        return wrong("invalid_line", "stream: a batch has only whole answers: leave stream out")
    if line.url not in ENDPOINTS:
        return wrong("invalid_url", f"url is {line.url[:80]!r}: expected {' or '.join(ENDPOINTS)}")
    if line.custom_id in seen:
        return wrong("duplicate_custom_id", f"an earlier line also has the custom_id {line.custom_id[:80]!r}")
    return BatchLine(number, line.custom_id, line.url, bytes(line.body))


# ---- The order. ---------------------------------------------------------------------------------------------------------


class _Texts(Struct, frozen=True):
    """The fields of a request from which `in_order` computes the request's place."""

    messages: list[dict[str, object]] = []
    documents: list[object] | None = None
    tools: list[object] = []
    prompt: object = None
    input: object = None
    instructions: object = None
    cache_scope: object = None


TEXTS = msgspec.json.Decoder(_Texts)


def in_order(lines: Iterable[BatchLine]) -> list[BatchLine]:
    """Return the lines in an order in which successive lines share as much KV as possible.

    Lines whose prompts start with the same text form a group. Within a group, lines that share documents follow each
    other.
    """
    groups: dict[bytes, list[tuple[bytes, BatchLine, Mapping[str, float]]]] = {}
    for line in lines:
        head, lengths, rest = _parts(line)
        groups.setdefault(head, []).append((rest, line, lengths))
    ordered: list[BatchLine] = []
    for _, group in sorted(groups.items(), key=lambda item: item[0]):
        group.sort(key=lambda each: each[0])
        ordered += (group[at][1] for at in depth_first([lengths for _, _, lengths in group]))
    return ordered


def _parts(line: BatchLine) -> tuple[bytes, dict[str, float], bytes]:
    """Return the text of a prompt up to its first documents, the documents' lengths by key, and the text after them.

    If the body cannot be read, return the whole body as the text before documents, and no documents.
    """
    try:
        texts = TEXTS.decode(line.body)
        found = find_documents(texts.messages, texts.documents, takes_results=False)
    except (msgspec.MsgspecError, DocumentError, KeyError, TypeError, AttributeError, RecursionError):
        return line.body, {}, b""
    at = min((at for at, documents in found.items() if documents), default=len(texts.messages))
    documents: Sequence[Document] = found.get(at, ())
    head = (line.url, texts.cache_scope, texts.tools, texts.instructions, texts.messages[:at])
    others = [{name: value for name, value in message.items() if name != "documents"} for message in texts.messages[at:]]
    rest = encode((others, texts.prompt, texts.input))
    if not documents:
        return encode(head)[:-1] + rest, {}, b""
    return encode(head), {document.key: float(len(document.text)) for document in documents[:MOST_ORDERED]}, rest


# ---- The answers. -------------------------------------------------------------------------------------------------------


class LineAnswer(Struct, frozen=True):
    """The answer to a line. body: the answer as JSON."""

    status_code: int
    request_id: str
    body: Raw


Ask = Callable[[BatchLine], Awaitable[LineAnswer]]
"""Answers the request in a line, as the server answers a client."""


class Result(Struct, frozen=True):
    """A line of the file of answers, in OpenAI's form."""

    id: str
    custom_id: str | None
    response: LineAnswer | None
    error: LineError | None

    @property
    def has_failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


RESULTS = msgspec.json.Decoder(Result)


class NotAnswers(Exception):
    """The file is not a batch's file of answers."""


class Results:
    """The file of a batch's answers, with one answer in each line. Raises NotAnswers and OSError.

    If an earlier process was killed, the last line of the file may be incomplete. Opening the file removes an incomplete
    last line.

    done: the keys of the lines that are answered.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str | int] = set()
        self.num_failed = self.num_bytes = 0
        self._file = path.open("ab")
        try:
            whole = path.read_bytes()
            self.num_bytes = whole.rfind(b"\n") + 1
            for number, text in enumerate(whole[: self.num_bytes].splitlines(), 1):
                self._count(_result(text, number))
            if whole[self.num_bytes :] and not self.num_bytes and not whole.startswith(b'{"id":'):
                raise NotAnswers("its content is not a batch's answers")
            self._file.truncate(self.num_bytes)
        except BaseException:
            self._file.close()
            raise

    def add(self, line: BatchLine, answered: LineAnswer | None) -> None:
        """Write the answer of a line, or the error of an invalid line."""
        error = line.error if answered is None else None
        result = Result(f"batch_req_{secrets.token_hex(12)}", None if error else line.custom_id, answered, error)
        text = encode(result) + b"\n"
        self._file.write(text)
        self._file.flush()
        self.num_bytes += len(text)
        self._count(result)

    def _count(self, result: Result) -> None:
        self.done.add(result.error.line if result.error else result.custom_id or "")
        self.num_failed += result.has_failed

    def close(self) -> None:
        self._file.close()


def _result(text: bytes, number: int) -> Result:
    try:
        return RESULTS.decode(text)
    except msgspec.MsgspecError:
        raise NotAnswers(f"line {number} is not an answer of a batch") from None


async def run(
    lines: Sequence[BatchLine], results: Results, ask: Ask, *, num_slots: int, on_answer: Callable[[], None] = lambda: None
) -> None:
    """Answer all lines that have no answer in `results`. If an answer's status is in `BUSY`, try the line again later.

    num_slots: how many requests run at a time. In addition, `AHEAD` requests wait in the engine's queue: of the waiting
    requests, the engine prefers those that share documents.
    on_answer: called after each line.
    """
    left = [line for line in lines if line.key not in results.done]
    ordered = await asyncio.to_thread(in_order, [line for line in left if not line.error])
    waiting = iter([*(line for line in left if line.error), *ordered])

    async def work() -> None:
        for line in waiting:
            if line.error:
                await asyncio.sleep(0)  # let other work run between two lines
            results.add(line, None if line.error else await _patiently(ask, line))
            on_answer()

    async with asyncio.TaskGroup() as group:
        for _ in range(num_slots + AHEAD):
            group.create_task(work())


async def _patiently(ask: Ask, line: BatchLine) -> LineAnswer:
    pause = PAUSE
    while (answered := await ask(line)).status_code in BUSY:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST) if COSTLY in bytes(answered.body) else PAUSE
    return answered
