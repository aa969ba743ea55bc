"""LoRA adapters over a real port: by flag, by route and by request, and never with KV of another set."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from slotcache.bench.random_models import SHAPES
from slotcache.models.errors import ModelError
from slotcache.server.config.settings import Settings
from slotcache.server.load import adapter_files, load
from support.adapters import lora
from support.on_device import ON_DEVICE

from server.conftest import running, until

QUESTION = "What does the old lighthouse keeper of the northern harbour say about the winter storms of last year?"
SETS = {
    "none": [],
    "a": [{"id": 0, "scale": 1.0}],
    "b": [{"id": 1, "scale": 1.0}],
    "both": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1.5}],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [str(lora(folder / f"{seed}.gguf", SHAPES["tiny"], seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def server(tiny, files):
    with running(tiny, lora=",".join(files), lora_init_without_apply=True) as up:
        yield up


def answer(up, **fields):
    return up.chat(QUESTION, max_tokens=24, **fields)


def text(answered):
    return answered["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def expected(tiny, files):
    """Answers of fresh servers that have only the adapters of one set, by flag."""
    found = {}
    for name, adapters in SETS.items():
        scaled = ",".join(f"{files[one['id']]}:{one['scale']}" for one in adapters)
        with running(tiny, lora_scaled=scaled) as up:
            found[name] = text(answer(up))
    assert len(set(found.values())) == len(SETS), "the adapters change too little to be told apart"
    return found


def test_each_set_answers_as_if_it_were_alone(server, expected):
    for name in (*SETS, *reversed(SETS), *SETS):
        assert text(answer(server, lora=SETS[name])) == expected[name], name


def test_sets_share_no_kv_and_each_finds_its_own(server):
    for name in ("a", "b"):
        server.http.delete("/v1/cache")
        first = answer(server, lora=SETS[name])
        other = answer(server, lora=SETS["both"])
        again = answer(server, lora=SETS[name])
        assert first["slotcache"]["cached_tokens"] == other["slotcache"]["cached_tokens"] == 0
        assert again["slotcache"]["cached_tokens"] > 0


def test_requests_of_several_sets_at_once(server, expected):
    names = list(itertools.islice(itertools.cycle(SETS), 12))
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: text(answer(server, lora=SETS[name])), names))
    assert found == [expected[name] for name in names]


def test_a_scope_is_dropped_with_all_its_sets(server):
    for name in SETS:
        answer(server, lora=SETS[name], cache_scope="s")
    assert server.http.delete("/v1/cache?scope=s").json()["tokens"] > 0
    for name in SETS:
        assert answer(server, lora=SETS[name], cache_scope="s")["slotcache"]["cached_tokens"] == 0


def test_the_runs_of_all_sets_are_listed_each_with_an_id_of_its_own(server):
    documents = [{"id": "tower", "text": "The tower of the harbour has two windows to the north."}]
    fields = {"cache_scope": "listed", "documents": documents, "report_segments": True}
    answers = [answer(server, lora=SETS[name], **fields) for name in SETS]
    listed = server.http.get("/v1/cache?scope=listed").json()
    runs = {run["id"]: run for run in listed["runs"]}
    assert len(runs) == len(listed["runs"]) and len({run["adapters"] for run in listed["runs"]}) == len(SETS)
    assert sum(listed["tokens"].values()) >= sum(one["usage"]["prompt_tokens"] for one in answers)
    assert all(run["parent"] is None or runs[run["parent"]]["adapters"] == run["adapters"] for run in listed["runs"])
    for one in answers:
        (document,) = [each["id"] for each in one["slotcache"]["segments"] if each["label"] == "document tower"]
        assert runs[document]["document"]


def test_the_usual_scales(server, files, expected):
    shown = server.http.get("/lora-adapters").json()
    assert [(one["id"], one["path"], one["scale"]) for one in shown] == [(0, files[0], 0.0), (1, files[1], 0.0)]
    assert text(answer(server)) == expected["none"]
    for body in (SETS["both"], {"adapters": SETS["both"]}):
        assert server.http.post("/lora-adapters", json=body).json() == {"success": True}
        assert text(answer(server)) == expected["both"]
        assert text(answer(server, lora=SETS["a"])) == expected["a"]
        assert server.http.post("/lora-adapters", json=[]).status_code == 200
    assert {one["scale"] for one in server.http.get("/lora-adapters").json()} == {0.0}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"id": 7, "scale": 1.0}], "lora[0].id"),
        ([{"id": 0}], "lora[0]"),
        ([{"id": 0, "scale": 1e9}], "lora[0].scale"),
        ([{"id": -1, "scale": 1.0}], "lora[0].id"),
        ([{"id": 0, "scale": 1.0}] * 65, "lora"),
    ],
)
def test_what_is_wrong_and_where(server, given, param):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "lora": given}
    refused = server.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert server.http.post("/lora-adapters", json=given).status_code == 400


def test_a_name_of_a_scope_cannot_stand_for_adapters(server):
    body = {"messages": [{"role": "user", "content": "x"}], "cache_scope": "s\0a"}
    assert server.http.post("/v1/chat/completions", json=body).json()["error"]["param"] == "cache_scope"


def test_kv_of_a_set_outlives_a_restart_and_meets_no_other(tiny, files, tmp_path, expected):
    with running(tiny, lora=files[0], cache_dir=str(tmp_path)) as up:
        assert text(answer(up)) == expected["a"]
    with running(tiny, lora=files[1], cache_dir=str(tmp_path)) as up:
        other = answer(up)
        assert other["slotcache"]["cached_tokens"] == 0 and text(other) == expected["b"]
    with running(tiny, lora=files[0], cache_dir=str(tmp_path)) as up:
        again = answer(up)
        assert again["slotcache"]["source"] == "disk" and text(again) == expected["a"]


def test_kv_of_several_adapters_reaches_no_file(tiny, files, tmp_path):
    folders = {"cache_dir": str(tmp_path / "kv"), "slot_save_path": str(tmp_path / "slots")}
    with running(tiny, lora=",".join(files), lora_init_without_apply=True, parallel=1, **folders) as up:
        answer(up, lora=SETS["a"])
        until(lambda: up.metric("slotcache_disk_written_runs_total"))
        answer(up, lora=SETS["both"])
        refused = up.http.post("/slots/0?action=save", json={"filename": "both"})
        assert refused.status_code == 400 and "LoRA" in refused.json()["error"]["message"]
    with running(tiny, lora=",".join(files), lora_init_without_apply=True, **folders) as up:
        (scope,) = up.service.tiers[0].index.roots
        assert scope.adapters and "," not in scope.adapters


def test_files_that_are_no_adapters(tiny, files):
    with pytest.raises(ModelError, match="cannot load the LoRA adapter"):
        load(Settings(ctx_size=512, lora=str(tiny)), tiny)
    with pytest.raises(ModelError, match="cannot read"):
        load(Settings(ctx_size=512, lora="no.gguf"), tiny)
    for scaled in (files[0], *(f"{files[0]}:{scale}" for scale in ("nan", "inf", "1e5", "one"))):
        with pytest.raises(ModelError, match="FILE:SCALE"):
            adapter_files(Settings(lora_scaled=scaled))


BOATS = [{"id": f"d{at}", "text": f"The {name} keeps {at + 7} boats behind the mill. " * 5} for at, name in enumerate("abc")]
SCHEMA = {"type": "object", "properties": {"boats": {"enum": [7, 8, 9]}}, "required": ["boats"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FORMS = (
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    {"tools": [LOOK], "tool_choice": "required", "ignore_eos": False},
)


def likelihoods(choices):
    return {(at, one["id"]): one["logprob"] for choice in choices for at, one in enumerate(choice["logprobs"]["content"])}


@pytest.mark.parametrize("form", FORMS, ids=["text", "schema", "tools"])
def test_a_document_read_under_one_set_serves_no_other(server, form):
    given = {"documents_attention": "separate", "logprobs": True, **form}
    scope = {"cache_scope": f"separate {FORMS.index(form)}"}
    fresh = {
        name: answer(server, documents=BOATS, lora=adapters, cache_prompt=False, **given)["choices"]
        for name, adapters in SETS.items()
    }
    assert len({str(choices[0]["logprobs"]) for choices in fresh.values()}) == len(SETS)
    cached = []
    for name, adapters in (*SETS.items(), *SETS.items()):
        answer(server, documents=BOATS[::-1], lora=adapters, **given, **scope)
        warm = answer(server, documents=BOATS, lora=adapters, **given, **scope)
        if ON_DEVICE:  # idle KV stays there where it costs less than moving: other cells, and other rounding
            assert likelihoods(warm["choices"]) == pytest.approx(likelihoods(fresh[name]), abs=0.05), name
        else:
            assert [without_ids(one) for one in warm["choices"]] == [without_ids(one) for one in fresh[name]], name
        cached.append(warm["slotcache"]["source"])
    assert cached[: len(SETS)] == ["moved"] * len(SETS)


def without_ids(choice):
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return calls, choice["message"]["content"], choice["logprobs"], choice["finish_reason"]
