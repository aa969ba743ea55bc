"""The routes as /openapi.json tells them, and requests made from it: whatever comes, no route fails."""

import json
from typing import Any

import pytest
from gguf import PoolingType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slotcache.server.api.routes import ROUTES
from support.encoders import bert

from server.conftest import running

USER = {"role": "user", "content": "Hello"}
LIKELY = {  # what gets a request past the first check, so that later ones are reached
    "messages": [USER],
    "prompt": "Hello",
    "documents": [{"id": "a", "text": "One."}, {"id": "b", "text": "Two."}],
    "conversation": "c",
    "filename": "file",
    "content": "Hello",
    "tokens": [100],
    "input": ["machine", "city"],
    "query": "machine",
    "model": "tiny",
}

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | anything, "content": st.text() | anything},
        optional={"documents": st.lists(anything, max_size=3), "tool_calls": anything, "name": anything},
    ),
    max_size=4,
)
BODY = {path: row.body.__struct_fields__ for row in ROUTES if row.body for path in row.paths.split()}


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    models = (str(bert(folder / "bert")), str(bert(folder / "ranker", PoolingType.RANK)))
    (folder / "notes").mkdir()
    (folder / "notes/machine.md").write_text("# Machine\n\nA machine of stone.")
    settings = {"embedding_model": models[0], "rerank_model": models[1], "docs_db": str(folder / "db"), "any_model": True}
    with running(tiny, ctx_size=1024, slot_save_path=str(folder), docs=str(folder / "notes"), **settings) as up:
        yield up


@st.composite
def requests(draw):
    """A route and a body: mostly right, with some fields replaced by anything."""
    path = draw(st.sampled_from(sorted(BODY)))
    fields = BODY[path]
    body = {name: value for name, value in LIKELY.items() if name in fields}
    for name in draw(st.lists(st.sampled_from(fields), max_size=3, unique=True)):
        body[name] = draw(messages | anything if name == "messages" else anything)
    small = {"max_tokens": 2, "n_predict": 2, "max_completion_tokens": 2}
    body |= {name: draw(st.integers(-2, 2)) for name in small if name in fields}
    return path, body, draw(st.sampled_from(["save", "restore", "erase", ""]))


@settings(max_examples=60, deadline=None, suppress_health_check=list[Any](HealthCheck))
@given(requests())
def test_whatever_comes_no_route_fails(server, request_made):
    path, body, action = request_made
    answer = server.http.post(path.replace("{id}", "0"), params={"action": action}, content=json.dumps(body))
    assert answer.status_code < 500, answer.text[:500]


def test_every_route_is_reported_with_what_it_takes(server):
    reported = server.http.get("/openapi.json").json()
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in server.uvicorn.config.app.routes
        for method in route.methods - {"HEAD"}
    }
    assert {(method.upper(), path) for path, methods in reported["paths"].items() for method in methods} == routes
    chat = reported["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "documents", "cache_prompt"} <= set(reported["components"]["schemas"]["ChatRequest"]["properties"])


def test_the_document_is_made_once(server):
    first = server.http.get("/openapi.json").content
    made = server.uvicorn.config.app.state.document
    assert server.http.get("/openapi.json").content == first == made
    assert server.uvicorn.config.app.state.document is made
