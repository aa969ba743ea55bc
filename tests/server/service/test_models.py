"""Several models that share a device: chosen by name, in turn, each with its KV. Over a real port."""

import asyncio
import json
import logging
import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from random import Random

import httpx
import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models import grammar
from slotcache.models.errors import ModelError
from slotcache.models.model_files import packaged_file
from slotcache.server import load
from slotcache.server.api import endpoint
from slotcache.server.config.settings import Settings, SettingsError
from slotcache.server.serve import make_server
from slotcache.server.service import models as models_module
from slotcache.server.service.models import entries_of
from slotcache.slots.store.disk import DiskTier
from support.dialects import ALL, MESSAGES, RESPONSES
from support.dialects import CHAT as COMPLETIONS
from support.encoders import bert
from support.on_device import ON_DEVICE, loads_two, needs_cpu

from server.api.test_openapi import BODY, LIKELY
from server.conftest import DEADLINE, blocked_load, cached, free_port, is_mapped, serving, text_of, until

HOUR = 3600
QUESTION = "What does the old lighthouse keeper of the northern harbour say about the winter storms of last year?"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three models, and a file that is none."""
    folder = tmp_path_factory.mktemp("several")
    made = [generate(folder / f"{name}.gguf", SHAPES["tiny"], seed=seed) for seed, name in enumerate("abc", 1)]
    broken = folder / "broken.gguf"
    broken.write_bytes(made[0].read_bytes()[:5000])
    return [*made, broken]


@contextmanager
def sharing(files, **changed):
    """A server of these models."""
    usual = {"port": free_port(), "ctx_size": 4096, "flash_attn": "off", "check": True, "threads": 1, "idle_prefill": False}
    settings = Settings(**{"model": "\n".join(map(str, files)), "model_turn": 0} | usual | changed)
    entries = entries_of(settings)
    with serving(*make_server(entries[0].settings, entries), entries[0].path, settings.port) as up:
        yield up
    assert not any(service.engine.num_failed_steps for service in up.host.services)


def each(up, names, **fields):
    """The answers of these models, in turn."""
    answers = [up.chat(QUESTION, model=name, **fields) for name in names]
    assert [answer["model"] for answer in answers] == [*names]
    return answers


def status(up):
    return {one["id"]: one["status"]["value"] for one in up.http.get("/v1/models").json()["data"]}


def models_of(up):
    assert up.host.models is not None
    return up.host.models


def num_threads():
    return len(os.listdir("/proc/self/task"))


CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}


@pytest.fixture
def beside(files, tmp_path):
    """A server of two models with an embedder beside them, whose file is `e.gguf`."""
    bert(tmp_path / "e.gguf")
    with sharing(files[:2], embedding_model=str(tmp_path / "e.gguf")) as up:
        yield up


def embed(up, text="x"):
    return up.http.post("/v1/embeddings", json={"input": text, "model": "e"})


@contextmanager
def blocked_loads(up, error=None):
    """Hold first loads until the event that it yields is set. error: which they fail with."""
    models, go = models_of(up), threading.Event()
    assert models.opener
    really = models.opener.open

    def block(entry):
        assert go.wait(DEADLINE)
        if error:
            raise error
        return really(entry)

    models.opener.open = block
    try:
        yield go
    finally:
        go.set()


def streaming(up, api, *said, **fields):
    return up.http.stream("POST", api.path, json=api.body(*said, most=2, model="b", stream=True, **fields))


def test_requests_choose_a_model_and_find_its_kv_again(files):
    a, b, *_ = files
    with sharing(files[:2]) as up:
        assert status(up) == {"a": "loaded", "b": "unloaded"}
        first = each(up, "ab")
        assert status(up) == {"a": "unloaded", "b": "loaded"} and is_mapped(b) and not is_mapped(a)
        for _ in range(3):
            again = [up.chat(QUESTION, model=name) for name in ("a", "b:latest")]
            assert list(map(text_of, again)) == list(map(text_of, first))
            assert all(cached(one) > 0.9 * one["usage"]["prompt_tokens"] - 8 for one in again)
            assert [one["slotcache"]["source"] for one in again] == ["host", "host"]
        assert up.chat(QUESTION)["model"] == "a"  # the first one, where none is named
        wrong = up.http.post("/v1/chat/completions", json={"model": "d", "messages": [{"role": "user", "content": "?"}]})
        assert wrong.status_code == 404 and "expected a, b" in wrong.json()["error"]["message"]


def test_all_models_are_listed_with_what_they_can_do(beside):
    listed = beside.http.get("/v1/models").json()["models"]
    able = {one["name"]: one["capabilities"] for one in listed}
    assert able == {"a": ["completion"], "b": ["completion"], "e": ["embedding"]}


@pytest.mark.parametrize("size", [{"ctx_size": 0}, {"ctx_size": 1000}, {"ctx_size": 1000, "kv_unified": False}])
def test_a_model_that_was_never_loaded_is_listed_and_shown_by_the_head_of_its_file(files, monkeypatch, size):
    """Clients choose by its context and by what it can do, before they ask it anything."""
    with sharing(files[:2], **size) as up:
        before = up.http.get("/api/tags").json()["models"][1], up.http.post("/api/show", json={"model": "b"})
        assert before[1].status_code == 200, before[1].text
        read, head = [], models_module._read_head
        monkeypatch.setattr(models_module, "_read_head", lambda *given: read.append(given) or head(*given))
        assert up.http.get("/api/tags").json()["models"][1] == before[0] and not read, "the file is read once"
        assert status(up) == {"a": "loaded", "b": "unloaded"} and models_of(up).num_swaps == 0
        up.chat(QUESTION, model="b")
        listed, shown = up.http.get("/api/tags").json()["models"][1], up.http.post("/api/show", json={"model": "b"}).json()
        assert up.http.post("/api/pull", json={"model": "b"}).status_code == 200
    assert before[0] == listed and listed["details"]["family"] == "llama"
    known = {name: value for name, value in shown.items() if name != "parameters"}
    assert before[1].json() == known and known["capabilities"] == ["completion", "tools"] and known["template"]
    assert known["model_info"]["llama.context_length"] > 0


def test_the_head_of_a_file_is_read_again_when_it_has_changed_and_a_broken_one_is_reported(files, tmp_path):
    a, b, _, broken = files
    there = tmp_path / "x.gguf"
    shutil.copy(broken, there)
    with sharing([a, there]) as up:
        listed = up.http.get("/api/tags").json()["models"][1]
        assert listed["name"] == "x:latest" and listed["details"] == {"format": "gguf"} and listed["size"] == 5000
        answer = up.http.post("/api/show", json={"model": "x"})
        assert answer.status_code == 503 and answer.json()["error"].startswith("'x' cannot be read: ")
        shutil.copy(b, there)
        assert up.http.get("/api/tags").json()["models"][1]["details"]["family"] == "llama"
        assert up.http.post("/api/show", json={"model": "x:latest"}).json()["model_info"]["llama.context_length"] <= 4096
        assert up.http.post("/api/pull", json={"model": "x"}).json() == {"status": "success"}
        unknown = up.http.post("/api/show", json={"model": "y"})
        assert unknown.status_code == 404 and "a:latest, x:latest" in unknown.json()["error"]


def test_ollama_s_clients_see_all_models(files):
    with sharing(files[:2]) as up:
        assert [one["name"] for one in up.http.get("/api/tags").json()["models"]] == ["a:latest", "b:latest"]
        body = {"model": "b", "messages": [{"role": "user", "content": QUESTION}], "stream": False}
        assert up.http.post("/api/chat", json=body | {"options": {"num_predict": 2}}).json()["model"] == "b"
        assert [one["name"] for one in up.http.get("/api/ps").json()["models"]] == ["b:latest"]
        assert up.http.post("/api/show", json={"model": "b"}).json()["model_info"]
        assert up.http.post("/api/chat", json={"model": "b", "keep_alive": 0}).json()["done_reason"] == "unload"
        until(lambda: status(up) == {"a": "unloaded", "b": "unloaded"})


def test_a_model_that_cannot_be_loaded_fails_alone(files):
    a, broken = files[0], files[3]
    with sharing([a, broken, files[1]]) as up:
        first = up.chat(QUESTION, model="a")
        for _ in range(2):
            answer = up.http.post("/completion", json={"model": "broken", "prompt": "Hello"})
            assert answer.status_code == 503 and "broken could not be loaded" in answer.json()["error"]["message"]
        listed = up.http.get("/v1/models").json()["data"][1]
        assert listed["status"]["value"] == "unloaded" and listed["status"]["failed"] and listed["status"]["reason"]
        until(lambda: status(up)["a"] == "loaded")  # it comes back by itself
        again = up.chat(QUESTION, model="a")
        assert text_of(again) == text_of(first) and cached(again)


LATE = ["learn_costs", "write_origin", "Conversations", "Metrics", "load_vectors", "DiskTier.wait"]


@pytest.mark.parametrize("step", LATE)
def test_a_model_that_fails_late_in_its_load_leaves_nothing_behind(files, tmp_path, monkeypatch, caplog, step):
    """Its weights would lie in memory for good, and again with each try; its folder would be another server's."""
    b = files[1]

    def fail(*given, **named):
        assert is_mapped(b)
        raise ModelError("no memory is left")

    def num_threads():
        return sum(thread.name in ("conversations", "disk") for thread in threading.enumerate())

    with sharing(files[:2], cache_dir=str(tmp_path / "cache")) as up:
        before = num_threads()
        with monkeypatch.context() as patched:
            patched.setattr(f"{load.__name__}.{step}", fail)
            for _ in range(2):
                assert up.http.post("/models/load", json={"model": "b"}).status_code == 503
                assert not is_mapped(b)
        until(lambda: status(up)["a"] == "loaded")
        until(lambda: num_threads() <= before)
        assert up.http.post("/models/load", json={"model": "b"}).status_code == 200
    assert "another server" not in caplog.text


def test_a_model_that_fails_late_is_not_freed_while_its_vocabulary_is_read(files, monkeypatch):
    has_started, has_failed, was_freed = threading.Event(), threading.Event(), []

    def read(model):
        has_started.set()
        has_failed.wait()
        was_freed.append(any(not model.weights._handle or time.sleep(0.01) for _ in range(100)))

    def fail(*given):
        has_started.wait()
        has_failed.set()
        raise ModelError("no memory is left")

    with sharing(files[:2]) as up, monkeypatch.context() as patched:
        patched.setattr(grammar, "Tokens", read)
        patched.setattr(load, "Metrics", fail)
        assert up.http.post("/models/load", json={"model": "b"}).status_code == 503
        until(lambda: was_freed)
        assert was_freed == [False]


def test_an_encoder_that_was_no_model_to_generate_is_unloaded(files, tmp_path):
    bert(encoder := tmp_path / "e.gguf")
    with sharing([files[0], encoder]) as up:
        answer = up.http.post("/completion", json={"model": "e", "prompt": "Hello"})
        assert answer.status_code == 503 and "not a text generation model" in answer.text
        assert not is_mapped(encoder)


def test_what_is_too_long_for_one_model_may_fit_another(files, tmp_path):
    short = generate(tmp_path / "short.gguf", replace(SHAPES["tiny"], context=512))
    with sharing([short, files[1]]) as up:
        body = {"prompt": "again " * 400, "n_predict": 1}
        names = ("short", "b", "short", "b")
        answers = [up.http.post(f"/completion?model={name}", json=body).status_code for name in names]
        assert answers == [400, 200, 400, 200]


def test_a_model_that_can_neither_stay_nor_come_back_is_tried_once(files):
    with sharing(files[:2]) as up, blocked_loads(up, ModelError("it is too large")) as go:
        tries = []

        def fail():
            tries.append(1)
            raise ModelError("no memory is left")

        up.host.services[0].model.weights.on_load.append(fail)
        go.set()
        assert up.http.post("/completion", json={"model": "b", "prompt": "Hello"}).status_code == 503
        until(lambda: models_of(up).entries["a"].value == "failed")
        reported = [up.http.get("/health") for _ in range(20)]
        assert {one.status_code for one in reported} == {503} and "no memory is left" in reported[0].text and len(tries) == 1
        answer = up.http.post("/completion", json={"model": "a", "prompt": "Hello"})
        assert answer.status_code == 503 and "no memory is left" in answer.text


@pytest.mark.parametrize("step", ["adopt", "start", "_give_up"])
def test_a_model_that_is_loaded_and_cannot_start_is_unloaded_and_tried_again(files, step, monkeypatch, caplog):
    b, body = files[1], {"model": "b", "prompt": "Hello", "n_predict": 2}
    with sharing(files[:2]) as up:
        models = models_of(up)
        budget = up.host.services[0].engine.scheduler.tree.host.max_bytes
        adopt, give_up = models.adopt, models._give_up

        def fail(*given):
            if step == "adopt":
                adopt(*given)
            raise RuntimeError("can't start new thread")

        async def fail_again(*given):
            await give_up(*given)
            raise RuntimeError("odd")

        with monkeypatch.context() as patched:
            patched.setattr(*((models, "adopt") if step == "adopt" else (models.opener, "start")), fail)
            patched.setattr(models, "_give_up", fail_again if step == "_give_up" else give_up)
            answer = up.http.post("/completion", json=body)
            assert answer.status_code == 503 and "b could not be loaded: can't start new thread" in answer.text
        assert status(up)["b"] == "unloaded" and not is_mapped(b) and "can't start new thread" in caplog.text
        until(lambda: status(up)["a"] == "loaded")  # it comes back by itself
        until(lambda: up.host.services[0].engine.scheduler.tree.host.max_bytes == budget)
        assert up.chat(QUESTION, model="a")["model"] == "a"
        assert up.http.post("/completion", json=body).status_code == 200


@pytest.mark.parametrize(("error", "says"), [(RuntimeError("odd"), "odd"), (MemoryError(), "MemoryError")])
def test_a_model_whose_return_cannot_begin_fails_alone_and_is_tried_again(beside, monkeypatch, caplog, error, says):
    body = {"model": "b", "prompt": "Hello", "n_predict": 2}
    each(beside, "ba")
    embed(beside)  # back, and in the way

    def fail():
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(models_of(beside), "_make_room", fail)
        answer = beside.http.post("/completion", json=body)
        assert answer.status_code == 503 and says in answer.json()["error"]["message"]
        until(lambda: models_of(beside).entries["b"].value == "failed")
    assert type(error).__name__ in caplog.text
    each(beside, "ab")


def test_an_error_after_a_load_leaves_no_other_model_waiting(files, monkeypatch):
    with sharing(files[:2]) as up:
        each(up, "ba")
        engine, errors = up.host.services[1].engine, [RuntimeError("odd")]
        really = engine.sleep._on_wake

        def fail(error):
            if errors:
                raise errors.pop()
            really(error)

        monkeypatch.setattr(engine.sleep, "_on_wake", fail)
        each(up, "ba")
        assert not errors and engine.num_failed_steps == 1
        engine.num_failed_steps = 0  # this one was to be


def test_what_runs_is_answered_before_a_model_is_unloaded(files):
    with sharing(files[:2]) as up:
        body = {"model": "a", "prompt": "Hello", "stream": True, "ignore_eos": True, "n_predict": 40}
        with up.http.stream("POST", "/completion", json=body) as stream, ThreadPoolExecutor(1) as pool:
            lines = stream.iter_lines()
            next(lines)
            other = pool.submit(up.chat, QUESTION, model="b")
            assert '"tokens_predicted":40' in "".join(lines)
            assert other.result(DEADLINE)["model"] == "b"


def test_a_model_waits_for_requests_of_its_own_only_where_that_was_of_use(files):
    with sharing(files[:2], model_turn=HOUR) as up, ThreadPoolExecutor(1) as pool:
        engine, sleep = up.host.services[0].engine, up.host.services[0].engine.sleep

        def ask_another():
            engine.inbox.put(lambda: setattr(sleep, "_load_seconds", HOUR))
            other = pool.submit(up.chat, QUESTION, model="b")
            until(lambda: sleep.is_ending)
            return other

        def end_wait(other):
            assert not other.done()
            engine.inbox.put(lambda: setattr(sleep, "last_use", -HOUR))
            assert other.result(DEADLINE)["model"] == "b"

        up.chat(QUESTION, model="a")
        other = ask_another()
        assert up.chat(QUESTION, model="a")["model"] == "a"  # of use
        end_wait(other)
        up.chat(QUESTION, model="a")
        end_wait(ask_another())  # in vain
        up.chat(QUESTION, model="a")
        engine.inbox.put(lambda: setattr(sleep, "_load_seconds", HOUR))
        assert up.chat(QUESTION, model="b")["model"] == "b"  # at once
        up.chat(QUESTION, model="a")  # within the wait that was left out
        end_wait(ask_another())


NO_DEVICE = [
    ("POST", "/tokenize", {"content": "Hello"}),
    ("POST", "/detokenize", {"tokens": [1, 2]}),
    ("POST", "/apply-template", CHAT),
    ("POST", "/v1/chat/completions/input_tokens", CHAT),
    ("POST", "/v1/messages/count_tokens", CHAT),
    ("POST", "/v1/responses/input_tokens", {"input": "Hello"}),
    ("POST", "/v1/documents/order", {"documents": [{"id": "a", "text": "Some text."}]}),
    ("POST", "/api/show", {}),
    *(
        ("GET", path, None)
        for path in ("/props", "/slots", "/metrics", "/lora-adapters", "/v1/cache", "/api/ps", "/v1/models/b")
    ),
    ("DELETE", "/v1/cache", None),
    ("DELETE", "/v1/speculate", None),
]


def test_what_needs_no_device_does_not_take_it(files):
    """Else two clients that only count change the model in memory with each call."""
    with sharing(files[:2], lora_init_without_apply=True) as up:
        each(up, "ba")
        models, engine = models_of(up), up.host.services[1].engine
        swaps = models.num_swaps
        for method, path, body in NO_DEVICE:
            asked = None if body is None else body | {"model": "b"}
            params = {"model": "b"} if body is None else None
            assert up.http.request(method, path, json=asked, params=params).status_code == 200, path
            engine.inbox.ask(lambda: None).result(DEADLINE)  # behind what would have asked for the device
            assert up.http.get("/health").json()["models"] == {"a": "loaded", "b": "unloaded"}, path
        assert models.num_swaps == swaps and not models._waiting and up.chat(QUESTION, model="a")["model"] == "a"


WITHOUT_STEPS = [
    ("/tokenize", {"content": "Hello"}, 200),
    ("/v1/chat/completions/input_tokens", CHAT, 200),
    ("/models/load", {}, 200),
    ("/api/generate", {"stream": False}, 200),
    ("/v1/speculate", CHAT, 200),
    ("/v1/chat/completions", CHAT | {"stop": ["x"] * 100}, 400),
]


@pytest.mark.parametrize("model_turn", [0, 4])
def test_a_turn_ends_whatever_is_asked_that_computes_nothing(files, model_turn):
    def go_on(ended):
        with httpx.Client(base_url=up.url, timeout=DEADLINE) as client:
            while not ended.is_set():
                for path, body, expected in WITHOUT_STEPS:
                    assert client.post(path, json=body | {"model": "b"}).status_code == expected, path

    with sharing(files[:2], model_turn=model_turn) as up, ThreadPoolExecutor(2) as pool:
        ended = threading.Event()
        assert up.http.post("/models/load", json={"model": "b"}).json() == {"success": True}
        engine = up.host.services[1].engine
        engine.inbox.put(lambda: setattr(engine.sleep, "_load_seconds", 4))  # a larger model's: calls come far closer
        try:
            others = [pool.submit(go_on, ended) for _ in range(2)]
            assert up.chat(QUESTION, model="a")["model"] == "a"
        finally:
            ended.set()
        assert [other.result(DEADLINE) for other in others] == [None, None]


@pytest.fixture
def own(files, tmp_path):
    """Files of this test alone, and the answers of their models."""
    copies = [Path(shutil.copy(file, tmp_path / file.name)) for file in files[:3]]
    with sharing(copies) as up:
        return copies, {name: text_of(up.chat(QUESTION, model=name)) for name in "abc"}


def put_again(file):
    shutil.copy(file, file.with_suffix(".new")).replace(file)


@pytest.mark.parametrize("act", [Path.touch, put_again])
def test_a_file_that_was_touched_is_the_same_model_with_its_kv(own, act):
    (a, b, _), known = own
    with sharing([a, b]) as up:
        each(up, "ab")
        for name, file in (("a", a), ("b", b)):
            act(file)
            again = up.chat(QUESTION, model=name)
            assert text_of(again) == known[name] and again["slotcache"]["source"] == "host"
            assert up.http.get("/health").json()["models"] == {"a": "unloaded", "b": "unloaded"} | {name: "loaded"}


@pytest.mark.parametrize("name", ["a", "b"])
def test_another_file_is_another_model_and_finds_none_of_the_old_kv(own, name, tmp_path):
    (a, b, c), known = own
    file, other = {"a": (a, "b"), "b": (b, "a")}[name]
    with sharing([a, b], cache_dir=str(tmp_path / "kv"), conversations=5) as up:
        for one in (name, other):
            up.chat(QUESTION, model=one, conversation="x")
        old = models_of(up).entries[name].loaded
        shutil.copy(c, file.with_suffix(".new")).replace(file)
        with ThreadPoolExecutor(4) as pool:  # at once, as clients ask
            answers = list(pool.map(lambda _: up.chat(QUESTION, model=name, cache_prompt=False), range(4)))
        assert {text_of(one) for one in answers} == {known["c"]} != {known[name]}
        assert [cached(up.chat(QUESTION, model=name)) > 0 for _ in range(2)] == [False, True]
        assert models_of(up).entries[name].loaded is not old and up.http.get("/slots").status_code == 200
        assert up.http.get(f"/v1/conversations/x?model={name}").status_code == 404
        assert text_of(up.chat(QUESTION, model=other)) == known[other]
        assert up.http.get("/health").json()["models"] == {name: "unloaded", other: "loaded"}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_file_that_is_away_or_half_copied_fails_alone_and_is_tried_again(own, name):
    (a, b, c), known = own
    file, other = {"a": (a, "b"), "b": (b, "a")}[name]
    body = {"model": name, "prompt": "Hello", "n_predict": 2}
    with sharing([a, b]) as up:
        for one in (name, other):
            up.chat(QUESTION, model=one)
        away = file.rename(file.with_suffix(".away"))
        for _ in range(2):
            answer = up.http.post("/completion", json=body)
            assert answer.status_code == 503 and "cannot read" in answer.text
            health = up.http.get("/health").json()
            assert health["models"] == {name: "failed", other: "loaded"} and "cannot read" in health["failed"][name]
        away.rename(file)
        back = up.chat(QUESTION, model=name)
        assert text_of(back) == known[name] and cached(back) > 0
        up.chat(QUESTION, model=other)
        file.write_bytes(c.read_bytes()[:5000])
        for _ in range(2):
            assert up.http.post("/completion", json=body).status_code == 503
            assert up.http.get("/health").json()["models"][name] == "failed"
            assert text_of(up.chat(QUESTION, model=other)) == known[other]
        file.write_bytes(c.read_bytes())
        assert text_of(up.chat(QUESTION, model=name)) == known["c"]


def test_a_file_that_is_whole_by_the_time_its_load_fails_is_tried_again(files, tmp_path):
    file = Path(shutil.copy(files[1], tmp_path / "b.gguf"))
    with sharing([files[0], file]) as up:
        opener = models_of(up).opener
        assert opener
        really = opener.open

        def fail_once(entry):
            opener.open = really
            file.touch()
            raise ModelError("half of it is there")

        opener.open = fail_once
        codes = [
            up.http.post("/completion", json={"model": "b", "prompt": "Hello", "n_predict": 2}).status_code for _ in "ab"
        ]
        assert codes == [503, 200]


def test_a_request_that_comes_too_late_for_the_old_model_takes_no_place(own):
    """It was let in before the file changed, and wakes the old model while that one is being freed."""
    (a, b, c), known = own

    async def replaced():
        entry = models_of(up).entries["b"]
        old = entry.loaded
        assert old is not None and old.service is not None
        models_of(up)._replace(entry, old)
        old.service.engine.sleep.wake()
        assert entry.closing is not None
        await entry.closing

    with sharing([a, b]) as up:
        each(up, "ba")
        shutil.copy(c, b)
        loop = up.host.services[0].engine.outbox.loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(replaced(), loop).result(DEADLINE)
        assert up.http.get("/health").json()["models"] == {"a": "loaded", "b": "unloaded"}
        assert text_of(up.chat(QUESTION, model="b")) == known["c"] and text_of(up.chat(QUESTION, model="a")) == known["a"]


def test_a_request_whose_model_is_replaced_as_it_is_let_in_is_answered_by_no_other_model(own, monkeypatch):
    (a, b, c), known = own
    with sharing([a, b]) as up:
        each(up, "ba")
        models, really = models_of(up), models_of(up).ready

        async def ready(entry):
            loaded = await really(entry)
            shutil.copy(c, b)
            asyncio.get_running_loop().call_soon(models._replace, entry, loaded)
            return loaded

        monkeypatch.setattr(models, "ready", ready)
        answer = up.http.post("/v1/chat/completions", json=CHAT | {"model": "b"})
        monkeypatch.setattr(models, "ready", really)
        assert answer.status_code == 503, answer.json()["model"]
        assert text_of(up.chat(QUESTION, model="b")) == known["c"]


def test_a_server_none_of_whose_models_can_come_back_says_so(own):
    (a, b, _), _ = own
    with sharing([a, b]) as up:
        each(up, "ab")
        assert up.http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
        until(lambda: status(up) == {"a": "unloaded", "b": "unloaded"})
        away = a.parent.rename(a.parent.with_name("away"))
        for name in "ab":
            assert up.http.get("/health").status_code == 200, "some may be loaded, as far as is known"
            assert up.http.post("/completion", json={"model": name, "prompt": "Hello"}).status_code == 503
        health = up.http.get("/health")
        assert health.status_code == 503 and "cannot read" in health.json()["error"]["message"]
        away.rename(a.parent)
        assert up.chat(QUESTION, model="b")["model"] == "b" and up.http.get("/health").json()["models"]["b"] == "loaded"


@loads_two
def test_an_embedder_beside_whose_file_is_another_one_is_refused_and_shown_so(beside, tmp_path):
    original = (embedder := tmp_path / "e.gguf").read_bytes()
    for content, value in (
        (original, "loaded"),
        (original[:-1] + bytes([original[-1] ^ 1]), "failed"),
        (original, "loaded"),
    ):
        assert beside.http.post("/models/unload", json={"model": "e"}).status_code in (200, 400)
        until(lambda: not beside.vectors.workers[0].embedder.is_open)
        embedder.write_bytes(content)
        answer = embed(beside)
        assert answer.status_code == (200 if value == "loaded" else 503)
        health = beside.http.get("/health").json()
        assert health["beside"] == {"e": value} and ("e" in health.get("failed", {})) == (value == "failed")
        assert status(beside)["e"] == ("loaded" if value == "loaded" else "unloaded")


def test_a_client_that_disconnects_during_a_load_cancels_nothing_of_others(files):
    with sharing(files[:2]) as up, ThreadPoolExecutor(2) as pool:
        up.chat(QUESTION, model="b")
        up.chat(QUESTION, model="a")
        body = {"model": "b", "prompt": "Hello", "stream": True, "ignore_eos": True}
        with blocked_load(up.host.services[1].model.weights) as (began, _), up.http.stream("POST", "/completion", json=body):
            assert began.wait(DEADLINE)
            assert up.http.get("/health").json()["models"] == {"a": "unloaded", "b": "loading"}
            other = pool.submit(up.chat, QUESTION, model="b")
        assert other.result(DEADLINE)["model"] == "b"


def test_many_clients_and_three_models_are_all_answered(files):
    with sharing(files[:3]) as up, ThreadPoolExecutor(8) as pool:
        expected = {name: text_of(up.chat(QUESTION, model=name)) for name in "abc"}
        asked = [("abc"[number % 3]) for number in range(48)]
        found = list(pool.map(lambda name: text_of(up.chat(QUESTION, model=name)), asked))
        assert found == [expected[name] for name in asked]
        assert all(entry.num_turns > 1 for entry in models_of(up).entries.values())


def test_rude_clients_and_a_broken_file_change_no_answer_of_others(files):
    body = {"prompt": QUESTION, "n_predict": 4, "temperature": 0, "cache_prompt": True}

    def ask(name):
        answer = up.http.post("/completion", json=body | {"model": name})
        return answer.json().get("content", answer.status_code)

    def disconnect(name):
        with up.http.stream("POST", "/completion", json=body | {"model": name, "stream": True, "n_predict": 900}) as answer:
            next(answer.iter_lines())

    def unload(name):
        fields = {"prompt": "x", "keep_alive": 0, "stream": False, "options": {"num_predict": 2}}
        assert up.http.post("/api/generate", json=fields | {"model": name}).json()["done"]

    with sharing(files) as up, ThreadPoolExecutor(8) as pool:
        acts = [act for number in range(48) for act in ((ask, "abc"[number % 3]), (disconnect, "bca"[number % 3]))]
        acts += [act for _ in range(8) for act in ((unload, "a"), (unload, "b"), (ask, "broken"))]
        Random(1).shuffle(acts)  # the first ones meet models that were never loaded
        found = [(name, pool.submit(act, name)) for act, name in acts]
        answers = {(name, answer) for name, job in found if (answer := job.result(DEADLINE)) is not None}
        expected = {(name, ask(name)) for name in "abc"}
    assert len({text for _, text in expected}) == 3 and answers == expected | {("broken", 503)}


def test_a_request_that_a_turn_left_waiting_is_answered_in_the_next(files):
    with sharing(files[:2], parallel=1) as up, ThreadPoolExecutor(2) as pool:
        loaded = models_of(up).entries["a"].loaded
        assert loaded and loaded.service
        engine = loaded.service.engine
        body = {"model": "a", "prompt": "Hello", "stream": True, "ignore_eos": True}
        with up.http.stream("POST", "/completion", json=body):
            until(lambda: engine.scheduler.running)
            waits = pool.submit(up.chat, QUESTION, model="a")
            until(lambda: len(engine.scheduler.waiting))
            other = pool.submit(up.chat, QUESTION, model="b")
            until(lambda: engine.sleep.is_ending)
        assert other.result(DEADLINE)["model"] == "b"
        assert waits.result(DEADLINE)["model"] == "a"


@pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text(), reason="llama.cpp computes without OpenMP")
@needs_cpu
def test_the_workers_of_a_model_end_when_it_is_unloaded(files):
    with sharing(files[:2], threads=24) as up:
        up.chat(QUESTION, model="a")
        with_a = num_threads()
        up.chat(QUESTION, model="b")
        until(lambda: num_threads() < with_a + 12)
        assert models_of(up).unload(models_of(up).entries["b"]) is None
        until(lambda: num_threads() < with_a - 12)


def test_two_models_stay_where_two_places_are_given(files):
    with sharing(files[:3], models_loaded=2) as up:
        each(up, "abab")
        assert models_of(up).num_swaps == 1 and list(status(up).values()) == ["loaded", "loaded", "unloaded"]
        up.chat(QUESTION, model="c")
        assert status(up)["c"] == "loaded" and list(status(up).values()).count("loaded") == 2


def test_models_are_loaded_and_unloaded_as_by_llama_server_s_router(files):
    with sharing(files[:2]) as up:
        assert up.http.post("/models/load", json={"model": "b"}).json() == {"success": True}
        assert status(up) == {"a": "unloaded", "b": "loaded"}
        assert up.http.get("/props?model=b").json()["model_alias"] == "b"
        assert up.http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
        until(lambda: status(up) == {"a": "unloaded", "b": "unloaded"})
        assert up.http.post("/models/unload", json={"model": "b"}).status_code == 400
        assert up.http.post("/models/load", json={"model": "d"}).status_code == 404
        assert up.chat(QUESTION, model="b")["model"] == "b"


def test_host_memory_is_one_budget(files):
    with sharing(files[:2], cache_ram=64) as up:
        each(up, "abab")
        budgets = {service.engine.scheduler.tree.host.max_bytes for service in up.host.services}
        assert (
            len(budgets) == 1
            and sum(service.engine.scheduler.tree.host.max_bytes for service in up.host.services) <= 64 << 20
        )


def test_kv_on_disk_is_read_before_its_model_is_loaded(files, tmp_path):
    with sharing(files[:2], cache_dir=str(tmp_path / "cache")) as up, ThreadPoolExecutor(1) as pool:
        engine, host = up.host.services[0].engine, up.host.services[0].engine.scheduler.tree.host
        engine.fetches.least = 10 * DEADLINE  # computing takes less time than a busy machine needs to read a file
        each(up, "ab")
        size, (disk,) = host.max_bytes, up.host.services[0].tiers
        assert isinstance(disk, DiskTier)
        until(lambda: disk.idle)
        for most in (1, size):  # then it is on disk alone
            engine.resize_host(most)
        until(lambda: host.max_bytes == size and not host.num_bytes)
        with blocked_load(up.host.services[0].model.weights):
            answer = pool.submit(up.chat, QUESTION, model="a")
            until(lambda: host.num_bytes)
            assert not engine.sleep.is_awake  # it waits for the device, or is loaded
        assert answer.result(DEADLINE)["slotcache"]["source"] == "disk"


def test_a_scope_is_dropped_from_all_models_but_for_one_that_is_named(files):
    with sharing(files[:2]) as up:
        each(up, "ab")
        assert up.http.delete("/v1/cache?model=b").json()["tokens"] > 0
        assert cached(up.chat(QUESTION, model="a")) > 0 == cached(up.chat(QUESTION, model="b"))
        assert up.http.delete("/v1/cache").json()["tokens"] > 0
        assert cached(up.chat(QUESTION, model="a")) == cached(up.chat(QUESTION, model="b")) == 0


def test_a_session_ends_with_every_model_that_it_asked(files):
    with sharing(files[:2]) as up:
        each(up, "ab", session_id="s")
        assert up.http.delete("/v1/sessions/s?model=b").json()["tokens"] > 0
        assert up.http.delete("/v1/sessions/s").json()["tokens"] > 0
        assert up.http.delete("/v1/sessions/s").status_code == 404


def test_conversations_of_all_models_share_their_bounds(files):
    with sharing(files[:2], conversations=3) as up:
        for number in range(3):
            up.chat(QUESTION, model="a", conversation=f"c{number}")
        up.chat(QUESTION, model="b", conversation="d")
        found = [up.http.get(f"/v1/conversations/c{number}?model=a").status_code for number in range(3)]
        assert found == [404, 200, 200] and up.http.get("/v1/conversations/d?model=b").status_code == 200


def test_an_answer_is_found_whichever_model_has_it(files):
    """Clients of OpenAI name none where they fetch one or stop it."""
    with sharing(files[:2]) as up:
        asked = {"model": "b", "input": QUESTION, "max_output_tokens": 4}
        made = up.http.post("/v1/responses", json=asked).json()
        for path in (f"/v1/responses/{made['id']}", f"/v1/responses/{made['id']}/input_items"):
            assert up.http.get(path).status_code == 200 and up.http.get(f"{path}?model=a").status_code == 404
        assert up.http.delete(f"/v1/responses/{made['id']}").json()["deleted"] is True
        said = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "stream": True, "ignore_eos": True}
        kept = said | {"model": "b", "store": True, "cache_prompt": True, "on_disconnect": "finish"}
        first = next(
            line for line in up.http.post("/v1/chat/completions", json=kept).text.splitlines() if line.startswith("data: ")
        )
        path = f"/v1/chat/completions/{json.loads(first[6:])['id']}"
        assert up.http.get(path).json()["usage"]["completion_tokens"] == 4
        assert up.http.delete(path).json()["deleted"] is True and up.http.get(path).status_code == 404


def test_a_second_model_deletes_no_conversation_that_fits(files, tmp_path):
    def found():
        return [up.http.get(f"/v1/conversations/c{number}?model=a").status_code for number in range(3)]

    cache = tmp_path / "cache"
    for name in "ab":
        with sharing(files[:2], conversations=3, cache_dir=str(cache)) as up:
            for number in range(3 if name == "a" else 0):
                up.chat(QUESTION, model="a", conversation=f"c{number}")
            assert found() == [200] * 3
            up.chat(QUESTION, model="b")
            assert found() == [200] * 3 and metric(up, "slotcache_conversations_evicted_total") == 0
            if name == "b":
                up.chat(QUESTION, model="b", conversation="d")
                assert found() == [404, 200, 200] and metric(up, "slotcache_conversations_evicted_total") == 1


def test_a_model_of_one_conversation_is_not_another_s(files):
    with sharing(files[:2]) as up:
        stored = up.http.post("/v1/responses", json={"model": "b", "input": "Hello", "max_output_tokens": 2}).json()
        body = {"input": "And?", "max_output_tokens": 2, "previous_response_id": stored["id"]}
        assert up.http.post("/v1/responses", json=body | {"model": "a"}).status_code == 404
        assert up.http.post("/v1/responses", json=body | {"model": "b"}).status_code == 200
        assert up.http.get(f"/v1/responses/{stored['id']}?model=b").status_code == 200


def test_a_model_in_the_address_answers_a_body_that_names_none(files):
    with sharing(files[:2]) as up:
        body = {"prompt": "Hello", "n_predict": 2}
        assert [up.http.post(f"/completion?model={name}", json=body).json()["model"] for name in "ba"] == ["b", "a"]
        assert up.http.post("/completion?model=b", json=body | {"model": "a"}).json()["model"] == "a"
        assert up.http.post("/completion?model=d", json=body).status_code == 404


def test_the_routes_that_heed_a_model_in_the_address_say_so(files):
    with sharing(files[:2], slot_save_path=str(files[0].parent)) as up:
        said = set()
        for path, methods in up.http.get("/openapi.json").json()["paths"].items():
            for method, reported in methods.items():
                schema = reported.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
                fields = BODY.get(path, ()) if schema else ()
                wanted = (LIKELY | {"input": "Hello", "input_prefix": "a", "input_suffix": "b"}).items()
                body = {name: value for name, value in wanted if name in fields and name != "model"}
                if "responses" in path:
                    body.pop("prompt", None)  # a template there
                where = path.replace("{", "").replace("}", "") + "?model=none"
                answer = up.http.request(method, where, content=json.dumps(body) if schema else None)
                heeds = answer.status_code == 404 and "'none' is served here: expected a, b" in answer.text
                named = any(one["name"] == "model" for one in reported["parameters"])
                assert heeds == named, (method, path, answer.text)
                said |= {path} if named else set()
        assert {"/v1/chat/completions", "/props", "/slots/{id}", "/v1/cache", "/metrics"} <= said


def test_tokens_are_of_the_model_that_is_named_which_alone_wakes(files):
    with sharing(files[:2]) as up:
        up.chat(QUESTION, model="b")
        assert up.http.post("/tokenize", json={"content": QUESTION, "model": "b"}).json()["tokens"]
        assert up.http.post("/detokenize", json={"tokens": [5], "model": "b"}).status_code == 200
        up.chat(QUESTION, model="b")
        assert models_of(up).num_swaps == 1 and status(up) == {"a": "unloaded", "b": "loaded"}
        assert up.http.post("/tokenize", json={"content": QUESTION, "model": "d"}).status_code == 404


def test_an_embedder_beside_answers_by_its_name(beside):
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/api/embed", {"input": "x"})):
        for name in ("e", "e:latest"):
            answer = beside.http.post(path, json=body | {"model": name})
            assert answer.status_code == 200, answer.text
    assert beside.http.post("/v1/embeddings", json={"input": "x", "model": "f"}).status_code == 404
    assert beside.http.post("/completion", json={"prompt": "x", "model": "e"}).status_code == 404
    assert models_of(beside).num_swaps == 0


def test_an_embedder_beside_unloads_when_it_is_asked_to_and_comes_back_for_a_text(beside, tmp_path):
    first = embed(beside).json()["data"]
    assert beside.http.get("/health").json()["beside"] == {"e": "loaded"} and is_mapped(tmp_path / "e.gguf")
    assert beside.http.post("/models/unload", json={"model": "e"}).json() == {"success": True}
    until(lambda: status(beside) == {"a": "loaded", "b": "unloaded", "e": "unloaded"})
    assert not is_mapped(tmp_path / "e.gguf") and beside.http.post("/models/unload", json={"model": "e"}).status_code == 400
    assert embed(beside).json()["data"] == first
    assert beside.http.get("/health").json()["beside"] == {"e": "loaded"}


def test_an_embedder_that_is_asked_twice_to_unload_stays_after_its_next_text(beside):
    (worker,) = beside.vectors.workers
    reported, unload = [], worker.embedder.unload

    def unload_and_report():
        reported.append(worker.keep(0))
        unload()

    worker.embedder.unload = unload_and_report
    worker.keep(0)
    until(lambda: reported and worker._queue._thread is None)
    assert not worker.embedder.is_open
    assert embed(beside).status_code == 200
    assert worker.embedder.is_open and worker.seconds_left == math.inf


def metric(up, name):
    return next(float(line.split()[1]) for line in up.http.get("/metrics").text.splitlines() if line.startswith(f"{name} "))


def test_an_embedder_beside_gives_its_place_to_a_model_that_comes_back(beside, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "slotcache"):
        first = embed(beside).json()["data"]
        beside.chat(QUESTION, model="b")  # its first load is fitted to what the embedder leaves free
        assert status(beside)["e"] == "loaded" and metric(beside, "slotcache_vector_models") == 1
        beside.chat(QUESTION, model="a")
        assert status(beside) == {"a": "loaded", "b": "unloaded", "e": "unloaded"} and not is_mapped(tmp_path / "e.gguf")
        assert metric(beside, "slotcache_vector_models") == metric(beside, "slotcache_vector_loads_total") == 0
        assert "e.gguf is unloaded until its next text" in caplog.text
        assert embed(beside).json()["data"] == first
        assert status(beside) == {"a": "loaded", "b": "unloaded", "e": "loaded"}
        assert metric(beside, "slotcache_vector_models") == metric(beside, "slotcache_vector_loads_total") == 1
        assert "e.gguf is back in memory after" in caplog.text


def test_an_embedder_beside_stays_where_it_has_a_place(files, tmp_path, monkeypatch):
    bert(embedder := tmp_path / "e.gguf")
    with sharing(files[:3], embedding_model=str(embedder), models_loaded=3) as up:
        each(up, "abca")
        models_of(up).unload(models_of(up).entries["a"])
        until(lambda: status(up)["a"] == "unloaded")
        assert up.http.post("/models/unload", json={"model": "c"}).json() == {"success": True}
        until(lambda: status(up)["c"] == "unloaded")
        up.chat(QUESTION, model="a")
        assert status(up) == {"a": "loaded", "b": "loaded", "c": "unloaded", "e": "loaded"}
        models_of(up).unload(models_of(up).entries["a"])
        until(lambda: status(up)["a"] == "unloaded")
        monkeypatch.setattr(models_module, "free_memory", lambda: models_of(up).entries["a"].num_bytes - 1)
        up.chat(QUESTION, model="a")
        assert status(up)["e"] == ("loaded" if ON_DEVICE else "unloaded"), "a device has memory of its own"


@pytest.mark.parametrize("is_first", [True, False])
def test_an_embedder_beside_unloads_for_a_model_that_cannot_be_loaded_beside_it(files, tmp_path, is_first):
    bert(embedder := tmp_path / "e.gguf")
    with sharing(files[:2], embedding_model=str(embedder), models_loaded=3) as up:
        models, (worker,) = models_of(up), up.vectors.workers
        assert models.opener
        really = models.opener.open

        def only_alone():
            if worker.embedder.is_open:
                raise ModelError("no memory is left")

        models.opener.open = lambda entry: (only_alone(), really(entry))[1]
        if not is_first:
            worker.embedder.unload()
            up.chat(QUESTION, model="b")
            embed(up)
            models.unload(models.entries["b"])
            until(lambda: status(up)["b"] == "unloaded")
            up.host.services[1].model.weights.on_load.append(only_alone)
        assert worker.embedder.is_open
        assert up.chat(QUESTION, model="b")["model"] == "b" and not worker.embedder.is_open


def test_an_embedder_that_computes_unloads_for_no_model(beside):
    with ThreadPoolExecutor(1) as pool:
        (worker,) = beside.vectors.workers
        started, may_end, really = threading.Event(), threading.Event(), worker.embedder.vectors

        def compute(*given, **named):
            started.set()
            assert may_end.wait(DEADLINE)
            return really(*given, **named)

        beside.chat(QUESTION, model="b")
        worker.embedder.vectors = compute
        answer = pool.submit(embed, beside)
        assert started.wait(DEADLINE)
        assert beside.chat(QUESTION, model="a")["model"] == "a" and status(beside)["e"] == "loaded"
        may_end.set()
        assert answer.result(DEADLINE).status_code == 200


def test_an_embedder_that_comes_back_is_shown_so(beside):
    (worker,) = beside.vectors.workers
    with ThreadPoolExecutor(1) as pool, blocked_load(worker.embedder.model.weights) as (began, may_end):
        assert worker.unload_now() and status(beside)["e"] == "unloaded"
        answer = pool.submit(embed, beside)
        assert began.wait(DEADLINE) and status(beside)["e"] == "loading"
        may_end.set()
        assert answer.result(DEADLINE).status_code == 200 and status(beside)["e"] == "loaded"


def test_an_embedder_beside_is_kept_as_long_as_ollama_s_clients_say(beside):
    (worker,) = beside.vectors.workers
    body = {"model": "e", "input": "x"}
    assert beside.http.post("/api/embed", json=body | {"keep_alive": "10m"}).status_code == 200
    assert 500 < worker.seconds_left <= 600
    (shown,) = [one for one in beside.http.get("/api/ps").json()["models"] if one["name"] == "e:latest"]
    left = (datetime.fromisoformat(shown["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 500 < left <= 600
    assert beside.http.post("/api/embed", json=body).status_code == 200 and worker.seconds_left == math.inf
    assert beside.http.post("/api/embed", json=body | {"keep_alive": "soon"}).status_code == 400
    assert beside.http.post("/api/embeddings", json={"model": "e", "prompt": "x", "keep_alive": 0}).status_code == 200
    until(lambda: status(beside)["e"] == "unloaded")
    assert beside.http.post("/api/embed", json=body).status_code == 200 and status(beside)["e"] == "loaded"
    assert beside.http.post("/api/embed", json={"model": "e", "keep_alive": 0}).status_code == 200
    until(lambda: status(beside)["e"] == "unloaded")


every = pytest.mark.parametrize("api", ALL, ids=str)


@every
def test_a_stream_begins_before_its_model_is_loaded(files, api):
    with sharing(files[:2], sse_ping_interval=1) as up, blocked_loads(up) as go, streaming(up, api, odd=1) as answer:
        assert answer.status_code == 200
        lines = filter(None, answer.iter_lines())
        early = [next(lines) for _ in range(4 if api.has_names else 2)]  # two events
        go.set()
        said = api.join([*api.events(chain(early, lines))])
    assert said.num_generated == 2 and "'odd' is not known" in said.warnings[0]


@every
def test_a_stream_whose_model_cannot_be_loaded_ends_with_an_error_of_its_api(files, api):
    with sharing(files[:2]) as up, blocked_loads(up, ModelError("it is too large")) as go:
        with streaming(up, api) as answer:
            *_, last = api.events(started(answer, go))
        assert answer.status_code == 200 and "b could not be loaded: it is too large" in api.failure(last, 503)
        assert up.chat(QUESTION, model="a")


@every
def test_a_stream_that_fails_after_its_load_ends_with_an_error_of_its_api(files, api, monkeypatch, caplog):
    async def fail(*given):
        raise KeyError("odd")

    with sharing(files[:2]) as up, blocked_loads(up) as go:
        with streaming(up, api) as answer:
            *_, last = api.events(started(answer, go, lambda: monkeypatch.setattr(endpoint, "_refusing", fail)))
        monkeypatch.undo()
        assert "the server failed: KeyError" in api.failure(last) and "KeyError: 'odd'" in caplog.text
        assert up.chat(QUESTION, model="b")


def started(answer, go, act=lambda: None):
    """The lines of a stream whose model is loaded once the first of them has come."""
    lines = filter(None, answer.iter_lines())
    yield next(lines)
    act()
    go.set()
    yield from lines


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES], ids=str)
def test_a_prompt_that_is_too_long_for_a_model_that_loads_is_reported_in_the_words_of_its_api(files, api):
    with sharing(files[:2]) as up, blocked_loads(up) as go, streaming(up, api, "word " * 5000) as answer:
        *_, last = api.events(started(answer, go))
    if api is MESSAGES:
        assert api.failure(last, 400).startswith("prompt is too long: ")
    else:
        assert last["response"]["error"]["code"] == "context_length_exceeded"


def test_what_a_stream_asks_wrongly_is_refused_before_its_model_is_loaded(files):
    with sharing(files[:2]) as up, blocked_loads(up):
        for wrong in ({"sse_ping_interval": 1e-9}, {"stop": ["x"] * 100}, {"model": "d"}):
            answer = up.http.post("/v1/chat/completions", json=CHAT | {"model": "b", "stream": True} | wrong)
            assert answer.status_code in (400, 404)


def test_a_client_that_disconnects_before_its_model_is_loaded_asks_nothing_of_it(files):
    with sharing(files[:2]) as up:
        with blocked_loads(up) as go:
            with streaming(up, COMPLETIONS) as answer:
                lines = answer.iter_lines()  # the stream ends with it
                next(lines)
                until(lambda: models_of(up).entries["b"].num_arriving == 1)
            until(lambda: models_of(up).entries["b"].num_arriving == 0)
            go.set()
            until(lambda: status(up)["b"] == "loaded")
        assert not up.host.services[1].open


def test_requests_for_a_first_load_are_bounded_and_end_with_the_server(files):
    with sharing(files[:2], max_queue=1, parallel=1) as up, blocked_loads(up) as go, ThreadPoolExecutor(2) as pool:
        models = models_of(up)
        body = {"model": "b", "prompt": "Hello", "n_predict": 2}
        waiting = [pool.submit(up.http.post, "/completion", json=body) for _ in range(2)]
        until(lambda: models.entries["b"].num_arriving == 2)
        assert up.http.post("/completion", json=body).status_code == 429
        go.set()
        assert [one.result(DEADLINE).status_code for one in waiting] == [200, 200]
        models.close()
        assert up.http.post("/completion", json=body | {"model": "b"}).status_code == 200  # it has its place
        assert up.http.post("/completion", json=body | {"model": "a"}).status_code == 503


def test_a_name_with_a_comma_is_one_name(files, tmp_path):
    odd = tmp_path / "b, a.gguf"
    shutil.copy(files[1], odd)
    with sharing([files[0], odd]) as up:
        assert up.chat(QUESTION, model="b, a")["model"] == "b, a"
        assert list(status(up)) == ["a", "b, a"]
        assert up.http.get("/v1/models/a").json()["path"] == str(files[0])


def test_a_packaged_model_is_one_of_several(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = Settings(model=f"{files[0]}\nsmollm2\nother=smollm2", offline=True)
    with pytest.raises(ModelError, match="smollm2: not in the local cache"):
        entries_of(settings)
    fetched = packaged_file("smollm2")
    fetched.parent.mkdir(parents=True)
    shutil.copy(files[1], fetched)
    assert [(entry.name, entry.path) for entry in entries_of(settings)[1:]] == [("smollm2", fetched), ("other", fetched)]


def test_only_the_first_model_drafts_by_the_draft_model(files):
    with sharing(files[:2], draft_model=str(files[0]), draft="model") as up:
        for name, mode in (("a", "model"), ("b", "off")):
            assert up.chat(QUESTION, model=name)["model"] == name
            assert up.http.get("/props", params={"model": name}).json()["draft"]["mode"] == mode
    looking = entries_of(Settings(model="\n".join(map(str, files[:2])), draft="lookup"))
    assert [entry.settings.draft for entry in looking] == ["lookup", "lookup"]


def test_the_models_of_a_folder_and_their_names(files, tmp_path):
    (tmp_path / "sub").mkdir()
    shutil.copy(files[0], tmp_path / "sub" / "a-00001-of-00001.gguf")
    shutil.copy(files[0], tmp_path / "x.gguf")
    entries = entries_of(Settings(model=f"own={files[1]}", models_dir=str(tmp_path), docs="d"))
    assert [entry.name for entry in entries] == ["own", "sub", "x"]
    assert [entry.settings.docs for entry in entries] == ["d", "", ""]
    assert entries_of(Settings(model=str(files[0]))) == []
    with pytest.raises(SettingsError, match="two models have the name a"):
        entries_of(Settings(model=f"{files[0]}\na={files[1]}"))
    with pytest.raises(SettingsError, match="--alias is for a single model"):
        entries_of(Settings(model="\n".join(map(str, files[:2])), alias="x"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="no GGUF file is there"):
        entries_of(Settings(models_dir=str(tmp_path / "empty")))
