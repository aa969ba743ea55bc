"""Questions and documents in front of an embedder that was trained with prefixes, in a real server."""

import asyncio
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from slotcache.retrieval.chunks import embedded_text
from slotcache.retrieval.ranking import unit
from slotcache.server.config.settings import Settings
from slotcache.server.serve import serve as serve_until_stopped
from support.encoders import CONTEXT, bert
from support.notes import NOTES, is_ready, write

from server.conftest import running, until

QUESTION = "which city is of stone?"


@pytest.fixture(scope="module")
def e5(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("e5") / "model.gguf", label="e5-small-v2")


@pytest.fixture
def serve(tiny, e5, tmp_path):
    """Starts a server whose index is where the one before had it."""
    folder = write(tmp_path / "notes", NOTES)

    @contextmanager
    def start(**changed):
        settings: dict[str, Any] = {"docs": str(folder), "docs_db": str(tmp_path / "db"), "embedding_model": str(e5)}
        with running(tiny, **settings | changed) as up:
            until(lambda: is_ready(up))
            yield up

    return start


def embedded(server, text):
    """The vector that the route gives."""
    (row,) = server.http.post("/v1/embeddings", json={"input": text}).json()["data"]
    return np.array(row["embedding"], np.float32)


def of_query(server, text):
    return unit(asyncio.run(server.folder_index.embedding.query(text))[None])[0]


def of_documents(server):
    """The vectors of the index by the texts of their chunks."""
    store = server.folder_index.index.store
    numbers, vectors = store.vectors()
    chunks = store.chunks(numbers.tolist())
    return {
        embedded_text(chunks[number].title, chunks[number].text): row
        for number, row in zip(numbers.tolist(), vectors, strict=True)
    }


def test_a_model_sees_the_prefixes_that_it_was_trained_with(serve):
    with serve() as up:
        assert np.allclose(of_query(up, QUESTION), embedded(up, f"query: {QUESTION}"), atol=1e-5)
        assert not np.allclose(of_query(up, QUESTION), embedded(up, QUESTION), atol=1e-2)
        documents = of_documents(up)
        assert len(documents) == len(NOTES)
        for text, vector in documents.items():
            assert np.allclose(vector, embedded(up, f"passage: {text}"), atol=2e-3)
            assert not np.allclose(vector, embedded(up, text), atol=1e-2)


def test_settings_say_other_prefixes_and_documents_are_embedded_again(serve):
    with serve() as first:
        assert first.vectors.computed.texts == len(NOTES)
    with serve(embedding_query_prefix="") as plain:
        assert plain.vectors.computed.texts == 0, "the prefix of a question changes no document"
        assert np.allclose(of_query(plain, QUESTION), embedded(plain, QUESTION), atol=1e-5)
    with serve(embedding_document_prefix="stone: ") as other:
        assert other.vectors.computed.texts == len(NOTES)
        for text, vector in of_documents(other).items():
            assert np.allclose(vector, embedded(other, f"stone: {text}"), atol=2e-3)


def test_a_long_question_keeps_its_prefix_and_its_end(serve):
    with serve() as up:
        embedder, tokens_of = up.vectors.embedding.embedder, up.folder_index.embedding._query_tokens
        long, short = tokens_of("the city " * 5 * CONTEXT + QUESTION).tolist(), tokens_of(QUESTION).tolist()
        start = embedder.tokens("query: ").tolist()[:-1]  # without [SEP]
        assert 0.7 * CONTEXT < len(long) <= CONTEXT
        assert long[: len(start)] == start == short[: len(start)]
        assert long[len(start) - len(short) :] == short[len(start) :]


def test_a_prefix_that_leaves_no_room_ends_the_start_with_a_line(tiny, e5, tmp_path, capsys):
    settings = Settings(
        model=str(tiny), docs=str(tmp_path), docs_db=str(tmp_path / "db"), port=0, embedding_model=str(e5),
        embedding_document_prefix="a long prefix " * 50,
    )  # fmt: skip
    assert serve_until_stopped(settings) == 2
    assert "--embedding-document-prefix has" in capsys.readouterr().err
