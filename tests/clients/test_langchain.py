"""LangChain's OpenAI classes, with their defaults."""

import asyncio
from typing import Any

import pytest
from support.weather import Weather

langchain: Any = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself


@pytest.fixture(scope="module")
def options(served):
    return {"base_url": f"{served.url}/v1", "api_key": "none", "model": "any", "temperature": 0, "max_retries": 0}


@pytest.fixture(scope="module")
def chat(options):
    return langchain.ChatOpenAI(**options, max_tokens=200)


def test_invoke_stream_and_batch(chat):
    whole = chat.invoke("Say hello.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == whole.content
    # Not compared: requests that run at the same time are equal within rounding only (docs/exactness.md).
    assert all(answer.content for answer in chat.batch(["Say hello."] * 3))


@pytest.mark.parametrize("method", [None, "json_schema", "function_calling", "json_mode"])
def test_structured_output(chat, method):
    named = {} if method is None else {"method": method}
    if method == "json_mode":  # any object: the model decides whether it fits
        found = chat.with_structured_output(Weather, method=method, include_raw=True).invoke("Weather in JSON?")
        assert found["raw"].content.lstrip().startswith("{")
        return
    assert isinstance(chat.with_structured_output(Weather, **named).invoke("Weather?"), Weather)


def test_a_strict_form_is_streamed(chat):
    *_, last = chat.with_structured_output(Weather, method="json_schema", strict=True).stream("Weather?")
    assert isinstance(last, Weather)


def test_async_calls_are_the_same(chat):
    async def asked():
        whole = await chat.ainvoke("Say hello.")
        pieces = [chunk.content async for chunk in chat.astream("Say hello.")]
        return whole.content, "".join(pieces), await chat.abatch(["Say hello."] * 2)

    whole, streamed, batch = asyncio.run(asked())
    assert whole == streamed == chat.invoke("Say hello.").content and all(one.content for one in batch)


def test_a_stream_reports_its_usage(chat):
    whole, joined = chat.invoke("Say hello."), None
    for chunk in chat.stream("Say hello.", stream_usage=True):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None and joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_logprobs(chat):
    reported = chat.bind(logprobs=True, top_logprobs=2, max_tokens=4).invoke("Say hello.").response_metadata["logprobs"]
    assert len(reported["content"]) == 4 and all(len(token["top_logprobs"]) == 2 for token in reported["content"])


def test_vectors(vectors):
    options = {"base_url": f"{vectors.url}/v1", "api_key": "none", "model": "any"}
    embeddings = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    one, other = embeddings.embed_documents(["a river", "a stone"])
    assert len(one) == len(other) == 64 and one != other and embeddings.embed_query("a river") == one
    assert asyncio.run(embeddings.aembed_query("a river")) == one


def test_it_retries_where_the_queue_is_full(full):
    chat = langchain.ChatOpenAI(base_url=f"{full.url}/v1", api_key="none", model="any", max_tokens=4, max_retries=20)
    assert chat.invoke("Say hello.").usage_metadata["output_tokens"]


def test_bound_tools_are_called_and_answered(chat):
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("What is the weather?")
    (call,) = answer.tool_calls
    assert call["name"] == "Weather" and call["args"]["days"] in ("one", "two")
    streamed = None
    for chunk in bound.stream("What is the weather?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"] == call["args"]
    result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
    assert chat.bind(max_tokens=4).invoke([{"role": "user", "content": "What is the weather?"}, answer, result]) is not None


def test_text_completions(options):
    text = langchain.OpenAI(**options, max_tokens=8)
    assert text.invoke("Once upon") and len(text.generate(["Once", "Twice"]).generations) == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_responses(options, keeps):
    chat = langchain.ChatOpenAI(**options, max_tokens=200, use_responses_api=True, use_previous_response_id=keeps)
    first = chat.invoke("Say hello.")
    assert first.text and first.response_metadata["id"].startswith("resp_")
    assert "".join(chunk.text for chunk in chat.stream("Say hello.")) == first.text
    history = [{"role": "user", "content": "Say hello."}, first, {"role": "user", "content": "And?"}]
    assert chat.invoke(history).text is not None
    assert isinstance(chat.with_structured_output(Weather).invoke("Weather?"), Weather)
    assert chat.bind_tools([Weather], tool_choice="any").invoke("Weather?").tool_calls
