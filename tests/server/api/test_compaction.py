"""Compactions of `/v1/responses`: by its own route, and by an item at the end of an input. With the real client."""

import json
from typing import Any

import openai
import pytest
from slotcache.server.api.reply import unseal
from slotcache.server.chat.shortened_history import QUESTION, summary_message

from server.conftest import REST, running
from server.service.test_idle import settled

LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
FIELDS: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 40, "ignore_eos": True, "prompt_cache_key": "k"}
USER = {"role": "user", "content": "What do the boats bring in with the tide?"}
HISTORY: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    USER,
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Fish, I think."}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "fish " * 200},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Fish."}]},
    {"type": "message", "id": "msg_mine", "role": "user", "content": [{"type": "input_text", "text": "And salt?"}]},
]
TRIGGER = {"type": "compaction_trigger"}
NEXT = {"role": "user", "content": "Go on."}


def respond(server, **body):
    answer = server.http.post("/v1/responses", json=FIELDS | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def compact(server, given: Any = HISTORY, **fields):
    extra = {name: FIELDS[name] for name in ("temperature", "max_output_tokens", "ignore_eos")} | fields.pop("extra", {})
    return server.openai.responses.compact(model="tiny", input=given, prompt_cache_key="k", extra_body=extra, **fields)


def cached(response):
    return response["usage"]["input_tokens_details"]["cached_tokens"]


def test_a_history_becomes_the_users_messages_and_a_summary(server):
    before = respond(server, input=HISTORY, instructions="Sing.", tools=[LOOK])
    done = compact(server, instructions="Sing.", extra={"tools": [LOOK]})
    assert done.object == "response.compaction" and done.id.startswith("resp_") and done.created_at
    *kept, item = done.to_dict(warnings=False)["output"]
    assert [(one["type"], one["role"], one["content"][0]["text"]) for one in kept] == [
        ("message", "developer", "Be brief."),
        ("message", "user", USER["content"]),
        ("message", "user", "And salt?"),
    ]
    assert kept[2]["id"] == "msg_mine" and len({one["id"] for one in done.to_dict(warnings=False)["output"]}) == 4
    assert (
        item["type"] == "compaction" and item["id"].startswith("cmp_") and item.keys() == {"type", "id", "encrypted_content"}
    )
    assert done.usage.output_tokens == 40 and done.usage.total_tokens == done.usage.input_tokens + 40
    assert done.usage.input_tokens_details.cached_tokens >= before["usage"]["input_tokens"] - REST, "it goes on from there"
    summary = unseal(item["encrypted_content"])
    chat = [{"role": "system", "content": "Be brief."}, USER, {"role": "user", "content": "And salt?"}]
    asked = {"messages": [*chat, summary_message(summary), NEXT]}
    counted = server.http.post("/v1/chat/completions/input_tokens", json=asked).json()
    given: Any = [*kept, item, NEXT]
    after = server.openai.responses.create(model="tiny", input=given, max_output_tokens=1)
    assert summary and after.usage.input_tokens == counted["input_tokens"] < before["usage"]["input_tokens"]


def test_a_trigger_is_answered_by_a_summary(server):
    fields: Any = {"input": [*HISTORY, TRIGGER], "tools": [LOOK]}
    whole = respond(server, **fields)
    (item,) = whole["output"]
    assert whole["status"] == "completed" and whole["store"] is False and "cut at its limit" in whole["warnings"][0]
    extra = {"ignore_eos": True}
    with server.openai.responses.stream(
        model="tiny", temperature=0, max_output_tokens=40, extra_body=extra, **fields
    ) as stream:
        reported = [event.to_dict() for event in stream]
    kinds = [event["type"].removeprefix("response.") for event in reported]
    assert kinds[-4:] == ["output_item.added", "compaction.compacting", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in reported] == list(range(len(reported)))
    added, compacting, done, completed = reported[-4:]
    assert added["item"] == done["item"] | {"encrypted_content": ""} and compacting["item_id"] == done["item"]["id"]
    assert completed["response"]["output"] == [done["item"]]
    assert done["item"]["encrypted_content"] == item["encrypted_content"]
    messages = [{"role": "system", "content": "Sum."}, USER, QUESTION]
    chat = server.chat(messages=messages, max_tokens=40, cache_prompt=False)["choices"][0]["message"]["content"]
    short = respond(server, input=[USER, TRIGGER], instructions="Sum.")["output"][0]
    assert unseal(short["encrypted_content"]) == chat.strip()


def test_documents_of_what_is_stored_are_counted_where_they_stay_behind(server):
    documents = [{"id": name, "text": f"{name} is {colour}."} for name, colour in (("Sky", "blue"), ("Sea", "green"))]
    first = respond(server, input=[USER], documents=documents)
    done = compact(server, [], previous_response_id=first["id"]).to_dict(warnings=False)
    reported = "2 documents of the stored history are not in its shortened form: send them again"
    assert reported in done["warnings"] and reported not in compact(server, HISTORY).to_dict(warnings=False)["warnings"]


def test_a_trigger_shortens_what_is_stored(server):
    scope = {"cache_scope": "stored"}
    first = respond(server, input=[USER], instructions="Sing.", **scope)
    second = respond(server, input=[NEXT], previous_response_id=first["id"], **scope)
    done = compact(server, [], previous_response_id=second["id"], extra=scope)
    assert [item.to_dict(warnings=False).get("role") for item in done.output] == ["user", "user", None]
    assert done.output[1].to_dict(warnings=False)["content"] == [{"type": "input_text", "text": NEXT["content"]}]
    more = compact(server, "And?", previous_response_id=second["id"], extra=scope)
    assert [item.to_dict(warnings=False).get("role") for item in more.output] == ["user", "user", "user", None]
    triggered = respond(server, input=[TRIGGER], previous_response_id=second["id"], store=True, **scope)
    assert triggered["output"][0]["type"] == "compaction" and "store has no effect" in triggered["warnings"][0]
    for id in (done.id, triggered["id"]):
        with pytest.raises(openai.NotFoundError):
            server.openai.responses.retrieve(id, extra_query={"scope": "stored"})


def test_a_summary_is_free_text(server):
    """It calls no tool and has no form, whatever the request says: it says so."""
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    done = respond(server, input=[USER, TRIGGER], tools=[LOOK], tool_choice="required", text=form)
    assert "response_format, tool_choice" in done["warnings"][0] and done["output"][0]["type"] == "compaction"
    assert not any("response_format" in warning for warning in respond(server, input=[USER, TRIGGER])["warnings"])


def test_a_compaction_of_a_compaction_has_both(server):
    """The earlier summary stands in the prompt of the next one, and not beside it."""
    first = compact(server).to_dict(warnings=False)["output"]
    again = compact(server, [*first, NEXT]).to_dict(warnings=False)["output"]
    assert [item["type"] for item in again] == ["message"] * 4 + ["compaction"]
    assert again[-1]["id"] != first[-1]["id"]


def test_what_cannot_be_compacted_is_refused(server):
    blank: Any = {"input": [USER, TRIGGER], "max_output_tokens": 1, "logit_bias": {" ": 100}}
    cases: tuple[tuple[str, dict[str, Any], int, Any], ...] = (
        ("/v1/responses/compact", {"input": [USER], "stream": True}, 400, "stream"),
        ("/responses/compact", {"input": "word " * 9000}, 400, None),
        ("/v1/responses", blank, 500, None),
    )
    for path, body, status, param in cases:
        refused = server.http.post(path, json=FIELDS | body)
        assert refused.status_code == status, refused.text
        assert refused.json()["error"].get("param") == param
    body = FIELDS | blank | {"stream": True}
    lines = server.http.post("/v1/responses", json=body).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data:")][-1][5:])
    assert last["type"] == "response.failed" and "no summary" in last["response"]["error"]["message"]


def test_what_follows_a_compaction_is_computed_ahead(tiny):
    with running(tiny, chat_template="chatml", idle_prefill=True) as server:
        done = compact(server, instructions="Sing.", extra={"session_id": "s"})
        settled(server)
        output: Any = done.to_dict(warnings=False)["output"]
        given = [*output, NEXT]
        after = respond(server, input=given, instructions="Sing.", session_id="s", max_output_tokens=1)
        front = respond(server, input=given[:-1], instructions="Sing.", max_output_tokens=1)["usage"]["input_tokens"]
        assert cached(after) >= front - REST - 8 and cached(after) > done.usage.input_tokens // 8


def test_what_a_client_moves_is_learnt(tiny):
    """codex has the context of its turn in front of the last question, wherever that stood in the history before."""
    context = [{"role": "developer", "content": "Skills. " * 40}, {"role": "user", "content": "<cwd>/tmp</cwd> " * 20}]
    questions = [{"role": "user", "content": f"{number}: what of the tide? " * 9} for number in range(6)]
    answer = {"role": "assistant", "content": "Fish."}
    with running(tiny, chat_template="chatml", idle_prefill=True) as server:
        front, computed = [*context, *questions[:2]], []
        for number in (2, 4):
            summary = respond(server, input=[*front, answer, questions[number], TRIGGER])["output"][0]
            settled(server)
            asked = [message for message in (*front, questions[number]) if message in questions]
            front = [*asked[:-1], *context, asked[-1], summary]
            after = respond(server, input=[*front, NEXT], max_output_tokens=1)
            settled(server)
            computed.append(after["usage"]["input_tokens"] - cached(after))
        assert computed[0] > 200 and computed[1] < computed[0] // 20


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [USER], "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": [None]}, "input"),
    ],
)
def test_what_leaves_nothing_to_do_is_refused(server, body, param):
    for path, given in (("/compact", body), ("", body | {"input": [*body.get("input", []), TRIGGER]})):
        answer = server.http.post(f"/v1/responses{path}", json={"max_output_tokens": 4} | given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_input_asks_for_a_summary_once(server):
    """A trigger at the end of an input of the route, and nulls behind one, ask for no more."""
    prompts = [{"input": [USER]}, {"input": [USER, TRIGGER]}, {"input": [USER, TRIGGER, None]}]
    done = [server.http.post("/v1/responses/compact", json=FIELDS | prompt).json() for prompt in prompts]
    assert len({one["usage"]["input_tokens"] for one in done}) == 1
    assert all("compaction_trigger" not in str(one["warnings"]) for one in done)
    answer = respond(server, input=[USER, TRIGGER, None])
    assert [item["type"] for item in answer["output"]] == ["compaction"]
