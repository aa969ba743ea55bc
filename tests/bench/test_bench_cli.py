"""`slotcache bench` from its command line, against a running server."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server.conftest import until
from slotcache.bench.cli import SCENARIOS, main
from slotcache.bench.scenarios import step
from slotcache.bench.scenarios.step import GENERATED, HOST_SECONDS, LOOP_SECONDS
from slotcache.ordering.policy import arrange
from slotcache.ordering.tree import KnowledgeTree
from support.processes import DEADLINE, ended, watched

TOKENS = 10


class Cache:
    """Answers like slotcache with an unlimited cache: documents ordered for the most reuse, and the true reuse reported."""

    def __init__(self, chat_events: Callable[..., list[Any]], policy: str = "auto") -> None:
        self.chat_events, self.policy = chat_events, policy
        self.tree = KnowledgeTree()

    async def __call__(self, path: str, body: Any, send: Any) -> None:
        keys = [document["id"] for document in body.get("documents", ())]
        arranged = arrange(keys, self.tree, self.policy)
        order = [keys[i] for i in arranged.order]
        self.tree.insert([(key, TOKENS) for key in order])
        used = [
            {"id": key, "tokens": TOKENS, "cached_tokens": TOKENS * (i < arranged.reused_documents)}
            for i, key in enumerate(order)
        ]
        cached = TOKENS * arranged.reused_documents
        own = {"slot": 0, "source": "fork", "cached_tokens": cached, "documents": used}
        prompt = sum(len(message["content"].split()) for message in body["messages"]) + TOKENS * len(keys)
        for event in self.chat_events(["a", "b", "c"] * 4, prompt=prompt, cached=cached, own=own):
            await send(event)


class Figures:
    """Answers of few tokens, which `/metrics` counts. fails_from: the number of the first request that fails."""

    def __init__(self, chat_events: Callable[..., list[Any]], fails_from: float = math.inf) -> None:
        self.chat_events, self.fails_from = chat_events, fails_from
        self.num_asked = 0

    async def __call__(self, path: str, body: Any, send: Any) -> Any:
        if path == "/metrics":
            await send(f"{GENERATED} {6 * self.num_asked}\n{HOST_SECONDS} 0.0002\n{LOOP_SECONDS} {self.num_asked / 1000}\n")
            return None
        self.num_asked += 1
        if self.num_asked >= self.fails_from:
            return 500, {"error": {"message": "no"}}
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        for event in self.chat_events(["a", "b", "c"] * 2, prompt=prompt):
            await send(event)
        return None


def test_steps_are_measured_while_short_answers_follow_each_other(
    serve: Any, chat_events: Any, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(step, "SAMPLES", 3)
    monkeypatch.setattr(step, "STREAMED", 0.3)
    assert main(["step", "--url", serve(Figures(chat_events)).url, "--contexts", "50,60"]) == 0
    assert "host ms a step at 50 tokens of context: 0.20 ms" in capsys.readouterr().out


def test_steps_are_not_waited_for_where_requests_fail(serve: Any, chat_events: Any, capsys: Any) -> None:
    assert main(["step", "--url", serve(Figures(chat_events, fails_from=4)).url, "--contexts", "50"]) == 2
    assert "no" in capsys.readouterr().err


def test_burst_finds_the_reuse_it_predicts(serve: Any, chat_events: Any, tmp_path: Path, capsys: Any) -> None:
    server = serve(Cache(chat_events))
    out = tmp_path / "out.json"
    assert main(["burst", "--url", server.url, "--queries", "30", "--pause", "0", "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "documents reused as predicted in 30 of 30 queries" in printed.out
    assert "differ from the exhaustive search's: 0.00 (at most 0) met" in printed.out
    assert "30/30" in printed.err
    value = json.loads(out.read_text())
    requests = value["data"]["arms"][0]["runs"][0]["requests"]
    assert len(requests) == 30 and len(requests[0]["documents"]) == 5
    assert value["machine"]["cores"] >= 1 and value["scenario"] == "burst"


@pytest.mark.parametrize(("scenario", "more"), [("conversations", ["--pause", "0"]), ("decode", []), ("cached", [])])
def test_every_other_scenario_runs(serve: Any, chat_events: Any, capsys: Any, scenario: str, more: list[str]) -> None:
    assert main([scenario, "--url", serve(Cache(chat_events)).url, *more]) == 0
    assert f"{scenario}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["burst", "--model", "/no/model.gguf"], "no model at /no/model.gguf"),
        (["cached", "--url", "http://127.0.0.1:1"], "ClientConnectorError"),
        (["burst", "--url", "http://127.0.0.1:1", "-k", "9", "--overlap", "0"], "regions of 10 documents"),
        (["mtrag", "--data", str(Path(__file__).parent)], "documents.jsonl.gz"),
    ],
)
def test_a_scenario_that_cannot_run_is_one_clear_message(capsys: Any, argv: list[str], message: str) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


WITHOUT = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest  # makes the package importable from a bare checkout
sys.modules[sys.argv[2]] = None  # as if it were not installed
from slotcache.bench import cli
sys.exit(cli.main(sys.argv[3:]))
"""


def test_a_scenario_names_a_missing_module() -> None:
    def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", WITHOUT, str(Path(__file__).parents[1]), "aiohttp", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    refused = bench("burst", "--help")
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 2 and line == "slotcache bench: burst needs aiohttp: pip install 'slotcache[bench]'"
    assert bench("--help").returncode == bench("queue", "--help").returncode == 0


HANG = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        with open(sys.argv[2] + ".new", "w") as told:
            told.write(str(os.getpid()))
        os.rename(told.name, sys.argv[2])
        self.rfile.read()  # never answers
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

BENCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with ctrl-C ignored
sys.path.insert(0, sys.argv[1])
import conftest  # makes the package importable from a bare checkout
from slotcache.bench import cli, servers
server, told = sys.argv[2:]
servers.slotcache_command = lambda options, port: [sys.executable, "-c", server, str(port), told]
sys.exit(cli.main(["conversations", "--model", sys.executable]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ctrl_c_leaves_no_server_behind(tmp_path: Path, number: signal.Signals) -> None:
    reported = tmp_path / "told"
    arguments = [sys.executable, "-c", BENCH, str(Path(__file__).parents[1]), HANG, str(reported)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as if these tests ran in the background
    try:
        bench = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: reported.exists() or bench.poll() is not None)  # a request has arrived
    assert bench.returncode is None, bench.communicate()[1]
    with watched(int(reported.read_text())) as (server,):
        bench.send_signal(number)
        _, said = bench.communicate(timeout=300)
        assert ended(server, 0 if number != signal.SIGKILL else DEADLINE)
    if number == signal.SIGKILL:
        return
    assert bench.returncode == 130 and said.endswith("stopped\n") and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["told"], "no log is left"


def test_every_scenario_has_help(capsys: Any) -> None:
    for name in SCENARIOS:
        with pytest.raises(SystemExit) as raised:
            main([name, "--help"])
        assert raised.value.code == 0
        assert "--json" in capsys.readouterr().out
