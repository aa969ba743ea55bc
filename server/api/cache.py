"""The routes of the cache: warming, contents, sessions, stored conversations, document order and speculation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf

from msgspec.structs import replace as replace_fields
from starlette.requests import Request
from starlette.responses import Response

from ...slots.scope import MAX_NAME
from ..chat.body import DocumentsOrderRequest, SpeculateRequest, WarmRequest
from ..chat.citations import Citations
from ..engine.engine import Sleep
from ..engine.generation import Generation
from ..engine.usage import Fields, document_reuse
from ..http.api_errors import RequestError
from ..service.service import Service
from ..service.submitter import CACHE_IS_OFF
from .endpoint import predict, prepare, scope_of, service_of, services_of, while_connected
from .reply import JsonReply
from .stream import collect


async def warm(request: Request, asked: WarmRequest) -> Response:
    """Prefill the prompt of a chat (messages, documents) and keep it in the cache; generate nothing.

    With `pin`, the prompt is pinned for `ttl` seconds; without `ttl`, until the server stops. Pinned KV is evicted last.
    """
    service = service_of(request)
    if not (service.model.can_trim or service.view.keeps_snapshots):
        raise RequestError("this model's state cannot be cut, and --cache-ram leaves no room for snapshots: nothing to warm")
    asked = asked.prefill_only()
    prepared = await prepare(request, asked)
    (generation,) = service.submit(replace(prepared, turn=None))  # warming a prompt is not a turn of a conversation
    (answer,) = await while_connected(request, collect([generation], service.abandon))
    report = answer.end.report
    warmed: Fields = {"object": "cache.warm", "prompt_tokens": report.num_prompt, "slotcache": report.slotcache()}
    if asked.pin is not None:
        warmed["pinned_tokens"] = await _pin(service, generation, asked)
    return JsonReply(warmed)


async def contents(request: Request) -> Response:
    """List the cached runs of a scope (`?scope=`; by default the common scope).

    A run is one node of the prefix tree: consecutive tokens that are cached together.
    """
    service, scope = service_of(request), scope_of(request)
    found = await service.view.contents(scope)
    return JsonReply(
        {"object": "cache", "scope": scope, "tokens": found.tokens, "runs": found.runs, "snapshots": found.snapshots}
    )


async def drop(request: Request) -> Response:
    """Drop the cached KV of a scope, and the idle prefill that is queued for the scope.

    The KV that running requests use is kept. If the request names a model, only this model's KV is dropped. If the request
    names no model, the KV of all models is dropped.
    """
    scope = scope_of(request)
    dropped = sum([await _drop(service, scope) for service in services_of(request)])
    return JsonReply({"object": "cache.dropped", "scope": scope, "tokens": dropped})


async def _drop(service: Service, scope: str) -> int:
    service.idle.forget(scope)
    service.sessions.forget(scope)
    dropped = await service.view.drop(scope)
    service.idle.resume()
    return dropped


async def _pin(service: Service, generation: Generation, asked: WarmRequest) -> int:
    """Pin a warmed prompt, or unpin it if `pin` is false. Return how many of the prompt's tokens are pinned now."""
    if asked.pin:
        return await service.view.pin(generation, asked.ttl or inf)
    await service.view.unpin(generation)
    return 0


async def end_session(request: Request) -> Response:
    """End a session (`?scope=`): KV that only this session uses is evicted before all other KV.

    If the request names a model, the session ends for this model only; otherwise it ends for all models.
    """
    id, scope = request.path_params["id"], scope_of(request)
    retired = [await _end_session(service, scope, id) for service in services_of(request)]
    if all(tokens is None for tokens in retired):
        raise RequestError(f"no session {id!r} is known in this scope", status=404, param="id", code="session_not_found")
    return JsonReply({"id": id, "object": "session.ended", "scope": scope, "tokens": sum(filter(None, retired))})


async def _end_session(service: Service, scope: str, id: str) -> int | None:
    """End a session for one model. Return the number of tokens whose KV will be evicted before all other KV.

    The result is None if the model has had no request of this session.
    """
    is_known = service.sessions.knows((scope, id))
    branches = service.sessions.forget(scope, id)
    if not branches:
        return 0 if is_known else None
    return await asyncio.wrap_future(service.view.retire(id, [(branch.scope, branch.tokens) for branch in branches]))


# ---- The routes that show and forget a stored conversation. -------------------------------------------------------------


async def show_conversation(request: Request) -> Response:
    """Show a stored conversation and the ids of its answers (`?scope=`).

    A conversation may have several branches. The messages shown are those of the branch that a request continues if it
    names only the conversation.
    """
    id, scope = request.path_params["id"], scope_of(request)
    conversation = service_of(request).conversations.find(scope, id)
    if conversation is None:
        raise _unknown(id)
    entries = conversation.answers[conversation.head]
    citations = Citations.of([entry.shown for entry in entries if entry.shown is not None], b"")
    return JsonReply(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created),
            "scope": conversation.scope,
            "bytes": conversation.num_bytes,
            "turns": sum(entry.role == "user" for entry in entries),
            "last_response_id": conversation.head,
            "response_ids": list(conversation.answers),
            "messages": [entry.public(citations) for entry in entries],
        }
    )


async def forget_conversation(request: Request) -> Response:
    """Delete a stored conversation with all its answers (`?scope=`)."""
    id, scope = request.path_params["id"], scope_of(request)
    service = service_of(request)
    conversation = service.conversations.known(scope, id)
    if conversation is None or not service.conversations.forget(scope, id):
        raise _unknown(id)
    service.stop_unattended(conversation)
    await service.view.disk_thread.run(service.conversations.settle)
    return JsonReply({"id": id, "object": "conversation.deleted", "deleted": True, "scope": scope})


def _unknown(id: str) -> RequestError:
    return RequestError(
        f"no conversation {id!r} is stored in this scope: expected the id of a conversation that has an answer, and its "
        "cache_scope as ?scope=",
        status=404,
        param="id",
        code="conversation_not_found",
    )


# ---- Documents ----------------------------------------------------------------------------------------------------------
# `POST /v1/documents/order`: the order that a chat's documents would have now, and how many tokens it would reuse.


async def order(request: Request, asked: DocumentsOrderRequest) -> Response:
    """Return the order that the documents of a chat would have now. Documents without a chat can be ordered, too.

    This is a dry run: the cache does not change.
    """
    if not asked.messages:
        asked = replace_fields(asked, messages=[{"role": "user", "content": "?"}])
    predicted = await predict(request, asked)
    given = any(message.get("documents") for message in asked.messages) or asked.documents
    if not (given or asked.retrieves or predicted.layout.documents):
        raise RequestError("there are no documents to order: send some", param="documents")
    layout, reused, on_device = predicted.layout, predicted.reused, predicted.on_device
    why = layout.segment_at(reused).miss if asked.caches(default=True) else CACHE_IS_OFF
    return JsonReply(
        {
            "object": "documents.order",
            "order": [document.id for document in layout.documents],
            "documents": document_reuse(layout, [(0, reused)]),
            "repeated": layout.repeated,
            "prompt_tokens": len(layout.tokens),
            "cached_tokens": reused,
            "tiers": {"device": on_device, "host": reused - on_device},
            "miss": {"at": reused, "why": why},
            **({"reordered": predicted.reordered} if predicted.reordered else {}),
        }
    )


# ---- Speculation --------------------------------------------------------------------------------------------------------
# Prefill of chats whose document search still runs (RAGCache, section 5.3: dynamic speculative pipelining).
#
# A client that searches in stages sends the messages at once, and then the documents of each stage. On an idle slot, the
# server prefills the prompt of the newest stage. A later stage replaces an earlier stage, and the common prefix of their
# prompts stays cached. The chat completion with the final documents reuses the prefix that it shares with the newest
# stage, and ends the prefill of this stage if it still runs.


async def speculate(request: Request, asked: SpeculateRequest) -> Response:
    """Prefill the system prompt, the history and the documents that are known so far.

    If no slot is idle or too many prompts wait, nothing is prefilled, and the answer's state is `skipped`.
    """
    service = service_of(request)
    if service.is_full:
        return _answer(asked, "skipped")
    asked = asked.prefill_only()
    last = asked.messages[-1] if asked.messages else {}
    is_open = last.get("role") == "user" and not (asked.documents or last.get("documents") or asked.retrieves)
    prepared = await prepare(request, asked, is_open, wake=Sleep.bring)
    started = await service.compute_ahead(("speculation", asked.id), prepared)
    return _answer(asked, "started" if started else "skipped")


async def forget_speculation(request: Request) -> Response:
    """Stop a speculative prefill whose chat will not be sent (`?id=`, `?scope=`)."""
    service, query = service_of(request), request.query_params
    scope, name = scope_of(request), query.get("id", "default")
    if len(name) > MAX_NAME:
        raise RequestError(f"id has {len(name):,} characters: expected at most {MAX_NAME}", param="id")
    dropped = await asyncio.wrap_future(service.engine.drop_background((scope, ("speculation", name))))
    service.idle.resume()
    return JsonReply({"object": "speculation", "id": name, "state": "dropped" if dropped else "done"})


def _answer(asked: SpeculateRequest, state: str) -> Response:
    return JsonReply({"object": "speculation", "id": asked.id, "state": state})
