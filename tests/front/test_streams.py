"""Streams through a front: the bytes of the upstream, as they come."""

import json
import os
import re
import threading

import httpx
import pytest
from server.conftest import DEADLINE

from front.conftest import USUAL, ordering
from front.test_front import DOCUMENTS, NAMES
from front.upstreams import DONE, END, STREAM, chunk, event, response, scripted

STREAMS = int(os.environ.get("SLOTCACHE_STREAMS", "4"))
OWN = re.compile(rb'"(?:id|created|system_fingerprint)":("[^"]*"|\d+)|"timings":\{[^}]*\}|"slotcache":\{.*\}(?=,"usage"|\})')
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'


def streamed(url, body):
    """The bytes of a stream, without what differs from answer to answer."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    return OWN.sub(b"", answer.content)


@pytest.mark.parametrize("number", range(STREAMS))
def test_a_stream_has_the_bytes_of_the_upstream(front, engine, number):
    body = USUAL | {"messages": [{"role": "user", "content": f"What is {number}?"}], "stream": True, "seed": number}
    body |= {"max_tokens": 3 + number % 7, "temperature": 0.5 * (number % 3), "cache_prompt": False}
    if number % 2:
        body["stream_options"] = {"include_usage": number % 4 == 1}
    assert streamed(front.url, body) == streamed(engine.url, body)


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_a_usage_chunk_that_nobody_asked_for_is_taken_out(asked):
    whole = event("one") + USAGE + DONE
    body = USUAL | {"messages": [{"role": "user", "content": "?"}], "stream": True, "documents": [DOCUMENTS[NAMES[0]]]}
    body |= {} if asked is None else {"stream_options": asked}
    pieces = [chunk(whole[at : at + 7]) for at in range(0, len(whole), 7)]
    with scripted(STREAM, *pieces, END) as upstream, ordering(upstream.url, dialect="vllm") as front:
        answer = front.http.post("/v1/chat/completions", json=body)
    assert answer.content == (whole if asked == {"include_usage": True} else event("one") + DONE)
    sent = json.loads(upstream.requests[0][1])
    assert sent["stream_options"] == {"include_usage": True}
    assert "documents" not in sent


def test_without_documents_bodies_go_both_ways_byte_for_byte():
    odd = b'{ "messages":[{"role":"user",  "content":"\\u00e9"}], "n":1.50, "stream" : false, "documents": [ ] }'
    reported = b'{"choices": [ ],  "usage": {"prompt_tokens": 1e0}}'
    answered = response("200 OK", reported, "application/json", "X-Own: a", "X-Own: b")
    with scripted(answer=lambda body: answered) as upstream, ordering(upstream.url, dialect="openai") as front:
        headers = {"Content-Type": "application/json", "X-Mine": "m"}
        answer = front.http.post("/v1/chat/completions?a=%2F&b", content=odd, headers=headers)
        assert (answer.content, answer.headers.get_list("x-own")) == (reported, ["a", "b"])
        other = front.http.put("/any%2Fpath?x=1", content=b"\x00\xff")
        assert other.content == reported
    (head, body), (other_head, other_body) = upstream.requests
    assert body == odd and head.startswith(b"POST /v1/chat/completions?a=%2F&b HTTP/1.1\r\n")
    assert b"X-Mine: m" in head.title() or b"x-mine: m" in head
    assert other_body == b"\x00\xff" and other_head.startswith(b"PUT /any%2Fpath?x=1 HTTP/1.1\r\n")


def test_events_arrive_one_by_one():
    body = USUAL | {"messages": [{"role": "user", "content": "?"}], "stream": True}
    has_one = threading.Event()
    script = (STREAM, chunk(event("one")), has_one, chunk(event("two") + DONE), END)
    with (
        scripted(*script) as upstream,
        ordering(upstream.url, dialect="openai") as front,
        front.http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        pieces = filter(None, answer.iter_raw())
        assert next(pieces) == event("one")
        has_one.set()
        assert b"".join(pieces) == event("two") + DONE
