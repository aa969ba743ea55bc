"""Threads to compute with: one for each fast core that the process may use; and what of the CPU llama.cpp uses."""

import os
import re
from pathlib import Path

import pytest
from slotcache.models.hardware import fast_cores, unused_features, used_features


def system(folder: Path, siblings: dict[int, str], performance: str = "", quota: str = "max 100000") -> Path:
    for cpu, listed in siblings.items():
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{listed}\n")
    if performance:
        (folder / "devices/cpu_core").mkdir(parents=True)
        (folder / "devices/cpu_core/cpus").write_text(f"{performance}\n")
    (folder / "fs/cgroup").mkdir(parents=True)
    (folder / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
    return folder


PAIRS = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}
HYBRID = {**PAIRS, **{cpu: str(cpu) for cpu in range(8, 16)}}


@pytest.mark.parametrize(
    ("siblings", "performance", "quota", "usable", "threads"),
    [
        ({0: "0", 1: "1"}, "", "max 100000", range(2), 2),
        (PAIRS, "", "max 100000", range(8), 4),
        ({0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"}, "", "max 100000", range(4), 2),
        (PAIRS, "", "max 100000", (1, 2, 3), 2),
        (HYBRID, "0-7", "max 100000", range(16), 4),
        (HYBRID, "0-7", "max 100000", range(8, 16), 8),  # bound to the efficiency cores
        (PAIRS, "", "250000 100000", range(8), 2),
        (PAIRS, "", "50000 100000", range(8), 1),
        ({}, "", "", range(3), 3),  # a system that tells nothing
        ({0: "x"}, "", "1 2 3", range(1), 1),
    ],
)
def test_one_thread_for_each_fast_core(tmp_path, monkeypatch, siblings, performance, quota, usable, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable), raising=False)
    assert fast_cores(system(tmp_path, siblings, performance, quota)) == threads


def test_this_machine_has_as_many_cores_as_it_may_use():
    assert 1 <= fast_cores() <= len(os.sched_getaffinity(0))


def test_what_a_build_leaves_unused_of_a_cpu(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu sse3 avx avx2 fma f16c avx512f avx512_vnni\n")
    assert unused_features(["SSE3", "AVX2", "FMA", "F16C"], info) == ["AVX512", "AVX512_VNNI"]
    assert unused_features(["AVX512", "AVX512_VNNI", "AVX2", "FMA", "F16C"], info) == []
    assert unused_features([], tmp_path / "none") == []


def test_this_build_reports_what_it_was_compiled_for():
    assert used_features() and all(re.fullmatch(r"[A-Z]\w+", name) for name in used_features())
