"""Starts on a device with less memory than the model wants: fewer layers on it, a mixture's experts in host memory."""

import pytest
from slotcache.models.context import breakdown
from slotcache.models.errors import ModelError
from slotcache.models.hardware import HOST, devices
from slotcache.server.config.settings import Settings
from slotcache.server.engine.fit import fit
from support.architectures import mixture

from ..conftest import running

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not any(device.is_gpu for device in devices()), reason="needs a device: make device-test")


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """20 MiB, of which 3 MiB a layer are experts."""
    return mixture(tmp_path_factory.mktemp("models") / "mixture.gguf")


def chosen(path, **given):
    """The settings that fit, with the MiB that they take on the device."""
    settings, decision = fit(Settings(threads=1, **given), path)
    assert decision is not None
    return settings, sum(use.total for use in decision.chosen.uses if use.device != HOST) / MIB


def test_experts_move_before_layers(experts):
    whole = chosen(experts)[1]
    found = [chosen(experts, ctx_size=4096, device_memory=cap) for cap in (10, 14, 20, 26, int(whole))]
    assert all(takes <= cap for (_, takes), cap in zip(found, (10, 14, 20, 26, whole), strict=True))
    settings = [settings for settings, _ in found]
    on_host = [fitted.n_cpu_moe for fitted in settings]
    assert on_host == sorted(on_host, reverse=True) and on_host[1] > on_host[3] > 0 and on_host[-1] == 0
    assert settings[0].gpu_layers >= 0 and all(fitted.gpu_layers == -1 for fitted in settings[2:])


@pytest.mark.parametrize("given", [{"n_cpu_moe": 2}, {"cpu_moe": True}, {"override_tensor": r"blk\.[01]\..*exps=CPU"}])
def test_experts_stay_where_a_flag_puts_them(experts, given):
    settings, takes = chosen(experts, ctx_size=4096, device_memory=24, **given)
    assert {name: getattr(settings, name) for name in given} == given and takes <= 24
    assert takes < chosen(experts, ctx_size=4096)[1] - 5


def test_layers_move_to_the_host_and_the_rest_answers(tiny):
    whole = chosen(tiny, ctx_size=4096)[1]
    cap = int(whole)
    with running(tiny, device_memory=cap, ctx_size=4096, flash_attn="auto") as server:
        assert 0 <= server.service.settings.gpu_layers <= server.service.model.num_layers
        uses = {use.device: use.total for use in breakdown(server.service.context.handle)}
        assert uses.get(devices()[0].name, 0) <= cap * MIB
        assert server.chat("word " * 300)["usage"]["completion_tokens"] == 4
        lines = server.http.get("/props").json()["memory"]["decision"]
        assert any(line.startswith("fitted: ") and "layers on the GPU" in line for line in lines)


def test_layers_that_a_flag_gives_must_fit(experts):
    with pytest.raises(ModelError, match=r"lacks \d+ MiB.*it fits with .*-n"):
        fit(Settings(gpu_layers=7, cpu_moe=True, ctx_size=4096, device_memory=2), experts)
    assert chosen(experts, gpu_layers=3, ctx_size=4096, device_memory=40)[0].gpu_layers == 3
