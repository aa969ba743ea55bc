"""Whether these tests run on a device that is not the CPU, as in `make device-test`, and what it promises of its results."""

import os
from dataclasses import replace

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.context import Context
from slotcache.models.hardware import HIDDEN, devices

ON_DEVICE = any(device.is_gpu for device in devices())

HAS_OWN_KERNELS = ON_DEVICE and not devices()[0].name.startswith("RPC")
"""Whether the device computes with a GPU's kernels. RPC's computes with the CPU's, in another process."""

ROUNDING = 1e-3 if HAS_OWN_KERNELS else 1e-5 if ON_DEVICE else 0.0
"""By how much numbers may differ where a device computes several texts together, and the CPU one by one."""

NEAR = 0.02  # of the range of the logits, as docs/exactness.md says of cards

needs_device = pytest.mark.skipif(not ON_DEVICE, reason="needs a device that is not the CPU: make device-test")
needs_cpu = pytest.mark.skipif(ON_DEVICE, reason="with a GPU, weights stay in the layout of their file")
loads_two = pytest.mark.skipif(
    ON_DEVICE and not HAS_OWN_KERNELS, reason="llama.cpp's RPC backend ends the process where two models ask at once"
)
has_adapters = pytest.mark.skipif(
    HAS_OWN_KERNELS, reason="with LoRA adapters, llama.cpp's Vulkan backend in software damages the heap (docs/gpu.md)"
)
needs_abort = pytest.mark.skipif(ON_DEVICE, reason="llama.cpp asks the callback that aborts a batch on the CPU only")


def keep_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what this process hides of its cards come back behind a test."""
    for name in (*HIDDEN, llama.VARIABLES[0]):
        value = os.environ.get(name)
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(llama, "PASSED_OVER", {})


def idle_leaves(context: Context) -> None:
    """Let idle KV leave an untimed device for each request, as it leaves the CPU: bits depend on the cells of a prompt."""
    if ON_DEVICE:
        context.costs = replace(context.costs, spill_ns=0.0)


def same(one: np.ndarray, other: np.ndarray, near: float = 0.0) -> bool:
    """Return whether two rows of logits are equal, one computed beside few other rows and one beside many.

    To the bit on the CPU and by RPC. A GPU computes few rows with another kernel than many: there within rounding, and with
    the same best token where it is ahead of the next one by more. Where the same kernels run, the bits are equal there, too:
    such rows are compared with `np.array_equal`. near: the rounding of the CPU, as a share of the range, where it promises
    no bits.
    """
    most = max(near, NEAR if HAS_OWN_KERNELS else 0.0) * np.ptp(other)
    second, best = np.partition(other, -2)[-2:]
    return bool(np.abs(one - other).max() <= most and (one.argmax() == other.argmax() or best - second <= most))


def same_answers(answer, reference, near: float = 0.0) -> bool:
    """Return whether two answers of a `Lab` are the same. Where rounding chose another token, they part. near: as above."""
    rows = zip(answer.logits, reference.logits, answer.tokens, reference.tokens, strict=True)
    for row, expected, token, expected_token in rows:
        if not same(row, expected, near):
            return False
        if token != expected_token:
            break
    return True
