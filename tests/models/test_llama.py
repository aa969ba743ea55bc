"""The door to llama.cpp: which library it takes, and what it refuses before anything is called."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from slotcache.models import llama
from slotcache.models.errors import LibraryError
from slotcache.models.hardware import command

LIBRARY = llama.LIBRARY.path
MACHINE = 18  # where an ELF file has its CPU


def starts(folder: Path | str, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that runs this code, and takes its library from this folder."""
    start = command("models.llama")
    at = start.index("-c") + 1
    start[at] = start[at].partition("import_module(sys.argv[2])")[0] + code
    environment = os.environ | {"SLOTCACHE_LLAMA": str(folder)} | variables
    return subprocess.run(start, env=environment, capture_output=True, text=True, timeout=300)


def cut_short(path: Path) -> None:
    path.write_bytes(LIBRARY.read_bytes()[: LIBRARY.stat().st_size // 2])


def without_its_end(path: Path) -> None:
    path.write_bytes(LIBRARY.read_bytes()[:-100])


def of_another_cpu(path: Path) -> None:
    content = bytearray(LIBRARY.read_bytes())
    content[MACHINE : MACHINE + 2] = (243).to_bytes(2, "little")  # RISC-V
    path.write_bytes(content)


def text(path: Path) -> None:
    path.write_text("GROUP ( libother.so )\n")


def nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.skipif(platform.system() != "Linux", reason="ELF files")
@pytest.mark.parametrize(
    "make, reason",
    [
        (cut_short, "is incomplete"),
        (without_its_end, "is incomplete"),
        (of_another_cpu, f"is not for {platform.machine()}, this machine's CPU"),
        (text, "is no library of a 64-bit Linux"),
        (nothing, "is no library of a 64-bit Linux"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_clear_line(tmp_path, make, reason):
    path = tmp_path / "libllama.so"
    make(path)
    with pytest.raises(LibraryError) as refused:
        llama._open(llama._in_folder(tmp_path, "SLOTCACHE_LLAMA"))
    assert str(refused.value) == f"llama.cpp of SLOTCACHE_LLAMA is refused: {path} {reason}; {llama.REMEDY}"


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_a_library_is_one_line_and_code_2(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        LibraryError, match=r"^llama\.cpp of a 1\.2 is refused: \S+ has none of libllama\.so, .*; pip install"
    ):
        llama._in_folder(tmp_path / folder, "a", "1.2")


def test_the_command_ends_with_that_line(tmp_path):
    code = "import sys; from slotcache.server.cli import main; sys.exit(main(['doctor']))"
    done = starts(tmp_path, code=code)
    assert done.returncode == 2 and done.stderr.startswith(
        f"slotcache: llama.cpp of SLOTCACHE_LLAMA is refused: {tmp_path} has none of "
    )
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_no_library_at_all_names_what_to_install(monkeypatch):
    for variable in llama.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(llama, "find_spec", lambda _: None)
    with pytest.raises(
        LibraryError, match=r"^llama\.cpp is not installed: .*slotcache\[llama\].*slotcache\[prebuilt\].*make serve$"
    ):
        llama.find()


def test_the_folder_that_the_environment_names_comes_first(tmp_path):
    shutil.copytree(LIBRARY.parent, tmp_path / "lib", ignore=lambda _, names: [n for n in names if ".so" not in n])
    done = starts(tmp_path / "lib", "from slotcache.models.llama import LIBRARY; print(LIBRARY.path, LIBRARY)")
    assert done.stdout == f"{tmp_path / 'lib' / LIBRARY.name} SLOTCACHE_LLAMA {llama.llama_version().decode()}\n"


def test_installed_packages_come_in_order(tmp_path, monkeypatch):
    for variable in llama.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    package, npm = tmp_path / "xllamacpp", tmp_path / "npm"
    package.mkdir()
    (npm / "bins/linux-x64").mkdir(parents=True)
    for file in (package / "__init__.py", package / "xllamacpp.abi3.so", npm / "bins/linux-x64/libllama.v0.5.0.so"):
        file.touch()
    (npm / "package.json").write_text('{"version": "3.22.1"}')
    hidden = set()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(llama, "NPM", npm)
    monkeypatch.setattr(llama, "find_spec", lambda name: None if name in hidden else find_spec(name))
    if find_spec("llama_cpp"):
        assert llama.find().origin == "llama-cpp-python"
    hidden.add("llama_cpp")
    assert llama.find().origin == "xllamacpp" and llama.find().path == package / "xllamacpp.abi3.so"
    hidden.add("xllamacpp")
    assert llama.find() == llama.Library(npm / "bins/linux-x64/libllama.v0.5.0.so", "npm", "3.22.1")


def test_a_function_that_is_missing_matters_only_where_it_is_bound():
    def llama_of_tomorrow() -> llama.int32_t: ...

    with pytest.raises(LibraryError, match=r"refused: \S+ lacks llama_of_tomorrow; pip install"):
        llama.bind(llama_of_tomorrow)


# ---- Layouts: what a library of another version would see of our structures. --------------------------------------------


def changed(layout: type[ctypes.Structure], change) -> type[ctypes.Structure]:
    """A structure of the same name with other fields."""
    fields = list(layout._fields_)
    change(fields)
    return type(layout.__name__, (ctypes.Structure,), {"_fields_": tuple(fields)})


def place(fields, name: str) -> int:
    return next(at for at, field in enumerate(fields) if field[0] == name)


CHANGES = {
    "one more in the middle": lambda fields: fields.insert(place(fields, "embeddings"), ("new", ctypes.c_void_p)),
    "one more at the end": lambda fields: fields.append(("new", ctypes.c_void_p)),
    "one less at the end": lambda fields: fields.pop(),
    "one less in the middle": lambda fields: fields.pop(place(fields, "n_ubatch")),
    "a wider one": lambda fields: fields.__setitem__(place(fields, "type_k"), ("type_k", ctypes.c_int64)),
    "two that changed places": lambda fields: fields.insert(
        place(fields, "embeddings"), fields.pop(place(fields, "offload_kqv"))
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_layout_of_a_context_is_refused(monkeypatch, name):
    layout, defaults = next(row for row in llama.DEFAULTS if row[0] is llama.llama_context_params)
    monkeypatch.setattr(llama, "DEFAULTS", ((changed(layout, CHANGES[name]), defaults),))
    with pytest.raises(LibraryError, match="has another layout of llama_context_params"):
        llama.check_layout()


def test_our_layout_is_the_library_s():
    llama.check_layout()


# ---- Parts that need no llama.cpp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["ordering.policy", "front.cli", "retrieval.index", "slots.scheduler"])
def test_the_parts_without_a_model_load_no_llama_cpp(tmp_path, module):
    assert starts(tmp_path, f"import slotcache.{module}").returncode == 0  # an empty folder: who looks for a library fails
    assert starts(tmp_path, "import slotcache.models.model").returncode == 1


def test_the_order_of_documents_loads_no_foreign_library():
    code = "import slotcache.ordering.policy; sys.exit('ctypes' in sys.modules or 'numpy' in sys.modules)"
    assert starts("/", code).returncode == 0
