"""Sessions as agents hold them, on a template that refuses most of their shapes: all APIs answer, and reuse each turn."""

import pytest
from support.template_shapes import ALTERNATES, LOSES

from server.conftest import REST, running

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "toolu_01.x", "type": "function", "function": {"name": "look", "arguments": '{"city": "Pa'}}  # was cut
CHAT = [
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
MESSAGES = [
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
OLLAMA = [
    *CHAT[:3],
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Pa"}}}]},
    *({"role": "tool", "content": "The town is warm.", "tool_name": "look"}, *CHAT[5:]),
]
OLLAMA[1] = {"role": "system", "content": "Be kind."}
OLLAMA[7] = {"role": "system", "content": "Now sing."}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
APIS = {
    "/v1/chat/completions": (
        {"messages": CHAT, "tools": CHAT_TOOLS, "max_tokens": 4},
        lambda answer: (answer["usage"]["prompt_tokens"], answer["slotcache"]["cached_tokens"]),
    ),
    "/v1/messages": (
        {
            "messages": MESSAGES,
            "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
            "tools": [{"name": "look", "input_schema": PARAMETERS}],
            "max_tokens": 4,
        },
        lambda answer: (
            sum(value for name, value in answer["usage"].items() if name != "output_tokens"),
            answer["usage"]["cache_read_input_tokens"],
        ),
    ),
    "/v1/responses": (
        {
            "input": ITEMS,
            "instructions": "Be brief.",
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": 4,
        },
        lambda answer: (
            answer["usage"]["input_tokens"],
            answer["usage"]["input_tokens_details"]["cached_tokens"],
        ),
    ),
    "/api/chat": (
        {"messages": OLLAMA, "tools": CHAT_TOOLS, "options": {"num_predict": 4}},
        lambda answer: (answer["prompt_eval_count"], None),
    ),
}


@pytest.fixture(scope="module", params=[ALTERNATES, LOSES], ids=["refuses", "loses"])
def server(request, tiny):
    with running(tiny, chat_template=request.param) as up:
        yield up


@pytest.mark.parametrize("path", APIS)
def test_each_turn_of_an_agent_is_answered_and_finds_the_last_one(server, path):
    body, counts_of = APIS[path]
    body = {"model": "tiny", "stream": False, "cache_prompt": True, "cache_scope": path} | body
    said = next(name for name in ("messages", "input") if name in body)
    before = 0
    for end in range(1, len(body[said]) + 1):
        last = body[said][end - 1]
        if last.get("role") == "assistant" or last.get("type") == "function_call":
            continue
        answer = server.http.post(path, json=body | {said: body[said][:end]})
        assert answer.status_code == 200, answer.text
        num_tokens, cached = counts_of(answer.json())
        assert num_tokens >= before
        assert cached is None or cached >= before - REST, (end, cached, before)
        before = num_tokens - 16  # the words behind the last text of the prompt, by bytes


@pytest.mark.parametrize("path", APIS)
def test_a_stream_of_such_a_session_ends_well(server, path):
    body, _ = APIS[path]
    answer = server.http.post(path, json={"model": "tiny", "stream": True} | body)
    assert answer.status_code == 200 and '"error":{' not in answer.text, answer.text


def test_the_prompt_shows_every_text(server):
    prompt = server.http.post("/apply-template", json={"messages": CHAT, "tools": CHAT_TOOLS}).json()["prompt"]
    texts = [str(message["content"]) for message in CHAT if message["content"]]
    assert [text for text in texts if text not in prompt] == []
    assert "[System: Ask no more.]" in prompt and '"Pa"' in prompt
