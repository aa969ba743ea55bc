"""Makes `slotcache.*` importable from a bare checkout, and shares what the tests of several folders need."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

if find_spec("slotcache") is None:
    package = ModuleType("slotcache")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["slotcache"] = package
