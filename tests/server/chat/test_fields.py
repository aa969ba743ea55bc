"""Fields of requests: none is ignored without a word."""

import json
import logging
import time

import msgspec
import pytest
from slotcache.server.api.routes import ROUTES
from slotcache.server.chat.body import ChatRequest, CompletionRequest
from slotcache.server.chat.decode import (
    HARMLESS,
    MAX_COLONS,
    MAX_FIELDS,
    MAX_WARNINGS,
    REFUSED,
    WISHES,
    decode_request,
    nested,
)
from support.dialects import OF

from server.conftest import running

CHAT = {"messages": [{"role": "user", "content": "Hi", "extra": 1}], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
TEXT = {"prompt": "Hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/completion": TEXT}


def post(server, path, **fields):
    return server.http.post(path, json=PATHS[path] | fields)


def events(server, path, **fields):
    return OF[path].events_of(post(server, path, stream=True, **fields))


def test_no_field_is_known_twice():
    objects = [(outer, inner) for row in ROUTES if row.body for outer, inner in nested(row.body).items()]
    parts = {f"{outer}.{name}" for outer, inner in objects for name in inner.__struct_fields__}
    answered = {name for kind in (ChatRequest, CompletionRequest) for name in kind.__struct_fields__}
    assert HARMLESS & (answered | parts | set(REFUSED) | set(WISHES)) == set() == set(REFUSED) & set(WISHES)
    fields = {name for row in ROUTES if row.body for name in row.body.__struct_fields__}
    assert (set(REFUSED) | set(WISHES)) & (fields | parts) == {"format"}, "Ollama's, and refused by all others"


@pytest.mark.parametrize("path", PATHS)
def test_a_misspelt_field_is_a_warning_with_the_name_that_it_resembles(server, path, caplog):
    with caplog.at_level(logging.WARNING, "slotcache"):
        answer = post(server, path, max_token=7, temprature=0.5).raise_for_status().json()
    said = [
        "'max_token' is not known (did you mean max_tokens?); it has no effect",
        "'temprature' is not known (did you mean temperature?); it has no effect",
    ]
    assert answer["warnings"] == said
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {'; '.join(said)}"]
    assert "warnings" not in post(server, path).json()


@pytest.mark.parametrize("path", PATHS)
def test_the_last_chunk_of_a_stream_carries_the_warnings(server, path):
    carrying = [event for event in events(server, path, max_token=7) if "warnings" in event]
    assert len(carrying) == 1 and "timings" in carrying[0] and "max_tokens" in carrying[0]["warnings"][0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused_and_what_asks_for_nothing_is_not(server, path, name):
    error = post(server, path, **{name: {"a": [1, "x" * 100]}}).json()["error"]
    assert error["code"] == 400 and error["param"] == name and name in error["message"]
    plain = post(server, path).json()
    for value in (None, *REFUSED[name][0]):
        answer = post(server, path, **{name: value})
        assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text
        assert answer.json().get("choices") == plain.get("choices")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [name for name in WISHES if "." not in name])
def test_a_wish_that_an_answer_can_do_without_is_a_warning(server, path, name):
    answer = post(server, path, **{name: "low"})
    assert answer.status_code == 200 and answer.json()["warnings"] == [f"{name} has no effect: {WISHES[name][1]}"]
    for value in (None, *WISHES[name][0]):
        assert "warnings" not in post(server, path, **{name: value}).json()


def test_wishes_of_responses_and_messages_are_warnings(server):
    fields = {"max_output_tokens": 1, "truncation": "auto", "text": {"verbosity": "low"}}
    fields |= {"context_management": [{"type": "compaction"}]}
    answer = server.http.post("/v1/responses", json={"input": "Hi"} | fields).json()
    named = [warning.split(" has no effect")[0] for warning in answer["warnings"]]
    assert named == ["truncation", "text.verbosity", "context_management"]
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    hosted = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    fields = {"max_tokens": 1, "speed": "fast", "context_management": edits, "tools": hosted, "mcp_servers": [{"url": "u"}]}
    answer = server.http.post("/v1/messages", json={"messages": CHAT["messages"]} | fields)
    assert answer.status_code == 200, answer.text
    for said in ("speed has no effect", "context_management has no effect", "web_search_20250305 left out", "mcp_servers"):
        assert any(said in warning for warning in answer.json()["warnings"]), said


def test_the_time_for_an_answer_ends_it_at_a_line(server):
    body = {"max_tokens": 3000, "logit_bias": [["\n", 100]]}
    answer = post(server, "/completion", **body, t_max_predict_ms=50).json()
    assert 1 < answer["timings"]["predicted_n"] < 3000 and answer["stop_type"] == "limit" and "\n" in answer["content"]
    assert answer["timings"]["predicted_ms"] > 50
    kept = post(server, "/completion", max_tokens=300, logit_bias=[["a", 100]], t_max_predict_ms=1).json()
    assert kept["timings"]["predicted_n"] == 300, "no line is whole"


def test_n_has_llama_server_s_name_as_well(server):
    assert len(post(server, "/v1/chat/completions", n_cmpl=2).json()["choices"]) == 2
    assert len(post(server, "/v1/chat/completions", n_cmpl=2, n=1).json()["choices"]) == 1


def test_harmless_fields_are_taken_with_any_value(server):
    fields = {name: {"a": 1} for name in HARMLESS if "stream_options" not in name}
    answer = post(server, "/v1/chat/completions", **fields, stream_options={"include_obfuscation": False})
    assert answer.status_code == 200 and "warnings" not in answer.json()


def test_a_field_within_a_field_is_known_by_its_path(server):
    options = {"include_usge": True, "include_usage": True, "include_obfuscation": True}
    carrying = [event for event in events(server, "/v1/chat/completions", stream_options=options) if "warnings" in event]
    assert carrying[0]["warnings"] == [
        "'stream_options.include_usge' is not known (did you mean stream_options.include_usage?); it has no effect"
    ]
    warnings = post(server, "/v1/chat/completions", conversation={"id": "x", "hist": "new"}).json()["warnings"]
    assert len(warnings) == 1 and "conversation.hist" in warnings[0]


def test_a_field_of_another_route_is_reported_so(server):
    warnings = post(server, "/completion", documents=["A text."], messages=[]).json()["warnings"]
    assert warnings == [f"{name} is no field of this route; it has no effect" for name in ("documents", "messages")]
    assert "prompt is no field" in post(server, "/v1/chat/completions", prompt="x").json()["warnings"][0]


def test_a_strict_server_refuses_fields_that_it_does_not_know(tiny):
    with running(tiny, strict=True) as server:
        error = post(server, "/completion", max_token=7).json()["error"]
        assert error["code"] == 400 and error["param"] == "max_token" and "max_tokens" in error["message"]
        error = server.http.post("/tokenize", json={"content": "x", "contents": "y"}).json()["error"]
        assert error["param"] == "contents"
        assert post(server, "/v1/chat/completions", user="x", stream_options=None).status_code == 200


def test_null_is_left_out_and_4_0_is_4(server):
    everything = {
        name: None for name in (*ChatRequest.__struct_fields__, *HARMLESS, *REFUSED, *WISHES) if name != "messages"
    }
    answer = post(server, "/v1/chat/completions", **everything | {"max_tokens": 4.0, "temperature": 0.0, "seed": -1.0})
    assert answer.status_code == 200 and answer.json()["timings"]["predicted_n"] <= 4, answer.text
    body = (
        json.dumps(CHAT | {"return_progress": None, "top_k": 40, "max_tokens": 3})
        .replace("3", "3.000")
        .replace("40", "40.0")
    )
    plain = json.dumps(CHAT | {"top_k": 40, "max_tokens": 3})
    read = [msgspec.to_builtins(decode_request(each.encode(), ChatRequest)[0]) for each in (body, plain)]
    assert read[0] == read[1]
    assert server.http.post("/completion", json={"prompt": None}).json()["error"]["param"] == "prompt"
    for wrong in (4.5, "4", [4]):
        error = post(server, "/completion", max_tokens=wrong).json()["error"]
        assert error["code"] == 400 and error["param"] == "max_tokens"


@pytest.mark.parametrize(
    "body", ['{"prompt": "x", "a": nul}', '{"prompt": "x", "a": 4.}', '{"prompt": "x"', "[1]", "4.0", "null"]
)
def test_what_is_no_object_of_json_is_refused(server, body):
    assert server.http.post("/completion", content=body).status_code == 400


def test_many_fields_and_long_names_are_no_work(server):
    names = [f"max_tokenz{number}" for number in range(200)] + ["x" * 10_000, "\n\x1b[31m"]
    warnings = post(server, "/completion", **dict.fromkeys(names, 1)).json()["warnings"]
    assert len(warnings) == MAX_WARNINGS + 1 and "194 more" in warnings[-1] and sum(map(len, warnings)) < 2000
    assert all(warning.isprintable() for warning in post(server, "/completion", **{"\n\x1b[31m": 1}).json()["warnings"])
    assert post(server, "/completion", **{f"a{number}": 1 for number in range(MAX_FIELDS)}).status_code == 400
    huge = json.dumps({"prompt": "x"} | {f"a{number}": 1 for number in range(MAX_COLONS)}).encode()
    began = time.thread_time()
    assert decode_request(huge, CompletionRequest)[1] != ()
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("field", "given", "named"),
    [
        ("response_format", {"type": "text", "schemas": {}}, "response_format.schemas"),
        ("response_format", {"json_schema": {"name": "x", "stricct": True}}, "response_format.json_schema.stricct"),
        ("function_call", {"name": "f", "argument": 1}, "function_call.argument"),
        ("prompt_cache_options", {"mode": "explicit", "ttl": "5m", "scope": "x"}, "prompt_cache_options.scope"),
        ("cache_control", {"type": "ephemeral", "tl": "5m"}, "cache_control.tl"),
    ],
)
def test_parts_of_fields_that_are_not_known_are_named(field, given, named):
    _, (warning,) = decode_request(json.dumps(CHAT | {field: given}).encode(), ChatRequest)
    assert warning.startswith(f"'{named}' is not known")


def test_a_schema_may_have_any_names():
    schema = {"type": "object", "properties": {"scope": {"type": "string"}}, "anything": 1}
    for given in ({"json_schema": {"name": "x", "schema": schema}}, {"schema": schema}):
        _, warnings = decode_request(json.dumps(CHAT | {"response_format": given}).encode(), ChatRequest)
        assert warnings == ()
