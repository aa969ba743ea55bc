"""A device that is not the CPU is in use at all. `make device-test` runs these and the tests of the cache on one."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from server.conftest import running
from slotcache.models import llama
from slotcache.models.cards import NO_CARD
from slotcache.models.hardware import devices
from slotcache.models.model import Model
from slotcache.models.times import times_on
from support.lab import Lab
from support.on_device import needs_device

pytestmark = needs_device
DOCTOR = "from slotcache.server.cli import main; main(['doctor'])"


@pytest.fixture(scope="module")
def model(tiny):
    model = Model(tiny)
    yield model
    model.close()


def test_the_device_comes_first_and_is_no_cpu():
    first, *_, last = devices()
    assert first.is_gpu and first.name != "CPU" and last.kind == "CPU"


def test_llama_cpp_puts_all_layers_and_the_pool_there(model, caplog):
    with caplog.at_level("DEBUG", "slotcache.llama"):
        Model(model.path).close()
        lab = Lab(model)
    device = devices()[0].name
    assert f"offloaded {model.num_layers + 1}/{model.num_layers + 1} layers to GPU" in caplog.text
    assert any("KV buffer size" in line and device in line for line in caplog.messages), caplog.text
    assert not any("KV buffer size" in line and "CPU KV" in line for line in caplog.messages)
    lab.close()


def test_whoever_shows_the_device_does_not_ask_it_while_it_computes(tiny, monkeypatch):
    """A device in another process answers one thread at a time: two at once end the server."""
    with running(tiny) as server:
        monkeypatch.setattr("slotcache.models.split.devices", lambda: pytest.fail("the device was asked"))
        assert server.http.get("/props").json()["device"]["name"] == devices()[0].name


def test_a_batch_does_not_ask_the_callback_while_the_device_computes(model):
    lab, asked = Lab(model, batch=500, budget=500), []
    callback = llama.ggml_abort_callback(lambda _: asked.append(1) is not None)
    llama.llama_set_abort_callback(lab.context.handle, callback, ctypes.c_void_p())
    assert lab.run(np.arange(300, 700, dtype=np.int32), limit=2).tokens
    per_layer = len(asked) / (model.num_layers * 3)
    assert per_layer < 1, "of some dozens of operations a layer"
    lab.close()


def test_doctor_shows_the_device_and_its_times(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with running(model.path, is_timed=True, flash_attn="auto") as server:
        shown = server.http.get("/props").json()["device"]
        assert server.chat()["usage"]["completion_tokens"]
    device = devices()[0]
    assert (shown["name"], shown["description"]) == (device.name, device.description)
    assert shown["times"]["idle"] > shown["times"]["depth"] > 0
    assert shown["costs"]["background_ns"] and shown["costs"]["swap_from_tokens"] != 50
    with running(model.path, is_timed=True, flash_attn="auto") as again:
        found = again.http.get("/props").json()["device"]
        assert (found["times"], found["costs"]) == (shown["times"], shown["costs"]), "timed once"
    about = times_on(device)
    assert [times.step for _, times in about] == [shown["times"]["step"]]
    printed = subprocess.run([sys.executable, "-c", DOCTOR], capture_output=True, text=True, check=True).stdout
    assert f"{device.name}: " in printed and "GPU offload: yes" in printed  # another process, and a device of its own


def test_a_process_that_leaves_cards_alone_computes_nothing_there(tiny):
    """Whatever holds the weights, llama.cpp would compute a batch of 300 tokens on the device."""
    code = f"""
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
from slotcache.models.hardware import devices
from slotcache.models.context import Context, ContextSettings, breakdown
from slotcache.models.model import Model
from slotcache.models.runner import Runner
context = Context(Model(Path({str(tiny)!r})), ContextSettings(num_cells=512, threads=1, num_sequences=4))
Runner(context).compute_zeros(0, 300)
print(*(use.device for use in breakdown(context.handle)), *(device.name for device in devices()))
"""
    command, name = [sys.executable, "-c", code], devices()[0].name
    for value in ("", "1"):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {NO_CARD: value})
        *log, logged = done.stdout.splitlines()
        assert (name in logged.split(), any(name in line for line in log if "buffer size" in line)) == (not value, not value)
