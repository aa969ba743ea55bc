"""Sessions as agents hold them, on a template that refuses most of their shapes: all APIs answer, and reuse each turn."""

import pytest
from support.dialects import CHAT, MESSAGES, OLLAMA, RESPONSES
from support.template_shapes import ALTERNATES, LOSES

from server.conftest import REST, running

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "toolu_01.x", "type": "function", "function": {"name": "look", "arguments": '{"city": "Pa'}}  # was cut
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "toolu_01.x", "content": "The town is warm."},
    {"role": "system", "content": "Ask no more."},
    {"role": "assistant", "content": "It is."},
    {"role": "developer", "content": "Now sing."},
    {"role": "user", "content": "Where?"},
    {"role": "user", "content": "And when?"},
]
BLOCKS = [
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_01.x", "name": "look", "input": {"city": "Pa"}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_01.x", "content": "The town is warm."},
            {"type": "text", "text": "<system-reminder>Ask no more.</system-reminder>"},
        ],
    },
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "Where?"},
    {"role": "user", "content": "And when?"},
]
ITEMS = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Is it warm?"},
    {"type": "function_call", "call_id": "toolu_01.x", "name": "look", "arguments": '{"city": "Pa'},
    {"type": "function_call_output", "call_id": "toolu_01.x", "output": "The town is warm."},
    {"role": "developer", "content": "Ask no more."},
    {"role": "assistant", "content": "It is."},
    {"role": "developer", "content": "Now sing."},
    {"role": "user", "content": "Where?"},
]
HISTORY = [
    *SAID[:3],
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Pa"}}}]},
    *({"role": "tool", "content": "The town is warm.", "tool_name": "look"}, *SAID[5:]),
]
HISTORY[1] = {"role": "system", "content": "Be kind."}
HISTORY[7] = {"role": "system", "content": "Now sing."}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
SYSTEM = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
APIS = {
    CHAT: {"messages": SAID, "tools": CHAT_TOOLS},
    MESSAGES: {"messages": BLOCKS, "system": SYSTEM, "tools": [{"name": "look", "input_schema": PARAMETERS}]},
    RESPONSES: {"input": ITEMS, "instructions": "Be brief.", "tools": [{"type": "function", **FUNCTION}]},
    OLLAMA: {"messages": HISTORY, "tools": CHAT_TOOLS},
}
every = pytest.mark.parametrize("api", APIS, ids=str)


@pytest.fixture(scope="module", params=[ALTERNATES, LOSES], ids=["refuses", "loses"])
def server(request, tiny):
    with running(tiny, chat_template=request.param) as up:
        yield up


@every
def test_each_turn_of_an_agent_is_answered_and_finds_the_last_one(server, api):
    body = api.body(most=4, stream=False, cache_prompt=True, cache_scope=str(api)) | APIS[api]
    said = next(name for name in ("messages", "input") if name in body)
    before = 0
    for end in range(1, len(body[said]) + 1):
        last = body[said][end - 1]
        if last.get("role") == "assistant" or last.get("type") == "function_call":
            continue
        answer = server.http.post(api.path, json=body | {said: body[said][:end]})
        assert answer.status_code == 200, answer.text
        reported = api.read(answer.json())
        assert reported.num_prompt >= before and reported.num_cached >= before - REST, (end, reported, before)
        before = reported.num_prompt - 16  # the words behind the last text of the prompt, by bytes


@every
def test_a_stream_of_such_a_session_ends_well(server, api):
    assert api.streamed(server, most=4, **APIS[api]).num_generated == 4


def test_the_prompt_shows_every_text(server):
    prompt = server.http.post("/apply-template", json={"messages": SAID, "tools": CHAT_TOOLS}).json()["prompt"]
    texts = [str(message["content"]) for message in SAID if message["content"]]
    assert [text for text in texts if text not in prompt] == []
    assert "[System: Ask no more.]" in prompt and '"Pa"' in prompt
