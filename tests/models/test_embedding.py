"""Vectors of texts: the same bits each time, pooled and framed as the model wants it, on random models and on MiniLM."""

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from gguf import PoolingType
from slotcache.models import llama
from slotcache.models.embedding import EmbedderSettings, EmbeddingModel, Pairing, normalised
from slotcache.models.model import Model
from support.encoders import CONTEXT, WIDTH, bert

TEXTS = ("machine learning", "the city of stone", "", "a river, a stone, 12", "is the text of the city an apple?")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes embedders, and closes them at the end."""
    with ExitStack() as stack:

        def make(path, **changed):
            model = Model(path)
            stack.callback(model.close)
            embedder = EmbeddingModel(model, EmbedderSettings(**changed))
            stack.callback(embedder.close)
            return embedder

        yield make


@pytest.fixture(scope="module")
def encoder(made, tmp_path_factory):
    return made(bert(tmp_path_factory.mktemp("models") / "bert.gguf"))


def vectors(embedder, *texts, **changed):
    return [embedder.vectors([embedder.tokens(text)], **changed)[0] for text in texts]


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_a_vector_depends_on_its_text_alone(made, tiny, encoder, flash_attention):
    for path in (tiny, encoder.model.path):
        embedder = made(path, pooling="mean", flash_attention=flash_attention, threads=2)
        first = vectors(embedder, *TEXTS[:2], "of " * 90)
        again = vectors(embedder, *reversed([*TEXTS[:2], "of " * 90]), threads=1)
        assert all((one == other).all() for one, other in zip(first, reversed(again), strict=True))
        assert np.abs(first[0] - first[1]).max() > 0.01


def test_a_text_is_framed_and_stays_text(encoder):
    words = encoder.model.tokenize("machine").tolist()
    assert encoder.tokens("machine").tolist() == [2, *words, 3] and encoder.tokens("").tolist() == [2, 3]
    assert not {2, 3} & set(encoder.tokens("[CLS] a [SEP]")[1:-1].tolist())


def test_a_causal_model_gets_its_own_frame(made, tiny):
    embedder = made(tiny, pooling="last")
    assert embedder.tokens("Hello there").tolist() == embedder.model.tokenize("Hello there", begin=True).tolist()


def test_pooling(made, encoder):
    path = encoder.model.path
    each = made(path, pooling="none").vectors([encoder.tokens(TEXTS[1])])[0]
    assert each.shape == (len(encoder.tokens(TEXTS[1])), WIDTH)
    assert np.abs(vectors(encoder, TEXTS[1])[0] - each.mean(0)).max() < 1e-5
    assert np.abs(vectors(made(path, pooling="cls"), TEXTS[1])[0] - each[0]).max() < 1e-6
    assert np.abs(vectors(made(path, pooling="last"), TEXTS[1])[0] - each[-1]).max() < 1e-6


def test_texts_computed_together_differ_by_rounding_only(made, encoder):
    together = made(encoder.model.path, most_texts=len(TEXTS))
    batch = together.vectors([together.tokens(text) for text in TEXTS])
    for one, other in zip(batch, vectors(encoder, *TEXTS), strict=True):
        assert np.abs(one - other).max() < 0.01


def test_the_limit_and_what_shortening_keeps(made, encoder):
    assert encoder.limit == CONTEXT and made(encoder.model.path, max_tokens=40).limit == 40
    words = " ".join(["the", "city", "of", "stone", "is"] * 60)
    long = encoder.tokens(words)
    head, tail = encoder.shortened(long), encoder.shortened(long, from_start=True)
    assert len(head) == len(tail) == CONTEXT and head[0] == tail[0] == 2 and head[-1] == tail[-1] == 3
    assert head[1:-1].tolist() == long[1 : CONTEXT - 1].tolist() and tail[1:-1].tolist() == long[-CONTEXT + 1 : -1].tolist()
    assert encoder.vectors([head])[0].shape == (WIDTH,)
    assert encoder.shortened(encoder.tokens("a")).tolist() == encoder.tokens("a").tolist()


@pytest.mark.parametrize("norm", [-1, 0, 1, 2, 3])
def test_norms(norm):
    vector = np.array([3.0, -4.0, 0.0], np.float32)
    lengths = {-1: 1.0, 0: 4 / 32760, 1: 7.0, 2: 5.0, 3: 91 ** (1 / 3)}
    assert np.allclose(normalised(vector, norm), vector / lengths[norm], rtol=1e-6)
    assert (normalised(np.zeros(3, np.float32), norm) == 0).all()


def test_a_reranker_scores_pairs(made, tmp_path):
    ranker = made(bert(tmp_path / "ranker.gguf", PoolingType.RANK), pooling="rank")
    pairs = list(Pairing(ranker.model)("machine [SEP] learning", ["the city", "a [CLS] text", "machine"]))
    assert ranker.is_ranker and ranker.width == 1 and all(pair.tolist().count(3) == 3 for pair in pairs)
    scores = [ranker.vectors([pair])[0] for pair in pairs]
    assert len({score.item() for score in scores}) == 3
    assert [ranker.vectors([pair])[0].item() for pair in pairs] == [score.item() for score in scores]


def test_a_template_of_a_reranker_may_write_control_tokens_and_its_texts_may_not(tiny, monkeypatch):
    model = Model(tiny)
    control = model.eos
    template = f"{control}Query: {{query}}\nText: {{document}}{control}"
    monkeypatch.setattr(Model, "metadata", lambda self, key: template if key.endswith(".rerank") else None)
    (pair,) = Pairing(model)(f"what{control}", ["{query} a"])
    monkeypatch.undo()
    end = model.tokenize(control, special=True)
    plain = model.tokenize(f"Query: what{control}\nText: {{query}} a")
    assert pair.tolist() == [*end, *plain, *end]
    model.close()


def test_an_encoder_generates_no_text(encoder, tiny):
    assert not encoder.model.can_chat and encoder.model.pooling == "mean"
    generator = Model(tiny)
    assert generator.can_chat and generator.pooling == ""
    generator.close()


WEIGHTS = os.environ.get("SLOTCACHE_WEIGHTS")


@pytest.mark.skipif(not WEIGHTS, reason="SLOTCACHE_WEIGHTS names no folder")
def test_paraphrases_are_nearer_than_other_texts(made):
    embedder = made(Path(WEIGHTS or "") / "minilm.gguf")
    pairs = [
        ("A man is eating food.", "A man eats a meal.", "The stock market fell sharply."),
        ("How do I reset my password?", "I forgot my login, how can I change it?", "Bananas are rich in potassium."),
        ("The cat sat on the mat.", "A cat was sitting on a rug.", "Quantum computers use qubits."),
    ]
    for text, paraphrase, other in pairs:
        one, near, far = (normalised(vector, 2) for vector in vectors(embedder, text, paraphrase, other))
        assert one @ near > 0.5 > 0.2 > one @ far
    assert llama.llama_model_n_embd(embedder.model.handle) == embedder.width == 384
