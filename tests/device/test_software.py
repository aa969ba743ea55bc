"""Some tests of the cache once more, on Vulkan in software: with the code that computes on cards."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.on_device import ON_DEVICE

from device import run

ROOT = Path(__file__).parents[2]
SERVING = "tests/device/test_serving.py::test_"
SOME = (  # a minute, once the kernels are compiled
    "tests/device/test_device.py::test_llama_cpp_puts_all_layers_and_the_pool_there",
    "tests/models/test_host.py::test_what_comes_back_gives_the_same_logits_bit_for_bit[dense]",
    f"{SERVING}kv_leaves_for_host_memory_and_comes_back",
    f"{SERVING}a_restart_reads_from_disk_what_was_computed_there",
    f"{SERVING}half_of_the_layers_compute_on_the_device",
)


@pytest.mark.skipif(ON_DEVICE, reason="they run on a device already")
@pytest.mark.skipif(bool(run.missing_for_vulkan()), reason=run.missing_for_vulkan() or "all is there")
@pytest.mark.timeout(3600)  # the first run compiles each kernel
def test_on_vulkan_too():
    tests = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *SOME]
    done = subprocess.run([sys.executable, run.__file__, "vulkan", *tests], cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0 and "skipped" not in str(last), done.stdout + done.stderr
