"""Simulated figures: hit rates, and what a queue groups."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from slotcache.bench.cli import main
from slotcache.bench.offline.replacement import Accesses, Foresight, hit_rates, skewed
from slotcache.slots.eviction import POLICIES, EvictionPolicy


def test_hit_rates_equal_counting_by_hand() -> None:
    blocks = {name: np.arange(start, start + 10, dtype=np.int32) for name, start in (("a", 0), ("b", 10), ("c", 20))}
    trace = Accesses("by hand", [(blocks[name], ()) for name in "abcab"])
    # The last block of a prompt is computed again each time, so 9 of 10 are found.
    assert hit_rates(trace, 100, EvictionPolicy("lru"))[0] == 18 / 50
    assert hit_rates(trace, 10, EvictionPolicy("lru"))[0] == 0, "each has just left when it comes again"
    assert hit_rates(trace, 20, EvictionPolicy("lru"))[0] == hit_rates(trace, 20, Foresight(trace))[0] == 9 / 50


def test_no_policy_beats_foresight_and_more_room_is_never_worse() -> None:
    trace = skewed(requests=300, documents=60)
    best, _ = hit_rates(trace, 1500, Foresight(trace))
    for policy in POLICIES:
        small, large = (hit_rates(trace, capacity, EvictionPolicy(policy))[0] for capacity in (1500, 10**6))
        assert 0 < small <= best and small < large


def test_a_queue_groups_what_shares_documents(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert main(["queue", "--waiting", "64", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (table,) = report["tables"]
    retrieval, exact, few, usual = (row[2] for row in table["rows"])
    assert retrieval < exact < min(few, usual)
    assert all(bar["met"] for bar in report["bars"])
