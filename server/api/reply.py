"""The core of all answers: accept, submit, collect or stream; usage, probabilities, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import re
from binascii import Error
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from itertools import chain
from time import time
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ...models.sampling import Logprobs
from ...retrieval.ranking import Hit
from ...slots.scope import MAX_NAME
from ..chat.body import ChatRequest, Options, check_scope
from ..chat.decode import LARGE, R, decode_request
from ..engine.generation import Delta, End, Event, Failure, Generation, PromptProgress, account
from ..engine.usage import Fields, Report
from ..engine.view import Prediction
from ..formats.answer import AnswerReader, Plain
from ..http.api_errors import RequestError
from ..http.connection import SHORTCUT, Shortcut
from ..search.folder import FolderIndex
from ..search.retrieve import SearchReport, StagePrefetch, fitting, index_state, query_of, with_documents
from ..search.vectors import Vectors
from ..service.models import Loaded, Models
from ..service.repeats import Refusals, Repeats, is_lasting, key_of
from ..service.service import Service, new_id
from ..service.submitter import Prepared

# ---- The tokens of an answer with their probabilities, as OpenAI and llama-server write them. ---------------------------

Piece = Callable[[int], bytes]


class Probabilities:
    """Writes the tokens of one choice. The texts of its tokens joined are the answer.

    piece: the bytes of a token. after: probabilities are as the samplers left them, and written as such, not as logarithms.
    A token that ends within a character has no text; the one that completes the character has it whole. Of a token in which
    a stop string begins, only what stands in front of that is told. num_prompt: how many of the first tokens are the
    prompt's. spelling: the bytes of a control token, which has some in a prompt.
    """

    def __init__(self, piece: Piece, after: bool = False, num_prompt: int = 0, spelling: Piece | None = None) -> None:
        self._piece, self._after, self._offset = piece, after, 0
        self._num_prompt, self._spelling = num_prompt, spelling or piece
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def entries(self, delta: Delta) -> list[Raw]:
        """Return the next tokens, an object each: OpenAI's fields for chats, and llama-server's `id`.

        Each is JSON at once, 84 bytes a listed token: as objects of Python they would take some 400.
        """
        return [entry for _, entry in self._told(delta)]

    def _told(self, delta: Delta) -> list[tuple[str, Raw]]:
        """Return the next tokens, each with the part of the text that it brings."""
        last = len(delta.logprobs) - 1 if delta.is_last else -1
        return [
            self._entry(logprobs, final=at == last, kept=delta.kept if at == last else None)
            for at, logprobs in enumerate(delta.logprobs)
        ]

    def _entry(self, logprobs: Logprobs, final: bool, kept: int | None) -> tuple[str, Raw]:
        piece = self._piece(logprobs.token)
        if self._num_prompt:
            self._num_prompt -= 1
            piece = piece or self._spelling(logprobs.token)
        if kept is not None:
            piece = self._beginning(piece, kept)
        text = self._decoder.decode(piece, final)[:kept]
        best = zip(logprobs.top_tokens.tolist(), logprobs.top_logprobs.tolist(), strict=True)
        top = [self._token(token, spelt(self._piece(token)), self._piece(token), logprob) for token, logprob in best]
        told = self._token(logprobs.token, text, piece, logprobs.logprob)
        return text, Raw(encode(told | {"top_probs" if self._after else "top_logprobs": top}))

    def _beginning(self, piece: bytes, length: int) -> bytes:
        """Return the fewest first bytes of a piece that bring `length` characters."""
        before = self._decoder.getstate()
        for size in range(len(piece)):
            self._decoder.setstate(before)
            if len(self._decoder.decode(piece[:size])) >= length:
                piece = piece[:size]
                break
        self._decoder.setstate(before)
        return piece

    def _token(self, token: int, text: str, piece: bytes, logprob: float) -> Fields:
        name, value = ("prob", math.exp(logprob)) if self._after else ("logprob", logprob)
        return {"id": token, "token": text, "bytes": list(piece), name: value}

    def of_text(self, delta: Delta) -> tuple[str, Fields]:
        """Return the next tokens' text, and OpenAI's object for text completions, with llama-server's `content` in it."""
        told, logprobs = self._told(delta), delta.logprobs
        texts = [text for text, _ in told]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return "".join(texts), {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [None if math.isnan(each.logprob) else self._top(each) for each in logprobs],
            "text_offset": offsets,
            "content": [entry for _, entry in told],
        }

    def _top(self, logprobs: Logprobs) -> Fields:
        """Return the most probable tokens by their texts; of two with the same text, the more probable one."""
        best = reversed(list(zip(logprobs.top_tokens.tolist(), logprobs.top_logprobs.tolist(), strict=True)))
        return {spelt(self._piece(token)): logprob for token, logprob in best}


def spelt(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMeta:
    """The fields that every body of an answer carries. options: the request's, without its texts.

    num_prompts: the answer has `options.n` choices of each. echoes: the prompts' texts, if the answers begin with them.
    generations: of the choices, in order. reader: makes the reader of a chat's choice. caches: the prompt is left in the
    cache. verbose: the answer shows its prompt and its options, as in llama-server. warnings: about the request's fields.
    piece: the bytes of a token. spelling: of a control token, too. media_type: of a stream.
    """

    id: str
    model: str
    fingerprint: str
    options: Options
    num_prompts: int = 1
    echoes: Sequence[str] = ()
    generations: Sequence[Generation] = ()
    reader: Callable[[], AnswerReader] = Plain
    caches: bool = False
    verbose: bool = False
    warnings: tuple[str, ...] = ()
    piece: Piece = lambda token: b""
    spelling: Piece = lambda token: b""
    media_type: str = "text/event-stream"
    created: int = field(default_factory=lambda: int(time()))

    @property
    def num_each(self) -> int:
        """The choices of each prompt."""
        return self.options.n or 1

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.num_each

    def probabilities(self) -> list[Probabilities]:
        """Return the writers of the choices' probabilities."""
        return [
            Probabilities(self.piece, self.options.post_sampling_probs, generation.num_echoed, self.spelling)
            for generation in self.generations
        ]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.options.stream_options is not None and self.options.stream_options.include_usage

    def notes(self) -> Fields:
        """Return the fields of a whole answer, or of a stream's last chunk, that only some requests have."""
        return {"warnings": self.warnings} if self.warnings else {}

    def head(self, kind: str) -> Fields:
        """Return the fields that OpenAI's objects begin with. kind: of the object."""
        made: Fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return made | {"system_fingerprint": self.fingerprint}

    def progress(self, progress: PromptProgress) -> Fields:
        """Return the fields of a progress."""
        fields: Fields = {"prompt_progress": asdict(progress)}
        return fields | {"timings": progress.timings()} if self.options.timings_per_token else fields

    def times(self, index: int, delta: Delta) -> Fields:
        """Return the times of an answer so far, if they are wanted with each piece of it."""
        if not self.options.timings_per_token:
            return {}
        return {"timings": self.generations[index].timings(delta.num_generated)}

    def usage(self, ends: Sequence[End]) -> Fields:
        """Return OpenAI's `usage` over all choices; the choices of one prompt count it once."""
        prompts, reports = ends[:: self.num_each], [end.report for end in ends]
        num_prompt, num_generated = sum(end.report.num_prompt for end in prompts), sum(r.num_generated for r in reports)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(end.report.num_cached for end in prompts)},
        }


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """One choice of an answer that is sent whole. deltas: all of it, in the pieces in which it came."""

    deltas: tuple[Delta, ...]
    end: End

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(delta.tokens for delta in self.deltas))

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return tuple(chain.from_iterable(delta.logprobs for delta in self.deltas))

    def whole(self) -> Delta:
        """Return it as one piece."""
        return Delta(self.text, self.tokens, self.logprobs, is_last=True, kept=self.end.kept)


class ReplyFormat(Protocol):
    """One API's shape of an answer. Each method but `whole` returns the server-sent events for one event of a choice."""

    envelope: ResponseMeta

    def begin(self) -> list[bytes]:
        """Called once, before the prompt is computed: the engine may not know the request yet."""
        ...

    def ping(self) -> list[bytes]:
        """An event that says nothing, for a client that counts only events as signs of life. At any time after `begin`."""
        ...

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]: ...

    def delta(self, index: int, delta: Delta) -> list[bytes]: ...

    def end(self, index: int, end: End) -> list[bytes]:
        """The end of a choice. Its text and tokens have come as a delta before."""
        ...

    def close(self, ends: Sequence[End]) -> list[bytes]:
        """Called once, after the last end, with all ends in order of the choices."""
        ...

    def fail(self, error: RequestError) -> list[bytes]:
        """The answer ends with an error; nothing follows."""
        ...

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields | list[Fields]:
        """Return the body of an answer that is not streamed."""
        ...


async def stream(reply: ReplyFormat, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer. events: with the index of their choice, up to each choice's end."""
    ends: dict[int, End] = {}
    if first := reply.begin():
        yield b"".join(first)
    async for index, event in events:
        match event:
            case PromptProgress():
                sent = reply.progress(index, event)
            case Delta():
                sent = reply.delta(index, event)
            case End(text, tokens=tokens):
                sent = reply.delta(index, event.delta()) if text or tokens else []
                sent += reply.end(index, event)
                ends[index] = event
            case Failure(error):
                sent = reply.fail(error)
        if sent:  # else the stream stays silent, and gets a ping in time
            yield b"".join(sent)
        if isinstance(event, Failure):
            return
    yield b"".join(reply.close([ends[index] for index in sorted(ends)]))


def accounts(report: Report) -> Fields:
    """Return llama-server's `timings`, and our own `slotcache` beside them."""
    fields: Fields = {"timings": report.timings(), "slotcache": report.slotcache()}
    return fields if report.stop is None else fields | {"stopping_word": report.stop}


def sse_event(body: Fields, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(body) + b"\n\n"


# ---- The routes' common parts: the service once it is loaded, bodies in and out, the shape of errors. -------------------

logger = logging.getLogger("slotcache")


class JsonReply(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


async def read_body(request: Request, kind: type[R]) -> R:
    """Return the body as `kind`. A large one is decoded in a thread. Raises RequestError, ClientDisconnect.

    `request.state` keeps its length as `num_bytes`, and a warning for each unknown field as `warnings`.
    """
    state = request.app.state.app
    body = await state.bodies.read(request)
    request.state.num_bytes = len(body)
    arguments = (body, kind, state.settings.strict)
    decoded, warnings = (
        decode_request(*arguments) if len(body) < LARGE else await asyncio.to_thread(decode_request, *arguments)
    )
    request.state.warnings = ()
    warn(request, warnings)
    return decoded.in_batch() if isinstance(decoded, Options) and hasattr(request.state, "batch") else decoded


def warn(request: Request, warnings: Sequence[str]) -> None:
    """Say these in the answer and in the log."""
    if warnings:
        request.state.warnings += tuple(warnings)
        about = {"request_id": request.state.request_id}
        logger.warning("%s: %s", request.url.path, "; ".join(warnings), extra={"fields": about})


OF_VECTORS = ("EmbeddingRequest", "RerankRequest", "EmbedRequest", "OldEmbedRequest")
"""Bodies that name the embedder or the reranker, which are no model of those in turn."""
CHOSEN = "slotcache.chosen"  # where a request's scope has what serves its model
EARLY = "slotcache.early"  # where it has the reply that a stream began with before its model was loaded
MOST_ITEMS, USUAL_ITEMS = 100, 20  # of one page of a list
ORDERS = ("asc", "desc")


def page(items: list[Fields], request: Request) -> Fields:
    """Return one page of a list, as OpenAI's API parts it. Raises RequestError."""
    limit, order, after = (request.query_params.get(name) for name in ("limit", "order", "after"))
    if order not in (None, *ORDERS):
        raise RequestError(f"order: expected one of {', '.join(ORDERS)}", param="order")
    if limit is not None and not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= MOST_ITEMS):
        raise RequestError(f"limit: expected a number from 1 to {MOST_ITEMS}", param="limit")
    if order != "asc":
        items = items[::-1]
    if after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise RequestError(f"after: no item {after[:80]!r} in this list", param="after")
        items = items[at + 1 :]
    page = items[: int(limit or USUAL_ITEMS)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "has_more": len(items) > len(page), "first_id": first, "last_id": last}


async def beside_others(request: Request, work: Callable[[], T]) -> T:
    """Return what `work` on a body returns. For a large body it runs in a thread, beside other requests."""
    return work() if request.state.num_bytes < LARGE else await asyncio.to_thread(work)


def scope_of(request: Request) -> str:
    """Return the scope in the address (`?scope=`), by default the common one. Raises RequestError."""
    scope = request.query_params.get("scope", "")
    check_scope(scope, "scope")
    return scope


def vectors_of(request: Request) -> Vectors:
    """Return the models for vectors, which are there for every model. Raises RequestError 503 while the model loads."""
    vectors, chosen = request.app.state.app.loaded(), chosen_of(request)
    return vectors if chosen is None else chosen.vectors


def service_of(request: Request) -> Service:
    """Return the service. Raises RequestError: 503 while the model loads, 501 for an encoder."""
    service, chosen = request.app.state.app.ready(), chosen_of(request)
    return service if chosen is None or chosen.service is None else chosen.service


def chosen_of(request: Request) -> Loaded | None:
    """Return what serves the model of a request: its body's, else `?model=`, else the first one. None: there is only one.

    Raises RequestError: 404 for an unknown model, 503 for one of the address that was never loaded.
    """
    models: Models | None = request.app.state.app.models
    if models is None:
        return None
    if CHOSEN in request.scope:
        return request.scope[CHOSEN]
    entry = models.find(name := request.query_params.get("model"))
    if name and entry.loaded is None:
        told = f"{entry.name} was not loaded yet: a request for it or POST /models/load does that"
        raise RequestError(told, status=503, param="model", code="model_not_loaded")
    return entry.loaded


async def choose(request: Request, asked: object, patience: float | None = None) -> bool:
    """Choose the model that a body names, or else `?model=`, and load it if it never was. False: not within `patience` (s).

    Raises RequestError: 404, or 503 with the reason.
    """
    models: Models | None = request.app.state.app.models
    if models is not None and hasattr(asked, "model"):
        name = _name_in(request, asked)
        if type(asked).__name__ in OF_VECTORS and models.find_beside(name) is not None:
            request.scope[CHOSEN] = models.first.loaded
            return True
        entry = models.find(name)
        try:
            if entry.value != "loaded":
                await while_connected(request, asyncio.wait_for(models.ready(entry), patience))
        except TimeoutError:
            return False
        request.scope[CHOSEN] = entry.loaded
    return True


def _name_in(request: Request, asked: object) -> str | None:
    """Return the name of the model that is asked for."""
    return getattr(asked, "model", None) or request.query_params.get("model")


# ---- Accepting ----------------------------------------------------------------------------------------------------------
# Chats on their way into the service: documents are found for those that ask for it, and prompts are computed ahead.

STAGE = 0.03  # s that a stage of a chat's search has to last before its documents are computed ahead


async def accept(request: Request, asked: ChatRequest, open_turn: bool = False, *, kind: str = "chatcmpl-") -> Prepared:
    """Find the documents of a chat with `retrieval`, and accept it: see `Service.accept_chat`. Raises RequestError."""

    async def find_and_accept() -> Prepared:
        chat, found = await _retrieve(request, asked) if asked.retrieves else (asked, None)
        return await service.accept_chat(chat, request.state.num_bytes, open_turn, id=id_of(request, kind), found=found)

    service = service_of(request)
    return await while_connected(request, find_and_accept())


def id_of(request: Request, kind: str) -> str:
    """Return the id of an answer: the one that its stream began with, if it has begun. kind: what a new one begins with."""
    early: ReplyFormat | None = request.scope.get(EARLY)
    return early.envelope.id if early else new_id(kind)


async def predict(request: Request, asked: ChatRequest) -> Prediction:
    """Return the prompt that a chat would have now, and its reuse. A hint after its documents depends on their order."""
    service, prepared = service_of(request), await accept(request, asked)
    return await service.view.predict(prepared.prompt, service.submitter.scope(asked))


async def count_prompt(request: Request, asked: ChatRequest) -> dict[str, int]:
    """Count the tokens that the prompt of a chat would have now."""
    return {"input_tokens": len((await predict(request, asked)).layout.tokens)}


async def prefetch_documents(
    service: Service, key: Hashable, asked: ChatRequest, num_bytes: int, *, open_turn: bool = False
) -> bool:
    """Compute the prompt of a chat ahead. False: no slot is idle. Raises RequestError.

    key, num_bytes: as in `Service.submit_background` and `Service.accept_chat`. open_turn: only as far as its documents.
    """
    if service.is_full:
        return False
    prepared = await service.accept_chat(asked.prefill_only(), num_bytes, open_turn)
    return await start_ahead(service, key, prepared, is_whole=not open_turn)


async def start_ahead(service: Service, key: Hashable, prepared: Prepared, *, is_whole: bool) -> bool:
    started = await asyncio.wrap_future(service.submit_background(key, prepared, is_whole))
    if not started:
        service.idle.resume()
    return started


async def _retrieve(request: Request, asked: ChatRequest) -> tuple[ChatRequest, SearchReport]:
    """Return the chat with the documents that were found for it, and these.

    While a later stage of the search runs, the chat with the documents so far is computed ahead.
    """
    service, folder_index = service_of(request), request.app.state.app.folder_index
    if folder_index is not None and service is not request.app.state.app.service:
        first = request.app.state.app.service.name
        raise RequestError(f"retrieval: the documents of --docs belong to {first}: ask that model", param="retrieval")
    if folder_index is None:
        raise RequestError("retrieval: this server has no documents: start it with --docs PATH", param="retrieval")
    asked.check()
    folder_index.check_scope(asked.cache_scope, "cache_scope")
    key, num_bytes = ("retrieval", request.state.request_id), request.state.num_bytes

    async def fit(hits: Sequence[Hit]) -> list[Hit]:
        return await shown_hits(service, folder_index, asked.cache_scope, hits)

    async def prefill(hits: Sequence[Hit]) -> None:
        await prefetch_documents(service, key, with_documents(asked, await fit(hits)), num_bytes)

    query, index = query_of(asked, folder_index), index_state(folder_index)
    if query is None:
        return with_documents(asked, ()), SearchReport((), index)
    ahead, hits = StagePrefetch(prefill, delay=STAGE), ()
    try:
        async for stage in folder_index.search().stages(query):
            hits = stage.hits
            if not stage.is_last:
                ahead.show(hits)
    except BaseException:
        service.engine.drop_background((asked.cache_scope, key))
        raise
    finally:
        ahead.stop()
    found = SearchReport(await fit(hits), index)
    return with_documents(asked, found.hits), found


async def shown_hits(service: Service, folder_index: FolderIndex, scope: str, hits: Sequence[Hit]) -> list[Hit]:
    """Return the first hits of a search, as far as a chat has room for them."""
    builder = service.builder
    return await builder.threads.run(0, partial(fitting, hits, folder_index.room, partial(builder.length, scope)))


# ---- Pings in a stream that is silent for long, so that neither a proxy on its way nor its client gives up. -------------


class SsePing:
    """Passes a response's messages on, and sends `event` whenever `interval` seconds have passed without one.

    An event and no comment, since parsers drop comments, and clients that wait for events would hang up. One timer for the
    whole stream: a message costs no more than reading the clock. While a ping waits for a client that reads nothing, no
    other one joins it.
    """

    def __init__(self, send: Send, interval: float, event: Callable[[], Sequence[bytes]]) -> None:
        self._send, self._interval, self._event = send, interval, event
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Future[None] | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on. Pings begin behind the first one and end in front of the last."""
        self._last = self._loop.time()
        if message["type"] == "http.response.start" and self._interval > 0:
            self._timer = self._loop.call_at(self._last + self._interval, self._beat)
        if self._ping is not None and self.is_sending:
            await asyncio.wait([self._ping])  # it stands in front: its number is the lower one
        if not message.get("more_body") and message["type"] != "http.response.start":
            self.stop()
        await self._send(message)

    @property
    def is_sending(self) -> bool:
        """Whether a ping is on its way."""
        return self._ping is not None and not self._ping.done()

    def note(self) -> None:
        """Note that something was sent past this."""
        self._last = self._loop.time()

    def stop(self) -> None:
        for waiting in (self._timer, self._ping):
            if waiting is not None:
                waiting.cancel()
        self._timer = self._ping = None

    def _beat(self) -> None:
        now = self._loop.time()
        if now >= self._last + self._interval:
            self._last = now
            if not self.is_sending:
                ping: Message = {"type": "http.response.body", "body": b"".join(self._event()), "more_body": True}
                self._ping = asyncio.ensure_future(self._send(ping))
                self._ping.add_done_callback(_look_at)
        self._timer = self._loop.call_at(self._last + self._interval, self._beat)


def _look_at(ping: asyncio.Future[None]) -> None:
    """Drop the error of a client that has gone: the stream finds out by itself."""
    if not ping.cancelled():
        ping.exception()


# ---- The routes that generate: chats and texts, streamed or whole. ------------------------------------------------------

T = TypeVar("T")
LONG = 16 << 10  # characters of answers that are parsed in a thread, beside other streams


def submit(request: Request, prepared: Prepared) -> ResponseMeta:
    """Submit a request; return the common fields of its answer. Raises RequestError: too long, no room."""
    service, options = service_of(request), prepared.options.without_texts()
    warn(request, prepared.warnings)
    _tell_of_cache(request, prepared)
    early: ReplyFormat | None = request.scope.get(EARLY)
    return ResponseMeta(
        id=prepared.id,
        model=(service.settings.any_model and options.model) or service.name,
        options=options,
        num_prompts=len(prepared.prompts),
        echoes=prepared.echoes,
        fingerprint=service.fingerprint,
        generations=service.submit(prepared),
        reader=prepared.turn.chat.shown_reader if prepared.turn else Plain,
        caches=service.submitter.caches(options),
        verbose=service.settings.verbose if options.verbose is None else options.verbose,
        warnings=request.state.warnings,
        piece=service.model.piece,
        spelling=service.model.spelling,
        created=early.envelope.created if early else int(time()),
    )


def _tell_of_cache(request: Request, prepared: Prepared) -> None:
    """Say once to a client that says nothing of the cache what that would have saved."""
    submitter, options = service_of(request).submitter, prepared.options
    if options.cache_prompt is not None or submitter.caches(options) or not submitter.can_reuse:
        return
    keys = (request.headers.get(name, "") for name in ("authorization", "x-api-key"))
    repeats: Repeats = request.app.state.app.repeats
    if num_tokens := repeats.note((*keys, options.cache_scope), prepared.prompts[0]):
        warn(request, [REPEATED.format(num_tokens)])


REPEATED = (
    "the first {:,} tokens of this prompt or more are those of an earlier one, and were computed again: with a "
    "`prompt_cache_key`, `cache_prompt: true` or the server's --cache-prompt they would have been reused; this is said once"
)

Handler = Callable[..., Awaitable[Response | ReplyFormat]]
Opening = Callable[[Request, Any], ReplyFormat | None]
"""Returns what a request's stream has until its model is loaded; None: the answer is whole."""
PATIENCE = 0.25  # s that a first load may take, or fail in, before a stream begins without its model


def endpoint(handler: Handler, body: type[Struct], opening: Opening | None = None) -> Handler:
    """Return a handler for which the body is read, and whose answer, if it is one to generate, is streamed or collected.

    A decoded body takes some 20 times its JSON, and an answer may take minutes: it is free when the handler returns.
    """
    chooses = body.__name__ not in ("ModelName", "ModelAction")  # these ask about a model, and nothing of it

    @wraps(handler)
    async def answer(request: Request) -> Response:
        state = request.app.state.app  # first: no body is read for a server that cannot answer
        state.ready() if issubclass(body, Options) else state.loaded()
        answered = await read_and_handle(request)
        return answered if isinstance(answered, Response) else await respond(request, answered)

    async def read_and_handle(request: Request) -> Response | ReplyFormat:
        asked = _in_session(request, await read_body(request, body))
        early = opening(request, asked) if opening and _is_new(request, asked) else None
        if not chooses or await choose(request, asked, PATIENCE if early else None):
            return await _refusing(handler, request, asked)
        assert early is not None
        request.scope[EARLY] = early
        return EventStream(request, early, partial(_choose_and_handle, handler, request, asked))

    return answer


async def _choose_and_handle(handler: Handler, request: Request, asked: object) -> Response | ReplyFormat:
    """Return what a handler returns, once the model is loaded. Raises RequestError."""
    await choose(request, asked)
    try:
        return await _refusing(handler, request, asked)
    finally:
        del request.scope[EARLY]  # it may hold texts


def _is_new(request: Request, asked: object) -> bool:
    """Whether the model that is asked for has to be loaded for the first time. Raises RequestError 404."""
    models: Models | None = request.app.state.app.models
    return models is not None and models.find(_name_in(request, asked)).loaded is None


def early_meta(request: Request, asked: Options, kind: str) -> ResponseMeta:
    """Return the common fields of an answer whose model is not there yet. kind: of its id. Raises RequestError."""
    asked.check()
    state, name = request.app.state.app, _name_in(request, asked)
    shown = (state.settings.any_model and asked.model) or state.models.find(name).name
    return ResponseMeta(id=new_id(kind), model=shown, fingerprint="", options=asked.without_texts())


def _in_session(request: Request, asked: R) -> R:
    """Return a body with the session that a header names, unless it names one itself."""
    session = request.headers.get("x-session-id", "")[:MAX_NAME]
    if not session or not isinstance(asked, Options) or asked.session_id is not None:
        return asked
    return msgspec.structs.replace(asked, session_id=session)


async def _refusing(handler: Handler, request: Request, asked: object) -> Response | ReplyFormat:
    """Return what a handler returns, unless an equal body was just found to be too long. Raises RequestError."""
    if not isinstance(asked, Options):
        return await handler(request, asked)
    refusals: Refusals = request.app.state.app.refusals
    path = request.url.path
    if refusals and (error := refusals.find(await beside_others(request, partial(key_of, path, asked)), path)):
        request.state.is_quiet = True
        raise error
    try:
        return await handler(request, asked)
    except RequestError as error:
        if is_lasting(asked, error):
            refusals.note(await beside_others(request, partial(key_of, path, asked)), error)
        raise


async def respond(request: Request, reply: ReplyFormat) -> Response:
    """Return the answer of a request that was submitted, streamed or whole."""
    service, generations = service_of(request), reply.envelope.generations
    if reply.envelope.options.stream:
        return EventStream(request, reply)
    request.state.account = partial(account, generations)
    spell = _speller(service, reply)
    answers = await while_connected(request, collect(service, generations, spell))
    # Logprobs are much larger than the text that they are of; a long text takes its time to be parsed.
    if any(answer.logprobs for answer in answers) or sum(len(answer.text) for answer in answers) >= LONG:
        return JsonReply(await asyncio.to_thread(lambda: encode(reply.whole(answers))))
    return JsonReply(reply.whole(answers))


class EventStream(StreamingResponse):
    """Streams the events of generations. A client that disconnects cancels them, even before the first event.

    later: gives the reply where the model is still to be loaded; until then `reply` pings, which has no generations.
    """

    def __init__(
        self, request: Request, reply: ReplyFormat, later: Callable[[], Awaitable[Response | ReplyFormat]] | None = None
    ) -> None:
        self._request, self._reply = request, reply
        pieces = self._pieces(reply) if later is None else self._pieces_later(reply, later)
        super().__init__(pieces, headers={"Cache-Control": "no-store"}, media_type=reply.envelope.media_type)
        asked = reply.envelope.options.sse_ping_interval
        self._ping_interval = request.app.state.app.settings.sse_ping_interval if asked is None else asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pings = ping = SsePing(send, self._ping_interval, lambda: self._reply.ping())
        self._offer_text()
        try:
            await super().__call__(scope, receive, ping.send)
        finally:
            ping.stop()
            for generation in self._reply.envelope.generations:
                generation.events.take_now = None
                self._service.abandon(generation)

    def _offer_text(self) -> None:
        """Have text written at once, where the connection can."""
        shortcut = self._request.scope.get("state", {}).get(SHORTCUT)
        if shortcut is not None:
            for index, generation in enumerate(self._reply.envelope.generations):
                generation.events.take_now = partial(self._write, shortcut, index)

    def _write(self, shortcut: Shortcut, index: int, delta: Delta) -> bool:
        """Write a piece of text at once. False: something stands in front of it, or its client is slow."""
        if self._pings.is_sending or not shortcut.is_open:
            return False
        if sent := b"".join(self._reply.delta(index, delta)):
            shortcut.write(sent)
            self._pings.note()
        return True

    def _pieces(self, reply: ReplyFormat) -> AsyncIterator[bytes]:
        generations, self._service = reply.envelope.generations, service_of(self._request)
        self._request.state.account = partial(account, generations)
        return stream(reply, _events(generations, _speller(self._service, reply)))

    async def _pieces_later(
        self, early: ReplyFormat, later: Callable[[], Awaitable[Response | ReplyFormat]]
    ) -> AsyncIterator[bytes]:
        if self._ping_interval > 0:
            yield b"".join(early.ping())
        try:
            reply = await later()
        except RequestError as error:
            self._request.state.error = error
            yield b"".join(early.fail(error))
            return
        del early, later  # the body is free
        if isinstance(reply, Response):
            yield bytes(reply.body)
            return
        pieces = self._pieces(reply)
        self._reply = reply
        self._offer_text()
        async for piece in pieces:
            yield piece


Spell = Callable[[Generation], Awaitable[str]]
"""Returns the text of a prompt that was computed."""


def _speller(service: Service, reply: ReplyFormat) -> Spell | None:
    """Return what spells the prompts, for an answer that shows them."""

    async def spell(generation: Generation) -> str:
        layout = generation.job.layout
        return await asyncio.to_thread(service.model.detokenize, layout.ids, special=True)

    return spell if reply.envelope.verbose else None


async def _events(generations: Sequence[Generation], spell: Spell | None) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of all generations as they come, with the index of each one's choice."""
    if len(generations) == 1:
        async for event in _events_of(generations[0], spell):
            yield 0, event
        return
    reading = {asyncio.ensure_future(_next(each, spell)): index for index, each in enumerate(generations)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in sorted(done, key=lambda read: reading[read]):
                index, event = reading.pop(read), read.result()
                yield index, event
                if not isinstance(event, End | Failure):  # not before this one is sent: text is written past its reader
                    reading[asyncio.ensure_future(_next(generations[index], spell))] = index
    finally:
        for read in reading:
            read.cancel()


async def _events_of(generation: Generation, spell: Spell | None) -> AsyncIterator[Event]:
    while True:
        event = await _next(generation, spell)
        yield event
        if isinstance(event, End | Failure):
            return


async def _next(generation: Generation, spell: Spell | None) -> Event:
    event = await generation.events.get()
    return replace(event, prompt=await spell(generation)) if spell and isinstance(event, End) else event


async def collect(service: Service, generations: Sequence[Generation], spell: Spell | None = None) -> list[WholeAnswer]:
    """Return the whole answers, in order. Raises the RequestError of a failure."""
    try:
        return [await _collect(generation, spell) for generation in generations]
    finally:
        for generation in generations:
            service.abandon(generation)


async def _collect(generation: Generation, spell: Spell | None) -> WholeAnswer:
    deltas: list[Delta] = []
    async for event in _events_of(generation, spell):
        match event:
            case Failure(error):
                raise error
            case Delta():
                deltas.append(event)
            case End():
                return WholeAnswer((*deltas, event.delta()), event)
    raise AssertionError("a generation ends with an end")


async def while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """Return what `work` returns. Cancels it when the client leaves first, and raises RequestError 499 then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise RequestError("the client has gone", status=499)
    finally:
        watching.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- Sealed -------------------------------------------------------------------------------------------------------------
# Reasoning as a text that a client keeps for the server and hands back as it is. It is no secret: anyone can read it.

MARK = "slotcache:"
ENCODING = "utf-8", "surrogatepass"


def seal(reasoning: str) -> str:
    """Return the text to keep."""
    return MARK + base64.b64encode(reasoning.encode(*ENCODING)).decode()


def unseal(sealed: str, where: str) -> str:
    """Return the reasoning; empty for a text of another server, which nobody here can read. Raises RequestError."""
    if not sealed.startswith(MARK):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(MARK), validate=True).decode(*ENCODING)
    except (Error, ValueError):
        raise RequestError(f"{where} is damaged: send it as it came", param=where) from None
