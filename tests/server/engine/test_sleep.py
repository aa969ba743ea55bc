"""Sleep: the model leaves memory when no request comes, and each request finds it there again. Over a real port."""

import asyncio
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models import llama
from slotcache.server import load
from slotcache.server.config.settings import Settings
from slotcache.server.engine import engine as engines
from slotcache.server.search import vectors
from slotcache.server.serve import _load_anew, make_server
from support.adapters import lora
from support.architectures import recurrent, windowed
from support.encoders import bert
from support.on_device import HAS_OWN_KERNELS, ROUNDING, has_adapters, loads_two

from server.conftest import DEADLINE, REST, blocked_load, cached, free_port, is_mapped, running, text_of, until
from server.test_cli import command

HOUR = 3600
QUESTION = "What does the old lighthouse keeper of the northern harbour say about the winter storms of last year?"


@pytest.fixture
def file(tiny, tmp_path):
    """A model's file of its own, so that the memory's map shows whether this server has it."""
    (tmp_path / "models").mkdir()
    return Path(shutil.copy(tiny, tmp_path / "models" / "own.gguf"))


@contextmanager
def dozing(model, **changed):
    """A server that falls asleep when `doze` says so."""
    with running(model, **{"sleep_idle_seconds": HOUR, "cache_prompt": True} | changed) as up:
        yield up


def doze(up):
    """Let the server fall asleep at once, as after an hour without a request."""
    for worker in up.vectors.workers:
        until(lambda queue=worker._queue: queue._thread is None)
        worker._queue._fall_asleep()
    engine = up.service.engine

    def falls_asleep():
        engine.inbox.put(lambda: setattr(engine.sleep, "last_use", -HOUR))
        return is_sleeping(up)

    until(falls_asleep)


def is_sleeping(up):
    return up.http.get("/props").json()["is_sleeping"]


def until_asleep(process, url):
    """Wait until a server in a process of its own sleeps."""

    def sleeps():
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/props", timeout=DEADLINE).json().get("is_sleeping")
        except httpx.TransportError:
            return False

    until(sleeps)


def test_the_model_is_unloaded_and_the_next_request_brings_it_back(file):
    with running(file, sleep_idle_seconds=1, cache_prompt=True) as up:
        first = up.chat(QUESTION, max_tokens=24, conversation="c")
        stored = up.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2}).json()
        awake = [up.http.get(path).json() for path in ("/v1/models", "/props")]
        assert is_mapped(file) and not awake[1].pop("is_sleeping")
        until(lambda: up.metric("slotcache_sleeping"))  # to ask for metrics does not delay it
        assert is_sleeping(up) and not is_mapped(file)
        computed = up.metric("slotcache_prompt_tokens_total")
        shown = [up.http.get(path).json() for path in ("/v1/models", "/props")]
        assert shown[1].pop("is_sleeping") and shown == awake
        for path in (
            "/health",
            "/slots",
            "/v1/cache",
            "/lora-adapters",
            "/v1/conversations/c",
            f"/v1/responses/{stored['id']}",
        ):
            assert up.http.get(path).status_code == 200, path
        assert computed and not up.metric("slotcache_cells_used")
        assert is_sleeping(up) and not is_mapped(file)

        again = up.chat(QUESTION, max_tokens=24)
        assert text_of(again) == text_of(first) and cached(again) == again["usage"]["prompt_tokens"] - REST
        assert again["slotcache"]["source"] == "host" and is_mapped(file) and not is_sleeping(up)
        assert up.metric("slotcache_wakeups_total") == 1 and up.metric("slotcache_sleeping") == 0
        assert up.metric("slotcache_prompt_tokens_total") == computed + REST


def test_a_load_again_makes_no_vocabulary_and_learns_nothing_anew(file, monkeypatch):
    with dozing(file) as up:
        first, engine, model = text_of(up.chat(QUESTION)), up.service.engine, up.service.model
        doze(up)
        observed, observe = [], engine.scheduler.observe
        monkeypatch.setattr(engine.scheduler, "observe", lambda *given: (observed.append(1), observe(*given)))
        monkeypatch.setattr(engine.runner, "warm_up", lambda: pytest.fail("a warm-up"))
        before = up.metric("slotcache_steps_total")
        assert text_of(up.chat(QUESTION)) == first
        vocab = llama.llama_model_get_vocab(model.handle)
        assert vocab and llama.llama_vocab_n_tokens(vocab) == model.num_vocab
        assert not llama.llama_vocab_type(vocab) and model.vocabulary_type
        assert len(observed) == up.metric("slotcache_steps_total") - before - 1  # the first one maps the weights


@pytest.fixture(scope="module")
def turns(tiny):
    """The answers of a conversation, of a server that never slept."""
    with dozing(tiny) as up:
        return [text_of(turn(up, QUESTION)), text_of(turn(up, "And then?"))]


def turn(up, content):
    return up.chat(content, max_tokens=16, conversation="c")


def test_a_conversation_goes_on_after_a_sleep(file, turns):
    with dozing(file) as up:
        first = turn(up, QUESTION)
        doze(up)
        second = turn(up, "And then?")
    assert [text_of(first), text_of(second)] == turns and cached(second) > REST


def test_a_load_for_which_there_is_no_thread_fails_and_is_tried_again(file, monkeypatch):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with dozing(file) as up:
        first = text_of(up.chat(QUESTION))
        doze(up)
        with monkeypatch.context() as patched:
            patched.setattr(engines, "Thread", NoThread)
            for _ in range(2):
                answer = up.http.post("/completion", json={"prompt": QUESTION})
                assert answer.status_code == 503 and "can't start new thread" in answer.json()["error"]["message"]
        assert not is_mapped(file) and text_of(up.chat(QUESTION)) == first


@loads_two
def test_a_load_that_fails_after_the_context_leaves_no_weights(file, tiny, monkeypatch):
    with dozing(file, draft_model=str(tiny)) as up:
        first = text_of(up.chat(QUESTION))
        doze(up)

        def fail():
            raise RuntimeError("odd")

        with monkeypatch.context() as patched:
            patched.setattr(up.service.engine.draft_model, "open", fail)
            assert up.http.post("/completion", json={"prompt": QUESTION}).status_code == 503
            assert not is_mapped(file)
        assert text_of(up.chat(QUESTION)) == first and is_mapped(file)


def test_a_server_that_stops_asleep_has_saved_its_cache(file, tmp_path, turns):
    with dozing(file, cache_dir=str(tmp_path / "cache")) as up:
        first = turn(up, QUESTION)
        doze(up)
    with dozing(file, cache_dir=str(tmp_path / "cache")) as up:
        second = turn(up, "And then?")
    assert [text_of(first), text_of(second)] == turns
    assert cached(second) > REST and second["slotcache"]["source"] == "disk"


def test_ten_requests_at_once_cause_one_load(file):
    with dozing(file) as up, ThreadPoolExecutor(10) as pool:
        expected = [text_of(up.chat(f"Question {number}")) for number in range(10)]
        doze(up)
        found = list(pool.map(lambda number: text_of(up.chat(f"Question {number}")), range(10)))
        assert all(found) and up.metric("slotcache_wakeups_total") == 1
        assert HAS_OWN_KERNELS or found == expected  # a card rounds what it computes together otherwise


def test_a_request_that_comes_when_the_load_has_just_ended_causes_no_second_one(file):
    with dozing(file) as up:
        doze(up)
        engine, blocks, may_go_on = up.service.engine, threading.Event(), threading.Event()
        with blocked_load(up.service.model.weights) as (began, may_end):
            engine.sleep.wake()
            assert began.wait(DEADLINE)
            engine.inbox.put(lambda: (blocks.set(), may_go_on.wait(DEADLINE)))
            assert blocks.wait(DEADLINE)
            engine.sleep.wake()  # the engine finds it in front of the end of the load
            may_end.set()
            until(lambda: all(thread.name != "wake" for thread in threading.enumerate()))
            may_go_on.set()
        until(lambda: engine.sleep.is_awake)
        doze(up)
        assert not is_mapped(file) and up.metric("slotcache_wakeups_total") == 1


def test_a_request_that_comes_while_the_model_unloads_is_answered(file):
    with dozing(file) as up, ThreadPoolExecutor(1) as pool:
        expected = text_of(up.chat(QUESTION))
        engine, ending, may_end_turn = up.service.engine, threading.Event(), threading.Event()

        def end_turn():
            ending.set()
            may_end_turn.wait(DEADLINE)
            engine._fall_asleep()

        engine.inbox.put(end_turn)
        assert ending.wait(DEADLINE)
        answer = pool.submit(up.chat, QUESTION)
        until(lambda: len(up.service.open) == 1)
        may_end_turn.set()
        assert text_of(answer.result(DEADLINE)) == expected and up.metric("slotcache_wakeups_total") == 1


def test_the_server_answers_while_it_wakes_and_a_client_may_disconnect(file):
    with dozing(file) as up:
        up.chat(QUESTION)
        doze(up)
        computed = up.metric("slotcache_prompt_tokens_total")
        with blocked_load(up.service.model.weights) as (began, _):
            body = {"prompt": "Hello", "stream": True, "ignore_eos": True}
            with up.http.stream("POST", "/completion", json=body):
                assert began.wait(DEADLINE)
                assert not is_sleeping(up) and up.http.get("/health").status_code == 200
                assert up.metric("slotcache_requests_waiting") == 1
                assert up.http.post("/tokenize", json={"content": "Hello"}).json()["tokens"]
                assert up.http.delete("/v1/cache").json()["tokens"] > 0
            until(lambda: not up.service.open)
        assert up.chat(QUESTION)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # it was dropped
        assert up.metric("slotcache_requests_total", end="cancelled") == 1
        assert up.metric("slotcache_wakeups_total") == 1 and up.metric("slotcache_prompt_tokens_total") > computed


def test_the_server_may_stop_while_it_wakes(file):
    with dozing(file) as up, ThreadPoolExecutor(1) as pool:
        doze(up)
        with blocked_load(up.service.model.weights) as (began, _):
            answer = pool.submit(up.http.post, "/completion", json={"prompt": "Hello"})
            assert began.wait(DEADLINE)
            up.uvicorn.should_exit = True
            assert answer.result(DEADLINE).status_code == 503
            assert up.thread.is_alive()  # the memory is not freed while it is filled


@pytest.mark.parametrize("stream", [False, True])
def test_a_load_that_fails_is_an_error_and_the_next_request_tries_again(file, stream):
    with dozing(file) as up:
        expected = text_of(up.chat(QUESTION))
        doze(up)
        away = file.parent.rename(file.parent.with_name("away"))
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": stream}
        for _ in range(2):
            answer = up.http.post("/v1/chat/completions", json=body)
            assert (stream or answer.status_code == 503) and "loading_failed" in answer.text and str(file) in answer.text
            health = up.http.get("/health")
            assert health.status_code == 503 and str(file) in health.json()["error"]["message"] and is_sleeping(up)
        away.rename(file.parent)
        answer = up.chat(QUESTION)
        assert up.http.get("/health").json() == {"status": "ok"}
        assert text_of(answer) == expected and cached(answer) > 0


def test_a_file_that_holds_another_model_is_loaded_and_finds_none_of_the_old_kv(file, tmp_path):
    other = generate(tmp_path / "other.gguf", SHAPES["tiny"], seed=7)
    cache = str(tmp_path / "cache")
    with dozing(other) as up:
        expected = text_of(up.chat(QUESTION))

    def asked():
        answer = up.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": QUESTION}]})
        return answer.json() if answer.status_code == 200 else None

    with dozing(file, cache_dir=cache, seed=1) as up:
        assert text_of(up.chat(QUESTION)) != expected
        old = up.service
        doze(up)
        file.write_bytes(other.read_bytes()[:5000])  # it is still copied
        assert asked() is None and up.http.get("/health").status_code == 503
        file.write_bytes(other.read_bytes())
        first = up.http.post("/completion", json={"prompt": "Hello", "n_predict": 2})
        assert first.status_code == 503 and "changed" in first.text
        until(lambda: up.http.get("/health").status_code == 200)
        found = [up.chat(QUESTION) for _ in range(2)]
        assert list(map(text_of, found)) == [expected] * 2 and cached(found[0]) == 0 < cached(found[1])
        assert not old.engine._thread.is_alive()


def test_a_model_that_cannot_be_loaded_anew_ends_the_server(tiny, tmp_path):
    """As one that cannot be served ends it at the start: whoever started it learns so."""
    file = Path(shutil.copy(tiny, tmp_path / "own.gguf"))
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = ("serve", "-m", file, "--port", port, "-c", 1024, "-t", 1, "--sleep-idle-seconds", 1)
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        try:
            until_asleep(process, url)
            bert(file)  # it generates no text
            assert httpx.post(f"{url}/completion", json={"prompt": "Hello"}, timeout=DEADLINE).status_code == 503
            _, log = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == 2 and "not a text generation model" in log and "Traceback" not in log


def test_a_model_that_cannot_be_freed_for_another_one_ends_the_server(tiny, monkeypatch):
    """Else it would say for ever that it loads."""

    async def fail(*given, **named):
        raise OSError("no space left")

    monkeypatch.setattr(load.Loaded, "close", fail)
    server, state = make_server(Settings(model=str(tiny)))
    state.models.served = load.Loaded(None, object(), None)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(_load_anew(state, tiny, server))
    assert server.should_exit


@has_adapters
@pytest.mark.parametrize("name", ["own", "draft", "adapter"])
def test_a_file_that_was_touched_is_loaded_and_its_kv_is_found(file, tiny, tmp_path, name):
    """As by a backup, or by rsync, which puts an equal file in its place."""
    files = {"own": file, "draft": tmp_path / "draft.gguf", "adapter": tmp_path / "adapter.gguf"}
    shutil.copy(tiny, files["draft"])
    lora(files["adapter"], SHAPES["tiny"], 1)
    with dozing(file, draft_model=str(files["draft"]), lora=str(files["adapter"])) as up:
        first = up.chat(QUESTION)
        for _ in range(2):
            doze(up)
            shutil.copy(files[name], tmp_path / "copy").replace(files[name])
            again = up.chat(QUESTION)
            assert text_of(again) == text_of(first) and cached(again) == again["usage"]["prompt_tokens"] - REST
            assert not up.http.get("/props").json()["draft"]["is_off"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "Hello"}),
        ("/apply-template", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}], "model": "m"}),
        ("/v1/responses/input_tokens", {"input": "Hello"}),
        ("/v1/documents/order", {"documents": [{"id": "a", "text": "Some text."}]}),
    ],
)
def test_what_needs_no_step_is_answered_at_once_and_wakes_the_model(napping, path, body):
    expected = napping.http.post(path, json=body).json()
    doze(napping)
    with blocked_load(napping.service.model.weights) as (began, _):
        answer = napping.http.post(path, json=body)
        assert answer.status_code == 200 and answer.json() == expected
        assert began.wait(DEADLINE) and not is_sleeping(napping)


@pytest.fixture(scope="module")
def napping(tiny):
    with dozing(tiny) as up:
        yield up


def test_a_search_that_is_read_along_wakes_the_model(napping):
    messages = [{"role": "user", "content": QUESTION}]
    documents = [{"id": "storms", "text": "The storms of last winter broke two windows of the tower."}]
    doze(napping)
    started = napping.http.post("/v1/speculate", json={"messages": messages, "documents": documents}).json()
    assert started["state"] == "started"
    until(
        lambda: napping.metric("slotcache_idle_prompt_tokens_total") and not napping.metric("slotcache_requests_background")
    )
    assert cached(napping.chat(messages=messages, documents=documents)) > 2 * REST


def test_idle_prefill_wakes_no_model_and_goes_on_when_it_is_awake(file):
    with dozing(file, idle_prefill=True) as up:
        idle, may_go_on = up.service.idle, threading.Event()
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": 24, "ignore_eos": True}
        with up.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)  # the prompt is made: the next one that is made is that of the next turn
            up.service.builder.threads._small.submit(may_go_on.wait, DEADLINE)
            assert list(lines)
        until(lambda: up.service.builder.threads.num_open)
        doze(up)
        may_go_on.set()
        until(lambda: idle._task is None)
        assert is_sleeping(up) and not idle.done and not up.metric("slotcache_idle_prompt_tokens_total")
        up.chat("Another question", cache_prompt=False)
        until(lambda: idle.done)
        assert up.metric("slotcache_idle_prompt_tokens_total")


def test_a_warmed_and_pinned_prompt_outlives_a_sleep(napping):
    messages = [{"role": "user", "content": "A pinned question about the harbour and its keeper?"}]
    doze(napping)
    warmed = napping.http.post("/v1/cache/warm", json={"messages": messages, "pin": True}).json()
    doze(napping)
    assert napping.metric("slotcache_pinned_tokens") == warmed["pinned_tokens"] > 0
    assert cached(napping.chat(messages=messages)) > REST


def test_a_slot_is_saved_and_restored_asleep(file, tmp_path):
    with dozing(file, slot_save_path=str(tmp_path / "slots"), parallel=1) as up:
        first = up.chat(QUESTION)
        doze(up)
        saved = up.http.post("/slots/0?action=save", json={"filename": "a"}).json()
        assert saved["n_saved"] > first["usage"]["prompt_tokens"] - REST
        assert up.http.post("/slots/0?action=erase").status_code == 200
        assert up.http.post("/slots/0?action=restore", json={"filename": "a"}).json()["n_restored"] == saved["n_saved"]
        assert is_sleeping(up)
        again = up.chat(QUESTION)
        assert text_of(again) == text_of(first) and cached(again) == again["usage"]["prompt_tokens"] - REST


@pytest.mark.parametrize("generate", [recurrent, windowed])
def test_states_and_windows_outlive_a_sleep(generate, tmp_path):
    question = 15 * QUESTION  # a short one has no state
    with dozing(generate(tmp_path / "model.gguf")) as up:
        expected = [up.chat(question, max_tokens=12) for _ in range(2)]
        doze(up)
        again = up.chat(question, max_tokens=12)
        assert text_of(again) == text_of(expected[1]) and cached(again) == cached(expected[1]) > 0


def test_without_host_memory_the_prompt_is_computed_again(file):
    with dozing(file, cache_ram=0) as up:
        first = up.chat(QUESTION)
        doze(up)
        again = up.chat(QUESTION)
        assert text_of(again) == text_of(first) and cached(again) == 0


def test_a_server_says_that_it_sleeps_once_its_memory_is_free(file, monkeypatch):
    with dozing(file) as up:
        unload, seen = up.service.engine.runner.unload, []

        def resting():
            seen.append((is_mapped(file), up.service.engine.sleep.is_asleep))
            unload()
            seen.append((is_mapped(file), up.service.engine.sleep.is_asleep))

        monkeypatch.setattr(up.service.engine.runner, "unload", resting)
        doze(up)
        assert seen == [(True, False), (False, False)]


@has_adapters
def test_adapters_are_loaded_again_and_kv_of_several_is_not_used_again(file, tmp_path):
    files = [str(lora(tmp_path / f"{seed}.gguf", SHAPES["tiny"], seed)) for seed in (1, 2)]
    one, both = [{"id": 0, "scale": 1.0}], [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1.5}]
    with dozing(file, lora=",".join(files), lora_init_without_apply=True) as up:
        expected = [up.chat(QUESTION, lora=adapters, max_tokens=12) for adapters in ([], one, both)]
        doze(up)
        found = [up.chat(QUESTION, lora=adapters, max_tokens=12) for adapters in ([], one, both)]
        assert list(map(text_of, found)) == list(map(text_of, expected))
        assert cached(found[0]) == cached(found[1]) > 0 == cached(found[2])


@loads_two
def test_vectors_have_a_sleep_of_their_own(file, tmp_path):
    encoder = bert(tmp_path / "models" / "bert.gguf")
    with dozing(file, embedding_model=str(encoder)) as up:

        def vector():
            return up.http.post("/v1/embeddings", json={"input": "a text"}).json()["data"]

        expected = vector()
        doze(up)
        assert not is_mapped(encoder) and not is_mapped(file)
        assert vector() == expected and is_mapped(encoder) and not is_mapped(file) and not is_sleeping(up)
        doze(up)
        away = file.parent.rename(file.parent.with_name("away"))
        failed = up.http.post("/v1/embeddings", json={"input": "a text"})
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "loading_failed"
        assert up.http.get("/health").status_code == 200, "chats are answered"
        away.rename(file.parent)
        assert vector() == expected


@loads_two
def test_a_model_with_two_uses_is_unloaded_when_neither_wants_it(file):
    with dozing(file, embeddings=True, pooling="mean") as up:
        doze(up)
        assert not is_mapped(file)
        assert up.http.post("/v1/embeddings", json={"input": "a text"}).status_code == 200
        assert is_mapped(file) and up.service.engine.sleep.is_asleep
        up.chat(QUESTION)
        up.vectors.embedding._queue._fall_asleep()
        assert is_mapped(file) and up.chat(QUESTION)
        doze(up)
        assert not is_mapped(file)


def test_an_embedder_goes_on_after_what_failed_once(tmp_path, monkeypatch):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with running(bert(tmp_path / "bert.gguf"), embeddings=True, sleep_idle_seconds=HOUR) as up:
        queue = up.vectors.embedding._queue

        def asked():  # each by itself: the server ends the connection of what has failed
            return httpx.post(f"{up.url}/v1/embeddings", json={"input": "a text"}, timeout=DEADLINE).status_code

        def fail():
            raise RuntimeError("odd")

        assert asked() == 200
        until(lambda: queue._thread is None)
        with monkeypatch.context() as patched:
            patched.setattr(up.vectors.embedding.embedder, "unload", fail)
            with pytest.raises(RuntimeError, match="odd"):
                queue._fall_asleep()
        assert asked() == 200
        until(lambda: queue._thread is None)
        with monkeypatch.context() as patched:
            patched.setattr(vectors, "Thread", NoThread)
            assert asked() == 500
        assert asked() == 200


def test_an_encoder_alone_sleeps_after_its_seconds(tmp_path):
    encoder = bert(tmp_path / "bert.gguf")
    with running(encoder, embeddings=True, sleep_idle_seconds=1) as up, ThreadPoolExecutor(4) as pool:

        def vector(_):
            return up.http.post("/v1/embeddings", json={"input": "a text"}).json()["data"][0]["embedding"]

        expected = vector(0)
        until(lambda: is_sleeping(up))
        assert not is_mapped(encoder)
        assert np.allclose(list(pool.map(vector, range(4))), 4 * [expected], rtol=ROUNDING, atol=ROUNDING)
        assert not is_sleeping(up)


def test_ctrl_c_ends_a_server_that_sleeps(tiny):
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = ("serve", "-m", tiny, "--port", port, "-c", 1024, "-t", 1, "--sleep-idle-seconds", 1)
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        try:
            until_asleep(process, url)
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == 0 and "asleep after 1 s" in log and "Traceback" not in log
