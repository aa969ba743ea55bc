"""Metrics by llama-server's names, against the figures of the answers."""

import platform
import re
import time

import pytest
from slotcache.models import llama
from slotcache.server.config.settings import VERSION
from support.dialects import ALL, report_in

from server.conftest import running, until

LEANING = re.compile(r"^(Their|What|Of both)\b|\b(of them|of these|they take|beside it|take there|computed them)\b")
"""Words of a text that needs another one in front of it."""


@pytest.fixture(scope="module")
def counting(tiny):
    with running(tiny, parallel=1) as up:
        yield up


def test_the_counters_are_the_sums_of_the_answers(counting):
    before = {name: counting.metric(f"llamacpp:{name}_total") for name in ("prompt_tokens", "tokens_predicted")}
    body = {"prompt": "the quick brown fox jumps over the lazy dog", "cache_prompt": True, "ignore_eos": True}
    timings = [counting.http.post("/completion", json=body | {"n_predict": n}).json()["timings"] for n in (1, 4, 9)]
    assert timings[1]["cache_n"] > 0
    computed, cached = (sum(timing[name] for timing in timings) for name in ("prompt_n", "cache_n"))
    assert counting.metric("llamacpp:prompt_tokens_total") == before["prompt_tokens"] + computed
    assert counting.metric("llamacpp:prompt_tokens_cached_total") == cached
    assert counting.metric("llamacpp:tokens_predicted_total") == before["tokens_predicted"] + 14
    assert counting.metric("llamacpp:n_tokens_max") == (computed + cached) / 3 + 9
    for name, part in (("prompt_seconds", "prompt_ms"), ("tokens_predicted_seconds", "predicted_ms")):
        spent = sum(timing[part] for timing in timings) / 1000
        assert counting.metric(f"llamacpp:{name}_total") == pytest.approx(spent, rel=1e-6)
    assert counting.metric("llamacpp:prompt_tokens_seconds") > 0 < counting.metric("llamacpp:predicted_tokens_seconds")
    steps = counting.metric("llamacpp:n_decode_total")
    assert steps >= 14 and counting.metric("llamacpp:n_busy_slots_per_decode") == 1


@pytest.mark.parametrize("api", ALL, ids=str)
def test_the_reuse_of_a_prompt_is_reported_wherever_a_request_shows(counting, api):
    """`prefix_cache_tokens` and `prefix_cache_ratio`: in the answer, the end of a stream, /slots and /metrics."""
    asked = f"Who keeps the mill of {api}? " * 9, {"most": 3, "cache_prompt": True}
    names = "slotcache_prefix_cache_tokens_total", "slotcache_prefix_cache_ratio_sum", "slotcache_prefix_cache_ratio_count"
    before = [counting.metric(name) for name in names]
    first, whole = (report_in(api.ask(counting, asked[0], stream=False, **asked[1]).json()) for _ in range(2))
    assert first and whole
    events = api.events_of(api.ask(counting, asked[0], stream=True, stream_options=None, **asked[1]))
    reported = [report for event in events if (report := report_in(event))]
    assert len(reported) == 1 and reported[0] | {"conversation": None} == whole | {"conversation": None}
    assert whole["slot"] == whole["lane"] == 0
    assert whole["prefix_cache_tokens"] == whole["cached_tokens"] > 20 and 0.9 < whole["prefix_cache_ratio"] < 1
    (slot,) = counting.http.get("/slots").json()
    assert [slot[name] for name in ("prefix_cache_tokens", "prefix_cache_ratio")] == [
        whole["prefix_cache_tokens"],
        whole["prefix_cache_ratio"],
    ]
    tokens, ratio, count = (counting.metric(name) - value for name, value in zip(names, before, strict=True))
    reports = [first, whole, *reported]
    assert (tokens, count) == (sum(one["prefix_cache_tokens"] for one in reports), 3)
    assert ratio == pytest.approx(sum(one["prefix_cache_ratio"] for one in reports))


def test_requests_that_run_and_wait_are_counted(counting):
    body = {"prompt": "Hello", "n_predict": 4000, "ignore_eos": True, "stream": True}
    with counting.http.stream("POST", "/completion", json=body) as first:
        lines = first.iter_lines()  # httpx closes the stream with its iterator
        next(lines)
        with counting.http.stream("POST", "/completion", json=body) as second:
            until(lambda: counting.metric("llamacpp:requests_deferred") == 1)
            assert counting.metric("llamacpp:requests_processing") == 1
            assert second.status_code == 200
    until(lambda: not counting.metric("llamacpp:requests_processing"))


def test_all_fifteen_have_a_type_and_a_help(counting):
    answer = counting.http.get("/metrics")
    assert time.time() - 3600 < int(answer.headers["process-start-time-unix"]) <= time.time()
    lines = [line.split(" ", 3) for line in answer.text.splitlines() if "llamacpp:" in line]
    typed = {line[2]: line[3] for line in lines if line[:2] == ["#", "TYPE"]}
    reported = {line[2] for line in lines if line[:2] == ["#", "HELP"]}
    valued = {line[0] for line in lines if line[0] != "#"}
    assert set(typed) == reported == valued and len(typed) == 15
    assert [list(typed.values()).count(kind) for kind in ("counter", "gauge")] == [10, 5]


def test_flags_turn_routes_off_and_on(tiny):
    with running(tiny, metrics=False, slots=False) as server:
        for path in ("/metrics", "/slots"):
            answer = server.http.get(path)
            assert answer.status_code == 501 and answer.json()["error"]["type"] == "not_supported_error"
            assert f"--{path[1:]}" in answer.json()["error"]["message"]


def test_each_help_text_says_alone_what_is_counted(counting):
    """A dashboard shows one metric: its text must not lean on that of another."""
    lines = counting.http.get("/metrics").text.splitlines()
    helps = dict(line.removeprefix("# HELP ").split(" ", 1) for line in lines if line.startswith("# HELP "))
    assert len(helps) > 60
    assert {name: text for name, text in helps.items() if LEANING.search(text) or len(text) < 8} == {}


def test_the_build_is_reported_with_its_versions(counting):
    versions = {"llama_cpp": llama.LIBRARY.version, "python": platform.python_version(), "version": VERSION}
    assert llama.LIBRARY.version and counting.metric("slotcache_build_info", **versions) == 1
