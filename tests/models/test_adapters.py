"""LoRA adapters: each set computes the same bits as alone in a fresh context, whatever ran before it."""

import pytest
from slotcache.bench.random_models import SHAPES
from slotcache.models import split
from slotcache.models.errors import ModelError
from slotcache.models.hardware import Device
from slotcache.models.lora import Adapters
from slotcache.models.model import Model
from slotcache.slots.scope import Scope
from support.adapters import lora
from support.lab import Lab
from support.on_device import has_adapters

pytestmark = has_adapters
SETS = {"none": {}, "a": {0: 1.0}, "b": {1: 1.0}, "both": {0: 0.5, 1: -1.5}}
PROMPT = "The old lighthouse keeper of the northern harbour counts the ships of the night, one by one, and writes them down."


@pytest.fixture(scope="module")
def adapted(tiny, tmp_path_factory):
    """A model with two adapters."""
    folder = tmp_path_factory.mktemp("models")
    model = Model(tiny)
    yield model, Adapters(model, [lora(folder / f"{seed}.gguf", SHAPES["tiny"], seed) for seed in (1, 2)])
    model.close()


def answer(lab, model, name, **options):
    scope = Scope.shared("", lab.adapters.name(SETS[name]))
    return lab.submit(model.tokenize(PROMPT), limit=6, scope=scope, **options)


def bits(answered):
    return [row.tobytes() for row in answered.logits]


@pytest.fixture(scope="module")
def expected(adapted):
    """Logits of fresh contexts."""
    model, adapters = adapted
    found = {}
    for name in SETS:
        lab = Lab(model, adapters=adapters)
        alone = answer(lab, model, name)
        lab.finish()
        found[name] = bits(alone)
        lab.close()
    assert len({tuple(rows) for rows in found.values()}) == len(SETS)
    return found


def test_back_and_forth(adapted, expected):
    model, adapters = adapted
    lab = Lab(model, adapters=adapters)
    for name in (*SETS, *reversed(SETS), "a", "none", "a"):
        one = answer(lab, model, name)
        lab.finish()
        assert bits(one) == expected[name], name
    lab.close()


def test_in_turns(adapted, expected):
    model, adapters = adapted
    lab = Lab(model, adapters=adapters, host=2000)
    lab.runner.warm_up()
    for is_cached in (False, True):
        several = {name: answer(lab, model, name) for name in SETS}
        lab.finish()
        assert {name: bits(one) for name, one in several.items()} == expected
        assert all((one.job.reuse.cached > 0) is is_cached for one in several.values())
    lab.close()


def test_the_name_of_a_set(adapted):
    model, adapters = adapted
    scales = ({}, {0: 0.0}, {0: 1.0}, {1: 1.0}, {0: 1.0, 1: 1.0}, {1: 1.0, 0: 1.0})
    names = [adapters.name(each) for each in scales]
    assert names[0] == names[1] == "" and names[4] == names[5] and len(set(names)) == 4
    again = [Adapters(model, adapters.paths).name(each) for each in scales]  # as a later process names them
    assert again[:4] == names[:4] and names[4] not in again


def test_adapters_are_refused_where_they_end_the_process(tiny, tmp_path, monkeypatch):
    model, path = Model(tiny), lora(tmp_path / "lora.gguf", SHAPES["tiny"], 1)
    software = Device("Vulkan0", "llvmpipe (LLVM 19.1.7, 256 bits)", "GPU", 1 << 30, 1 << 30)
    monkeypatch.setattr(split, "devices", lambda: [software])
    with pytest.raises(ModelError, match="--device none"):
        Adapters(model, [path], [1.0])
    assert len(Adapters(model)) == 0
