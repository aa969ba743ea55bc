"""Anthropic's client."""

import asyncio
from typing import Any

import pytest

anthropic: Any = pytest.importorskip("anthropic")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself

HELLO: Any = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
USUAL: Any = {"model": "any", "max_tokens": 200, "messages": HELLO, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def test_messages(client):
    message = client.messages.create(**USUAL | {"max_tokens": 8}, system="Be brief.")
    assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_a_stream_adds_up_to_the_message(client):
    whole = client.messages.create(**USUAL)
    with client.messages.stream(**USUAL) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_tools_round_trip(client):
    asked = USUAL | {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = client.messages.create(**asked)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and call.name == "get_weather"
    assert call.input["days"] in (1, 2, 3) and isinstance(call.input["city"], str)
    with client.messages.stream(**asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    history = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**USUAL | {"messages": history, "tools": [TOOL], "max_tokens": 8})
    assert answer.content


def test_thinking_is_a_block_of_its_own(client):
    message = client.messages.create(**USUAL, thinking={"type": "enabled", "budget_tokens": 1024})
    assert {block.type for block in message.content} <= {"thinking", "text"}
    thought = {"type": "thinking", "thinking": "They want a greeting.", "signature": ""}
    history = [*HELLO, {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello."}]}, *HELLO]
    assert client.messages.create(**USUAL | {"messages": history, "max_tokens": 4}).content


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model="any", messages=HELLO, system="Be brief.", tools=[TOOL])
    message = client.messages.create(**USUAL | {"max_tokens": 1}, system="Be brief.", tools=[TOOL])
    assert counted.input_tokens == message.usage.input_tokens


def test_cache_control_caches(client):
    system: Any = [{"type": "text", "text": "Answer in one word. " * 30, "cache_control": {"type": "ephemeral"}}]
    first, again = (client.messages.create(**USUAL | {"max_tokens": 2}, system=system).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 < first.cache_creation_input_tokens
    assert again.cache_read_input_tokens > 0.8 * first.cache_creation_input_tokens


def test_errors_have_their_classes(client):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**USUAL | {"messages": []})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("no/such/model")


def test_answers_of_an_async_client_are_the_same(client, served):
    async def asked():
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as one:
            whole = await one.messages.create(**USUAL)
            async with one.messages.stream(**USUAL) as stream:
                text = "".join([piece async for piece in stream.text_stream])
        return whole, text

    whole, text = asyncio.run(asked())
    assert whole.content[0].text == text == client.messages.create(**USUAL).content[0].text


def test_events_of_a_plain_stream(client):
    events = list(client.messages.create(**USUAL | {"max_tokens": 8}, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens > 0 and 0 < events[-2].usage.output_tokens <= 8


def test_several_turns(client):
    messages, counts = list(HELLO), []
    for turn in range(3):
        answer = client.messages.create(**USUAL | {"messages": messages, "max_tokens": 8})
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": f"And {turn}?"}]
        counts.append(answer.usage.input_tokens)
    assert counts == sorted(set(counts))


def test_it_retries_where_the_queue_is_full(full):
    with (
        anthropic.Anthropic(base_url=full.url, api_key="none", max_retries=0) as hasty,
        pytest.raises(anthropic.RateLimitError),
    ):
        hasty.messages.create(**USUAL)
    with anthropic.Anthropic(base_url=full.url, api_key="none", max_retries=20) as patient:
        assert patient.messages.create(**USUAL | {"max_tokens": 4}).content
