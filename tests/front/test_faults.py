"""Upstreams that refuse, break off, stall or send garbage: the client gets one clear error, and whole events only."""

import json

import pytest

from front.conftest import USUAL, free_port, ordering
from front.upstreams import DONE, END, HANG, STREAM, chunk, event, response, scripted

QUESTION = USUAL | {"messages": [{"role": "user", "content": "What?"}]}
WITH_DOCUMENTS = QUESTION | {"documents": [{"id": "a", "text": "A text of a document."}]}
PATIENCE = {"dialect": "openai"}
IMPATIENCE = PATIENCE | {"answer_timeout": 1.0, "stall_timeout": 1.0}
AT_ONCE = PATIENCE | {"answer_timeout": 0.2, "stall_timeout": 0.2}
"""Of fronts whose upstream hangs: in a stream, before an answer. Any other gets the usual time: machines may be busy."""
TWO = event("one") + event("two")


def error_of(answer):
    """The error of an answer, which has OpenAI's shape."""
    (error,) = answer.json().values()
    assert set(error) >= {"message", "type", "param", "code"}
    return error


def ask(script, body=WITH_DOCUMENTS, path="/v1/chat/completions"):
    patience = PATIENCE if HANG not in script else IMPATIENCE if "stream" in body else AT_ONCE
    with scripted(*script) as upstream, ordering(upstream.url, **patience) as front:
        return front.http.post(path, json=body)


@pytest.mark.parametrize(
    ("path", "ends"),
    [("/v1/chat/completions", True), ("/v1/completions", True), ("/completion", False), ("/v1/messages", False)],
)
def test_a_stream_that_breaks_off_ends_as_its_clients_expect(path, ends):
    answer = ask([STREAM, chunk(event("one")), "reset"], QUESTION | {"prompt": "x", "stream": True}, path)
    assert b"upstream_broke_off" in answer.content and answer.content.endswith(DONE) is ends


def test_a_path_makes_no_line_of_its_own_in_the_log(caplog):
    ask([STREAM, chunk(event("one")), "reset"], QUESTION, "/v1/a%0Dlie" + "x" * 1000)
    (noted,) = [record.getMessage() for record in caplog.records if "broke off" in record.getMessage()]
    assert noted.isprintable() and "x" * 200 not in noted


def test_an_upstream_that_refuses_is_a_bad_gateway():
    with ordering(f"http://127.0.0.1:{free_port()}", **PATIENCE) as front:
        for body in (QUESTION, WITH_DOCUMENTS):
            answer = front.http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, error_of(answer)["code"]) == (502, "upstream_unreachable")
        assert error_of(front.http.get("/v1/models"))["code"] == "upstream_unreachable"


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (["reset"], 502, "upstream_broke_off"),
        ([b""], 502, "upstream_broke_off"),
        ([HANG], 504, "upstream_timeout"),
        ([b"HTTP/1.1 200 OK\r\nContent-Le"], 502, "upstream_broke_off"),
        ([b"HTTP/1.1 200 OK\r\nContent-Le", HANG], 504, "upstream_timeout"),
        ([b"\x16\x03\x01 this is no HTTP\r\n\r\n"], 502, "upstream_garbage"),
        ([b"x" * 200_000], 502, "upstream_garbage"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"], 502, "upstream_garbage"),
        ([b"HTTP/1.1 999 Denied\r\nContent-Length: 0\r\n\r\n"], 502, "upstream_garbage"),
        ([b"HTTP/1.1 000 ?\r\nContent-Length: 0\r\n\r\n"], 502, "upstream_garbage"),
        ([response("200 OK", b'{"choices": []}')[:-4]], 502, "upstream_broke_off"),
        ([response("200 OK", b'{"choices": []}')[:-4], HANG], 504, "upstream_timeout"),
        ([STREAM], 502, "upstream_broke_off"),
        ([STREAM, chunk(event("one")[:-9]), "reset"], 502, "upstream_broke_off"),
        ([STREAM, HANG], 504, "upstream_timeout"),
    ],
)
@pytest.mark.parametrize("body", [QUESTION, WITH_DOCUMENTS], ids=["plain", "documents"])
def test_a_fault_before_the_answer_is_an_error(script, status, code, body):
    answer = ask(script, body)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([chunk(TWO + event("three")[:20])], "upstream_broke_off"),
        ([chunk(TWO + event("three")[:20]), "reset"], "upstream_broke_off"),
        ([chunk(TWO), b"zzz no chunk\r\n"], "upstream_broke_off"),
        ([chunk(TWO), HANG], "upstream_timeout"),
        ([chunk(TWO + b"data: {")[:-5], HANG], "upstream_timeout"),
        ([chunk(TWO + b"data: half an event"), END], "upstream_broke_off"),
    ],
)
def test_a_fault_within_a_stream_ends_it_with_an_event(script, code):
    answer = ask([STREAM, *script], WITH_DOCUMENTS | {"stream": True})
    assert answer.status_code == 200
    *events, error, done, rest = answer.content.split(b"\n\n")
    assert b"\n\n".join(events) + b"\n\n" == TWO
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == code
    assert (done + b"\n\n", rest) == (DONE, b"")


def test_a_stream_that_only_its_connection_ends_must_end_with_done():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    whole = ask([head, TWO + DONE], WITH_DOCUMENTS | {"stream": True})
    assert whole.content == TWO + DONE
    assert b"upstream_broke_off" in ask([head, TWO], WITH_DOCUMENTS | {"stream": True}).content


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_any_ends_of_lines_end_events(end):
    whole = (TWO + DONE).replace(b"\n", end.encode())
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    pieces = [whole[at : at + 9] for at in range(0, len(whole), 9)]
    assert ask([head, *pieces], WITH_DOCUMENTS | {"stream": True}).content == whole


def test_a_fault_after_the_end_of_a_stream_does_not_matter():
    assert ask([STREAM, chunk(TWO + DONE), "reset"], WITH_DOCUMENTS | {"stream": True}).content == TWO + DONE


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_busy_upstream_speaks_for_itself(status):
    reported = b'{"error": {"message": "too busy", "type": "rate_limit_error", "param": null, "code": 1}}'
    answer = ask([response(status, reported, "application/json", "Retry-After: 7", "X-Own: 1")])
    assert (answer.status_code, answer.content) == (int(status[:3]), reported)
    assert (answer.headers["retry-after"], answer.headers["x-own"]) == ("7", "1")


def test_an_error_page_becomes_an_error_object():
    answer = ask([response("503 Service Unavailable", b"<html>no backend</html>", "text/html", "Retry-After: 7")])
    error = error_of(answer)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert "503" in error["message"] and "no backend" in error["message"]


def test_an_error_page_may_have_a_header_that_is_no_text():
    answer = ask([response("503 Service Unavailable", b"no backend", "text/html", "Retry-After: \xff7")])
    assert (answer.status_code, "retry-after" in answer.headers) == (503, False)
