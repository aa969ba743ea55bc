"""The layers without a model where a platform lacks what Linux has: docs/platforms.md has what was run where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PLATFORMS = ("windows", "macos")
IMPORTS = """
import importlib, sys, types
from pathlib import Path
root = Path(sys.argv[1])
package = sys.modules["slotcache"] = types.ModuleType("slotcache")
package.__path__ = [str(root)]
failed = {}
for room in sys.argv[2:]:
    for path in sorted((root / room).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if not name.startswith(("front.ray", "ordering.langchain", "ordering.llamaindex")):  # these need packages of others
            try:
                importlib.import_module(f"slotcache.{name.removesuffix('.__init__')}")
            except Exception as error:
                failed[name] = repr(error)
"""
ROOMS = ("ordering", "slots", "retrieval", "front", "models", "server")
PURE_TESTS = (
    *("ordering/test_tree.py", "slots/test_record.py", "slots/test_record_index.py", "slots/test_eviction.py"),
    *("retrieval/test_files.py", "retrieval/test_index.py", "front/test_orders.py"),
)
NEEDS_A_LIMIT = (  # of processor time, which Windows does not have
    "tests/retrieval/test_index.py::test_a_file_that_takes_too_long_ends_its_reader_alone",
    "tests/retrieval/test_index.py::test_files_that_take_long_are_read_after_all_others",
)
NO_LLAMA = """
import sys
loaded = []


class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in ("llama_cpp", "xllamacpp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def note(event, arguments):
    # None: the process itself, as ctypes opens it. PDFium: of retrieval.pdf, which a reader's process alone imports.
    if event == "ctypes.dlopen" and arguments[0] is not None and "pdfium" not in arguments[0]:
        loaded.append(arguments[0])


sys.meta_path.insert(0, Nothing())
sys.addaudithook(note)
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=TESTS.parent)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_module_can_be_imported(platform):
    done = run("-c", f"{IMPORTS}\nprint(failed)", str(TESTS.parent), *ROOMS, LACKS=platform)
    assert done.stdout == "{}\n", done.stdout + done.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_layers_without_a_model_pass_their_tests(platform):
    """Those that open files, start processes or ask for limits; the whole rooms take minutes: see docs/platforms.md."""
    options = ("-q", "-p", "no:cacheprovider", *(f"--deselect={name}" for name in NEEDS_A_LIMIT if platform == "windows"))
    done = run("-m", "pytest", *options, *(f"tests/{name}" for name in PURE_TESTS), LACKS=platform)
    assert done.returncode == 0, done.stdout


def test_a_layer_without_a_model_loads_no_library_and_no_llama_cpp():
    code = f"""{NO_LLAMA}\n{IMPORTS}
from slotcache.server.cli import main
try:
    main(["order", "--help"])
except SystemExit as ended:
    print("ended with", ended.code)
print(failed, loaded, sorted(name for name in sys.modules if name == "slotcache.models.llama" or name.startswith("llama")))
"""
    done = run("-c", code, str(TESTS.parent), *ROOMS[:4])
    assert "usage: slotcache order" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-2:] == ["ended with 0", "{} [] []"]


def test_a_lock_where_there_is_none_is_an_error_and_no_lock(tmp_path):
    code = f"""{IMPORTS}
from slotcache.slots.store.private_folder import lock
try:
    print(lock(Path({str(tmp_path / "lock")!r})))
except OSError as error:
    print(error.strerror)
"""
    assert run("-c", code, str(TESTS.parent), LACKS="windows").stdout == "this platform has no flock\n"
    assert run("-c", code, str(TESTS.parent), LACKS="macos").stdout.strip().isdecimal()
