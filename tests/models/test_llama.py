"""The door to llama.cpp: which library it takes, and what it refuses before anything is called."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path

import pytest
from slotcache.models import builds, llama
from slotcache.models.errors import LibraryError
from slotcache.models.llama import Library
from slotcache.models.trial import command

LIBRARY = llama.LIBRARY.path
MACHINE, SEGMENTS, SEGMENT_SIZE = 18, 32, 54  # where an ELF file has its CPU, and its list of segments


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


def text(path: Path) -> None:
    path.write_text("GROUP ( libother.so )\n")


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def with_bytes(at: int, new: bytes):
    """A library whose header has other bytes at a place."""

    def write(path: Path) -> None:
        content = bytearray(LIBRARY.read_bytes())
        content[at : at + len(new)] = new
        path.write_bytes(content)

    return write


@pytest.mark.skipif(platform.system() != "Linux", reason="ELF files")
@pytest.mark.parametrize(
    "make, reason",
    [
        (cut_short, "is incomplete"),
        (without_its_end, "is incomplete"),
        (with_bytes(SEGMENTS, b"\xff" * 8), "is incomplete"),
        (with_bytes(SEGMENT_SIZE, b"\0\0"), "is incomplete"),
        (with_bytes(MACHINE, b"\xf3\0"), f"is not for {platform.machine()}, this machine's CPU"),
        (text, "is no library of a 64-bit Linux"),
        (nothing, "is no library of a 64-bit Linux"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_clear_line(tmp_path, make, reason):
    path = tmp_path / "libllama.so"
    make(path)
    with pytest.raises(LibraryError) as refused:
        llama._open(llama._in_folder(Library(tmp_path, "SLOTCACHE_LLAMA")))
    assert str(refused.value) == f"llama.cpp of SLOTCACHE_LLAMA is refused: {path} {reason}; {llama.REMEDY}"


NONE = "has none of " + ", ".join(llama.NAMES)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("empty", NONE),
        ("no files", NONE),
        ("missing", "cannot be read: No such file or directory"),
        ("file", "cannot be read: Not a directory"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("n" * 5000, "cannot be read: File name too long"),
    ],
)
def test_a_folder_without_a_library_is_one_line(tmp_path, name, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "no files").mkdir()
    os.mkfifo(tmp_path / "no files/libllama.so")  # to open it would wait for ever
    (tmp_path / "no files/libllama.v1.so").symlink_to("libllama.v1.so")
    (tmp_path / "no files/xllamacpp.so").mkdir()
    with pytest.raises(LibraryError) as refused:
        llama._in_folder(Library(tmp_path / name, "a", "1.2"))
    assert str(refused.value) == f"llama.cpp of a 1.2 is refused: {tmp_path / name} {reason}; {llama.REMEDY}"


def test_a_home_that_nobody_has_is_one_line(monkeypatch):
    monkeypatch.setenv("SLOTCACHE_LLAMA", "~nobody-has-this-name/lib")
    with pytest.raises(LibraryError, match=r"refused: /\S+/~nobody-has-this-name/lib cannot be read: No such file"):
        llama.find()


def test_a_relative_folder_is_this_one_and_not_the_system_s(tmp_path, monkeypatch):
    (tmp_path / "libllama.so").touch()
    monkeypatch.chdir(tmp_path)
    assert llama._in_folder(Library(Path(), "a")).path == tmp_path / "libllama.so"


# ---- Libraries that are what they seem, and end the process that loads them. --------------------------------------------


def compiled(folder: Path, source: str) -> Path:
    """A folder with a library of this source."""
    (folder / "lib.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libllama.so", folder / "lib.c"], check=True)
    return folder


DOCTOR = "import sys; from slotcache.models import trial; from slotcache.server.cli import main; sys.exit(main(['doctor']))"


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize(
    "source, reason",
    [
        ("__attribute__((constructor)) void begin(void) { __builtin_trap(); }", "ended the process: Illegal instruction"),
        ("void abort(void); __attribute__((constructor)) void begin(void) { abort(); }", "ended the process: Aborted"),
        ("void _exit(int); __attribute__((constructor)) void begin(void) { _exit(0); }", "ended the process without a word"),
        ("__attribute__((constructor)) void begin(void) { for (;;) ; }", "did not end within 2 s"),
        ("void abort(void); const char *llama_version(void) { abort(); }", "ended the process: Aborted"),
    ],
)
def test_a_library_that_ends_its_process_ends_another_one(tmp_path, source, reason):
    patient = DOCTOR.replace("trial;", "trial; trial.PATIENCE = 2;")
    done = starts(compiled(tmp_path, source), patient, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    where = f"slotcache: llama.cpp of SLOTCACHE_LLAMA is refused: {tmp_path}/libllama.so"
    assert done.stderr == f"{where} cannot be loaded: {reason}; {llama.REMEDY}\n"


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("cc"), reason="needs a C compiler")
def test_a_library_that_prints_is_judged_by_what_it_does(tmp_path):
    prints = 'int puts(const char *); __attribute__((constructor)) void begin(void) { puts("not passed"); }'
    done = starts(compiled(tmp_path, prints), DOCTOR, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 2 and "libllama.so lacks llama_" in done.stderr


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
    monkeypatch.setattr(builds, "FOLDER", Path("nowhere"))  # it may stand beside this environment
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
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "npm")
    package, npm = tmp_path / "xllamacpp", builds.package_folder("cpu")
    package.mkdir()
    (npm / "bins/linux-x64").mkdir(parents=True)
    for file in (package / "__init__.py", package / "xllamacpp.abi3.so", npm / "bins/linux-x64/libllama.v0.5.0.so"):
        file.touch()
    (npm / "package.json").write_text('{"version": "3.22.1"}')
    hidden = set()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(llama, "find_spec", lambda name: None if name in hidden else find_spec(name))
    if find_spec("llama_cpp"):
        assert llama.find().origin == "llama-cpp-python"
    hidden.add("llama_cpp")
    assert llama.find().origin == "xllamacpp" and llama.find().path == package / "xllamacpp.abi3.so"
    hidden.add("xllamacpp")
    assert llama.find() == Library(npm / "bins/linux-x64/libllama.v0.5.0.so", "npm", "3.22.1")


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


def unlike() -> None:
    """Print what llama-cpp-python's bindings have otherwise: a function's types, a structure's fields, an enum's values."""
    import ctypes
    from importlib import import_module

    from slotcache.models import llama as ours

    theirs = import_module("llama_cpp.llama_cpp")

    def kind(of) -> str:
        if of in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(of, "contents") or hasattr(of, "_restype_"):
            return "pointer"
        return getattr(of, "__name__", "void")

    def seen(found) -> object:
        if isinstance(found, int):
            return found
        fields = getattr(found, "_fields_", None) or [("", of) for of in (found.restype, *found.argtypes)]
        return [(name, kind(of)) for name, of in fields]

    kinds = (int, type(ctypes.Structure), type(ours.llama_decode))
    both = [name for name, found in vars(ours).items() if isinstance(found, kinds) and hasattr(theirs, name)]
    for name in both:
        if seen(vars(ours)[name]) != seen(vars(theirs)[name]):
            print(name, seen(vars(ours)[name]), seen(vars(theirs)[name]))
    print(len(both), "compared")


@pytest.mark.skipif(llama.LIBRARY.origin != "llama-cpp-python", reason="compares with llama-cpp-python's bindings")
def test_our_types_are_those_of_llama_cpp_python_s_bindings():
    done = starts("", getsource(unlike) + "unlike()")
    assert done.stdout == "126 compared\n", done.stdout + done.stderr


# ---- Parts that need no llama.cpp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["ordering.policy", "front.cli", "retrieval.index", "slots.scheduler"])
def test_the_parts_without_a_model_load_no_llama_cpp(tmp_path, module):
    assert starts(tmp_path, f"import slotcache.{module}").returncode == 0  # an empty folder: who looks for a library fails
    assert starts(tmp_path, "import slotcache.models.model").returncode == 1


def test_the_order_of_documents_loads_no_foreign_library():
    code = "import slotcache.ordering.policy; sys.exit('ctypes' in sys.modules or 'numpy' in sys.modules)"
    assert starts("/", code).returncode == 0
