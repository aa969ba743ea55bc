"""The scenarios with many clients at once, and the one with idle KV."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slotcache.bench.cli import main
from slotcache.bench.random_models import built_in_model
from slotcache.bench.scenarios.silence import ROUTES


class Answers:
    """Answers with the requested number of tokens, `cached` prompt tokens reused."""

    def __init__(self, chat_events: Callable[..., list[Any]], cached: int):
        self.chat_events, self.cached = chat_events, cached

    async def __call__(self, path: str, body: Any, send: Any) -> None:
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        for event in self.chat_events(["a"] * body["max_tokens"], prompt=prompt, cached=self.cached):
            await send(event)


def test_fanout_sums_the_computed_tokens(serve: Any, chat_events: Any, capsys: Any) -> None:
    server = serve(Answers(chat_events, cached=50))
    assert main(["fanout", "--url", server.url, "--requests", "4", "--prompt-tokens", "200"]) == 0
    printed = capsys.readouterr().out
    bodies = [body["messages"][-1]["content"] for _, body in server.requests[-4:]]
    assert len(set(bodies)) == 1 and len(server.requests) > 4
    assert "tokens computed over one prompt: 4.0" in printed, "each of the four computes what is left behind 50 tokens"


def test_silence_asks_on_all_routes(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    sizes = ["-c", "8192", "-t", "1", "--seconds", "0.1"]
    assert main(["silence", "-m", str(built_in_model()), *sizes, "--json", str(out)]) == 0
    waits = json.loads(out.read_text())["data"]["waits"]
    assert {wait["path"] for wait in waits} == set(ROUTES) and len(waits) == len(ROUTES) + 1
    assert all(len(wait["events"]) > 1 and wait["events"][0] < wait["end"] for wait in waits)
    printed = capsys.readouterr().out
    assert "first event of a stream" in printed and "longest silence of a stream" in printed


def test_idle_compares_with_an_empty_pool(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    sizes = ["-c", "2048", "-t", "1", "-np", "2", "--idle", "1200", "--prompt-tokens", "200", "--max-tokens", "8"]
    assert main(["idle", "-m", str(built_in_model()), *sizes, "--repeats", "2", "--json", str(out)]) == 0
    empty, moved, kept = json.loads(out.read_text())["data"].values()
    assert [one["idle_cells"] for one in empty] == [0, 0]
    assert all(1000 < one["idle_cells"] < 1500 for one in kept)
    assert all(500 < one["idle_cells"] < 1500 for one in moved), "this model is so fast that one may be gone before the next"
    assert all(one["prefill"] > 0 and one["decode"] > 0 for one in [*empty, *moved, *kept])
    printed = capsys.readouterr().out
    assert "bar 6  prefill beside idle KV" in printed and "kept on the device" in printed


def test_idle_starts_its_own_servers(capsys: Any) -> None:
    assert main(["idle", "--url", "http://127.0.0.1:1"]) == 2
    assert "leave --url out" in capsys.readouterr().err
