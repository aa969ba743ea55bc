"""Responses' items and Anthropic's blocks as messages of a chat."""

import json
from typing import Any

import msgspec
import pytest
from slotcache.server.api.messages import MessagesCountRequest, MessagesRequest
from slotcache.server.api.reply import seal, unseal
from slotcache.server.api.response_items import items_of, take_items
from slotcache.server.api.responses import ResponseRequest
from slotcache.server.chat.content import take
from slotcache.server.chat.decode import decode
from slotcache.server.chat.tools import read_tools
from slotcache.server.http.api_errors import RequestError


def response(**fields):
    """The chat that a response asks for."""
    return decode(json.dumps({"input": "Hi"} | fields).encode(), ResponseRequest).chat()[0]


def messages_of(items):
    return take_items(items).messages


def blocks(*content, role="user"):
    return {"messages": [{"role": role, "content": list(content)}]}


def anthropic(**fields: Any):
    usual = {"max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}
    return decode(json.dumps(usual | fields).encode(), MessagesRequest)


CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "look",
    "arguments": '{"at": 1}',
    "id": "fc_1",
    "status": "completed",
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def test_one_message_of_the_model_is_several_items():
    items = [{"role": "user", "content": "Well?"}, THOUGHT, SAID, CALL, RESULT, THOUGHT, SAID]
    answered = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": [TOOL_CALL]}
    messages = messages_of(items)
    assert messages == [
        {"role": "user", "content": "Well?"},
        answered,
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    ]
    back = items_of(messages, "x")
    assert [item["type"] for item in back] == [item.get("type", "message") for item in items]
    assert messages_of(back) == messages and len({item["id"] for item in back}) == len(back)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([CALL, CALL | {"call_id": "c2"}], [(None, None, 2)]),
        ([SAID, SAID], [("Yes.", None, 0), ("Yes.", None, 0)]),
        ([CALL, SAID], [(None, None, 1), ("Yes.", None, 0)]),
        ([THOUGHT, CALL], [(None, "Hm.", 1)]),
        ([THOUGHT], [("", "Hm.", 0)]),
        ([SAID, THOUGHT, SAID], [("Yes.", None, 0), ("Yes.", "Hm.", 0)]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]}, SAID], [("Yes.", "Short.", 0)]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": seal("Ah, so.")}], [("", "Ah, so.", 0)]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, SAID], [("Yes.", None, 0)]),
    ],
)
def test_items_that_belong_together(items, expected):
    found = messages_of(items)
    assert [(m["content"], m.get("reasoning_content"), len(m.get("tool_calls", []))) for m in found] == expected


def test_contents_are_texts_or_parts():
    part = {"type": "input_text", "text": "One."}
    (one,) = messages_of([{"role": "developer", "content": [part]}])
    assert one == {"role": "developer", "content": "One."}
    (two,) = messages_of([{"role": "user", "content": [part, part | {"text": "Two."}], "documents": ["D"]}])
    assert two == {"role": "user", "content": [part, part | {"text": "Two."}], "documents": ["D"]}
    (result,) = messages_of([RESULT | {"output": [part]}])
    assert result["content"] == "One."


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [7]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].type"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(item, param):
    with pytest.raises(RequestError) as refused:
        messages_of([{"role": "user", "content": "x"}, item])
    assert refused.value.param == param and refused.value.status == 400


def test_a_response_asks_for_a_chat():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chat = response(
        instructions="Sing.",
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        tools=[tool],
        text={"format": schema},
        tool_choice={"type": "function", "name": "look"},
        reasoning={"effort": "low"},
        conversation="c",
        parallel_tool_calls=False,
        cache_scope="s",
        documents=["D"],
        stop="x",
    )
    assert chat.messages == [{"role": "user", "content": "Hi"}] and chat.instructions == "Sing."
    assert (chat.limit(), chat.temperature, chat.cache_scope, chat.stops()) == (7, 0.5, "s", ["x"])
    assert msgspec.to_builtins(chat)["top_k"] == 3
    assert chat.tools == [{"type": "function", "function": {name: tool[name] for name in ("name", "parameters", "strict")}}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "look"}}
    inner = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat.response_format == {"type": "json_schema", "json_schema": inner}
    assert (chat.asked_reasoning.effort, chat.parallel_tool_calls, chat.store) == ("low", False, True)
    assert chat.conversation is not None and msgspec.to_builtins(chat.conversation) == {"id": "c", "history": "new"}
    allowed = {"mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    assert response(tool_choice={"type": "allowed_tools"} | allowed).tool_choice == {
        "type": "allowed_tools",
        "allowed_tools": allowed,
    }
    assert response(store=False).store is False and response(tool_choice="required").tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"n": 2}, "n"),
        ({"input": 1}, "input"),
    ],
)
def test_a_response_that_cannot_be_made_is_refused(fields, param):
    with pytest.raises(RequestError) as refused:
        response(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False, "truncation": "disabled"},
        {"include": ["reasoning.encrypted_content"]},
        {"text": {"verbosity": "medium"}},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(fields):
    response(**fields)


def test_named_conversations_and_cache_keys_opt_in_to_the_cache():
    for fields, opts_in in (
        ({}, False),
        ({"prompt_cache_key": "k"}, True),
        ({"conversation": "c"}, True),
        ({"previous_response_id": "r"}, True),
    ):
        assert response(**fields).opts_in is opts_in
    assert response(prompt_cache_key="k").cache_scope == ""


def test_blocks_are_messages():
    asked = anthropic(
        system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        messages=[
            {"role": "user", "content": "Fix it."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "gone", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    assert take(asked.chat())[0].messages == [
        {"role": "system", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: gone"},
        {"role": "user", "content": "And?"},
    ]


def test_omitted_thoughts_come_back_sealed():
    block = {"type": "thinking", "thinking": "", "signature": seal("Hm.")}
    (message,) = anthropic(messages=[{"role": "assistant", "content": [block]}]).chat().messages
    assert message == {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert unseal("EqQBCgIYAhIM") == ""


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A fee."}, "title": "Museum"}
FOUND = {"type": "search_result", "source": "web/1", "title": "T", "content": [{"type": "text", "text": "B"}]}


def test_documents_are_ordered_on_request_only():
    said = [{"role": "user", "content": [DOCUMENT, {"type": "text", "text": "How much?"}, FOUND]}]
    (as_text,) = anthropic(messages=said).chat().messages
    assert "documents" not in as_text and [part["text"] for part in as_text["content"]][1:] == [
        "How much?",
        "[web/1] T\nB\n\n",
    ]
    (ordered,) = anthropic(messages=said, document_order="auto").chat().messages
    for field, value in (("best", "free"), ("best_price_ms", 0)):
        assert anthropic(messages=said, **{field: value}).chat().messages == [ordered]
    assert ordered["content"] == "How much?"
    result = blocks({"type": "tool_result", "tool_use_id": "c", "content": [FOUND, {"type": "text", "text": "2 found."}]})
    (message,) = anthropic(**result, document_order="auto").chat().messages
    assert message["content"] == "2 found." and message["documents"] == ordered["documents"][1:]
    assert ordered["documents"] == [{"text": "A fee.", "title": "Museum"}, {"text": "B", "title": "T", "id": "web/1"}]


def test_fields_of_messages():
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    chat = anthropic(
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        top_k=5,
        thinking={"type": "enabled", "budget_tokens": 50},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ).chat()
    assert take(chat)[0].tools == [
        {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert (read_tools(chat).mode, chat.parallel_tool_calls, chat.stops(), chat.limit()) == ("required", False, ["END"], 10)
    asked = chat.asked_reasoning
    assert (asked.is_on, asked.most, take(chat)[0].cache_prompt) == (True, 50, True)
    assert chat.chat_template_kwargs == {"reasoning_effort": "high"}
    plain = anthropic().chat()
    assert plain.chat_template_kwargs == {"enable_thinking": False} and plain.cache_prompt is None
    named = anthropic(tools=[tool], tool_choice={"type": "tool", "name": "look"}).chat()
    assert [tool.name for tool in read_tools(named).tools] == ["look"] and read_tools(named).mode == "required"
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    formed = anthropic(output_config={"format": schema}).chat().response_format
    assert formed is not None and formed["json_schema"]["schema"] == {"type": "object"}


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    "fields",
    [
        MARK,
        {"system": [{"type": "text", "text": "S"} | MARK]},
        blocks({"type": "text", "text": "S"} | MARK),
        blocks({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "S"} | MARK]}),
    ],
)
def test_cache_control_anywhere_opts_in(fields):
    chat, breakpoints, _ = take(anthropic(**fields).chat())
    assert chat.cache_prompt is True and list(breakpoints.values()) == [3600]
    assert take(anthropic(**fields, cache_prompt=False).chat())[0].cache_prompt is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (blocks({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (blocks({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type"),
        (blocks(DOCUMENT | {"source": {"type": "text", "data": ""}}), "messages[0].content[0].text"),
        (blocks(DOCUMENT | {"source": {"type": "url", "url": "u"}}), "messages[0].content[0].type"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "look", "type": "custom"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"container": "c"}, "container"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused(fields, param):
    with pytest.raises(RequestError) as refused:
        anthropic(**fields).chat()
    assert refused.value.param == param


def test_only_answers_need_max_tokens():
    assert decode(b'{"messages": [{"role": "user", "content": "x"}]}', MessagesCountRequest).chat().limit() == -1
    with pytest.raises(RequestError) as refused:
        decode(b'{"messages": [{"role": "user", "content": "x"}]}', MessagesRequest).chat()
    assert refused.value.param == "max_tokens"
