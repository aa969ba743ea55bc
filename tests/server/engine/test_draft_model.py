"""`--draft-model`: the same answers in fewer steps, with a draft model that is right, often wrong, or gone."""

import logging
import os
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models.draft_model import TRIES, Best
from slotcache.models.errors import ModelError
from slotcache.models.model import Model
from slotcache.server.config.settings import Settings, SettingsError
from slotcache.server.engine.fit import beside, draft_cell_bytes
from slotcache.server.load import load
from support.architectures import mamba2

from ..conftest import running, until
from .test_drafts import ASKED, GREEDY, WARM, always_draft, check_alike, check_choices, complete, letters
from .test_sleep import HOUR, doze, dozing

LONG = {"prompt": "the river and the mill " * 12, "n_predict": 60, "cache_prompt": True, **GREEDY}
SMOLLM2 = Path(os.environ.get("SLOTCACHE_WEIGHTS", ".")) / "smollm2.gguf"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the same vocabulary and other weights, that is hardly ever right."""
    return generate(tmp_path_factory.mktemp("models") / "other.gguf", SHAPES["tiny"], seed=7)


@pytest.fixture(scope="module", params=["itself", "other"])
def drafting(floats, other, request):
    with running(floats, draft_model=str(floats if request.param == "itself" else other)) as up:
        always_ask(up)
        yield up


def always_ask(up):
    """Whatever the draft model costs, which is as large as the served one, and however wrong it is."""
    always_draft(up)
    drafts = up.service.engine.scheduler.drafts
    drafts._times.pass_steps = lambda *step: 0.001
    drafts._times.token_seconds = lambda step: 1e-9
    drafts._model_odds.mean = lambda own: 0.9
    drafts._model_odds.chances = lambda own, confidences: [0.9] * len(confidences)
    drafts._look_up = lambda job, most: None
    drafts._earn = lambda steps: None  # the credit stays as it began


def trial(up, **fields):
    answer = up.http.post("/completion", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        GREEDY,
        WARM,
        GREEDY | {"repeat_penalty": 1.3, "repeat_last_n": 32},
        WARM | {"mirostat": 2},
        WARM | {"grammar": "root ::= [a-h ]+"},
        WARM | {"n_probs": 3},
        GREEDY | {"stop": ["e"]},
    ],
    ids=lambda fields: ",".join(sorted(fields)),
)
def test_an_answer_is_that_of_the_requests_own_sampling(drafting, fields):
    plain, drafted = trial(drafting, draft="off", **fields), trial(drafting, **fields)
    check_alike(drafted, plain)
    assert "draft_n" not in plain["timings"]
    assert drafted["timings"].get("draft_n", 0) > 0 or drafted["tokens_predicted"] < 10


def test_choices_beside_each_other_and_a_next_turn(drafting):
    check_choices(complete, drafting, "model")


def test_two_chats_in_turn_keep_what_the_draft_model_has_read_of_them(floats):
    """They have a system text in common, most of their first prompts, and begin their questions with the same words."""
    with running(floats, draft_model=str(floats), parallel=2, cache_prompt=True) as up:
        always_ask(up)
        opening = {"role": "system", "content": "You answer from what the miller wrote down. " * 6}
        chats = {name: [opening, {"role": "user", "content": f"What is a {name}? "}] for name in ("mill", "river")}
        slots, read = {name: set() for name in chats}, []
        for turn in range(4):
            for name, messages in chats.items():
                before = up.metric("slotcache_draft_model_tokens_total")
                body = {"messages": messages, "max_tokens": 6, **GREEDY}
                answer = up.http.post("/v1/chat/completions", json=body).json()
                slots[name].add(answer["slotcache"]["slot"])
                read.append(up.metric("slotcache_draft_model_tokens_total") - before)
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": f"And the {name} {turn}? " + f"The {name} stood there. " * 20})
        assert [len(used) for used in slots.values()] == [1, 1] and slots["mill"] != slots["river"]
        assert max(read[2:]) < 1.5 * min(read[2:]), "each turn reads its own message, and none that came before"


def test_sampled_tokens_have_the_distribution_that_they_have_without(floats, other, monkeypatch):
    with running(floats, draft_model=str(other), parallel=4) as up:
        check_the_distribution(up, monkeypatch, temperature=1.0)


def check_the_distribution(up, monkeypatch, temperature):
    """The last letters of 576 short answers, drafted and not: counts as far apart as chance makes them.

    Only letters are drafted. Within an answer they hang together, and choices have the seeds behind their request's.
    """
    asked = {
        "prompt": "ab",
        "n_predict": 6,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "n_cmpl": 12,
    }
    counts = {}
    always_ask(up)
    bias = letters(up)
    ids = [id for id, _ in bias]
    monkeypatch.setattr(Best, "choose", lambda self, logits, context, index: ids[int(logits[ids].argmax())])
    for first, draft in ((0, "off"), (10_000, "model")):
        seeds = range(first, first + 48 * 12, 12)
        answers = [trial(up, **asked, logit_bias=bias, seed=seed, draft=draft) for seed in seeds]
        counts[draft] = Counter(one["content"][-1] for answer in answers for one in answer)
    assert up.metric("slotcache_accepted_tokens_total") > 100
    off, model = counts["off"], counts["model"]
    assert off.total() == model.total() == 48 * 12
    square = sum((off[one] - model[one]) ** 2 / (off[one] + model[one]) for one in off | model)
    assert square < 16.3, counts  # chi squared of three degrees of freedom: one in a thousand; the seeds are fixed


def test_drafts_are_reported(floats):
    names = ("slotcache_drafted_tokens_total", "slotcache_accepted_tokens_total", "slotcache_draft_model_tokens_total")
    with running(floats, draft_model=str(floats)) as up:
        always_ask(up)
        steps = up.metric("slotcache_steps_total")
        answer = trial(up, **GREEDY | {"n_predict": 200})
        timings = answer["timings"]
        drafted, accepted = timings["draft_n"], timings["draft_n_accepted"]
        assert answer["tokens_predicted"] == 200 and accepted > 0.9 * drafted > 90
        assert up.metric("slotcache_steps_total") - steps < 110
        found = [up.metric(name) for name in names]
        assert found[:2] == [drafted, accepted] and found[2] >= drafted
        assert up.metric("slotcache_draft_model_failures_total") == 0
        shown = up.http.get("/props").json()["draft"]
        assert shown == {"mode": "model", "model": floats.name, "is_off": False}
        assert {slot["speculative"] for slot in up.http.get("/slots").json()} == {True}
        assert "draft_n" not in trial(up, **GREEDY, draft="off")["timings"]


def test_a_next_turn_finds_its_prompt_read(floats):
    """In idle time the draft model reads what a slot holds; a scope that is dropped is dropped there, too."""
    with running(floats, draft_model=str(floats)) as up:
        check_that_slots_are_read(up)


def check_that_slots_are_read(up):
    always_ask(up)
    drafter = up.service.engine.draft_model
    first = trial(up, **LONG)
    until(lambda: max(kept.length for kept in drafter._kept) >= first["tokens_evaluated"] + 58)
    read = drafter.num_tokens
    second = trial(up, **LONG | {"prompt": LONG["prompt"] + " and so on", "n_predict": 12})
    assert second["timings"]["draft_n"] > 0
    assert drafter.num_tokens - read < second["tokens_evaluated"], "the prompt was read anew"
    assert up.http.delete("/v1/cache").status_code == 200
    assert not any(kept.length for kept in drafter._kept)
    private = trial(up, **LONG | {"cache_prompt": False})
    assert private["timings"]["draft_n"] > 0
    until(lambda: not any(kept.length for kept in drafter._kept))


def test_a_server_that_slept_drafts_again(floats):
    with dozing(floats, draft_model=str(floats)) as up:
        always_ask(up)
        before = trial(up, **LONG)
        doze(up)
        assert not up.service.engine.draft_model.context.handle
        after = trial(up, **LONG)
        assert after["content"] == before["content"] and after["timings"]["draft_n"] > 0


def test_it_reads_nothing_while_another_model_waits_for_the_device(floats, monkeypatch):
    with dozing(floats, draft_model=str(floats)) as up:
        engine, asked = up.service.engine, []
        monkeypatch.setattr(engine.scheduler, "read_ahead", lambda: bool(asked.append(engine.sleep.is_ending)))

        def idle(ends):
            engine.sleep._turn_end = ends
            engine._use_idle_time()
            engine.sleep._turn_end = None

        engine.inbox.ask(lambda: idle(HOUR)).result()
        engine.inbox.ask(lambda: idle(None)).result()
        assert asked and not any(asked)


def test_its_weights_are_unloaded_with_those_of_a_model_that_takes_turns(floats):
    settings = Settings(flash_attn="off", threads=1, ctx_size=512, cache_ram=0, is_one_of_several=True)
    with closing(load(replace(settings, draft_model=str(floats)), floats)) as service:
        drafter = service.engine.draft_model
        assert drafter is not None
        drafter.unload()
        with pytest.raises(ModelError, match="not in memory"):
            assert drafter.context.model.weights.handle
        drafter.num_failures = TRIES
        drafter.open()
        assert not drafter.context.handle, "one that is off for good takes no memory again"


def test_a_draft_model_that_was_gone_at_one_load_drafts_again_after_the_next(floats, tmp_path, caplog):
    (tmp_path / "drafts").mkdir()
    file = Path(shutil.copy(floats, tmp_path / "drafts" / "small.gguf"))
    with dozing(floats, draft_model=str(file)) as up, caplog.at_level(logging.INFO, "slotcache"):
        always_ask(up)
        first = trial(up, **LONG)
        doze(up)
        away = file.parent.rename(tmp_path / "away")
        without = trial(up, **LONG)
        shown = up.http.get("/props").json()["draft"]
        assert shown["is_off"] and "small.gguf" in shown["why"]
        assert "drafts nothing until the next load" in caplog.text
        doze(up)
        away.rename(file.parent)
        again = trial(up, **LONG)
        assert up.http.get("/props").json()["draft"] == {"mode": "model", "model": file.name, "is_off": False}
        assert "drafts again" in caplog.text and up.metric("slotcache_draft_model_failures_total") == 0
    assert first["content"] == without["content"] == again["content"]
    assert "draft_n" not in without["timings"] and again["timings"]["draft_n"]


def test_a_draft_model_that_fails_costs_no_answer(floats, monkeypatch):
    with running(floats, draft_model=str(floats)) as up:
        always_ask(up)
        plain = trial(up, **LONG, draft="off")
        drafter = up.service.engine.draft_model

        def fails(*_, **__):
            from slotcache.models.errors import RunnerError

            raise RunnerError("as if the device had gone")

        monkeypatch.setattr(drafter._runner, "run", fails)
        assert trial(up, **LONG)["content"] == plain["content"]
        assert drafter.is_off and up.http.get("/props").json()["draft"]["is_off"]
        assert up.metric("slotcache_draft_model_failures_total") == 3


def test_what_cannot_draft_is_refused_in_a_line(floats, tmp_path):
    other = generate(tmp_path / "other.gguf", replace(SHAPES["tiny"], merges=600))
    settings = Settings(flash_attn="off", threads=1, ctx_size=512, cache_ram=0)
    with pytest.raises(ModelError, match=r"--draft-model .*: its vocabulary differs .*: token \d+ is "):
        load(replace(settings, draft_model=str(other)), floats)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load(replace(settings, draft_model=__file__), floats)
    with pytest.raises(SettingsError, match="--draft model needs --draft-model FILE"):
        load(replace(settings, draft="model"), floats)


def test_it_drafts_no_further_than_it_was_trained(floats, tmp_path):
    """llama.cpp ends the process where a model has learnt an embedding for each position, and is asked for one more."""
    short = generate(tmp_path / "short.gguf", replace(SHAPES["tiny"], context=96))
    with running(floats, draft_model=str(short)) as up:
        always_ask(up)
        drafter, lengths = up.service.engine.draft_model, []
        run = drafter._run
        drafter._run = lambda spans, **more: [lengths.append(span.stop) for span in spans] and run(spans, **more)
        plain, drafted = (trial(up, **GREEDY | {"n_predict": 200}, draft=draft) for draft in ("off", "model"))
        assert drafted["content"] == plain["content"] and drafted["timings"]["draft_n"] > 10
        assert 96 <= max(lengths) <= 97 and not drafter.num_failures
        assert max(kept.length for kept in drafter._kept) <= 96


def test_its_memory_is_set_aside(floats):
    drafting = Settings(draft_model=str(floats))
    assert beside(drafting) == floats.stat().st_size and draft_cell_bytes(drafting) == load_bytes(floats)
    assert beside(Settings()) == draft_cell_bytes(Settings()) == 0


def load_bytes(path):
    with closing(Model(path)) as model:
        return model.kv_bytes("f16", "f16")


def test_a_model_that_cannot_be_cut_has_no_draft_model(floats, tmp_path, caplog):
    with running(mamba2(tmp_path / "hybrid.gguf"), draft_model=str(floats)) as up:
        shown = up.http.get("/props").json()["draft"]
        assert shown["mode"] == "off" and "cannot be cut" in shown["why"]
        assert up.service.engine.draft_model is None and "--draft-model has no effect" in caplog.text
        refused = up.http.post("/completion", json=ASKED | {"draft": "model"})
        assert refused.status_code == 400 and "cannot be cut" in refused.text


def test_a_server_without_one_refuses_to_ask_it(server):
    refused = server.http.post("/completion", json=ASKED | {"draft": "model"})
    assert refused.status_code == 400 and "has no --draft-model" in refused.text


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="SLOTCACHE_WEIGHTS names no folder with smollm2.gguf")
def test_real_weights_that_draft_for_themselves_change_no_text():
    asked = {"prompt": "Rivers begin in the mountains. Once upon a time there was", "n_predict": 40, **GREEDY}
    with running(SMOLLM2, draft_model=str(SMOLLM2), ctx_size=1024, threads=2, parallel=1) as up:
        always_ask(up)
        plain, drafted = trial(up, **asked, draft="off"), trial(up, **asked)
        assert drafted["content"] == plain["content"]
        assert drafted["timings"]["draft_n_accepted"] > 20
