"""Commands that run a module of this package in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Not `-m`: a checkout that is not installed is no package for another process.
START = """
import sys, types
from importlib import import_module
package = types.ModuleType("slotcache")
package.__path__ = [sys.argv[1]]
sys.modules["slotcache"] = package
import_module(sys.argv[2]).main(*sys.argv[3:])
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls `main` of a module, named below this package, with these arguments.

    -P: it imports nothing from the folder that it is started in, as this process does not.
    """
    return [sys.executable, "-P", "-c", START, str(ROOT), f"slotcache.{module}", *arguments]
