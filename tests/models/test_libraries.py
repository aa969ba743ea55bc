"""The libraries of llama.cpp on one machine, timed side by side: the table's shape, and what is said to be faster."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from slotcache.models import builds, cards, libraries, llama
from slotcache.models.demo import FILE
from slotcache.models.libraries import LibrarySpeed
from slotcache.models.llama import Library
from slotcache.server.cli import main
from support.on_device import needs_cpu

from models.test_llama import LIBRARY, starts

NUMBERS = r"\d[\d,]*/s +\(\d+\.\d\d\) +\d[\d,]*/s +\(\d+\.\d\d\)"
OTHER, THIRD = Library(Path("/other"), "npm", "3.22.1"), Library(Path("/third"), "xllamacpp", "1")


def test_doctor_times_the_library_in_use_and_says_why_another_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "same").symlink_to(LIBRARY.parent)
    code = "import sys; from slotcache.server.cli import main; sys.exit(main(['doctor', '--time', '-t', '1']))"
    done = starts(
        tmp_path / "same", code, LLAMA_CPP_LIB_PATH=str(tmp_path / "empty"), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout[done.stdout.index("Tokens a second") :].splitlines()
    assert title == "Tokens a second with slotcache-demo.gguf on 1 threads: prefill of 512, then decode one at a time:"
    rows = {line.split()[0]: line for line in lines}
    assert re.fullmatch(rf"  SLOTCACHE_LLAMA \S+ +{NUMBERS}  in use", rows["SLOTCACHE_LLAMA"])
    assert "not timed: llama.cpp of SLOTCACHE_LLAMA is refused: " in rows["LLAMA_CPP_LIB_PATH"]
    assert lines[-1].startswith("faster: ")
    first, *others = [line for line in done.stderr.splitlines() if "round 2 of 3" in line]
    assert first == f"  round 2 of 3: {rows['SLOTCACHE_LLAMA'].split('  ')[1]}"
    assert not any("LLAMA_CPP_LIB_PATH" in line for line in others), "a library that is refused is tried once"


def test_a_library_that_is_installed_is_found_once_and_with_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "npm")
    package, npm = tmp_path / "xllamacpp", builds.package_folder("cpu")
    package.mkdir()
    npm.mkdir(parents=True)
    (package / "__init__.py").touch()
    (npm / "package.json").write_text(json.dumps({"version": "3.22.1"}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(llama, "find_spec", lambda name: None if name == "llama_cpp" else find_spec(name))
    monkeypatch.setenv("SLOTCACHE_LLAMA", str(LIBRARY.parent))
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    found = libraries.installed()
    assert found[0] == llama.LIBRARY and [str(one).split()[0] for one in found[1:]] == ["xllamacpp", "npm"]
    assert found[1].path == package and str(found[2]) == "npm 3.22.1"


def test_a_process_that_ends_early_is_a_line(tmp_path, monkeypatch):
    for code, reason in (
        ("import os; os._exit(7)", "ended with code 7"),
        ("raise ValueError('no such tensor')", "no such tensor"),
    ):
        monkeypatch.setattr(libraries, "command", lambda *_, code=code: [sys.executable, "-c", code])
        assert libraries._speed(llama.LIBRARY, tmp_path, 1, (0, *libraries.AS_LLAMA_CPP)) == LibrarySpeed(refused=reason)


@pytest.mark.parametrize(
    "speeds, best",
    [
        ({OTHER: LibrarySpeed(2000, 100)}, OTHER),
        (
            {OTHER: LibrarySpeed(1020, 51), THIRD: LibrarySpeed(refused="too old")},
            None,
        ),  # within what one run differs from the next
        ({OTHER: LibrarySpeed(1500, 75), THIRD: LibrarySpeed(3000, 150)}, THIRD),
    ],
)
def test_the_fastest_is_named_if_it_is_clearly_faster(speeds, best):
    assert libraries.faster({llama.LIBRARY: LibrarySpeed(1000, 50), **speeds}) == best
    assert libraries.faster({llama.LIBRARY: LibrarySpeed(refused="fails"), **speeds}) is None


def test_the_table_has_shares_of_the_library_in_use():
    lines = libraries.as_table(
        {llama.LIBRARY: LibrarySpeed(1000, 50), OTHER: LibrarySpeed(500, 60), THIRD: LibrarySpeed(refused="too old")}
    )
    assert [re.findall(r"\(([\d.]+)\)", line) for line in lines[1:]] == [["1.00", "1.00"], ["0.50", "1.20"], []]
    assert lines[3].split("  ")[0] == "xllamacpp 1" and lines[3].endswith("not timed: too old")
    assert LibrarySpeed(10, 5).best(LibrarySpeed(8, 6)) == LibrarySpeed(10, 6)
    refused = LibrarySpeed(refused="too old")
    assert LibrarySpeed(10, 5).best(refused) == refused == refused.best(LibrarySpeed(10, 5))


@pytest.fixture
def by_auto(tmp_path, monkeypatch):
    """This library as a build that `auto` chose for a card, before the first look at devices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "llama.cpp")
    builds.keep_installed(builds.InstalledBuilds("auto", ("vulkan",)))
    monkeypatch.setattr(llama, "LIBRARY", Library(LIBRARY, "npm-vulkan"))
    monkeypatch.setattr(llama, "PASSED_OVER", {})
    monkeypatch.setattr(libraries, "load_backends", cache(lambda: None))
    monkeypatch.setenv("SLOTCACHE_LLAMA", "")


@pytest.mark.parametrize(
    "card, cpu, is_hidden",
    [
        (LibrarySpeed(100, 10), LibrarySpeed(1000, 50), True),
        (LibrarySpeed(1000, 50), LibrarySpeed(100, 10), False),
        (LibrarySpeed(refused="out of memory"), LibrarySpeed(100, 10), False),
        (LibrarySpeed(1000, 50), LibrarySpeed(refused="timed out"), False),
    ],
)
def test_auto_keeps_a_card_only_if_it_is_faster_than_the_cpu(by_auto, monkeypatch, card, cpu, is_hidden):
    timed, given = [], dict.fromkeys(libraries.HIDDEN, "0") | {cards.NO_CARD: ""}

    def speed(library, model, threads, offload, *more):
        timed.append((offload[0], more[1:]))
        return card if offload[0] else cpu

    monkeypatch.setattr(libraries, "_speed", speed)
    for _ in range(2):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        libraries.hide_slower_card(FILE, 1)
        assert {name: os.environ[name] for name in given} == (libraries.HIDDEN if is_hidden else given)
        assert ("auto" in llama.PASSED_OVER) == is_hidden
    assert timed == [(-1, ()), (0, (libraries.HIDDEN,))][: 1 if card.refused else 2], "once, and the times are kept"


@pytest.mark.parametrize("asked", ["vulkan", "cpu"])
def test_a_card_that_was_asked_for_by_name_is_never_timed_against_the_cpu(by_auto, monkeypatch, asked):
    builds.keep_installed(builds.InstalledBuilds(asked, ("vulkan",)))
    monkeypatch.setattr(libraries, "_speed", None)
    libraries.hide_slower_card(FILE, 1)


def test_a_process_whose_cards_are_hidden_computes_on_the_cpu():
    speed = libraries._speed(llama.LIBRARY, FILE, 1, (0, *libraries.AS_LLAMA_CPP), libraries.PATIENCE, libraries.HIDDEN)
    assert speed.prefill > 0 and speed.decode > 0 and not speed.refused


@needs_cpu
@pytest.mark.parametrize(
    "flags, said",
    [
        (["-sm", "none", "-ts", "1,x"], "--tensor-split 1,x: expected a number for each device"),
        (["-dev", "CUDA7"], "--device CUDA7: expected none: there is no GPU"),
        (["-sm", "row", "-mg", "0", "-ts", "3,1"], ""),
    ],
)
def test_doctor_times_a_model_that_is_split_as_the_flags_say(capsys, monkeypatch, flags, said):
    monkeypatch.setattr(libraries, "installed", lambda: [llama.LIBRARY])
    monkeypatch.setattr(libraries, "ROUNDS", 1)
    assert main(["doctor", "--time", "-t", "1", *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("in use") or "not timed" in line]
    assert f"not timed: {said}" in line if said else re.search(NUMBERS, line)
