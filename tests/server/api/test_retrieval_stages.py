"""The stages of a search inside a chat, over a real port: documents are computed while a reranker takes seconds."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from gguf import PoolingType
from slotcache.models.demo import FILE
from slotcache.models.demo.corpus import SUGGESTED, Corpus
from slotcache.retrieval import Query
from slotcache.server.api import endpoint
from support.encoders import bert
from support.notes import is_ready
from support.on_device import loads_two

from server.conftest import DEADLINE, running, text_of, until

pytestmark = loads_two
READ = 20  # documents that there are, and that the reranker reads
QUESTION = "What is the speciality of Tarnwick?"
FRONT = 150  # tokens: no system message here has as many, with all that stands in front of the documents


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A server with an embedder, and with a reranker that needs seconds for the documents of one question."""
    folder = tmp_path_factory.mktemp("staged")
    corpus = Corpus.load().write(folder / "corpus")
    for file in sorted(corpus.iterdir())[READ:]:  # more would not all have room, and another first one has no KV
        file.unlink()
    settings: dict[str, Any] = {
        "docs": str(corpus),
        "docs_db": str(folder / "db"),
        "embedding_model": str(bert(folder / "bert.gguf")),
        "rerank_model": str(bert(folder / "ranker.gguf", PoolingType.RANK, layers=4, width=512)),
    }
    with running(FILE, flash_attn="auto", **settings) as up:
        until(lambda: is_ready(up))
        yield up


def chat(server, question, system, history=(), **fields):
    messages = [{"role": "system", "content": system}, *history, {"role": "user", "content": question}]
    return server.chat(messages=messages, max_tokens=24, ignore_eos=False, **fields)


@contextmanager
def asked(server, *question, **fields):
    """A chat whose search has come to the reranker. Yields the future of its answer."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(chat, server, *question, **fields)
        until(lambda: server.vectors.reranking.num_open)
        yield answer


def num_computed(server):
    """Tokens that were computed ahead so far."""
    return server.metric("slotcache_idle_prompt_tokens_total")


def num_computing(server):
    """Prompts that are being computed ahead."""
    return server.metric("slotcache_requests_background")


def is_searching(server):
    return server.vectors.reranking.num_open and not server.service.open


def leaders(server, question):
    """The documents that lead before the reranker's stage."""
    folder_index = server.folder_index
    hits = asyncio.run(folder_index.index.search(folder_index.embedding.query).hits(Query(text=question, top_k=READ)))
    return {hit.chunk.id for hit in hits}


def test_the_documents_that_lead_are_computed_while_the_reranker_runs(staged):
    question, before = (SUGGESTED[0], "Answer."), num_computed(staged)
    with asked(staged, *question, retrieval={"top_k": READ}) as answer:
        until(lambda: num_computed(staged) > before + FRONT and not num_computing(staged))
        assert is_searching(staged)
    documents = answer.result()["slotcache"]["documents"]
    reused = {one["id"] for one in documents if one["cached_tokens"] == one["tokens"]}
    shown = {one["id"] for one in documents}  # those that half of the context has room for
    assert len(reused) > 1 and reused <= leaders(staged, SUGGESTED[0]) & shown


def test_what_was_computed_ahead_never_reaches_the_answer(staged):
    question, before = (SUGGESTED[1], "Answer briefly."), num_computed(staged)
    with asked(staged, *question, retrieval={"top_k": 1}) as ahead:
        until(lambda: num_computed(staged) > before and not num_computing(staged))
    warm, cold = ahead.result(), chat(staged, *question, retrieval={"top_k": 1}, cache_prompt=False)
    (found,) = (one["id"] for one in warm["slotcache"]["retrieved"])
    assert leaders(staged, SUGGESTED[1]) - {found}, "more documents were computed than the one that is found"
    assert [one["id"] for one in warm["slotcache"]["documents"]] == [found]
    assert warm["slotcache"]["retrieved"] == cold["slotcache"]["retrieved"]
    assert text_of(warm) == text_of(cold) and warm["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"]
    assert warm["slotcache"]["cached_tokens"] > 0 == cold["slotcache"]["cached_tokens"]


HISTORY = [
    {"role": "user", "content": "Who is the mayor of Tarnwick? " + "Say it slowly. " * 20},
    {"role": "assistant", "content": "It is not said."},
]


def in_front(server, system, **fields):
    """The tokens in front of the documents of a chat with a history, which is asked while its search stands still."""
    before = num_computed(server)
    with asked(server, QUESTION, system, history=HISTORY, **fields) as answer:
        until(lambda: num_computed(server) > before and not num_computing(server), deadline=60)
        assert is_searching(server)
        return num_computed(server) - before, answer


def test_what_stands_in_front_of_the_documents_is_computed_while_the_search_runs(staged, monkeypatch):
    monkeypatch.setattr(endpoint, "STAGE", DEADLINE)  # no stage lasts as long
    number, answer = in_front(staged, "Answer from history.", retrieval={"top_k": 2})
    report = answer.result()["slotcache"]
    assert report["cached_tokens"] >= number > 60
    assert [one["cached_tokens"] for one in report["documents"]] == [0, 0]
    cold = chat(staged, QUESTION, "Answer from history.", history=HISTORY, retrieval={"top_k": 2}, cache_prompt=False)
    assert text_of(answer.result()) == text_of(cold)
    before = num_computed(staged)
    again = chat(staged, QUESTION, "Answer from history.", history=HISTORY, retrieval={"top_k": 2})
    assert num_computed(staged) == before, "what is cached is not computed ahead once more"
    assert again["slotcache"]["cached_tokens"] >= number


def test_documents_that_the_client_sends_wait_for_those_that_are_found(staged, monkeypatch):
    monkeypatch.setattr(endpoint, "STAGE", DEADLINE)
    own = [{"id": "own", "text": "The mill of Tarnwick is closed. " * 20}]
    number, answer = in_front(staged, "Answer from mine.", retrieval={"top_k": 2}, documents=own)
    report = answer.result()["slotcache"]
    assert {one["id"]: one["cached_tokens"] for one in report["documents"]}["own"] == 0 < number <= report["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/input_tokens", "/apply-template"])
def test_nothing_is_computed_ahead_for_a_dry_run_nor_without_the_cache(staged, path):
    messages = [{"role": "system", "content": f"Answer {path}."}, *HISTORY, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "retrieval": {"top_k": READ}, "max_tokens": 1}
    before, no_cache = num_computed(staged), {"cache_prompt": False} if path == "/v1/chat/completions" else {}
    answer = staged.http.post(path, json=body | no_cache)
    assert answer.status_code == 200, answer.text
    until(lambda: not num_computing(staged))
    assert num_computed(staged) == before


def test_a_request_that_takes_the_last_slot_ends_what_is_computed_ahead(staged, monkeypatch):
    monkeypatch.setattr(endpoint, "STAGE", DEADLINE)  # no stage takes the place of what stands in front of the documents
    question = (SUGGESTED[2], "The harbour is open. " * 400)
    dropped = staged.metric("slotcache_speculations_dropped_total")
    with asked(staged, *question, retrieval=True) as answer:
        until(lambda: num_computing(staged))
        staged.chat("Hello", cache_scope="other", max_tokens=1)  # which leaves it a slot
        assert staged.metric("slotcache_speculations_dropped_total") == dropped and is_searching(staged)
        staged.chat("Hello", cache_scope="other", max_tokens=1, n=4)
        assert staged.metric("slotcache_speculations_dropped_total") == dropped + 1
        assert num_computing(staged) == 0 and is_searching(staged)
    cold = chat(staged, *question, retrieval=True, cache_prompt=False)
    assert text_of(answer.result()) == text_of(cold)


def test_the_documents_that_lead_are_computed_beside_a_running_answer(staged):
    before = num_computed(staged)
    endless = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with staged.http.stream("POST", "/v1/chat/completions", json=endless) as stream:
        lines = stream.iter_lines()
        next(lines)
        few = [f"{id}.md" for id in sorted(Corpus.load().documents)[:6]]  # an answer runs beside: the reranker is slow
        with asked(staged, SUGGESTED[0], "Answer soon.", retrieval={"paths": few}) as answer:
            until(lambda: num_computed(staged) > before + FRONT)
            assert staged.metric("llamacpp:requests_processing") == 1
        assert answer.result()["slotcache"]["cached_tokens"] > 0
