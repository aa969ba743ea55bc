"""The routes for scores, over a real port."""

import pytest
from gguf import PoolingType
from slotcache.models.embedding import EmbedderSettings, EmbeddingModel, Pairing
from slotcache.models.model import Model
from support.encoders import CONTEXT, bert
from support.on_device import ROUNDING

from server.conftest import running

DOCUMENTS = ["the city of stone", "a machine learning text", "river", "an apple, 12"]
QUERY = "machine learning is"


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("models") / "ranker.gguf", PoolingType.RANK)


@pytest.fixture(scope="module")
def alone(ranker):
    with running(ranker, reranking=True) as up:
        yield up


@pytest.fixture(scope="module")
def scores(ranker):
    """The score of each document, and the tokens of all pairs, by an embedder in this thread."""
    model = Model(ranker)
    embedder = EmbeddingModel(model, EmbedderSettings(pooling="rank", flash_attention="off"))
    pairs = list(Pairing(model)(QUERY, DOCUMENTS))
    found = [embedder.vectors([pair])[0].item() for pair in pairs]
    embedder.close()
    model.close()
    return found, sum(map(len, pairs))


def post(up, path="/v1/rerank", **body):
    answer = up.http.post(path, json={"query": QUERY} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_the_best_comes_first(alone, scores, path):
    found, num_tokens = scores
    answer = post(alone, path, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]])
    best = sorted(range(4), key=lambda at: -found[at])
    scores = [pytest.approx(found[at], rel=ROUNDING, abs=ROUNDING) for at in best]
    assert answer["results"] == [{"index": at, "relevance_score": score} for at, score in zip(best, scores, strict=True)]
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "ranker")


def test_top_n_and_the_documents(alone):
    whole = post(alone, documents=DOCUMENTS)["results"]
    assert post(alone, documents=DOCUMENTS, top_n=2)["results"] == whole[:2]
    assert post(alone, documents=DOCUMENTS, top_n=99)["results"] == whole
    shown = post(alone, documents=DOCUMENTS, return_documents=True)["results"]
    assert [result["document"]["text"] for result in shown] == [DOCUMENTS[result["index"]] for result in whole]


def test_tei_s_shape(alone):
    whole = post(alone, documents=DOCUMENTS)["results"]
    assert post(alone, texts=DOCUMENTS) == [{"index": each["index"], "score": each["relevance_score"]} for each in whole]
    shown = post(alone, texts=DOCUMENTS, return_text=True, top_n=1)
    assert shown == [
        {"index": whole[0]["index"], "score": whole[0]["relevance_score"], "text": DOCUMENTS[whole[0]["index"]]}
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": 123}, "documents"),
        ({"documents": [1, 2, 3]}, "documents[0]"),
        ({"documents": ["a"], "texts": ["a"]}, "texts"),
        ({"texts": []}, "texts"),
        ({"documents": ["a"], "query": 3}, "query"),
        ({"documents": ["a"], "top_n": 0}, "top_n"),
        ({"documents": ["a", "of " * CONTEXT]}, "documents[1]"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": ["a"] * 2000, "query": "a" * 20_000}, "query"),
    ],
)
def test_what_is_wrong_and_where(alone, body, param):
    answer = alone.http.post("/rerank", json={"query": QUERY} | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_reranker_makes_no_vectors_and_an_embedder_no_scores(alone, server, tiny, tmp_path):
    assert alone.http.post("/v1/embeddings", json={"input": "a"}).status_code == 501
    assert alone.http.get("/props").json()["reranking"] == {"model": "ranker", "n_ctx": CONTEXT}
    answer = server.http.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 501 and "--rerank-model" in answer.json()["error"]["message"]
    encoder = bert(tmp_path / "bert.gguf")
    with running(tiny, embedding_model=str(encoder)) as up:
        assert up.http.post("/rerank", json={"query": "a", "documents": ["b"]}).status_code == 501


def test_a_reranker_beside_an_embedder(ranker, tiny, tmp_path):
    encoder = bert(tmp_path / "bert.gguf")
    with running(tiny, embedding_model=str(encoder), rerank_model=str(ranker)) as up:
        assert len(post(up, documents=DOCUMENTS)["results"]) == 4
        assert len(up.http.post("/v1/embeddings", json={"input": "a"}).json()["data"]) == 1
        assert up.chat()["choices"][0]["finish_reason"] == "length"
