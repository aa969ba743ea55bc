"""`slotcache batch` as a user runs it: answers in a file, and a kill that costs nothing finished."""

import json
import subprocess

import pytest
from slotcache.server.config.settings import Settings
from slotcache.server.offline import unattended

from server.conftest import until
from server.test_cli import command, run

FLAGS = ("-c", 2048, "-t", 1, "-fa", "off")


def write(path, number, **body):
    usual = {"max_tokens": 4, "ignore_eos": True, "documents": [{"id": "tides", "text": "Two tides a day. " * 20}]}
    path.write_text("".join(line(f"n{at}", usual | body) for at in range(number)))


def line(custom_id, body, url="/v1/chat/completions"):
    chat = {"messages": [{"role": "user", "content": f"What is {custom_id}?"}]} if url.endswith("chat/completions") else {}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": chat | body}) + "\n"


def rows(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_file_is_answered_with_the_bad_line_named_and_once(tiny, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 3)
    source.write_text(source.read_text() + "not JSON\n")
    result = run("batch", source, "-o", target, "-m", tiny, *FLAGS)
    assert result.returncode == 1 and "4 of 4 lines are answered" in result.stderr and "1 of them" in result.stderr
    cached = [row["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for row in rows(target)[1:]]
    assert len(cached) == 3 and sum(number > 50 for number in cached) == 2
    before = target.read_bytes()
    again = run("batch", source, "-o", target, "-m", "/nowhere.gguf")
    assert again.returncode == 1 and target.read_bytes() == before, "nothing is left: no model is loaded"


def test_each_route_answers_as_a_server_does_also_where_it_refuses(tiny, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    documents = [{"id": "tides", "text": "Two tides a day. " * 20}]
    source.write_text(
        line("text", {"prompt": "Hello", "max_tokens": 2}, "/v1/completions")
        + line("response", {"input": "Hello", "max_output_tokens": 2}, "/v1/responses")
        + line("many", {"max_tokens": 2, "n": 9})
        + line("wrong", {"max_tokens": "many"})
        + line("stream", {"stream": True})
        + "".join(line(name, {"max_tokens": 2, "cache_prompt": False, "documents": documents}) for name in ("p", "q"))
    )
    result = run("batch", source, "-o", target, "-m", tiny, *FLAGS, "--max-queue", 0, "--parallel", 2)
    assert result.returncode == 1 and "7 of 7 lines are answered" in result.stderr
    (unread,) = [row for row in rows(target) if row["error"]]
    assert unread["error"]["line"] == 5 and "stream" in unread["error"]["message"]
    answers = {row["custom_id"]: row["response"] for row in rows(target) if row["response"]}
    assert answers.pop("wrong")["status_code"] == 400
    assert {name: answer["status_code"] for name, answer in answers.items()} == dict.fromkeys(answers, 200)
    assert len(answers["many"]["body"]["choices"]) == 9, "no queue is too short for it"
    usages = [answers[name]["body"]["usage"]["prompt_tokens_details"] for name in ("p", "q")]
    assert [usage["cached_tokens"] for usage in usages] == [0, 0]


def test_nothing_waits_for_a_line():
    settings = unattended(Settings(max_queue=1, cache_prompt=False, idle_sets=3))
    assert settings.cache_prompt and settings.max_queue > 1000
    assert not (settings.max_stall or settings.idle_prefill or settings.idle_sets)


def test_after_a_kill_finished_lines_are_not_computed_again(tiny, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 40, max_tokens=300)
    process = subprocess.Popen(command("batch", source, "-o", target, "-m", tiny, *FLAGS), stderr=subprocess.DEVNULL)
    try:
        until(lambda: target.exists() and target.read_bytes().count(b"\n") > 2)
    finally:
        process.kill()
        process.wait()
    before = target.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 2 < whole.count(b"\n") < 40
    result = run("batch", source, "-o", target, "-m", tiny, *FLAGS)
    assert result.returncode == 0 and target.read_bytes().startswith(whole)
    assert sorted(row["custom_id"] for row in rows(target)) == sorted(f"n{at}" for at in range(40))


@pytest.mark.parametrize(
    ("content", "out", "says"),
    [
        (None, None, "No such file"),
        ("%PDF-1.4\n", None, "line 1:"),
        ("", None, "the file is empty"),
        (line("a", {}), "notes\n", "expected another -o"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, content, out, says):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    if content is not None:
        source.write_text(content)
    if out is not None:
        target.write_text(out)
    result = run("batch", source, "-o", target, "-m", "/nowhere.gguf")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and says in result.stderr
    assert (target.read_text() if out is not None else None) == out


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    write(tmp_path / "in.jsonl", 1)
    result = run("batch", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-m", "/nowhere.gguf")
    assert result.returncode == 2 and "/nowhere.gguf" in result.stderr and "Traceback" not in result.stderr
