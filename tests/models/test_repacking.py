"""The choice between weights as a file has them and weights in another layout."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slotcache.models import repacking
from slotcache.models.errors import ModelError
from slotcache.models.model_files import files_of
from slotcache.models.repacking import is_faster_repacked
from slotcache.server.config.settings import Settings
from slotcache.server.engine import fit
from slotcache.server.engine.fit import with_layout
from support.on_device import needs_cpu
from support.parts import split


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(repacking, "SMALLEST", 0)


def kept(tmp_path):
    return list((tmp_path / "slotcache" / "times").glob("*.repack"))


def answering(code):
    """A child that runs this code."""
    return lambda *_: [sys.executable, "-c", code]


@pytest.fixture(scope="module")
def is_forbidden(tiny):
    """Whether repacked weights end the process: some virtual machines report AMX, and forbid its use."""
    child = repacking.command("models.repacking", str(tiny), "1")
    return subprocess.run(child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == -signal.SIGILL


def test_both_layouts_are_timed_once_for_a_file(tiny, tmp_path, monkeypatch, is_forbidden):
    chosen = is_faster_repacked(tiny, 1)
    (file,) = kept(tmp_path)
    if is_forbidden:
        assert not chosen and file.read_text() == "[0.0]"
    else:
        plain, repacked = map(float, file.read_text().strip("[]").split(","))
        assert 0 < plain < 60 and 0 < repacked < 60 and chosen == (repacked < repacking.GAIN * plain)
    monkeypatch.setattr(repacking, "command", answering("raise SystemExit('asked again')"))
    assert is_faster_repacked(tiny, 1) is chosen and kept(tmp_path) == [file]


@pytest.mark.parametrize(
    ("code", "is_faster"),
    [
        ("print(2.0); print(1.0)", True),
        ("print(2.0); print(1.95)", False),
        ("print(1.0); print(2.0)", False),
        ("import os; print(2.0, flush=True); os.abort()", False),
        ("raise SystemExit(1)", False),
        ("print('a library greets'); print(2.0); print(1.0)", False),
    ],
    ids=["faster", "hardly faster", "slower", "the kernel ends the process", "the file cannot be loaded", "no times"],
)
def test_weights_are_repacked_where_a_turn_takes_clearly_less_time(tiny, monkeypatch, code, is_faster):
    monkeypatch.setattr(repacking, "command", answering(code))
    assert [is_faster_repacked(tiny, 1) for _ in range(2)] == [is_faster, is_faster]


@pytest.mark.parametrize(("enough", "reported"), [(60.0, "3.0 2.0\n"), (0.0, "3.0 4.0\n")], ids=["all rounds", "slow model"])
def test_the_layouts_take_turns_and_the_fastest_turns_count(monkeypatch, capsys, enough, reported):
    """A machine that slows down after a time shows it in both."""
    times = iter([3.0, 4.0, 5.0, 2.0, 9.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(repacking, "_runner", lambda path, threads, repack: repack)
    monkeypatch.setattr(repacking, "_turn", lambda repack: next(times))
    monkeypatch.setattr(repacking, "ENOUGH", enough)
    repacking.main("model.gguf", "2")
    assert capsys.readouterr().out == reported


def test_a_damaged_file_of_times_is_measured_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "command", answering("print(2.0); print(1.0)"))
    assert is_faster_repacked(tiny, 1)
    for damage in ("", "[]", "{", '["x"]', "7", "[" * 10**5, f"[{'9' * 400}]"):
        kept(tmp_path)[0].write_text(damage)
        assert is_faster_repacked(tiny, 1), damage


def test_a_file_of_times_that_is_none_is_not_waited_for(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "command", answering("print(2.0); print(1.0)"))
    assert is_faster_repacked(tiny, 1)
    (file,) = kept(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert is_faster_repacked(tiny, 1)
    file.unlink()
    file.symlink_to("/dev/zero")
    assert is_faster_repacked(tiny, 1)


def test_the_child_imports_nothing_of_the_folder_that_the_server_is_started_in(tiny, tmp_path, monkeypatch, is_forbidden):
    if is_forbidden:
        pytest.skip("repacked weights end the process on this machine, as a foreign module would")
    (tmp_path / "numpy.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    is_faster_repacked(tiny, 1)
    assert len(kept(tmp_path)[0].read_text().split(",")) == 2


def test_a_machine_that_starts_no_process_leaves_the_weights_as_they_are(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert not is_faster_repacked(tiny, 1) and not kept(tmp_path)


def test_all_parts_of_a_split_model_count(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "command", answering("print(2.0); print(1.0)"))
    first = split(tiny, tmp_path / "model.gguf")
    parts = files_of(first)
    size = sum(part.stat().st_size for part in parts)
    monkeypatch.setattr(repacking, "free_memory", lambda: 2 * size - 1)
    assert not is_faster_repacked(first, 1) and not kept(tmp_path), "two copies do not fit"
    monkeypatch.setattr(repacking, "free_memory", lambda: 2 * size)
    monkeypatch.setattr(repacking, "SMALLEST", size)
    assert is_faster_repacked(first, 1) and len(kept(tmp_path)) == 1
    os.utime(parts[-1])
    assert is_faster_repacked(first, 1) and len(kept(tmp_path)) == 2, "another file is another model"


def test_a_file_that_is_no_model_is_not_measured(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot read the model"):
            is_faster_repacked(path, 1)


@needs_cpu
def test_nothing_is_measured_where_exact_bits_are_promised_or_the_layout_is_chosen(tiny, monkeypatch):
    monkeypatch.setattr(fit, "is_faster_repacked", lambda *_: True)
    default = Settings()
    assert default.repack == "auto" and with_layout(default, tiny).repack == "on"
    assert with_layout(replace(default, flash_attn="off"), tiny).repack == "off"
    for chosen in ("on", "off"):
        assert with_layout(replace(default, repack=chosen), tiny).repack == chosen


@needs_cpu
def test_a_later_start_has_the_layout_of_the_kv_in_its_folder(tiny, tmp_path, monkeypatch):
    """The choice depends on free memory, and KV of the one layout is not found with the other."""
    choices = iter([True, False, True])
    monkeypatch.setattr(fit, "is_faster_repacked", lambda *_: next(choices))
    settings = Settings(cache_dir=str(tmp_path / "kv"))
    copy = Path(shutil.copy(tiny, tmp_path / "copy.gguf"))
    assert [with_layout(settings, path).repack for path in (tiny, tiny, copy)] == ["on"] * 3
    monkeypatch.setattr(repacking, "free_memory", lambda: 1)
    assert with_layout(settings, tiny).repack == "off", "the weights do not fit"
    monkeypatch.setattr(repacking.gate, "identity", lambda: "another library")
    assert [with_layout(settings, tiny).repack for _ in range(2)] == ["off"] * 2
    for kept in (tmp_path / "kv" / "layouts").iterdir():
        kept.write_text("neither")
    assert with_layout(settings, tiny).repack == "on"


@needs_cpu
def test_a_start_that_is_given_up_keeps_no_layout(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "is_faster_repacked", lambda *_: False)
    assert with_layout(Settings(cache_dir=str(tmp_path)), tiny, lambda share, doing="": False).repack == "off"
    assert not (tmp_path / "layouts").exists()


def test_a_start_that_is_given_up_ends_the_child_and_keeps_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "command", answering("print(2.0, flush=True); import time; time.sleep(600)"))
    asked = iter([True, True, False, False])
    assert not is_faster_repacked(tiny, 1, lambda: next(asked)) and not kept(tmp_path)


def test_a_child_that_takes_too_long_leaves_the_weights_as_they_are(tiny, monkeypatch):
    monkeypatch.setattr(repacking, "PATIENCE", 0.3)
    monkeypatch.setattr(repacking, "command", answering("print(2.0, flush=True); import time; time.sleep(600)"))
    assert not is_faster_repacked(tiny, 1)
    monkeypatch.setattr(repacking, "command", answering("print(2.0); print(1.0)"))
    assert not is_faster_repacked(tiny, 1), "a start asked again"


def test_a_small_model_is_left_as_it_is(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "SMALLEST", 64 << 20)
    assert not is_faster_repacked(tiny, 1) and not kept(tmp_path)
