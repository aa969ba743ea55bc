"""The steps that all routes share: read the body, choose the model, call the service, send the answer."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial, wraps
from time import time
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...retrieval.ranking import Hit, Stage
from ...slots.scope import MAX_NAME
from ..chat.body import ChatRequest, CompletionRequest, InfillRequest, Options, check_scope
from ..chat.decode import LARGE, R, decode_request
from ..engine.engine import Sleep
from ..engine.generation import account
from ..engine.usage import Fields
from ..engine.view import Prediction
from ..formats.answer import AnswerReader, Plain, WithoutReasoning
from ..http.api_errors import RequestError
from ..http.bodies import Reservation
from ..http.log import on_one_line
from ..search.attachments import Attachments, interleaved
from ..search.folder import FolderIndex
from ..search.retrieve import (
    SearchReport,
    StagePrefetch,
    check_by,
    index_state,
    query_of,
    unread,
    wish_of,
    with_documents,
    without_documents,
)
from ..search.vectors import Vectors
from ..service.models import Loaded, ModelEntry, Models
from ..service.repeats import Refusals, Repeats, is_lasting, key_of
from ..service.service import Service, new_id
from ..service.submitter import Prepared
from .reply import JsonReply, ReplyFormat, ResponseMeta, encode
from .stream import EventStream, collect, early_of

logger = logging.getLogger("slotcache")
MOST_ITEMS, USUAL_ITEMS = 100, 20  # items on one page of a list
ORDERS = ("asc", "desc")
T = TypeVar("T")

# ---- The common parts of routes: the loaded service, and the body. ------------------------------------------------------


class VectorRequest(Struct, frozen=True):
    """The body of a request to an embedding model or a reranker.

    An embedding model or a reranker may run next to the models that take turns on the device.
    """

    model: str | None = None


async def read_body(request: Request, kind: type[R]) -> R:
    """Return the body, decoded as `kind`. A large body is decoded in a thread. Raises RequestError, ClientDisconnect.

    Set `num_bytes` in `request.state` to the body's length, and `warnings` to a warning for each unknown field.
    """
    state = request.app.state.app
    with Reservation(state.bodies) as room:  # held until the body is decoded: a body that waits for a thread takes memory
        body = await state.bodies.read(request, room)
        request.state.num_bytes = len(body)
        decoded, warnings = await beside_others(request, partial(decode_request, body, kind, state.settings.strict))
    request.state.warnings = ()
    warn(request, warnings)
    return decoded


def warn(request: Request, warnings: Sequence[str]) -> None:
    """Add warnings to the answer, and log them."""
    if warnings:
        request.state.warnings += tuple(warnings)
        about = {"request_id": request.state.request_id}
        logger.warning(
            "%s: %s", on_one_line(request.scope["path"]), on_one_line("; ".join(warnings)), extra={"fields": about}
        )


def page(items: list[Fields], request: Request) -> Fields:
    """Return one page of a list, chosen by `limit`, `order` and `after` as in OpenAI's API. Raises RequestError."""
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


def stored_record(service: Service, scope: str, id: str, kind: str) -> bytes:
    """Return a stored answer as JSON. Raises RequestError 404 if no answer with this id and kind is stored.

    kind: the prefix that the answer's id must have.
    """
    conversation = service.conversations.find_answer(scope, id)
    if conversation is None or id not in conversation.records or not id.startswith(kind):
        raise not_stored(id)
    return conversation.records[id]


def not_stored(id: str) -> RequestError:
    """Return the error for an id that no stored answer has."""
    return RequestError(
        f"no response {id[:80]!r} is stored in this scope: expected a stored response's id, and its cache_scope as ?scope=",
        status=404,
        param="id",
        code="response_not_found",
    )


async def beside_others(request: Request, work: Callable[[], T]) -> T:
    """Call `work`, which processes the request's body.

    If the body is large, `work` runs in a thread, so that other requests do not have to wait for it.
    """
    return work() if request.state.num_bytes < LARGE else await asyncio.to_thread(work)


def scope_of(request: Request) -> str:
    """Return the scope in the address (`?scope=`), or else the common scope. Raises RequestError."""
    scope = request.query_params.get("scope", "")
    check_scope(scope, "scope")
    return scope


def vectors_of(request: Request) -> Vectors:
    """Return the models that compute vectors and rerank scores for this request. Raises the errors of `loaded_of`."""
    return loaded_of(request).vectors


def service_of(request: Request) -> Service:
    """Return the service of the request's model.

    Raises the errors of `loaded_of`, and RequestError 501 if the model is an encoder, which generates no text.
    """
    return loaded_of(request).service or request.app.state.app.ready()


def services_of(request: Request) -> list[Service]:
    """Return the service of the model that `?model=` names, or else the services of all loaded models.

    Raises RequestError.
    """
    service = service_of(request)
    return [service] if "model" in request.query_params else request.app.state.app.services


def answer_service_of(request: Request, scope: str, id: str) -> Service:
    """Return the service that generates or stores an answer.

    If no service has this answer, return the first one of `services_of`.

    Raises RequestError.
    """
    services = services_of(request)
    has = (one for one in services if one.find_open(scope, id) or one.conversations.find_answer(scope, id))
    return next(has, services[0])


def loaded_of(request: Request) -> Loaded:
    """Return the loaded model that a request names in its body or in `?model=`.

    If the request names no model, return the first model.

    Raises RequestError 404 if the name is unknown, and 503 if the named model is not loaded or the first model is still
    loading.
    """
    loaded: Loaded | None = getattr(request.state, "loaded", None)
    if loaded is not None:
        return loaded
    entry = models_of(request).find(request.query_params.get("model"))
    if entry.loaded is None:
        message = f"{entry.name} is not loaded yet: a request for it, or POST /models/load, loads it"
        raise RequestError(message, status=503, param="model", code="model_not_loaded")
    return entry.loaded


def _entry_of(request: Request, asked: object) -> ModelEntry | None:
    """Return the model that the body or `?model=` names; None if no model has to be loaded for the request.

    No model has to be loaded if the body has no field for a model, or if it names an embedding model or a reranker that
    runs next to the first model. Raises RequestError 404 for an unknown name, and 503 while the first model loads.
    """
    if not hasattr(asked, "model"):
        return None
    models, name = models_of(request), _name_in(request, asked)
    if isinstance(asked, VectorRequest) and models.find_beside(name) is not None:
        request.state.loaded = models.first.loaded
        return None
    return models.find(name)


async def _load(request: Request, entry: ModelEntry, patience: float | None = None) -> bool:
    """Make sure that a request's model is loaded: if it is not, load it and wait. Raises RequestError.

    If the load takes longer than `patience` seconds, return False and let the load go on.
    """
    loaded = entry.loaded
    try:
        if entry.value != "loaded":
            loaded = await while_connected(request, asyncio.wait_for(models_of(request).ready(entry), patience))
    except TimeoutError:
        return False
    request.state.loaded = loaded  # the model that was ready: `entry` may have a newer model by now
    return True


def models_of(request: Request) -> Models:
    """Return the served models. Raises RequestError 503 while the first model loads."""
    state = request.app.state.app
    state.loaded()
    return state.models


def _name_in(request: Request, asked: object) -> str | None:
    """Return the model's name in the body or in `?model=`; None if neither names a model."""
    return getattr(asked, "model", None) or request.query_params.get("model")


# ---- Accepting ----------------------------------------------------------------------------------------------------------
# A chat with `retrieval` enters the service after a search for its documents. Prompts are prefilled during the search.

STAGE = 0.03  # seconds that a stage of a search must last before its documents are prefilled ahead


async def prepare(
    request: Request,
    asked: ChatRequest | CompletionRequest | InfillRequest,
    open_turn: bool = False,
    *,
    kind: str = "",
    wake: Callable[[Sleep], None] = Sleep.wake,
) -> Prepared:
    """Accept a request (see `Service.accept`). For a chat with `retrieval`, first search for documents.

    Raises RequestError.

    open_turn: whether the last message will get more documents (see `PromptBuilder.chat`).
    wake: how the request wakes a sleeping model (see `Service.accept`).
    kind: the prefix of the answer's id; empty: the prefix of OpenAI's chats and completions. If the answer's stream has
        already begun, the answer has an id already, and `kind` has no effect.
    """
    early = early_of(request)
    id = early.envelope.id if early else new_id(kind) if kind else ""

    async def find_and_accept() -> Prepared:
        chat, found = asked, None
        if isinstance(asked, ChatRequest) and asked.retrieves:
            chat, found = await _retrieve(request, asked, computes=wake is not Sleep.expect)
        return await service.accept(chat, request.state.num_bytes, open_turn, id=id, found=found, wake=wake)

    service = service_of(request)
    return await while_connected(request, find_and_accept())


async def predict(request: Request, asked: ChatRequest) -> Prediction:
    """Return the prompt that a chat would have now, how much of it is cached, and what its document order gains."""
    service, prepared = service_of(request), await prepare(request, asked, wake=Sleep.expect)
    return await service.view.predict(prepared.prompt, service.submitter.scope_of_dry_run(asked))


async def count_prompt(request: Request, asked: ChatRequest) -> dict[str, int]:
    """Count the tokens of the prompt that a chat would have now."""
    return {"input_tokens": len((await predict(request, asked)).layout.tokens)}


async def _retrieve(request: Request, asked: ChatRequest, *, computes: bool) -> tuple[ChatRequest, SearchReport]:
    """Search documents for a chat. Return the chat with the documents found, and the report of the search.

    While the first stage of the search runs, the part of the prompt before the documents is prefilled. During each later
    stage, the chat is prefilled with the documents of the stage before it. Nothing is prefilled if the chat may not be
    cached, or if `computes` is false, as in a dry run.
    """
    service, wish = service_of(request), wish_of(asked)
    folder_index = _folder_of(request, service) if wish.searches_folder else None
    asked.check()
    if folder_index is not None:
        folder_index.check_scope(asked.cache_scope, "cache_scope")
    elif not wish.documents or wish.paths:
        raise RequestError("retrieval: expected documents or the folder; paths need the folder", param="retrieval.folder")
    check_by(wish, folder_index)
    key, num_bytes = ("retrieval", request.state.request_id), request.state.num_bytes
    query, index = query_of(asked, service.settings.docs_top_k), index_state(folder_index)
    if query is None:
        return with_documents(asked, ()), SearchReport((), index)
    warn(request, unread(index))
    files: Attachments = request.app.state.app.attachments
    attached: dict[str, Stage] = {}

    async def fit(hits: Sequence[Hit]) -> list[Hit]:
        rankings = [hits, *(stage.hits for stage in attached.values())]
        return await service.room_for(asked.cache_scope, interleaved(rankings, query.top_k))

    async def prefill(hits: Sequence[Hit]) -> None:
        await service.prefetch(key, with_documents(asked, await fit(hits)), num_bytes)

    ahead, hits, left_out = StagePrefetch(prefill, delay=STAGE), (), 0
    computes = computes and service.submitter.caches(asked)
    try:
        if computes and (front := without_documents(asked)) is not None:
            ahead.begin(partial(service.warm_up, key, front, num_bytes))
        attached |= await files.search(asked.cache_scope, wish.documents, replace(query, paths=()))
        if folder_index is not None:
            async for stage in folder_index.search().stages(query):
                hits, left_out = stage.hits, stage.left_out
                if computes and not stage.is_last:
                    ahead.show(hits)
    except BaseException:
        service.engine.drop_background((asked.cache_scope, key))
        raise
    finally:
        ahead.stop()
    left_out += sum(stage.left_out for stage in attached.values())
    of_files: list[Fields] = [{"id": id, "stage": stage.name} for id, stage in attached.items()]
    found = SearchReport(await fit(hits), index, left_out, of_files)
    return with_documents(asked, found.hits), found


def _folder_of(request: Request, service: Service) -> FolderIndex:
    """Return the index of --docs for a chat.

    Raises RequestError if the server has no --docs, or if the index belongs to another model.
    """
    state = request.app.state.app
    if state.folder_index is None:
        raise RequestError("retrieval: this server has no documents: start it with --docs PATH", param="retrieval")
    if service is not state.service:
        first = state.service.name
        raise RequestError(f"retrieval: the documents of --docs belong to {first}: ask that model", param="retrieval")
    return state.folder_index


# ---- The routes that generate: chats and texts, streamed or whole. ------------------------------------------------------

LONG = 16 << 10  # characters: answers of this length or more are parsed in a thread, so that other streams go on


def begin_answer(request: Request, prepared: Prepared) -> ResponseMeta:
    """Submit a request, and return the common fields of its answer.

    Raises RequestError if the prompt is too long or the queue is full.
    """
    service, options = service_of(request), prepared.options.without_texts()
    warn(request, prepared.warnings)
    _warn_of_cache(request, prepared)
    early = early_of(request)
    return ResponseMeta(
        id=prepared.id,
        model=(service.settings.any_model and options.model) or service.name,
        options=options,
        num_prompts=len(prepared.prompts),
        echoes=prepared.echoes,
        fingerprint=service.fingerprint,
        generations=service.submit(prepared),
        reader=_reader_of(prepared),
        caches=service.submitter.caches(options),
        verbose=service.settings.verbose if options.verbose is None else options.verbose,
        warnings=request.state.warnings,
        piece=service.model.piece,
        spelling=service.model.spelling,
        prompt_text=service.prompt_text,
        abandon=service.abandon,
        disconnect=service.disconnect,
        created=early.envelope.created if early else int(time()),
    )


def _reader_of(prepared: Prepared) -> Callable[[], AnswerReader]:
    """Return a function that makes a reader for the text of a choice.

    If the client does not want reasoning, the reader drops it.
    """
    if prepared.turn is None:
        return Plain
    read, options = prepared.turn.chat.shown_reader, prepared.options
    is_hidden = isinstance(options, ChatRequest) and options.asked_reasoning.is_shown is False
    return (lambda: WithoutReasoning(read())) if is_hidden else read


def _warn_of_cache(request: Request, prepared: Prepared) -> None:
    """Warn a client once if the cache would save time: if its uncached prompts start with the same tokens.

    There is no warning if the request says whether it wants the cache, or if prompts of this model cannot be cached.
    """
    service, options = service_of(request), prepared.options
    submitter = service.submitter
    if options.cache_prompt is not None or submitter.caches(options) or not submitter.can_reuse:
        return
    keys = (request.headers.get(name, "") for name in ("authorization", "x-api-key"))
    repeats: Repeats = request.app.state.app.repeats
    if num_tokens := repeats.note((*keys, options.cache_scope), prepared.prompts[0], service.name):
        warn(request, [REPEATED.format(num_tokens)])


REPEATED = (
    "at least the first {:,} tokens of this prompt were computed again, although an earlier prompt had them, too: with "
    "`prompt_cache_key`, `cache_prompt: true` or the server's --cache-prompt they are reused; this warning comes once"
)

Handler = Callable[..., Awaitable[Response | ReplyFormat]]
Opening = Callable[[Request, Any], ReplyFormat | None]
"""Returns the reply that a request's stream uses until the model is loaded; None: the answer is not streamed."""
PATIENCE = 0.25  # seconds that a stream waits for its model's first load before it begins without the model


def endpoint(handler: Handler, body: type[Struct], opening: Opening | None = None, chooses: bool = True) -> Handler:
    """Wrap a handler: read the body, load the model, call the handler, and then stream or collect the generated answer.

    A decoded body takes about 20 times the memory of its JSON, so it is freed when the handler returns.

    opening: makes the reply for a stream that begins before its model is loaded; None: streams begin only after the load.
    chooses: whether to load the model that the body or `?model=` names.
    """

    @wraps(handler)
    async def answer(request: Request) -> Response:
        state = request.app.state.app  # checked first: a server that cannot answer reads no body
        state.ready() if issubclass(body, Options) else state.loaded()
        answered = await read_and_handle(request)
        return answered if isinstance(answered, Response) else await respond(request, answered)

    async def read_and_handle(request: Request) -> Response | ReplyFormat:
        asked = _in_session(request, await read_body(request, body))
        entry = _entry_of(request, asked) if chooses else None
        early = opening(request, asked) if opening and entry and entry.loaded is None else None
        if entry is None or await _load(request, entry, PATIENCE if early else None):
            return await _refusing(handler, request, asked)
        assert early is not None

        async def later() -> Response | ReplyFormat:
            await _load(request, entry)
            return await _refusing(handler, request, asked)

        return EventStream(request, early, later)

    return answer


def early_meta(request: Request, asked: Options, kind: str) -> ResponseMeta:
    """Return the common fields of an answer whose model is not loaded yet.

    Raises RequestError. kind: the prefix of the answer's id.
    """
    asked.check()
    state, name = request.app.state.app, _name_in(request, asked)
    shown = (state.settings.any_model and asked.model) or state.models.find(name).name
    return ResponseMeta(id=new_id(kind), model=shown, fingerprint="", options=asked.without_texts())


def _in_session(request: Request, asked: R) -> R:
    """Return the body with the session of the header `X-Session-Id`, unless the body itself has a session."""
    session = request.headers.get("x-session-id", "")[:MAX_NAME]
    if not session or not isinstance(asked, Options) or asked.session_id is not None:
        return asked
    return msgspec.structs.replace(asked, session_id=session)


async def _refusing(handler: Handler, request: Request, asked: object) -> Response | ReplyFormat:
    """Call a handler. If an equal body was recently refused as too long, refuse the body without calling the handler.

    Raises RequestError.
    """
    if not isinstance(asked, Options):
        return await handler(request, asked)
    refusals: Refusals = request.app.state.app.refusals
    path = request.scope["path"]
    key = partial(key_of, f"{path} {service_of(request).name}", asked)  # the model may be named outside the body
    if refusals and (error := refusals.find(await beside_others(request, key), path)):
        request.state.is_quiet = True
        raise error
    try:
        return await handler(request, asked)
    except RequestError as error:
        if is_lasting(asked, error):
            refusals.note(await beside_others(request, key), error)
        raise


async def respond(request: Request, reply: ReplyFormat) -> Response:
    """Return the answer to a submitted request, streamed or whole."""
    envelope, generations = reply.envelope, reply.envelope.generations
    if envelope.options.stream:
        return EventStream(request, reply)
    request.state.account = partial(account, generations)
    answers = await while_connected(request, collect(generations, envelope.abandon, envelope.spell))
    # Logprobs are much larger than their text, and a long text takes time to parse.
    if any(answer.logprobs for answer in answers) or sum(len(answer.text) for answer in answers) >= LONG:
        whole = await asyncio.to_thread(lambda: encode(reply.whole(answers)))
    else:
        whole = encode(reply.whole(answers))
    envelope.keep(whole)
    return JsonReply(whole)


async def while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`. If the client disconnects while `work` runs, cancel `work` and raise RequestError 499."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise RequestError("the client has disconnected", status=499)
    finally:
        watching.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
