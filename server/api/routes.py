"""`GET /openapi.json`: the routes with the bodies they take, made from the app's routes and the wire's structs."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...slots.scope import MAX_NAME
from ..chat.body import (
    AdapterScales,
    ChatRequest,
    CompletionRequest,
    DocumentsOrderRequest,
    InfillRequest,
    SpeculateRequest,
    TextRequest,
    WarmRequest,
)
from ..engine.usage import Fields
from ..search.retrieve import SearchRequest
from .completions import DetokenizeRequest, TokenizeRequest
from .embeddings import EmbeddingRequest, RerankRequest
from .llama_server import ACTIONS, FileName
from .messages import MessagesCountRequest, MessagesRequest
from .reply import JsonReply
from .responses import ResponseCountRequest, ResponseRequest
from .search import MOST_FILES, RefreshRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/chat/completions": ChatRequest,
    "/v1/chat/completions/input_tokens": ChatRequest,
    "/chat/completions/input_tokens": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/responses": ResponseRequest,
    "/v1/responses/input_tokens": ResponseCountRequest,
    "/responses/input_tokens": ResponseCountRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesCountRequest,
    "/v1/completions": TextRequest,
    "/completion": CompletionRequest,
    "/completions": CompletionRequest,
    "/infill": InfillRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/embedding": EmbeddingRequest,
    "/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/reranking": RerankRequest,
    "/rerank": RerankRequest,
    "/reranking": RerankRequest,
    "/lora-adapters": AdapterScales,
    "/v1/cache/warm": WarmRequest,
    "/v1/documents/order": DocumentsOrderRequest,
    "/v1/speculate": SpeculateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": ChatRequest,
    "/slots/{id}": FileName,
    "/v1/search": SearchRequest,
    "/v1/sources/refresh": RefreshRequest,
}
NAME = {"type": "string", "maxLength": MAX_NAME}
QUERIES: dict[tuple[str, str], Fields] = {
    ("GET", "/v1/cache"): {"scope": NAME},
    ("DELETE", "/v1/cache"): {"scope": NAME},
    ("GET", "/v1/conversations/{id}"): {"scope": NAME},
    ("DELETE", "/v1/conversations/{id}"): {"scope": NAME},
    ("DELETE", "/v1/speculate"): {"scope": NAME, "id": NAME},
    ("GET", "/v1/responses/{id}"): {"scope": NAME},
    ("DELETE", "/v1/responses/{id}"): {"scope": NAME},
    ("GET", "/v1/responses/{id}/input_items"): {
        "scope": NAME,
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"type": "string", "enum": ["asc", "desc"]},
        "after": {"type": "string"},
    },
    ("GET", "/v1/sources"): {
        "scope": NAME,
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_FILES},
    },
    ("GET", "/v1/sources/{id}"): {"scope": NAME},
    ("POST", "/slots/{id}"): {"action": {"type": "string", "enum": ACTIONS}},
}


async def show(request: Request) -> Response:
    """Show the OpenAPI document of this server's routes."""
    return JsonReply(document(route for route in request.app.routes if isinstance(route, Route)))


def document(routes: Iterable[Route]) -> Fields:
    """Return OpenAPI 3.1 of these routes."""
    _, components = msgspec.json.schema_components(set(BODIES.values()), ref_template="#/components/schemas/{name}")
    paths: dict[str, Fields] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in (route.methods or set()) - {"HEAD"}:
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "slotcache", "version": _version()},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, path: str, method: str) -> Fields:
    summary = (route.endpoint.__doc__ or route.name.replace("_", " ")).strip().splitlines()[0]
    places = [("path", name, {"type": "string"}) for name in route.param_convertors]
    places += [("query", name, schema) for name, schema in QUERIES.get((method, path), {}).items()]
    operation: Fields = {
        "summary": summary,
        "parameters": [
            {"in": place, "name": name, "schema": schema, "required": place == "path"} for place, name, schema in places
        ],
        "responses": {"200": {"description": "what was asked"}, "default": {"description": "an error, in OpenAI's shape"}},
    }
    if method == "POST" and path in BODIES:
        reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        operation["requestBody"] = {"content": {"application/json": {"schema": reference}}, "required": True}
    return operation


def _version() -> str:
    try:
        return version("slotcache")
    except PackageNotFoundError:
        return "0"
