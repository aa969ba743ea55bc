"""Make `slotcache.*` importable from a bare checkout, and share the fixtures that several folders use."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

if find_spec("slotcache") is None:
    package = ModuleType("slotcache")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["slotcache"] = package


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny model with random weights, two layers, whose reuse is exact to the bit without flash attention."""
    from slotcache.models.generate import SHAPES, generate

    return generate(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPES["tiny"])
