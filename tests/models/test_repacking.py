"""The choice between weights as a file has them and weights in another layout."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from slotcache.models.hardware import repacking
from slotcache.models.hardware.repacking import is_faster_repacked
from slotcache.server.fitting import layout
from slotcache.server.fitting.layout import with_layout
from slotcache.server.settings import Settings


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(repacking, "SMALLEST", 0)


def kept(tmp_path):
    return list((tmp_path / "slotcache" / "times").glob("*.repack"))


def telling(code):
    """A child that runs this code."""
    return lambda *_: [sys.executable, "-c", code]


def test_both_layouts_are_timed_once_for_a_file(tiny, tmp_path, monkeypatch):
    chosen = is_faster_repacked(tiny, 1)
    (file,) = kept(tmp_path)
    plain, repacked = map(float, file.read_text().strip("[]").split(","))
    assert 0 < plain < 60 and 0 < repacked < 60 and chosen == (repacked < repacking.GAIN * plain)
    monkeypatch.setattr(repacking, "command", telling("raise SystemExit('asked again')"))
    assert is_faster_repacked(tiny, 1) is chosen and kept(tmp_path) == [file]


@pytest.mark.parametrize(
    ("code", "is_faster"),
    [
        ("print(2.0); print(1.0)", True),
        ("print(2.0); print(1.95)", False),
        ("print(1.0); print(2.0)", False),
        ("import os; print(2.0, flush=True); os.abort()", False),
        ("raise SystemExit(1)", False),
    ],
    ids=["faster", "hardly faster", "slower", "the kernel ends the process", "the file cannot be loaded"],
)
def test_weights_are_repacked_where_a_turn_takes_clearly_less_time(tiny, monkeypatch, code, is_faster):
    monkeypatch.setattr(repacking, "command", telling(code))
    assert [is_faster_repacked(tiny, 1) for _ in range(2)] == [is_faster, is_faster]


def test_a_damaged_file_of_times_is_measured_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "command", telling("print(2.0); print(1.0)"))
    assert is_faster_repacked(tiny, 1)
    for damage in ("", "[]", "{", '["x"]', "7"):
        kept(tmp_path)[0].write_text(damage)
        assert is_faster_repacked(tiny, 1), damage


def test_nothing_is_measured_where_exact_bits_are_promised_or_the_layout_is_chosen(tiny, monkeypatch):
    monkeypatch.setattr(layout, "is_faster_repacked", lambda *_: True)
    default = Settings()
    assert default.repack == "auto" and with_layout(default, tiny).repack == "on"
    assert with_layout(replace(default, flash_attn="off"), tiny).repack == "off"
    for chosen in ("on", "off"):
        assert with_layout(replace(default, repack=chosen), tiny).repack == chosen


def test_a_start_that_is_given_up_ends_the_child_and_keeps_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "command", telling("print(2.0, flush=True); import time; time.sleep(600)"))
    asked = iter([True, True, False, False])
    assert not is_faster_repacked(tiny, 1, lambda: next(asked)) and not kept(tmp_path)


def test_a_child_that_takes_too_long_leaves_the_weights_as_they_are(tiny, monkeypatch):
    monkeypatch.setattr(repacking, "PATIENCE", 0.3)
    monkeypatch.setattr(repacking, "command", telling("print(2.0, flush=True); import time; time.sleep(600)"))
    assert not is_faster_repacked(tiny, 1)
    monkeypatch.setattr(repacking, "command", telling("print(2.0); print(1.0)"))
    assert not is_faster_repacked(tiny, 1), "a start asked again"


def test_a_small_model_is_left_as_it_is(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(repacking, "SMALLEST", 64 << 20)
    assert not is_faster_repacked(tiny, 1) and not kept(tmp_path)
