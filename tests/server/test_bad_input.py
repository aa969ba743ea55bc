"""Absurd requests and settings: a clear answer, and the next request is fine."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from msgspec.inspect import FloatType, IntType, Metadata, StructType, UnionType, type_info
from slotcache.server.chat.body import ChatRequest, CompletionRequest
from slotcache.server.http.log import FORMATS

from server.conftest import DEADLINE, running

CHAT, NATIVE = "/v1/chat/completions", "/completion"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny, ctx_size=2048) as up:
        yield up
        assert up.chat()["usage"]["completion_tokens"] == 4


def refused(server, path, content):
    """The error of a request that is refused; the one after it, on the same connection, is not."""
    answer = server.http.post(path, content=content)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    assert set(error) >= {"message", "type", "param", "code"} and len(error["message"]) < 500
    assert server.http.post(NATIVE, json={"prompt": "Hi", "n_predict": 1}).json()["timings"]["predicted_n"] == 1
    return error


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n_predict": -7}, "n_predict", "0 or more"),
        ({"n_predict": "many"}, "n_predict", "got `str`"),
        ({"n_predict": 1.5}, "n_predict", "got `float`"),
        ({"top_k": 2**32 + 1}, "top_k", "<= 2147483647"),
        ({"top_k": 10**30}, "top_k", "<= 2147483647"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"repeat_penalty": 0}, "repeat_penalty", "> 0.0"),
        ({"repeat_last_n": 10**30}, "repeat_last_n", "<= 2147483647"),
        ({"repeat_last_n": -2}, "repeat_last_n", ">= -1"),
        ({"adaptive_decay": 1}, "adaptive_decay", "<= 0.99"),
        ({"dry_allowed_length": -1}, "dry_allowed_length", ">= 0"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers", "length >= 1"),
        ({"dry_sequence_breakers": ["x" * 300]}, "dry_sequence_breakers", "at most 256"),
        ({"samplers": ["top_k", "best"]}, "samplers", "'best'"),
        ({"samplers": "k?"}, "samplers", "'?'"),
        ({"samplers": ["top_k"] * 100}, "samplers", "at most 32"),
        ({"n_probs": 10**6}, "n_probs", "<= 100"),
        ({"top_logprobs": 5}, "top_logprobs", "logprobs"),
        ({"priority": 10**30}, "priority", "<= 100"),
        ({"t_max_predict_ms": 10**400}, "t_max_predict_ms", "<= 2147483647"),
        ({"n": -1}, "n", ">= 1"),
        ({"logit_bias": [[999_999, 1]]}, "logit_bias", "expected an id"),
        ({"logit_bias": [[10**400, 1]]}, "logit_bias", "expected an id"),
        ({"logit_bias": [[1, True]]}, "logit_bias", "or false for never"),
        ({"logit_bias": [[1, 2, 3]]}, "logit_bias", "a token and its bias"),
        ({"logit_bias": [[None, 2]]}, "logit_bias", "an id or a text"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "expected an id"),
        ({"logit_bias": {f"{token:09}": 1 for token in range(40_000)}}, "logit_bias", "at most 32,768"),
        ({"stop": ["x"] * 100}, "stop", "at most 64"),
        ({"stop": "x" * 5000}, "stop", "at most 1,024 characters"),
        ({"stop": [7]}, "stop[0]", "got `int`"),
        ({"cache_scope": "x" * 2**20}, "cache_scope", "1,048,576 characters: expected at most 256"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": [1, None]}, "prompt[1]", "a token id from 0"),
        ({"prompt": [2**70, 1]}, "prompt[0]", "a token id from 0"),
        ({"prompt": [True]}, "prompt[0]", "expected a text"),
    ],
)
def test_absurd_values(server, fields, param, says):
    error = refused(server, NATIVE, json.dumps({"prompt": "Hello", "n_predict": 2} | fields))
    assert error["param"] == param and says in error["message"]


def numbers_of(kind):
    """The names of a body's fields that may be numbers."""
    about = type_info(kind)
    assert isinstance(about, StructType)
    for field in about.fields:
        kinds = field.type.types if isinstance(field.type, UnionType) else (field.type,)
        if any(isinstance(one.type if isinstance(one, Metadata) else one, IntType | FloatType) for one in kinds):
            yield field.encode_name


def test_all_wrong_fields_are_named_and_the_first_is_the_param(server):
    hot, stop = "temperature: Expected `float | null`, got `str`", "stop[0]: Expected `str`, got `int`"
    error = refused(server, NATIVE, b'{"temperature": "hot", "prompt": "Hi", "stop": [7], "top_k": 1.5, "n": null}')
    assert error["param"] == "temperature"
    assert error["message"] == f"{hot}; {stop}; top_k: Expected `int | null`, got `float`"
    error = refused(server, NATIVE, b'{"prompt": 7, "temperature": "hot"}')
    assert error["message"].endswith(f"; {hot}") and error["param"] == "prompt", "a required one is not missing"
    error = refused(server, NATIVE, b'{"temperature": "hot"}')
    assert error["message"] == f"{hot}; prompt: Object missing required field `prompt`"
    wrong = dict.fromkeys(("temperature", "top_p", "min_p", "top_k", "n_predict", "seed", "n", "id_slot"), "x" * 100_000)
    assert refused(server, NATIVE, json.dumps(wrong))["message"].count("; ") == 0, "one pass over a large body"
    assert refused(server, NATIVE, json.dumps(dict.fromkeys(wrong, "x")))["message"].count("; ") == 4


@pytest.mark.parametrize("value", ["x - at `$.top_k", "x` - at `$.top_k`", " - at `$`"])
def test_a_value_that_looks_like_a_path_names_no_field(server, value):
    body = {"messages": USER, "documents_attention": value, "n": "x"}
    error = refused(server, "/v1/chat/completions", json.dumps(body))
    assert error["param"] == "documents_attention"
    assert error["message"] == f"documents_attention: Invalid enum value '{value}'; n: Expected `int | null`, got `str`"


def test_a_route_with_a_slip_is_told_the_nearest_one(server):
    answer = server.http.post("/v1/chat/completion", json={"messages": USER})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such route: /v1/chat/completion (did you mean /v1/chat/completions?)"
    for path in ("/none", "/v1/chat/completion" + "s" * 5000):
        assert server.http.get(path).json()["error"]["message"] == f"no such route: {path}"


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e-308", "1" + "0" * 400, "-1" + "0" * 400])
@pytest.mark.parametrize("path", [CHAT, NATIVE])
def test_no_number_of_a_body_is_too_much(server, path, value):
    kind, body = (ChatRequest, {"messages": USER}) if path == CHAT else (CompletionRequest, {"prompt": "Hello"})
    for name in numbers_of(kind):
        limit = {} if name in ("max_tokens", "max_completion_tokens", "n_predict") else {"max_tokens": 1}
        given = json.dumps(body | limit | {"stop": [" "], "logprobs": True, name: "@"}).replace('"@"', value)
        answer = server.http.post(path, content=given)
        assert answer.status_code in (200, 400), f"{name}: {answer.text}"


def test_biases_that_forbid_every_token(server):
    biases = [[token, False] for token in range(server.service.model.num_vocab)]
    error = refused(server, NATIVE, json.dumps({"prompt": "Hello", "n_predict": 2, "logit_bias": biases}))
    assert error["param"] == "logit_bias" and "forbids every token" in error["message"]


@pytest.mark.parametrize(
    "fields", [{"messages": [USER[0] | {"x": [0] * 100_000}]}, {"chat_template_kwargs": {"x": [0] * 100_000}}]
)
def test_values_that_a_template_is_given_are_counted(server, fields):
    # Each is looked at, and again at every turn of a conversation: a million took 1.6 s a turn of 100 bytes.
    error = refused(server, CHAT, json.dumps({"messages": USER, "max_tokens": 1} | fields))
    assert error["param"] == "messages" and "100,000 values" in error["message"]


@pytest.mark.parametrize("body", ["", "7", "null", "[]", '"x"', "{", "\x00", '{"prompt":"\\ud80"}'])
def test_bodies_that_are_no_request(server, body):
    refused(server, NATIVE, body)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "0x10", "1" * 5000])
def test_numbers_that_are_none(server, value):
    refused(server, NATIVE, f'{{"prompt": "Hello", "n_predict": 2, "temperature": {value}}}')


@pytest.mark.parametrize("depth", [2_000, 200_000])
@pytest.mark.parametrize(
    "where", ['"prompt": %s', '"prompt": "x", "unknown": %s', '"prompt": "x", "response_format": {"a": %s}']
)
def test_deep_nesting(server, where, depth):
    error = refused(server, NATIVE, "{%s}" % (where % ("[" * depth + "]" * depth)))
    assert error["code"] == "malformed_json" and "nested too deeply" in error["message"]


def test_tools_among_the_arguments_of_the_template(server):
    error = refused(server, CHAT, json.dumps({"messages": USER, "chat_template_kwargs": {"tools": 1}}))
    assert error["param"] == "chat_template_kwargs.tools"


def test_numbers_far_beyond_what_there_is_are_just_large(server):
    asked = {"prompt": "Hello", "temperature": 1e300, "repeat_penalty": 1e300, "seed": 2**70, "top_k": 2**31 - 1}
    biases = {str(token): 1e300 for token in range(500)}
    answer = server.http.post(NATIVE, json=asked | {"n_predict": 2, "ignore_eos": True, "logit_bias": biases})
    assert answer.status_code == 200 and answer.json()["timings"]["predicted_n"] == 2
    asked = {"prompt": list(range(100, 130)) * 66, "n_predict": 2**62, "ignore_eos": True}
    assert server.http.post(NATIVE, json=asked).json()["timings"]["predicted_n"] == 2048 - 30 * 66


def test_a_message_of_10_megabytes_holds_nobody_up(server):
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 2_000_000}]})
    with ThreadPoolExecutor() as threads:
        large = threads.submit(httpx.post, server.url + CHAT, content=body, timeout=DEADLINE)
        beside = 0
        while not large.done():
            server.chat(max_tokens=1)
            beside += not large.done()
    error = large.result().json()["error"]
    assert large.result().status_code == 400 and error["code"] == "context_length_exceeded"
    assert beside, "others were answered while it was read"


def test_a_budget_larger_than_the_memory_is_cut_with_a_line_in_the_log(tiny, caplog):
    with caplog.at_level(logging.INFO, "slotcache"), running(tiny, cache_ram=1 << 31) as server:
        assert "--cache-ram 2147483648 MiB is more than half of the free memory" in caplog.text
        assert 0 < server.metric("slotcache_host_budget_bytes") < 1 << 50
        assert server.chat()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("cache_ram", [0, 64])
def test_prompts_that_fill_the_pool_while_all_of_it_is_pinned(tiny, cache_ram):
    """Each prompt takes most of the pool, the answers the rest: requests wait for each other, pause, and all end whole."""
    prompts = [[300 + number, *range(100, 400), *range(100, 400)] for number in range(6)]
    with running(tiny, ctx_size=1024, parallel=3, cache_ram=cache_ram) as server:

        def ask(prompt):
            asked = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
            return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=DEADLINE).json()

        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(ask, prompts))
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * len(prompts)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [400] * len(prompts)
        assert server.metric("slotcache_requests_total", end="length") == len(prompts)
        assert server.metric("slotcache_requests_running") == server.metric("slotcache_requests_waiting") == 0
        assert server.metric("slotcache_cells_used") == server.metric("slotcache_cells_reclaimable")


def test_short_prompts_whose_answers_outgrow_the_pool_are_paused(tiny):
    with running(tiny, ctx_size=512, parallel=4) as server:

        def ask(number):
            asked = {"prompt": [300 + number] * 100, "n_predict": 300, "temperature": 0, "ignore_eos": True}
            return httpx.post(server.url + NATIVE, json=asked, timeout=DEADLINE).json()["timings"]["predicted_n"]

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(ask, range(6))) == [300] * 6
        assert server.metric("slotcache_preemptions_total") > 0


NAMES = ("user", "cache_scope", "session_id", "prompt_cache_key", "conversation", "stop", "model", "safety_identifier")
OBJECTS = (
    '"metadata": {"@": "@"}',
    '"documents": [{"id": "@", "title": "@", "text": "x @"}]',
    '"chat_template_kwargs": {"@": "@"}',
    '"json_schema": {"type": "object", "properties": {"@": {"enum": ["@"]}}, "required": ["@"]}',
    '"logit_bias": [["@", 1]]',
    '"@": "@"',
)


def test_no_name_and_no_text_is_too_odd_for_files_and_logs(tiny, tmp_path, caplog):
    """Halves of characters, NUL and control characters: in names, values, query strings, headers, arguments of calls."""
    asked = '{"messages": [{"role": "user", "name": "@", "content": "hi @"}, %s], "max_tokens": 1, "cache_prompt": true, %s}'
    calls = (
        '{"role": "assistant", "tool_calls": [{"id": "@", "function": {"name": "f", "arguments": "{\\"@\\": \\"@\\"}"}}]}'
    )
    result = '{"role": "tool", "tool_call_id": "@", "content": "[{\\"id\\": \\"@\\", \\"text\\": \\"t @\\"}]"}'
    message = f'{result}, {{"role": "user", "content": "@"}}'
    fields = [*(f'"{name}": "@"' for name in NAMES), *OBJECTS]
    with running(tiny, ctx_size=2048, cache_dir=str(tmp_path / "kv"), slot_save_path=str(tmp_path), slots=True) as server:

        def ask(method, path, **named):
            answer = server.http.request(method, path, **named)
            assert answer.status_code < 500 and answer.json() is not None, f"{path} {named}: {answer.text}"
            return answer.status_code

        for text in (r"a\ud83d", r"\ude00", r"a\u0000b", r"\u0085\u2028\n"):
            for form in (text, text.replace("\\", "\\\\")):  # escaped twice, as in a call's arguments
                said = [(asked % (f"{calls}, {message}", field)).replace("@", form) for field in fields]
                assert sum(ask("POST", CHAT, content=body) == 200 for body in said) >= len(fields) - 3
            for action in ("save", "restore"):
                ask("POST", f"/slots/0?action={action}", content=f'{{"filename": "{text}"}}')
        for text in ("%ED%A0%BD", "a%00b", "%FF"):
            for path in ("/v1/cache?scope=", "/v1/conversations/", "/v1/responses/x?scope=", "/v1/models/"):
                ask("GET", path + text)
        for value in (b"\xff", b"\xed\xa0\xbd", b"a\xc2\x85"):
            for name in (b"x-session-id", b"x-request-id", b"user-agent"):
                ask(
                    "POST",
                    CHAT,
                    content='{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
                    headers={name: value},
                )
        for path in ("/slots", "/v1/cache"):
            ask("GET", path)
    for record in caplog.records:
        assert all(form().format(record).encode() for form in FORMATS.values())
