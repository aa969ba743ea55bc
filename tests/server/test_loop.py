"""The event loop serves every stream, so nothing that grows with a body runs in its thread."""

import json
import threading

import pytest
from slotcache.models.model import Model
from slotcache.models.tokenizer import Tokenizer
from slotcache.server.api import endpoint as web
from slotcache.server.chat import decode
from slotcache.server.chat.body import SpeculateRequest
from slotcache.server.http import json_body
from slotcache.server.http.api_errors import RequestError
from slotcache.server.service import service

CHAT = {"messages": [{"role": "user", "content": "word " * 20_000}]}
TOKENS = {"tokens": [100] * 100_000}


@pytest.fixture
def threads(server, monkeypatch):
    """Return the threads that did each kind of growing work, by its name; the event loop's is "loop"."""
    seen = {}

    def note(owner, name):
        done = getattr(owner, name)

        def noted(*args, **options):
            at = threading.current_thread()
            seen.setdefault(name, set()).add("loop" if at is loop else "another")
            return done(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    loop = server.thread
    note(Model, "detokenize")
    note(Tokenizer, "__call__")
    note(web, "decode_request")
    note(service, "take")
    return seen


@pytest.mark.parametrize(
    ("path", "body", "works"),
    [
        ("/apply-template", CHAT, {"decode_request", "take", "__call__", "detokenize"}),
        ("/detokenize", TOKENS, {"decode_request", "detokenize"}),
        ("/tokenize", {"content": "word " * 20_000}, {"decode_request", "__call__"}),
        ("/v1/documents/order", CHAT | {"documents": ["a word " * 20_000]}, {"decode_request", "__call__"}),
    ],
)
def test_what_grows_with_a_body_is_done_in_other_threads(server, threads, path, body, works):
    answer = server.http.post(path, json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        works = {"decode_request"}
    assert works <= set(threads)
    assert all(at == {"another"} for at in threads.values()), threads


def test_a_small_body_needs_no_other_thread(server, threads):
    assert server.http.post("/detokenize", json={"tokens": [100]}).status_code == 200
    assert threads["decode_request"] == {"loop"}


def test_many_tokens_are_listed_whole(server):
    text = "Hello " * 60_000
    tokens = server.http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    assert server.http.post("/tokenize", json={"content": ""}).json() == {"tokens": []}


@pytest.mark.parametrize(
    ("element", "count", "says"),
    [
        ("[]", json_body.MAX_BRACKETS, "brackets"),
        ("{}", json_body.MAX_BRACKETS, "brackets"),
        ("1", json_body.MAX_COMMAS + 2, "commas"),
    ],
)
def test_more_elements_than_any_context_holds_are_refused_before_they_are_made(server, element, count, says):
    body = '{"prompt": [' + ",".join([element] * count) + "]}"
    answer = server.http.post("/completion", content=body)
    assert answer.status_code == 413 and says in answer.json()["error"]["message"]


def test_the_garbage_collector_is_as_it_was():
    import gc

    for body in ("{}", '{"content": 7}', '{"content": "x"}', json.dumps({"content": "x" * decode.LARGE})):
        try:
            decode.decode(body.encode(), SpeculateRequest)
        except Exception as error:
            assert isinstance(error, RequestError)
        assert gc.isenabled()
