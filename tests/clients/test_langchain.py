"""LangChain's OpenAI classes, with their defaults."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

langchain: Any = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)
    days: Literal["one", "two"]


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
    assert [answer.content for answer in chat.batch(["Say hello."] * 3)] == [whole.content] * 3


@pytest.mark.parametrize("method", [None, "json_schema", "function_calling"])
def test_structured_output(chat, method):
    named = {} if method is None else {"method": method}
    assert isinstance(chat.with_structured_output(Weather, **named).invoke("Weather?"), Weather)


def test_bound_tools_are_called_and_answered(chat):
    bound = chat.bind_tools([Weather], tool_choice="any")
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
