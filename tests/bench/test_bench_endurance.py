"""Faults, rude clients and mixed load: what is complained of, for outcomes that deserve it, and on real servers."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server.conftest import running
from slotcache.bench import rude
from slotcache.bench.cli import main
from slotcache.bench.faulty import FAULTS
from slotcache.bench.rude import ACTS, Ending, Health, Visitor
from slotcache.bench.scenarios import endurance
from slotcache.bench.scenarios.endurance import TRIALS, Stage, Trial, complaints, faults, report
from slotcache.models.demo import FILE as MODEL

RIGHT = Ending("?", 200, "yes", 1, done=True)
FAILED = Ending("?", 200, "y", 1, done=True, error="the engine failed")
PLAIN = Trial(faults)


def stage(*beside: Ending, health: tuple[int | None, ...] = (200,), at: float = 0.0, **more: Any) -> Stage:
    """Return what was seen of an attack whose quiet run was right."""
    nobody: Any = None
    return Stage(nobody, nobody, quiet=[RIGHT], beside=beside, health=Health([(at, one) for one in health]), **more)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Ending("?", 200, "no", 1, done=True), "another answer"),
        (Ending("?", 200, "yes", 0), "0 final events"),
        (Ending("?", 200, "yes", 2, done=True), "2 final events"),
        (Ending("?", 200, "yes", 1), "1 final events"),
        (FAILED, "a request failed"),
        (Ending("?", error="refused", refused=True), "there was no server"),
        (Ending("?", 200, "yes", 1, done=True, arrivals=[0.0, 9.0]), "paused for 9.00 s"),
    ],
    ids=["text", "none", "two", "no end", "failed", "refused", "gap"],
)
def test_a_bystander_who_is_hurt_complains(wrong: Ending, says: str) -> None:
    assert complaints(PLAIN, stage(RIGHT)) == []
    (said,) = complaints(PLAIN, stage(RIGHT, wrong))
    assert says in said


@pytest.mark.parametrize("name", ["memory", "descriptors", "log"])
def test_a_server_that_keeps_too_much_is_complained_of(name: str) -> None:
    more: dict[str, Any] = {"memory": [50.0, 151.0], "descriptors": 11, "log": 101.0}
    (said,) = complaints(PLAIN, stage(RIGHT, **{name: more[name]}))
    assert "more" in said


def test_health_and_the_end_of_a_server_are_judged() -> None:
    assert complaints(PLAIN, stage(RIGHT, health=(200, None))) == ["health said nothing"]
    assert "ended with code 3" in complaints(PLAIN, stage(RIGHT, code=3))[0]
    killed = TRIALS["killed"]
    assert complaints(killed, stage(RIGHT, FAILED, health=(503, 0), code=1, at=99.0)) == []
    assert "of a server that cannot go on" in complaints(killed, stage(FAILED, code=1, at=99.0))[0]
    assert all("did not end" in complaints(killed, stage(FAILED, code=code))[0] for code in (None, 0))


def test_requests_that_ran_at_a_fault_may_fail_and_no_more() -> None:
    one = Trial(faults, may_fail=1)
    assert complaints(one, stage(RIGHT, FAILED)) == []
    assert complaints(one, stage(FAILED, FAILED)) == ["a request failed: the engine failed"]


def test_a_reader_counts_every_end() -> None:
    reader = Ending("?")
    for event in ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}, {"error": {"message": "no"}}):
        reader.read(b"data: " + json.dumps(event).encode() + b"\n")
    reader.read(b"data: [DONE]\n")
    assert (reader.finals, reader.done, reader.error, reader.text) == (2, True, "no", "a")


def test_memory_of_a_mixed_load_is_compared_with_its_first_quarter() -> None:
    steady = stage(memory=[90.0, 100.0, 80.0, 100.0, 104.0, 95.0, 96.0, 97.0])
    assert steady.steadiness == 1.04 and steady.growth == 14.0
    (_, _, bar) = report({"mixed": (steady, [])}).bars
    assert bar.measured == 1.04 and bar.is_met


def test_each_fault_finds_what_it_breaks() -> None:
    """In a process of its own: the faults replace functions of the server."""
    program = "from slotcache.bench.faulty import FAULTS, Trigger\nfor fault in FAULTS.values(): fault(Trigger())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert {trial.fault for trial in TRIALS.values()} <= set(FAULTS)


def test_bystanders_of_real_faults_are_not_hurt(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Small trials. `make endurance` has the whole ones, and looks at the clock: this machine may be busy."""
    for name in ("TIMEOUT", "DYING", "GRACE", "GAP"):
        monkeypatch.setattr(endurance, name, 300.0)
    monkeypatch.setattr(rude, "SLOW_HEALTH", 300.0)
    monkeypatch.setattr(rude, "NUM_PROMPTS", 2)
    monkeypatch.setattr(endurance, "CONVERSATIONS", 8)
    monkeypatch.setattr(endurance, "IDLE", 0.2)
    out = tmp_path / "out.json"
    trials = "decode,allocation,idle,full-disk,killed,mixed"
    status = main(["endurance", "--only", trials, "--seconds", "1", "--json", str(out)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    data = json.loads(out.read_text())["data"]
    assert any(int(number) for number in re.findall(r"(\d+) steps failed", printed)), printed
    assert "a slot save was answered" in printed and "8 idle conversations reuse" in printed
    assert data["mixed"]["acts"] and data["mixed"]["memory_mib"]


def test_each_act_of_a_visitor_is_answered(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)

    async def visit(url: str) -> None:
        async with aiohttp.ClientSession(url) as http:
            visitor = Visitor(http, 0)
            for _, act in ACTS.values():
                await act(visitor)

    with running(MODEL, slot_save_path=str(slots), parallel=2) as up:
        asyncio.run(visit(up.url))
