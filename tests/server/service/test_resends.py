"""The same prompt again: at the same time, or when its client has given up. Computed tokens are counted, not seconds."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support.architectures import hybrid

from server.conftest import DEADLINE, REST, running, until

STEP = 64  # tokens
CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Tell me of the old mill. " * 120}], "cache_prompt": True}


def computed(server):
    """The tokens of prompts that were computed so far, and those among them that were in idle time."""
    idle = server.metric("slotcache_idle_prompt_tokens_total")
    return server.metric("slotcache_prompt_tokens_total") + idle, idle


@contextmanager
def blocked_step(server, num_tokens):
    """Hold the engine up once it has computed so many more tokens. Yields events: that it is, and that it may go on."""
    scheduler, reached, go = server.service.engine.scheduler, threading.Event(), threading.Event()
    commit, left = scheduler.commit, [num_tokens]

    def counted(plan, sampled):
        progress = commit(plan, sampled)
        left[0] -= plan.num_tokens
        if left[0] <= 0:
            reached.set()
            go.wait(DEADLINE)
        return progress

    scheduler.commit = counted
    try:
        yield reached, go
    finally:
        scheduler.commit = commit
        go.set()


def give_up(server, num_tokens, **fields):
    """Ask, and leave once so many tokens of the prompt are computed."""
    with blocked_step(server, num_tokens) as (reached, go):
        with server.http.stream("POST", CHAT, json=ASKED | {"stream": True} | fields):
            assert reached.wait(DEADLINE)
        until(lambda: server.service.open and all(one.abandoned for one in list(server.service.open)))
        go.set()
        until(lambda: not server.service.open)


def length(server):
    """The tokens of the prompt."""
    return server.http.post(f"{CHAT}/input_tokens", json=ASKED).json()["input_tokens"]


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    return {"dense": tiny, "hybrid": hybrid(tmp_path_factory.mktemp("models") / "hybrid.gguf")}


@pytest.mark.parametrize("caches", [True, False])
def test_equal_prompts_share_a_prefill_and_no_answer(tiny, caches):
    with running(tiny, batch_size=STEP) as server:
        whole, asked = length(server), {"cache_prompt": caches, "temperature": 2, "max_tokens": 12}
        with blocked_step(server, 1) as (reached, go), ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(server.chat, **ASKED | asked, seed=seed) for seed in range(8)]
            assert reached.wait(DEADLINE)
            until(lambda: len(server.service.open) == 8)
            go.set()
            texts = {answer.result()["choices"][0]["message"]["content"] for answer in answers}
        assert len(texts) == 8
        assert computed(server)[0] == (whole + 7 * REST if caches else 8 * whole)


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_two_tries_that_are_cut_after_a_third_cost_the_third_nothing(models, kind, idle):
    with running(models[kind], batch_size=STEP, idle_prefill=idle) as server:
        whole = length(server)
        for _ in range(2):
            give_up(server, whole // 3)
        answer = server.chat(**ASKED)
        until(lambda: server.service.idle.done)
        plain = server.chat(**ASKED | {"cache_prompt": False, "cache_scope": "other"})
        total, in_idle = computed(server)
        assert answer["choices"] == plain["choices"]
        assert whole <= total - whole <= 1.1 * whole
        assert idle or not in_idle


@pytest.mark.parametrize(("share", "fields"), [(0.6, {}), (0.4, {}), (0.6, {"cache_prompt": False}), (0.6, {"n": 2})])
def test_a_prompt_is_finished_in_idle_time_once_it_was_past_half_and_may_be_kept(tiny, share, fields):
    with running(tiny, batch_size=STEP, idle_prefill=True) as server:
        whole = length(server)
        give_up(server, int(share * whole), **fields)
        until(lambda: server.service.idle.done)
        before, in_idle = computed(server)
        is_finished = share > 0.5 and fields.get("cache_prompt", True)
        assert before == whole if is_finished else not in_idle
        server.chat(**ASKED)
        left = {0.6: REST, 0.4: whole - before}[share] if "cache_prompt" not in fields else whole
        assert computed(server)[0] - before == left


def test_what_gives_way_to_the_next_try_is_computed_once(tiny):
    with running(tiny, batch_size=STEP, idle_prefill=True) as server:
        whole = length(server)
        with blocked_step(server, int(0.8 * whole)) as (reached, go):  # within the idle work
            give_up(server, int(0.6 * whole))
            assert reached.wait(DEADLINE)
            with ThreadPoolExecutor(1) as client:
                answer = client.submit(server.chat, **ASKED)
                until(lambda: server.service.open)
                go.set()
                assert answer.result()["usage"]["prompt_tokens"] == whole
        until(lambda: server.service.idle.done)
        assert computed(server)[0] <= 1.1 * whole
