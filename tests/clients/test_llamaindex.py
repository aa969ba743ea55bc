"""LlamaIndex's client for servers like OpenAI's."""

import asyncio
from typing import Any, Literal

import pytest
from support.weather import Weather

like: Any = pytest.importorskip("llama_index.llms.openai_like")
embedding: Any = pytest.importorskip("llama_index.embeddings.openai_like")
core: Any = pytest.importorskip("llama_index.core")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself


@pytest.fixture(scope="module")
def model(served):
    return like.OpenAILike(
        model="any",
        api_base=f"{served.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


def hello():
    return [core.llms.ChatMessage(role="user", content="Say hello.")]


def test_chat_and_stream(model):
    whole = model.chat(hello()).message.content
    assert whole and "".join(piece.delta or "" for piece in model.stream_chat(hello())) == whole
    assert model.complete("Say hello.").text == whole


def test_async_calls_are_the_same(model):
    async def asked():
        whole = await model.achat(hello())
        pieces = [piece.delta or "" async for piece in await model.astream_chat(hello())]
        return whole.message.content, "".join(pieces), (await model.acomplete("Say hello.")).text

    whole, streamed, completed = asyncio.run(asked())
    assert whole == streamed == completed == model.chat(hello()).message.content


def test_several_turns(model):
    messages, counts = hello(), []
    for turn in range(3):
        answer = model.chat(messages)
        messages += [answer.message, core.llms.ChatMessage(role="user", content=f"And {turn}?")]
        counts.append(answer.raw.usage.prompt_tokens)
    assert counts == sorted(set(counts))


def test_text_completions(served):
    text = like.OpenAILike(model="any", api_base=f"{served.url}/v1", api_key="none", is_chat_model=False, max_tokens=8)
    whole = text.complete("Once upon", temperature=0).text
    assert whole and "".join(piece.delta or "" for piece in text.stream_complete("Once upon", temperature=0)) == whole


def test_vectors(vectors):
    options = {"model_name": "any", "api_base": f"{vectors.url}/v1", "api_key": "none", "embed_batch_size": 2}
    embeddings = embedding.OpenAILikeEmbedding(**options)
    one, other, third = embeddings.get_text_embedding_batch(["a river", "a stone", "a city"])
    assert len(one) == 64 and one != other != third and embeddings.get_query_embedding("a river") == one


def test_it_retries_where_the_queue_is_full(full):
    options = {"model": "any", "api_base": f"{full.url}/v1", "api_key": "none", "is_chat_model": True}
    assert like.OpenAILike(**options, max_tokens=4, max_retries=20).chat(hello()).message


def test_tools_are_called(model):
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Get the weather of a city."""
        return city

    tool = core.tools.FunctionTool.from_defaults(fn=weather)
    answer = model.chat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Oslo", "Rome")
    result = core.llms.ChatMessage(role="tool", content="Rain.", additional_kwargs={"tool_call_id": call.tool_id})
    question = core.llms.ChatMessage(role="user", content="What is the weather?")
    again = model.chat_with_tools([tool], chat_history=[question, answer.message, result])
    assert again.raw.usage.prompt_tokens > answer.raw.usage.prompt_tokens
    *_, last = model.stream_chat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    (streamed,) = model.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs


def test_structured_output(model):
    assert isinstance(model.as_structured_llm(Weather).chat(hello()).raw, Weather)
