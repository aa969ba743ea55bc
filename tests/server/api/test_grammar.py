"""Answers of a given form, over HTTP: all fields, on all routes."""

import json
import re

import pytest
from slotcache.server.service import service

from server.conftest import running

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
USER = [{"role": "user", "content": "Write an example"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WITHOUT_TYPE = {"properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "person", "strict": True, "schema": PERSON}
IS_PERSON = r'\{"name": "[^"]*", "age": [0-9]{1,2}\}'
FIELDS = [
    ({"json_schema": PERSON}, IS_PERSON),
    ({"json_schema": {"const": "42"}}, '"42"'),
    ({"json_schema": WITHOUT_TYPE}, r'\{"a": (1|"x")\}'),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, IS_PERSON),
    ({"response_format": {"type": "json_schema", "schema": PERSON}}, IS_PERSON),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, IS_PERSON),
    ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
    ({"grammar": 'root ::= item+ "\\u00e9"\nitem ::= "- " [a-c]{1,3} "\\n"'}, "(- [a-c]{1,3}\n)+é"),
    ({"regex": "[a-c]{3,5}(foo|bar)"}, "[a-c]{3,5}(foo|bar)"),
    ({"lark_grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{3}/'}, "x[0-9]{3}"),
]  # fmt: skip


def text_of(route, answer):
    choice = answer if route == NATIVE else answer["choices"][0]
    return choice["message"]["content"] if route == CHAT else choice["content" if route == NATIVE else "text"]


def ask(server, route, **fields):
    body = {"messages": USER} if route == CHAT else {"prompt": "Write an example"}
    answer = server.http.post(route, json=body | {"max_tokens": 400, "temperature": 1.0, "seed": 3} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(("fields", "pattern"), FIELDS)
def test_an_answer_fits_its_grammar_and_ends(server, route, fields, pattern):
    for options in ({}, {"temperature": 0, "ignore_eos": True}, {"presence_penalty": 1.5, "repeat_penalty": 1.3}):
        answer = ask(server, route, **fields, **options)
        assert re.fullmatch(pattern, text_of(route, answer))
        assert route == NATIVE or answer["choices"][0]["finish_reason"] == "stop"


def test_any_object_is_begun_and_not_left(server):
    answer = ask(server, CHAT, response_format={"type": "json_object"}, max_tokens=30)
    assert text_of(CHAT, answer).startswith("{") and answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_text_is_no_form_and_empty_fields_ask_for_nothing(server):
    plain = ask(server, CHAT, max_tokens=8)
    for nothing in (
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"json_schema": None},
        {"response_format": None},
    ):
        assert text_of(CHAT, ask(server, CHAT, max_tokens=8, **nothing)) == text_of(CHAT, plain)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 13])
def test_text_without_a_choice_never_exceeds_the_limit(server, max_tokens):
    whole = '"' + "A text that is known ahead. " * 3 + '"'
    answer = ask(server, CHAT, json_schema={"const": json.loads(whole)}, max_tokens=max_tokens)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length" and whole.startswith(text_of(CHAT, answer))


def test_text_without_a_choice_is_computed_together(server):
    forced, steps = server.metric("slotcache_forced_tokens_total"), server.metric("slotcache_steps_total")
    answer = ask(server, CHAT, json_schema={"const": "A text that is known ahead. " * 10})
    tokens = answer["usage"]["completion_tokens"]
    assert tokens > 40 and server.metric("slotcache_forced_tokens_total") - forced == tokens - 1
    assert server.metric("slotcache_steps_total") - steps < 5


def test_a_stop_string_ends_text_without_a_choice(server):
    answer = ask(server, CHAT, json_schema={"const": "one two three four"}, stop="three")
    assert text_of(CHAT, answer) == '"one two ' and answer["choices"][0]["finish_reason"] == "stop"


def test_each_of_several_answers_fits(server):
    answer = ask(server, CHAT, json_schema=PERSON, n=5, temperature=1.5)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 1 and all(re.fullmatch(IS_PERSON, text) for text in texts)


def test_a_stream_is_the_whole_answer(server):
    asked = {"model": "any", "messages": USER, "seed": 5, "max_tokens": 200, "extra_body": {"json_schema": PERSON}}
    chunks = server.openai.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == server.openai.chat.completions.create(**asked).choices[0].message.content


def test_reuse_changes_no_constrained_answer(tiny):
    """The second question comes with the first one's answer, in a cold server and in one that holds its KV."""
    with running(tiny) as warm, running(tiny) as cold:
        for seed in range(4):
            question = [{"role": "user", "content": f"Question {seed}: " + "who is it? " * 20}]
            fields = {"json_schema": PERSON, "max_tokens": 200, "temperature": 0}
            cached = warm.chat(messages=question, **fields)
            again = warm.chat(messages=question, **fields)
            fresh = cold.chat(messages=question, **fields, cache_prompt=False)
            assert again["slotcache"]["cached_tokens"] > 50 and fresh["slotcache"]["cached_tokens"] == 0
            assert len({answer["choices"][0]["message"]["content"] for answer in (cached, again, fresh)}) == 1


def test_answers_that_are_paused_stay_in_their_grammar(tiny):
    """Four long answers in a pool that holds two: the younger ones are paused within theirs."""
    lists = {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "minItems": 40, "maxItems": 40}
    with running(tiny, ctx_size=768, parallel=4) as server:
        answer = server.chat(json_schema=lists, n=4, max_tokens=500, temperature=1.0, seed=3, ignore_eos=False)
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop" and len(json.loads(choice["message"]["content"])) == 40
        assert server.metric("slotcache_preemptions_total") > 0


def test_ignore_eos_goes_on_where_the_grammar_may(server):
    answer = ask(server, CHAT, regex="[ab]{2,}", ignore_eos=True, max_tokens=20)
    assert answer["usage"]["completion_tokens"] == 20 and answer["choices"][0]["finish_reason"] == "length"
    assert 2 <= len(text_of(CHAT, ask(server, CHAT, regex="[ab]{2,4}", ignore_eos=True))) <= 4


def test_an_answer_whose_tokens_are_all_forbidden_fails_alone(server):
    body = {"prompt": "Write", "regex": "[ab]", "max_tokens": 4}
    refused = server.http.post(TEXT, json=body | {"logit_bias": [["a", False], ["b", False]]})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_grammar"
    assert text_of(TEXT, ask(server, TEXT, **body | {"logit_bias": [["a", False]]})) == "b"


def test_grammars_that_wait_to_be_compiled_are_bounded(server, monkeypatch):
    monkeypatch.setattr(service, "MOST_GRAMMARS", 0)
    answer = server.http.post(TEXT, json={"prompt": "x", "regex": "another"})
    assert answer.status_code == 503 and answer.headers["Retry-After"]


def test_where_chances_are_asked_for_each_token_is_sampled(server):
    forced = server.metric("slotcache_forced_tokens_total")
    plain = ask(server, CHAT, json_schema={"const": "A text that is known ahead."})
    assert server.metric("slotcache_forced_tokens_total") > forced
    forced = server.metric("slotcache_forced_tokens_total")
    told = ask(server, CHAT, json_schema={"const": "A text that is known ahead."}, logprobs=True, top_logprobs=2)
    assert text_of(CHAT, told) == text_of(CHAT, plain) and server.metric("slotcache_forced_tokens_total") == forced


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"grammar": "root ::= this is (not valid GBNF"}, "grammar", "Expected"),
        ({"regex": "(a"}, "regex", "unclosed"),
        ({"lark_grammar": "begin: 1"}, "lark_grammar", ""),
        ({"lark_grammar": "start: <|im_end|>"}, "lark_grammar", "names a token"),
        ({"json_schema": {"type": "hiccup"}}, "json_schema", "hiccup"),
        ({"json_schema": {"type": "array", "uniqueItems": True, "strict": True}}, "json_schema", "uniqueItems"),
        ({"json_schema": {"type": "object", "requried": ["a"], "strict": True}}, "json_schema", "requried"),
        ({"json_schema": {"minimum": 5, "maximum": 3}}, "json_schema", "greater than"),
        ({"json_schema": False}, "json_schema", "false"),
        ({"response_format": {"type": "sound"}}, "response_format.type", "expected text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema", "an object"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema", "an object"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "both"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "both"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, fields, param, says):
    answer = server.http.post(CHAT, json={"messages": USER, "max_tokens": 4} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and says in error["message"]
