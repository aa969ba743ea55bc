"""Tools of chats whose calls are a free text: OpenAI's `custom`, through its client."""

from typing import Any

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin Patch"'}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files.", "format": GRAMMAR}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHOICE = {"type": "custom", "custom": {"name": "patch"}}
ASKED: Any = {
    "model": "any",
    "messages": [{"role": "user", "content": "What is there?"}],
    "tools": [PATCH, LOOK],
    "tool_choice": CHOICE,
    "parallel_tool_calls": False,
    "seed": 3,
    "max_tokens": 400,
}


def test_a_call_is_a_text(server):
    answer = server.openai.chat.completions.create(**ASKED)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, answer.choices[0].finish_reason) == ("custom", "patch", "tool_calls")
    assert call.custom.input and not hasattr(call, "function")
    assert any("patch" in warning and "not enforced" in warning for warning in answer.warnings)


def test_a_stream_has_the_same_text_in_pieces(server):
    whole = server.openai.chat.completions.create(**ASKED).choices[0].message.tool_calls[0]
    chunks = list(server.openai.chat.completions.create(**ASKED, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (calls[0].type, calls[0].custom["name"]) == ("custom", "patch") and calls[0].id
    assert "".join(call.custom["input"] for call in calls) == whole.custom.input
    assert len(calls) > 2 and all(call.function is None for call in calls)


def test_the_history_may_have_such_calls(server):
    """And a prompt with one goes on from the answer that made it."""
    fields = ASKED | {"extra_body": {"cache_prompt": True, "cache_scope": "custom"}}
    answer = server.openai.chat.completions.create(**fields)
    said = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "Done."}
    history = [*ASKED["messages"], said.to_dict(), result]
    second = server.openai.chat.completions.create(**fields | {"messages": history})
    assert second.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens


def test_a_function_beside_it_is_called_as_ever(server):
    choice = {"type": "function", "function": {"name": "look"}}
    (call,) = server.openai.chat.completions.create(**ASKED | {"tool_choice": choice}).choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOICE]}}
    (call,) = server.openai.chat.completions.create(**ASKED | {"tool_choice": allowed}).choices[0].message.tool_calls
    assert call.custom.name == "patch"


def test_what_is_no_such_tool_is_refused(server):
    for tool in ({"type": "custom"}, {"type": "custom", "custom": {"name": "no name"}}):
        answer = server.http.post("/v1/chat/completions", json=ASKED | {"tools": [tool], "tool_choice": "auto"})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools[0]")
