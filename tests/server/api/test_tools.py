"""Tool calls over a real port: required ones on random weights are valid, and streams equal whole answers.

SLOTCACHE_TOOLS says how many definitions: 12 in a few seconds, if it is not set.
"""

import json
import os
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from support.dialects import CHAT, MESSAGES, RESPONSES
from support.schemas import random_schema

from ..conftest import running

TOOLS = int(os.environ.get("SLOTCACHE_TOOLS", "12"))
QUESTION = "What is the weather in Paris?"
USUAL = {"temperature": None, "ignore_eos": None}  # as the server has them

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


def whole(up, api: Any = CHAT, **fields):
    return api.whole(up, QUESTION, **USUAL | fields)


def both(up, **fields):
    """An answer, which is the same as a stream, but for the warnings: some are said once."""
    said = whole(up, **fields)
    assert replace(CHAT.streamed(up, QUESTION, **USUAL | fields), warnings=said.warnings) == said
    return said


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tiny, tmp_path_factory):
    """A server of a random model whose template belongs to a family."""
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    end = "<think></think>" if "thought" in request.param else ""
    path.write_text(TEMPLATE + end + "{# " + FAMILIES[request.param] + " #}")
    with running(tiny, chat_template_file=str(path) if FAMILIES[request.param] else "") as up:
        yield up


@pytest.mark.timeout(900 + 10 * TOOLS)
def test_required_calls_of_random_tools_end_by_themselves_and_are_valid(server):
    """Each stream is the whole answer in pieces, too."""
    ended = []
    for seed in range(TOOLS):
        tools = [tool(f"tool_{at}", random_schema(seed * 3 + at)) for at in range(1 + seed % 3)]
        fields = {"tools": tools, "tool_choice": "required", "most": 3000, "seed": seed}
        said = both(server, **fields, temperature=(0.0, 0.8, 1.5)[seed % 3], parallel_tool_calls=seed % 2 == 0)
        ended.append(said.reason == "calls")
        if not ended[-1]:
            print(seed, said.reason, str(said)[-200:])
            continue
        assert said.calls and not said.text and (seed % 2 == 0 or len(said.calls) == 1)
        for name, arguments in said.calls:
            jsonschema.validate(arguments, tools[int(name[5:])]["function"]["parameters"])
    print(f"{sum(ended)} of {TOOLS} answers ended by themselves; the arguments of each of those are valid")
    assert sum(ended) >= 0.95 * TOOLS


def test_each_family_calls_what_it_must(family):
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ):
        fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False, "most": 200}
        for seed in range(3):
            said = both(family, **fields, seed=seed)
            ((name, arguments),) = said.calls
            assert said.reason == "calls" and name in names and not said.text
            jsonschema.validate(arguments, (WEATHER if name == "get_weather" else TIME)["function"]["parameters"])


def test_of_a_call_that_is_cut_before_its_name_nothing_is_content(family):
    """At each number of tokens, in an answer, in its stream and in another dialect."""
    fields = {"tools": [WEATHER], "tool_choice": "required", "seed": 1}
    names = [name for name, _ in whole(family, **fields, most=200).calls]
    for most in range(1, 24):
        said = both(family, **fields, most=most)
        assert not said.text, most
        if said.reason == "calls":
            break
        assert all(name == full for (name, _), full in zip(said.calls, names, strict=False))
        response = whole(family, RESPONSES, most=most, seed=1, **RESPONSES.tools(get_weather=CITY))
        assert response.text == ""


def test_a_stop_string_does_not_end_a_call(family):
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "most": 200, "seed": 2}
    expected, stops = both(family, **fields), ["get_", "city", '"', "\n"]
    assert expected.reason == "calls" and both(family, **fields, stop=stops) == expected
    said = whole(family, MESSAGES, most=200, stop=stops, seed=2, **MESSAGES.tools(get_weather=CITY))
    assert said.reason == "calls" and said.calls[-1][0] == expected.calls[0][0]
    jsonschema.validate(said.calls[-1][1], CITY)


def test_a_schema_and_tools_are_one_or_the_other(family):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    for seed in range(4):
        said = whole(family, tools=[TIME], response_format=form, seed=seed, most=200)
        if said.reason == "stop":
            assert json.loads(said.text)["city"] in ("Paris", "Oslo") and not said.calls
        else:
            assert said.reason == "calls" and said.calls[0] == ("get_time", {})


@pytest.fixture(scope="module")
def thinking(tiny, tmp_path_factory):
    """A server of a random model whose prompts open reasoning."""
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    path.write_text(TEMPLATE + "<think>\n{# <tool_call> #}")
    with running(tiny, chat_template_file=str(path)) as up:
        yield up


def test_an_open_thought_comes_before_what_the_answer_must_be(thinking):
    for wish in ({"tools": [WEATHER], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        said = both(thinking, most=20, seed=1, **wish)
        assert said.thought and said.reason == "length" and not said.text
    said = whole(thinking, most=20, grammar='root ::= "yes"')
    assert (said.text, said.thought) == ("yes", "")


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("logprobs", [None, True])
def test_a_thought_ends_when_its_budget_is_spent(thinking, budget, logprobs):
    fields = {"most": 120, "logprobs": logprobs, "seed": 3}
    fields |= {"reasoning_budget_tokens": budget, "reasoning_budget_message": " Enough."}
    calls = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    for wish in ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}, calls):
        said = both(thinking, **fields, **wish)
        assert said.thought.endswith("Enough.") == bool(budget)
        assert said.reason == ("length" if not wish else "calls" if wish is calls else "stop")
        assert said.calls if wish is calls else said.text
        if wish:
            jsonschema.validate(said.calls[0][1] if wish is calls else json.loads(said.text), CITY)
        if logprobs:
            (choice,) = CHAT.ask(thinking, QUESTION, **USUAL | fields | wish).json()["choices"]
            assert len(choice["logprobs"]["content"]) == said.num_generated


def test_a_stop_string_does_not_end_a_thought(thinking):
    limits = {"reasoning_budget_tokens": 5, "reasoning_budget_message": " Enough.", "json_schema": {"const": "it is Enough"}}
    said = both(thinking, most=100, stop=["Enough", "\n"], seed=3, **limits)
    assert said.thought.endswith("Enough.") and (said.text, said.reason) == ('"it is ', "stop")


def test_a_budget_touches_no_tag_that_is_content_or_of_the_client_s_own_grammar(thinking):
    limits = {"reasoning_budget_tokens": 2, "reasoning_format": "none"}
    for form in ({"grammar": 'root ::= "x <think>" [a-c]{8}'}, {"json_schema": {"const": "x <think>abcabcab"}}):
        said = whole(thinking, most=100, **limits | form)
        content = said.text.split("</think>")[-1].strip().strip('"')
        assert said.reason == "stop" and content.startswith("x <think>") and len(content) == 17
    refused = CHAT.ask(thinking, **limits, reasoning_budget_message="So</think>.")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_budget_message"


def test_tools_without_a_call_leave_the_answer_alone(server):
    plain = whole(server, most=20, temperature=0)
    reported = whole(server, most=20, temperature=0, tools=[WEATHER], tool_choice="none")
    assert reported == whole(server, most=20, temperature=0, tools=[WEATHER])
    assert reported.num_prompt > plain.num_prompt and whole(server, most=20, temperature=0) == plain


def test_a_called_function_is_found_in_the_cache_again(server):
    class Look(BaseModel):
        """Look something up."""

        number: bool

    fields = {"model": "any", "tools": [pydantic_function_tool(Look)], "max_tokens": 200}
    fields |= {"messages": [{"role": "user", "content": QUESTION}], "extra_body": {"cache_prompt": True}}
    first = server.openai.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is warm. " * 30}
    messages = [*fields["messages"], first.choices[0].message.model_dump(exclude_none=True), result]
    again = server.openai.chat.completions.create(**fields | {"messages": messages})
    # The last tokens were forced at once, with the end behind them, so they never got KV.
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens + 20


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
    refused = CHAT.ask(server, **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == where, refused.text
