"""A batch without a server: its lines, their order, and the file of its answers."""

import asyncio
import json

import pytest
from msgspec import Raw
from slotcache.server.service import batch
from slotcache.server.service.batch import (
    MOST_ORDERED,
    BatchLine,
    LineAnswer,
    NoLines,
    NotAnswers,
    Results,
    in_order,
    read_lines,
    run,
)

CHAT = "/v1/chat/completions"


def line(custom_id="a", url=CHAT, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def chat(name, *documents, system="You help."):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"What is {name}?"}]
    return line(name, messages=messages, documents=[{"id": key, "text": f"Document {key}."} for key in documents])


def lines_of(*texts):
    return read_lines("\n".join(texts).encode())


class Asked:
    """Answers lines as told, and notes them."""

    def __init__(self, *statuses):
        self.ids, self._statuses = [], list(statuses)

    async def __call__(self, line):
        self.ids.append(line.custom_id)
        status = self._statuses.pop(0) if self._statuses else 200
        return LineAnswer(status, "req-1", Raw(b'{"said": 1}'))


def answer(lines, path, asked, num_slots=1):
    results = Results(path)
    try:
        asyncio.run(run(lines, results, asked, num_slots=num_slots))
    finally:
        results.close()
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("not JSON", "invalid_line", "expected custom_id, method, url and body"),
        ('{"custom_id": "x", "method": "GET", "url": "/v1/chat/completions", "body": {}}', "invalid_line", "method"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": []}', "invalid_line", "body"),
        ('{"custom_id": 7, "method": "POST", "url": "/v1/chat/completions", "body": {}}', "invalid_line", "custom_id"),
        (line("x", url="/v1/models"), "invalid_url", "'/v1/models'"),
        (line("good"), "duplicate_custom_id", "an earlier line also has the custom_id 'good'"),
        ("[" * 100_000, "invalid_line", "expected custom_id"),
        (line("x", stream=True), "invalid_line", "stream: a batch has only whole answers"),
        (line("x", messages=[[]] * 300_000), "invalid_line", "brackets: expected at most"),
    ],
)
def test_a_bad_line_costs_itself_alone(tmp_path, text, code, says):
    lines = lines_of(line("good"), "", text, line("last"))
    assert [each.error is None for each in lines] == [True, False, True]
    rows = answer(lines, tmp_path / "out.jsonl", Asked())
    (bad,) = [row for row in rows if row["error"]]
    assert bad["error"]["code"] == code and bad["error"]["line"] == 3 and says in bad["error"]["message"]
    assert bad["custom_id"] is None and bad["response"] is None
    assert {row["custom_id"] for row in rows if row["response"]} == {"good", "last"}


@pytest.mark.parametrize("data", [b"", b"\n\n", b"%PDF-1.4\n%\xff\xfe\n1 0 obj\n", b'{"a": 1}\n{"a": 2}'])
def test_a_file_without_any_line_is_refused_as_a_whole(data):
    with pytest.raises(NoLines) as refused:
        read_lines(data)
    assert "expected" in str(refused.value)


def test_prefixes_group_lines_and_then_documents_do():
    texts = [
        chat("p", "1", "2"),
        chat("q", "8", "9", system="You joke."),
        chat("r", "5", "6"),
        chat("s", "2", "1"),
        chat("t", "9", "7", system="You joke."),
        chat("u", "6", "5"),
    ]
    order = "".join(each.custom_id or "" for each in in_order(lines_of(*texts)))
    assert order in ("psruqt", "rupsqt", "qtpsru", "qtrups")
    plain = [line(name, prompt=text) for name, text in (("a", "One. Two."), ("b", "Zero."), ("c", "One. Three."))]
    assert [each.custom_id for each in in_order(lines_of(*plain))] in (["a", "c", "b"], ["c", "a", "b"])


@pytest.mark.parametrize(
    "body", [{"messages": 7}, {"messages": [{}], "documents": [1]}, {"messages": [{"documents": [{}]}]}]
)
def test_a_body_that_is_not_as_expected_has_its_place_too(body):
    found = in_order(lines_of(line("odd", **body), chat("a", "1")))
    assert sorted(each.custom_id or "" for each in found) == ["a", "odd"]


def test_a_line_of_many_documents_is_placed_by_the_first_of_them(monkeypatch):
    """The time to plan grows with the square of the documents that count."""
    seen = []
    monkeypatch.setattr(batch, "depth_first", lambda sets: seen.extend(sets) or range(len(sets)))
    in_order(lines_of(*(chat(f"q{at}", *map(str, range(300))) for at in range(3))))
    assert [len(one) for one in seen] == [MOST_ORDERED] * 3


def test_others_go_on_between_bad_lines(tmp_path):
    async def beside():
        """How often another task had its turn."""
        results, turns = Results(tmp_path / "out"), 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        await run(lines_of(*["not JSON"] * 500, line()), results, Asked(), num_slots=1)
        task.cancel()
        results.close()
        return turns

    assert asyncio.run(beside()) > 5


def test_what_is_answered_is_not_asked_again(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = lines_of(line("a"), "bad", line("b"), line("c"))
    answer(lines[:3], path, Asked())
    path.write_bytes((before := path.read_bytes()) + b'{"id":"batch_req_torn","custom_')
    rows = answer(lines, path, asked := Asked())
    assert asked.ids == ["c"] and path.read_bytes().startswith(before)
    assert sorted(row["custom_id"] or "" for row in rows) == ["", "a", "b", "c"]


@pytest.mark.parametrize("content", [b"notes\n", b'{"custom_id": "a"}\n', b"notes without an end"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    (path := tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(NotAnswers):
        Results(path)
    assert path.read_bytes() == content


def test_a_server_that_has_no_room_is_asked_again_and_other_errors_are_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("slotcache.server.service.batch.PAUSE", 0)
    rows = answer(lines_of(line("a")), tmp_path / "out.jsonl", asked := Asked(429, 503, 400))
    assert asked.ids == ["a"] * 3
    assert [row["response"]["status_code"] for row in rows] == [400]


def test_a_model_that_cannot_be_loaded_is_tried_ever_more_seldom(tmp_path, monkeypatch):
    pauses, failed = [], LineAnswer(503, "req-1", Raw(b'{"error":{"code":"loading_failed"}}'))

    async def pause(seconds):
        pauses.append(seconds)

    async def ask(line):
        return failed if len(pauses) < 8 else LineAnswer(200, "req-1", Raw(b"{}"))

    monkeypatch.setattr(batch.asyncio, "sleep", pause)
    answer(lines_of(line("a")), tmp_path / "out.jsonl", ask)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_key_of_a_line_that_cannot_be_read_is_its_number():
    assert BatchLine(7, "a").key == "a" and lines_of(line("a"), "bad")[1].key == 2
