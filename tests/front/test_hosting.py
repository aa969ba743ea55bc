"""A front as a server: who may ask, clients that leave, its end, its command."""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from docs.markdown import CODE, read, rows, section
from server.api.test_metrics import LEANING
from server.conftest import DEADLINE, until
from slotcache.front import cli
from slotcache.server.cli import main

from front.conftest import USUAL, free_port, ordering
from front.test_front import documents
from front.upstreams import HANG, STREAM, chunk, event, response, scripted

REQUESTS = int(os.environ.get("SLOTCACHE_REQUESTS", "0"))
ROOT = Path(__file__).parents[2]
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":900,"prompt_tokens_details":{"cached_tokens":0}}}'


def test_a_front_has_keys_of_its_own_and_the_upstream_gets_its_key():
    with scripted(answer=lambda body: response("200 OK", ANSWER)) as upstream:
        settings = {"hosting": {"api_key": "mine"}, "upstream_key": "theirs", "dialect": "openai"}
        with ordering(upstream.url, **settings) as front:
            assert front.chat("?").status_code == 401
            assert front.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
            known = {"Authorization": "Bearer mine"}
            assert front.http.post("/v1/chat/completions", json={"messages": []}, headers=known).status_code == 200
    (head, _) = upstream.requests[0]
    assert b"Bearer theirs" in head and b"mine" not in head


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_anybody_may_read_the_upstreams_health_and_send_nothing_with_it(path):
    stranger = {"Host": "evil.example", "Origin": "http://evil.example", "X-Own": "1"}
    with (
        scripted(answer=lambda body: response("200 OK", b'{"status":"ok"}')) as upstream,
        ordering(upstream.url, hosting={"api_key": "mine"}, upstream_key="theirs", dialect="openai") as front,
    ):
        assert front.http.get(f"{path}?q=1", headers=stranger).json() == {"status": "ok"}
        assert front.http.request("GET", path, headers=stranger, content=b"x" * 100_000).status_code == 200
        (head, body), (again, lost) = upstream.requests
        assert head.startswith(f"GET {path} HTTP/1.1\r\n".encode()) and head.partition(b"\r\n")[0] in again
        for word in (b"theirs", b"mine", b"x-own", b"evil", b"content-length", b"transfer-encoding"):
            assert word not in (head + again).lower()
        assert body == lost == b""
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            asked = {name: front.http.request(method, path, headers=head).status_code for name, head in STRANGERS.items()}
            assert asked == {"name": 403, "page": 403, "none": 401}
        assert len(upstream.requests) == 2
        known = {"Authorization": "Bearer mine"}
        front.http.post(path, content=b"x", headers=known)
        assert b"Bearer theirs" in upstream.requests[2][0], "a request as any other"


STRANGERS = {"name": {"Host": "evil.example"}, "page": {"Origin": "http://evil.example"}, "none": {}}


def test_pages_that_the_front_admits_ask_through_it(engine):
    """slotcache behind it refuses pages of other origins than its own, which a page of the front is."""
    body = USUAL | {"messages": [{"role": "user", "content": "?"}]}
    with ordering(engine.url, hosting={"cors_origins": "http://app.example"}, dialect="slotcache") as front:
        for origin, site in ((front.url, "same-origin"), ("http://app.example", "cross-site")):
            page = {"Origin": origin, "Referer": f"{origin}/page", "Sec-Fetch-Site": site, "Sec-Fetch-Mode": "cors"}
            assert front.http.get("/v1/models", headers=page).status_code == 200
            for fields in ({}, {"documents": documents("alpha")}):
                answer = front.http.post("/v1/chat/completions", json=body | fields, headers=page)
                assert answer.status_code == 200, answer.text
        assert front.http.get("/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403


def test_which_pages_may_read_an_answer_is_for_the_front_to_say():
    own = "Access-Control-Allow-Origin: *"
    page = {"Origin": "http://app.example", "Referer": "http://app.example/", "Sec-Fetch-Site": "cross-site"}
    with scripted(answer=lambda body: response("200 OK", b"{}", "application/json", own)) as upstream:
        with ordering(upstream.url, dialect="openai") as front:
            assert "access-control-allow-origin" not in front.http.get("/v1/models").headers
        with ordering(upstream.url, hosting={"cors_origins": "http://app.example"}, dialect="openai") as front:
            allowed = front.http.get("/v1/models", headers=page).headers.get_list("access-control-allow-origin")
    assert allowed == ["http://app.example"]
    assert not any(word in head.lower() for head, _ in upstream.requests for word in (b"app.example", b"sec-fetch"))


def test_a_client_that_disconnects_ends_the_request_upstream(engine):
    before = engine.metric("slotcache_requests_total", end="cancelled")
    body = USUAL | {"messages": [{"role": "user", "content": "?"}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with ordering(engine.url, dialect="llama") as front:
        with httpx.stream("POST", f"{front.url}/v1/chat/completions", json=body, timeout=DEADLINE) as answer:
            next(answer.iter_raw())
        until(lambda: engine.metric("slotcache_requests_total", end="cancelled") == before + 1)


def test_other_requests_are_answered_beside_one_that_stalls(engine):
    body = USUAL | {"messages": [], "stream": True}
    may_end = threading.Event()
    with (
        scripted(STREAM, chunk(event("one")), may_end, "reset") as stalled,
        ordering(stalled.url, dialect="openai") as front,
        ThreadPoolExecutor(8) as clients,
    ):
        asked = [clients.submit(front.http.post, "/v1/chat/completions", json=body) for _ in range(8)]
        until(lambda: len(stalled.requests) == 8)
        assert front.http.get("/metrics").status_code == 200
        assert not any(answer.done() for answer in asked)
        may_end.set()
        assert all(b"upstream_broke_off" in answer.result().content for answer in asked)


def test_a_slow_reader_gets_all_of_a_fast_stream_that_has_ended():
    events = [event(f"{number:0100}") for number in range(20_000)]
    whole = b"".join(events) + b"data: [DONE]\n\n"
    with scripted(STREAM, chunk(whole) + b"0\r\n\r\n") as upstream, ordering(upstream.url, dialect="openai") as front:
        body = USUAL | {"messages": [], "stream": True}
        with front.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            time.sleep(0.5)
            assert b"".join(answer.iter_raw()) == whole


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:8080", "ftp://a", "http://", "http://a:b", "http://a:b@c", "http://a/?b"]
)
def test_an_upstream_must_be_an_address(address, capsys):
    assert main(["order", *(["--upstream", address] if address else [])]) == 2
    assert "--upstream" in capsys.readouterr().err


def test_the_command_serves_until_it_is_asked_to_stop(engine):
    port = free_port()
    command = [sys.executable, "-m", "slotcache.server.cli", "order", "--upstream", engine.url, "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: process.poll() is not None or is_up(port))
            assert (
                httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=DEADLINE).json()["data"][0]["owned_by"]
                == "slotcache"
            )
        finally:
            process.terminate()
        _, log = process.communicate(timeout=DEADLINE)
        assert process.returncode in (0, -15) and "documents that come to" in log


def test_an_answer_that_takes_too_long_at_the_end_ends_with_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "GRACE", 0.3)
    body = USUAL | {"messages": [{"role": "user", "content": "?"}]}
    with (
        scripted(STREAM, chunk(event("one")), HANG) as upstream,
        scripted(HANG) as silent,
        ThreadPoolExecutor(1) as clients,
        ordering(silent.url, dialect="openai") as second,
        ordering(upstream.url, dialect="openai") as first,
    ):
        whole = clients.submit(second.http.post, "/v1/chat/completions", json=body)
        with first.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            pieces = filter(None, answer.iter_raw())
            assert next(pieces) == event("one")
            until(lambda: silent.requests)
            first.server.should_exit = second.server.should_exit = True
            rest = b"".join(pieces)
        assert rest.startswith(b'data: {"error":{"message":"the front is shutting down"') and rest.endswith(
            b"data: [DONE]\n\n"
        )
        assert (whole.result(DEADLINE).status_code, "shutting down" in whole.result().text) == (503, True)


def test_every_metric_and_failure_is_described():
    text = read("docs/scale.md")
    with scripted("reset") as upstream, ordering(upstream.url, dialect="openai") as front:
        front.chat("?")
        lines = front.http.get("/metrics").text.splitlines()
    real = {tuple(line.split()[2:4]) for line in lines if line.startswith("# TYPE") and "_created" not in line}
    described = {(CODE.findall(cells[0])[0], cells[1]) for cells in rows(section(text, "## Metrics"))}
    assert real == described
    assert [line for line in lines if line.startswith("# HELP") and LEANING.search(line.split(" ", 3)[3])] == []
    codes = set(re.findall(r'"(upstream_\w+)"', "".join(path.read_text() for path in (ROOT / "front").glob("*.py"))))
    codes -= {"upstream_key"}
    assert codes == {code for code in CODE.findall(section(text, "## Failures")) if code.startswith("upstream_")}


def is_up(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not REQUESTS, reason="SLOTCACHE_REQUESTS is not set")
def test_memory_stays_flat():
    """After a first part of the requests, each of which brings new documents, the rest takes no more memory."""
    sizes = []
    with (
        scripted(answer=lambda body: response("200 OK", ANSWER)) as upstream,
        ordering(upstream.url, dialect="openai", tree_nodes=200) as front,
    ):
        for number in range(REQUESTS):
            given = [{"id": f"{number} {at}", "text": f"Text {number} {at}. " * 50} for at in range(5)]
            front.chat(f"{number}?", documents=given + documents("alpha"))
            upstream.requests.clear()
            if number in (REQUESTS // 2, REQUESTS - 1):
                sizes.append(resident())
    assert sizes[1] - sizes[0] < 8 << 20, sizes


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
