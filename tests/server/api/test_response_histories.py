"""Items and parts that a history of `/v1/responses` may hold: none of them ends the thread, over a real port."""

import json
import logging
from typing import Any

import pytest
from slotcache.server.api.reply import seal
from slotcache.server.api.response_items import _ItemReader
from slotcache.server.api.response_tools import ResponseTools

from server.conftest import REST, running

FIELDS: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 2, "ignore_eos": True}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
IMAGE = "[image: not shown, since this model reads text only]"


def called(id="c1", arguments="{}"):
    call = {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(content, id="c1"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def said(*parts: Any, role="user"):
    return [{"type": "message", "role": role, "content": list(parts)}]


def turn(content, role="user"):
    return [{"role": role, "content": content}]


def output(value, **changed):
    return [CALL, RESULT | {"output": value} | changed]


TEXT = {"type": "input_text", "text": "Words."}
SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="}
SEALED = "gAAAAABother"
SNAPSHOT = {"type": "ghost_snapshot", "ghost_commit": {"id": "abc"}}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "Hm."}

HISTORIES: dict[str, tuple[list[Any], list[dict[str, Any]], str]] = {
    # name: items, the messages of a chat that say the same, a word of the warning
    "compaction of another server": ([{"type": "compaction", "encrypted_content": SEALED}], [], "compaction"),
    "compaction_summary": ([{"type": "compaction_summary", "encrypted_content": SEALED}], [], "compaction_summary"),
    "compaction of nothing": ([{"type": "compaction", "encrypted_content": None}], [], "compaction"),
    "damaged compaction": ([{"type": "compaction", "encrypted_content": "slotcache:*"}], [], "compaction"),
    "context_compaction": ([{"type": "context_compaction"}], [], "context_compaction"),
    "compaction_trigger in the middle": ([{"type": "compaction_trigger"}], [], "compaction_trigger"),
    "additional_tools": ([{"type": "additional_tools", "role": "developer", "tools": [LOOK]}], [], "additional_tools"),
    "ghost_snapshot": ([SNAPSHOT], [], "ghost_snapshot"),
    "item_reference": ([{"type": "item_reference", "id": "msg_1"}], [], "item_reference"),
    "item_reference without a type": ([{"id": "msg_1"}], [], "item_reference"),
    "a hosted call": ([{"type": "web_search_call", "id": "ws_1", "status": "completed"}], [], "web_search_call"),
    "what a hosted call did": (
        [{"type": "web_search_call", "action": {"query": "fog"}}],
        turn('[web_search_call: {"query":"fog"}]', "assistant"),
        "web",
    ),
    "an image that was made": ([{"type": "image_generation_call", "result": "AAAA"}], turn(IMAGE, "assistant"), "image (1)"),
    "a new kind": ([{"type": "dream", "of": "sheep"}], [], "dream"),
    "a new kind with content": ([{"type": "dream", "content": [TEXT]}], turn("[dream: Words.]", "assistant"), "dream"),
    "a kind that is no text": ([{"type": ["message"]}], [], "other"),
    "null": ([None], [], ""),
    "a number": ([7], [], "other"),
    "a text": (["Words."], turn("Words."), ""),
    "type null": ([{"type": None, "role": "user", "content": "Words."}], turn("Words."), ""),
    "another role": ([{"role": "critic", "content": "Words."}], turn("Words."), "critic"),
    "role null": ([{"type": "message", "role": None, "content": "Words."}], turn("Words."), "message"),
    "content null": ([{"role": "user", "content": None}], turn(""), ""),
    "content left out": ([{"role": "assistant"}], turn("", "assistant"), ""),
    "content of an answer null": ([{"type": "message", "role": "assistant", "content": None}], turn("", "assistant"), ""),
    "content an object": ([{"role": "user", "content": TEXT}], turn("Words."), ""),
    "part null": (said(TEXT, None), turn("Words."), ""),
    "part a text": (said("Words."), turn("Words."), ""),
    "part without a type": (said({"text": "Words."}), turn("Words."), ""),
    "part of no text": (said(TEXT, {"type": "input_text", "text": None}), turn("Words."), ""),
    "encrypted_content": (said({"type": "encrypted_content", "encrypted_content": "x"}, TEXT), turn("Words."), "encrypted"),
    "summary_text": (said({"type": "summary_text", "text": "Words."}), turn("Words."), ""),
    "reasoning_text": (said({"type": "reasoning_text", "text": "Words."}), turn("Words."), ""),
    "computer_screenshot": (said(SCREEN), turn(IMAGE), "image (1)"),
    "an image": (said({"type": "input_image", "image_url": "data:"}), turn(IMAGE), "image (1)"),
    "a part of a new kind": (said({"type": "dream"}), turn(""), "dream"),
    "a new kind with text": (said({"type": "dream", "text": "Words."}), turn("[dream: Words.]"), "dream"),
    "output null": (output(None), [called(), result("")], ""),
    "output left out": ([CALL, {"type": "function_call_output", "call_id": "c1"}], [called(), result("")], ""),
    "output an object": (output({"a": [1, "ü"]}), [called(), result('{"a": [1, "ü"]}')], ""),
    "output a number": (output(4.5), [called(), result("4.5")], ""),
    "output a part": (output(SCREEN), [called(), result(IMAGE)], "image (1)"),
    "output a list of values": (output([{"a": 1}, 2]), [called(), result([{"a": 1}, 2])], ""),
    "output with a null": (output([None, TEXT]), [called(), result("Words.")], ""),
    "call_id null": ([CALL | {"call_id": None}, RESULT | {"call_id": None}], [called("call_1"), result("4", "call_1")], ""),
    "call_id of the output null": (output("4", call_id=None), [called(), result("4")], ""),
    "a call by its id": ([CALL | {"call_id": None, "id": "c1"}, RESULT], [called(), result("4")], ""),
    "an output of no call": ([RESULT | {"call_id": None}], [result("4", "")], ""),
    "arguments an object": ([CALL | {"arguments": {"at": 1}}, RESULT], [called(arguments='{"at": 1}'), result("4")], ""),
    "arguments null": ([CALL | {"arguments": None}, RESULT], [called(), result("4")], ""),
    "name null": ([CALL | {"name": None}, RESULT], [result("4")], "function_call"),
    "namespace of no text": ([CALL | {"namespace": 1}, RESULT], [called(), result("4")], ""),
    "summary with nulls": ([{"type": "reasoning", "summary": [None, {"text": "Hm."}]}], [THOUGHT], ""),
    "reasoning a text": ([{"type": "reasoning", "summary": None, "content": "Hm."}], [THOUGHT], ""),
    "reasoning of a new kind": ([{"type": "reasoning", "content": [{"type": "dream", "text": "Hm."}]}], [THOUGHT], ""),
    "reasoning sealed here": ([{"type": "reasoning", "summary": [], "encrypted_content": seal("Hm.")}], [THOUGHT], ""),
    "reasoning sealed elsewhere": ([{"type": "reasoning", "summary": [], "encrypted_content": SEALED}], [], "reasoning"),
    "reasoning that is damaged": ([{"type": "reasoning", "encrypted_content": "slotcache:*"}], [], "reasoning"),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_nothing_in_a_history_ends_the_thread(server, name):
    """It is the same messages in each turn, so the next turn goes on where this one ended."""
    items, messages, word = HISTORIES[name]
    history = [{"role": "user", "content": "One?"}, *items]
    question = {"role": "user", "content": "And what of the town?"}
    body = FIELDS | {"input": [*history, question], "prompt_cache_key": "k", "cache_scope": name, "tools": [LOOK]}
    first = server.http.post("/v1/responses", json=body)
    assert first.status_code == 200, first.text
    first = first.json()
    assert word in " ".join(first.get("warnings", [""]))
    assert "warnings" not in first or word
    asked = {"messages": [*turn("One?"), *messages, question], "tools": [{"type": "function", "function": LOOK}]}
    counted = server.http.post("/v1/chat/completions/input_tokens", json=asked)
    assert first["usage"]["input_tokens"] == counted.json()["input_tokens"], messages
    answer = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    second = server.http.post("/v1/responses", json=body | {"input": [*body["input"], answer, question]}).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - REST


def test_strict_is_about_fields_alone(tiny):
    items = [item for given, *_ in HISTORIES.values() for item in given]
    body = FIELDS | {"input": [*items, {"role": "user", "content": "Well?"}], "tools": [LOOK]}
    with running(tiny, strict=True) as server:
        answer = server.http.post("/v1/responses", json=body)
        assert answer.status_code == 200 and "ghost_snapshot" in answer.json()["warnings"][0], answer.text


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [SCREEN]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "dream"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [7]}, "input[1].content[0].type"),
        ({"role": "user", "content": None}, "input[1].content"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "critic", "content": "x"}, "input[1].role"),
    ],
)
def test_a_question_that_cannot_be_read_is_refused(server, item, param):
    refused = server.http.post("/v1/responses", json=FIELDS | {"input": [{"role": "user", "content": "x"}, item]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


@pytest.mark.parametrize("given", [[], [None], [SNAPSHOT]])
def test_an_input_with_nothing_for_the_model_is_refused(server, given):
    refused = server.http.post("/v1/responses", json=FIELDS | {"input": given})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input", refused.text


def test_what_is_left_out_is_counted(server):
    given = [SNAPSHOT, None, SNAPSHOT, {"role": "user", "content": "Hi"}]
    (warning,) = server.http.post("/v1/responses", json=FIELDS | {"input": given}).json()["warnings"]
    assert "ghost_snapshot (2)" in warning
    kinds = [{"type": f"kind_{number}_{'x' * 50}"} for number in range(40)]
    (warning,) = server.http.post("/v1/responses", json=FIELDS | {"input": kinds + given[3:]}).json()["warnings"]
    assert len(warning) < 1000 and "40" not in warning and "32 more" in warning


def test_many_items_of_other_servers_are_one_list():
    """Each was a copy of all those before it: 80,000 of them took 19 s."""
    search, said = {"type": "web_search_call", "action": {"query": "x"}}, [{"type": "output_text", "text": "Words."}]
    answer = {"role": "assistant", "content": [*said, *said]}
    reader = _ItemReader()
    reader.take(answer, "input[0]", is_last=False)
    before = reader.messages[0]["content"]
    for _ in range(3):
        reader.take(search, "input[1]", is_last=False)
    (message,) = reader.messages
    assert message["content"] is before and before == [*said, *said, search, search, search]
    assert len(answer["content"]) == 2, "the client's list stays as it was"


MUST = {"type": "object", "properties": {"at": {"enum": [1]}}, "required": ["at"], "additionalProperties": False}
TOOL = {"type": "function", "name": "look", "parameters": MUST}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("choice", "calls", "warns"),
    [
        ("any", True, False),
        ({"type": "any"}, True, False),
        ({"type": "required"}, True, False),
        ({"type": "auto"}, False, False),
        ({"type": "none"}, False, False),
        (SEARCH, False, True),
        ({"type": "mcp", "server_label": "x"}, False, True),
    ],
)
def test_a_choice_of_tools_is_heeded_or_named(server, choice, calls, warns):
    body = FIELDS | {"input": "Hi", "tools": [SEARCH, {"type": "mcp"}, TOOL], "tool_choice": choice, "max_output_tokens": 99}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["output"][-1]["type"] == "function_call") is calls
    assert any("tool_choice" in warning for warning in answer.json()["warnings"]) is warns


def test_nulls_among_the_tools_are_left_out(server):
    plain = server.http.post("/v1/responses", json=FIELDS | {"input": "Hi", "tools": [TOOL]}).json()
    answer = server.http.post("/v1/responses", json=FIELDS | {"input": "Hi", "tools": [None, TOOL]})
    assert answer.status_code == 200 and answer.json()["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


@pytest.mark.parametrize("field", ["output", "arguments", "content", "input"])
def test_a_value_in_many_levels_is_read_or_refused(server, field):
    """To write such a value takes more of the stack than to read it: between both limits nothing may fail."""
    kinds = {"output": RESULT, "arguments": CALL, "content": {"role": "user"}, "input": CALL | {"type": "custom_tool_call"}}
    statuses = set[int]()
    for levels in range(860, 1000, 2):
        nested = '{"a":' * levels + '"Words."' + "}" * levels
        item = json.dumps(kinds[field] | {field: None}).replace(f'"{field}": null', f'"{field}": {nested}')
        body = f'{{"input": [{item}, {{"role": "user", "content": "Hi"}}]}}'
        statuses.add(server.http.post("/v1/responses/input_tokens", content=body).status_code)
    assert statuses == {200, 400}


def test_calls_of_a_chat_are_listed_whatever_their_arguments(server):
    """A chat's call may have an object for them, or nothing."""
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "f"} | given} for at, given in enumerate(ARGUMENTS)]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 1, "store": True, "cache_prompt": True}
    id = server.http.post("/v1/chat/completions", json=body).json()["id"]
    listed = server.http.get(f"/v1/responses/{id}/input_items", params={"order": "asc"})
    assert listed.status_code == 200, listed.text
    assert [json.loads(item["arguments"]) for item in listed.json()["data"][:-1]] == [{}, {"a": 1}, {"a": 1}]


ARGUMENTS: list[Any] = [{}, {"arguments": {"a": 1}}, {"arguments": '{"a": 1}'}]


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": f"kind {at}\n12:00:00 forged"} for at in range(99)] + ["Hi"]},
        {"input": "Hi", "tools": [{"type": f"web_search_{at}"} for at in range(999)]},
        {"input": "Hi", "tools": [{"type": "custom", "name": f"a{at}", "format": {"type": "grammar"}} for at in range(99)]},
        {"input": "Hi", "tools": [{"type": "custom", "name": "a\n" * 999, "format": {"type": "grammar"}}]},
    ],
)
def test_a_warning_is_a_line_of_some_length(server, caplog, body):
    with caplog.at_level(logging.WARNING, "slotcache"):
        server.http.post("/v1/responses/input_tokens", json=body)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "\n" not in warning and len(warning) < 1000 and "forged" not in warning


def test_many_choices_among_many_hosted_tools_are_compared_once_each():
    compared = 0

    class Kind(str):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    tools = ResponseTools.of([*({"type": Kind(f"web_search_{at}")} for at in range(300)), TOOL])
    compared = 0
    tools.choice({"type": "allowed_tools", "tools": [{"type": Kind("function"), "name": "look"} for _ in range(300)]})
    assert compared <= 300 * 4


def test_nulls_after_the_question_are_nothing(server):
    picture = {"role": "user", "content": [{"type": "input_image"}]}
    answer = server.http.post("/v1/responses", json=FIELDS | {"input": [picture, None]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input[0].content[0].type"


def test_a_result_without_an_id_answers_the_call_before_it(server):
    tool = {"type": "function", "name": "look", "parameters": MUST}
    asked = FIELDS | {"max_output_tokens": 60, "ignore_eos": False, "tools": [tool]}
    first = server.http.post("/v1/responses", json=asked | {"input": "Look.", "tool_choice": "required"}).json()
    call = first["output"][-1]
    assert call["type"] == "function_call", first
    given = {"type": "function_call_output", "output": "4"}
    second = server.http.post("/v1/responses", json=asked | {"input": [given], "previous_response_id": first["id"]}).json()
    items = server.http.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["call_id"] for item in items if "call_id" in item] == [call["call_id"]] * 2
