"""`draft`: the same answers in fewer steps, told in the answer, the slots and the metrics; refused where it cannot be."""

import numpy as np
import pytest
from slotcache.slots.lookup import Draft, Lookup
from support.architectures import mamba2, windowed

from ..conftest import running

LETTERS = "abcd"
ASKED = {"prompt": "abcd dcba abba " * 4, "n_predict": 60, "ignore_eos": True, "cache_prompt": False}
GREEDY = {"temperature": 0}
WARM = {"temperature": 0.9, "seed": 7}
FORCING = {"type": "string", "pattern": "^([ab]|dcdc)*$", "maxLength": 90}  # c follows d without a choice


@pytest.fixture(scope="module")
def drafting(floats):
    with running(floats, draft="lookup") as up:
        always_draft(up)
        yield up


def always_draft(server):
    """Whatever this machine is busy with, and however wrong the drafts are."""
    drafts = server.service.engine.scheduler.drafts
    drafts._pace.multiple = lambda *step: 1.0
    drafts._may_cost = lambda *step: True


def check_alike(drafted, plain):
    """The same answer; its probabilities but for their last bits, which rows beside each other round otherwise."""
    for name in ("content", "tokens_predicted", "stop_type", "stopping_word"):
        assert drafted.get(name) == plain.get(name)
    for mine, other in zip(*(values_in(one.get("completion_probabilities")) for one in (drafted, plain)), strict=True):
        assert mine == pytest.approx(other, abs=0.01)  # KV is rounded to float16, too


def values_in(value):
    """The values within lists and mappings, in order."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if inner is None else [one for each in inner for one in values_in(each)]


def letters(server):
    """The `logit_bias` for an answer with a few letters only, so that each three of them come again and again."""
    return [[server.http.post("/tokenize", json={"content": letter}).json()["tokens"][0], 100.0] for letter in LETTERS]


def complete(server, **fields):
    answer = server.http.post("/completion", json=ASKED | {"logit_bias": letters(server)} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        GREEDY,
        WARM,
        {"temperature": 1.2, "seed": 3, "top_k": 0, "min_p": 0.02},
        GREEDY | {"repeat_penalty": 1.3, "repeat_last_n": 32},
        WARM | {"presence_penalty": 1.0, "dry_multiplier": 0.8, "dry_base": 1.2},
        WARM | {"mirostat": 2},
        WARM | {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        WARM | {"json_schema": FORCING, "n_predict": 90},
        WARM | {"grammar": "root ::= ([ab] | [cd] [ad])+"},
        WARM | {"n_probs": 3},
        WARM | {"n_probs": 3, "post_sampling_probs": True},
        WARM | {"stop": ["ca", "dd"]},
    ],
    ids=lambda fields: ",".join(sorted(fields)),
)
def test_an_answer_is_that_of_the_requests_own_sampling(drafting, fields):
    plain, drafted = complete(drafting, draft="off", **fields), complete(drafting, **fields)
    check_alike(drafted, plain)
    assert "draft_n" not in plain["timings"] and drafted["timings"]["draft_n"] > 0


def test_drafts_are_reported(drafting):
    names = (
        "slotcache_drafted_tokens_total",
        "slotcache_accepted_tokens_total",
        "llamacpp:spec_decode_num_draft_tokens_total",
    )
    before, steps = [drafting.metric(name) for name in names], drafting.metric("slotcache_steps_total")
    answer = complete(drafting, **GREEDY, n_predict=200)
    drafted, accepted = answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]
    assert 0 < accepted <= drafted and answer["tokens_predicted"] == 200
    assert [drafting.metric(name) - then for name, then in zip(names, before, strict=True)] == [drafted, accepted, drafted]
    assert drafting.metric("slotcache_steps_total") - steps < 200 - accepted + 10
    assert drafting.http.get("/props").json()["draft"] == {"mode": "lookup"}
    assert {slot["speculative"] for slot in drafting.http.get("/slots").json()} == {True}


def test_a_chat_reports_its_drafts_with_its_timings(drafting):
    fields = {"content": ASKED["prompt"], "logit_bias": letters(drafting), "max_tokens": 90}
    assert drafting.chat(**fields)["timings"]["draft_n"] > 0
    assert "draft_n" not in drafting.chat(**fields, draft="off")["timings"]


def test_choices_beside_each_other_and_a_next_turn(drafting):
    check_choices(complete, drafting, "lookup", n_predict=120)


def check_choices(ask, up, draft, temperature=0.6, n_predict=60):
    """KV of wrong tokens is gone: answers of several choices, and those that go on from them, are as without drafts."""
    asked = {"n_predict": n_predict, "temperature": temperature, "seed": 4, "n_cmpl": 3, "cache_prompt": True}
    plain, drafted = ([one["content"] for one in ask(up, **asked, draft=name)] for name in ("off", draft))
    assert plain == drafted and len({*plain}) == 3
    longer = {"prompt": ASKED["prompt"] + plain[0], **GREEDY}
    fresh = ask(up, **longer, draft="off", cache_prompt=False)
    assert ask(up, **longer, cache_prompt=True)["content"] == fresh["content"]


def test_a_wrong_value_is_refused(drafting):
    refused = drafting.http.post("/completion", json=ASKED | {"draft": "model"})
    assert refused.status_code == 400 and "draft" in refused.text


def test_a_model_that_cannot_be_cut_has_none(tmp_path):
    with running(mamba2(tmp_path / "hybrid.gguf"), draft="lookup") as up:
        shown = up.http.get("/props").json()["draft"]
        assert shown["mode"] == "off" and "cannot be cut" in shown["why"]
        assert "draft_n" not in complete(up, **GREEDY)["timings"]
        refused = up.http.post("/completion", json=ASKED | {"draft": "lookup"})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "draft") and "cannot be cut" in error["message"]
        assert up.http.post("/completion", json=ASKED | {"draft": "off"}).status_code == 200


@pytest.mark.parametrize("generate", [windowed, None])
def test_a_right_draft_gives_what_a_wrong_one_of_as_many_rows_gives(floats, tmp_path, monkeypatch, generate):
    """Every step has a draft, so that no row stands alone: that one would be rounded otherwise."""
    look_up, right = Lookup.draft, True

    def draft(self, tokens, num_prompt, most):
        found = look_up(self, tokens, num_prompt, most) or Draft(np.resize(tokens, most), 0)
        return found if right else Draft(np.zeros(most, np.int32), found.matched)

    monkeypatch.setattr(Lookup, "draft", draft)
    model = generate(tmp_path / "windowed.gguf") if generate else floats
    with running(model, draft="lookup", cache_ram=0, parallel=2) as up:
        always_draft(up)
        accepted = complete(up, **GREEDY, n_predict=150)
        right = False
        rejected = complete(up, **GREEDY, n_predict=150)
    assert accepted["content"] == rejected["content"]
    assert accepted["timings"]["draft_n_accepted"] > 20 and not rejected["timings"]["draft_n_accepted"]
