"""Tool calls over a real port: required ones on random weights are valid, and streams equal whole answers.

SLOTCACHE_TOOLS says how many definitions: 12 in a few seconds, if it is not set.
"""

import json
import os

import jsonschema
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from support.schemas import random_schema

from ..conftest import running

TOOLS = int(os.environ.get("SLOTCACHE_TOOLS", "12"))
USER = [{"role": "user", "content": "What is the weather in Paris?"}]

# Templates of families that write calls in different ways, with the tags that their readers look for.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
FAMILIES = {
    "generic": "",
    "hermes": "<tool_call>",
    "closed thought": "<tool_call><think></think>",
    "mistral": "[TOOL_CALLS]",
    "qwen3-coder": "<tool_call><function=<parameter=",
    "gemma-4": "<|tool_call>call:",
}


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CLOSED = {"type": "object", "additionalProperties": False}
CITY = {**CLOSED, "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
WEATHER, TIME = tool("get_weather", CITY), tool("get_time", {**CLOSED, "properties": {}})


def joined(stream):
    """The message that the chunks of a stream make, and the reason of its end."""
    said, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for chunk in stream:
        for choice in chunk.choices:
            delta, reason = choice.delta.model_dump(), choice.finish_reason or reason
            said["content"] += delta["content"] or ""
            said["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta["tool_calls"] or []:
                if call["id"]:
                    assert call["index"] == len(said["tool_calls"])
                    said["tool_calls"].append([call["function"]["name"], ""])
                said["tool_calls"][call["index"]][1] += call["function"]["arguments"] or ""
    return said, reason


def whole(answer):
    message = answer.choices[0].message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    said = {"content": message.content or "", "reasoning_content": reasoning, "tool_calls": calls}
    return said, answer.choices[0].finish_reason


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tiny, tmp_path_factory):
    """A server of a random model whose template belongs to a family."""
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    end = "<think></think>" if "thought" in request.param else ""
    path.write_text(TEMPLATE + end + "{# " + FAMILIES[request.param] + " #}")
    with running(tiny, chat_template_file=str(path) if FAMILIES[request.param] else "") as up:
        yield up


def ask(up, **fields):
    return up.openai.chat.completions.create(model="any", messages=USER, **fields)


@pytest.mark.timeout(900 + 10 * TOOLS)
def test_required_calls_of_random_tools_end_by_themselves_and_are_valid(server):
    """Each stream is the whole answer in pieces, too."""
    ended = []
    for seed in range(TOOLS):
        tools = [tool(f"tool_{at}", random_schema(seed * 3 + at)) for at in range(1 + seed % 3)]
        fields = {"tools": tools, "tool_choice": "required", "max_tokens": 3000, "seed": seed}
        fields |= {"temperature": (0.0, 0.8, 1.5)[seed % 3], "parallel_tool_calls": seed % 2 == 0}
        answer = ask(server, **fields)
        said, reason = whole(answer)
        assert joined(ask(server, **fields, stream=True)) == (said, reason)
        ended.append(reason == "tool_calls")
        if not ended[-1]:
            print(seed, reason, str(said)[-200:])
            continue
        assert said["tool_calls"] and not said["content"] and (seed % 2 == 0 or len(said["tool_calls"]) == 1)
        for name, arguments in said["tool_calls"]:
            jsonschema.validate(json.loads(arguments), tools[int(name[5:])]["function"]["parameters"])
    print(f"{sum(ended)} of {TOOLS} answers ended by themselves; the arguments of each of those are valid")
    assert sum(ended) >= 0.95 * TOOLS


def test_each_family_calls_what_it_must(family):
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ):
        fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
        for seed in range(3):
            answer = whole(ask(family, **fields, seed=seed))
            (said, reason), ((name, arguments),) = answer, answer[0]["tool_calls"]
            assert reason == "tool_calls" and name in names and not said["content"]
            jsonschema.validate(
                json.loads(arguments), (WEATHER if name == "get_weather" else TIME)["function"]["parameters"]
            )
            assert joined(ask(family, **fields, seed=seed, stream=True)) == answer


def test_of_a_call_that_is_cut_before_its_name_nothing_is_content(family):
    """At each number of tokens, in an answer, in its stream and in the other dialects."""
    fields = {"tools": [WEATHER], "tool_choice": "required", "seed": 1}
    whole_answer = whole(ask(family, **fields, max_tokens=200))[0]
    for most in range(1, 24):
        answer = ask(family, **fields, max_tokens=most)
        said, reason = whole(answer)
        assert not said["content"] and joined(ask(family, **fields, max_tokens=most, stream=True)) == (said, reason), most
        if reason == "tool_calls":
            break
        for (name, _), (full, _) in zip(said["tool_calls"], whole_answer["tool_calls"], strict=False):
            assert name == full
        asked = {"input": USER, "tools": [{"type": "function"} | WEATHER["function"]], "seed": 1, "tool_choice": "required"}
        response = family.http.post("/v1/responses", json=asked | {"max_output_tokens": most}).json()
        texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        assert texts in ([], [""])


def test_a_stop_string_does_not_end_a_call(family):
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, "seed": 2}
    expected = whole(ask(family, **fields))
    stops = ["get_", "city", '"', "\n"]
    assert expected[1] == "tool_calls" and whole(ask(family, **fields, stop=stops)) == expected
    assert joined(ask(family, **fields, stop=stops, stream=True)) == expected
    ((name, _),) = expected[0]["tool_calls"]
    tools = [{"name": "get_weather", "input_schema": CITY}]
    asked = {"messages": USER, "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    said = family.http.post("/v1/messages", json=asked | {"max_tokens": 200, "seed": 2, "stop_sequences": stops}).json()
    assert said["stop_reason"] == "tool_use" and said["content"][-1]["name"] == name
    jsonschema.validate(said["content"][-1]["input"], CITY)


def test_a_schema_and_tools_are_one_or_the_other(family):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    for seed in range(4):
        said, reason = whole(ask(family, tools=[TIME], response_format=form, seed=seed, max_tokens=200))
        if reason == "stop":
            assert json.loads(said["content"])["city"] in ("Paris", "Oslo") and not said["tool_calls"]
        else:
            assert reason == "tool_calls" and said["tool_calls"][0] == ["get_time", "{}"]


@pytest.fixture(scope="module")
def thinking(tiny, tmp_path_factory):
    """A server of a random model whose prompts open reasoning."""
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    path.write_text(TEMPLATE + "<think>\n{# <tool_call> #}")
    with running(tiny, chat_template_file=str(path)) as up:
        yield up


def test_an_open_thought_comes_before_what_the_answer_must_be(thinking):
    for wish in ({"tools": [WEATHER], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        said, reason = whole(ask(thinking, max_tokens=20, **wish))
        assert said["reasoning_content"] and reason == "length" and not said["content"]
        assert joined(ask(thinking, max_tokens=20, **wish, stream=True))[1] == "length"
    said, _ = whole(ask(thinking, max_tokens=20, extra_body={"grammar": 'root ::= "yes"'}))
    assert (said["content"], said["reasoning_content"]) == ("yes", "")


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("logprobs", [None, True])
def test_a_thought_ends_when_its_budget_is_spent(thinking, budget, logprobs):
    limits = {"reasoning_budget_tokens": budget, "reasoning_budget_message": " Enough."}
    fields = {"max_tokens": 120, "extra_body": limits, "logprobs": logprobs, "seed": 3}
    calls = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    for wish in ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}, calls):
        answer = ask(thinking, **fields, **wish)
        said, reason = whole(answer)
        assert said["reasoning_content"].endswith("Enough.") == bool(budget)
        assert reason == ("length" if not wish else "tool_calls" if wish is calls else "stop")
        assert said["tool_calls"] if wish is calls else said["content"]
        if wish:
            shown = said["tool_calls"][0][1] if wish is calls else said["content"]
            jsonschema.validate(json.loads(shown), CITY)
        if logprobs:
            assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
        assert joined(ask(thinking, **fields, **wish, stream=True)) == (said, reason)


def test_a_stop_string_does_not_end_a_thought(thinking):
    limits = {"reasoning_budget_tokens": 5, "reasoning_budget_message": " Enough.", "json_schema": {"const": "it is Enough"}}
    fields = {"max_tokens": 100, "stop": ["Enough", "\n"], "extra_body": limits, "seed": 3}
    said, reason = whole(ask(thinking, **fields))
    assert said["reasoning_content"].endswith("Enough.") and (said["content"], reason) == ('"it is ', "stop")
    assert joined(ask(thinking, **fields, stream=True)) == (said, reason)


def test_a_budget_touches_no_tag_that_is_content_or_of_the_client_s_own_grammar(thinking):
    limits = {"reasoning_budget_tokens": 2, "reasoning_format": "none"}
    for form in ({"grammar": 'root ::= "x <think>" [a-c]{8}'}, {"json_schema": {"const": "x <think>abcabcab"}}):
        said, reason = whole(ask(thinking, extra_body=limits | form, max_tokens=100))
        content = said["content"].split("</think>")[-1].strip().strip('"')
        assert reason == "stop" and content.startswith("x <think>") and len(content) == 17
    refused = thinking.http.post(
        "/v1/chat/completions", json={"messages": USER, **limits, "reasoning_budget_message": "So</think>."}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_budget_message"


def test_tools_without_a_call_leave_the_answer_alone(server):
    plain = whole(ask(server, max_tokens=20, temperature=0))
    told = ask(server, max_tokens=20, temperature=0, tools=[WEATHER], tool_choice="none")
    auto = ask(server, max_tokens=20, temperature=0, tools=[WEATHER])
    assert whole(told)[0] == whole(auto)[0] and told.usage == auto.usage
    assert told.usage.prompt_tokens > ask(server, max_tokens=1).usage.prompt_tokens
    assert whole(ask(server, max_tokens=20, temperature=0)) == plain


def test_a_called_function_is_found_in_the_cache_again(server):
    class Look(BaseModel):
        """Look something up."""

        number: bool

    fields = {"tools": [pydantic_function_tool(Look)], "max_tokens": 200, "extra_body": {"cache_prompt": True}}
    first = ask(server, **fields, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is warm. " * 30}
    messages = [*USER, first.choices[0].message.model_dump(exclude_none=True), result]
    again = server.openai.chat.completions.create(model="any", messages=messages, **fields)
    # The last tokens were forced at once, with the end behind them, so they never got KV.
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens + 20
    assert "other words" not in str(again)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [WEATHER], "tool_choice": "often"}, "tool_choice"),
        ({"tools": [WEATHER], "grammar": 'root ::= "a"'}, "grammar"),
        (
            {"tools": [tool("a", {"type": "object", "properties": {"x": {"type": "wrong"}}})], "tool_choice": "required"},
            "tools",
        ),
        ({"reasoning_format": "some"}, "reasoning_format"),
    ],
)
def test_bad_wishes_are_refused_by_name(server, fields, where):
    refused = server.http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == where, refused.text
