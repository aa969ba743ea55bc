"""The progress of a prompt, and the times of an answer, as clients of llama-server read them."""

import pytest
from support.dialects import OF

from server.conftest import running

LONG = "Tell me of the old mill. " * 60


@pytest.fixture(scope="module")
def slow(tiny):
    """A server with small steps."""
    with running(tiny, batch_size=64, parallel=1) as up:
        yield up


def stream(server, path, **body):
    return OF[path].events_of(server.http.post(path, json=body | {"stream": True}))


def test_progress_begins_with_what_was_cached_and_ends_with_the_whole_prompt(slow):
    for cached in (False, True):
        asked = {"prompt": LONG, "n_predict": 2, "return_progress": True, "cache_prompt": True}
        events = [event["prompt_progress"] for event in stream(slow, "/completion", **asked) if "prompt_progress" in event]
        done = [event["processed"] for event in events]
        first, last = events[0], events[-1]
        assert first["processed"] == first["cache"] and first["time_ms"] == 0 and (first["cache"] > 0) == cached
        assert last["processed"] == last["total"]
        assert done == sorted(set(done))  # a busy reader gets two steps as one event
        assert len(done) > 3 or cached


def test_the_rate_leaves_out_the_first_token_which_costs_no_step(slow):
    times = slow.http.post("/completion", json={"prompt": "The sea", "n_predict": 1}).json()["timings"]
    assert times["predicted_n"] == 1 and times["predicted_per_second"] == times["predicted_per_token_ms"] == 0
    times = slow.http.post("/completion", json={"prompt": "The sea", "n_predict": 9, "ignore_eos": True}).json()["timings"]
    assert times["predicted_per_second"] == pytest.approx(8000 / times["predicted_ms"])
    assert times["predicted_per_token_ms"] == pytest.approx(times["predicted_ms"] / 8)
