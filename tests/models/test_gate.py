"""The trial of a library before it is used, and what makes one build another one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
from slotcache.models import gate, llama
from slotcache.models.errors import ModelError

from models.test_llama import LIBRARY, starts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gate.check.cache_clear()
    yield
    gate.check.cache_clear()


def ending(code: str):
    """A child that runs this code instead of the trial."""
    return lambda *_: [sys.executable, "-c", code]


def test_this_library_passes_and_is_tried_once(tmp_path, monkeypatch):
    gate.check()
    (kept,) = (tmp_path / "cache/slotcache/libraries").iterdir()
    assert kept.name == gate.identity() and kept.read_text() == str(llama.LIBRARY)
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    gate.check()


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os; os.abort()", "ended a small model's process: Aborted"),
        ("print('noise'); print('computes a small model wrongly')", "computes a small model wrongly"),
        ("raise SystemExit('no such symbol')", "no such symbol"),
        ("pass", "could not be tried"),
    ],
)
def test_a_library_that_fails_is_refused_in_one_line_each_time(tmp_path, monkeypatch, code, reason):
    monkeypatch.setattr(gate, "command", ending(code))
    for _ in range(2):
        with pytest.raises(ModelError) as refused:
            gate.check()
        assert str(refused.value) == f"llama.cpp of {llama.LIBRARY} is refused: {LIBRARY} {reason}; {llama.REMEDY}"
    assert not (tmp_path / "cache/slotcache/libraries").exists()


def test_kv_that_comes_back_otherwise_is_seen(monkeypatch):
    restore = llama.llama_state_seq_set_data_ext

    def restored_otherwise(context, source, size, sequence, flags):
        data = np.ctypeslib.as_array((llama.ctypes.c_uint8 * size).from_address(source))
        data[-64:] ^= 1
        return restore(context, source, size, sequence, flags)

    assert gate.trial() == gate.PASSED
    monkeypatch.setattr(llama, "llama_state_seq_set_data_ext", restored_otherwise)
    assert gate.trial() == "does not restore KV as it was saved"


def test_a_sampler_that_chooses_otherwise_is_seen(monkeypatch):
    monkeypatch.setattr(llama, "llama_sampler_apply", lambda *_: None)
    assert gate.trial() == "computes a small model wrongly"


def test_a_build_is_known_by_its_bytes_and_not_by_its_place(tmp_path):
    same, other = (shutil.copytree(LIBRARY.parent, tmp_path / name) for name in ("same", "other"))
    with (other / LIBRARY.name).open("ab") as file:
        file.write(b"built anew")
    code = "from slotcache.models.gate import identity; print(identity())"
    told = [starts(folder, code).stdout.strip() for folder in (same, other)]
    assert told[0] == gate.identity() != told[1] != ""


def test_the_trial_as_a_process_prints_its_result():
    assert (
        subprocess.run(gate.command("models.gate"), capture_output=True, text=True, timeout=300).stdout.splitlines()[-1]
        == gate.PASSED
    )
