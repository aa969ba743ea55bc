"""Tools of `/v1/responses` as codex sends them: namespaces, free text, and tools that only OpenAI runs."""

import json
from typing import Any

import pytest
from slotcache.server.api.response_tools import FreeText, free_text
from support.dialects import RESPONSES

LOOK = {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"], "additionalProperties": False}
INNER = [
    {"type": "function", "name": "spawn", "description": "Starts one.", "strict": False, "parameters": LOOK},
    {"type": "custom", "name": "exec", "description": "Runs it."},
]
NAMESPACE = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": INNER}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.", "format": GRAMMAR}
HOSTED = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}, {"type": "local_shell"}]
FIELDS: Any = {"model": "tiny", "temperature": 0, "parallel_tool_calls": False, "input": "What is there?"}


def events(server, **fields):
    return RESPONSES.events_of(server.http.post("/v1/responses", json=FIELDS | {"stream": True} | fields))


def test_a_function_in_a_namespace_is_called_by_both_names(server):
    choice: Any = {"type": "function", "name": "spawn", "namespace": "agents"}
    fields = FIELDS | {"tools": [NAMESPACE], "tool_choice": choice, "prompt_cache_key": "k"}
    answer = server.openai.responses.create(**fields)
    (call,) = answer.output
    assert (call.type, call.namespace, call.name) == ("function_call", "agents", "spawn")
    assert json.loads(call.arguments)["at"] in (1, 2) and answer.tools[0].type == "namespace"
    reported = events(server, **fields)
    assert [event["item"]["namespace"] for event in reported if "item" in event] == ["agents"] * 2
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    history = [{"role": "user", "content": FIELDS["input"]}, *answer.to_dict()["output"], result]
    second = server.openai.responses.create(**fields | {"input": history})
    assert second.usage.input_tokens_details.cached_tokens > answer.usage.input_tokens
    stored = server.openai.responses.create(**fields | {"input": [result]}, previous_response_id=answer.id)
    items = server.openai.responses.input_items.list(stored.id, order="asc").data
    assert [(item.namespace, item.name) for item in items if item.type == "function_call"] == [("agents", "spawn")]


@pytest.mark.parametrize(("tools", "choice"), [([PATCH], {"type": "custom", "name": "patch"}), ([NAMESPACE], None)])
def test_a_tool_with_free_text_gets_a_text(server, tools, choice):
    choice = choice or {"type": "custom", "name": "exec", "namespace": "agents"}
    fields = FIELDS | {"tools": tools, "tool_choice": choice, "seed": 3, "temperature": 0.8, "max_output_tokens": 400}
    reported = events(server, **fields)
    (call,) = reported[-1]["response"]["output"]
    assert call["type"] == "custom_tool_call" and call["name"] == choice["name"] and "arguments" not in call
    assert call.get("namespace") == choice.get("namespace") and call["id"].startswith("ctc_")
    kinds = [event["type"] for event in reported if "custom_tool_call_input" in event["type"]]
    assert set(kinds[:-1]) == {"response.custom_tool_call_input.delta"} and kinds[-1].endswith(".done")
    joined = "".join(event["delta"] for event in reported if event["type"] == "response.custom_tool_call_input.delta")
    done = next(event for event in reported if event["type"] == "response.custom_tool_call_input.done")
    assert call["input"] == joined == done["input"] != ""
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    history = [{"role": "user", "content": FIELDS["input"]}, call, result]
    counted = server.http.post("/v1/responses/input_tokens", json={"input": history, "tools": tools}).json()
    assert counted["input_tokens"] > reported[-1]["response"]["usage"]["input_tokens"]
    stored = server.openai.responses.create(
        **FIELDS | {"input": [result], "tools": tools, "max_output_tokens": 1},
        previous_response_id=reported[-1]["response"]["id"],
    )
    items = server.http.get(f"/v1/responses/{stored.id}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["type"] for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert items[1]["input"] == call["input"]


def test_what_only_openai_runs_is_left_out_and_named(server):
    mine = {"type": "function", "name": "look", "parameters": LOOK}
    fields = FIELDS | {"max_output_tokens": 1, "ignore_eos": True}
    plain = server.http.post("/v1/responses", json=fields | {"tools": [mine]}).json()
    answer = server.http.post("/v1/responses", json=fields | {"tools": [*HOSTED, mine, PATCH]}).json()
    assert answer["usage"]["input_tokens"] > plain["usage"]["input_tokens"]
    left_out, grammar = answer["warnings"]
    assert all(tool["type"] in left_out for tool in HOSTED) and "patch" in grammar
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
    history = [{"role": "user", "content": "Hi"}, searched]
    answer = server.http.post("/v1/responses", json=fields | {"input": history}).json()
    assert "web_search_call" in answer["warnings"][0] and answer["usage"]["output_tokens"] == 1
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "look"}],
    }
    answer = server.http.post("/v1/responses", json=FIELDS | {"tools": [*HOSTED, mine], "tool_choice": allowed}).json()
    assert answer["output"][0]["name"] == "look"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "fuction", "name": "look"}], None, "tools[0].type"),
        ([{"type": "namespace", "name": "a"}], None, "tools[0].tools"),
        ([{"type": "namespace", "name": "a", "tools": [NAMESPACE]}], None, "tools[0].tools[0].type"),
        ([{"type": "custom"}], None, "tools[0].name"),
        (HOSTED, "required", "tool_choice"),
        (HOSTED, {"type": "web_search"}, "tool_choice"),
    ],
)
def test_what_a_program_relies_on_is_refused(server, tools, choice, param):
    refused = server.http.post("/v1/responses", json=FIELDS | {"tools": tools, "tool_choice": choice})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


TEXT = 'A "quoted"\n\\ line, ümlaut, 😀, 😀, and @ alone, @'


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_free_text_is_the_same_however_it_is_cut(is_ascii, size):
    """Half of a character, which no answer can have, is U+FFFD."""
    arguments = json.dumps({"input": TEXT}, ensure_ascii=is_ascii).replace("@", r"\ud800")
    text = TEXT.replace("@", "\ufffd")
    reader = FreeText()
    parts = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join([*parts, reader.finish()]) == text == free_text(arguments)
    if size == 1:
        assert sum(map(bool, parts)) > 40


@pytest.mark.parametrize(
    "half", [r"\ud83d", r"\udc00", r"\ud83d\ud83d\ude00", r"\ud83d\u0041", r"\ud83d\n", r"\udc00\ud83d"]
)
def test_halves_of_characters_delay_no_text(half):
    text = json.loads(f'"{half}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    reader = FreeText()
    assert "".join(map(reader.push, f'{{"input": "{half}, and more')) == f"{text}, and more"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"patch": "x"}', "x"), ('{"a": 1}', '{"a": 1}'), ("{", "{"), ('{"input": "half\\u00', "half"), ('{"input": "a', "a")],
)
def test_arguments_of_another_shape_are_not_lost(arguments, text):
    reader = FreeText()
    assert reader.push(arguments) + reader.finish() == text
