"""The trial of a library before it is used, and what makes one build another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slotcache.models import gate, llama, trial
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


def verdicts(folder: Path) -> list[Path]:
    """Those of the trial with a model; its process has kept another one, of loading the library."""
    return list(folder.glob("cache/slotcache/libraries/computes-*"))


def test_this_library_passes_and_is_tried_once(tmp_path, monkeypatch):
    gate.check()
    (kept,) = verdicts(tmp_path)
    assert kept.read_text() == trial.PASSED
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    gate.check()


def emptied(kept: Path) -> None:
    kept.write_bytes(b"")


def overwritten(kept: Path) -> None:
    kept.write_bytes(os.urandom(1 << 16))


def a_folder(kept: Path) -> None:
    kept.unlink()
    kept.mkdir()


@pytest.mark.parametrize("spoil", [emptied, overwritten, a_folder])
def test_a_verdict_that_was_spoilt_is_none(tmp_path, monkeypatch, spoil):
    gate.check()
    spoil(*verdicts(tmp_path))
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    with pytest.raises(ModelError, match="tried again"):
        gate.check()


def test_a_verdict_is_of_these_files_on_this_cpu(tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    shutil.copytree(LIBRARY.parent, folder)
    tried = f"open({str(tmp_path / 'tried')!r}, 'a').write('.'); print('passed')"

    def times() -> int:
        assert trial.failure(folder / LIBRARY.name, "computes", [sys.executable, "-c", tried]) == ""
        return len((tmp_path / "tried").read_text())

    assert (times(), times()) == (1, 1)
    monkeypatch.setattr(trial, "instructions", lambda: ["avx2"])  # a home that two machines share
    assert (times(), times()) == (2, 2)
    with (folder / "libggml-of-another.so").open("w"):
        assert (times(), times()) == (3, 3)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    assert (times(), times()) == (4, 4)
    assert len(verdicts(tmp_path)) == 4


def test_kv_is_of_this_cpu(monkeypatch):
    here = gate.identity.__wrapped__()
    assert here == gate.identity()
    monkeypatch.setattr(gate, "instructions", lambda: ["avx2"])
    assert gate.identity.__wrapped__() != here


@pytest.mark.parametrize(
    "info, found",
    [
        (
            "model name\t: A\nflags\t\t: fpu sse2 ibrs avx2 avx512f stibp fma\nflags\t\t: none",
            ["avx2", "avx512f", "fma", "sse2"],
        ),
        ("processor\t: 0\nFeatures\t: fp asimd sve\nCPU part\t: 0xd40", ["asimd", "fp", "sve"]),
        ("", [trial.platform.processor()]),
    ],
)
def test_the_instructions_of_a_cpu(tmp_path, info, found):
    (tmp_path / "cpuinfo").write_text(info)
    assert trial.instructions(tmp_path / "cpuinfo") == found


def test_without_a_cache_folder_it_is_tried_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    gate.check()
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    with pytest.raises(ModelError, match="tried again"):
        gate.check()


def test_processes_that_start_at_once_keep_one_verdict(tmp_path):
    code = "from slotcache.models import gate; gate.check()"
    start = gate.command("models.gate")
    start[start.index("-c") + 1] = start[start.index("-c") + 1].partition("import_module(sys.argv[2])")[0] + code
    children = [subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(3)]
    assert [child.communicate() for child in children] == [(b"", None)] * 3
    assert len(verdicts(tmp_path)) == 1


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os; os.abort()", "ended the process: Aborted"),
        ("raise SystemExit('it is computed wrongly')", "it is computed wrongly"),
        ("import sys; print('passed'); sys.exit('no such symbol')", "no such symbol"),
        ("print('noise')", "noise"),
        ("pass", "ended the process without a word"),
        ("import sys; print(sys.stdin.read()); sys.exit('reads')", "reads"),
    ],
)
def test_a_library_that_fails_is_refused_in_one_line_each_time(tmp_path, monkeypatch, code, reason):
    monkeypatch.setattr(gate, "command", ending(code))
    for _ in range(2):
        with pytest.raises(ModelError) as refused:
            gate.check()
        where = f"llama.cpp of {llama.LIBRARY} is refused: {LIBRARY}"
        assert str(refused.value) == f"{where} fails a trial with a small model: {reason}; {llama.REMEDY}"
    assert not verdicts(tmp_path)


def test_what_a_library_prints_is_no_verdict(monkeypatch):
    monkeypatch.setattr(gate, "command", ending("print('at first'); print('passed'); print('at its end')"))
    gate.check()


def test_kv_that_comes_back_otherwise_is_seen(monkeypatch):
    restore = llama.llama_state_seq_set_data_ext

    def restored_otherwise(context, source, size, sequence, flags):
        data = np.ctypeslib.as_array((llama.ctypes.c_uint8 * size).from_address(source))
        data[-64:] ^= 1
        return restore(context, source, size, sequence, flags)

    assert gate.trial() == trial.PASSED
    monkeypatch.setattr(llama, "llama_state_seq_set_data_ext", restored_otherwise)
    assert gate.trial() == "KV does not come back as it was saved"


def test_a_sampler_that_chooses_otherwise_is_seen(monkeypatch):
    monkeypatch.setattr(llama, "llama_sampler_apply", lambda *_: None)
    assert gate.trial() == "it is computed wrongly"


def test_a_build_is_known_by_its_bytes_and_not_by_its_place(tmp_path):
    same, other = (shutil.copytree(LIBRARY.parent, tmp_path / name) for name in ("same", "other"))
    with (other / LIBRARY.name).open("ab") as file:
        file.write(b"built anew")
    code = "from slotcache.models.gate import identity; print(identity())"
    told = [starts(folder, code).stdout.strip() for folder in (same, other)]
    assert told[0] == gate.identity() != told[1] != ""


@pytest.mark.skipif(llama.LIBRARY.origin != "llama-cpp-python", reason="a library with libggml-cpu.so beside it")
def test_a_part_that_was_cut_short_is_refused_before_this_process_needs_it(tmp_path):
    folder = tmp_path / "lib"
    shutil.copytree(LIBRARY.parent, folder)
    part = folder / "libggml-cpu.so.0"
    os.truncate(part, part.stat().st_size // 2)
    done = starts(folder, "import sys; from slotcache.server.cli import main; sys.exit(main(['doctor']))")
    assert done.returncode == 2 and "libllama.so cannot be loaded: " in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_trial_as_a_process_prints_its_result():
    done = subprocess.run(gate.command("models.gate"), capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == trial.PASSED
