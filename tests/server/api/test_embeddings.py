"""The routes for vectors, over a real port: OpenAI's shape with its client, and llama-server's."""

import base64
import json
import threading
from contextlib import closing
from http.client import HTTPConnection

import httpx
import numpy as np
import openai
import pytest
from slotcache.models.embedding import EmbedderSettings, EmbeddingModel, normalised
from slotcache.models.errors import ModelError
from slotcache.models.model import Model
from slotcache.server.config.settings import Settings
from slotcache.server.load import load_all
from support.encoders import CONTEXT, WIDTH, bert
from support.on_device import ON_DEVICE, ROUNDING, loads_two

from server.conftest import DEADLINE, running, until

TEXTS = ["machine learning", "the city of stone"]
GENERATES = ("/v1/chat/completions", "/v1/completions", "/completion", "/apply-template", "/v1/cache/warm")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("models") / "bert.gguf")


@pytest.fixture(scope="module")
def alone(encoder):
    """A server of the encoder itself."""
    with running_encoder(encoder) as up:
        yield up


@pytest.fixture(scope="module")
def beside(tiny, encoder):
    """A server of a model that generates, with the encoder beside it."""
    with running(tiny, embedding_model=str(encoder), cache_prompt=True) as up:
        yield up


def running_encoder(path, **changed):
    return running(path, **({"embeddings": True} | changed))


def post(up, path="/v1/embeddings", **body):
    answer = up.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(up, status=400, path="/v1/embeddings", **body):
    answer = up.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def expected(path, texts, norm=2, **settings):
    """Vectors by an embedder in this thread."""
    model = Model(path)
    embedder = EmbeddingModel(model, EmbedderSettings(flash_attention="off", **settings))
    found = [normalised(embedder.vectors([embedder.tokens(text)])[0], norm) for text in texts]
    embedder.close()
    model.close()
    return found


@pytest.mark.parametrize("name", ["alone", "beside"])
def test_the_openai_client(name, encoder, request):
    up = request.getfixturevalue(name)
    wanted = expected(encoder, TEXTS)
    for encoding in ("float", "base64", None):
        options = {"encoding_format": encoding} if encoding else {}
        answer = up.openai.embeddings.create(model="any", input=TEXTS, **options)
        assert [entry.index for entry in answer.data] == [0, 1] and answer.model == "bert"
        for entry, vector in zip(answer.data, wanted, strict=True):
            numbers = np.frombuffer(base64.b64decode(entry.embedding), "<f4") if encoding == "base64" else entry.embedding
            assert np.allclose(np.array(numbers, np.float32), vector, rtol=ROUNDING, atol=ROUNDING)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + 6


def test_the_forms_of_an_input(alone):
    ids = alone.http.post("/tokenize", json={"content": "machine"}).json()["tokens"]
    (one,) = post(alone, input="machine")["data"]
    framed = [2, *ids, 3]
    for form in (
        ["machine"],
        framed,
        [framed],
        {"prompt_string": "machine"},
        [{"content": [{"type": "text", "text": "machine"}]}],
    ):
        (same,) = post(alone, input=form)["data"]
        assert same["embedding"] == one["embedding"], form
    mixed = post(alone, input=[12, 14, "of", 5, 6])
    assert len(mixed["data"]) == 1 and mixed["usage"]["prompt_tokens"] == 5
    assert len(post(alone, input=["of", [7, 8, 9], {"prompt_string": "city"}])["data"]) == 3
    assert len(post(alone, input="")["data"]) == 1


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "at least one"),
        ({"input": None}, "input", "expected a text"),
        ({"input": {"content": "x"}}, "input.prompt_string", "expected a text"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input.content[0]", "type text"),
        ({"input": ["a", 1.5]}, "input[1]", "token id"),
        ({"input": [[]]}, "input[0]", "empty"),
        ({"input": [10**6]}, "input[0]", "token id from 0"),
        ({"input": [-1]}, "input[0]", "token id from 0"),
        ({"input": ["a"] * 2049}, "input", "at most 2,048"),
        ({"input": ["of " * CONTEXT, "a"]}, "input[0]", "too large"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions", f"{WIDTH} numbers"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "embd_normalize": -2}, "embd_normalize", ">= -1"),
    ],
)
def test_what_is_wrong_and_where(alone, body, param, says):
    error = refused(alone, **body)
    assert error["param"] == param and says in error["message"]


def test_truncation_is_asked_for(alone):
    long = "the city of stone is " * CONTEXT
    error = refused(alone, input=long)
    assert error["code"] == "context_length_exceeded" and error["n_ctx"] == CONTEXT < error["n_prompt_tokens"]
    start, end, again = (post(alone, input=long, truncate=side) for side in ("start", "end", True))
    assert start["usage"]["prompt_tokens"] == end["usage"]["prompt_tokens"] == CONTEXT
    assert start["data"] != end["data"] == again["data"]
    assert refused(alone, input=long, truncate="NONE")["param"] == "input"


def test_dimensions_and_norms(alone, encoder):
    (whole,) = expected(encoder, TEXTS[:1], norm=-1)
    (short,) = post(alone, input=TEXTS[0], dimensions=16)["data"]
    assert np.allclose(short["embedding"], normalised(whole[:16], 2), atol=1e-6)
    for norm in (-1, 1):
        (entry,) = post(alone, input=TEXTS[0], embd_normalize=norm)["data"]
        assert np.allclose(entry["embedding"], normalised(whole, norm), atol=1e-6)


def test_llama_server_s_shape(alone):
    wanted = [entry["embedding"] for entry in post(alone, input=TEXTS)["data"]]
    native = [{"index": at, "embedding": [vector]} for at, vector in enumerate(wanted)]
    assert post(alone, "/embedding", content=TEXTS) == post(alone, "/embeddings", input=TEXTS) == native
    assert post(alone, content=TEXTS) == native
    assert refused(alone, path="/embedding", content="a", encoding_format="base64")["param"] == "encoding_format"


def test_without_pooling_each_token_has_a_vector(encoder):
    with running_encoder(encoder, pooling="none") as up:
        (entry,) = post(up, "/embeddings", input="machine learning")
        (wanted,) = expected(encoder, ["machine learning"], norm=-1, pooling="none")
        assert np.array_equal(np.array(entry["embedding"], np.float32), wanted)
        assert "--pooling" in refused(up, input="a")["message"]
        assert refused(up, path="/embeddings", input=["of " * 100] * 2048)["param"] == "input"


def test_an_encoder_serves_no_text(alone):
    for path in GENERATES:
        error = refused(alone, 501, path, messages=[{"role": "user", "content": "a"}], prompt="a")
        assert error["type"] == "not_supported_error" and "generates no text" in error["message"]
    assert alone.http.get("/health").json() == {"status": "ok"}
    assert [model.id for model in alone.openai.models.list().data] == ["bert"]
    properties = alone.http.get("/props").json()
    assert properties["embedding"] == {"model": "bert", "pooling": "mean", "dimensions": WIDTH, "n_ctx": CONTEXT}
    assert properties["reranking"] is None and properties["model_alias"] == "bert"
    assert alone.http.post("/detokenize", json={"tokens": [9]}).json()["content"].strip() == "machine"


@pytest.mark.parametrize("name", ["alone", "beside"])
def test_vectors_are_counted(name, request):
    up = request.getfixturevalue(name)
    names = (
        *(f"slotcache_vector_{kind}_total" for kind in ("tokens", "texts", "steps")),
        "llamacpp:prompt_tokens_total",
        "llamacpp:n_decode_total",
        "llamacpp:tokens_predicted_total",
    )
    before = [up.metric(name) for name in names]
    tokens = post(up, input=TEXTS)["usage"]["prompt_tokens"]
    after = [up.metric(name) for name in names]
    steps = 1 if ON_DEVICE else 2
    assert [late - early for early, late in zip(before, after, strict=True)] == [tokens, 2, steps, tokens, steps, 0]


def test_beside_a_model_that_generates(beside):
    names = {model.id for model in beside.openai.models.list().data}
    assert names == {"tiny", "bert"} and beside.http.get("/props").json()["embedding"]["model"] == "bert"
    first = beside.chat("What is a city?")
    stop, errors = threading.Event(), []

    def embed():
        with httpx.Client(base_url=beside.url, timeout=DEADLINE) as http:
            while not stop.is_set():
                answer = http.post("/v1/embeddings", json={"input": TEXTS})
                errors.extend([] if answer.status_code == 200 else [answer.text])

    thread = threading.Thread(target=embed)
    thread.start()
    answers = [beside.chat("What is a city?", cache_prompt=False) for _ in range(5)]
    stop.set()
    thread.join()
    assert not errors and {answer["choices"][0]["message"]["content"] for answer in answers} == {
        first["choices"][0]["message"]["content"]
    }


def test_a_causal_model_does_both(tiny):
    with running(tiny, embeddings=True, pooling="last") as up:
        (entry,) = up.openai.embeddings.create(model="tiny", input="a stone", encoding_format="float").data
        (wanted,) = expected(tiny, ["a stone"], pooling="last")
        assert (np.array(entry.embedding, np.float32) == wanted).all()
        assert up.chat()["choices"][0]["finish_reason"] == "length"


def test_a_server_without_says_so(server):
    for path in ("/v1/embeddings", "/embedding", "/embeddings"):
        assert "--embedding-model" in refused(server, 501, path, input="a")["message"]
    with pytest.raises(openai.InternalServerError) as error:
        server.openai.with_options(max_retries=0).embeddings.create(model="tiny", input="a")
    assert error.value.status_code == 501


@loads_two
def test_settings_that_no_server_starts_with(encoder, tiny, tmp_path):
    missing = str(tmp_path / "no.gguf")
    for settings, path, says in (
        (Settings(), encoder, "--embeddings"),
        (Settings(embeddings=True, embedding_model=missing), encoder, "choose one"),
        (Settings(reranking=True), encoder, "not a reranker: it pools the vectors of a text by mean"),
        (Settings(ctx_size=512, embedding_model=missing), tiny, "cannot read"),
    ):
        with pytest.raises(ModelError, match=says):
            load_all(settings, path)


@loads_two
def test_a_full_queue_and_clients_that_disconnect(encoder):
    with running_encoder(encoder, max_queue=0) as up:
        worker = up.vectors.embedder()
        many = {"input": ["the city of stone is " * 25] * 2048}
        with closing(HTTPConnection(up.url.removeprefix("http://"), timeout=DEADLINE)) as leaving:
            leaving.request("POST", "/v1/embeddings", json.dumps(many))
            until(lambda: worker.num_open)
            answer = up.http.post("/v1/embeddings", json={"input": "a"})
        error = answer.json()["error"]
        assert answer.status_code == 429 and error["code"] == "queue_full" and answer.headers["retry-after"] == "1"
        until(lambda: not worker.num_open)
        assert len(post(up, input="a")["data"]) == 1
