"""The fields of sampling in requests and settings, as llama-server takes them, and what is in force then."""

import json
import math

import pytest
from slotcache.models.model import Model
from slotcache.server.chat.body import ChatRequest, CompletionRequest
from slotcache.server.chat.decode import decode
from slotcache.server.chat.sampling_fields import Defaults
from slotcache.server.config.settings import Settings, SettingsError

from server.conftest import running


@pytest.fixture(scope="module")
def model(tiny):
    model = Model(tiny, vocab_only=True)
    yield model
    model.close()


def in_force(model, settings, fields):
    """The parameters of a request, by what the settings and the request say."""
    defaults = Defaults.of(Settings(**settings), model).sampling
    return decode(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest).sampling(model, defaults)


@pytest.mark.parametrize(
    ("settings", "fields", "expected"),
    [
        ({}, {}, {"temperature": 0.8, "top_k": 40, "samplers": Settings().samplers.split(";"), "min_keep": 0}),
        ({"top_k": 3, "samplers": "top_k;temperature"}, {}, {"top_k": 3, "samplers": ["top_k", "temperature"]}),
        ({"top_k": 3, "sampling_seq": "kt"}, {"top_k": 5}, {"top_k": 5, "samplers": ["top_k", "temperature"]}),
        ({}, {"samplers": ["Top-K", "temp", "nucleus", "typ"]}, {"samplers": ["top_k", "temperature", "top_p", "typ_p"]}),
        ({}, {"samplers": "ext"}, {"samplers": ["penalties", "xtc", "temperature"]}),
        ({}, {"samplers": []}, {"samplers": []}),
        ({"dry_base": 2.5}, {"dry_base": 0.5}, {"dry_base": 2.5}),
        ({}, {"temperature": -1.0, "top_p": 7, "min_p": -1}, {"temperature": 0, "top_p": 1, "min_p": 0}),
        ({}, {"presence_penalty": 100.0, "top_k": -1}, {"presence_penalty": 100, "top_k": 0}),
        ({}, {"repeat_last_n": -1, "dry_penalty_last_n": 10**6}, {"repeat_last_n": 4096, "dry_penalty_last_n": 4096}),
        ({}, {"temperature": None, "top_k": 4.0, "ignore_eos": None}, {"temperature": 0.8, "top_k": 4, "ignore_eos": False}),
        ({"ignore_eos": True}, {"ignore_eos": False}, {"ignore_eos": False}),
        ({"dry_sequence_breaker": "\\n\nx"}, {}, {"dry_sequence_breakers": ["\n", "x"]}),
        ({"dry_sequence_breaker": "none"}, {}, {"dry_sequence_breakers": []}),
        ({"seed": 7}, {}, {"seed": 7}),
        ({"seed": 7}, {"seed": -2}, {"seed": 2**32 - 2}),
        ({}, {"n_probs": 3, "logprobs": 7}, {"n_probs": 3}),
        ({}, {"logprobs": 7}, {"n_probs": 7}),
        ({}, {"logprobs": True, "top_logprobs": 4}, {"n_probs": 4}),
    ],
)
def test_the_parameters_in_force(model, settings, fields, expected):
    shown = in_force(model, settings, fields).shown()
    assert {name: shown[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "fields", "expected"),
    [
        ({"logit_bias": "5+1.5,6-inf,7-2"}, {}, {5: 1.5, 6: -math.inf, 7: -2}),
        ({"logit_bias": "5+1"}, {"logit_bias": {"7": -2}}, {7: -2}),
        ({"logit_bias": "5+1"}, {"logit_bias": {}}, {}),
        ({}, {"logit_bias": [[7, -2], [7, -1.5], ["8", False]]}, {7: -3.5, 8: -math.inf}),
        ({}, {"logit_bias": {"9": 1e300}}, {9: 3e38}),
    ],
)
def test_biases(model, settings, fields, expected):
    assert in_force(model, settings, fields).logit_bias == expected


def test_a_text_has_the_bias_of_its_tokens(model):
    tokens = model.tokenize("the river").tolist()
    expected = {token: 2.0 * tokens.count(token) for token in tokens}
    for given in ({"the river": 2}, [["the river", 2]]):
        assert in_force(model, {}, {"logit_bias": given}).logit_bias == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"samplers": "top_k;best"},
        {"sampling_seq": "k?"},
        {"logit_bias": "5"},
        {"logit_bias": "5+x"},
        {"logit_bias": "999999+1"},
    ],
)
def test_wrong_settings_of_sampling_start_no_server(model, settings):
    with pytest.raises(SettingsError):
        Defaults.of(Settings(**settings), model)


def test_null_is_a_field_that_is_not_set_and_whole_floats_are_integers():
    names = [field for field in ChatRequest.__struct_fields__ if field != "messages"]
    bare = {"messages": [{"role": "user", "content": None}]}
    unset = decode(json.dumps(bare).encode(), ChatRequest)
    assert decode(json.dumps(bare | dict.fromkeys(names)).encode(), ChatRequest) == unset
    given = {"max_tokens": 4.0, "seed": -1.0, "temperature": 1.0, "stream_options": {"include_usage": None}, "priority": 2.0}
    asked = decode(json.dumps(bare | given).encode(), ChatRequest)
    assert (asked.max_tokens, asked.seed, asked.priority, asked.temperature) == (4, -1, 2, 1.0)
    assert isinstance(asked.max_tokens, int) and isinstance(asked.temperature, float)
    assert asked.stream_options is not None and asked.stream_options.include_usage is False
    assert asked.messages == bare["messages"], "what a list holds is left as it is"


def test_defaults_of_the_settings_reach_requests(tiny):
    with running(tiny, temperature=0.0, predict=3, ignore_eos=True, logit_bias="40+1e9") as server:
        answer = server.http.post("/completion", json={"prompt": "x", "n_probs": 1}).json()
        assert [token["id"] for token in answer["completion_probabilities"]] == [40] * 3
        free = server.http.post("/completion", json={"prompt": "x", "n_probs": 1, "logit_bias": {}, "n_predict": 2}).json()
        assert len(free["completion_probabilities"]) == 2 and free["completion_probabilities"][0]["id"] != 40
