"""An agent that reads files: the tasks, the messages it sends, and the scenario against real servers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from slotcache.bench.agent_tasks import Task, Turn, queries, read_tasks, spread
from slotcache.bench.cli import main
from slotcache.bench.random_models import built_in_model
from slotcache.bench.recording import SUB_AGENTS, record
from slotcache.bench.scenarios.agent import AgentApi
from slotcache.bench.scenarios.replay import new_tokens
from slotcache.bench.trace import prose

CLAUSES = "\n\n".join(prose(f"clause {at}", 40) for at in range(6))
TURNS = {
    "b": ["Read files/alpha.txt.", "Read files/beta.txt and files/gamma.txt. Compare.", "Which is best?"],
    "a": ["List the files.", "Read files/beta.txt.", "Read files/alpha.txt."],
    "missing": ["Read code/service.py."],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three contracts from one template, and three tasks; the file of one task is missing."""
    workspace, tasks = tmp_path / "clawtasks/data/workspace", tmp_path / "clawtasks/claw-tasks/all"
    workspace.mkdir(parents=True)
    tasks.mkdir(parents=True)
    for at, name in enumerate(("alpha", "beta", "gamma")):
        (workspace / f"{name}.txt").write_text(f"Contract ID: C-{at}\nVendor Name: {name} Ltd\n\n{CLAUSES}\n")
    (tasks / "tasks.json").write_text(json.dumps([{"name": name, "turns": turns} for name, turns in TURNS.items()]))
    return tmp_path


def test_tasks_name_their_files_and_those_without_them_are_left_out(data: Path) -> None:
    a, b = read_tasks(data)
    assert [task.name for task in (a, b)] == ["a", "b"]
    assert [[path for path, _ in turn.files] for turn in b.turns] == [
        ["files/alpha.txt"],
        ["files/beta.txt", "files/gamma.txt"],
        [],
    ]
    assert dict(b.files)["files/gamma.txt"].startswith("Contract ID: C-2\n")
    asked = [(query.turn, query.question, len(query.documents)) for query in queries([b])]
    assert asked == [(1, TURNS["b"][0], 0), (1, "", 1), (2, TURNS["b"][1], 0), (2, "", 2), (3, TURNS["b"][2], 0)]


def test_a_read_ends_with_a_line(data: Path) -> None:
    (task, _) = read_tasks(data, characters=40)
    assert task.files[0][1] == "Contract ID: C-1\nVendor Name: beta Ltd\n\n"
    (task, _) = read_tasks(data, characters=5)
    assert task.files[0][1] == "Contract ID: C-1\n", "a first line that is too long is read whole"


def test_chosen_tasks_lie_apart() -> None:
    tasks = [Task(str(at), (Turn("?", ()),)) for at in range(10)]
    assert [task.name for task in spread(tasks, 4)] == ["0", "2", "5", "7"]
    assert spread(tasks, 0) == spread(tasks, 99) == tasks


def test_the_messages_of_an_agent_grow_at_the_end_alone(data: Path) -> None:
    asked = list(queries(read_tasks(data)[1:]))
    sent = [AgentApi().messages(query, [(one, "") for one in asked[:at]]) for at, query in enumerate(asked)]
    assert [messages[-1]["role"] for messages in sent] == ["user", "tool", "user", "tool", "user"]
    for before, after in pairwise(sent):
        assert after[: len(before)] == before
    call, *results = sent[3][-3:]
    assert [json.loads(one["function"]["arguments"])["path"] for one in call["tool_calls"]] == [
        "files/beta.txt",
        "files/gamma.txt",
    ]
    assert [one["id"] for one in call["tool_calls"]] == [one["tool_call_id"] for one in results]


def test_without_data_the_reason_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["agent", "--data", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().err.startswith("skipped: agent needs --data PATH or SLOTCACHE_DATA")
    assert main(["agent", "--data", str(tmp_path)]) == 2
    assert f"slotcache bench: --data {tmp_path}: " in capsys.readouterr().err


# ---- A recorded session -------------------------------------------------------------------------------------------------


def test_a_recording_has_each_part_of_a_session(data: Path) -> None:
    recording = record(data, 30_000)
    assert recording == record(data, 30_000)
    requests = [request for wave in recording.waves for request in wave]
    phases = list(dict.fromkeys(request.phase for request in requests))
    assert phases == ["alone", "beside", "results", "summary", "compacted"]
    assert {request.agent for request in requests} == {"main", *SUB_AGENTS} and sum(one.is_cut for one in requests) == 2
    assert all(len({request.agent for request in wave}) == len(wave) for wave in recording.waves)
    assert {request.phase for request in recording.waves[recording.restart]} == {"beside"}
    messages = [message for request in requests for message in request.messages]
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    assert called == {"read_file", "search", "edit_file", "run_tests", "task", "task_result"}
    longest = max(sum(map(len, request.texts())) for request in requests)
    assert 0.9 < longest / 30_000 < 1.3
    summary = next(request for request in requests if request.phase == "summary")
    assert summary.new < 0.1 and requests[0].new == 1, "the whole history comes again, the first request is new"


def test_a_recorded_prompt_changes_by_the_lines_of_the_moment_alone(data: Path) -> None:
    sent = [one for wave in record(data, 30_000).waves for one in wave if (one.agent, one.phase) == ("main", "alone")]
    assert len(sent) > 2 and all(sum("<reminder>" in text for text in one.texts()) == 1 for one in sent)
    later = [one for wave in record(data, 30_000).waves for one in wave if (one.agent, one.phase) == ("main", "results")]
    before, after = sent[-1].messages, later[0].messages
    assert before[0] != after[0] and len(before) < len(after), "the clock in the instructions"
    unlike = [at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other]
    (place,) = [at for at, message in enumerate(before) if "<reminder>" in (message["content"] or "")]
    assert unlike == [0, place] and "<reminder>" not in after[place]["content"], "it was in the question, and has moved on"


def test_what_no_earlier_prompt_begins_with_is_new() -> None:
    assert new_tokens([[1, 2, 3], [1, 2, 4, 5], [7], [1, 2, 4, 5, 6]]) == [3, 2, 1, 1]


def test_a_replay_counts_what_is_read_again(data: Path, tmp_path: Path, capsys: Any) -> None:
    """A billing line that changes costs nothing; what the session has sent before is in the cache, behind a restart too.

    Without work in idle time: how much of it a busy machine has time for varies from one session to the next.
    """
    out = tmp_path / "out.json"
    options = ["-m", str(built_in_model()), "--data", str(data), "--max-tokens", "1", "--pause", "0", "-t", "1"]
    options += ["--slotcache-args=--no-idle-prefill"]
    assert main(["agent", "--replay", "--size", "6000", "--billing", "--turns", *options, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "prefills thrown away" in printed and "computed tokens, request by request" in printed
    report = json.loads(out.read_text())
    assert [bar["name"] for bar in report["bars"]] == [
        "computed tokens with a billing line that changes, of those without it"
    ]
    turns, plain, billed = (session for (session,) in report["data"]["sessions"].values())
    assert turns[0]["new_tokens"] == turns[0]["prompt_tokens"] and all(turn["new_tokens"] for turn in turns)
    assert turns[0]["cut"] > 0 and {turn["cut"] for turn in turns if turn["phase"] == "alone"} == {0, turns[0]["cut"]}
    assert sum(turn["cached_tokens"] for turn in turns) > sum(turn["prompt_tokens"] for turn in turns) / 2
    assert {turn["agent"] for turn in turns if turn["is_first"]} >= {"main"}
    restart = next(
        at for at, turn in enumerate(turns) if turn["is_first"]
    )  # whether a disk is faster than this model varies
    line = billed[0]["prompt_tokens"] - plain[0]["prompt_tokens"]
    computed = [[one["prompt_tokens"] - one["cached_tokens"] for one in of[:restart]] for of in (plain, billed)]
    alone = [more - less for less, more, turn in zip(*computed, plain, strict=False) if turn["phase"] == "alone"]
    assert 10 < line < 100 and len(alone) >= 3, alone
    assert alone[0] == line and not any(alone[1:]), "one request after the other: the first reads it, for all"
    # How many of the agents that ask at once read what they share is the machine's choice; without reuse behind the line,
    # each would read all of its prompt.
    without, with_it = map(sum, computed)
    assert with_it < 1.5 * without < 0.5 * sum(one["prompt_tokens"] for one in billed[:restart])
