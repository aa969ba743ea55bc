"""`/v1/responses` with the real client over a real port."""

import threading
from typing import Any

import openai
import pytest
from slotcache.server.api import endpoint
from support.dialects import RESPONSES
from support.weather import Weather

from server.chat.test_conversations import documents, user
from server.conftest import REST, running

FIELDS: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
USUAL: Any = {"input": "Hi", "ignore_eos": True} | FIELDS


def make(server, given: Any = "Tell me of the town.", scope="", **fields):
    """A response through the real client; greedy unless told otherwise."""
    extra = {"ignore_eos": True, "cache_scope": scope} | fields.pop("extra", {})
    return server.openai.responses.create(input=given, extra_body=extra, **FIELDS | fields)


def events(server, **body):
    """The events of a streamed response, decoded, as they stand on the wire."""
    return RESPONSES.events_of(server.http.post("/v1/responses", json=USUAL | {"stream": True} | body))


def test_a_response_is_what_the_client_expects(server):
    answer = make(server, instructions="Be brief.", metadata={"a": "b"}, top_logprobs=0, extra={"cache_prompt": True})
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    (message,) = answer.output
    assert message.id.startswith("msg_") and message.role == "assistant" and message.content[0].text == answer.output_text
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"} and answer.store is True
    assert answer.usage.output_tokens == 12 and answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.input_tokens_details.cache_write_tokens == answer.usage.input_tokens
    chat = server.chat(messages=[{"role": "system", "content": "Be brief."}, user("Tell me of the town.")], max_tokens=12)
    assert chat["choices"][0]["message"]["content"] == answer.output_text
    assert chat["slotcache"]["cached_tokens"] == answer.usage.input_tokens - REST


@pytest.mark.parametrize("given", ["Hi", [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]])
def test_a_stream_ends_with_the_whole_response(server, given):
    last = events(server, input=given)[-1]["response"]
    whole = server.http.post("/v1/responses", json=USUAL | {"input": given}).json()
    for response in (whole, last):
        for name in ("id", "created_at", "completed_at", "timings", "slotcache"):
            del response[name]
        del response["output"][0]["id"]
    assert whole == last


def test_progress_of_a_long_prompt_stands_between_created_and_the_text(server):
    found = events(server, input="word " * 2000, return_progress=True, timings_per_token=True, mistaken=1)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert deltas and all("predicted_per_second" in event["timings"] for event in deltas)
    assert "mistaken" in found[-1]["response"]["warnings"][0]
    reported = [event for event in found if "prompt_progress" in event]
    assert reported and all(event["type"] == "response.in_progress" for event in reported)
    assert [event["type"] for event in found].count("response.created") == 1 and found[0]["type"] == "response.created"


def test_the_next_response_goes_on_from_the_one_before(server):
    scope = "previous"
    first = make(server, "One?", scope, instructions="Sing.")
    second = make(server, "Two?", scope, instructions="Sing.", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = make(server, "Three?", scope, instructions="Whisper.", previous_response_id=second.id)
    assert third.usage.input_tokens_details.cached_tokens < 20
    plain = make(server, "Three?", scope, previous_response_id=second.id)
    said = [user("One?"), ("assistant", first), user("Two?"), ("assistant", second), user("Three?")]
    messages = [
        {"role": one[0], "content": one[1].output_text} if isinstance(one, tuple) else one for one in said
    ]  # fmt: skip
    for answer, instructions in ((third, "Whisper."), (plain, None)):
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        chat = server.chat(messages=[*system, *messages], max_tokens=12, cache_prompt=False)
        assert chat["choices"][0]["message"]["content"] == answer.output_text
        assert chat["usage"]["prompt_tokens"] == answer.usage.input_tokens
    again = make(server, "Two?", scope, instructions="Sing.", previous_response_id=first.id)
    assert again.usage.input_tokens_details.cached_tokens == second.usage.input_tokens - REST
    fourth = make(server, "Three?", scope, instructions="Sing.", previous_response_id=second.id)
    assert fourth.usage.input_tokens_details.cached_tokens == second.usage.total_tokens - 1


def test_answers_among_the_input_are_new_messages(server):
    """A chat would take such a list for the whole history."""
    scope = "new"
    first = make(server, "One?", scope)
    items = [{"role": "assistant", "content": "Aside."}, {"role": "user", "content": "Two?"}]
    second = make(server, items, scope, previous_response_id=first.id)
    messages = [user("One?"), {"role": "assistant", "content": first.output_text}, items[0], user("Two?")]
    chat = server.chat(messages=messages, max_tokens=12, cache_prompt=False)
    assert chat["usage"]["prompt_tokens"] == second.usage.input_tokens


def test_a_stored_response_is_shown_listed_and_deleted(server):
    scope = {"scope": "shown"}
    first = make(server, "One?", "shown", instructions="Sing.", extra={"documents": documents(0, 1)})
    second = make(server, "Two?", "shown", previous_response_id=first.id)
    shown = server.openai.responses.retrieve(second.id, extra_query=scope)
    assert shown.to_dict() == second.to_dict()
    items = list(server.openai.responses.input_items.list(second.id, order="asc", limit=2, extra_query=scope))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].content[0].text == first.output_text and len({item.id for item in items}) == 3
    newest = server.http.get(f"/v1/responses/{second.id}/input_items", params=scope | {"limit": "1"}).json()
    assert newest["data"][0]["content"][0]["text"] == "Two?" and newest["has_more"] is True
    for wrong in ({"limit": "0"}, {"limit": "٣"}, {"order": "up"}, {"after": "x"}):
        answer = server.http.get(f"/v1/responses/{second.id}/input_items", params=scope | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(second.id)
    server.openai.responses.delete(first.id, extra_query=scope)
    for act in (server.openai.responses.retrieve, server.openai.responses.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            act(first.id, extra_query=scope)
        assert refused.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        make(server, "And?", "shown", previous_response_id=first.id)
    assert make(server, "And?", "shown", previous_response_id=second.id).usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        server.openai.responses.cancel(second.id)


def test_a_long_response_is_stored_where_all_others_are(server, monkeypatch):
    """It is made in a thread, and conversations are the event loop's."""
    store, threads = server.service.conversations, list[threading.Thread]()
    attach = store.attach

    def noted(*given):
        threads.append(threading.current_thread())
        attach(*given)

    monkeypatch.setattr(endpoint, "LONG", 1)
    monkeypatch.setattr(store, "attach", noted)
    answer = make(server)
    assert threads == [server.thread]
    assert server.openai.responses.retrieve(answer.id).to_dict() == answer.to_dict()


def test_what_is_not_to_be_stored_is_not(server):
    answer = make(server, "Mine?", store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        make(server, "And?", previous_response_id=answer.id)


def test_a_conversation_takes_the_input_as_new(server):
    first = make(server, "One?", "named", conversation="c")
    items = [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "Two?"}]
    second = make(server, items, "named", conversation="c")
    assert second.conversation.id == "c" and second.slotcache["conversation"]["messages"] == 4
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    shown = server.http.get("/v1/conversations/c", params={"scope": "named"}).json()
    assert shown["response_ids"] == [first.id, second.id]


def test_responses_have_documents(server):
    answer = make(server, "What is it?", "documents", extra={"documents": documents(1, 0)})
    assert [document["id"] for document in answer.slotcache["documents"]] == ["d1", "d0"]
    item = {"role": "user", "content": "What is it?", "documents": documents(1, 0)}
    again = make(server, [item], "documents")
    assert again.usage.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "Tell me."}),
        ("/responses/input_tokens", {"input": [{"role": "user", "content": "Tell me."}]}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Tell me."}]}),
        ("/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Tell me."}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Tell me."}]}),
    ],
)
def test_prompts_are_counted_exactly(server, path, body):
    extra = {"documents": documents(0, 1, 2), "order_hint": True, "cache_scope": "counted"}
    server.chat("What?", documents=documents(2, 1, 0), cache_scope="counted")  # the cached order needs a hint
    for more in ({}, extra):
        counted = server.http.post(path, json=body | more)
        assert counted.status_code == 200, counted.text
        real = server.chat("Tell me.", cache_prompt=bool(more), **more)["usage"]["prompt_tokens"]
        assert counted.json()["input_tokens"] == real
    server.http.post(path, json=body | {"cache_scope": "uncomputed", "cache_prompt": True})
    assert server.http.get("/v1/cache", params={"scope": "uncomputed"}).json()["runs"] == []


TOOL: Any = {"type": "function", "name": "get_weather", "parameters": Weather.model_json_schema(), "strict": True}


def test_an_answer_is_parsed(server):
    answer = server.openai.responses.parse(model="tiny", input="Weather?", text_format=Weather, temperature=0)
    assert isinstance(answer.output_parsed, Weather) and answer.status == "completed"
    with server.openai.responses.stream(model="tiny", input="Weather?", text_format=Weather, temperature=0) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == answer.output_parsed


@pytest.mark.parametrize("keeps", [True, False])
def test_tools_are_called_and_their_results_answered(server, keeps):
    """The call's id is the same in the answer, in its stream and in the stored conversation."""
    scope = {"scope": f"tools {keeps}"}
    fields: Any = {"model": "tiny", "tools": [TOOL], "parallel_tool_calls": False, "temperature": 0}
    fields["extra_body"] = {"cache_scope": scope["scope"]}
    question = {"role": "user", "content": "What is the weather?"}
    with server.openai.responses.stream(**fields, input=[question], tool_choice="required", prompt_cache_key="k") as stream:
        stream.until_done()
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather" and Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    if keeps:
        second = server.openai.responses.create(**fields, input=[result], previous_response_id=first.id, max_output_tokens=4)
        items = server.openai.responses.input_items.list(second.id, order="asc", extra_query=scope).data
        assert [getattr(item, "call_id", call.call_id) for item in items] == [call.call_id] * len(items)
    else:
        history = [question, *first.to_dict()["output"], result]
        second = server.openai.responses.create(**fields, input=history, max_output_tokens=4, prompt_cache_key="k")
    # The call itself was sampled, so it is cached; how the model ended it may differ from what the template writes.
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
    assert second.usage.output_tokens == 4 or second.status == "completed"


def test_a_response_and_its_kv_outlive_a_restart(tiny, tmp_path):
    answers = {}
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        with running(tiny, cache_dir=str(folder)) as server:
            fields: Any = {"scope": "mine", "prompt_cache_key": "k", "temperature": 2.0}
            first = make(server, "One?", extra={"documents": documents(0, 1), "seed": 1}, **fields)
            if not restarts:
                answers[False] = make(server, "Two?", "mine", previous_response_id=first.id)
        if restarts:
            with running(tiny, cache_dir=str(folder)) as server:
                shown = server.openai.responses.retrieve(first.id, extra_query={"scope": "mine"})
                assert shown.to_dict() == first.to_dict()
                answers[True] = make(server, "Two?", "mine", previous_response_id=first.id)
                cached = answers[True].usage.input_tokens_details.cached_tokens
                assert cached == first.usage.total_tokens - 1 and answers[True].slotcache["source"] == "disk"
    assert answers[True].output_text == answers[False].output_text
