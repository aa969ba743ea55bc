"""Requests that a well-behaved client never sends: none of them reaches another host, or other parts of the upstream's."""

import gzip
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import msgspec
import pytest
from backports import zstd
from server.conftest import DEADLINE, until
from slotcache.front import app

from front.conftest import ordering
from front.upstreams import DONE, END, STREAM, chunk, response, scripted

ANSWER = response("200 OK", b'{"choices": []}')


def raw(front, data):
    """The bytes that come back for some bytes on a connection, up to its end."""
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=DEADLINE) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def get(target):
    return f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer mine\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    "path", ["%2F@{host}/x", "%2f%2f{host}/x", "%2F:1/x", "%2F[::x]/x", "/a/../x", "/%2e%2E/x", "/..%5Cx", "/a#b"]
)
def test_a_path_leads_to_the_upstream_alone(path):
    with (
        scripted(answer=lambda body: ANSWER) as other,
        scripted(answer=lambda body: ANSWER) as upstream,
        ordering(f"{upstream.url}/engine/v1", dialect="openai") as front,
    ):
        refused = raw(front, get(path.format(host=other.url.removeprefix("http://"))))
        assert refused.startswith(b"HTTP/1.1 400") and b"is no path of the upstream" in refused
        assert not other.requests and not upstream.requests
        assert raw(front, get("//v1/a..b/%2E/x?y=../z")).startswith(b"HTTP/1.1 200")
        assert upstream.requests[0][0].startswith(b"GET /engine//v1/a..b/%2E/x?y=../z HTTP/1.1\r\n")


def test_headers_go_on_byte_for_byte_but_for_those_of_the_connection():
    own = ("X-Answer: \u00e9", "X-Once: 1", "Connection: close, x-once", "Keep-Alive: 5")
    with (
        scripted(answer=lambda body: response("200 OK", b"{}", "application/json", *own)) as upstream,
        ordering(upstream.url, dialect="openai") as front,
    ):
        sent = b"X-Question: \xc3\xa9\r\nX-Once: 1\r\nConnection: close, X-Once\r\n"
        answer = raw(front, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + sent + b"\r\n")
    ((head, _),) = upstream.requests
    assert b"x-question: \xc3\xa9\r\n" in head and b"x-once" not in head
    assert b"x-answer: \xc3\xa9\r\n" in answer and b"x-once" not in answer and b"keep-alive" not in answer


@pytest.mark.parametrize(("length", "status"), [(60_000, 200), (70_000, 502)])
@pytest.mark.parametrize("fields", [{}, {"documents": ["a"]}], ids=["plain", "documents"])
def test_a_header_field_of_the_upstream_may_be_as_long_as_the_first_line(length, status, fields):
    own = f"X-Long: {'x' * length}"
    with (
        scripted(answer=lambda body: response("200 OK", b"{}", "application/json", own)) as upstream,
        ordering(upstream.url, dialect="openai") as front,
    ):
        answer = front.chat("?", **fields)
    assert (answer.status_code, len(answer.headers.get("x-long", ""))) == (status, length if status == 200 else 0)


@pytest.mark.parametrize("more", [b"", b',"documents":["a"]'], ids=["plain", "documents"])
@pytest.mark.parametrize(
    "field",
    [b'"stream_options":1e999', b'"conversation":1e999', b'"user":"\\ud83"'],
)
def test_a_body_that_is_no_json_is_a_bad_request(field, more):
    body = b'{"messages":[{"role":"user","content":"?"}],"stream":true,' + field + more + b"}"
    with ordering("http://127.0.0.1:9", dialect="openai") as front:
        answer = front.http.post("/v1/chat/completions", content=body)
    assert (answer.status_code, "is not a chat" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("more", [b"", b',"documents":["a"]'], ids=["plain", "documents"])
@pytest.mark.parametrize(
    ("field", "param"),
    [(b'"user":"\xff"', "user"), (b'"messages":[{"role":"user","content":"\xff"}]', "messages[0].content")],
)
def test_bytes_that_are_no_text_are_a_bad_request_with_their_field(field, param, more):
    with ordering("http://127.0.0.1:9", dialect="openai") as front:
        answer = front.http.post("/v1/chat/completions", content=b'{"messages":[],%b%b}' % (field, more))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("more", [b"", b',"documents":["a"]'], ids=["plain", "documents"])
def test_half_of_a_character_reaches_the_upstream_whole(more):
    body = b'\xef\xbb\xbf{"messages":[{"role":"user","content":"a\\ud83d?"}]%b}' % more
    with scripted(answer=lambda body: ANSWER) as upstream, ordering(upstream.url, dialect="openai") as front:
        assert front.http.post("/v1/chat/completions", content=body).status_code == 200
    assert json.loads(upstream.requests[0][1])["messages"][0]["content"].endswith("a\ufffd?")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/anything"])
def test_a_packed_body_reaches_the_upstream_unpacked(path):
    body = b'{"messages":[{"role":"user","content":"?"}]}'
    with scripted(answer=lambda body: ANSWER) as upstream, ordering(upstream.url, dialect="openai") as front:
        for encoding, pack in (("gzip", gzip.compress), ("zstd", zstd.compress)):
            assert front.http.post(path, content=pack(body), headers={"Content-Encoding": encoding}).status_code == 200
        assert front.http.post(path, content=body, headers={"Content-Encoding": "br"}).status_code == 415
    assert [sent for _, sent in upstream.requests] == [body, body]
    assert not any(b"content-encoding" in head.lower() for head, _ in upstream.requests)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/speculate"])
@pytest.mark.parametrize(("element", "says"), [(b"[]", b"brackets"), (b"1", b"commas")])
def test_a_body_of_more_elements_than_any_context_holds_is_not_decoded(element, says, path, monkeypatch):
    """It would stop all threads of the front while it is: 10 s for each 16 MiB of empty lists."""
    content = b",".join([element] * (1_100_000 if says == b"commas" else 270_000))
    body = b'{"messages":[{"role":"user","content":[' + content + b"]}]}"
    sizes, real = [], msgspec.json.decode
    with ordering("http://127.0.0.1:9", dialect="openai") as front:
        monkeypatch.setattr(msgspec.json, "decode", lambda data, **named: (sizes.append(len(data)), real(data, **named))[1])
        answer = front.http.post(path, content=body)
    assert answer.status_code == 413 and says in answer.content
    assert all(size < 1000 for size in sizes)


MANY = 10_001
ROWS = [{"id": f"{number}", "text": "x"} for number in range(MANY)]
ASKED = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["x"] * MANY}, "documents"),
        ({"messages": [ASKED] * MANY}, "messages"),
        ({"messages": [ASKED | {"documents": ["x"] * 5001}] * 2}, "messages[1].documents"),
        ({"messages": [ASKED | {"documents": ["x"] * 5001}, ASKED], "documents": ["x"] * 5000}, "documents"),
    ],
)
def test_more_messages_or_documents_than_any_context_holds_are_not_read(fields, param):
    """Each takes 20 us, some of it under the lock of all orders: 100,000 documents held up all others for seconds."""
    with scripted(answer=lambda body: ANSWER) as upstream, ordering(upstream.url, dialect="openai") as front:
        refused = front.chat(**fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert not upstream.requests
        whole = front.chat(documents=["x"] * 10_000)
        assert whole.status_code == 200 and whole.headers["x-slotcache-order"].startswith("rank; order=1;")


def test_a_list_of_more_results_than_that_is_no_list_of_documents():
    rows = {"role": "tool", "tool_call_id": "1", "content": json.dumps(ROWS)}
    with scripted(answer=lambda body: ANSWER) as upstream, ordering(upstream.url, dialect="openai") as front:
        assert front.chat(messages=[ASKED, rows]).status_code == 200
    assert json.loads(upstream.requests[0][1])["messages"][1] == rows


def test_small_chats_pass_a_large_one_that_is_being_read():
    """A large one has a thread of its own: held here, as one of many documents holds it."""
    large = {"messages": [ASKED], "documents": ["x" * 100_000]}
    with (
        scripted(answer=lambda body: ANSWER) as upstream,
        ordering(upstream.url, dialect="openai") as front,
        ThreadPoolExecutor(8) as clients,
    ):
        reading, read = Event(), app.read_chat

        def slowly(body, *more):
            assert len(body) < 100_000 or reading.wait(30)
            return read(body, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "read_chat", slowly)
            waiting = [clients.submit(front.http.post, "/v1/chat/completions", json=large) for _ in range(8)]
            until(lambda: front.host.room.num_relayed == 8)
            answers = [front.chat(documents=["a", "b"]) for _ in range(3)]
            assert len(upstream.requests) == 3 and not any(one.done() for one in waiting)
            reading.set()
            assert {one.result().status_code for one in waiting} == {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize("content", [5, {"text": "lost"}, True])
def test_no_content_is_lost_after_documents(content):
    with ordering("http://127.0.0.1:9", dialect="openai") as front:
        answer = front.chat(messages=[{"role": "user", "content": content}], documents=["a"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


@pytest.mark.parametrize("options", [[1], "x", {"include_usage": 1}])
def test_wrong_stream_options_are_the_upstreams_to_refuse(options):
    with scripted(answer=lambda body: ANSWER) as upstream, ordering(upstream.url, dialect="openai") as front:
        front.chat("?", documents=["a"], stream=True, stream_options=options)
    assert json.loads(upstream.requests[0][1])["stream_options"] == options


def test_an_answer_that_is_no_utf8_is_relayed_as_it_is():
    whole = b'data: {"choices":[{"delta":{"content":"\xff"}}],"usage":{"prompt_tokens":1}}\n\n' + DONE
    with scripted(STREAM, chunk(whole), END) as upstream, ordering(upstream.url, dialect="llama") as front:
        assert front.chat("?", documents=["a"], stream=True).content == whole
    with scripted(answer=lambda body: response("200 OK", b'{"a":"\xff"}')) as upstream, ordering(upstream.url) as front:
        assert front.chat("?", documents=["a"]).content == b'{"a":"\xff"}'
