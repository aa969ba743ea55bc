"""llama-server's save, restore and erase of slots."""

import json
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import pytest
from slotcache.models.runner import Runner
from support.architectures import hybrid, windowed

from server.conftest import DEADLINE, cached, running, until

LONG = {"messages": [{"role": "user", "content": "Tell me of the old mill. " * 12}], "max_tokens": 12}
ROOM = 300  # tokens of host memory, less than a conversation has


def act(server, action, number=0, **body):
    return server.http.post(f"/slots/{number}", params={"action": action}, json=body)


@pytest.fixture(params=[None, hybrid, windowed])
def model(request, tiny, tmp_path):
    return request.param(tmp_path / "model.gguf") if request.param else tiny


def test_what_was_saved_is_restored_by_another_server_and_answers_the_same(model, tmp_path):
    question = {"role": "user", "content": "Tell me of the old mill. " * 40}  # long enough for a state of its own
    folder = tmp_path / "saved"
    folder.mkdir()
    with running(model, slot_save_path=str(folder), parallel=1) as up:
        first = up.chat(messages=[question], max_tokens=12)
        saved = act(up, "save", filename="mill.bin").json()
        assert saved["n_saved"] > first["usage"]["prompt_tokens"]
        assert saved["n_written"] == (folder / "mill.bin").stat().st_size
        assert saved["id_slot"] == 0 and saved["timings"]["save_ms"] > 0
    with running(model, slot_save_path=str(folder), parallel=1) as up:
        restored = act(up, "restore", filename="mill.bin").json()
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        longer = [question, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
        messages = [*longer, {"role": "user", "content": "And then?"}]
        again = up.chat(messages=messages, max_tokens=8)
        assert cached(again) > 50  # the answer's text need not be cut into tokens as it was sampled
        assert up.chat(messages=messages, max_tokens=8, cache_prompt=False)["choices"] == again["choices"]


def test_a_slot_that_comes_back_is_worth_one_use(tiny, tmp_path):
    """Its file may come from anywhere."""

    def uses():
        return {run["frequency"] for run in up.http.get("/v1/cache").json()["runs"] if run["tokens"] > 50}

    with running(tiny, slot_save_path=str(tmp_path), parallel=1, idle_prefill=False) as up:
        for _ in range(3):
            up.chat(**LONG)
        assert uses() == {3} and act(up, "save", filename="mill.bin").json()["n_saved"]
        up.http.delete("/v1/cache")
        assert act(up, "restore", filename="mill.bin").json()["n_restored"] and uses() == {1}


def test_a_restored_slot_reaches_the_cache_folder(model, tmp_path):
    """`GET /v1/cache` says of a run that it is on disk when it is, and the next server finds it there."""
    question = {"role": "user", "content": "Tell me of the old mill. " * 40}
    slots, kv = tmp_path / "slots", tmp_path / "kv"
    slots.mkdir()
    with running(model, slot_save_path=str(slots), parallel=1) as up:
        first = up.chat(messages=[question], max_tokens=12)
        saved = act(up, "save", filename="mill.bin").json()["n_saved"]
    with running(model, slot_save_path=str(slots), cache_dir=str(kv), parallel=1) as up:
        assert act(up, "restore", filename="mill.bin").json()["n_restored"] == saved
        until(lambda: all(run["disk"] for run in up.http.get("/v1/cache").json()["runs"]))
        until(lambda: up.service.tiers[0].idle)
        written = sorted(kv.glob("*/*.kv"))
        assert len(written) == len(up.http.get("/v1/cache").json()["runs"]) > 0
        again = up.chat(messages=[question], max_tokens=12)
        assert again["choices"] == first["choices"] and again["slotcache"]["source"] in ("host", "snapshot")
    (slots / "mill.bin").unlink()
    with running(model, cache_dir=str(kv), parallel=1) as up:
        again = up.chat(messages=[question], max_tokens=12)
        assert again["choices"] == first["choices"] and again["slotcache"]["source"] == "disk"


def test_a_restore_that_waits_too_long_for_the_engine_blames_no_file(tiny, tmp_path, monkeypatch):
    def too_late(*arguments):
        raise TimeoutError

    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up:
        up.chat(**LONG)
        act(up, "save", filename="mill.bin")
        monkeypatch.setattr(up.service.view.slot_store._arrivals, "adopt", too_late)
        answer = act(up, "restore", filename="mill.bin")
        assert answer.status_code == 503 and answer.headers["Retry-After"]


def test_a_restore_at_the_start_waits_for_the_warm_up(model, tmp_path, monkeypatch):
    """The layout of KV is not known before."""
    settings = {"slot_save_path": str(tmp_path), "parallel": 1}
    with running(model, **settings) as up:
        up.chat(**LONG)
        saved = act(up, "save", filename="mill.bin").json()["n_saved"]
    warm_up, may_begin = Runner.warm_up, Event()
    monkeypatch.setattr(Runner, "warm_up", lambda runner: may_begin.wait(DEADLINE) and warm_up(runner))
    with running(model, **settings) as up, ThreadPoolExecutor(1) as pool:
        restored = pool.submit(act, up, "restore", filename="mill.bin")
        assert not wait([restored], timeout=0.3).done
        may_begin.set()
        assert restored.result().json()["n_restored"] == saved


@pytest.mark.parametrize("idle_prefill", [False, True])
def test_what_was_erased_is_computed_again(model, idle_prefill):
    with running(model, parallel=1, idle_prefill=idle_prefill) as up:
        up.chat(**LONG)
        until(lambda: up.service.idle.done)
        assert act(up, "erase").json()["n_erased"] > 50
        assert cached(up.chat(**LONG)) < 20
        until(lambda: up.service.idle.done)
        assert act(up, "erase", 0).json()["n_erased"] > 50
        assert act(up, "erase", 0).json()["n_erased"] == 0


def test_what_was_not_to_be_cached_cannot_be_saved(tiny, tmp_path):
    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up:
        up.chat(**LONG | {"cache_prompt": False})
        assert act(up, "save", filename="none.bin").json()["n_saved"] == 0
        assert act(up, "restore", filename="none.bin").json()["n_restored"] == 0


def test_a_save_while_another_request_computes_the_same_prompt_holds_what_is_computed(tiny, tmp_path):
    chat = {"messages": [{"role": "user", "content": "Tell me of the old mill. " * 400}], "max_tokens": 4}
    settings = {"slot_save_path": str(tmp_path), "parallel": 2, "batch_size": 256, "ubatch_size": 256}
    with running(tiny, **settings) as up:
        length = up.chat(**chat)["usage"]["prompt_tokens"]
        up.http.delete("/v1/cache")
        body = chat | {"cache_prompt": True, "stream": True, "return_progress": True, "id_slot": 1}
        with up.http.stream("POST", "/v1/chat/completions", json=body) as second:
            events = (json.loads(line[6:]) for line in second.iter_lines() if line.startswith("data: {"))
            next(event for event in events if event.get("prompt_progress", {"processed": 0})["processed"] > 64)
            answer = act(up, "save", filename="part.bin")
            assert answer.status_code == 200, answer.text
            saved = answer.json()["n_saved"]
            assert 64 < saved < length
    with running(tiny, **settings) as up:
        assert act(up, "restore", filename="part.bin").json()["n_restored"] == saved
        assert cached(up.chat(**chat)) == min(saved, length - 1)
        assert up.chat(**chat)["choices"] == up.chat(**chat | {"cache_prompt": False})["choices"]


def squeeze(up):
    host = up.service.engine.scheduler.tree.host
    host.max_bytes = ROOM * host.sizes.run_token


def test_a_save_beside_a_full_host_tier_is_restored(tiny, tmp_path):
    turns = [{"role": "user", "content": "Tell me of the old mill. " * 20}]
    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up:
        squeeze(up)
        answer = {}
        for _ in range(3):
            answer = up.chat(messages=turns)
            turns += [answer["choices"][0]["message"], {"role": "user", "content": "And then? " * 10}]
        length = answer["usage"]["prompt_tokens"]
        assert length > ROOM
        saved = act(up, "save", filename="mill.bin").json()["n_saved"]
        assert saved >= length
    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up:
        assert act(up, "restore", filename="mill.bin").json()["n_restored"] == saved
        up.http.delete("/v1/cache")
        squeeze(up)
        restored = act(up, "restore", filename="mill.bin").json()["n_restored"]
        assert 0 < restored < saved
        assert act(up, "save", filename="again.bin").json()["n_saved"] == restored
        assert cached(up.chat(messages=turns[:-2])) == restored


@pytest.mark.parametrize(
    ("action", "number", "body", "param"),
    [
        ("burn", 0, {}, "action"),
        ("save", 9, {"filename": "a"}, "id"),
        ("save", "1" * 5000, {"filename": "a"}, "id"),
        ("save", "x", {"filename": "a"}, "id"),
        ("save", 0, {}, "filename"),
        ("save", 0, {"filename": ""}, "filename"),
        *(
            (action, 0, {"filename": name}, "filename")
            for action in ("save", "restore")
            for name in ("a\0b", "x" * 300, "ä" * 120)
        ),
        ("save", 0, {"filename": "../a"}, "filename"),
        ("save", 0, {"filename": "/etc/passwd"}, "filename"),
        ("restore", 0, {"filename": ".."}, "filename"),
        ("restore", 0, {"filename": "nothing"}, "filename"),
        ("restore", 0, {"filename": "damaged"}, "filename"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_would_be_right(tiny, tmp_path, action, number, body, param):
    (tmp_path / "damaged").write_bytes(b"nothing of ours, but long enough to be read")
    with running(tiny, slot_save_path=str(tmp_path)) as up:
        answer = act(up, action, number, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_without_a_folder_nothing_is_saved(tiny):
    with running(tiny) as up:
        answer = act(up, "save", filename="a")
        assert answer.status_code == 501 and "--slot-save-path" in answer.json()["error"]["message"]


@pytest.mark.parametrize("parallel", [1, 2])
def test_what_is_computed_ahead_does_not_change_what_a_slot_ran_last(model, tmp_path, parallel):
    saved = []
    for ahead in (False, True):
        with running(model, slot_save_path=str(tmp_path), parallel=parallel, idle_prefill=ahead) as up:
            said = up.chat(**LONG)["choices"][0]["message"]["content"]
            if ahead:
                until(lambda: up.service.idle.done)
                turn = {"messages": [{"role": "user", "content": "Something else."}], "cache_scope": "other"}
                assert up.http.post("/v1/speculate", json=turn).json()["state"] == "started"
                until(lambda: up.service.engine.inbox.ask(lambda: up.service.engine.scheduler.idle).result())
                assert up.metric("slotcache_idle_prompt_tokens_total") > 0
            saved.append(act(up, "save", filename="mill.bin").json()["n_saved"])
            if ahead:
                answer = up.chat(
                    messages=[*LONG["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
                )
                assert answer["slotcache"]["slot"] == 0, "the slot that the conversation is continued in"
    assert saved[0] == saved[1] > 50
