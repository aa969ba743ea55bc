"""The scenarios without a server, on small inputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from slotcache.bench.cli import main
from slotcache.bench.offline.replacement import Accesses, Foresight, hit_rate, skewed
from slotcache.bench.random_models import built_in_model
from slotcache.slots.eviction import POLICIES, EvictionPolicy


def test_residency_measures_moves_and_idle_cells(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    sizes = ["--idle", "0,1024", "--lengths", "50,200", "--streams", "1,2", "--prompt-tokens", "64", "--steps", "2"]
    assert main(["residency", "-m", str(built_in_model()), *sizes, "--repeats", "1", "-t", "1", "--json", str(out)]) == 0
    data = json.loads(out.read_text())["data"]
    assert [row["tokens"] for row in data["moves"]] == [50, 200]
    assert data["moves"][1]["bytes"] > data["moves"][0]["bytes"] > 0
    assert [row["idle_cells"] for row in data["steps"]] == [0, 1024]
    assert "KV to host memory and back" in capsys.readouterr().out


def test_hit_rates_equal_counting_by_hand() -> None:
    blocks = {name: np.arange(start, start + 10, dtype=np.int32) for name, start in (("a", 0), ("b", 10), ("c", 20))}
    trace = Accesses("by hand", [(blocks[name], ()) for name in "abcab"])
    # The last block of a prompt is computed again each time, so 9 of 10 are found.
    assert hit_rate(trace, 100, EvictionPolicy("lru")) == 18 / 50
    assert hit_rate(trace, 10, EvictionPolicy("lru")) == 0, "each has just left when it comes again"
    assert hit_rate(trace, 20, EvictionPolicy("lru")) == hit_rate(trace, 20, Foresight(trace)) == 9 / 50


def test_no_policy_beats_foresight_and_more_room_is_never_worse() -> None:
    trace = skewed(requests=300, documents=60)
    best = hit_rate(trace, 1500, Foresight(trace))
    for policy in POLICIES:
        small, large = (hit_rate(trace, capacity, EvictionPolicy(policy)) for capacity in (1500, 10**6))
        assert 0 < small <= best and small < large


def test_replacement_runs_on_the_trace_it_makes_itself(tmp_path: Path, capsys: Any) -> None:
    written = tmp_path / "out.json"
    assert main(["replacement", "--data", str(tmp_path / "none"), "--requests", "200", "--json", str(written)]) == 0
    assert json.loads(written.read_text())["scenario"] == "replacement"
    out = capsys.readouterr().out
    assert "skewed: hit rate by tokens" in out and "MT-RAG" not in out and "bar 2" in out


def test_a_queue_groups_what_shares_documents(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert main(["queue", "--waiting", "64", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (table,) = report["tables"]
    retrieval, exact, few, usual = (row[2] for row in table["rows"])
    assert retrieval < exact < min(few, usual)
    assert all(bar["met"] for bar in report["bars"])


def test_a_batch_computes_less_in_the_planned_order(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert main(["batch", "--requests", "100", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (table,) = report["tables"]
    retrieval, as_they_came, ahead, planned = (row[1] for row in table["rows"])
    assert planned < ahead < as_they_came < retrieval
    assert all(bar["met"] for bar in report["bars"])


def test_each_request_and_each_chunk_is_timed_with_a_front_and_without(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    few = ["--requests", "3", "--chunks", "7", "--gap", "1", "--rounds", "2"]
    assert main(["relay", *few, "--json", str(written)]) == 0
    arms = json.loads(written.read_text())["data"]["arms"]
    assert [[len(values) for values in arm.values()] for arm in arms.values()] == [[6, 6, 14]] * 3
    assert all(value > 0 for arm in arms.values() for values in arm.values() for value in values)
