"""LlamaIndex's client for servers like OpenAI's."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

like: Any = pytest.importorskip("llama_index.llms.openai_like")
core: Any = pytest.importorskip("llama_index.core")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)
    days: Literal["one", "two"]


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


def test_tools_are_called(model):
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Get the weather of a city."""
        return city

    tool = core.tools.FunctionTool.from_defaults(fn=weather)
    answer = model.chat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Oslo", "Rome")


def test_structured_output(model):
    assert isinstance(model.as_structured_llm(Weather).chat(hello()).raw, Weather)
