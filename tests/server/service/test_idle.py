"""What is computed ahead in idle time: seen in the next turn's numbers, and never in a request's way."""

import asyncio
import itertools
import json
import threading
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest
from slotcache.server.chat.body import ChatRequest
from slotcache.server.http.api_errors import RequestError
from slotcache.server.service import idle
from support.architectures import hybrid
from support.on_device import ON_DEVICE
from support.scopes import COMMON

from server.conftest import DEADLINE, REST, blocked, idle_tokens, running, until

# History shows an answer otherwise than it was generated, as templates of reasoning models do.
RESTATED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
DOCUMENTS = [{"id": f"d{number}", "text": f"Text {number} is about the town. " * 4} for number in range(3)]


def turns(server, scope, wait, **fields):
    """Two turns of a conversation; the idle tokens after the first, and the second answer. wait: for that idle work."""
    before = idle_tokens(server)
    server.chat(messages=[{"role": "user", "content": "What is it?"}], conversation="c", cache_scope=scope, **fields)
    if wait:
        until(lambda: idle_tokens(server) > before and server.service.idle.done)
    done = idle_tokens(server) - before
    follow = {"messages": [{"role": "user", "content": "And then?"}], "documents": DOCUMENTS[1:], "cache_scope": scope}
    return done, server.chat(**follow, conversation="c", max_tokens=24)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "restated.jinja"
    file.write_text(RESTATED)
    return {"plain": "", "restated": str(file)}


@pytest.mark.parametrize(("template", "saved"), [("plain", 6), ("restated", 30)])
def test_the_next_turn_computes_less(tiny, templates, template, saved):
    first = {"documents": DOCUMENTS[:2], "max_tokens": 30}
    with running(tiny, chat_template_file=templates[template], idle_prefill=True) as server:
        done, ahead = turns(server, "", True, **first)
        assert server.metric("slotcache_prompt_tokens_total") > done > 0
    with running(tiny, chat_template_file=templates[template], idle_prefill=False) as server:
        nothing, plain = turns(server, "", False, **first)
        assert nothing == idle_tokens(server) == 0
    assert ahead["choices"] == plain["choices"] and ahead["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    less = plain["timings"]["prompt_n"] - ahead["timings"]["prompt_n"]
    assert less >= saved and done == max(less, REST)
    assert ahead["slotcache"]["miss"]["why"] == "document d2 is not cached here"


def test_the_next_turn_of_a_hybrid_continues_from_the_snapshot_after_it(templates, tmp_path):
    first = {"documents": DOCUMENTS[:2], "max_tokens": 30}
    with running(hybrid(tmp_path / "hybrid.gguf"), chat_template_file=templates["restated"], idle_prefill=True) as up:
        done, ahead = turns(up, "", True, **first)
        assert done > 0 and ahead["slotcache"]["source"] == "snapshot"
        plain = up.chat(messages=[{"role": "user", "content": "What is it?"}], cache_scope="x", conversation="d", **first)
        follow = {"messages": [{"role": "user", "content": "And then?"}], "documents": DOCUMENTS[1:], "max_tokens": 24}
        fresh = up.chat(**follow, conversation="d", cache_scope="x", cache_prompt=False)
        assert plain["timings"]["cache_n"] == fresh["timings"]["cache_n"] == 0
        assert fresh["choices"] == ahead["choices"]


@pytest.fixture(scope="module")
def server(tiny, templates):
    with running(tiny, chat_template_file=templates["restated"], idle_prefill=True) as up:
        yield up


def settled(server):
    """Idle tokens once there is nothing left to compute ahead."""
    until(lambda: server.service.idle.done)
    return idle_tokens(server)


def test_it_is_done_once_for_each_answer(server):
    chat = {"messages": [{"role": "user", "content": "Once?"}], "cache_scope": "once"}
    before = settled(server)
    server.chat(**chat)
    done = settled(server)
    assert done > before
    steps = server.metric("slotcache_steps_total")
    assert server.chat(**chat)["timings"]["prompt_n"] == REST  # the same answer: its next turn is there already
    assert settled(server) == done and server.metric("slotcache_steps_total") == steps + 4


def test_only_what_may_be_cached_is_computed_ahead(server):
    before = settled(server)
    for fields in ({"cache_prompt": False}, {"max_tokens": 0}):
        server.chat("Not this.", cache_scope="may not", **fields)
    server.http.post("/v1/completions", json={"prompt": "Nor this.", "max_tokens": 4, "cache_prompt": True})
    assert settled(server) == before


def test_what_fails_is_not_tried_again_and_later_work_is_done(tiny, monkeypatch, caplog):
    with running(tiny, idle_prefill=True, idle_sets=2) as server:
        asked = []

        async def fail(*given):
            asked.append(given)
            raise KeyError("odd")

        with monkeypatch.context() as patched:
            patched.setattr(server.service.view, "missing", fail)
            server.chat("What is it?", documents=DOCUMENTS[:2])
            until(lambda: "idle prefill failed, and all waiting work is dropped" in caplog.text)
            until(lambda: server.service.idle.done)
            tries = len(asked)
            server.chat("What is it?", cache_prompt=False)
            assert server.service.idle.done and len(asked) == tries
        server.chat("Another", documents=DOCUMENTS[1:])
        assert settled(server) > 0


def test_a_request_that_is_refused_at_last_ends_no_idle_work(tiny, monkeypatch):
    monkeypatch.setattr(idle, "PAUSE", 3600.0)
    with running(tiny, idle_prefill=True) as server:
        server.chat("What is it?", conversation="c")
        until(lambda: server.service.idle._task is not None)

        def refuse(generations):
            raise RequestError("no such sampler")

        monkeypatch.setattr(server.service.engine, "submit", refuse)
        assert server.http.post("/completion", json={"prompt": "Hello"}).status_code == 400
        assert server.service.idle._task is not None


def test_work_that_the_engine_drops_by_itself_is_done_later(tiny, monkeypatch):
    """As it does where a model leaves the device for another one."""
    with running(tiny, idle_prefill=True) as server:
        engine, work = server.service.engine, server.service.idle
        dropped, enter = threading.Event(), engine._enter_background

        def enters(*given):
            started = enter(*given)
            if not dropped.is_set():
                engine.background.drop_all()
                dropped.set()
            return started

        monkeypatch.setattr(engine, "_enter_background", enters)
        server.chat(max_tokens=30)
        assert dropped.wait(DEADLINE)
        before = idle_tokens(server)
        until(lambda: engine.outbox.loop.call_soon_threadsafe(work.resume) and work.done)
        assert idle_tokens(server) > before


def test_it_gives_way_to_whoever_comes(server):
    """A long answer takes many steps to restate; a request that comes then ends the one that is under way."""
    before = settled(server)
    scheduler, steps = server.service.engine.scheduler, []
    commit = scheduler.commit

    def watched(plan, sampled):
        spans = zip(scheduler.step.jobs, plan.spans, strict=True)
        steps.append([(not job.request.kind.is_client, len(span.tokens)) for job, span in spans])
        return commit(plan, sampled)

    server.chat("Tell me all.", max_tokens=1500, cache_scope="long")
    scheduler.commit = watched
    try:
        until(lambda: any(background for step in steps for background, _ in step))
        server.chat("Quick.", max_tokens=2, cache_scope="quick")
    finally:
        scheduler.commit = commit
    kinds = [{background for background, _ in step} for step in steps]
    first_front = kinds.index({False})
    assert (
        first_front
        and kinds[:first_front] == [{True}] * first_front
        and kinds[first_front : first_front + 2] == [{False}] * 2
    )
    if not server.service.context.costs.background_ns:  # a step that cannot be aborted is sized in time
        assert max(size for step in steps for background, size in step if background) <= 64
    assert settled(server) - before >= 1500  # what was interrupted goes on


SETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(range(3), size)]
READ = {(0,), (0, 1), (0, 1, 2)}  # what a chat about all of DOCUMENTS leaves at the front


@pytest.mark.parametrize("end", ["answered", "refused", "gone"])
def test_it_gives_way_while_a_prompt_is_made_and_goes_on_afterwards(server, end):
    before, service, may_go_on = settled(server), server.service, threading.Event()
    server.chat("Tell me all.", max_tokens=1500, cache_scope=f"arrives: {end}")
    until(lambda: idle_tokens(server) > before)
    service.builder.threads._small.submit(may_go_on.wait)
    body = {"messages": [{"role": "user", "content": "Quick."}], "max_tokens": 2, "id_slot": 99 if end == "refused" else -1}
    try:
        with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=DEADLINE)) as client:
            client.request("POST", "/v1/chat/completions", json.dumps(body))
            until(lambda: service.idle.num_arriving)
            until(lambda: not server.metric("slotcache_requests_background"))
            assert not service.idle.done
            if end == "gone":
                client.close()
                until(lambda: not service.idle.num_arriving)
            may_go_on.set()
            assert end == "gone" or client.getresponse().status == {"answered": 200, "refused": 400}[end]
    finally:
        may_go_on.set()
    assert settled(server) - before >= 1500


def sets_in_front(server, scope=""):
    """The sets of DOCUMENTS that another chat could ask about without computing any of them."""
    found = set()
    for subset in SETS:
        asked = {"documents": [DOCUMENTS[number] for number in subset], "cache_scope": scope}
        reported = server.http.post("/v1/documents/order", json=asked).json()
        if all(used["cached_tokens"] == used["tokens"] for used in reported["documents"]):
            found.add(subset)
    return found


@pytest.mark.parametrize(("most", "added"), [(0, []), (1, []), (3, [(1,), (2,)]), (99, [(1,), (2,), (0, 2), (1, 2)])])
def test_sets_of_documents_come_to_the_front(tiny, most, added):
    with running(tiny, idle_sets=most) as server:
        answer = server.chat("What is it?", documents=DOCUMENTS)
        done = settled(server)
        assert sets_in_front(server) == READ | set(added)
        sizes = [used["tokens"] for used in answer["slotcache"]["documents"]]
        shared = sum(sizes[subset[-1]] for subset in added) - done
        assert 0 <= shared <= 2 * len(added), "a document for each, but for a token or two in which all begin alike"
        assert [len(slot.history) > 0 for slot in server.service.engine.scheduler.slots] == [True] + 3 * [False]
        server.chat("What is it?", documents=DOCUMENTS)
        assert settled(server) == done


@pytest.fixture(scope="module")
def eager(tiny):
    # Idle KV may stay on a device, and sets are computed where cells are free.
    with running(tiny, idle_sets=99, **({"ctx_size": 1 << 16} if ON_DEVICE else {})) as up:
        yield up


def test_what_is_at_the_front_is_reused_and_changes_no_answer(eager):
    fresh = eager.chat("And this?", documents=DOCUMENTS[1:], cache_prompt=False, document_order="retrieval")
    eager.chat("What is it?", documents=DOCUMENTS, cache_scope="reused")
    settled(eager)
    answer = eager.chat("And this?", documents=DOCUMENTS[1:], cache_scope="reused")
    assert answer["choices"] == fresh["choices"]
    assert [used["cached_tokens"] / used["tokens"] for used in answer["slotcache"]["documents"]] == [1, 1]


CHAT = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT},  # no other chat stands behind that answer
        {"document_order": "retrieval"},  # the order is not ours to choose
        {"keep_first": 1},
        {"documents_attention": "separate"},  # each was read alone already, and no set is ever used
        {"cache_prompt": False},
    ],
)
def test_sets_are_brought_to_the_front_only_where_others_may_use_them(eager, fields):
    before = settled(eager)
    eager.chat(documents=DOCUMENTS, cache_scope="not here", **fields)
    assert settled(eager) == before


MANY = [{"id": f"m{number}", "text": f"Paper {number} of many is about the hill. " * 8} for number in range(5)]


def fronting(server, scope):
    """A chat whose sets are being brought to the front; its answer."""
    before = settled(server)
    answer = server.chat("What is it?", documents=MANY, cache_scope=scope)
    until(lambda: idle_tokens(server) > before)
    return answer


def test_whoever_comes_interrupts_the_sets_and_they_go_on_afterwards(eager):
    before = settled(eager)
    first = fronting(eager, "many")
    eager.chat("Quick.", cache_scope="quick")
    sizes = [used["tokens"] for used in first["slotcache"]["documents"]]
    # Of each set the last document is computed, but of those that begin as the answer's prompt did; a token or two at the
    # beginning are the same for all, and some tokens of what was interrupted are computed again.
    subsets = [subset for size in range(1, 6) for subset in itertools.combinations(range(5), size)]
    ahead = [subset for subset in subsets if subset != tuple(range(len(subset)))]
    missing = sum(sizes[subset[-1]] for subset in ahead) - (settled(eager) - before)
    assert len(ahead) == 26 and -max(sizes) <= missing <= 2 * len(ahead)


def test_a_scope_that_is_dropped_stays_dropped(eager):
    fronting(eager, "dropped")
    eager.http.delete("/v1/cache", params={"scope": "dropped"})
    done = idle_tokens(eager)
    assert eager.service.idle.done and settled(eager) == done
    reported = eager.http.post("/v1/documents/order", json={"documents": MANY, "cache_scope": "dropped"}).json()
    assert reported["cached_tokens"] == 0


def test_what_is_computed_for_one_scope_goes_on_when_another_is_dropped(eager):
    before = settled(eager)
    fronting(eager, "kept")
    eager.http.delete("/v1/cache", params={"scope": "not that one"})
    first = settled(eager) - before
    before = settled(eager)
    fronting(eager, "whole")
    assert first == pytest.approx(settled(eager) - before, abs=100)


@pytest.mark.parametrize("act", ["erase", "speculate"])
def test_what_gave_way_to_something_else_goes_on(eager, act):
    before = settled(eager)
    slot = fronting(eager, f"beside {act}")["slotcache"]["slot"]
    if act == "erase":
        assert eager.http.post(f"/slots/{(slot + 1) % 4}", params={"action": "erase"}).status_code == 200
    else:
        turn = {"id": "turn", "messages": [{"role": "user", "content": "Which?"}], "cache_scope": "other"}
        assert eager.http.post("/v1/speculate", json=turn).json()["state"] == "started"
        assert not eager.service.idle.done
        eager.http.delete("/v1/speculate", params={"id": "turn", "scope": "other"})
    first = settled(eager) - before
    before = settled(eager)
    fronting(eager, f"without {act}")
    assert first == pytest.approx(settled(eager) - before, abs=200)


def test_what_gave_way_to_a_speculation_goes_on_when_that_is_done(eager):
    before = settled(eager)
    fronting(eager, "beside a turn to come")
    turn = {"messages": [{"role": "user", "content": "Which?"}], "documents": DOCUMENTS, "cache_scope": "to come"}
    assert eager.http.post("/v1/speculate", json=turn).json()["state"] == "started"
    first = settled(eager) - before
    before = settled(eager)
    fronting(eager, "without a turn to come")
    assert first >= settled(eager) - before - 200


def test_idle_work_goes_on_where_a_prompt_ahead_of_its_turn_is_given_up(tiny, monkeypatch):
    """The client of a search leaves while the engine is asked to begin with what stands in front of the documents."""
    monkeypatch.setattr(idle, "PAUSE", 3600.0)
    with running(tiny, idle_prefill=True) as up:
        up.chat("What is it?", conversation="c")
        engine, asked, submit = up.service.engine, threading.Event(), up.service.engine.submit_background
        monkeypatch.setattr(engine, "submit_background", lambda *given, **named: (submit(*given, **named), asked.set())[0])
        chat = ChatRequest(messages=[{"role": "user", "content": "And now?"}])
        with blocked(up):
            ahead = asyncio.run_coroutine_threadsafe(up.service.prefetch("a search", chat, 0), engine.outbox.loop)
            assert asked.wait(DEADLINE)
            monkeypatch.setattr(idle, "PAUSE", 0.0)
            ahead.cancel()
        until(lambda: up.service.idle.done)


def test_documents_are_read_ahead_though_sets_find_no_room(monkeypatch):
    """The sets would wait for room until the next request, and every request brings further sets."""
    monkeypatch.setattr(idle, "PAUSE", 0.0)
    asked = []

    class Sets:
        scope, num_bytes = COMMON, 1

        async def compute(self, ahead):
            asked.append("sets")
            return False

    class Documents:
        has_more = True

        async def compute(self, ahead):
            asked.append("documents")

    async def rest():
        nothing: Any = None
        sets: Any = Sets()
        documents: Any = Documents()
        work = idle.IdlePrefill(nothing, nothing, open=(), next_turns=True, num_sets=1)
        work._sets.add(sets)
        work.prefixes = documents
        work.resume()
        assert work._task is not None
        await work._task
        assert len(work._sets) == 1, "they stay for the next idle time"

    asyncio.run(rest())
    assert asked == ["sets", "documents"]
