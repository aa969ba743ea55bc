"""Says whether tests run on a device other than the CPU, as in `make device-test`, and how exact its results are."""

import os
from dataclasses import replace

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.context import Context
from slotcache.models.hardware import HIDDEN, devices

ON_DEVICE = any(device.is_gpu for device in devices())

HAS_OWN_KERNELS = ON_DEVICE and not devices()[0].name.startswith("RPC")
"""Whether the device computes with GPU kernels. An RPC device computes with the CPU's kernels, in another process."""

ROUNDING = 1e-3 if HAS_OWN_KERNELS else 1e-5 if ON_DEVICE else 0.0
"""By how much numbers may differ if a device computes several texts together, and the CPU computes them one by one."""

NEAR = 0.02  # share of the range of logits, as in docs/exactness.md for GPUs

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
    """Undo after a test what this process hides of its GPUs."""
    for name in (*HIDDEN, llama.VARIABLES[0]):
        value = os.environ.get(name)
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(llama, "PASSED_OVER", {})


def idle_leaves(context: Context) -> None:
    """Offload idle KV for each request on an untimed device, as on the CPU, because bits depend on a prompt's cells."""
    if ON_DEVICE:
        context.costs = replace(context.costs, spill_ns=0.0)


def same(one: np.ndarray, other: np.ndarray, near: float = 0.0) -> bool:
    """Return whether two rows of logits are equal if one was computed beside few other rows, and the other beside many.

    On the CPU and by RPC, they must be bit-equal. A GPU computes few rows with another kernel than many. There they must be
    equal within rounding, and have the same best token if it is ahead of the next token by more than that. Rows from the
    same kernel are bit-equal on a GPU too; they are compared with `np.array_equal`.

    near: the rounding on the CPU, as a share of the range, if bits are not promised.
    """
    most = max(near, NEAR if HAS_OWN_KERNELS else 0.0) * np.ptp(other)
    second, best = np.partition(other, -2)[-2:]
    return bool(np.abs(one - other).max() <= most and (one.argmax() == other.argmax() or best - second <= most))


def same_answers(answer, reference, near: float = 0.0) -> bool:
    """Return whether two answers of a `Lab` are the same, up to a token that rounding changes. near: as in `same`."""
    rows = zip(answer.logits, reference.logits, answer.tokens, reference.tokens, strict=True)
    for row, expected, token, expected_token in rows:
        if not same(row, expected, near):
            return False
        if token != expected_token:
            break
    return True
