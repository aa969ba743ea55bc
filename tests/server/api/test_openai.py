"""OpenAI's own client: what it does beside the plain calls that all tests make with it."""

import asyncio
import threading
from typing import Any

import httpx
import openai
import pytest
from support.weather import Weather

from ..conftest import blocked, running, until

HELLO: Any = [{"role": "user", "content": "Say hello."}]
USUAL: Any = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8}
LONG: Any = USUAL | {"max_tokens": 500, "extra_body": {"ignore_eos": True}}


def test_answers_of_an_async_client_are_the_same(server):
    async def asked():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            wholes = await asyncio.gather(*(client.chat.completions.create(**USUAL) for _ in range(4)))
            stream = await client.chat.completions.create(**USUAL, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            parsed = await client.chat.completions.parse(**USUAL | {"max_tokens": 200}, response_format=Weather)
            async with client.responses.stream(model="tiny", input="Say hello.", max_output_tokens=8) as events:
                kinds = [event.type async for event in events]
            text = await client.completions.create(model="tiny", prompt="Once", max_tokens=4, temperature=0)
            models = [model.id async for model in client.models.list()]
        return wholes, chunks, parsed, kinds, text, models

    wholes, chunks, parsed, kinds, text, models = asyncio.run(asked())
    whole = server.openai.chat.completions.create(**USUAL)
    assert {one.choices[0].message.content for one in wholes} == {whole.choices[0].message.content}
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert text.choices[0].text == server.openai.completions.create(**ONCE).choices[0].text and models == ["tiny"]


ONCE: Any = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}


def test_an_async_stream_that_is_closed_early_frees_its_slot(server):
    async def left():
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
            await client.chat.completions.create(**LONG, stream=True) as stream,
        ):
            async for _ in stream:
                break

    asyncio.run(left())
    until(lambda: not server.service.open)


def test_an_answer_is_parsed_whole_and_from_its_stream(server):
    fields = USUAL | {"max_tokens": 200}
    whole = server.openai.chat.completions.parse(**fields, response_format=Weather).choices[0].message
    with server.openai.chat.completions.stream(**fields, response_format=Weather) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert isinstance(whole.parsed, Weather) and final.parsed == whole.parsed and final.content == whole.content
    assert {"content.delta", "content.done"} <= set(events)


def test_a_parsed_answer_that_is_cut_off_says_so(server):
    with pytest.raises(openai.LengthFinishReasonError):
        server.openai.chat.completions.parse(**USUAL | {"max_tokens": 2}, response_format=Weather)


def test_a_parsed_call_and_its_result(server):
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    fields = USUAL | {"max_tokens": 200, "tools": tools, "parallel_tool_calls": False}
    whole = server.openai.chat.completions.parse(**fields, tool_choice="required").choices[0].message
    with server.openai.chat.completions.stream(**fields, tool_choice="required") as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    (call,), (streamed,) = whole.tool_calls, final.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.done" in events
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    history = [*HELLO, whole.model_dump(exclude_none=True), result]
    answer = server.openai.chat.completions.create(**fields | {"messages": history, "max_tokens": 4})
    assert answer.usage.prompt_tokens > 20 and answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_several_turns_see_all_that_was_said(server):
    messages, counts = list(HELLO), []
    for turn in range(3):
        answer = server.openai.chat.completions.create(**USUAL | {"messages": messages})
        messages += [answer.choices[0].message, {"role": "user", "content": f"And {turn}?"}]
        counts.append(answer.usage.prompt_tokens)
    assert counts == sorted(set(counts))


def test_raw_responses_report_the_id_of_the_request(server):
    raw = server.openai.chat.completions.with_raw_response.create(**USUAL)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]


@pytest.mark.parametrize(
    ("raised", "act"),
    [
        (openai.BadRequestError, lambda client: client.chat.completions.create(**USUAL | {"messages": []})),
        (openai.BadRequestError, lambda client: client.responses.create(model="tiny", input="Hi", background=True)),
        (openai.NotFoundError, lambda client: client.models.retrieve("unknown")),
        (openai.NotFoundError, lambda client: client.responses.retrieve("resp_unknown")),
        (openai.NotFoundError, lambda client: client.get("/nothing", cast_to=object)),
        (openai.InternalServerError, lambda client: client.embeddings.create(model="tiny", input="a")),
    ],
)
def test_errors_have_their_classes(server, raised, act):
    with pytest.raises(raised) as error:
        act(server.openai.with_options(max_retries=0))
    assert error.value.body["message"] and error.value.type and error.value.request_id


def test_keys_and_hosts_have_theirs(tiny):
    with running(tiny, api_key="secret") as up:
        with pytest.raises(openai.AuthenticationError) as error:
            up.openai.chat.completions.create(**USUAL)
        assert error.value.status_code == 401
        with pytest.raises(openai.PermissionDeniedError):
            up.openai.with_options(api_key="secret").models.list(extra_headers={"Host": "elsewhere.example"})
        assert up.openai.with_options(api_key="secret").chat.completions.create(**USUAL).choices


def test_a_full_queue_is_a_rate_limit_and_a_client_that_retries_gets_its_answer(tiny):
    with running(tiny, parallel=1, max_queue=1) as up:
        first, second = (threading.Thread(target=lambda: up.openai.chat.completions.create(**LONG)) for _ in range(2))
        with blocked(up):
            first.start()
            second.start()
            until(lambda: len(up.service.open) == 2)
            with pytest.raises(openai.RateLimitError) as error:
                up.openai.with_options(max_retries=0).chat.completions.create(**USUAL)
        assert error.value.status_code == 429 and int(error.value.response.headers["Retry-After"]) >= 1
        assert up.openai.with_options(max_retries=20).chat.completions.create(**USUAL).choices
        first.join()
        second.join()


def test_time_that_is_up_is_a_timeout(server):
    with pytest.raises(openai.APITimeoutError):
        server.openai.with_options(timeout=httpx.Timeout(5.0, read=0.01), max_retries=0).chat.completions.create(**LONG)
    until(lambda: not server.service.open)
