"""Files and batches, with OpenAI's own client: owners, limits, ends, and what outlives a restart."""

import errno
import json
from contextlib import suppress
from typing import Any

import openai
import pytest
from support.on_device import ON_DEVICE

from server.conftest import DEADLINE, running, until

CHAT = "/v1/chat/completions"
SHARED = [{"id": "tides", "text": "The moon raises two tides a day. " * 20}]


def line(custom_id, url=CHAT, **body):
    usual = {"messages": [{"role": "user", "content": f"What is {custom_id}?"}], "max_tokens": 4, "ignore_eos": True}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": usual | body})


def lines(number, **body):
    return [line(f"n{at}", **body) for at in range(number)]


def upload(client, *texts, name="lines.jsonl"):
    return client.files.create(file=(name, "\n".join(texts).encode()), purpose="batch")


def begin(client, *texts, endpoint=CHAT, **fields):
    file = upload(client, *texts)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client, batch) -> Any:
    until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled"))
    return client.batches.retrieve(batch.id)


def progress(server, batch):
    """How many lines have an answer."""
    counts = server.openai.batches.retrieve(batch.id).request_counts
    return counts.completed + counts.failed


def rows(client, id):
    return [json.loads(text) for text in client.files.content(id).text.splitlines()] if id else []


@pytest.fixture(scope="module")
def keyed(tiny):
    with running(tiny, api_key="one,two", files=8, files_disk=1) as server:
        yield server


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=DEADLINE, max_retries=0)


def test_a_batch_answers_as_the_route_does_and_names_bad_lines(server):
    client = server.openai
    batch = begin(client, *lines(3, temperature=0), "not JSON", line("bad", max_tokens="many"), metadata={"of": "tests"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"of": "tests"})
    done = ended(client, batch)
    assert done.status == "completed" and done.in_progress_at and done.completed_at
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
    answers = {row["custom_id"]: row["response"] for row in rows(client, done.output_file_id)}
    said = server.chat("What is n1?")["choices"]
    assert set(answers) == {"n0", "n1", "n2"} and answers["n1"]["body"]["choices"] == said
    assert all(answer["status_code"] == 200 and answer["request_id"] for answer in answers.values())
    unread, refused = sorted(rows(client, done.error_file_id), key=lambda row: row["error"] is None)
    assert (unread["custom_id"], unread["error"]["line"]) == (None, 4)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("bad", 400)
    assert "max_tokens" in refused["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ],
)
def test_each_endpoint_is_asked(server, endpoint, body):
    text = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
    done = ended(server.openai, begin(server.openai, text, line("other"), endpoint=endpoint))
    (answer,) = rows(server.openai, done.output_file_id)
    (other,) = rows(server.openai, done.error_file_id)
    assert answer["response"]["body"]["id"] and other["error"]["code"] == "invalid_url"


def test_the_lines_of_a_batch_share_their_documents_without_asking_for_it(server):
    server.http.delete("/v1/cache")
    done = ended(server.openai, begin(server.openai, *lines(4, documents=SHARED)))
    usages = [row["response"]["body"]["usage"] for row in rows(server.openai, done.output_file_id)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert sum(number > 100 for number in cached) == 3
    done = ended(server.openai, begin(server.openai, *lines(2, documents=SHARED, cache_prompt=False)))
    for row in rows(server.openai, done.output_file_id):
        assert row["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_line_that_streams_is_refused(server):
    done = ended(server.openai, begin(server.openai, line("a", stream=True)))
    (row,) = rows(server.openai, done.error_file_id)
    assert row["response"]["body"]["error"]["param"] == "stream"


def test_a_file_that_is_not_jsonl_fails_as_a_whole_and_names_lines(server):
    done = ended(server.openai, begin(server.openai, "%PDF-1.4", "binary"))
    assert done.status == "failed" and not done.output_file_id
    assert [error.line for error in done.errors.data] == [1, 2] and "custom_id" in done.errors.data[0].message


def test_a_chat_is_answered_while_a_batch_runs_and_the_batch_goes_on(server):
    batch = begin(server.openai, *lines(80, max_tokens=200))
    until(lambda: progress(server, batch) > 0)
    answers = [server.chat(f"Question {number}")["usage"]["completion_tokens"] for number in range(3)]
    assert answers == [4] * 3 and server.openai.batches.retrieve(batch.id).status == "in_progress"
    assert ended(server.openai, batch).request_counts.completed == 80


def test_a_cancelled_batch_keeps_the_answers_that_it_has(server):
    batch = begin(server.openai, *lines(80, max_tokens=200 if ON_DEVICE else 1000))
    until(lambda: progress(server, batch) > 0)
    assert server.openai.batches.cancel(batch.id).status == "cancelling"
    done = ended(server.openai, batch)
    assert done.status == "cancelled" and done.cancelled_at
    assert 0 < len(rows(server.openai, done.output_file_id)) == done.request_counts.completed < 80
    with pytest.raises(openai.BadRequestError):
        server.openai.batches.cancel(batch.id)
    until(lambda: not server.service.open)


def test_a_batch_is_cancelled_on_a_full_disk_too(server, monkeypatch):
    batch = begin(server.openai, *lines(80, max_tokens=200 if ON_DEVICE else 1000))
    until(lambda: progress(server, batch) > 0)

    def fail(stored):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(server.host.batches.files, "save", fail)
        assert server.openai.batches.cancel(batch.id).status == "cancelling"
        until(lambda: not server.service.open)
    assert ended(server.openai, batch).request_counts.completed < 80


def test_batches_wait_for_their_turn_and_one_that_waits_can_be_cancelled(server):
    first, second = begin(server.openai, *lines(70, max_tokens=200)), begin(server.openai, *lines(2))
    server.openai.batches.cancel(second.id)
    assert ended(server.openai, first).status == "completed"
    done = ended(server.openai, second)
    assert (done.status, done.request_counts.completed) == ("cancelled", 0)


def test_files_are_listed_shown_and_deleted(server):
    client = server.openai
    mine = [upload(client, line("a"), name=f"ü {number}.jsonl") for number in range(3)]
    assert client.files.retrieve(mine[0].id).filename == "ü 0.jsonl"
    assert client.files.content(mine[0].id).text == line("a")
    first = client.files.list(limit=2, purpose="batch")
    assert [file.id for file in first.data] == [file.id for file in reversed(mine)][:2] and first.has_more
    assert {file.id for file in client.files.list()} >= {file.id for file in mine}
    assert client.files.delete(mine[1].id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(mine[1].id)
    assert client.files.list(purpose="assistants").data == []


def test_a_file_that_an_unfinished_batch_reads_stays(server):
    batch = begin(server.openai, *lines(70, max_tokens=200))
    with pytest.raises(openai.BadRequestError, match=batch.id):
        server.openai.files.delete(batch.input_file_id)
    ended(server.openai, batch)
    assert server.openai.files.delete(batch.input_file_id).deleted
    assert server.openai.batches.retrieve(batch.id).input_file_id == batch.input_file_id


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b"{}", "application/json", "expected multipart/form-data"),
        (b"", "multipart/form-data", "expected multipart/form-data"),
        (b"--x\r\n", "multipart/form-data; boundary=x", "last boundary"),
        (b"--x--\r\n", "multipart/form-data; boundary=x", "file is missing"),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nA\r\n--x--',
            "multipart/form-data; boundary=x",
            "purpose",
        ),
        (b"\xff\x00--x\r\n\r\n--x--", 'multipart/form-data; boundary="x"', "file is missing"),
    ],
)
def test_forms_that_are_none(server, content, kind, says):
    answer = server.http.post("/v1/files", content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_files_and_batches_belong_to_a_key(keyed):
    one, two = client_of(keyed, "one"), client_of(keyed, "two")
    batch = begin(one, line("a"))
    for ask in (two.files.retrieve, two.files.content, two.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(batch.input_file_id)
    for ask in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.NotFoundError):
        two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert not list(two.files.list()) and not list(two.batches.list())
    done = ended(one, batch)
    assert [one.id for one in one.batches.list()] == [batch.id]
    with pytest.raises(openai.NotFoundError):
        two.files.content(done.output_file_id)
    with pytest.raises(openai.AuthenticationError):
        client_of(keyed, "three").files.list()


def test_many_batches_of_one_key_forget_none_of_another(tiny):
    with running(tiny, api_key="one,two", files=6) as server:
        one, two = client_of(server, "one"), client_of(server, "two")
        done = ended(one, begin(one, line("a")))
        file = upload(two, "nonsense")
        for _ in range(9):
            ended(two, two.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
        assert one.batches.retrieve(done.id).output_file_id == done.output_file_id
        assert len(list(two.batches.list())) == 5


def test_more_batches_than_files_wait_for_room(tiny):
    story = {"prompt": "Tell me a story.", "n_predict": 4000, "ignore_eos": True, "stream": True}
    with running(tiny, files=2) as server, server.http.stream("POST", "/completion", json=story) as answer:
        told = answer.iter_lines()  # httpx closes the stream with its iterator
        next(told)  # batches wait meanwhile
        fields: dict[str, Any] = {
            "input_file_id": upload(server.openai, line("a")).id,
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        for _ in range(2):
            server.openai.batches.create(**fields)
        with pytest.raises(openai.RateLimitError, match="try again later"):
            server.openai.batches.create(**fields)


def test_files_are_bounded_in_number_and_bytes(keyed):
    client = client_of(keyed, "two")
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, "x" * (1 << 20))
    assert refused.value.status_code == 413 and refused.value.code == "storage_full"
    with pytest.raises(openai.APIStatusError, match="at most 8"):
        for _ in range(9):
            upload(client, line("a"))
    for file in client.files.list():
        client.files.delete(file.id)
    assert upload(client, line("a")).bytes == len(line("a"))


def test_answers_that_take_too_much_room_end_a_batch(keyed):
    client = client_of(keyed, "one")
    texts = [line(f"n{at}", logprobs=True, top_logprobs=20, max_tokens=60) for at in range(40)]
    done = ended(client, begin(client, *texts))
    assert done.status == "failed" and done.errors.data[0].code == "storage_full"
    assert 0 < len(rows(client, done.output_file_id)) == done.request_counts.completed < 40


def test_a_server_goes_on_with_the_batch_of_the_one_before(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as server:
        finished = ended(server.openai, begin(server.openai, line("a")))
        batch = begin(server.openai, *lines(80, max_tokens=1000))
        until(lambda: progress(server, batch) > 1)
    (part,) = (tmp_path / "files").glob("*.part")
    before = part.read_bytes()
    part.write_bytes(before + b'{"id":"torn')
    stored = [text for path in (tmp_path / "files").iterdir() for text in [path.read_text("utf-8", "replace")]]
    assert not any("none" in text and "owner" in text for text in stored), "no key is stored"
    with running(tiny, cache_dir=str(tmp_path)) as server:
        client = server.openai
        assert rows(client, finished.output_file_id)[0]["custom_id"] == "a"
        done = ended(client, batch)
        answers = client.files.content(done.output_file_id).text
        assert answers.startswith(before.decode()) and done.request_counts.completed == 80
        assert {json.loads(text)["custom_id"] for text in answers.splitlines()} == {f"n{at}" for at in range(80)}
    assert not list((tmp_path / "files").glob("*.part"))


def test_without_a_folder_nothing_is_left_behind(tiny):
    with running(tiny) as server:
        assert server.host.batches is not None
        upload(server.openai, line("a"))
        folder = server.host.batches.files.folder
        assert any(folder.iterdir())
    assert not folder.exists()


def test_two_servers_of_one_folder_keep_their_files_apart(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as first, running(tiny, cache_dir=str(tmp_path)) as second:
        file = upload(first.openai, line("a"))
        with suppress(openai.NotFoundError):
            second.openai.files.retrieve(file.id)
            pytest.fail("a file of another server")
        assert {path.name for path in tmp_path.iterdir()} >= {"files", "files-1"}
