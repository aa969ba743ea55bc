"""The log: a line a request with its figures, ids, and none of a client's text."""

import json
import logging
import re
import subprocess
import sys

import httpx
import pytest

from server.conftest import DEADLINE, free_port, running, until
from server.test_cli import command

CHAT = {"messages": [{"role": "user", "content": "A secret question of mine."}], "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def lines(caplog):
    """Return the records of requests, oldest first."""
    caplog.set_level(logging.DEBUG, "slotcache.requests")
    return lambda: [record for record in caplog.records if record.name == "slotcache.requests"]


def the_line(lines, number=1):
    """Wait for a number of lines, since one is written after its answer; return the newest."""
    until(lambda: len(lines()) >= number)
    return lines()[-1]


def test_a_request_leaves_one_line_with_its_figures(tiny, lines):
    with running(tiny) as server:
        body = CHAT | {"cache_prompt": True, "documents": [{"id": "hidden name", "text": "A hidden text. " * 8}]}
        answer = server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        line, report = the_line(lines), answer.json()
        fields = line.fields
        assert (fields["request_id"], fields["path"], fields["status"]) == ("mine-1", "/v1/chat/completions", 200)
        assert fields["prompt_tokens"] == report["usage"]["prompt_tokens"] and fields["generated_tokens"] == 5
        assert fields["prefix_cache_tokens"] == 0 == fields["miss_at"] and fields["source"] == "none"
        assert fields["predicted_per_second"] == round(report["timings"]["predicted_per_second"], 1) > 0
        assert fields["ttft_ms"] > 0 and fields["seconds"] > 0 and fields["end"] == "length"
        body["documents"].append({"id": "another hidden name", "text": "More. " * 8})
        report = server.http.post("/v1/chat/completions", json=body).json()
        fields = the_line(lines, 2).fields
        assert fields["prefix_cache_tokens"] > 20 and fields["source"] == "fork" and fields["miss"] == "a document"
        assert re.search(
            r"POST /v1/chat/completions 200 in [\d.]+ s: prompt_tokens \d+, prefix_cache_tokens \d+, "
            r"prefix_cache_ratio 0\.\d+, source fork, ",
            line_of(lines()[-1]),
        )
        own = report["slotcache"] | {"prefix_cache_ratio": round(report["slotcache"]["prefix_cache_ratio"], 3)}
        same = {"prefix_cache_tokens", "prefix_cache_ratio", "source", "miss"}
        assert fields.keys() & own.keys() == same, "a figure of the report has its name in the log, too"
        assert {name: fields[name] for name in same - {"miss"}} == {name: own[name] for name in same - {"miss"}}
        assert fields["miss_at"] == own["miss"]["at"]
        reported = "".join(line_of(line) + json.dumps(line.fields) for line in lines())
        assert "hidden" not in reported and "secret" not in reported and report["id"] not in reported


def line_of(record):
    return record.getMessage()


@pytest.mark.parametrize("sent", ["", "x" * 129, "a\tb", "caf\u00e9", "\x7f"])
def test_an_id_that_no_log_can_hold_is_replaced(server, sent):
    answer = server.http.get("/health", headers={b"X-Request-Id": sent.encode("latin-1")})
    assert re.fullmatch("req-[0-9a-f]{16}", answer.headers["x-request-id"])


def test_each_request_has_an_id_of_its_own_also_if_it_is_refused(tiny):
    with running(tiny, api_key="k") as server:
        answers = [server.http.get(path) for path in ("/health", "/health", "/v1/models", "/none")]
        assert len({answer.headers["x-request-id"] for answer in answers}) == 4


def test_errors_and_cancelled_requests_leave_a_line_as_well(server, lines):
    server.http.post("/completion", json={"prompt": "x", "temperature": "a secret"})
    fields = the_line(lines).fields
    assert (fields["status"], fields["error"], fields["param"]) == (400, 400, "temperature")
    server.http.post("/completion", json={"prompt": [1] * 9000})
    assert the_line(lines, 2).fields["error"] == "context_length_exceeded"
    server.http.get("/v1/models", headers={"Host": "evil.example"})
    assert the_line(lines, 3).fields["status"] == 403 and lines()[-1].levelno == logging.INFO
    body = {"prompt": "Once", "n_predict": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/completion", json=body) as answer:
        next(answer.iter_lines())
    fields = the_line(lines, 4).fields
    assert (fields["status"], fields["end"]) == (200, "cancelled")
    for number, path in enumerate(("/health", "/props"), 5):
        server.http.get(path)
        assert the_line(lines, number).levelno == logging.DEBUG


def test_a_client_s_text_makes_no_line_of_its_own(tiny, lines):
    with running(tiny, strict=True) as server:
        for number, body in enumerate(({"a\nb": 1}, {"stream_options": {"a\x1b[2Jb": 1}}), 1):
            assert server.http.post("/completion", json={"prompt": "x"} | body).status_code == 400
            assert line_of(the_line(lines, number)).isprintable()


def test_several_choices_are_one_line(server, lines):
    server.http.post("/v1/chat/completions", json=CHAT | {"n": 3})
    fields = the_line(lines).fields
    assert (fields["generated_tokens"], fields["choices"], fields["end"]) == (15, 3, "length")


def test_the_log_is_json_on_request_and_may_be_a_file(tiny, tmp_path):
    port, path = free_port(), tmp_path / "log"
    flags = ("--log-format", "json", "--log-file", path, "--mlock", "-c", 1024, "-t", 1)
    with subprocess.Popen(
        command("serve", "-m", tiny, "--port", port, *flags), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as http:
                until(lambda: process.poll() is not None or reaches(http))
                http.post(
                    "/completion", json={"prompt": "Hi", "n_predict": 2, "max_token": 1}, headers={"X-Request-Id": "r1"}
                )
        finally:
            process.terminate()
        _, errors = process.communicate(timeout=DEADLINE)
    assert errors == ""
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    assert logged[0]["level"] == "warning" and "--mlock" in logged[0]["message"]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in logged)
    about = [line for line in logged if line.get("request_id") == "r1"]
    assert "max_tokens" in about[0]["message"] and (about[1]["generated_tokens"], about[1]["status"]) == (2, 200)


def reaches(http):
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_log_that_is_not_read_stops_nothing():
    program = (
        "import logging, time, sys; from slotcache.server.http.log import configure; configure('text', '', False);"
        "log = logging.getLogger('slotcache'); [log.info('x' * 100) for _ in range(20_000)]; print('done')"
    )
    start = command()[2].split("; from")[0]
    process = subprocess.Popen(
        [sys.executable, "-c", f"{start}; {program}", command()[3]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        assert process.wait(DEADLINE) == 0
