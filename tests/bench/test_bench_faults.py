"""Faults, soaking and long histories: the complaints of the benchmarks, for outcomes that deserve one."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slotcache.bench.cli import main
from slotcache.bench.faulty import FAULTS
from slotcache.bench.rude import Ending, Health, Reader
from slotcache.bench.scenarios.faults import TRIALS, Trial, TrialResult, complaints, one_fault
from slotcache.bench.scenarios.soak import Soak, report
from slotcache.bench.servers import Server, ServerOptions, free_port, slotcache_command
from slotcache.models.demo import FILE

RIGHT = Ending("?", 200, "yes", 1, done=True)
FAILED = Ending("?", 200, "y", 1, done=True, error="the engine failed")


def outcome(
    *beside: Ending, health: tuple[int | None, ...] = (200,), code: int | None = None, at: float = 0.0
) -> TrialResult:
    """Return the result of a trial whose quiet run was right."""
    stage: Any = argparse.Namespace(wrongs=[], notes=[])
    return TrialResult(
        quiet=[RIGHT],
        beside=beside,
        health=Health([(at, status) for status in health]),
        began=0.0,
        code=code,
        tail="",
        stage=stage,
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Ending("?", 200, "no", 1, done=True), "another answer"),
        (Ending("?", 200, "yes", 0), "0 final events"),
        (Ending("?", 200, "yes", 2, done=True), "2 final events"),
        (Ending("?", 200, "yes", 1), "1 final events"),
        (FAILED, "a request failed"),
        (Ending("?", error="refused", refused=True), "there was no server"),
        (Ending("?", 200, "yes", 1, done=True, arrivals=(0.0, 9.0)), "paused for 9.00 s"),
    ],
)
def test_a_bystander_who_is_hurt_complains(wrong: Ending, says: str) -> None:
    plain = Trial("none", one_fault)
    assert complaints(plain, outcome(RIGHT)) == []
    (said,) = complaints(plain, outcome(RIGHT, wrong))
    assert says in said


def test_health_and_the_end_of_a_server_are_judged() -> None:
    assert complaints(TRIALS["leave"], outcome(RIGHT, health=(200, None))) == ["health said nothing"]
    assert "ended with code 3" in complaints(TRIALS["leave"], outcome(RIGHT, code=3))[0]
    killed = TRIALS["killed"]
    assert complaints(killed, outcome(RIGHT, FAILED, health=(503, 0), code=1, at=99.0)) == []
    assert "of a server that cannot go on" in complaints(killed, outcome(FAILED, code=1, at=99.0))[0]
    assert "did not end" in complaints(killed, outcome(FAILED))[0] and complaints(killed, outcome(FAILED, code=0))


def test_requests_that_ran_at_a_fault_may_fail_and_no_more() -> None:
    one = Trial("decode", one_fault, may_fail=1)
    assert complaints(one, outcome(RIGHT, FAILED)) == []
    assert complaints(one, outcome(FAILED, FAILED)) == ["a request failed: the engine failed"]


def test_a_reader_counts_every_end() -> None:
    reader = Reader("?")
    for event in ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}, {"error": {"message": "no"}}):
        reader.read(b"data: " + json.dumps(event).encode() + b"\n")
    reader.read(b"data: [DONE]\n")
    assert (reader.finals, reader.done, reader.error, reader.text) == (2, True, "no", "a")


def test_bystanders_of_real_faults_are_not_hurt(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    short = ["--seconds", "0.2", "--max-tokens", "20", "--clients", "8", "--json", str(out)]
    status = main(["faults", "--only", "decode,full-disk,killed", *short])
    printed = capsys.readouterr().out
    assert status == 0 and "complaints of bystanders: 0" in printed, printed
    asked = json.loads(out.read_text())["data"]
    assert any(one["error"] for one in asked["decode"]), "the fault did no harm"
    assert "a slot save was answered" in printed


def test_each_fault_finds_what_it_breaks() -> None:
    """In a process of its own: the faults replace functions of the server."""
    program = "from slotcache.bench.faulty import FAULTS, Trigger\nfor fault in FAULTS.values(): fault(Trigger())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert {trial.fault for trial in TRIALS.values()} <= set(FAULTS)


def test_idle_conversations_outlive_a_failed_step(capsys: Any) -> None:
    status = main(["faults", "--only", "idle,allocation", "--seconds", "0.2", "--max-tokens", "20"])
    printed = capsys.readouterr().out
    assert status == 0 and "20 idle conversations reuse" in printed, printed


def test_unknown_scenarios_are_named(capsys: Any) -> None:
    assert main(["faults", "--only", "flood"]) == 2
    assert "--only flood: expected some of decode" in capsys.readouterr().err


def test_soak_reports_by_quarter(capsys: Any) -> None:
    soak = Soak(60.0)
    for number, one in enumerate(soak.quarters):
        one.memory += [100.0, 100.0 + 5 * number]
        one.seconds += [0.1 * (1 + number)]
        one.acts["chat"] += 1
    printed = report(soak).text()
    assert "memory after the first quarter over the most in it: 1.15 (at most 1.05) MISSED" in printed
    assert "4.00 of the time" in printed and not report(soak).has_failed
    soak.quarters[2].lost += 1
    soak.lost["chat: gone"] += 1
    assert report(soak).has_failed and "lost 1 x chat: gone" in report(soak).text()


def test_soak_of_a_real_server_loses_nothing(tmp_path: Path, capsys: Any) -> None:
    port, out = free_port(), tmp_path / "out.json"
    with Server(slotcache_command(ServerOptions(FILE, 4096, slots=2, threads=1), port), port) as server:
        main(["soak", "--url", server.url, "--minutes", "0.1", "--clients", "3", "--json", str(out)])
    data = json.loads(out.read_text())["data"]
    assert sum(data["acts"].values()) > 20 and len(data["acts"]) > 8
    assert data["lost"] == {}, capsys.readouterr().out


def test_history_compares_turns(serve: Any, chat_events: Callable[..., list[Any]], capsys: Any) -> None:
    async def handler(path: str, body: Any, send: Any) -> None:
        turns = sum(message["role"] == "user" for message in body["messages"])
        for event in chat_events(["x"]):
            if isinstance(event, dict) and "timings" in event:
                event["timings"]["queue_ms"] = float(turns**2)
            await send(event)

    server = serve(handler)
    assert main(["history", "--url", server.url, "--turns", "12", "--rounds", "3"]) == 0
    assert "queue time of turn 12, turn 10's being 100.0 ms: 144 ms (at most 500 ms) met" in capsys.readouterr().out
    assert len(server.requests) == 3 * 13, "one warm-up and twelve turns a round"
    assert main(["history", "--url", server.url, "--turns", "30", "--rounds", "1"]) == 0
    assert "900 ms (at most 500 ms) MISSED" in capsys.readouterr().out
