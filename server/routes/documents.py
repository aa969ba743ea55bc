"""`POST /v1/documents/order`: the order that the documents of a chat would have now, and the reuse that it brings."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import document_reuse
from ..errors import RequestError
from ..wire.requests import OrderRequest
from .accepting import accept
from .chat import while_connected
from .http import Json, read_body, service_of


async def order(request: Request) -> Response:
    """Order documents as a dry run, which computes and changes nothing: of a chat with `messages`, or documents alone."""
    service = service_of(request)
    asked = await read_body(request, OrderRequest)
    if not asked.messages:
        asked = replace(asked, messages=[{"role": "user", "content": "?"}])
    submission = await while_connected(request, accept(request, asked))
    given = any(message.get("documents") for message in asked.messages) or asked.documents
    if not (given or asked.retrieves):
        raise RequestError("there are no documents to order: send some", param="documents")
    predicted = await service.view.predict(submission.prompt, service.intake.scope(asked))
    layout, reused, on_device = predicted.layout, predicted.reused, predicted.on_device
    return Json(
        {
            "object": "documents.order",
            "order": [document.id for document in layout.documents],
            "documents": document_reuse(layout, reused),
            "repeated": layout.repeated,
            "prompt_tokens": len(layout.tokens),
            "cached_tokens": reused,
            "tiers": {"device": on_device, "host": reused - on_device},
            "miss": {"at": reused, "why": f"{layout.segment_at(reused)} is not cached here"},
        }
    )
