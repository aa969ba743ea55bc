"""What clients of other servers write in a chat: refusals, images, calls of the old form, marks of the cache."""

import json
from typing import Any

import pytest

from server.conftest import REST

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SHORT = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
SEEN = {"role": "assistant", "content": "A cat."}


def said(text, *more, kind="text"):
    return {"role": "user", "content": [{"type": kind, "text": text}, *more]}


QUESTIONS = {
    CHAT: {"messages": [said("What is it?", PICTURE)]},
    RESPONSES: {"input": [said("What is it?", INPUT, kind="input_text")]},
    MESSAGES: {"messages": [said("What is it?", BLOCK)]},
}
HISTORIES: dict[str, Any] = {
    CHAT: {"messages": [*QUESTIONS[CHAT]["messages"], SEEN, said("And?")]},
    RESPONSES: {"input": [*QUESTIONS[RESPONSES]["input"], SEEN, said("And?", kind="input_text")]},
    MESSAGES: {"messages": [*QUESTIONS[MESSAGES]["messages"], SEEN, said("And?")]},
}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULTS = {
    CHAT: {"messages": [said("Look."), {"role": "assistant", "tool_calls": [CALL]},
                        {"role": "tool", "tool_call_id": "c", "content": [PICTURE]}]},
    RESPONSES: {"input": [said("Look.", kind="input_text"),
                          {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                          {"type": "function_call_output", "call_id": "c", "output": [INPUT]}]},
    MESSAGES: {"messages": [said("Look."),
                            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
                            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}]}]},
}  # fmt: skip


@pytest.mark.parametrize("path", QUESTIONS)
def test_an_image_in_the_question_is_refused_in_these_words(server, path):
    refused = server.http.post(path, json=SHORT | QUESTIONS[path])
    error = refused.json()["error"]
    assert refused.status_code == 400 and "image input is not supported" in error["message"], refused.text
    assert error["param"].endswith("[0].content[1].type")


@pytest.mark.parametrize("bodies", [HISTORIES, RESULTS], ids=["history", "result"])
@pytest.mark.parametrize("path", HISTORIES)
def test_an_image_elsewhere_is_a_line_of_text_and_a_warning(server, path, bodies):
    answer = server.http.post(path, json=SHORT | bodies[path])
    assert answer.status_code == 200, answer.text
    (warning,) = answer.json()["warnings"]
    assert "not shown to the model" in warning and warning.endswith(": image (1)")


def prompt(server, **body):
    answer = server.http.post("/apply-template", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


def test_the_line_stands_in_place_of_the_image(server):
    shown = prompt(server, **HISTORIES[CHAT])
    assert "What is it?\n[image: not shown, since this model reads text only]" in shown


@pytest.mark.parametrize(
    "refused", [{"content": [{"type": "refusal", "refusal": "I cannot."}]}, {"content": None, "refusal": "I cannot."}]
)
def test_a_refusal_is_what_the_assistant_said(server, refused):
    messages = [said("Do it."), {"role": "assistant"} | refused, said("Why?")]
    plain = [messages[0], {"role": "assistant", "content": "I cannot."}, messages[2]]
    assert prompt(server, messages=messages) == prompt(server, messages=plain)


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


def test_functions_of_the_old_form_are_called_in_the_old_form(server):
    fields: Any = {"model": "any", "messages": [said("Look.")], "max_tokens": 100}
    asked = fields | {"functions": [FUNCTION], "function_call": {"name": "look"}}
    (choice,) = server.openai.chat.completions.create(**asked).choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("look", "{}")
    chunks = [chunk.choices[0] for chunk in server.openai.chat.completions.create(**asked, stream=True)]
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert deltas[0].name == "look" and "".join(delta.arguments for delta in deltas) == "{}"
    assert chunks[-1].finish_reason == "function_call" and not any(chunk.delta.tool_calls for chunk in chunks)
    new = fields | {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False}
    called = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    old = [said("Look."), called, {"role": "function", "name": "look", "content": "4"}]
    made = [said("Look."), {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "call_1"}]},
            {"role": "tool", "name": "look", "tool_call_id": "call_1", "content": "4"}]  # fmt: skip
    assert prompt(server, messages=old, functions=[FUNCTION]) == prompt(server, messages=made, tools=new["tools"])
    refused = server.http.post(CHAT, json=new | {"functions": [FUNCTION]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "functions"


MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"type": "function", "function": FUNCTION}
LONG = "word " * 40
WISHES = [
    {"promptCacheKey": "session"},
    {"prompt_cache_options": {"ttl": "30m"}},
    MARK,
    {"messages": [{"role": "user", "content": LONG} | MARK]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG} | MARK]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG, "prompt_cache_breakpoint": {}}]}]},
    {"tools": [TOOL | MARK]},
]  # fmt: skip


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_each_client_s_way_to_ask_for_the_cache_opts_in(server, wish):
    scope = json.dumps(wish)[:200]
    plain = {"messages": [{"role": "user", "content": LONG}], "cache_scope": scope} | SHORT
    if "tools" in wish:
        plain["tools"] = [TOOL]
    marked = server.http.post(CHAT, json=plain | wish)
    assert marked.status_code == 200 and "warnings" not in marked.json(), marked.text
    again = server.http.post(CHAT, json=plain | {"cache_prompt": True}).json()["usage"]
    # A mark is no part of the prompt: it moves from turn to turn.
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - REST
    assert server.http.post(CHAT, json=plain | wish | {"cache_prompt": False}).json()["slotcache"]["cached_tokens"] == 0
