"""Greedy answers beside another server: here the same server under another name."""

import stat
import sys
from pathlib import Path
from typing import Any

from slotcache.bench.cli import main
from slotcache.bench.scenarios.equality import Answer, _equal, _partings
from slotcache.models.demo import FILE as MODEL

SIZES = ["-m", str(MODEL), "-c", "2048", "-t", "1", "--prompts", "2", "--max-tokens", "8"]


def test_a_server_answers_as_itself_with_a_cache_and_without(tmp_path: Path, capsys: Any) -> None:
    peer = tmp_path / "llama-server"
    peer.write_text(f'#!/bin/sh\nexec {sys.executable} -m slotcache.server.cli serve "$@"\n')
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    assert main(["equality", *SIZES, "--llama-server", str(peer)]) == 0
    printed = capsys.readouterr().out
    assert "without a cache: 1.00 (at least 0.95) met" in printed
    assert "with the cache 100% of the answers are those without it; it had 9" in printed


def test_it_tells_where_answers_part_and_how_sure_both_were() -> None:
    one, other = Answer([1, 2, 3], [2.0, 0.5, 1.0], 300, 0), Answer([1, 4], [2.0, 0.25], 300, 0)
    longer = Answer([1, 2, 3, 4], [2.0] * 4, 300, 0)
    assert list(_partings("x", [one, one], [other, one])) == [("x", 0, 300, 1, 0.5, 0.25)]
    assert [row[3] for row in _partings("x", [one], [longer])] == [3]
    assert _equal([one, one], [other, one]) == 0.5


def test_it_needs_another_server(capsys: Any) -> None:
    assert main(["equality", *SIZES]) == 2
    assert "--llama-server PATH" in capsys.readouterr().err
