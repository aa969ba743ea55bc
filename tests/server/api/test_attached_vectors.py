"""Attached files that are searched by vectors, over a real port: when, by which, beside whom, and until when."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from slotcache.models.demo import FILE
from slotcache.retrieval.reader import RECORD_VECTORS
from slotcache.server.http import threads
from slotcache.server.http.api_errors import RequestError
from support.dialects import CHATS
from support.encoders import bert
from support.on_device import loads_two

from server.conftest import blocked, running, until

from .test_attachments import BOOK, QUESTION, chat, error_of, kept, read
from .test_retrieval_by import ask, every

pytestmark = loads_two
ROWS = "name,depth\n" + "".join(f"the harbour of the lamp {number},{number} fathoms at low tide\n" for number in range(9000))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    settings = {"docs_db": str(folder / "db"), "embedding_model": str(bert(folder / "bert.gguf"))}
    with running(FILE, flash_attn="auto", **settings) as up:
        yield up


@contextmanager
def generating(server):
    """No gap comes, in which vectors of files are computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.vectors.for_search, "is_busy", lambda: True)
        yield


def shown(server, id, **query):
    answer = server.http.get(f"/v1/documents/{id}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ready(server, id, **query):
    """Wait until a file has its vectors; return its id."""
    until(lambda: shown(server, id, **query)["state"] == "ready")
    return id


def stage_of(report):
    (file,) = report["files"]
    return file["stage"]


def test_a_file_is_searched_by_words_at_once_and_by_vectors_when_they_are_there(server):
    before = server.metric("slotcache_attached_vectors")
    with generating(server):
        id = kept(server)
        about = shown(server, id)
        assert (about["state"], about["stages"]) == ("embedding", ["lexical"])
        progress = about["progress"]
        assert progress == {"unit": "documents", "done": 0, "total": progress["total"]} and progress["total"] > 40
        report = chat(server, id)["slotcache"]
        assert report["files"] == [{"id": id, "stage": "lexical"}]
        assert (report["retrieved"][0]["lexical_rank"], report["retrieved"][0]["vector_rank"]) == (1, None)
        error = chat(server, id, status=503, wish={"by": "vectors"})["error"]
        assert (error["code"], error["param"]) == ("vectors_not_ready", "retrieval.by") and "book.md" in error["message"]
    about = shown(server, ready(server, id))
    assert about["stages"] == ["lexical", "fused"] and "progress" not in about
    assert server.metric("slotcache_attached_vectors") == before + progress["total"]
    report = chat(server, id)["slotcache"]
    assert stage_of(report) == "fused" and {hit["vector_rank"] for hit in report["retrieved"]} != {None}
    assert stage_of(chat(server, id, wish={"by": "words"})["slotcache"]) == "lexical"
    (first, *_) = chat(server, id, wish={"by": "vectors"})["slotcache"]["retrieved"]
    assert (first["vector_rank"], first["lexical_rank"]) == (1, None)


def test_a_gap_is_a_time_without_a_request(server):
    assert not server.vectors.for_search.is_busy()
    with ThreadPoolExecutor(1) as pool:
        with blocked(server):
            answer = pool.submit(server.chat, "Hello")
            until(lambda: server.vectors.for_search.is_busy())
        answer.result()
    until(lambda: not server.vectors.for_search.is_busy())


@every
def test_each_api_says_by_what_a_file_was_searched(server, api):
    id = ready(server, kept(server))
    answer = ask(server, api, {"documents": [id]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["slotcache"]["files"] == [{"id": id, "stage": "fused"}]


def test_a_question_becomes_a_vector_once_for_all_files(server):
    ids = [ready(server, kept(server)) for _ in range(3)]
    before = server.metric("slotcache_vector_texts_total")
    assert len(chat(server, *ids)["slotcache"]["files"]) == 3
    assert server.metric("slotcache_vector_texts_total") == before + 1
    chat(server, *ids, wish={"by": "words"})
    assert server.metric("slotcache_vector_texts_total") == before + 1


def test_a_table_has_vectors_of_its_first_documents_alone(server):
    before = server.metric("slotcache_attached_vectors")
    ready(server, kept(server, ROWS, "depths.csv"))
    assert server.metric("slotcache_attached_vectors") == before + RECORD_VECTORS


def test_vectors_go_with_their_file_and_with_its_scope(server):
    before, files = server.metric("slotcache_attached_vectors"), server.host.attachments
    mine = ready(server, kept(server, scope="mine"), scope="mine")
    tides = kept(server, "# Tides\n\nThe moon raises two tides. " * 400, "tides.md", scope="theirs")
    theirs = ready(server, tides, scope="theirs")
    found = chat(server, mine, cache_scope="mine", wish={"by": "vectors", "top_k": 100})["slotcache"]["retrieved"]
    assert {hit["path"] for hit in found} == {"book.md"}
    chat(server, theirs, status=404, cache_scope="mine", wish={"by": "vectors"})
    folder = files._place / mine
    assert folder.is_dir()
    for id, scope in ((mine, "mine"), (theirs, "theirs")):
        assert server.http.delete(f"/v1/documents/{id}", params={"scope": scope}).status_code == 200
    assert server.metric("slotcache_attached_vectors") == before
    until(lambda: not folder.exists())


def test_a_file_that_is_forgotten_gets_no_more_vectors(server):
    files = server.host.attachments
    with generating(server):
        id = kept(server)
        folder = files._place / id
        assert server.http.delete(f"/v1/documents/{id}").json()["deleted"]
        until(lambda: not (folder.exists() or files._vectors._started))


def test_a_small_file_does_not_wait_for_the_vectors_of_a_large_one(server, monkeypatch):
    monkeypatch.setattr(threads, "TURN", 0.0)
    embedding, order = server.vectors.for_search, []
    embed = embedding.embed

    def noted(texts):
        order.append("small" if "two tides" in texts[0] else "large")
        return embed(texts)

    monkeypatch.setattr(embedding, "embed", noted)
    with generating(server):
        large = kept(server, scope="a")
        small = read(server, "The moon raises two tides a day.", "tides.md", search="always", scope="b").json()["id"]
    ready(server, large, scope="a")
    ready(server, small, scope="b")
    assert order.index("small") < 3 < len(order)


def test_where_vectors_fail_words_go_on_and_the_file_says_why(server, monkeypatch):
    def fails(texts):
        raise RequestError("the model failed while computing this", status=500)

    monkeypatch.setattr(server.vectors.for_search, "embed", fails)
    id = kept(server)
    until(lambda: shown(server, id)["state"] == "failed")
    about = shown(server, id)
    assert about["stages"] == ["lexical"] and about["error"] == "the model failed while computing this"
    report = chat(server, id)["slotcache"]
    assert stage_of(report) == "lexical" and "nine tons of granite" in report["retrieved"][0]["text"]
    assert "the model failed" in chat(server, id, status=400, wish={"by": "vectors"})["error"]["message"]


def test_vectors_of_another_model_are_not_compared(server, monkeypatch):
    id = ready(server, kept(server))
    monkeypatch.setattr(server.host.attachments, "_embedding", None)
    assert shown(server, id)["stages"] == ["lexical"]
    assert stage_of(chat(server, id)["slotcache"]) == "lexical"


def test_without_an_embedder_a_file_is_searched_by_words_and_says_so(tmp_path):
    with running(FILE, flash_attn="auto", docs_db=str(tmp_path)) as up:
        id = kept(up, BOOK)
        assert (shown(up, id)["state"], shown(up, id)["stages"]) == ("ready", ["lexical"])
        assert stage_of(chat(up, id, question=QUESTION)["slotcache"]) == "lexical"
        refused = ask(up, CHATS[0], {"documents": [id], "by": "vectors"})
        assert "--embedding-model" in error_of(refused, 400)["message"]
