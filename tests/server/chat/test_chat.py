"""Chat with documents over a real port, with the real client; what was reused is asserted where a user sees it."""

from typing import Any

import pytest
from slotcache.models.errors import ModelError
from slotcache.server.config.settings import Settings
from slotcache.server.load import load
from support.architectures import delta, hybrid, recurrent, windowed

from server.conftest import REST, cached, running, text_of, until

DOCUMENTS = [
    {"id": f"d{number}", "text": f"Document number {number} tells of the {name} and its long history. " * 3}
    for number, name in enumerate(["river", "tower", "market", "ferry", "bridge", "harbour"])
]
SYSTEM = {"role": "system", "content": "Answer from the documents, briefly, and say when they do not tell."}


def ask(server, numbers, question="What is it?", **fields):
    documents = [DOCUMENTS[number] for number in numbers]
    messages = [SYSTEM, {"role": "user", "content": question}]
    return server.chat(messages=messages, documents=documents, **fields)


def used(answer):
    return [document["id"] for document in answer["slotcache"]["documents"]]


def test_the_openai_client_streams_a_chat_with_documents(server):
    stream = server.openai.chat.completions.create(
        model="tiny",
        messages=[SYSTEM, {"role": "user", "content": "Where does the ferry go?"}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"documents": DOCUMENTS[:3], "cache_prompt": True, "ignore_eos": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    usage = chunks[-1].usage
    assert usage.completion_tokens == 8 and usage.prompt_tokens > 50
    assert [document["id"] for document in chunks[-1].slotcache["documents"]] == ["d0", "d1", "d2"]


def test_documents_are_ordered_by_what_is_cached(server):
    first = ask(server, [0, 1, 2], cache_scope="order")
    assert used(first) == ["d0", "d1", "d2"] and first["slotcache"]["source"] == "none"
    second = ask(server, [3, 1, 0, 2], cache_scope="order")
    assert used(second) == ["d0", "d1", "d2", "d3"]
    reused = [document["cached_tokens"] == document["tokens"] for document in second["slotcache"]["documents"]]
    assert reused == [True, True, True, False]
    assert second["slotcache"]["source"] == "fork"
    assert second["slotcache"]["miss"]["why"] == "document d3 is not cached here"
    assert cached(second) == second["timings"]["cache_n"]
    third = ask(server, [2, 1, 0, 3], cache_scope="order")
    assert used(third) == ["d0", "d1", "d2", "d3"]
    assert third["slotcache"]["miss"]["why"] == "the hints are not cached here", "their ranking is another one"


def test_retrieval_order_can_be_asked_for(server):
    ask(server, [0, 1, 2], cache_scope="rank")
    answer = ask(server, [2, 1, 0], cache_scope="rank", document_order="retrieval")
    assert used(answer) == ["d2", "d1", "d0"]
    assert answer["slotcache"]["documents"][0]["cached_tokens"] < answer["slotcache"]["documents"][0]["tokens"]


def test_the_order_hint_says_the_ranking_and_breaks_no_prefix(server):
    ask(server, [0, 1, 2], cache_scope="hint")
    body = {"messages": [{"role": "user", "content": "Q"}], "documents": [DOCUMENTS[n] for n in (2, 0, 1)]}
    scoped = body | {"cache_scope": "hint-2"}
    first = server.http.post("/apply-template", json=scoped).json()["prompt"]
    assert "Most relevant" not in first
    server.chat(messages=body["messages"], documents=[DOCUMENTS[n] for n in (0, 1, 2)], cache_scope="hint-2")
    moved = server.http.post("/apply-template", json=scoped).json()["prompt"]
    assert "Most relevant: d2\n\n" in moved
    assert moved.index("[d1]") < moved.index("Most relevant") < moved.index("Q<|im_end|>")
    silent = server.http.post("/apply-template", json=scoped | {"order_hint": False}).json()["prompt"]
    assert "Most relevant" not in silent


def test_a_conversation_computes_only_its_new_tokens(server):
    messages = [SYSTEM, {"role": "user", "content": "Tell me of the river."}]
    scope = "turns"
    answer = server.chat(messages=messages, cache_scope=scope)
    for question in ("And the tower?", "And the market?"):
        total = answer["usage"]["total_tokens"] - 1  # the last token that was sampled has no KV
        messages += [answer["choices"][0]["message"], {"role": "user", "content": question}]
        answer = server.chat(messages=messages, cache_scope=scope)
        assert answer["slotcache"]["source"] == "own"
        assert answer["slotcache"]["cached_tokens"] == total


def test_documents_of_earlier_turns_stay_where_they_stood(server):
    scope = "history"
    server.chat(
        messages=[SYSTEM, {"role": "user", "content": "?", "documents": [DOCUMENTS[n] for n in (1, 0)]}],
        cache_scope=scope,
    )
    first = {"role": "user", "content": "Where is it?", "documents": [DOCUMENTS[n] for n in (0, 1, 2)]}
    answer = server.chat(messages=[SYSTEM, first], cache_scope=scope)
    assert used(answer) == ["d1", "d0", "d2"]
    second = {"role": "user", "content": "And then?", "documents": [DOCUMENTS[n] for n in (4, 3)]}
    messages = [SYSTEM, first, answer["choices"][0]["message"], second]
    following = server.chat(messages=messages, cache_scope=scope)
    assert used(following) == ["d1", "d0", "d2", "d4", "d3"]
    assert following["slotcache"]["source"] == "own"
    assert following["slotcache"]["cached_tokens"] == answer["usage"]["total_tokens"] - 1


@pytest.mark.parametrize(("number", "slots"), [(2, 1), (20, 4)])
def test_conversations_in_turn_keep_their_history(tiny, number, slots):
    with running(tiny, parallel=slots) as server:
        histories = [[SYSTEM, {"role": "user", "content": f"Conversation {who}."}] for who in range(number)]
        totals = [0] * number
        for turn in range(3):
            for who, messages in enumerate(histories):
                answer = server.chat(messages=messages)
                assert turn == 0 or answer["slotcache"]["cached_tokens"] == totals[who]
                assert answer["timings"]["prompt_n"] == answer["usage"]["prompt_tokens"] - cached(answer)
                totals[who] = answer["usage"]["total_tokens"] - 1
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"Turn {turn}."}]


def test_a_regenerated_answer_computes_its_rest(server):
    server.chat("The same again?", cache_scope="again")
    again = server.chat("The same again?", cache_scope="again")
    assert again["timings"]["prompt_n"] == REST and again["slotcache"]["miss"] is None


def test_cache_prompt_is_opt_in(server):
    first = ask(server, [0, 1], cache_prompt=False)
    ask(server, [0, 1], cache_scope="")
    third = ask(server, [1, 0], cache_prompt=False)
    for answer in (first, third):
        assert answer["timings"]["cache_n"] == 0 and answer["slotcache"]["source"] == "none"
        assert answer["slotcache"]["miss"]["why"] == "cache_prompt is off"
    assert used(third) == ["d1", "d0"]
    until(lambda: all(scope.is_shared for scope in server.service.engine.scheduler.tree.roots))


def test_scopes_never_meet(server):
    ask(server, [0, 1, 2], cache_scope="mine")
    other = ask(server, [2, 1, 0], cache_scope="yours")
    assert other["timings"]["cache_n"] == 0 and used(other) == ["d2", "d1", "d0"]
    assert "Document number" not in server.http.get("/slots").text


def test_control_tokens_in_user_text_stay_text(server):
    plain = server.chat("Say it.", max_tokens=1)["usage"]["prompt_tokens"]
    smuggled = server.chat("<|im_end|>", max_tokens=1)["usage"]["prompt_tokens"]
    ids = server.http.post("/tokenize", json={"content": "<|im_end|>", "parse_special": False}).json()["tokens"]
    question = server.http.post("/tokenize", json={"content": "Say it.", "parse_special": False}).json()["tokens"]
    assert len(ids) > 1
    assert smuggled - plain == len(ids) - len(question)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_seed_makes_an_answer_repeatable(server, temperature):
    answers = {
        server.chat("Go on.", temperature=temperature, seed=7, max_tokens=12)["choices"][0]["message"]["content"]
        for _ in range(3)
    }
    assert len(answers) == 1


def test_sampling_options_change_the_answer(server):
    greedy = server.chat("Go on.", max_tokens=16)["choices"][0]["message"]["content"]
    first = server.http.post("/tokenize", json={"content": greedy}).json()["tokens"][0]
    biased = server.chat("Go on.", max_tokens=16, logit_bias={str(first): -100.0})
    assert text_of(biased) != greedy
    penalised = server.chat(greedy, max_tokens=60, repeat_penalty=50.0, repeat_last_n=1000)
    plain = server.chat(greedy, max_tokens=60)
    assert text_of(penalised) != text_of(plain)


def test_reuse_does_not_change_greedy_text(server):
    for numbers in ([0, 1, 2], [2, 0, 4], [1, 0, 5]):
        cached = ask(server, numbers, document_order="retrieval", max_tokens=24, cache_scope="text")
        plain = ask(server, numbers, document_order="retrieval", max_tokens=24, cache_prompt=False)
        assert text_of(cached) == text_of(plain)


def test_documents_that_read_the_same_under_different_names_do_no_harm(server):
    pair = [
        {"id": "a", "title": "b] c", "text": "The tower is open."},
        {"id": "a] b", "title": "c", "text": "The tower is open."},
    ]
    body = {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 2, "cache_scope": "alike"}
    for documents in (pair, pair[::-1]):
        server.chat(**body, documents=documents, document_order="retrieval")
    for documents in (pair, pair[::-1]):
        answer = server.chat(**body, documents=documents)
        assert [one["id"] for one in answer["slotcache"]["documents"]] in (["a", "a] b"], ["a] b", "a"])
        assert cached(answer) > 20


def test_a_model_with_a_sliding_window_reuses_what_the_window_has_passed(tmp_path):
    with running(windowed(tmp_path / "windowed.gguf")) as up:
        first = ask(up, [0, 1, 2])
        again = ask(up, [3, 1, 0, 2])
        assert used(again) == ["d0", "d1", "d2", "d3"]
        assert cached(again) > 100
        assert ask(up, [0, 1, 2])["choices"] == first["choices"]
        up.chat("Tell me of the sea.", max_tokens=2)  # all that is idle leaves the device for it
        last = ask(up, [0, 1, 2])
        assert last["choices"] == first["choices"] and last["slotcache"]["source"] == "host"
        assert cached(last) > 100
        assert ask(up, [0, 1, 2], cache_scope="another")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_too_many_slots_for_a_model_are_refused_with_what_would_be_right(tmp_path):
    with pytest.raises(ModelError, match="--parallel 100: at most 63 slots"):
        load(Settings(parallel=100, ctx_size=512), windowed(tmp_path / "windowed.gguf"))


@pytest.mark.parametrize("generate", [recurrent, hybrid, delta])
def test_a_model_whose_state_cannot_be_cut_goes_on_from_snapshots(generate, tmp_path):
    """Where a prompt parts from an earlier one there is a snapshot: at the end of its documents and of its answer."""
    with running(generate(tmp_path / "model.gguf"), parallel=2) as up:
        messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "What is it?"}]
        documents = [DOCUMENTS[number] for number in range(5)]
        first = up.chat(messages=messages, documents=documents, max_tokens=12)
        answer = text_of(first)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        messages[1]["documents"] = documents
        second = up.chat(messages=messages, max_tokens=12)
        assert second["slotcache"]["source"] == "snapshot"
        assert second["timings"]["prompt_n"] < 60
        other = up.chat(messages=[SYSTEM, {"role": "user", "content": "Who was there?"}], documents=documents, max_tokens=12)
        assert 0 < other["timings"]["prompt_n"] < 60
        assert "no snapshot of it goes further" in other["slotcache"]["miss"]["why"]
        for asked, used in ((messages, second),):
            plain = up.chat(messages=asked, max_tokens=12, cache_prompt=False)
            assert plain["timings"]["cache_n"] == 0
            assert plain["choices"] == used["choices"]
        both = up.chat(messages=messages, max_tokens=12, n=2)
        assert [choice["message"] for choice in both["choices"]] == 2 * [second["choices"][0]["message"]]
        snapshots = up.http.get("/v1/cache").json()["snapshots"]
        assert snapshots and all(one["bytes"] > 0 for one in snapshots)
        assert f"slotcache_snapshots {len(snapshots)}.0" in up.http.get("/metrics").text
        assert up.http.delete("/v1/cache").json()["tokens"] > 0
        assert up.chat(messages=messages, max_tokens=1)["timings"]["cache_n"] == 0


def test_without_room_for_snapshots_nothing_is_reused_and_the_answer_says_why(tmp_path):
    with running(hybrid(tmp_path / "hybrid.gguf"), cache_ram=0) as up:
        ask(up, [0, 1])
        again = ask(up, [0, 1])
        assert again["timings"]["cache_n"] == 0
        assert "--cache-ram leaves no room for snapshots" in again["slotcache"]["miss"]["why"]
