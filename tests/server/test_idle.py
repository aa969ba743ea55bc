"""What is computed ahead in idle time: seen in the next turn's numbers, and never in a request's way."""

import itertools

import pytest

from .conftest import running, until

# History shows an answer otherwise than it was generated, as templates of reasoning models do.
RESTATED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
DOCUMENTS = [{"id": f"d{number}", "text": f"Text {number} is about the town. " * 4} for number in range(3)]


def idle_tokens(server):
    return server.metric("slotcache_idle_prompt_tokens_total")


def turns(server, scope, wait, **fields):
    """Two turns of a conversation; the second answer. wait: for the idle work after the first."""
    before = idle_tokens(server)
    server.chat(messages=[{"role": "user", "content": "What is it?"}], conversation="c", cache_scope=scope, **fields)
    if wait:
        until(lambda: idle_tokens(server) > before and server.metric("slotcache_requests_running") == 0)
    follow = {"messages": [{"role": "user", "content": "And then?"}], "documents": DOCUMENTS[1:], "cache_scope": scope}
    return server.chat(**follow, conversation="c", max_tokens=24)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "restated.jinja"
    file.write_text(RESTATED)
    return {"plain": "", "restated": str(file)}


@pytest.mark.parametrize(("template", "saved"), [("plain", 6), ("restated", 30)])
def test_the_next_turn_computes_less(tiny, templates, template, saved):
    first = {"documents": DOCUMENTS[:2], "max_tokens": 30}
    with running(tiny, chat_template_file=templates[template], idle_prefill=True) as server:
        ahead = turns(server, "", True, **first)
        done = idle_tokens(server)
        assert server.metric("slotcache_prompt_tokens_total") > done > 0
    with running(tiny, chat_template_file=templates[template], idle_prefill=False) as server:
        plain = turns(server, "", False, **first)
        assert idle_tokens(server) == 0
    assert ahead["choices"] == plain["choices"] and ahead["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert plain["timings"]["prompt_n"] - ahead["timings"]["prompt_n"] == done >= saved
    assert ahead["slotcache"]["miss"]["why"] == "document d2 is not cached here"


@pytest.fixture(scope="module")
def server(tiny, templates):
    with running(tiny, chat_template_file=templates["restated"], idle_prefill=True) as up:
        yield up


def settled(server):
    """Idle tokens once there is nothing left to compute ahead."""
    until(lambda: server.service.idle._task is None and not server.service.idle._waiting)
    return idle_tokens(server)


def test_it_is_done_once_for_each_answer(server):
    chat = {"messages": [{"role": "user", "content": "Once?"}], "cache_scope": "once"}
    before = settled(server)
    server.chat(**chat)
    done = settled(server)
    assert done > before
    steps = server.metric("slotcache_steps_total")
    assert server.chat(**chat)["timings"]["prompt_n"] == 1  # the same answer: its next turn is there already
    assert settled(server) == done and server.metric("slotcache_steps_total") == steps + 4


def test_only_what_may_be_cached_is_computed_ahead(server):
    before = settled(server)
    for fields in ({"cache_prompt": False}, {"max_tokens": 0}):
        server.chat("Not this.", cache_scope="may not", **fields)
    server.http.post("/v1/completions", json={"prompt": "Nor this.", "max_tokens": 4, "cache_prompt": True})
    assert settled(server) == before


def test_it_gives_way_to_whoever_comes(server):
    """A long answer takes many steps to restate; a request that comes then waits for the one that is under way."""
    before = settled(server)
    scheduler, steps = server.service.engine.scheduler, []
    commit = scheduler.commit

    def watched(plan, sampled):
        spans = zip(scheduler._in_flight, plan.spans, strict=True)
        steps.append([(request.background, len(span.tokens)) for request, span in spans])
        return commit(plan, sampled)

    server.chat("Tell me all.", max_tokens=1500, cache_scope="long")
    scheduler.commit = watched
    try:
        until(lambda: any(background for step in steps for background, _ in step))
        server.chat("Quick.", max_tokens=2, cache_scope="quick")
    finally:
        scheduler.commit = commit
    kinds = [{background for background, _ in step} for step in steps]
    begun = kinds.index({False})
    assert begun and kinds[:begun] == [{True}] * begun and kinds[begun : begun + 2] == [{False}] * 2
    assert max(size for step in steps for background, size in step if background) <= 64
    assert 0 < settled(server) - before < 1500


SETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(range(3), size)]


def cached_sets(server, scope):
    """The sets of DOCUMENTS that another chat could ask about without computing any of them, and the tokens of each."""
    found = set()
    for subset in SETS:
        asked = {"documents": [DOCUMENTS[number] for number in subset], "cache_scope": scope}
        told = server.http.post("/v1/documents/order", json=asked).json()
        if all(used["cached_tokens"] == used["tokens"] for used in told["documents"]):
            found.add(subset)
    return found


def test_documents_are_computed_as_beginnings_of_other_chats(tiny):
    """Of three, read in rank: the second and the third alone, the third behind the first, the third behind the second."""
    read, added = {(0,), (0, 1), (0, 1, 2)}, [(1,), (2,), (0, 2), (1, 2)]
    with running(tiny, idle_prefill=True, idle_documents=3) as server:
        before = settled(server)
        answer = server.chat("What is it?", documents=DOCUMENTS, cache_scope="three")
        done = settled(server) - before
        assert cached_sets(server, "three") == read | {*added[:3]}
        sizes = [used["tokens"] for used in answer["slotcache"]["documents"]]
        assert 0 <= done - sizes[1] - 2 * sizes[2] < 16, "beside those, the end of the answer and of each prompt"
        server.chat("And this?", documents=[DOCUMENTS[2], DOCUMENTS[1]], cache_scope="three")
        again = server.chat("What else?", documents=DOCUMENTS[2:], cache_scope="three")
        assert again["slotcache"]["documents"] == [{"id": "d2", "tokens": sizes[2], "cached_tokens": sizes[2]}]
        before = settled(server)
        chat = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
        server.chat(messages=chat, documents=DOCUMENTS, cache_scope="later turn")
        server.chat("What is it?", documents=DOCUMENTS, cache_scope="ranked", document_order="retrieval")
        assert 0 < settled(server) - before < 16, "behind an answer, or where rank is kept, it would be of no use"
    with running(tiny, idle_prefill=True) as server:
        server.chat("What is it?", documents=DOCUMENTS)
        settled(server)
        assert cached_sets(server, "") == read
