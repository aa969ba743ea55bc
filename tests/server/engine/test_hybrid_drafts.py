"""Drafts of models with recurrent layers: their states go back behind a wrong token, and snapshots are of accepted ones."""

from contextlib import closing
from dataclasses import replace
from itertools import permutations

import pytest
from slotcache.models.runner import Runner
from slotcache.server.config.settings import Settings
from slotcache.server.engine.fit import ROLLBACK, Measure
from slotcache.slots.plan import HostCopy
from support.architectures import delta, hybrid, mamba2, with_head

from ..conftest import running
from .test_draft_model import always_ask, trial
from .test_drafts import ASKED, GREEDY, WARM, always_draft, complete

LONG, NEXT = "abcd dcba abba dada " * 30, " and then dada abba dcba again"  # more tokens than are always computed anew
AGAIN = WARM | {"cache_prompt": True, "ignore_eos": True, "return_tokens": True}
KINDS = {"lfm2": hybrid, "qwen35": delta}


def ids(up, text):
    return up.http.post("/tokenize", json={"content": text}).json()["tokens"]


@pytest.fixture(scope="module", params=KINDS)
def drafting(tmp_path_factory, request):
    """A server whose drafts are looked up."""
    path = KINDS[request.param](tmp_path_factory.mktemp("models") / "hybrid.gguf", floats=True)
    with running(path, draft="lookup") as up:
        always_draft(up)
        yield up


@pytest.fixture(scope="module", params=["head", "draft model"])
def asking(tmp_path_factory, request):
    """A server whose drafts are computed."""
    folder = tmp_path_factory.mktemp("models")
    path = delta(folder / "hybrid.gguf", heads=1, floats=True)
    settings = (
        {"spec_type": "draft-mtp"} if request.param == "head" else {"draft_model": str(with_head(folder / "draft.gguf"))}
    )
    with running(path, **settings) as up:
        always_ask(up)
        yield up


@pytest.mark.parametrize(
    "fields", [GREEDY, WARM, WARM | {"grammar": "root ::= ([ab] | [cd] [ad])+"}, GREEDY | {"stop": ["b"]}]
)
def test_an_answer_is_that_without_drafts(drafting, fields):
    plain, drafted = complete(drafting, draft="off", **fields), complete(drafting, **fields)
    same = ("content", "tokens_predicted", "stop_type", "stopping_word")
    assert {name: drafted[name] for name in same} == {name: plain[name] for name in same}
    assert drafted["timings"].get("draft_n", 1) > 0


def test_the_next_turn_goes_on_from_the_accepted_tokens(drafting):
    """A request that ends in the middle of a draft leaves a snapshot of what it has said, not of what was drafted."""
    for number, stop in enumerate(map("".join, permutations("abc", 2))):
        asked = {"prompt": ids(drafting, LONG + str(number)), "n_predict": 80, **AGAIN}
        first = complete(drafting, **asked, stop=[stop])
        turn = asked | {"prompt": asked["prompt"] + first["tokens"] + ids(drafting, NEXT)}
        second = complete(drafting, **turn)
        assert second["timings"]["cache_n"] == first["tokens_evaluated"] + len(first["tokens"]) - 1
        fresh = complete(drafting, **turn | {"cache_prompt": False, "draft": "off"})
        assert second["content"] == fresh["content"], stop


def test_a_draft_is_no_longer_than_a_state_goes_back(drafting):
    lengths = []
    scheduler = drafting.service.engine.scheduler
    settle = scheduler.drafts.settle

    def seen(checked, device):
        lengths.extend(span.drafted for _, span in checked)
        settle(checked, device)

    scheduler.drafts.settle = seen
    try:
        complete(drafting, **GREEDY, n_predict=120)
    finally:
        scheduler.drafts.settle = settle
    assert max(lengths) == ROLLBACK


def test_streams_beside_each_other(drafting):
    asked = {"n_predict": 60, "temperature": 0.6, "seed": 4, "n_cmpl": 3, "cache_prompt": True, "prompt": LONG}
    answers = [[one["content"] for one in complete(drafting, **asked, draft=draft)] for draft in ("off", "lookup")]
    assert answers[0] == answers[1]


def test_computed_drafts_change_no_answer(asking):
    for fields in (GREEDY, WARM, GREEDY | {"stop": ["e"]}):
        plain, drafted = trial(asking, draft="off", **fields), trial(asking, **fields)
        assert drafted["content"] == plain["content"]
    asked = {"prompt": ids(asking, LONG), "n_predict": 40, **AGAIN}
    first = trial(asking, **asked)
    turn = asked | {"prompt": asked["prompt"] + first["tokens"] + ids(asking, NEXT)}
    second, fresh = trial(asking, **turn), trial(asking, **turn | {"cache_prompt": False, "draft": "off"})
    assert first["timings"]["draft_n"] > 0 and second["timings"]["draft_n"] > 0 and second["timings"]["cache_n"] > 0
    assert second["content"] == fresh["content"]
    assert asking.metric("slotcache_draft_model_failures_total") == 0


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_model_whose_states_do_not_go_back_has_no_drafts(tmp_path, monkeypatch, caplog, is_refused):
    """llama.cpp says of more models than were tried that they do. Here it refuses, or leaves the state as it was."""
    remove = Runner._remove

    def fails(self, sequence, start, stop):
        if not start:
            return remove(self, sequence, start, stop)
        if not is_refused:
            self.states.snap(sequence, state := HostCopy(0, stop))
            remove(self, sequence, start, stop)
            self.states.load(state, sequence)
        return not is_refused

    monkeypatch.setattr(Runner, "_remove", fails)
    with running(delta(tmp_path / "hybrid.gguf"), draft="lookup") as up:
        always_draft(up)
        assert "draft_n" not in complete(up, **GREEDY)["timings"]
        refused = up.http.post("/completion", json=ASKED | {"draft": "lookup"})
        assert refused.status_code == 400 and "cannot be cut" in refused.text
        assert up.http.get("/props").json()["draft"]["mode"] == "off"
    assert "do not go back to before a wrong token: it has no drafts" in caplog.text


def test_the_states_to_go_back_to_are_counted(tmp_path):
    plain = Settings(flash_attn="off", threads=1, ctx_size=512, cache_ram=0)
    drafting = replace(plain, draft="lookup")
    for make in (delta, mamba2):
        kv = []
        for settings in (plain, drafting):
            with closing(Measure(settings, make(tmp_path / "hybrid.gguf"))) as measure:
                kv.append(measure(settings)[0].kv)
        assert kv[1] > 2 * kv[0] if make is delta else kv[1] == kv[0]
