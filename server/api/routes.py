"""The table of all routes, and `GET /openapi.json`, which is made from the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
from ..config.settings import VERSION
from ..engine.usage import Fields
from ..search.retrieve import SearchRequest
from . import (
    cache,
    chat,
    completions,
    documents,
    embeddings,
    llama_server,
    messages,
    ollama,
    ollama_models,
    responses,
    search,
)
from .completions import DetokenizeRequest, TokenizeRequest
from .embeddings import EmbeddingRequest, RerankRequest
from .endpoint import MOST_ITEMS, ORDERS, Handler, Opening, endpoint
from .llama_server import FileName, ModelAction
from .messages import MessagesCountRequest, MessagesRequest
from .ollama import EmbedRequest, GenerateRequest, OldEmbedRequest, OllamaChatRequest
from .ollama_models import ModelName
from .reply import JsonReply, encode
from .responses import CompactRequest, ResponseCountRequest, ResponseRequest
from .search import RefreshRequest


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A row of the table.

    paths: the paths of the route, separated by blanks.
    body: the struct of the requests' bodies.
    query: the schemas of the query parameters.
    decodes: whether the handler gets the decoded body. If `decodes` is false, the handler reads the body itself, since
        only some requests to this route have a body of the form `body`.
    opening: makes the reply for a stream that begins before its model is loaded.
    chooses: whether the body or `?model=` names the model that answers; false: the answer is not about one model.
    """

    method: str
    paths: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    query: Mapping[str, Fields] = field(default_factory=dict)
    decodes: bool = True
    opening: Opening | None = None
    chooses: bool = True

    def routes(self) -> list[Route]:
        """Return the row as Starlette routes, one for each path."""
        called = self.handler
        if self.body and self.decodes:
            called = endpoint(self.handler, self.body, self.opening, self.chooses)
        return [Route(path, called, methods=[self.method]) for path in self.paths.split()]


async def show(request: Request) -> Response:
    """Show the OpenAPI document of this server's routes."""
    state = request.app.state
    if state.document is None:  # made only once, because this blocks the event loop for longer than a step
        state.document = encode(document(state.rows))
    return JsonReply(state.document)


def document(rows: Iterable[ApiRoute]) -> Fields:
    """Return an OpenAPI 3.1 document of these routes."""
    bodies = dict.fromkeys(row.body for row in rows if row.body)  # a dict keeps the order: each start shows the same
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Fields] = {}
    for row in rows:
        for path in row.paths.replace(":path}", "}").split():
            paths.setdefault(path, {})[row.method.lower()] = _operation(row, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "slotcache", "version": VERSION},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(row: ApiRoute, path: str) -> Fields:
    summary = (row.handler.__doc__ or row.handler.__name__.replace("_", " ")).strip().splitlines()[0]
    places = [("path", name, {"type": "string"}) for name in re.findall("{([a-z]+)}", path)]
    places += [("query", name, schema) for name, schema in {**(MODEL if row.chooses else {}), **row.query}.items()]
    operation: Fields = {
        "summary": summary,
        "parameters": [
            {"in": place, "name": name, "schema": schema, "required": place == "path"} for place, name, schema in places
        ],
        "responses": {"200": {"description": "the result"}, "default": {"description": "an error, in OpenAI's form"}},
    }
    if row.body:
        reference = {"$ref": f"#/components/schemas/{row.body.__name__}"}
        operation["requestBody"] = {"content": {"application/json": {"schema": reference}}, "required": True}
    return operation


NAME: Fields = {"type": "string", "maxLength": MAX_NAME}
MODEL: Mapping[str, Fields] = {"model": {"type": "string"}}
SCOPE = {"scope": NAME}
AFTER: Fields = {"type": "string"}


def _limit(most: int) -> Fields:
    return {"type": "integer", "minimum": 1, "maximum": most}


ACTION = {"action": {"type": "string", "enum": llama_server.ACTIONS}}
PAGE = {"limit": _limit(MOST_ITEMS), "order": {"type": "string", "enum": ORDERS}, "after": AFTER}
FILE: Mapping[str, Fields] = {"filename": AFTER, "search": {"type": "string", "enum": documents.SEARCH}}
SOURCES = {"after": AFTER, "limit": _limit(search.MOST_FILES)}
ROUTES = (
    ApiRoute("GET", "/health /v1/health", llama_server.health, chooses=False),
    ApiRoute("GET", "/v1/models /models", llama_server.models, chooses=False),
    ApiRoute("GET", "/v1/models/{id:path}", llama_server.model, chooses=False),
    ApiRoute("POST", "/models/load", llama_server.load_model, ModelAction, chooses=False),
    ApiRoute("POST", "/models/unload", llama_server.unload_model, ModelAction, chooses=False),
    ApiRoute("GET", "/props", llama_server.props),
    ApiRoute("POST", "/props", llama_server.change_props),
    ApiRoute("GET", "/slots", llama_server.slots),
    ApiRoute("POST", "/slots/{id}", llama_server.act, FileName, ACTION, decodes=False),
    ApiRoute("GET", "/metrics", llama_server.metrics),
    ApiRoute("GET", "/lora-adapters", llama_server.adapters),
    ApiRoute("POST", "/lora-adapters", llama_server.set_adapters, AdapterScales, decodes=False),
    ApiRoute("GET", "/openapi.json", show, chooses=False),
    ApiRoute("POST", "/v1/chat/completions /chat/completions", chat.create, ChatRequest, opening=chat.opening),
    ApiRoute("POST", "/v1/chat/completions/input_tokens /chat/completions/input_tokens", chat.count, ChatRequest),
    ApiRoute("GET", "/v1/chat/completions/{id}", chat.show, query=SCOPE),
    ApiRoute("DELETE", "/v1/chat/completions/{id}", chat.forget, query=SCOPE),
    ApiRoute("POST", "/v1/responses /responses", responses.create, ResponseRequest, opening=responses.opening),
    ApiRoute("POST", "/v1/responses/input_tokens /responses/input_tokens", responses.count, ResponseCountRequest),
    ApiRoute("POST", "/v1/responses/compact /responses/compact", responses.compact, CompactRequest),
    ApiRoute("GET", "/v1/responses/{id}", responses.show, query=SCOPE),
    ApiRoute("DELETE", "/v1/responses/{id}", responses.forget, query=SCOPE),
    ApiRoute("POST", "/v1/responses/{id}/cancel", responses.cancel, chooses=False),
    ApiRoute("GET", "/v1/responses/{id}/input_items", responses.input_items, query=SCOPE | PAGE),
    ApiRoute("POST", "/v1/messages", messages.create, MessagesRequest, opening=messages.opening),
    ApiRoute("POST", "/v1/messages/count_tokens", messages.count, MessagesCountRequest),
    ApiRoute("GET", "/api/version", ollama_models.version, chooses=False),
    ApiRoute("GET", "/api/tags", ollama_models.tags, chooses=False),
    ApiRoute("GET", "/api/ps", ollama_models.ps, chooses=False),
    ApiRoute("POST", "/api/show", ollama_models.show, ModelName, chooses=False),
    ApiRoute("POST", "/api/chat", ollama.chat, OllamaChatRequest, opening=ollama.opening),
    ApiRoute("POST", "/api/generate", ollama.generate, GenerateRequest, opening=ollama.opening),
    ApiRoute("POST", "/api/embed", ollama.embed, EmbedRequest),
    ApiRoute("POST", "/api/embeddings", ollama.embed_one, OldEmbedRequest),
    ApiRoute("POST", "/api/pull", ollama_models.pull, ModelName, chooses=False),
    ApiRoute("POST", "/api/create /api/copy /api/push", ollama_models.refuse, chooses=False),
    ApiRoute("DELETE", "/api/delete", ollama_models.refuse, chooses=False),
    ApiRoute("POST", "/v1/completions", completions.create_text, TextRequest, opening=completions.opening),
    ApiRoute("POST", "/completion /completions", completions.create_native, CompletionRequest, opening=completions.opening),
    ApiRoute("POST", "/infill", completions.infill, InfillRequest, opening=completions.opening),
    ApiRoute("POST", "/tokenize", completions.tokenize, TokenizeRequest),
    ApiRoute("POST", "/detokenize", completions.detokenize, DetokenizeRequest),
    ApiRoute("POST", "/apply-template", completions.apply_template, ChatRequest),
    ApiRoute("POST", "/v1/embeddings", embeddings.openai, EmbeddingRequest),
    ApiRoute("POST", "/embedding /embeddings", embeddings.native, EmbeddingRequest),
    ApiRoute("POST", "/v1/rerank /v1/reranking /rerank /reranking", embeddings.rerank, RerankRequest),
    ApiRoute("GET", "/v1/cache", cache.contents, query=SCOPE),
    ApiRoute("DELETE", "/v1/cache", cache.drop, query=SCOPE),
    ApiRoute("POST", "/v1/cache/warm", cache.warm, WarmRequest),
    ApiRoute("DELETE", "/v1/sessions/{id:path}", cache.end_session, query=SCOPE),
    ApiRoute("POST", "/v1/documents/read", documents.read, query=SCOPE | FILE),
    ApiRoute("GET", "/v1/documents/{id}", documents.show, query=SCOPE, chooses=False),
    ApiRoute("DELETE", "/v1/documents/{id}", documents.forget, query=SCOPE, chooses=False),
    ApiRoute("POST", "/v1/documents/order", cache.order, DocumentsOrderRequest),
    ApiRoute("POST", "/v1/speculate", cache.speculate, SpeculateRequest),
    ApiRoute("DELETE", "/v1/speculate", cache.forget_speculation, query=SCOPE | {"id": NAME}),
    ApiRoute("GET", "/v1/conversations/{id:path}", cache.show_conversation, query=SCOPE),
    ApiRoute("DELETE", "/v1/conversations/{id:path}", cache.forget_conversation, query=SCOPE),
    ApiRoute("POST", "/v1/search", search.search, SearchRequest, chooses=False),
    ApiRoute("GET", "/v1/sources", search.list_sources, query=SCOPE | SOURCES, chooses=False),
    ApiRoute("POST", "/v1/sources/refresh", search.refresh_sources, RefreshRequest, chooses=False),
    ApiRoute("GET", "/v1/sources/{id}", search.document, query=SCOPE, chooses=False),
)
