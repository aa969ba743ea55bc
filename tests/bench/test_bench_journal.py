"""A run that is killed leaves what it has measured; one that ends well leaves its result alone."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.conftest import running
from slotcache.bench.cli import main
from slotcache.bench.journal import SUFFIX
from slotcache.bench.offline import queueing
from slotcache.models.demo import FILE

BENCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
import conftest  # makes the package importable from a bare checkout
from slotcache.bench.cli import main
sys.exit(main(sys.argv[2:]))
"""
TESTS = str(Path(__file__).parents[1])
QUERIES = 2000  # more than are answered before the run is killed


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(FILE) as up:
        yield up.url


def lines_of(out: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, out.with_name(out.name + SUFFIX).read_text().splitlines()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_its_requests(url: str, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out.json"
    out.write_text("an earlier result")
    command = ["burst", "--url", url, "--queries", str(QUERIES), "--pause", "0", "--max-tokens", "2", "--json", str(out)]
    with subprocess.Popen([sys.executable, "-c", BENCH, TESTS, *command], stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr
        logged = next(line for line in bench.stderr if f" 10/{QUERIES}" in line)  # blocks until so many are answered
        bench.send_signal(number)
        said = bench.stderr.read()
    assert logged and bench.returncode == (130 if number != signal.SIGKILL else -number)
    first, *rest = lines_of(out)
    assert first["unfinished"] is True and first["scenario"] == "burst" and first["machine"]["command"][-1] == str(out)
    requests = [line for line in rest if "latency" in line]
    assert 10 <= len(requests) < QUERIES and rest[0]["begins_round"] == 1
    for one in requests:
        assert one["arm"] == url and one["session"] and one["prompt_tokens"] > 0 and one["error"] is None
        assert len(one["documents"]) == 5 and 0 < one["arrivals"][0] <= one["latency"]
    assert out.read_text() == "an earlier result"
    if number != signal.SIGKILL:
        assert f"what was measured before the end is in {out}{SUFFIX}" in said


def test_a_run_that_fails_leaves_its_requests(serve: Any, chat_events: Any, tmp_path: Path, capsys: Any) -> None:
    asked = []

    async def answer(path: str, body: Any, send: Any) -> Any:
        asked.append(body)
        if len(asked) > 4:
            return 500, {"error": {"message": "broken"}}
        for event in chat_events(["a", "b"], prompt=sum(len(one["content"].split()) for one in body["messages"])):
            await send(event)

    out = tmp_path / "out.json"
    assert main(["cached", "--url", serve(answer).url, "--json", str(out)]) == 2
    assert f"is in {out}{SUFFIX}" in capsys.readouterr().err and not out.exists()
    assert [line["error"] is None for line in lines_of(out) if "latency" in line][-1] is False


def test_a_run_that_ends_well_leaves_its_result_alone(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["burst", "--url", url, "--queries", "2", "--pause", "0", "--max-tokens", "2", "--json", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert len(json.loads(out.read_text())["data"]["arms"][0]["runs"][0]["requests"]) == 2


def test_a_run_without_a_server_keeps_its_figures(tmp_path: Path, monkeypatch: Any) -> None:
    """Broken behind the second way: both are kept, the table never comes."""
    out, ways = tmp_path / "out.json", queueing.WAYS[:2]

    def broken() -> Iterator[Any]:
        yield from ways
        raise KeyboardInterrupt

    monkeypatch.setattr(queueing, "WAYS", broken())
    assert main(["queue", "--waiting", "8", "--json", str(out)]) == 130
    assert [line["way"] for line in lines_of(out)[1:]] == [name for name, _, _ in ways]


def test_a_file_that_cannot_be_written_ends_the_run_before_it_begins(serve: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.json"
    server = serve(lambda *of: asyncio.sleep(0))
    assert main(["cached", "--url", server.url, "--json", str(out)]) == 2
    assert f"--json {out}: " in capsys.readouterr().err and not server.requests


def test_a_run_that_measured_nothing_leaves_no_file(serve: Any, tmp_path: Path) -> None:
    async def refuse(path: str, body: Any, send: Any) -> Any:
        return 500, {"error": {"message": "broken"}}

    assert main(["cached", "--url", serve(refuse).url, "--json", str(tmp_path / "out.json")]) == 2
    assert not list(tmp_path.iterdir())
