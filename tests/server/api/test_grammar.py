"""Answers of a given form, over HTTP: all fields, on all routes."""

import json
import re
from typing import Any

import pytest
from slotcache.server.service import service
from support.dialects import CHAT, NATIVE, TEXT

from server.conftest import running

USUAL: dict[str, Any] = {"most": 400, "temperature": 1.0, "seed": 3, "ignore_eos": False}
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


def ask(server, api: Any = CHAT, **fields):
    return api.whole(server, "Write an example", **USUAL | fields)


@pytest.mark.parametrize("api", [CHAT, TEXT, NATIVE], ids=str)
@pytest.mark.parametrize(("fields", "pattern"), FIELDS)
def test_an_answer_fits_its_grammar_and_ends(server, api, fields, pattern):
    for options in ({}, {"temperature": 0, "ignore_eos": True}, {"presence_penalty": 1.5, "repeat_penalty": 1.3}):
        said = ask(server, api, **fields, **options)
        assert re.fullmatch(pattern, said.text) and said.reason == "stop"


def test_any_object_is_started(server):
    assert ask(server, response_format={"type": "json_object"}, most=30).text.startswith("{")


def test_text_is_no_form_and_empty_fields_ask_for_nothing(server):
    plain = ask(server, most=8)
    for nothing in (
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"json_schema": None},
        {"response_format": None},
    ):
        assert ask(server, most=8, **nothing) == plain


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 13])
def test_text_without_a_choice_never_exceeds_the_limit(server, most):
    whole = '"' + "A text that is known ahead. " * 3 + '"'
    said = ask(server, json_schema={"const": json.loads(whole)}, most=most)
    assert (said.num_generated, said.reason) == (most, "length") and whole.startswith(said.text)


def test_text_without_a_choice_is_computed_together(server):
    forced, steps = server.metric("slotcache_forced_tokens_total"), server.metric("slotcache_steps_total")
    tokens = ask(server, json_schema={"const": "A text that is known ahead. " * 10}).num_generated
    assert tokens > 40 and server.metric("slotcache_forced_tokens_total") - forced == tokens - 1
    assert server.metric("slotcache_steps_total") - steps < 5


def test_a_stop_string_ends_text_without_a_choice(server):
    said = ask(server, json_schema={"const": "one two three four"}, stop="three")
    assert (said.text, said.word) == ('"one two ', "three")


def test_each_of_several_answers_fits(server):
    answer = CHAT.ask(server, "Write an example", **USUAL | {"json_schema": PERSON, "n": 5, "temperature": 1.5})
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert len(set(texts)) > 1 and all(re.fullmatch(IS_PERSON, text) for text in texts)


def test_a_stream_is_the_whole_answer(server):
    assert CHAT.streamed(server, "Write an example", **USUAL, json_schema=PERSON) == ask(server, json_schema=PERSON)


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
    said = ask(server, regex="[ab]{2,}", ignore_eos=True, most=20)
    assert (said.num_generated, said.reason) == (20, "length")
    assert 2 <= len(ask(server, regex="[ab]{2,4}", ignore_eos=True).text) <= 4


def test_an_answer_whose_tokens_are_all_forbidden_fails_alone(server):
    refused = TEXT.ask(server, regex="[ab]", most=4, logit_bias=[["a", False], ["b", False]])
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_grammar"
    assert ask(server, TEXT, regex="[ab]", most=4, logit_bias=[["a", False]]).text == "b"


def test_grammars_that_wait_to_be_compiled_are_bounded(server, monkeypatch):
    monkeypatch.setattr(service, "MOST_GRAMMARS", 0)
    answer = TEXT.ask(server, regex="another")
    assert TEXT.refused(answer, 503) and answer.headers["Retry-After"]


def test_where_chances_are_asked_for_each_token_is_sampled(server):
    forced = server.metric("slotcache_forced_tokens_total")
    plain = ask(server, json_schema={"const": "A text that is known ahead."})
    assert server.metric("slotcache_forced_tokens_total") > forced
    forced = server.metric("slotcache_forced_tokens_total")
    reported = ask(server, json_schema={"const": "A text that is known ahead."}, logprobs=True, top_logprobs=2)
    assert reported == plain and server.metric("slotcache_forced_tokens_total") == forced


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
    answer = CHAT.ask(server, most=4, **fields)
    assert says in CHAT.refused(answer) and answer.json()["error"]["param"] == param
