"""Ollama's client, and what Open WebUI sends to a server of Ollama."""

import asyncio
import json
from typing import Any

import pytest
from support.weather import Weather

ollama: Any = pytest.importorskip("ollama")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client about itself

HELLO: Any = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0, "num_predict": 200}


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
    """
    return f"It rains in {city}."


@pytest.fixture(scope="module")
def client(served):
    return ollama.Client(host=served.url)


@pytest.fixture(scope="module")
def name(client):
    return client.list().models[0].model


def test_a_chat_and_its_stream(client, name):
    whole = client.chat(name, HELLO, options=GREEDY)
    pieces = list(client.chat(name, HELLO, options=GREEDY, stream=True))
    assert whole.message.content and "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert whole.done_reason == pieces[-1].done_reason == "stop" and whole.model == name
    assert pieces[-1].eval_count == whole.eval_count > 0 and whole.prompt_eval_count > 0
    assert whole.total_duration >= whole.eval_duration > 0


def test_generate_and_its_stream(client, name):
    whole = client.generate(name, "Say hello.", system="Be brief.", options=GREEDY)
    pieces = list(client.generate(name, "Say hello.", system="Be brief.", options=GREEDY, stream=True))
    assert whole.response and "".join(piece.response for piece in pieces) == whole.response
    assert client.generate(name, "Once upon a", raw=True, options=GREEDY | {"num_predict": 4}).eval_count == 4


def test_every_option_of_the_package_is_known(client, name):
    options = ollama.Options(num_predict=1, num_ctx=2048, num_gpu=1, num_thread=2, stop=["x"])
    known = client.chat(name, HELLO, options=options)
    assert known.eval_count == 1 and getattr(known, "warnings", None) is None


@pytest.mark.parametrize("form", ["json", Weather.model_json_schema()], ids=["json", "schema"])
def test_an_answer_of_a_given_form(client, name, form):
    said = client.chat(name, HELLO, format=form, options=GREEDY).message.content
    if form == "json":  # any object: the model decides when it ends
        assert said.startswith("{")
    else:
        assert Weather.model_validate_json(said)


def test_tools_are_taken_as_functions_and_results_go_back(client, name):
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="get_weather", arguments={"city": "Oslo"}))
    said = ollama.Message(role="assistant", content="", tool_calls=[call])
    result = ollama.Message(role="tool", content=get_weather("Oslo"), tool_name="get_weather")
    for history in (HELLO, [*HELLO, said, result]):
        answer = client.chat(name, history, tools=[get_weather], options=GREEDY).message
        assert answer.content or answer.tool_calls


def test_calls_are_what_the_package_reads(served, name):
    """With a field that the package does not have, since only that demands a call."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
    asked = {"model": name, "messages": HELLO, "tools": [tool], "tool_choice": "required", "options": GREEDY}
    found = [json.loads(line) for line in served.http.post("/api/chat", json=asked).text.splitlines()]
    (call, *_) = [call for line in found for call in ollama.ChatResponse(**line).message.tool_calls or ()]
    assert call.function.name == "get_weather" and Weather.model_validate(call.function.arguments)


def test_thinking_is_taken(client, name):
    for think in (True, False, "low"):
        assert client.chat(name, HELLO, think=think, options=GREEDY).message.content is not None


def test_logprobs(client, name):
    reported = client.chat(name, HELLO, logprobs=True, top_logprobs=2, options=GREEDY | {"num_predict": 4}).logprobs
    assert len(reported) == 4 and all(len(token.top_logprobs) == 2 for token in reported)


def test_models(client, name):
    shown = client.show(name)
    assert {"completion", "tools"} <= set(shown.capabilities) and shown.details.format == "gguf"
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == 4096 and "num_ctx" in shown.parameters
    assert client.show(name.removesuffix(":latest")).details == shown.details
    (loaded,) = client.ps().models
    assert loaded.model == name and loaded.context_length == 4096 and loaded.size > 0
    assert client.pull(name).status == "success"


def test_models_are_loaded_and_unloaded(client, name):
    assert client.generate(name).done_reason == "load"
    assert client.generate(name, keep_alive=0).done_reason == "unload"


def test_errors_have_their_status(client, name):
    for act, status, says in (
        (lambda: client.chat("none", HELLO), 404, f"expected {name}"),
        (lambda: client.pull("none"), 404, "slotcache serve -m FILE"),
        (lambda: client.delete(name), 400, "slotcache serve -m FILE"),
        (lambda: client.chat(name, HELLO, options={"top_k": "many"}), 400, "options.top_k"),
        (lambda: client.embed(name, "a river"), 501, "--embedding-model FILE"),
        (lambda: list(client.chat("none", HELLO, stream=True)), 404, f"expected {name}"),
    ):
        with pytest.raises(ollama.ResponseError, match=says) as refused:
            act()
        assert refused.value.status_code == status


def test_vectors(vectors):
    client = ollama.Client(host=vectors.url)
    (model,) = [each.model for each in client.list().models]
    one, other = client.embed(model, ["a river", "a stone"]).embeddings
    assert len(one) == len(other) == 64 and one != other and sum(number * number for number in one) == pytest.approx(1)
    assert client.embed(model, "a river").embeddings == [one]
    assert len(client.embed(model, "a river", dimensions=8).embeddings[0]) == 8
    assert len(client.embeddings(model, "a river").embedding) == 64


def test_an_async_client(served, client, name):
    async def asked():
        one = ollama.AsyncClient(host=served.url)
        whole = await one.chat(name, HELLO, options=GREEDY)
        pieces = [piece.message.content async for piece in await one.chat(name, HELLO, options=GREEDY, stream=True)]
        return whole.message.content, "".join(pieces)

    whole, streamed = asyncio.run(asked())
    assert whole == streamed == client.chat(name, HELLO, options=GREEDY).message.content


def test_what_open_webui_sends(served):
    """In the order of a session: it verifies the connection, lists the models, chats, and writes a title.

    The bodies are those that its `routers/ollama.py` and `utils/payload.py` make of a chat with tools and parameters.
    """
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "A"}

    def post(path, **body):
        answer = served.http.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    assert served.http.get("/api/version", headers=headers).json()["version"]
    (model, *_) = served.http.get("/api/tags", headers=headers).json()["models"]
    (loaded,) = served.http.get("/api/ps", headers=headers).json()["models"]
    assert loaded["name"] == model["name"] == model["model"] and loaded["expires_at"]
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    options = {"temperature": 0.0, "num_ctx": 2048, "num_predict": 8, "top_k": 40, "stop": ["\n\n\n"], "num_gpu": 1}
    asked = {"model": model["model"], "messages": messages, "options": options, "think": False, "keep_alive": -1}
    *pieces, last = post("/api/chat", stream=True, **asked)
    assert pieces and last["done"] and 0 < last["eval_count"] <= 8 and "warnings" not in last
    assert all(isinstance(last[part], int) for part in ("total_duration", "load_duration", "eval_duration"))
    (title,) = post("/api/chat", stream=False, **asked | {"format": {"type": "object", "properties": {}}})
    assert title["message"]["role"] == "assistant" and title["done"]
    assert post("/api/generate", model=model["model"], prompt="Hello", stream=True, options=options)[-1]["done"]
    assert post("/api/show", name=model["model"])[0]["details"] == model["details"]


def test_what_open_webui_sends_for_vectors(vectors):
    (model,) = [each["model"] for each in vectors.http.get("/api/tags").json()["models"]]
    answer = vectors.http.post("/api/embed", json={"input": ["a river", "a stone"], "model": model, "truncate": True})
    assert len(answer.json()["embeddings"]) == 2
    body = {"model": model, "input": ["a river"], "prompt": "a river"}
    assert len(vectors.http.post("/api/embeddings", json=body).json()["embedding"]) == 64


# ---- LangChain's package for Ollama -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(served, name):
    langchain: Any = pytest.importorskip("langchain_ollama")
    return langchain.ChatOllama(base_url=served.url, model=name, temperature=0, num_predict=200, validate_model_on_init=True)


def test_langchain_invokes_and_streams(chat):
    whole = chat.invoke("Say hello.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0 and whole.response_metadata["done_reason"] == "stop"
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == whole.content
    assert asyncio.run(chat.ainvoke("Say hello.")).content == whole.content


def test_langchain_s_structured_output(chat):
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke("Weather?"), Weather)


def test_langchain_s_tools(chat):
    messages: Any = pytest.importorskip("langchain_core.messages")
    call = {"name": "get_weather", "args": {"city": "Oslo"}, "id": "c1"}
    said = messages.AIMessage("", tool_calls=[call])
    history = [messages.HumanMessage("What is the weather?"), said, messages.ToolMessage("Rain.", tool_call_id="c1")]
    answer = chat.bind_tools([get_weather]).invoke(history)
    assert answer.content or answer.tool_calls


def test_langchain_s_text_and_vectors(served, vectors, name):
    langchain: Any = pytest.importorskip("langchain_ollama")
    llm = langchain.OllamaLLM(base_url=served.url, model=name, temperature=0, num_predict=4)
    assert llm.invoke("Say hello.")
    model = ollama.Client(host=vectors.url).list().models[0].model
    embeddings = langchain.OllamaEmbeddings(base_url=vectors.url, model=model)
    one, other = embeddings.embed_documents(["a river", "a stone"])
    assert len(one) == len(other) == 64 and one != other and embeddings.embed_query("a river") == one
