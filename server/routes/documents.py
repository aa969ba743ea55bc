"""`POST /v1/documents/order`: how the documents of a chat would stand in its prompt now, and what that would reuse."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ...slots.radix import path
from ...slots.request import Layout
from ...slots.scope import Scope
from ..errors import RequestError
from ..service import Service
from ..wire import OrderRequest
from .chat import while_connected
from .http import Json, read_body, service_of


async def order(request: Request) -> Response:
    """A dry run: nothing is computed, nothing changes. Of a chat with `messages`, or of documents alone."""
    service = service_of(request)
    asked = await read_body(request, OrderRequest)
    if not asked.messages:
        asked = replace(asked, messages=[{"role": "user", "content": "?"}])
    submission = await while_connected(request, service.accept_chat(asked, request.state.num_bytes))
    if not any(message.get("documents") for message in asked.messages) and not asked.documents:
        raise RequestError("there are no documents to order: send some", param="documents")
    scope = Scope.shared(asked.cache_scope)
    tree = service.engine.scheduler.tree

    def dry_run() -> dict[str, Any]:
        return _told(service, submission.prompt.arrange(tree, scope), scope)

    return Json(await asyncio.wrap_future(service.engine.ask(dry_run)))


def _told(service: Service, layout: Layout, scope: Scope) -> dict[str, Any]:
    """Runs in the engine's thread."""
    tree = service.engine.scheduler.tree
    match = tree.match(scope, layout.tokens)
    nodes = [node for node in path(match.node) if node.start < match.length]
    on_device = sum(min(node.ready, match.length - node.start) for node in nodes)
    reused = min(match.length, tree.most_cached(len(layout.tokens)))
    return {
        "object": "documents.order",
        "order": [document.id for document in layout.documents],
        "documents": [
            {
                "id": document.id,
                "tokens": document.stop - document.start,
                "cached_tokens": min(max(reused - document.start, 0), document.stop - document.start),
            }
            for document in layout.documents
        ],
        "repeated": layout.repeated,
        "prompt_tokens": len(layout.tokens),
        "cached_tokens": reused,
        "tiers": {"device": min(on_device, reused), "host": max(reused - on_device, 0)},
        "miss": {"at": reused, "why": f"{layout.segment_at(reused)} is not cached here"},
    }
