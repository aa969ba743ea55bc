"""Make `slotcache.*` importable from a bare checkout, and share the fixtures that several folders use."""

import faulthandler
import os
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

if find_spec("slotcache") is None:
    package = ModuleType("slotcache")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["slotcache"] = package

from slotcache.server.config.settings import SETTINGS  # only now can it be found

# Results must not depend on the shell that starts the tests. Its settings and proxies do not count, and ctrl-C and the end
# of its terminal work as usual in the programs that tests start. A background job ignores the first, nohup the second, and
# what they start inherits that.
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
VARIABLES = [variable for setting in SETTINGS for variable in setting.variables]
for name in (*VARIABLES, *PROXIES, *map(str.upper, PROXIES)):
    os.environ.pop(name, None)
# Nor do the cards of this machine, and the builds that `make serve` took for them; SLOTCACHE_LLAMA names one for the tests.
os.environ.setdefault("SLOTCACHE_ROOT", os.devnull)
if find_spec("llama_cpp"):
    os.environ.setdefault("SLOTCACHE_BUILDS", os.devnull)
# Programs that tests start would compile the package again, each of them: what Python has compiled is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Threads that compute sleep while they wait for each other: spinning beside other work on the cores, they lose most of it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test has a clock: the machine may be busy. Examples are the same each time, but for a long run, which draws new ones.
SAME = not os.environ.get("SLOTCACHE_LIVES")
settings.register_profile("suite", deadline=None, derandomize=SAME, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

GRACE = 60  # seconds that a test has to end after its timeout
STDERR: list[int] = []  # the stderr of this process: during a test another one stands in for it


def pytest_configure() -> None:
    STDERR.append(os.dup(2))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End this process with the stacks of all threads if a test outlives its timeout; `--numprocesses` starts another one.

    pytest's timeout is an exception in the main thread. Hypothesis catches it, and a call of C code delays it.
    """
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    if seconds:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=STDERR[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny model with random weights, two layers, whose reuse is exact to the bit without flash attention."""
    from slotcache.bench.random_models import SHAPES, generate

    return generate(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPES["tiny"])


@pytest.fixture(scope="session")
def floats(tmp_path_factory) -> Path:
    """The tiny model with weights as float32: a row that is rounded otherwise beside others chooses no other token.

    In Q8_0 the last bit of a number may take it to the next of 255 steps.
    """
    from slotcache.bench.random_models import SHAPES, generate

    return generate(tmp_path_factory.mktemp("models") / "floats.gguf", replace(SHAPES["tiny"], quantisation="F32"))
