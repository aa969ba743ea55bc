"""Chats about the server's own documents, over a real port: the embedded model over the bundled documents."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gguf import PoolingType
from slotcache.models.demo import FILE
from slotcache.models.demo.corpus import SUGGESTED, Corpus
from slotcache.ordering.prompt import ASK_FOR_IDS
from slotcache.server.api import search as api_search
from support.encoders import bert
from support.notes import NOTES, files, is_ready, write

from server.conftest import DEADLINE, running, text_of, until

ANSWERS = {one.question: one for one in Corpus.load().questions}
HOSTILE = ('" OR 1 AND (NEAR', "title: * - ^", "'; drop table chunk; --", "\0", "((((", "😀" * 5000, "", " ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Corpus.load().write(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder_index(folder, tmp_path_factory):
    """A server that knows no vectors. Requests are not cached unless they say so."""
    with running(FILE, docs=str(folder), docs_db=str(tmp_path_factory.mktemp("db")), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        yield up


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A server with an embedder and a reranker of random weights."""
    folder = tmp_path_factory.mktemp("staged")
    models = {
        "embedding_model": str(bert(folder / "bert.gguf")),
        "rerank_model": str(bert(folder / "ranker.gguf", PoolingType.RANK)),
    }
    settings: dict[str, Any] = {"docs": str(write(folder / "notes", NOTES)), "docs_db": str(folder / "db"), **models}
    with running(FILE, flash_attn="auto", **settings) as up:
        until(lambda: is_ready(up))
        yield up


def ask(server, question, **fields):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "temperature": 0, "retrieval": True}
    return server.http.post("/v1/chat/completions", json=body | fields)


def answer_of(server, question, **fields):
    answer = ask(server, question, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def search(server, query, **fields):
    answer = server.http.post("/v1/search", json={"query": query, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stages(server, query, **fields):
    """The events of a search in order."""
    with server.http.stream("POST", "/v1/search", json={"query": query, "stream": True, **fields}) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_stream_of_stages_that_the_server_fails_in_ends_with_an_error(folder_index, monkeypatch, caplog):
    def fail(*given, **named):
        raise KeyError("odd")

    monkeypatch.setattr(api_search, "results", fail)
    (event,) = stages(folder_index, "light")
    assert event["error"]["message"] == "the server failed: KeyError" and "KeyError: 'odd'" in caplog.text


def cached_tokens(server, scope=""):
    return sum(server.http.get("/v1/cache", params={"scope": scope}).json()["tokens"].values())


@pytest.mark.parametrize("question", SUGGESTED)
def test_questions_are_answered_from_the_folder_with_citations(folder_index, question):
    answer, wanted = answer_of(folder_index, question), ANSWERS[question]
    report, text = answer["slotcache"], text_of(answer)
    assert text == wanted.answer
    first = report["retrieved"][0]
    assert first["path"] == f"{wanted.document}.md" and first["lexical_rank"] == 1 and first["vector_rank"] is None
    assert {one["id"] for one in report["documents"]} == {one["id"] for one in report["retrieved"]}
    (cited,) = report["citations"]
    assert cited["id"] == first["id"] and cited["quote"]
    assert text[cited["start"] : cited["stop"]] == text.rstrip(".")
    source = folder_index.http.get(f"/v1/sources/{cited['id']}").json()
    assert text in source["text"] and source["path"] == first["path"]


def test_the_next_question_finds_the_documents_in_the_cache(folder_index):
    scope_is_common = {"conversation": "cached"}
    answer_of(folder_index, "Who is the mayor of Tarnwick?", **scope_is_common)
    again = answer_of(folder_index, "Who is the mayor of Tarnwick?")
    assert again["slotcache"]["cached_tokens"] > 200, "retrieval opts in to the cache"
    off = answer_of(folder_index, "Who is the mayor of Tarnwick?", cache_prompt=False)
    assert off["slotcache"]["cached_tokens"] == 0 and text_of(off) == text_of(again)
    later = answer_of(folder_index, "What is the speciality of Tarnwick?", **scope_is_common)
    assert later["slotcache"]["repeated"], "what the conversation holds is not shown again"
    assert later["slotcache"]["conversation"]["messages_kept"] == 2


def test_the_prompt_asks_for_ids_once_and_the_same_for_all(folder_index, folder, tmp_path):
    def prompt(**fields):
        body = {"messages": [{"role": "user", "content": "Who is the mayor of Tarnwick?"}], **fields}
        return folder_index.http.post("/apply-template", json=body).json()["prompt"]

    system = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tarnwick?"}]}
    assert ASK_FOR_IDS not in prompt() and prompt(retrieval=True).count(ASK_FOR_IDS) == 1
    assert f"Be brief.\n\n{ASK_FOR_IDS}" in prompt(**system, retrieval=True)
    assert prompt(retrieval=True).index(ASK_FOR_IDS) < prompt(retrieval=True).index("] Tarnwick\n")
    with running(FILE, docs=str(folder), docs_db=str(tmp_path), retrieval_prompt="") as other:
        until(lambda: is_ready(other))
        body = {"messages": [{"role": "user", "content": "Tarnwick?"}], "retrieval": True}
        assert ASK_FOR_IDS not in other.http.post("/apply-template", json=body).json()["prompt"]


def test_ids_in_brackets_are_cited(folder_index):
    """The model is made to write an id by a grammar."""
    id = search(folder_index, "Tarnwick", top_k=1)["results"][0]["id"]
    answer = answer_of(folder_index, "Tarnwick?", retrieval={"top_k": 1}, grammar=f'root ::= "So [{id}], [x {id}], [1]"')
    assert text_of(answer) == f"So [{id}], [x {id}], [1]"
    assert answer["slotcache"]["citations"] == [
        {"id": id, "start": 3, "stop": 15},
        {"id": id, "start": 20, "stop": 30},
    ]


def test_an_object_says_how_to_search(folder_index):
    found = answer_of(folder_index, "x", retrieval={"query": "the river of Tarnwick", "top_k": 2})["slotcache"]["retrieved"]
    assert found[0]["path"] == "tarnwick.md" and len(found) == 2
    only = answer_of(folder_index, SUGGESTED[0], retrieval={"paths": ["museum-of-hats.md"]})["slotcache"]["retrieved"]
    assert {one["path"] for one in only} <= {"museum-of-hats.md"}
    none = answer_of(folder_index, SUGGESTED[0], retrieval={"min_score": 1e9})["slotcache"]
    assert none["retrieved"] == none["citations"] == none["documents"] == []
    for wrong in ({"top_k": 0}, {"top_k": 101}, {"paths": ["x"] * 101}, "yes", 3):
        refused = ask(folder_index, "x", retrieval=wrong)
        assert refused.status_code == 400 and "retrieval" in refused.json()["error"]["param"], wrong
    warned = answer_of(folder_index, "x", retrieval={"topk": 3})
    assert "retrieval.topk" in warned["warnings"][0]


def test_documents_of_the_client_come_first_and_all_are_cited(folder_index):
    own = {"id": "own", "text": "The otter of the north sleeps in a hat."}
    asked = [{"role": "user", "content": SUGGESTED[0], "documents": [own]}]
    report = answer_of(folder_index, SUGGESTED[0], messages=asked, document_order="retrieval")["slotcache"]
    assert [one["id"] for one in report["documents"]] == ["own", *(one["id"] for one in report["retrieved"])]
    quoting = answer_of(folder_index, "Otter?", documents=[own], grammar='root ::= "the otter of the north"')
    assert quoting["slotcache"]["citations"] == [{"id": "own", "start": 0, "stop": 22, "quote": True}]


def test_a_chat_without_a_question_is_refused(folder_index):
    refused = ask(folder_index, "x", messages=[{"role": "system", "content": "x"}])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "retrieval"


def test_all_routes_of_chats_take_the_field(folder_index):
    body = {"messages": [{"role": "user", "content": SUGGESTED[1]}]}
    plain = folder_index.http.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
    assert (
        folder_index.http.post("/v1/chat/completions/input_tokens", json=body | {"retrieval": True}).json()["input_tokens"]
        > plain
    )
    order = folder_index.http.post("/v1/documents/order", json=body | {"retrieval": {"top_k": 2}})
    assert len(order.json()["order"]) == 2
    warmed = folder_index.http.post("/v1/cache/warm", json=body | {"retrieval": True}).json()
    assert warmed["slotcache"]["retrieved"] and warmed["prompt_tokens"] > plain
    assert folder_index.http.post("/v1/speculate", json=body | {"retrieval": True}).json()["state"] == "started"


def test_a_server_without_documents_refuses(server):
    refused = ask(server, "x")
    assert refused.status_code == 400 and "--docs" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "retrieval"
    assert server.http.post("/v1/search", json={"query": "x"}).status_code == 501
    assert ask(server, "x", retrieval=False, max_tokens=1).status_code == 200


def test_another_scope_finds_nothing(folder_index, folder, tmp_path):
    for refused in (
        ask(folder_index, SUGGESTED[0], cache_scope="other"),
        folder_index.http.post("/v1/search", json={"query": "Tarnwick", "cache_scope": "other"}),
    ):
        assert refused.status_code == 403 and "Tarnwick" not in refused.text
        assert refused.json()["error"]["param"] == "cache_scope"
    with running(FILE, docs=str(folder), docs_db=str(tmp_path), docs_scope="readers") as bound:
        until(lambda: bound.http.get("/v1/sources?scope=readers").json()["collections"][0]["state"] == "ready")
        assert ask(bound, SUGGESTED[0], max_tokens=1).status_code == 403
        assert answer_of(bound, SUGGESTED[0], cache_scope="readers", max_tokens=1)["slotcache"]["retrieved"]
        for path in ("/v1/sources", "/v1/sources/x"):
            assert bound.http.get(path).status_code == 403
        assert cached_tokens(bound) == 0 < cached_tokens(bound, "readers")


@pytest.mark.parametrize("query", HOSTILE)
def test_a_query_is_never_syntax(folder_index, query):
    assert search(folder_index, query)["stage"] == "lexical"
    assert ask(folder_index, query, max_tokens=1).status_code in (200, 400)  # a long one leaves no room for an answer


def test_a_search_has_stages(staged):
    first, second, third = stages(staged, "two tides")
    assert [one["stage"] for one in (first, second, third)] == ["lexical", "fused", "reranked"]
    assert first["results"][0]["path"] == "tides.md" and first["results"][0]["text"] == "The moon raises two tides a day."
    assert second["results"][0]["vector_rank"] in (1, 2)
    assert {one["id"] for one in third["results"]} == {one["id"] for one in second["results"]}
    whole = search(staged, "two tides")
    assert whole["stage"] == "reranked" and whole["results"] == third["results"]
    found = answer_of(staged, "two tides", max_tokens=1)["slotcache"]["retrieved"]
    assert [one["id"] for one in found] == [one["id"] for one in third["results"]]


def test_stages_are_computed_ahead_for_a_turn_that_is_named(folder_index):
    question = "What is the closing day of the Clock Museum?"
    before = cached_tokens(folder_index)
    (only,) = stages(folder_index, "closing day of the Clock Museum", speculate="typing", top_k=2)
    until(lambda: cached_tokens(folder_index) > before)
    until(lambda: folder_index.metric("slotcache_requests_background") == 0)
    answer = answer_of(folder_index, question, retrieval={"top_k": 2})
    first = answer["slotcache"]["documents"][0]
    assert first["id"] in {one["id"] for one in only["results"]} and first["cached_tokens"] == first["tokens"]
    cold = answer_of(folder_index, question, retrieval={"top_k": 2}, cache_prompt=False)
    assert text_of(cold) == text_of(answer) and cold["slotcache"]["cached_tokens"] == 0


def test_what_was_computed_ahead_is_reused_after_the_history(folder_index):
    conversation = {"conversation": "typed"}
    answer_of(folder_index, "Who is the mayor of Tarnwick?", **conversation)
    before = cached_tokens(folder_index)
    stages(folder_index, "departure time of the Gallowmere Ferry", speculate="typed")
    until(lambda: cached_tokens(folder_index) > before)
    until(lambda: folder_index.metric("slotcache_requests_background") == 0)
    asked = answer_of(folder_index, "At what time does the Gallowmere Ferry leave?", **conversation)["slotcache"]
    reused = {one["id"] for one in asked["documents"] if one["cached_tokens"] == one["tokens"]}
    (first, *_) = (one["id"] for one in asked["retrieved"] if one["id"] not in asked["repeated"])
    assert first in reused


def test_nothing_is_computed_ahead_without_an_idle_slot(folder_index):
    done = threading.Event()
    endless = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 7000, "ignore_eos": True, "stream": True}

    def load():
        with folder_index.http.stream("POST", "/v1/chat/completions", json=endless) as answer:
            for _ in answer.iter_lines():
                if done.is_set():
                    break

    threads = [threading.Thread(target=load) for _ in range(folder_index.service.view.num_slots)]
    for thread in threads:
        thread.start()
    until(lambda: folder_index.service.is_full)
    dropped = folder_index.metric("slotcache_speculations_dropped_total")
    assert stages(folder_index, "the mayor of Osselby", speculate="loaded")[0]["results"]
    assert folder_index.metric("slotcache_requests_background") == 0
    assert folder_index.metric("slotcache_speculations_dropped_total") == dropped
    done.set()
    for thread in threads:
        thread.join()
    until(lambda: not folder_index.service.open)


def test_a_file_that_vanishes_is_not_found_and_its_source_is_gone(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))
        (found,) = search(up, "tides")["results"]
        (folder / "tides.md").unlink()
        assert search(up, "tides")["results"] == [found], "until the folder is looked at again"
        up.http.post("/v1/sources/refresh", json={})
        until(lambda: "tides.md" not in files(up))
        assert search(up, "tides")["results"] == []
        gone = up.http.get(f"/v1/sources/{found['id']}")
        assert gone.status_code == 404 and found["id"] in gone.json()["error"]["message"]


def test_answers_say_when_the_index_was_not_up_to_date(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))

        def indexes():
            whole = answer_of(up, "tides", max_tokens=2)["slotcache"]
            return [part.get("index") for part in (whole, search(up, "tides"), *stages(up, "tides"))]

        assert indexes() == [None] * 3
        up.folder_index.watcher.state = "reading"  # as while it reads
        assert indexes() == [{"state": "reading", "unit": "files", "done": 2, "total": 2}] * 3
        up.http.post("/v1/sources/refresh", json={})
        until(lambda: is_ready(up))
        assert indexes() == [None] * 3


def test_an_answer_warns_of_files_that_were_not_read(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))
        index, watcher = up.folder_index.index, up.folder_index.watcher
        watcher.state = "reading"
        assert "warnings" not in answer_of(up, "tides", max_tokens=2), "all is read: vectors or a scan may be missing"
        index.progress = replace(index.progress, files_left=1)  # as while it reads
        warning = "retrieval: 1 of 2 files were read when the search began: the answer may lack the other files"
        assert answer_of(up, "tides", max_tokens=2)["warnings"] == [warning]
        assert "warnings" not in up.chat("tides"), "no search, no warning"
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        calls = {"role": "assistant", "content": None, "tool_calls": [call]}
        results = [calls, {"role": "tool", "tool_call_id": "a", "content": "Two."}]
        assert "warnings" not in answer_of(up, "", messages=results, max_tokens=2), "results of tools are no question"
        watcher.state, index.progress = "opening", replace(index.progress, files=0, files_left=0)
        assert answer_of(up, "tides", max_tokens=2)["warnings"] == [warning.replace("1 of 2 files were", "no file was")]


def test_chats_run_while_an_index_is_built(tiny, tmp_path):
    many = {f"{number}.md": f"# Note {number}\n\nThe stone {number} is old.\n" for number in range(100)}
    with running(tiny, docs=str(write(tmp_path / "notes", many)), docs_db=str(tmp_path / "db")) as up:
        until(lambda: up.folder_index.index.progress.chunks > 0)
        while not is_ready(up):
            assert answer_of(up, "Which stone is old?", max_tokens=2)["slotcache"]["retrieved"]
        assert len(search(up, "stone", top_k=100)["results"]) == 100


def test_a_client_may_disconnect_during_a_search(staged):
    async def disconnect():
        async with httpx.AsyncClient(base_url=staged.url, timeout=DEADLINE) as client:
            for path, body in (
                ("/v1/search", {"query": "two tides", "stream": True, "speculate": "gone"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "two tides"}], "retrieval": True}),
            ):
                for wait in (0.0, 0.005, 0.02):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(wait):
                            await client.post(path, json=body | {"max_tokens": 5000} if "messages" in body else body)
                            await asyncio.sleep(1)

    asyncio.run(disconnect())
    until(
        lambda: not staged.service.open and not staged.vectors.embedding.num_open and not staged.vectors.reranking.num_open
    )
    assert len(stages(staged, "two tides")) == 3


def test_documents_take_half_of_the_context_in_any_language(tmp_path):
    """The index takes four bytes for a token; in this vocabulary such a sign is three or four tokens."""
    signs = [chr(0x4E00 + 37 * at % 20000) for at in range(400)]
    notes = {f"{at}.md": f"# Zebra {at}\n\n" + " ".join("".join(signs[at : at + 300])) for at in range(8)}
    folder = write(tmp_path / "notes", notes)
    with running(FILE, docs=str(folder), docs_db=str(tmp_path / "db"), ctx_size=4096, flash_attn="auto") as up:
        until(lambda: is_ready(up))
        report = answer_of(up, "Zebra?", max_tokens=2, retrieval={"top_k": 8})["slotcache"]
        tokens = [one["tokens"] for one in report["documents"]]
        assert len(tokens) == len(report["retrieved"]) > 0 and sum(tokens) <= 2048 < sum(tokens) + 2 * max(tokens)
