"""Whether these tests run on a device that is not the CPU, as in `make device-test`."""

import os

import pytest
from slotcache.models import llama
from slotcache.models.hardware import HIDDEN, devices

ON_DEVICE = any(device.is_gpu for device in devices())

ROUNDING = 1e-5 if ON_DEVICE else 0.0
"""By how much numbers may differ where a device computes several texts together, and the CPU one by one."""

needs_device = pytest.mark.skipif(not ON_DEVICE, reason="needs a device that is not the CPU: make device-test")
needs_cpu = pytest.mark.skipif(ON_DEVICE, reason="with a GPU, weights stay in the layout of their file")
loads_two = pytest.mark.skipif(ON_DEVICE, reason="llama.cpp's RPC backend ends the process where two models ask at once")
needs_abort = pytest.mark.skipif(ON_DEVICE, reason="llama.cpp asks the callback that aborts a batch on the CPU only")


def keep_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what this process hides of its cards come back behind a test."""
    for name in (*HIDDEN, llama.VARIABLES[0]):
        value = os.environ.get(name)
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(llama, "PASSED_OVER", {})
