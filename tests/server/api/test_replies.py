"""The answers of each API with reasoning and calls, read by a model family's reader."""

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
from slotcache.server.chat.body import ChatRequest, StreamOptions
from slotcache.server.chat.decode import decode
from slotcache.server.engine.generation import Delta, End
from slotcache.server.engine.usage import Report
from slotcache.server.formats.answer import Plain
from slotcache.server.formats.families import THINK, detect
from slotcache.server.formats.json_text import parameter_types
from support.dialects import CHAT, GENERATE, MESSAGES, OLLAMA, RESPONSES, Dialect

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


def envelope(id="resp_0", **changed: Any):
    choices: Any = (SimpleNamespace(num_echoed=0),)
    options = ChatRequest(messages=[], max_tokens=1000, stream_options=StreamOptions(include_usage=True))
    meta = ResponseMeta(id=id, model="m", fingerprint="f", options=options, generations=choices, reader=reader, created=5)
    return replace(meta, **changed)


def responses(kept=None, *, summarises=False, seals=False):
    meta = envelope(caches=True, keep=(kept if kept is not None else []).append)
    return ResponsesReply(meta, {}, Output("0", summarises=summarises, seals=seals))


def messages(shows_reasoning=True):
    return MessagesReply(envelope("msg_0"), 20, shows_reasoning)


def ollama(has_message=True):
    return OllamaReply(envelope(), 0.0, has_message=has_message)


REPLIES: dict[Dialect, Any] = {
    CHAT: lambda: ChatReply(envelope()),
    MESSAGES: messages,
    RESPONSES: responses,
    OLLAMA: ollama,
    GENERATE: lambda: ollama(has_message=False),
}
every = pytest.mark.parametrize("api", REPLIES, ids=str)


def streamed(api, reply, size, text=TEXT, end=None):
    """The events of an answer that comes in pieces of `size` characters, a token for each character."""
    pieces, end = [text[at : at + size] for at in range(0, len(text), size)], end or ended()
    sent = reply.begin()
    for piece in pieces:
        sent += reply.delta(0, Delta(piece, (0,) * len(piece)))
    sent += reply.end(0, end) + reply.close([end])
    return [*api.events(b"".join(sent).decode().split("\n"))]


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
    made = envelope(reader=Plain, generations=[SimpleNamespace(num_echoed=0)] * 2)
    reply = ChatReply(made)
    for index in range(2):
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        assert reply.delta(index, Delta(text, (1,))) == [
            sse_event(made.head("chat.completion.chunk") | {"choices": [choice]})
        ]


@pytest.mark.parametrize("size", [1, 3, 1000])
@every
def test_reasoning_text_and_calls_are_told_apart(api, size):
    said = api.read(whole(REPLIES[api]()))
    assert (said.thought, said.text, said.reason) == ("Let me see.", "I will look.", "calls")
    assert said.calls == (("look", {"at": [1, "x"]}),) * 2
    assert (said.num_prompt, said.num_cached, said.num_generated) == (20, 8, len(TEXT))
    assert api.join(streamed(api, REPLIES[api](), size)) == said


@every
def test_an_empty_answer_has_an_empty_text(api):
    said = api.read(whole(REPLIES[api](), ""))
    assert (said.text, said.thought, said.calls, said.reason) == ("", "", (), "stop")
    assert api.join(streamed(api, REPLIES[api](), 1, "")) == said
    if api is MESSAGES:
        assert whole(messages(), "")["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("summarises", [False, True])
def test_items_of_a_response(size, summarises):
    kept: list[bytes] = []
    found = streamed(RESPONSES, responses(kept, summarises=summarises, seals=True), size)
    response = found[-1]["response"]
    assert RESPONSES.join(found) == RESPONSES.read(response) and json.loads(kept[0]) == response
    assert without_ids(response) == without_ids(whole(responses(summarises=summarises, seals=True)))
    reasoning, _, *calls = response["output"]
    part = {"type": "summary_text" if summarises else "reasoning_text", "text": "Let me see."}
    named, other = ("summary", "content") if summarises else ("content", "summary")
    assert reasoning[named] == [part] and not reasoning[other]
    assert unseal(reasoning["encrypted_content"]) == "Let me see."
    assert len({call["call_id"] for call in calls}) == len({item["id"] for item in response["output"]}) - 2 == 2
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 8, "cache_write_tokens": 12}
    (back,) = take_items(response["output"]).messages
    assert back["content"] == "I will look." and back["reasoning_content"] == "Let me see." and len(back["tool_calls"]) == 2


def test_an_answer_that_is_cut_off_is_incomplete():
    cut = TEXT[: TEXT.index('"x"')]
    response = streamed(RESPONSES, responses(), 5, cut, ended("length"))[-1]["response"]
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete" and response["output"][0]["status"] == "completed"


@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_blocks_of_a_message(shows_reasoning):
    blocks = whole(messages(shows_reasoning))["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == ("Let me see." if shows_reasoning else "")
    assert unseal(blocks[0]["signature"]) == ("" if shows_reasoning else "Let me see.")
    found = streamed(MESSAGES, messages(shows_reasoning), 3)
    assert MESSAGES.join(found) == MESSAGES.read(whole(messages(shows_reasoning)))
    signatures = [event["delta"].get("signature") for event in found if event["type"] == "content_block_delta"]
    assert [one for one in signatures if one is not None] == [blocks[0]["signature"]]
    sent = [{"role": "user", "content": "?"}, {"role": "assistant", "content": blocks}]
    back = decode(json.dumps({"max_tokens": 5, "messages": sent}).encode(), MessagesRequest).chat().messages[-1]
    assert back["content"] == "I will look." and back["reasoning_content"] == "Let me see." and len(back["tool_calls"]) == 2


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
        said = OLLAMA.join(streamed(OLLAMA, ollama(), size, cut, end))
        assert said.calls == (("look", {"at": [1, "x"]}),) and said.reason == "length"
        assert said == OLLAMA.read(whole(ollama(), cut, end))


def test_each_line_of_ollama_has_one_whole_call():
    *found, last = streamed(OLLAMA, ollama(), 3)
    calls = [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]]
    assert [[call["function"]["index"] for call in some] for some in calls] == [[0], [1]]
    assert len({call["id"] for some in calls for call in some}) == 2
    times = [last[f"{part}_duration"] for part in ("prompt_eval", "eval", "load")]
    assert times == [10**9, 10**9, 0] and last["done_reason"] == "stop"
