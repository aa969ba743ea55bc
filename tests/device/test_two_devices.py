"""Two devices share a model: by shares, by name, one of them alone; after a sleep, from disk. Without two, it is skipped.

`run.py rpc2` has two; `GGML_VK_VISIBLE_DEVICES=0,0` makes two of one in software, with npm's Vulkan build.
"""

from contextlib import closing

import numpy as np
import pytest
from server.conftest import REST, running
from server.engine.test_sleep import HOUR, doze
from slotcache.models import llama
from slotcache.models.context import Context, ContextSettings, breakdown
from slotcache.models.hardware import HOST, devices
from slotcache.models.model import Model
from slotcache.models.runner import Runner
from slotcache.models.split import parse_split
from slotcache.server.config.settings import Settings
from slotcache.server.engine.fit import fit
from slotcache.slots.plan import Drop, HostCopy, Restore, Save, Span

CARDS = [device.name for device in devices() if device.is_gpu]
pytestmark = pytest.mark.skipif(len(CARDS) < 2, reason="needs two devices that are not the CPU")
SMALL = ContextSettings(num_cells=512, batch=64, num_sequences=4, threads=1, flash_attention="off")
TOKENS = np.arange(300, 340, dtype=np.int32)
BODY = {"messages": [{"role": "user", "content": "Who built the canal, the school and the castle? " * 4}], "max_tokens": 8}


def logits(runner, tokens, sequence=0, start=0):
    runner.batch.fill((Span(0, sequence, start, tokens, logits=True),))
    assert llama.llama_decode(runner.context.handle, runner.batch.struct) == 0
    return runner.logits(1)[0].copy()


def weights(context):
    return {use.device: use.weights for use in breakdown(context.handle) if use.device != HOST}


@pytest.mark.parametrize(
    ("given", "places"),
    [
        (("", "layer", "1,0", 0), [0]),
        (("", "layer", "0,1", 0), [1]),
        (("", "layer", "1,1", 0), [0, 1]),
        (("", "none", "", 1), [1]),
        (("first", "layer", "", 0), [0]),
        (("swapped", "layer", "1,0", 0), [1]),
    ],
)
def test_layers_are_where_flags_put_them_and_kv_comes_back(tiny, given, places):
    names = {"": "", "first": CARDS[0], "swapped": f"{CARDS[1]},{CARDS[0]}"}[given[0]]
    split = parse_split(names, *given[1:])
    with closing(Model(tiny, split=split, may_unload=True)) as model, closing(Context(model, SMALL)) as context:
        runner, copy = Runner(context), HostCopy(0, len(TOKENS))
        at = weights(context)
        assert {name for name, size in at.items() if size} == {CARDS[place] for place in places}
        first = logits(runner, TOKENS)
        runner.apply(Save(0, copy))
        after = logits(runner, TOKENS[:1], 0, len(TOKENS))
        runner.apply(Drop(0))
        runner.apply(Restore(copy, 1, 0, len(TOKENS)))
        assert np.array_equal(logits(runner, TOKENS[:1], 1, len(TOKENS)), after)
        context.unload()
        context.open()
        assert weights(context) == at and np.array_equal(logits(runner, TOKENS), first)


def test_kv_on_disk_belongs_to_the_shares(tiny, tmp_path):
    found = []
    for shares in ("1,1", "1,0", "1,1"):
        with running(tiny, cache_dir=str(tmp_path), tensor_split=shares) as up:
            found.append(up.chat(**BODY))
            assert [part["name"] for part in up.http.get("/props").json()["device"]["devices"]] == [*CARDS, "CPU"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert cached == [0, 0, found[0]["usage"]["prompt_tokens"] - REST] and found[0]["choices"] == found[2]["choices"]


def test_a_sleep_keeps_the_places_of_layers(tiny):
    with running(tiny, sleep_idle_seconds=HOUR) as up:
        first, at = up.chat(**BODY), weights(up.service.context)
        doze(up)
        assert up.chat(**BODY)["choices"] == first["choices"] and weights(up.service.context) == at


def test_each_device_has_to_have_room_and_one_that_is_not_used_does_not_count(tiny):
    def limited(**given):
        settings, decision = fit(Settings(ctx_size=4096, threads=1, **given), tiny)
        assert decision is not None
        return settings, decision

    whole = {use.device: use.total for use in limited()[1].chosen.uses}
    cap = (max(whole[name] for name in CARDS) >> 20) - 1
    settings, decision = limited(device_memory=cap)
    assert settings.gpu_layers >= 0
    assert all(use.total <= cap << 20 for use in decision.chosen.uses if use.device in CARDS)
    _, decision = limited(device=CARDS[1])
    assert set(decision.limits) == {CARDS[1], HOST}
    assert set(limited(device="none")[1].limits) == {HOST}
