"""Words or vectors alone, hits that are left out, and the embedder that has a name: over a real port."""

import pytest
from slotcache.models.demo import FILE
from slotcache.models.model_files import packaged_file
from slotcache.server.config.settings import Settings
from slotcache.server.engine.fit import beside, embedding_file
from support.dialects import CHATS
from support.encoders import bert
from support.notes import collection, is_ready, write

from server.conftest import running, until

NOTES = {
    "pump.md": "# Pump\n\nThe pump is checked in the spring, and it is oiled by the fitter when it is dry.\n",
    "boat.md": "# Boat\n\nThe boat has three sails, and it lies in the harbour from the autumn to the spring.\n",
    "tea.md": "# Tea\n\nThe tea is made with water that has just boiled, and it is served with milk.\n",
}
QUESTION = "When is the pump oiled in the spring?"
every = pytest.mark.parametrize("api", CHATS, ids=str)


def ask(server, api, retrieval):
    return api.ask(server, QUESTION, most=4, model=FILE.stem, stream=False, retrieval=retrieval)


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    return write(tmp_path_factory.mktemp("notes"), NOTES)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("encoder") / "bert.gguf")


@pytest.fixture(scope="module")
def words_alone(notes, tmp_path_factory):
    with running(FILE, docs=str(notes), docs_db=str(tmp_path_factory.mktemp("db")), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        yield up


@pytest.fixture(scope="module")
def with_vectors(notes, encoder, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("db"))
    with running(FILE, docs=str(notes), docs_db=folder, embedding_model=str(encoder), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        yield up


@every
def test_each_api_searches_by_words_or_by_vectors_alone(with_vectors, api):
    for by, rank, other in (("words", "lexical_rank", "vector_rank"), ("vectors", "vector_rank", "lexical_rank")):
        answer = ask(with_vectors, api, {"by": by})
        assert answer.status_code == 200, answer.text
        retrieved = answer.json()["slotcache"]["retrieved"]
        assert retrieved[0][rank] == 1 and all(hit[other] is None for hit in retrieved)


@every
def test_vectors_are_refused_where_there_are_none(words_alone, api):
    message = api.refused(ask(words_alone, api, {"by": "vectors"}))
    assert "retrieval.by is vectors" in message and "--embedding-model minilm" in message
    assert api.refused(ask(words_alone, api, {"by": "hand"}))


def test_the_search_route_has_the_same_field(words_alone, with_vectors):
    answer = with_vectors.http.post("/v1/search", json={"query": QUESTION, "by": "vectors"}).json()
    assert answer["results"][0]["vector_rank"] == 1 and answer["results"][0]["lexical_rank"] is None
    refused = words_alone.http.post("/v1/search", json={"query": QUESTION, "by": "vectors"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "by"


def test_a_report_counts_the_hits_that_are_left_out(words_alone):
    for api in CHATS:
        report = ask(words_alone, api, True).json()["slotcache"]
        assert [hit["path"] for hit in report["retrieved"]] == ["pump.md"] and report["left_out"] == 1, api
    found = words_alone.http.post("/v1/search", json={"query": QUESTION}).json()
    assert len(found["results"]) == 1 and found["left_out"] == 1
    found = words_alone.http.post("/v1/search", json={"query": QUESTION, "min_score": 0}).json()
    assert len(found["results"]) == 2 and found["left_out"] == 0


def test_an_embedder_is_offered_in_words_and_never_fetched_unasked(notes, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level("INFO", "slotcache"), running(FILE, docs=str(notes), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        advice = collection(up)["advice"]
    assert "--embedding-model minilm" in advice and "84 MB" in advice and "English" in advice
    assert advice in caplog.text and not packaged_file("minilm").exists()
    with running(FILE, docs=str(notes), embedding_model="none", flash_attn="auto") as up:
        assert "advice" not in collection(up), "words alone were asked for"


def test_an_embedder_in_the_cache_is_used_for_english_documents(notes, encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packaged_file("minilm").parent.mkdir(parents=True)
    packaged_file("minilm").write_bytes(encoder.read_bytes())
    with running(FILE, docs=str(notes), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        whole = collection(up)
        assert whole["stages"] == ["lexical", "fused"] and all(file["vectors"] for file in whole["files"])
        assert "advice" not in whole
    german = tmp_path / "notizen"
    german.mkdir()
    (german / "pumpe.md").write_text(
        "# Pumpe\n\nDie Pumpe wird im Frühjahr geprüft, und sie wird geölt, wenn sie nicht läuft.\n"
    )
    with running(FILE, docs=str(german), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        whole = collection(up)
        assert whole["stages"] == ["lexical"] and not any(file["vectors"] for file in whole["files"])
        assert "knows English only" in whole["advice"]


def test_which_file_the_embedder_is(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched = packaged_file("minilm")
    assert embedding_file(Settings(docs="x")) == "" and embedding_file(Settings(embedding_model="minilm")) == str(fetched)
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(encoder.read_bytes())
    assert embedding_file(Settings(docs="x")) == str(fetched) and embedding_file(Settings()) == ""
    assert embedding_file(Settings(docs="x", embeddings=True)) == ""
    assert embedding_file(Settings(docs="x", embedding_model="none")) == ""
    assert embedding_file(Settings(docs="x", embedding_model="a.gguf")) == "a.gguf"
    assert beside(Settings(docs="x")) == fetched.stat().st_size


def test_where_no_vectors_are_wanted_a_refusal_says_what_gives_them(words_alone, monkeypatch):
    monkeypatch.setattr(words_alone.folder_index, "offers", False)
    refused = words_alone.http.post("/v1/search", json={"query": QUESTION, "by": "vectors"})
    assert refused.json()["error"]["message"].endswith("have none: expected a server with --embedding-model")
