"""The sampling that a model's file recommends is the default where no flag and no variable gives another."""

import argparse

import pytest
from slotcache.front.replica_settings import read_settings
from slotcache.models.demo import FILE
from slotcache.models.model import Model
from slotcache.models.sampling_params import recommended
from slotcache.server.chat.sampling_fields import Defaults
from slotcache.server.config.flags import add_arguments, settings_of
from slotcache.server.config.settings import Settings

from server.conftest import running

OF_FILE = {
    "sequence": "top_k;new_sampler;temperature;top_k",
    "temp": "0.600000",
    "top_k": "20",
    "top_p": "7",
    "min_p": "nan",
    "penalty_last_n": "-5",
    "penalty_repeat": "1.1",
    "mirostat": "many",
    "mirostat_tau": "4.5",
    "seed": "7",
}


def flags(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args(arguments))


def in_force(settings, **values):
    found = recommended({f"general.sampling.{name}": text for name, text in (values or OF_FILE).items()}.get)
    model = Model(FILE, vocab_only=True)
    try:
        return Defaults.of(settings, model, found).sampling
    finally:
        model.close()


def test_a_file_says_how_it_is_sampled(caplog):
    sampling = in_force(Settings())
    assert (sampling.temperature, sampling.top_k, sampling.repeat_penalty, sampling.mirostat_tau) == (0.6, 20, 1.1, 4.5)
    assert sampling.samplers == ("top_k", "temperature")
    assert (sampling.top_p, sampling.repeat_last_n) == (1.0, -1), "the nearest number in the range"
    assert (sampling.min_p, sampling.mirostat, sampling.seed) == (0.05, 0, -1), "what no number is, or no key, is left out"
    for said in ("min_p", "mirostat", "new_sampler"):
        assert said in caplog.text


def test_samplers_have_the_names_that_llama_cpp_knows(caplog):
    sampling = in_force(Settings(), sequence="top-k;typ;Nucleus;minp;temp;temperature")
    assert sampling.samplers == ("top_k", "typ_p", "top_p", "min_p", "temperature") and not caplog.messages
    in_force(Settings(), sequence="top_k;new\nline")
    assert "new\\nline" in caplog.text


@pytest.mark.parametrize(("text", "top_k"), [("20.000000", 20), ("9" * 15, 2**31 - 1), ("9" * 400, 40), ("-inf", 40)])
def test_a_whole_number_may_be_any_number(text, top_k):
    assert in_force(Settings(), top_k=text).top_k == top_k


@pytest.mark.parametrize("value", ["0.8", "0.3"])
def test_what_a_flag_or_a_variable_gives_wins_even_if_it_is_the_default(monkeypatch, value):
    given = flags("--temp", value, "--samplers", "temperature", "--repeat-last-n=64")
    sampling = in_force(given)
    assert (sampling.temperature, sampling.samplers, sampling.repeat_last_n) == (float(value), ("temperature",), 64)
    assert sampling.top_k == 20
    assert in_force(flags("--sampling-seq", "tk")).samplers == ("temperature", "top_k")
    assert in_force(read_settings({"temperature": float(value)})[1]).temperature == float(value)
    monkeypatch.setenv("LLAMA_ARG_TEMPERATURE", value)
    assert in_force(flags()).temperature == in_force(read_settings({})[1]).temperature == float(value)


def test_the_embedded_model_answers_with_the_most_probable_tokens():
    with running(FILE) as server:
        shown = server.http.get("/props").json()["default_generation_settings"]["params"]
        assert shown["temperature"] == 0 and shown["top_k"] == 40
    with running(FILE, given=frozenset({"temperature"})) as server:
        assert server.http.get("/props").json()["default_generation_settings"]["params"]["temperature"] == 0.8
