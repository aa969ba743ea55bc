"""The dialects of Responses, Messages and Ollama on answers with reasoning and calls, read by a model family's reader."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from slotcache.server.api.chat import ChatReply
from slotcache.server.api.messages import MessagesReply, MessagesRequest
from slotcache.server.api.ollama import OllamaReply
from slotcache.server.api.reply import ResponseMeta, WholeAnswer, sse_event, unseal
from slotcache.server.api.response_items import take_items
from slotcache.server.api.responses import Output, ResponsesReply
from slotcache.server.chat.body import ChatRequest
from slotcache.server.chat.decode import decode
from slotcache.server.engine.generation import Delta, End
from slotcache.server.engine.usage import Report
from slotcache.server.formats.answer import Plain
from slotcache.server.formats.families import THINK, detect
from slotcache.server.formats.json_text import parameter_types

HERMES = detect(f"<tool_call> {THINK.starts[0]}")
CALLS = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "x"]}}\n</tool_call>'
TEXT = f"<think>\nLet me see.\n</think>\n\nI will look.\n{CALLS}\n{CALLS}"


def reader():
    return HERMES.reader({"look": parameter_types({"properties": {"at": {"type": "array"}}})}, seed="0")


def ended(reason="stop", stop=None) -> End:
    report = Report(
        slot=0, source="none", num_prompt=20, num_cached=8, num_generated=len(TEXT), stop=stop, documents=[], repeated=(),
        miss=None, queue_time=0.0, prompt_time=1.0, generation_time=1.0, num_preempted=0,
    )  # fmt: skip
    return End("", reason, report)


def envelope(caches=False):
    return ResponseMeta(
        id="resp_0",
        model="m",
        fingerprint="f",
        options=ChatRequest(messages=[], max_tokens=1000),
        reader=reader,
        caches=caches,
        created=5,
    )


def responses(kept=None, **changed: Any):
    output = Output("0", summarises=changed.pop("summarises", False), seals=changed.pop("seals", False))
    meta = replace(envelope(caches=True), keep=(kept if kept is not None else []).append)
    return ResponsesReply(meta, {}, output)


def messages(shows_reasoning=True):
    return MessagesReply(envelope(), 20, shows_reasoning)


def streamed(dialect, size, text=TEXT, end=None):
    """The events of an answer that comes in pieces of `size` characters, a token for each character."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    sent = dialect.begin()
    for piece in pieces:
        sent += dialect.delta(0, Delta(piece, (0,) * len(piece)))
    sent += dialect.end(0, end or ended()) + dialect.close([end or ended()])
    found = [event.decode().strip().split("\n") for event in sent]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in found)
    return [json.loads(data[6:]) for _, data in found]


def whole(dialect, text=TEXT, end=None) -> Any:
    answer = WholeAnswer(tuple(Delta(letter, (0,)) for letter in text), end or ended())
    return json.loads(json.dumps(dialect.whole([answer])))


def without_ids(value: Any) -> Any:
    """A value without the ids of calls, which each reader makes anew."""
    if isinstance(value, dict):
        return {name: without_ids(inner) for name, inner in value.items() if name not in ("call_id", "completed_at")}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", ["word", 'He said "é\n\u2028"', "\x00\\ </s>"])
def test_a_chunk_of_nothing_but_text_has_the_bytes_of_any_other(text):
    choices = SimpleNamespace(num_echoed=0), SimpleNamespace(num_echoed=0)
    made = replace(envelope(), reader=Plain, generations=choices)
    reply = ChatReply(made)
    for index in range(2):
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        assert reply.delta(index, Delta(text, (1,))) == [
            sse_event(made.head("chat.completion.chunk") | {"choices": [choice]})
        ]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("summarises", [False, True])
def test_items_of_a_response(size, summarises):
    kept: list[bytes] = []
    found = streamed(responses(kept, summarises=summarises, seals=True), size)
    response = found[-1]["response"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert without_ids(response) == without_ids(whole(responses(summarises=summarises, seals=True)))
    assert json.loads(kept[0]) == response and response["status"] == "completed"
    reasoning, said, *calls = response["output"]
    part = {"type": "summary_text" if summarises else "reasoning_text", "text": "Let me see."}
    assert (
        reasoning["summary" if summarises else "content"] == [part] and not reasoning["content" if summarises else "summary"]
    )
    assert unseal(reasoning["encrypted_content"]) == "Let me see."
    assert said["content"][0]["text"] == "I will look."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("look", {"at": [1, "x"]})] * 2
    assert len({call["call_id"] for call in calls}) == len({item["id"] for item in response["output"]}) - 2 == 2
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 8, "cache_write_tokens": 12}
    (back,) = take_items(response["output"]).messages
    assert back["content"] == "I will look." and back["reasoning_content"] == "Let me see." and len(back["tool_calls"]) == 2


def test_each_item_is_added_filled_and_done():
    found = streamed(responses(), 4)
    for at, item in enumerate(found[-1]["response"]["output"]):
        of_item = [event for event in found if event.get("output_index") == at]
        first, *_, last = of_item
        assert first["type"] == "response.output_item.added" and first["item"]["status"] == "in_progress"
        assert last["type"] == "response.output_item.done" and last["item"] == item and item["status"] == "completed"
        assert {event["item_id"] for event in of_item[1:-1]} == {item["id"]}
        deltas = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        (done,) = (event for event in of_item if event["type"].endswith(("text.done", "arguments.done")))
        assert done.get("text", done.get("arguments")) == deltas != ""


def test_an_answer_that_is_cut_off_is_incomplete():
    cut = TEXT[: TEXT.index('"x"')]
    response = streamed(responses(), 5, cut, ended("length"))[-1]["response"]
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete" and response["output"][0]["status"] == "completed"


def test_an_empty_answer_has_an_empty_message():
    response = whole(responses(), "")
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    message = whole(messages(), "")
    assert message["content"] == [{"type": "text", "text": ""}] and message["stop_reason"] == "end_turn"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_blocks_of_a_message(size, shows_reasoning):
    found = streamed(messages(shows_reasoning), size)
    blocks: list[Any] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({name: value or "" for name, value in event["content_block"].items()})
        if event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            _, (name, text) = event["delta"].items()
            blocks[-1]["input" if name == "partial_json" else name] += text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    message = whole(messages(shows_reasoning))
    assert [without_tool_ids(block) for block in blocks] == [without_tool_ids(block) for block in message["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == ("Let me see." if shows_reasoning else "")
    assert unseal(blocks[0]["signature"]) == ("" if shows_reasoning else "Let me see.")
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    sent = [{"role": "user", "content": "?"}, {"role": "assistant", "content": message["content"]}]
    back = decode(json.dumps({"max_tokens": 5, "messages": sent}).encode(), MessagesRequest).chat().messages[-1]
    assert back["content"] == "I will look." and back["reasoning_content"] == "Let me see." and len(back["tool_calls"]) == 2


def without_tool_ids(block):
    return {name: value for name, value in block.items() if name != "id"}


@pytest.mark.parametrize("at", ['"x"', '{"at"', '[1, "x"]}}', "]}}", "}}"])
def test_a_call_that_is_cut_is_no_call_without_arguments(at):
    """Its arguments would look whole. The stream has what came of them; the reason says why there is no more."""
    cut, end = TEXT[: TEXT.rindex(at)], ended("length")
    message = whole(messages(), cut, end)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][-1]["input"] == {"at": [1, "x"]}
    assert message["stop_reason"] == "model_context_window_exceeded"
    only = CALLS[: CALLS.rindex(at)]
    assert whole(messages(), only, end)["content"] == [{"type": "text", "text": ""}]
    assert whole(messages(), only)["stop_reason"] == "end_turn"
    for size in (1, 5, 1000):
        found, last = lines(size, cut, end)
        (call,) = [call for message in found for call in message.get("tool_calls", ())]
        assert call["function"]["arguments"] == {"at": [1, "x"]} and last["done_reason"] == "length"
    said = whole(OllamaReply(envelope(), 0.0, has_message=True), cut, end)
    assert len(said["message"]["tool_calls"]) == 1 and said["done_reason"] == "length"


# ---- Ollama's lines ---------------------------------------------------------------------------------------------------


def lines(size, text=TEXT, end=None):
    """The messages of a stream whose text comes in pieces of `size` characters, and its last line."""
    reply = OllamaReply(envelope(), 0.0, has_message=True)
    sent = reply.begin()
    for at in range(0, len(text), size):
        sent += reply.delta(0, Delta(text[at : at + size]))
    found = [json.loads(line) for line in [*sent, *reply.end(0, end or ended()), *reply.close([end or ended()])]]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return [line["message"] for line in found], found[-1]


def joined_of(messages, field):
    return "".join(message.get(field, "") for message in messages)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_of_ollama(size):
    found, last = lines(size)
    one = whole(OllamaReply(envelope(), 0.0, has_message=True))
    said = one["message"]
    assert (said["content"], said["thinking"]) == ("I will look.", "Let me see.")
    assert (joined_of(found, "content"), joined_of(found, "thinking")) == (said["content"], said["thinking"])
    calls = [call for message in found for call in message.get("tool_calls", ())]
    assert len({call["id"] for call in calls}) == 2
    functions = [call["function"] for call in calls]
    assert functions == [call["function"] for call in said["tool_calls"]]
    assert functions == [{"index": at, "name": "look", "arguments": {"at": [1, "x"]}} for at in range(2)]
    assert [len(message.get("tool_calls", ())) for message in found if "tool_calls" in message] == [1, 1]
    kept = ("done_reason", "prompt_eval_count", "eval_count", "prompt_eval_duration", "eval_duration", "load_duration")
    assert [last[name] for name in kept] == [one[name] for name in kept] == ["stop", 20, len(TEXT), 10**9, 10**9, 0]
