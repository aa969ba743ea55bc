"""The habits of the project: one place for each version, and a CI that checks before it tests."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURED = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, WHEEL = CONFIGURED["project"], CONFIGURED["tool"]["setuptools"]


REAL = (
    "cat",
    "cp",
    "dirname",
    "grep",
    "mkdir",
    "rm",
    "sed",
    "sh",
    "tail",
    "touch",
)  # programs that the Makefile's rules find
MADE = {  # those in whose place others stand: each writes down how it was called
    "python": """case "$1 $2" in "-m venv") mkdir -p "$3/bin"; cp "$(dirname "$0")/pip" "$3/bin";;
        models/cards.py*) cat "$FOLDER/cards";; esac""",
    "pip": 'case "$*" in *cache*list*) cat "$FOLDER/cached";; *xllamacpp*) test -e "$FOLDER/wheels";; esac',
    "npm": "",
    "uname": "echo Linux x86_64",
    "sleep": "",
}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@dataclass
class Workshop:
    """Runs the Makefile's rules with programs that install nothing, and nothing of the shell that started the tests."""

    folder: Path

    def __post_init__(self) -> None:
        (bin := self.folder / "bin").mkdir()
        (self.folder / "cached").touch()
        (self.folder / "cards").write_text("cpu\n")
        for name in REAL:
            (bin / name).symlink_to(shutil.which(name) or name)
        for name, does in MADE.items():
            self.put(bin / name, does)

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    def put(self, program: Path, does: str) -> None:
        """Put a program somewhere: lines of a shell."""
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{program.name} $*" >> "$FOLDER/calls"\n{does}\n')
        program.chmod(0o755)

    def make(self, target: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Make a target, of VENV if it begins with a dot."""
        make, bin = shutil.which("make"), self.folder / "bin"
        goal = str(self.venv / target) if target.startswith(".") else target
        given = {"VENV": self.venv, "PYTHON": bin / "python"} | variables
        command = [str(make), goal, *(f"{name}={value}" for name, value in given.items())]
        environment = {"PATH": str(bin), "FOLDER": str(self.folder)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """Return the calls so far."""
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@needs_make
@pytest.mark.parametrize("index", ["", "https://abetlen.github.io/llama-cpp-python/whl/cu128"])
def test_the_makefile_installs_the_engine_that_pyproject_names(workshop: Workshop, index: str) -> None:
    """From its sources, or as a wheel of an index that is named."""
    (engine,) = PROJECT["optional-dependencies"]["llama"]
    ran = workshop.make("install", ENGINE_INDEX=index)
    assert ran.returncode == 0, ran.stderr
    wheel = f" --only-binary llama-cpp-python --extra-index-url {index}" if index else ""
    (call,) = [call for call in workshop.calls() if call.startswith("pip install --verbose")]
    assert call.rstrip() == f"pip install --verbose {engine}{wheel}"
    assert engine not in (ROOT / "Makefile").read_text()


def test_prebuilt_libraries_are_pinned_to_the_byte_or_the_version() -> None:
    versions = set()
    for build in sorted(path for path in (ROOT / "prebuilt").iterdir() if path.is_dir()):
        asked = json.loads((build / "package.json").read_text())["dependencies"]
        locked = json.loads((build / "package-lock.json").read_text())["packages"]
        assert {f"node_modules/{name}": version for name, version in asked.items()} == {
            place: row["version"] for place, row in locked.items() if place and row["integrity"].startswith("sha512-")
        }
        versions |= set(asked.values())
    assert len(versions) == 1, "one version of llama.cpp"
    (wheel,) = PROJECT["optional-dependencies"]["prebuilt"]
    assert re.fullmatch(r"xllamacpp==[\d.]+", wheel)
    assert not any("llama" in name for name in PROJECT["dependencies"])


@needs_make
@pytest.mark.parametrize("there", ["compiled", "cached", "asked", "npm", "wheels", ""])
def test_a_server_takes_what_is_compiled_before_what_is_prebuilt(workshop: Workshop, there: str) -> None:
    """Of all that could be taken the first: each case has what it names, and all behind it."""
    (engine,), (wheel,) = (PROJECT["optional-dependencies"][name] for name in ("llama", "prebuilt"))
    order = ["compiled", "cached", "asked", "npm", "wheels", ""]
    has = order[order.index(there) :]
    if "compiled" in has:
        workshop.put(workshop.venv / "bin/pip", MADE["pip"])
        (workshop.venv / ".engine").touch()
    if "cached" in has:
        (workshop.folder / "cached").write_text("llama_cpp_python-1-py3-none-linux_x86_64.whl\n")
    if "npm" not in has:
        (workshop.folder / "bin/npm").unlink()
    if "wheels" in has:
        (workshop.folder / "wheels").touch()
    ran = workshop.make(".serving", **({"CMAKE_ARGS": "-DGGML_CUDA=on"} if there == "asked" else {}))
    assert (ran.returncode == 0) == bool(there), ran.stderr
    taken = [call for call in workshop.calls() if re.match(r"npm |pip install .*(llama)", call)]
    compiled, npm, prebuilt = "pip install --verbose", "npm ci", "pip install --quiet --only-binary"
    wanted = {"compiled": [], "cached": [compiled], "asked": [compiled], "npm": [npm]}.get(there, [prebuilt])
    assert len(taken) == len(wanted) and all(map(str.startswith, taken, wanted)), taken
    assert all((engine if call.startswith(compiled) else wheel) in call for call in taken if not call.startswith(npm))
    assert there or "no llama.cpp: make native" in ran.stdout


@needs_make
@pytest.mark.parametrize(
    ("asked", "has", "fits", "taken"),
    [
        ("", ["card"], True, ["slotcache install auto"]),
        ("", ["card"], False, ["slotcache install auto", "npm ci"]),
        ("", ["card", "compiled"], True, []),
        ("", ["card", "flags"], True, ["pip install --verbose"]),
        ("auto", ["card", "compiled"], True, ["slotcache install auto"]),
        ("vulkan", ["card", "compiled"], True, ["slotcache install vulkan"]),
        ("vulkan", ["card", "compiled"], False, ["slotcache install vulkan"]),
        ("cpu", ["compiled"], True, []),
        ("cpu", [], True, ["npm ci"]),
    ],
)
def test_a_server_takes_a_build_for_a_card_where_one_is_found_or_asked_for(
    workshop: Workshop, asked: str, has: list[str], fits: bool, taken: list[str]
) -> None:
    if "card" in has:
        (workshop.folder / "cards").write_text("vulkan cpu\n")
    workshop.put(workshop.venv / "bin/pip", MADE["pip"])
    workshop.put(workshop.venv / "bin/slotcache", "exit 0" if fits else "exit 1")
    if "compiled" in has:
        (workshop.venv / ".engine").touch()
    (workshop.venv / "llama.cpp").mkdir()
    given = {"CMAKE_ARGS": "-DGGML_CUDA=on"} if "flags" in has else {}
    ran = workshop.make(".serving", LLAMA=asked, **given)
    assert ran.returncode == 0, ran.stderr
    calls = [call for call in workshop.calls() if re.match(r"npm |slotcache |pip install --verbose", call)]
    assert len(calls) == len(taken) and all(map(str.startswith, calls, taken)), calls
    kept = json.loads((workshop.venv / "llama.cpp/installed.json").read_text())
    assert kept["builds"] == [], "what was asked for before is no longer tried first"


@needs_make
def test_a_build_that_is_none_is_refused_and_forgotten(workshop: Workshop) -> None:
    (workshop.folder / "cards").unlink()  # so the program that knows the builds fails
    assert workshop.make(".serving", LLAMA="vulcan").returncode != 0
    assert list(workshop.venv.glob(".llama-*")) == []
    (workshop.folder / "cards").write_text("cpu\n")
    assert workshop.make(".serving").returncode == 0


@needs_make
def test_what_was_set_up_stays_until_another_build_is_asked_for(workshop: Workshop) -> None:
    def asked(name: str) -> list[str]:
        (workshop.folder / "calls").write_text("")
        workshop.put(workshop.venv / "bin/slotcache", "")
        (workshop.folder / "cards").write_text("cpu\n" if name in ("", "cpu") else f"{name} cpu\n")
        assert workshop.make(".serving", LLAMA=name).returncode == 0
        return [call for call in workshop.calls() if re.match(r"npm |slotcache ", call)]

    assert asked("vulkan") == ["slotcache install vulkan"]
    assert asked("vulkan") == [] == asked("")
    (workshop.venv / ".serving").unlink()  # as after a change of a lock
    (workshop.folder / "cards").write_text("vulkan cpu\n")
    assert workshop.make(".serving").returncode == 0 and workshop.calls()[-2] == "slotcache install vulkan"
    assert [call[:6] for call in asked("cpu")] == ["npm ci"] and asked("") == []
    assert asked("vulkan") == ["slotcache install vulkan"]
    (kept := workshop.venv / "llama.cpp/installed.json").parent.mkdir(exist_ok=True)
    kept.write_text('{"asked": "vulkan", "builds": ["vulkan"], "passed_over": {}}')
    assert workshop.make("native").returncode == 0 and json.loads(kept.read_text())["builds"] == []
    assert asked("") == [] and asked("vulkan") == ["slotcache install vulkan"]


@needs_make
@pytest.mark.parametrize(
    ("installed", "oldest", "reported"),
    [
        ("echo none", "echo none", ["none", "none"]),
        ("echo hole; exit 1", "echo none", ["hole", "none"]),
        ("echo none", "echo hole; exit 1", ["none", "hole"]),
        ("echo Traceback; exit 1", "", ["no audit: the index of holes, http://holes, cannot be had here"]),
    ],
)
def test_an_audit_asks_for_what_is_installed_and_for_each_lower_bound(
    workshop: Workshop, installed: str, oldest: str, reported: list[str]
) -> None:
    audits = f'case "$*" in *--path*) {installed};; *) {oldest};; esac >&2'
    workshop.put(workshop.venv / "audit/bin/pip-audit", audits)
    (workshop.venv / "bin").mkdir()
    (workshop.venv / "bin/python").symlink_to(sys.executable)
    for stamp in (".engine", ".installed", ".developing", ".auditing"):
        (workshop.venv / stamp).touch()
    ran = workshop.make("audit", HOLES="http://holes")
    assert ran.stdout.splitlines() == reported
    assert (ran.returncode == 0) == (reported == ["none", "none"])
    listed = dict(line.split("==") for line in (workshop.venv / "audit/oldest.txt").read_text().splitlines())
    asked = [*PROJECT["dependencies"], *(one for some in PROJECT["optional-dependencies"].values() for one in some)]
    assert set(listed) == {re.split(r"[^\w.-]", one)[0] for one in asked} and listed["ray"] == "2.56"
    assert all(f"{name}>={listed[name]}" in PROJECT["dependencies"] for name in ("starlette", "h11", "aiohttp"))


def test_a_package_has_one_lower_bound() -> None:
    """A second place for it is one that is forgotten when the first is raised."""
    asked = [one for some in PROJECT["optional-dependencies"].values() for one in some]
    names = [re.split(r"[^\w-]", one)[0] for one in (*PROJECT["dependencies"], *asked)]
    assert len(names) == len(set(names)), names


def test_a_container_is_built_from_every_room() -> None:
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {package.split(".")[1] for package in CONFIGURED["tool"]["setuptools"]["packages"]} <= kept
    assert {PROJECT["readme"], "pyproject.toml", "prebuilt"} <= kept


def test_every_tool_has_a_version() -> None:
    tools = PROJECT["optional-dependencies"]["dev"]
    assert all(re.fullmatch(r"[\w-]+(==|~=)\d+(\.\d+)+", tool) for tool in tools), tools


def test_ci_lints_before_it_tests() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make lint", "make test"]


def test_the_wheel_has_every_folder_of_the_rooms() -> None:
    rooms = {package.split(".")[1] for package in WHEEL["packages"]}
    folders = {path.parent.relative_to(ROOT) for room in rooms for path in (ROOT / room).rglob("*.py")}
    with_data = {Path("prebuilt")}  # and no code
    assert set(WHEEL["packages"]) == {".".join(("slotcache", *folder.parts)) for folder in folders | with_data}


def test_the_wheel_has_every_file_that_a_room_reads() -> None:
    """All that git keeps in a room, but for its code and its README."""
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    if kept == [""]:
        pytest.skip("no checkout of git")
    rooms = {package.split(".")[1] for package in WHEEL["packages"]}
    data = {
        path for path in map(Path, kept) if path.parts[:1] and path.parts[0] in rooms and path.suffix not in (".py", ".md")
    }
    packed = {
        path.relative_to(ROOT)
        for package, patterns in WHEEL["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    assert data <= packed, data - packed


def test_no_route_reads_its_path_from_a_url() -> None:
    """`request.url` is made of what the client says its host is: the path of a request is its scope's."""
    found = {
        str(path.relative_to(ROOT))
        for room in ("server", "front")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"request\.(url|base_url)\b", path.read_text())
    }
    assert not found


def test_structs_are_decoded_by_decoders_that_a_module_makes_when_it_is_loaded() -> None:
    """msgspec learns the fields of a struct at its first use, and two threads that do so at once end the process.

    `kind` is decoded under a lock, or by one thread; `Fields` is a dict.
    """
    rooms = {package.split(".")[1] for package in WHEEL["packages"]}
    call = re.compile(r"\.decode\([^\n]*\btype=(\w+)\)")
    found = {
        f"{path.relative_to(ROOT)}: {kind}"
        for room in rooms - {"bench"}
        for path in (ROOT / room).rglob("*.py")
        for kind in call.findall(path.read_text())
        if kind not in ("kind", "Fields")
    }
    assert not found
