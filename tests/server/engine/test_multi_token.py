"""`--spec-type draft-mtp`: the same answers in fewer steps, by the multi-token head of a made model. No real weights."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from slotcache.models.errors import ModelError, RunnerError
from slotcache.server.config.settings import Settings, SettingsError
from slotcache.server.engine.fit import Measure
from slotcache.server.load import load
from support.architectures import mamba2, with_head

from ..conftest import running
from .test_draft_model import LONG, always_ask, check_that_slots_are_read, check_the_distribution, trial
from .test_drafts import GREEDY, WARM, check_choices
from .test_sleep import doze, dozing

HEAD = {"spec_type": "draft-mtp"}
SETTINGS = Settings(flash_attn="off", threads=1, ctx_size=512, cache_ram=0)


@pytest.fixture(scope="module", params=["token", "state"])
def file(tmp_path_factory, request):
    return with_head(tmp_path_factory.mktemp("models") / f"{request.param}.gguf", request.param)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Its head is always right."""
    return with_head(tmp_path_factory.mktemp("models") / "right.gguf")


@pytest.fixture(scope="module")
def drafting(file):
    with running(file, **HEAD) as up:
        always_ask(up)
        yield up


@pytest.mark.parametrize(
    "fields",
    [
        GREEDY,
        WARM | {"temperature": 2.5},
        GREEDY | {"repeat_penalty": 1.3, "repeat_last_n": 32},
        WARM | {"mirostat": 2},
        WARM | {"grammar": "root ::= [a-h ]+"},
        WARM | {"n_probs": 3, "temperature": 2.5},
        GREEDY | {"stop": ["e"]},
    ],
    ids=lambda fields: ",".join(sorted(fields)),
)
def test_an_answer_is_that_of_the_requests_own_sampling(drafting, fields):
    plain, drafted = trial(drafting, draft="off", **fields), trial(drafting, **fields)
    same = ("content", "tokens_predicted", "stop_type", "stopping_word")
    reported = [[one["logprob"] for one in answer.get("completion_probabilities", ())] for answer in (plain, drafted)]
    assert reported[0] == pytest.approx(reported[1], abs=1e-4), (
        "rounded otherwise: the experts of several rows are computed at once"
    )
    assert {name: drafted.get(name) for name in same} == {name: plain.get(name) for name in same}
    assert "draft_n" not in plain["timings"]
    assert drafted["timings"].get("draft_n", 0) > 0 or drafted["tokens_predicted"] < 10


def test_an_answer_is_that_of_a_server_without_the_head(drafting, file):
    with running(file) as plain:
        asked = LONG | {"cache_prompt": False}
        assert trial(drafting, **asked)["content"] == trial(plain, **asked)["content"]


def test_choices_beside_each_other_and_a_next_turn(drafting):
    check_choices(trial, drafting, "model", temperature=2.5)


def test_its_drafts_are_right_where_its_states_are_the_models(drafting, file):
    """One that reads the states is right once behind each of them, one that reads the tokens always."""
    timings = trial(drafting, **GREEDY | {"n_predict": 200})["timings"]
    drafted, accepted = timings["draft_n"], timings["draft_n_accepted"]
    assert accepted > 90
    if file.stem == "token":
        assert accepted > 0.9 * drafted
    assert drafting.metric("slotcache_draft_model_failures_total") == 0
    assert drafting.metric("slotcache_draft_model_tokens_total") > drafted
    assert drafting.http.get("/props").json()["draft"] == {"mode": "model", "head": file.name, "is_off": False}
    assert {slot["speculative"] for slot in drafting.http.get("/slots").json()} == {True}


def test_sampled_tokens_have_the_distribution_that_they_have_without(right, monkeypatch):
    with running(right, **HEAD, parallel=4) as up:
        check_the_distribution(up, monkeypatch, temperature=8.0)


def test_a_next_turn_finds_its_prompt_read(right):
    with running(right, **HEAD) as up:
        check_that_slots_are_read(up)


def test_kv_that_comes_back_from_host_memory_has_no_states_and_drafts_go_on(right):
    with dozing(right, **HEAD) as up:
        always_ask(up)
        plain = trial(up, **LONG, draft="off")
        before = trial(up, **LONG)
        doze(up)
        head = up.service.engine.draft_model
        assert not head.context.handle and not head._trails
        after = trial(up, **LONG)
        assert after["content"] == before["content"] == plain["content"]
        assert after["timings"]["draft_n"] > 0 and after["timings"]["cache_n"] > 40
        assert head.num_failures == 0


def test_more_requests_than_cells_change_no_answer(right):
    """KV is evicted and restored, requests wait for each other: greedy answers are those of a server without the head."""
    prompts = [f"{word} mill and {word} river " * 14 for word in ("the", "old", "a", "new", "red", "low")]
    answers = {}
    for settings in ({}, HEAD):
        with running(right, ctx_size=512, parallel=3, **settings) as up:
            if settings:
                always_ask(up)
            asked = [LONG | {"prompt": prompt} for prompt in prompts] * 2
            with ThreadPoolExecutor(6) as pool:
                found = list(pool.map(lambda one, up=up: trial(up, **one), asked))
            answers[len(settings)] = [one["content"] for one in found]
            if settings:
                assert sum(one["timings"].get("draft_n", 0) for one in found) > 0
    assert answers[0] == answers[1]


def test_a_head_that_fails_costs_no_answer(right, monkeypatch):
    with running(right, **HEAD) as up:
        always_ask(up)
        plain = trial(up, **LONG, draft="off")
        head = up.service.engine.draft_model

        def fails(*_, **__):
            raise RunnerError("as if the device had gone")

        monkeypatch.setattr(head._runner, "run", fails)
        assert trial(up, **LONG)["content"] == plain["content"]
        assert head.is_off and up.http.get("/props").json()["draft"]["is_off"]
        trails = {request: trail.stop for request, trail in head._trails.items()}
        assert trial(up, **LONG)["content"] == plain["content"]
        assert {request: trail.stop for request, trail in head._trails.items()} == trails, "it keeps no more states"


def test_its_weights_are_unloaded_with_the_models(right):
    settings = replace(SETTINGS, **HEAD, is_one_of_several=True)
    with closing(load(settings, right)) as service:
        service.engine.runner.unload()
        assert service.model.weights.handle, "the head computes with them"
        head = service.engine.draft_model
        assert head is not None
        head.unload()
        with pytest.raises(ModelError, match="not in memory"):
            assert service.model.weights.handle


def test_without_the_flag_the_log_says_that_it_is_not_used(right, tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    load(SETTINGS, right).close()
    assert f"the multi-token head of {right.name} is not used: --spec-type draft-mtp would use it" in caplog.text
    caplog.clear()
    load(SETTINGS, tiny).close()
    assert "multi-token" not in caplog.text
    load(replace(SETTINGS, **HEAD), mamba2(tmp_path / "hybrid.gguf")).close()
    assert "--spec-type has no effect: this model's state cannot be cut" in caplog.text
    caplog.clear()
    load(SETTINGS, with_head(tmp_path / "two.gguf", heads=2)).close()
    assert "the multi-token head of two.gguf is not used: it has 2, of which each would need KV of its own" in caplog.text


def test_what_cannot_draft_is_refused_in_a_line(right, tiny, caplog):
    with pytest.raises(ModelError, match=r"--spec-type draft-mtp: the multi-token head of .* cannot draft: its file has"):
        load(replace(SETTINGS, **HEAD), tiny)
    with pytest.raises(SettingsError, match="give one of them"):
        load(replace(SETTINGS, **HEAD, draft_model=str(tiny)), tiny)
    with pytest.raises(SettingsError, match="--spec-type mtp: expected one of none, draft-mtp, "):
        load(replace(SETTINGS, spec_type="mtp"), right)
    load(replace(SETTINGS, spec_type="ngram-mod"), tiny).close()
    assert "--spec-type ngram-mod has no effect" in caplog.text


def test_its_memory_is_counted(right):
    counted = []
    for settings in (SETTINGS, replace(SETTINGS, **HEAD)):
        with closing(Measure(settings, right)) as measure:
            counted.append(measure(settings)[0])
    plain, beside = counted
    cells = 512  # K and V, two bytes a number, in one layer
    assert beside.kv - plain.kv == cells * 2 * 2 * 64
    assert beside.weights > plain.weights and beside.compute > plain.compute
