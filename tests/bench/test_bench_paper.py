"""The papers' evaluations: points that are measured once, an open loop, orders chosen by the client, the panels."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from slotcache.bench.cli import main
from slotcache.bench.client import Client, drive_open
from slotcache.bench.points import Points, interval, spread
from slotcache.bench.report import BenchError
from slotcache.bench.scenarios import paper
from slotcache.bench.scenarios.paper import ClientOrder, knee, poisson
from slotcache.bench.server_api import ChatApi, Sampling
from slotcache.bench.trace import Query


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_point_is_measured_once_and_a_line_that_was_cut_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "new" / "rate.jsonl", []

    def measure() -> dict[str, Any]:
        asked.append(len(asked))
        return {"ttft": [0.5, float("nan")], "run": len(asked)}

    def points(commit: str = "a") -> Points:
        return Points(path, lambda: {"git_commit": commit})

    first = points()
    assert first.point({"arm": "x", "load": 1}, measure) == {"ttft": [0.5, None], "run": 1}
    assert points().point({"load": 1, "arm": "x"}, measure)["run"] == 1, "the order of the names tells nothing apart"
    assert points().point({"arm": "x", "load": 2}, measure)["run"] == 2
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # killed while it wrote the second point
    again = points("b")
    assert again.point({"arm": "x", "load": 1}, measure)["run"] == 1
    assert again.point({"arm": "x", "load": 2}, measure)["run"] == 3
    assert any("points of 2 commits" in note for note in again.notes())
    assert [row["figures"]["run"] for row in lines(path) if "point" in row] == [1, 3]


def test_a_file_of_something_else_and_a_folder_that_is_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"point": {}}\nnothing of ours\n')
    with pytest.raises(BenchError, match=r"x\.jsonl:2 is no line of this bench: move the file away"):
        Points(tmp_path / "x.jsonl", dict)
    with pytest.raises(BenchError, match="expected a folder that can be written"):
        Points(tmp_path / "x.jsonl" / "y.jsonl", dict)


def test_the_interval_of_three_runs_is_students() -> None:
    assert interval([39.7, 40.0, 40.3]) == pytest.approx(0.745, abs=0.001)  # RAGCache++, 4.2: ± 0.3, so ± 0.7
    assert isnan(interval([1.0])) and spread([1.0]) == 1.0 and spread([1.0, 1.0]) == "1.00 ± 0.00"


def test_the_rate_at_five_times_the_first_ttft_lies_on_the_curve() -> None:
    assert knee([(1.0, 0.2), (2.0, 0.4), (3.0, 1.6)]) == (pytest.approx(2.5), True)
    assert knee([(1.0, 0.2), (2.0, 0.4)]) == (2.0, False)
    assert knee([(1.0, 0.2), (2.0, 0.4)], limit=0.1) == (pytest.approx(0.5), True)


def test_arrivals_are_random_and_the_same_at_each_rate_but_for_the_scale() -> None:
    slow, fast = poisson(2000, 1.0, seed=3), poisson(2000, 4.0, seed=3)
    assert slow == sorted(slow) and fast == pytest.approx([at / 4 for at in slow])
    gaps = sorted(later - earlier for earlier, later in pairwise(slow))
    assert slow[-1] / 2000 == pytest.approx(1.0, rel=0.1) and gaps[1000] == pytest.approx(0.693, rel=0.1)
    assert poisson(5, 1.0, seed=4) != slow[:5]


def test_an_open_loop_waits_for_no_answer(serve: Any, chat_events: Any) -> None:
    """The first question is answered only when the last one has come: in a closed loop that is never."""
    came, all_came = [], asyncio.Event()

    async def answer(path: str, body: Any, send: Any) -> None:
        came.append(body["messages"][-1]["content"])
        if len(came) == 3:
            all_came.set()
        await all_came.wait()
        for event in chat_events(["a"]):
            await send(event)

    async def ask() -> Any:
        async with Client(serve(answer).url, ChatApi()) as client:
            return await drive_open(client, [Query(name, 1, name) for name in "abc"], [0.0, 0.01, 0.02])

    run = asyncio.run(ask())
    assert sorted(came) == ["a", "b", "c"] and not run.errors and len(run.results) == 3


@pytest.mark.parametrize(("policy", "second"), [("oracle", "bac"), ("recency", "abc"), ("retrieval", "cab")])
def test_the_client_orders_by_what_it_sent_before(policy: str, second: str) -> None:
    async def sent() -> list[str]:
        api, orders = ClientOrder(policy), []
        for ranked in ("bad", "abx", "cab"):
            query = Query(ranked, 1, "?", tuple((name, name) for name in ranked))
            _, body = await api.prepare(None, query, (), Sampling())  # type: ignore[arg-type]
            assert body["document_order"] == "retrieval"
            orders.append("".join(document["id"] for document in body["documents"]))
        return orders

    orders = asyncio.run(sent())
    assert orders[0] == "bad", "nothing was sent before"
    assert sorted(orders[2]) == ["a", "b", "c"]
    if policy == "oracle":
        assert orders[1] == "bax" and orders[2] == "bac"
    elif policy == "recency":
        assert orders[2].index("c") == 2, "what was never sent stands last"
    else:
        assert orders[2] == second


def test_scheduling_is_timed_at_each_rate_and_a_second_run_measures_nothing(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    command = ["paper", "scheduling", "--quick", "--out", str(tmp_path), "--json", str(out)]
    assert main(command) == 0
    kept = (tmp_path / "scheduling-quick.jsonl").read_text()
    (table,) = json.loads(out.read_text())["tables"]
    rows = {(row[0], row[1]): dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert len(rows) == 10 and all(0 < row["choosing ms"] < row["scheduling ms"] for row in rows.values())
    assert rows["slotcache", 8.0]["cached"] > rows["first come, retrieval order", 8.0]["cached"]
    assert rows["slotcache", 8.0]["cached"] > rows["slotcache", 0.5]["cached"], "a longer queue has more to group"
    assert rows["slotcache", 0.5]["TTFT p50 s"] < rows["slotcache", 8.0]["TTFT p50 s"]
    assert main(command) == 0
    assert (tmp_path / "scheduling-quick.jsonl").read_text() == kept


def test_four_turns_with_the_cache_and_without(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    sizes = ["-m", str(tiny), "-c", "4096", "-t", "1", "--max-tokens", "2", "--out", str(tmp_path), "--json", str(out)]
    assert main(["paper", "turns", "--quick", *sizes]) == 0
    whole, by_turn = json.loads(out.read_text())["tables"]
    assert [(row[0], row[-1]) for row in whole["rows"]] == [("with prefix cache", 0), ("no cache", 0)]
    ratios = {(row[0], row[1]): row[-1] for row in by_turn["rows"]}
    kept = [ratios["with prefix cache", turn] for turn in (1, 2, 3, 4)]
    assert 0 < kept[1] < kept[2] < kept[3] < 1, "each turn extends the one before"
    assert not any(ratios["no cache", turn] for turn in (1, 2, 3, 4))
    assert "nothing to compare with" in capsys.readouterr().out


def test_the_rate_panel_serves_every_request_at_every_load(
    tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(paper, "QUICK", replace(paper.QUICK, requests_a_load=4, loads=(0.5, 1.0), parts=()))
    monkeypatch.setattr(paper, "USUAL", 20)
    out = tmp_path / "out.json"
    sizes = ["-m", str(tiny), "-t", "1", "--max-tokens", "2", "--out", str(tmp_path), "--json", str(out)]
    assert main(["paper", "rate", "--quick", "--parts", "", *sizes]) == 0
    curves, knees = json.loads(out.read_text())["tables"]
    assert [(row[0], row[-1]) for row in curves["rows"]] == [("slotcache", 0)] * 2
    slow, fast = (row[1] for row in curves["rows"])
    assert fast == pytest.approx(2 * slow)
    assert knees["rows"][0][0] == "slotcache" and knees["rows"][0][2] > 0
    points = [row for row in lines(tmp_path / "rate-quick.jsonl") if "point" in row and "arm" in row["point"]]
    assert [len(row["figures"]["ttft"]) for row in points] == [3, 4, 4]
    assert 0 < sum(points[1]["figures"]["cached_tokens"]) < sum(points[1]["figures"]["prompt_tokens"])


def test_a_point_of_another_trace_is_another_point(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(paper, "QUICK", replace(paper.QUICK, requests=2, memory=(1.0,)))
    monkeypatch.setattr(paper, "EVICTION", paper.EVICTION[:1])
    monkeypatch.setattr(paper, "USUAL", 20)
    out = tmp_path / "out.json"
    command = ["paper", "memory", "--quick", "-m", str(tiny), "-t", "1", "--max-tokens", "2", "--out", str(tmp_path)]
    documents = []
    for trace in ("burst", "skewed"):
        assert main([*command, "--trace", trace, "--json", str(out)]) == 0
        (table,) = json.loads(out.read_text())["tables"]
        documents.append(table["title"].split(":")[0])
        assert [row[-1] for row in table["rows"]] == [0]
    assert documents == ["memory, tiny", "memory, tiny-skewed"]
    points = [row["point"] for row in lines(tmp_path / "memory-quick.jsonl") if "point" in row]
    assert [point.get("workload") for point in points] == [None, None, "skewed", "skewed"]


def test_the_steady_state_counts_the_second_half(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(paper, "USUAL", 20)
    out = tmp_path / "out.json"
    command = ["paper", "steady", "--quick", "-m", str(tiny), "-t", "1", "--max-tokens", "2", "--out", str(tmp_path)]
    assert main([*command, "--json", str(out)]) == 0
    (table,) = json.loads(out.read_text())["tables"]
    assert table["title"] == "steady state, tiny: the last 6 of 12 requests, 4 clients"
    ((name, each_second, *_, seconds, failed),) = table["rows"]
    assert (name, failed) == ("slotcache", 0) and each_second == pytest.approx(6 / seconds)
    (point,) = [row["figures"] for row in lines(tmp_path / "steady-quick.jsonl") if "point" in row]
    ends = map(sum, zip(point["started"][6:], point["latency"][6:], strict=True))
    assert seconds == pytest.approx(max(ends) - min(point["started"][6:]))


def test_a_model_that_it_does_not_know_and_a_url_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["paper", "turns", "--models", "large", "--out", str(tmp_path)]) == 2
    assert "--models large: expected some of bench, embedded" in capsys.readouterr().err
    assert main(["paper", "rate", "--parts", "no cache,speed", "--out", str(tmp_path)]) == 2
    assert "--parts speed: expected some of no cache, retrieval order" in capsys.readouterr().err
    assert main(["paper", "orders", "--trace", "skewed", "--out", str(tmp_path)]) == 2
    assert "--trace skewed is for rate, memory, steady, not for orders" in capsys.readouterr().err
    assert main(["paper", "turns", "--url", "http://127.0.0.1:1", "--out", str(tmp_path)]) == 2
    assert "leave --url out" in capsys.readouterr().err
