"""The habits of the project: one place for each version, and a CI that checks before it tests."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURED = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, WHEEL = CONFIGURED["project"], CONFIGURED["tool"]["setuptools"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_makefile_installs_the_engine_that_pyproject_names(tmp_path: Path) -> None:
    (engine,) = PROJECT["optional-dependencies"]["llama"]
    command = ["make", "--dry-run", f"VENV={tmp_path}", "install"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"pip install --verbose {engine} " in printed
    assert engine not in (ROOT / "Makefile").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_makefile_takes_a_wheel_of_an_index_where_it_is_named(tmp_path: Path) -> None:
    index = "https://abetlen.github.io/llama-cpp-python/whl/cu128"
    command = ["make", "--dry-run", f"VENV={tmp_path}", "install"]
    plain, wheel = (
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for more in ([], [f"ENGINE_INDEX={index}"])
    )
    assert f" --only-binary llama-cpp-python --extra-index-url {index} >" in wheel
    assert "--only-binary" not in plain and "index-url" not in plain


def test_prebuilt_libraries_are_pinned_to_the_byte_or_the_version() -> None:
    asked = json.loads((ROOT / "prebuilt/package.json").read_text())["dependencies"]
    locked = json.loads((ROOT / "prebuilt/package-lock.json").read_text())["packages"]
    assert {f"node_modules/{name}": version for name, version in asked.items()} == {
        place: row["version"] for place, row in locked.items() if place and row["integrity"].startswith("sha512-")
    }
    (wheel,) = PROJECT["optional-dependencies"]["prebuilt"]
    assert re.fullmatch(r"xllamacpp==[\d.]+", wheel)
    assert not any("llama" in name for name in PROJECT["dependencies"])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_server_takes_what_is_compiled_before_what_is_prebuilt(tmp_path: Path) -> None:
    command = ["make", "--dry-run", f"VENV={tmp_path}", "serve"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (wheel,) = PROJECT["optional-dependencies"]["prebuilt"]
    steps = ["/.engine; then", "pip cache list", "pip install --verbose", "npm ci", f"xllamacpp {wheel};", "no llama.cpp:"]
    places = [printed.index(step) for step in steps]
    assert places == sorted(places)


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
    assert set(WHEEL["packages"]) == {".".join(("slotcache", *folder.parts)) for folder in folders}


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
