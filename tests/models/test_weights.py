"""Weights leave memory with their last context, and the vocabulary stays."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from slotcache.bench.random_models import SHAPES
from slotcache.models import llama
from slotcache.models.context import Context, ContextSettings
from slotcache.models.embedding import EmbedderSettings, EmbeddingModel
from slotcache.models.errors import ChangedFile, ModelError
from slotcache.models.lora import Adapters
from slotcache.models.model import Model
from slotcache.slots.scope import Scope
from support.adapters import lora
from support.encoders import bert

SMALL = ContextSettings(num_cells=256, batch=64, num_sequences=4)


@pytest.fixture
def file(tiny, tmp_path):
    return Path(shutil.copy(tiny, tmp_path / "own.gguf"))


def test_the_last_context_that_rests_frees_them_and_the_vocabulary_stays(file):
    with closing(Model(file, may_unload=True)) as model:
        context, embedder = Context(model, SMALL), EmbeddingModel(model, EmbedderSettings(pooling="mean"))
        known = model.width, model.size, model.num_parameters, model.file_type, model.can_trim, model.bos
        tokens = model.tokenize("Hello, world").tolist()
        context.unload()
        assert model.handle
        embedder.unload()
        with pytest.raises(ModelError, match="not in memory"):
            _ = model.handle
        assert (model.width, model.size, model.num_parameters, model.file_type, model.can_trim, model.bos) == known
        assert model.tokenize("Hello, world").tolist() == tokens
        embedder.open()
        context.open()
        embedder.unload()
        assert model.handle
        context.close()


def test_without_leave_they_stay(file):
    with closing(Model(file)) as model:
        Context(model, SMALL).unload()
        assert model.handle and model.tokenize("Hello").size


def test_a_load_may_be_given_up_and_tried_again(file):
    goes_on = [True]
    with closing(Model(file, progress=lambda share: goes_on[0], may_unload=True)) as model:
        context = Context(model, SMALL)
        context.unload()
        goes_on[0] = False
        for _ in range(2):
            with pytest.raises(ModelError, match="cannot load"):
                context.open()
        goes_on[0] = True
        context.open()
        assert model.handle
        context.unload()
        with pytest.raises(ModelError):
            _ = model.handle


def test_weights_beside_which_not_all_could_be_made_are_unloaded_again(file):
    made = []

    def make():
        made.append(1)
        if len(made) < 3:
            raise RuntimeError("odd")

    with closing(Model(file, may_unload=True)) as model:
        context = Context(model, SMALL)
        context.unload()
        model.weights.on_load.append(make)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="odd"):
                context.open()
            with pytest.raises(ModelError, match="not in memory"):
                _ = model.handle
        context.open()
        assert len(made) == 3
        context.close()


def test_what_makes_no_context_keeps_no_weights(file, tmp_path, monkeypatch):
    bert(encoder := tmp_path / "bert.gguf")
    with closing(Model(encoder, may_unload=True)) as model:
        with pytest.raises(ModelError, match="keeps no KV"):
            Context(model, SMALL)
        with pytest.raises(ModelError, match="not in memory"):
            _ = model.handle
    with closing(Model(file)) as model:
        monkeypatch.setattr(model, "metadata", {"general.architecture": "deepseek4"}.get)
        with pytest.raises(ModelError, match="deepseek4 cannot be served here"):  # llama.cpp would end the process
            Context(model, SMALL)


@pytest.mark.parametrize("changed", ["own.gguf", "lora.gguf"])
def test_files_that_changed_are_not_loaded(file, tmp_path, changed):
    with closing(Model(file, may_unload=True)) as model:
        adapters = Adapters(model, [lora(tmp_path / "lora.gguf", SHAPES["tiny"], 1)])
        context = Context(model, SMALL)
        context.unload()
        content = (tmp_path / changed).read_bytes()
        (tmp_path / changed).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for _ in range(2):
            with pytest.raises(ChangedFile, match=f"{changed} changed since it was loaded"):
                context.open()
        (tmp_path / changed).write_bytes(content)
        context.open()
        context.close()
        assert Scope.shared("", adapters.name({0: 1.0})).is_lasting


def copied(file):
    shutil.copy(file, file.with_suffix(".new")).replace(file)


def moved_back(file):
    os.utime(file, (1, 1))


@pytest.mark.parametrize("act", [Path.touch, copied, moved_back])
@pytest.mark.parametrize("has_digests", [True, False])
def test_files_with_the_same_bytes_are_the_same_files(file, tmp_path, act, has_digests, monkeypatch):
    if not has_digests:
        monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    with closing(Model(file, may_unload=True)) as model:
        Adapters(model, [lora(tmp_path / "lora.gguf", SHAPES["tiny"], 1)])
        context, known = Context(model, SMALL), model.digest()
        for changed in ("own.gguf", "lora.gguf"):
            context.unload()
            before = model.weights.files.stamps
            act(tmp_path / changed)
            context.open()
            assert model.digest() == known and (model.weights.files.stamps != before) == (changed == "own.gguf")
        context.close()


def test_a_file_that_is_replaced_while_it_is_loaded_is_not_used(file):
    with closing(Model(file, may_unload=True)) as model:
        context = Context(model, SMALL)
        context.unload()
        really = model.weights.check

        def replace():
            really()
            file.write_bytes(file.read_bytes() + b"0")
            model.weights.check = really

        model.weights.check = replace
        with pytest.raises(ChangedFile):
            context.open()
        with pytest.raises(ModelError, match="not in memory"):
            _ = model.handle


def test_a_first_load_that_fails_frees_the_vocabulary(file, monkeypatch):
    freed, really = [], llama.llama_model_free
    monkeypatch.setattr(llama, "llama_model_free", lambda handle: (freed.append(handle), really(handle)))
    with pytest.raises(ModelError, match="cannot load"):
        Model(file, progress=lambda share: False, may_unload=True)
    assert len(freed) == 1


def test_a_vocabulary_alone_has_no_weights(file):
    """Tools that only cut text open it of models that are larger than memory."""
    with closing(Model(file, vocab_only=True)) as model:
        assert model.tokenize("Hello").size and model.num_layers == 0
