"""LiteLLM, as the client of OpenAI's and of Anthropic's API."""

import asyncio
import os
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network when it is imported
litellm: Any = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def options(served):
    return {"model": "openai/any", "api_base": f"{served.url}/v1", "api_key": "none", "max_retries": 0}


@pytest.fixture(scope="module")
def usual(options):
    return options | {"messages": HELLO, "temperature": 0, "max_tokens": 200}


def test_completion_and_stream(usual):
    whole = litellm.completion(**usual).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**usual, stream=True)]
    assert whole and "".join(pieces) == whole


def test_tools_and_forms(usual):
    call = litellm.completion(**usual, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and call.function.arguments.replace(" ", "") in ('{"days":1}', '{"days":2}')
    schema = {"name": "days", "schema": TOOL["function"]["parameters"]}
    formed = litellm.completion(**usual, response_format={"type": "json_schema", "json_schema": schema})
    assert formed.choices[0].message.content.replace(" ", "").strip() in ('{"days":1}', '{"days":2}')


def test_text_completion(options):
    answer = litellm.text_completion(**options | {"model": "text-completion-openai/any"}, prompt="Once upon", max_tokens=8)
    assert answer.choices[0].text


def test_responses(options):
    first = litellm.responses(**options, input="Say hello.", max_output_tokens=8)
    assert first.output[0].content[0].text
    events = [event.type for event in litellm.responses(**options, input="Say hello.", max_output_tokens=8, stream=True)]
    assert "response.output_text.delta" in events


def test_messages(served):
    options = {"model": "anthropic/any", "api_base": served.url, "api_key": "none", "max_retries": 0}
    assert litellm.completion(**options, messages=HELLO, max_tokens=8).choices[0].message.content
    pieces = litellm.completion(**options, messages=HELLO, max_tokens=8, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


def test_async_calls_are_the_same(usual):
    async def asked():
        whole = await litellm.acompletion(**usual)
        stream = await litellm.acompletion(**usual, stream=True, stream_options={"include_usage": True})
        return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(asked())
    choices = [choice for chunk in chunks for choice in chunk.choices]  # the chunk with the usage has none
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_calls_are_streamed_and_answered(usual):
    asked = usual | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**asked).choices[0].message
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0].message
    assert built.tool_calls[0].function.arguments == whole.tool_calls[0].function.arguments
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "Rain."}
    answer = litellm.completion(**usual | {"messages": [*HELLO, whole, result], "tools": [TOOL], "max_tokens": 4})
    assert answer.usage.prompt_tokens > 20


def test_vectors(vectors):
    options = {"model": "openai/any", "api_base": f"{vectors.url}/v1", "api_key": "none"}
    one, other = litellm.embedding(**options, input=["a river", "a stone"], encoding_format="float").data
    assert len(one["embedding"]) == 64 and one["embedding"] != other["embedding"]


def test_it_retries_where_the_queue_is_full(full):
    options = {"model": "openai/any", "api_base": f"{full.url}/v1", "api_key": "none", "messages": HELLO, "max_tokens": 4}
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(**options, max_retries=0)
    assert litellm.completion(**options, max_retries=20).choices


def test_errors_have_their_classes(options):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**options, messages=HELLO, temperature="hot")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options, messages=[{"role": "user", "content": "word " * 9000}])
