"""Turns opened before their search is done: what was right is found in the cache, and nothing wrong is in the way."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest
from slotcache.models.errors import Interrupted
from slotcache.ordering.policy import read_along
from slotcache.slots.plan import Plan
from support.architectures import delta, mamba2

from server.conftest import DEADLINE, REST, cached, running, until

DOCUMENTS = [
    {"id": f"s{number}", "text": f"Paper {number} is about the {name} of the island and what it is made of. " * 4}
    for number, name in enumerate(["harbour", "bridge", "market", "tower", "mill", "garden"])
]
SYSTEM = {"role": "system", "content": "Answer from the papers, briefly, and say where it stands in them."}
MESSAGES = [SYSTEM, {"role": "user", "content": "What is it made of?"}]


def speculate(server, **body):
    answer = server.http.post("/v1/speculate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def unloaded(server):
    """Wait until what was started is computed."""
    until(lambda: server.service.engine.inbox.ask(lambda: server.service.engine.scheduler.idle).result())


def test_the_final_documents_find_what_was_computed_ahead(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[:3], "cache_scope": "right"}
    before = server.metric("slotcache_idle_prompt_tokens_total")
    started = speculate(server, **body)
    assert started["object"] == "speculation" and started["state"] == "started"
    unloaded(server)
    answer = server.chat(**body)
    assert cached(answer) == answer["usage"]["prompt_tokens"] - REST
    assert server.metric("slotcache_idle_prompt_tokens_total") - before == answer["usage"]["prompt_tokens"]
    plain = server.chat(**body | {"cache_prompt": False, "document_order": "retrieval"})
    assert plain["choices"] == answer["choices"]


def test_before_there_are_documents_everything_in_front_of_them_is_computed(server):
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "Of stone, most of it."},
        {"role": "user", "content": "And the roof?"},
    ]
    before = server.metric("slotcache_idle_prompt_tokens_total")
    speculate(server, messages=history, cache_scope="open")
    unloaded(server)
    answer = server.chat(messages=history, documents=DOCUMENTS[:2], cache_scope="open")
    assert cached(answer) == server.metric("slotcache_idle_prompt_tokens_total") - before > 40
    assert answer["slotcache"]["documents"][0]["cached_tokens"] == 0


def test_a_later_stage_takes_the_place_of_the_one_before_and_keeps_what_both_begin_with(server):
    stages = [DOCUMENTS[:2], [*DOCUMENTS[:1], DOCUMENTS[4]], [*DOCUMENTS[:1], DOCUMENTS[4], DOCUMENTS[5]]]
    for documents in stages:
        assert speculate(server, messages=MESSAGES, documents=documents, cache_scope="stages", id="t")["state"] == "started"
    unloaded(server)
    answer = server.chat(messages=MESSAGES, documents=stages[-1], cache_scope="stages")
    assert cached(answer) == answer["usage"]["prompt_tokens"] - REST


def test_wrong_documents_never_reach_an_answer(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[3:5], "cache_scope": "wrong", "max_tokens": 16}
    speculate(server, messages=MESSAGES, documents=DOCUMENTS[:3], cache_scope="wrong")
    answer = server.chat(**body)
    assert [document["id"] for document in answer["slotcache"]["documents"]] == ["s3", "s4"]
    assert server.chat(**body | {"cache_prompt": False})["choices"] == answer["choices"]


def test_scopes_do_not_share_what_was_computed_ahead(server):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[:3]}
    speculate(server, **body, cache_scope="mine")
    unloaded(server)
    assert cached(server.chat(**body, cache_scope="yours")) == 0


@pytest.mark.parametrize("generate", [delta, mamba2])
def test_states_are_computed_ahead_too_and_only_their_scope_finds_them(generate, tmp_path):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[:3], "max_tokens": 8}
    with running(generate(tmp_path / "model.gguf")) as up:
        speculate(up, messages=MESSAGES, documents=DOCUMENTS[:2], cache_scope="mine", id="t")
        unloaded(up)
        speculate(up, **body, cache_scope="mine", id="t")
        unloaded(up)
        answer = up.chat(**body, cache_scope="mine")
        assert answer["slotcache"]["source"] == "snapshot" and cached(answer) > answer["usage"]["prompt_tokens"] - 40
        assert cached(up.chat(**body, cache_scope="yours")) == 0
        assert up.chat(**body | {"cache_prompt": False, "document_order": "retrieval"})["choices"] == answer["choices"]


@contextmanager
def talking(server, count):
    """Streams that go on until the end."""
    body = {"prompt": "Tell me a story.", "n_predict": 4000, "ignore_eos": True, "stream": True}
    with ExitStack() as streams:
        for _ in range(count):
            answer = streams.enter_context(server.http.stream("POST", "/completion", json=body))
            lines = streams.enter_context(closing(answer.iter_lines()))
            next(lines)
        until(lambda: server.metric("llamacpp:requests_processing") == count)
        yield
        assert server.metric("llamacpp:requests_processing") == count


def test_without_an_idle_slot_nothing_is_computed_ahead_and_the_answer_says_so(tiny):
    with running(tiny, parallel=2, ctx_size=16384) as server:
        with talking(server, 2):
            state = speculate(server, messages=MESSAGES, documents=DOCUMENTS[:3], cache_scope="load")["state"]
            assert state == "skipped"
        assert cached(server.chat(messages=MESSAGES, documents=DOCUMENTS[:3], cache_scope="load")) == 0


def test_an_idle_slot_computes_ahead_while_others_talk(tiny):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[:3], "cache_scope": "load", "max_tokens": 16}
    with running(tiny, parallel=3, ctx_size=32768) as server:
        with talking(server, 2):
            assert speculate(server, **body)["state"] == "started"
            until(lambda: not server.metric("slotcache_requests_background"))
            answer = server.chat(**body)
            assert cached(answer) == answer["usage"]["prompt_tokens"] - REST
        assert server.chat(**body | {"cache_prompt": False})["choices"] == answer["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 7, "logprobs": True, "top_logprobs": 2, "repeat_penalty": 1.2},
        {"temperature": 0, "response_format": {"type": "json_object"}},
        {"temperature": 0, "max_tokens": 1},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_right_speculation_computes_the_end_of_the_prompt_alone_and_changes_no_answer(server, fields, stream):
    body = {"messages": MESSAGES, "documents": DOCUMENTS[:3], "cache_scope": f"first {fields} {stream}"}
    speculate(server, **body, **fields, ignore_eos=True)
    unloaded(server)
    plain = server.chat(**body, **fields | {"cache_prompt": False, "document_order": "retrieval"})
    if stream:
        with server.openai.chat.completions.create(
            model="any",
            max_tokens=fields.get("max_tokens", 4),
            stream=True,
            stream_options={"include_usage": True},
            messages=MESSAGES,
            extra_body={**body, **fields, "cache_prompt": True, "ignore_eos": True},
        ) as chunks:
            *pieces, last = chunks
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == plain["choices"][0]["message"]["content"]
        assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - REST
    else:
        answer = server.chat(**body, **fields)
        assert cached(answer) == answer["usage"]["prompt_tokens"] - REST
        assert answer["choices"] == plain["choices"] and answer["slotcache"]["miss"] is None


LONG = [{"id": "x", "text": "Chapter. " + "endless " * 2000}]


def test_a_request_leaves_a_slot_to_what_is_computed_ahead(tiny):
    with running(tiny, parallel=3, ctx_size=32768) as server, talking(server, 1):
        assert speculate(server, messages=MESSAGES, documents=LONG, cache_scope="way")["state"] == "started"
        server.chat("Something else.", cache_scope="way")
        assert server.metric("slotcache_speculations_dropped_total") == 0
        until(lambda: not server.metric("slotcache_requests_background"))
        answer = server.chat(messages=MESSAGES, documents=LONG, cache_scope="way")
        assert cached(answer) == answer["usage"]["prompt_tokens"] - REST


def test_a_request_ends_what_is_computed_ahead_in_the_last_slot(tiny):
    with running(tiny, parallel=2, ctx_size=32768) as server, talking(server, 1):
        assert speculate(server, messages=MESSAGES, documents=LONG, cache_scope="way")["state"] == "started"
        server.chat("Something else.", cache_scope="other")
        assert server.metric("slotcache_speculations_dropped_total") == 1
        assert server.metric("slotcache_requests_background") == 0


@pytest.mark.parametrize(
    ("asked", "number"), [("What is it made of?", 1), ("What is it made of? And why?", 1), ("What is it?", 0)]
)
def test_a_turn_that_has_come_ends_its_own_speculation(server, asked, number):
    before = server.metric("slotcache_speculations_dropped_total")
    with standing_still(server):
        assert speculate(server, messages=MESSAGES, documents=LONG, id=f"turn {asked}")["state"] == "started"
        turn = {"messages": [SYSTEM, {"role": "user", "content": asked}], "max_tokens": 1, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=turn):
            until(lambda: server.metric("llamacpp:requests_processing") + server.metric("llamacpp:requests_deferred"))
            assert server.metric("slotcache_speculations_dropped_total") == before + number
    server.http.delete("/v1/speculate", params={"id": f"turn {asked}"})


@contextmanager
def standing_still(server):
    """The engine hears what it is told, and computes nothing meanwhile."""
    runner = server.service.engine.runner
    step = runner.run

    def run(plan, samplers=None):
        step(Plan(plan.operations))
        if plan.spans:
            raise Interrupted
        return []

    runner.run = run
    try:
        yield
    finally:
        runner.run = step


def test_a_request_is_not_kept_waiting_and_what_is_done_by_then_stays(server):
    long = [{"id": f"l{number}", "text": f"Chapter {number}. " + f"word{number} " * 250} for number in range(6)]
    before = server.metric("slotcache_speculations_dropped_total")
    assert speculate(server, messages=MESSAGES, documents=long, cache_scope="way")["state"] == "started"
    answer = server.chat(messages=MESSAGES, documents=long, cache_scope="way")
    assert server.metric("slotcache_speculations_dropped_total") == before + 1
    assert cached(answer) < answer["usage"]["prompt_tokens"] - REST


@contextmanager
def paused(server):
    """A step that no client waits for begins, and computes once it is let go on. Yields both events.

    One that is ended before it begins, for what came before it, is none.
    """
    runner, began, go = server.service.engine.runner, threading.Event(), threading.Event()
    compute = runner._decode

    def decode(may_end_early):
        if may_end_early and runner.interrupt._flag[0] == b"\0":
            began.set()
            assert go.wait(DEADLINE)
        return compute(may_end_early)

    runner._decode = decode
    try:
        yield began, go
    finally:
        go.set()
        runner._decode = compute


@pytest.mark.parametrize("name", ["right", "longer", "front", "wrong", "other"])
def test_a_step_that_computes_what_a_request_begins_with_is_not_ended_for_it(server, name):
    """The request waits for its end, and finds all of it: a step that is ended is lost."""
    scope, ahead, documents = f"step {name}", DOCUMENTS[:3], DOCUMENTS[3:] if name == "wrong" else DOCUMENTS[:3]
    question = {"longer": "What is it made of? And why?"}.get(name, "What is it made of?")
    system = {"role": "system", "content": "Something else altogether."} if name == "other" else SYSTEM
    asked = {"messages": [system, {"role": "user", "content": question}], "documents": documents, "cache_scope": scope}
    with ThreadPoolExecutor(1) as pool, paused(server) as (began, go):
        speculate(server, messages=MESSAGES, cache_scope=scope, **({} if name == "front" else {"documents": ahead}))
        assert began.wait(DEADLINE)
        answer = pool.submit(server.chat, **asked)
        until(lambda: server.service.open)
        go.set()
        number = cached(answer.result())
    assert (number > 0) == (name in ("right", "longer", "front"))
    plain = server.chat(**asked | {"cache_prompt": False, "document_order": "retrieval"})
    assert plain["choices"] == answer.result()["choices"]


def test_a_turn_that_will_not_come_can_be_dropped(server):
    long = [{"id": "x", "text": "Chapter. " + "endless " * 2000}]
    query = {"scope": "drop", "id": "mine"}
    with standing_still(server):
        speculate(server, messages=MESSAGES, documents=long, cache_scope="drop", id="mine")
        assert server.http.delete("/v1/speculate", params=query).json()["state"] == "dropped"
        assert server.http.delete("/v1/speculate", params=query).json()["state"] == "done"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "id": ""}, "id"),
        ({"messages": MESSAGES, "documents": [{"id": "a"}]}, "documents[0].text"),
        ({"messages": [{"role": "user", "content": "word " * 9000}, *MESSAGES]}, None),
    ],
)
def test_what_could_not_be_a_chat_cannot_be_speculated_on(server, body, param):
    answer = server.http.post("/v1/speculate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_staged_search_drives_it_with_a_few_lines(server):
    answers = []

    async def search():
        for number, stage in enumerate((DOCUMENTS[4:6], DOCUMENTS[2:5], DOCUMENTS[2:5]), 1):
            while len(answers) < number:
                await asyncio.sleep(0.01)
            yield stage
        while len(answers) < 3:
            await asyncio.sleep(0.01)

    async def turn():
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
            body = {"messages": MESSAGES, "cache_scope": "search"}

            async def post(path, body):
                answers.append((await client.post(path, json=body)).json())

            return await read_along(post, body, search())

    documents = asyncio.run(turn())
    assert documents == DOCUMENTS[2:5]
    unloaded(server)
    answer = server.chat(messages=MESSAGES, documents=documents, cache_scope="search")
    assert cached(answer) == answer["usage"]["prompt_tokens"] - REST


def background(server):
    return server.service.engine.inbox.ask(lambda: len(server.service.engine.background._generations)).result()


def test_speculations_that_wait_are_bounded_like_requests(tiny):
    with running(tiny, parallel=1, max_queue=3) as server, standing_still(server):
        states = [
            server.http.post("/v1/speculate", json={"messages": MESSAGES, "documents": LONG, "id": str(number)})
            for number in range(7)
        ]
        assert [answer.json()["state"] for answer in states] == ["started"] * 4 + ["skipped"] * 3
        again = speculate(server, messages=MESSAGES, documents=LONG, id="0")
        assert again["state"] == "started"  # in place of the earlier one
        assert server.metric("slotcache_requests_background") == 4


def test_speculations_that_are_done_are_let_go(server):
    for number in range(5):
        speculate(server, messages=MESSAGES, documents=DOCUMENTS[:1], cache_scope="done", id=f"done {number}")
        unloaded(server)
    assert background(server) <= 1


def test_a_scope_that_is_dropped_is_not_computed_for(server):
    speculate(server, messages=MESSAGES, documents=LONG, cache_scope="gone", id="mine")
    speculate(server, messages=MESSAGES, documents=LONG, cache_scope="stays", id="mine")
    server.http.delete("/v1/cache", params={"scope": "gone"})
    unloaded(server)
    assert server.http.get("/v1/cache", params={"scope": "gone"}).json()["runs"] == []
    assert server.http.get("/v1/cache", params={"scope": "stays"}).json()["tokens"]["device"] > 1000
