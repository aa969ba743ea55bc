"""What a front learns from answers, and where it shows it."""

import asyncio
import re

import pytest
from server.conftest import running, until
from slotcache.front import engines
from slotcache.front.engines import ENGINES, Counting, EngineFeedback, Listener
from slotcache.front.lengths import Lengths, leading
from slotcache.front.orders import PromptPart
from slotcache.front.prefills import Prefill
from slotcache.front.settings import FrontSettings
from slotcache.front.upstream import Upstream
from slotcache.models.demo import FILE
from slotcache.ordering.document import Document

from front.conftest import ordering
from front.test_front import documents, order_of
from front.upstreams import DONE, event, response, scripted

VLLM = b'{"choices":[],"usage":{"prompt_tokens":70,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":48}}}'
VLLM_NONE = b'{"choices":[],"usage":{"prompt_tokens":70,"prompt_tokens_details":null}}'
LLAMA = b'{"choices":[{"finish_reason":"stop","delta":{}}],"timings":{"cache_n":48,"prompt_n":22,"predicted_n":2}}'
DEEPSEEK = b'{"choices":[{}],"usage":{"prompt_tokens":70,"prompt_cache_hit_tokens":48,"prompt_cache_miss_tokens":22}}'
OURS = (
    b'{"choices":[],"usage":{"prompt_tokens":70},"timings":{"cache_n":48},"slotcache":{"documents":[{"id":"b"},{"id":"a"}]}}'
)


def metric(front, name):
    found = re.search(rf"^slotcache_order_{name}(?:_total)? (\S+)$", front.http.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("chunk", "reported"),
    [
        (VLLM, EngineFeedback(70, 48)),
        (VLLM_NONE, EngineFeedback(70, None)),
        (LLAMA, EngineFeedback(70, 48)),
        (DEEPSEEK, EngineFeedback(70, 48)),
        (OURS, EngineFeedback(70, 48, ("b", "a"))),
        (b'{"usage":{"prompt_tokens":"70","prompt_tokens_details":[]}}', EngineFeedback()),
        (b'{"usage":{', EngineFeedback()),
        (b'{"usage":{"prompt_tokens":%b,"prompt_cache_hit_tokens":%b}}' % (b"9" * 400, b"9" * 400), EngineFeedback()),
        (b'{"timings":{"cache_n":%b,"prompt_n":9}}' % (b"9" * 5000), EngineFeedback()),
        (b'{"usage":{"prompt_tokens":-1,"prompt_cache_hit_tokens":1e999}}', EngineFeedback()),
    ],
)
def test_each_engine_reports_it_in_its_own_way(chunk, reported):
    listener = Listener(hides_usage=False)
    stream = b'data: {"choices":[{"delta":{"content":"\\"usage\\": {}"}}]}\n\ndata: ' + chunk + b"\n\ndata: [DONE]\n\n"
    assert listener.events(stream) == stream
    assert listener.feedback == reported


def test_of_an_answer_to_a_chat_without_documents_only_the_first_token_is_read(monkeypatch):
    figures, decoded, tokens = b'{"choices":[],"usage":{"prompt_tokens":70}}', [], []
    monkeypatch.setattr(engines, "decode", decoded.append)
    monkeypatch.setattr(Prefill, "token", lambda self: tokens.append(self))
    stream = b"data: " + figures + b"\n\n" + event("Yes") + event(", yes") + DONE

    def answer(body):
        is_stream = b'"stream":true' in body
        return response("200 OK", *((stream, "text/event-stream") if is_stream else (figures, "application/json")))

    with scripted(answer=answer) as upstream, ordering(upstream.url, dialect="vllm") as front:
        assert front.chat("?", stream=True).content == stream
        assert front.chat("?").content == figures
        assert (len(decoded), len(tokens)) == (0, 1)
        assert front.chat("?", documents=documents("alpha")).content == figures
        assert decoded[0] == figures  # its documents are counted by the upstream, too


def test_a_part_counts_as_cached_when_more_than_half_of_it_is():
    path = [("system", 40), ("a", 100), ("b", 100)]
    assert [leading(path, cached) for cached in (0, 16, 40, 80, 128, 180, 208, 240, 999)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_figures_that_no_prompt_has_teach_nothing(caplog):
    """Integers of JSON may have any number of digits: in the thread that learns, floats cannot hold them."""
    nines = b"9" * 400
    figures = b'"prompt_tokens":%b,"prompt_tokens_details":{"cached_tokens":%b}' % (nines, nines)
    with (
        scripted(answer=lambda body: response("200 OK", b'{"choices":[],"usage":{%b}}' % figures)) as upstream,
        ordering(upstream.url, dialect="vllm") as front,
    ):
        assert front.chat("?", documents=documents("alpha")).status_code == 200
        until(lambda: metric(front, "unreported") == 1)
    assert not [record for record in caplog.records if "taught nothing" in record.getMessage()]


def test_wrong_figures_leave_a_ratio_that_counts():
    lengths = Lengths(10)
    for _ in range(8000):
        lengths.fit([PromptPart("a", 100)], 0, 1 << 31)
    assert lengths.tokens(PromptPart("a", 100)) == 1000


def test_the_tokens_of_a_prompt_are_spread_over_what_is_not_counted():
    lengths = Lengths(most=2)
    parts = [PromptPart("s", 100), PromptPart("a", 400), PromptPart("b", 400)]
    assert lengths.fit(parts, 100, None) == [("s", 25), ("a", 100), ("b", 100)]
    assert lengths.fit(parts, 100, 500) == [("s", 50), ("a", 200), ("b", 200)]
    lengths.count("a", 150)
    assert lengths.fit(parts, 100, 450) == [("s", 50), ("a", 150), ("b", 200)]
    lengths.count("b", 1)
    lengths.count("c", 1)
    assert "a" not in lengths and "c" in lengths


def test_an_evicted_document_is_no_longer_expected(engine):
    with ordering(engine.url, dialect="llama") as front:
        front.chat("One?", documents=documents("alpha", "beta", "gamma"), cache_scope="evicted")
        until(lambda: metric(front, "documents") == 3)
        engine.http.request("DELETE", "/v1/cache", params={"scope": "evicted"})
        gone = front.chat("Two?", documents=documents("alpha"), cache_scope="evicted")
        assert order_of(gone).endswith("expected=1/1") and gone.json()["timings"]["cache_n"] == 0
        until(lambda: metric(front, "documents") == 4)
        assert (metric(front, "expected"), metric(front, "cached")) == (1, 0)
        after = front.chat("Three?", documents=documents("gamma", "beta", "alpha"), cache_scope="evicted")
        assert order_of(after) == "cached; order=3,1,2; repeated=0; expected=1/3"


def test_documents_are_counted_once_by_the_upstream(engine):
    with ordering(engine.url, dialect="llama") as front:
        for _ in range(2):
            front.chat("?", documents=documents("alpha", "beta"), cache_scope="counted")
        lengths = front.host.counting._lengths
        until(lambda: len(lengths._counted) == 2)
        counts = list(lengths._counted.values())
    texts = [f"[{name}]\n{documents(name)[0]['text'].strip()}\n\n" for name in ("alpha", "beta")]
    asked = [engine.http.post("/tokenize", json={"content": text, "add_special": False}) for text in texts]
    assert sorted(counts) == sorted(len(answer.json()["tokens"]) for answer in asked), "in the order in which they came"


def test_an_upstream_without_a_tokenizer_is_asked_once():
    answer = b'{"choices":[],"usage":{"prompt_tokens":900}}'

    def play(body):
        return response("404 Not Found", b"{}") if b'"prompt"' in body else response("200 OK", answer)

    with scripted(answer=play) as upstream, ordering(upstream.url, dialect="vllm") as front:
        for number in range(4):
            front.chat("?", documents=[{"text": f"Text {number}"}])
            until(lambda number=number: metric(front, "documents") == number + 1)
    assert sum(head.startswith(b"POST /tokenize") for head, _ in upstream.requests) == 1


def test_a_missing_figure_is_a_zero_once_an_engine_has_reported_one(caplog):
    reported = iter([VLLM_NONE, VLLM_NONE, VLLM, VLLM_NONE])
    answers = scripted(answer=lambda body: response("200 OK", next(reported)))
    with answers as upstream, ordering(upstream.url, dialect="openai") as front:
        for number in range(4):
            front.chat("?", documents=documents("alpha"))
            until(lambda number=number: metric(front, "documents") == number + 1)
        assert (metric(front, "unreported"), metric(front, "cached_tokens")) == (2, 48)
    assert sum("reports no cached tokens" in record.message for record in caplog.records) == 1


def test_slotcache_upstream_orders_by_itself(engine):
    with ordering(engine.url) as front:
        first = front.chat("One?", documents=documents("alpha", "beta"), cache_scope="slotcache", document_order="retrieval")
        second = front.chat("Two?", documents=documents("gamma", "beta", "alpha"), cache_scope="slotcache")
        assert order_of(first).startswith("engine;")
        assert [used["id"] for used in second.json()["slotcache"]["documents"]] == ["alpha", "beta", "gamma"]
        until(lambda: metric(front, "documents") == 5)
        assert metric(front, "cached") == 2
        wrong = front.chat("?", documents=[{"id": "a"}])
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "documents[0].text")


def test_a_client_that_the_upstream_refuses_learns_and_teaches_nothing():
    with running(FILE, api_key="right") as locked, ordering(locked.url) as front:

        def ask(key, *names):
            front.http.headers["Authorization"] = f"Bearer {key}"
            return front.chat("?", documents=documents(*names))

        assert ask("wrong", "delta", "epsilon").status_code == 401
        assert order_of(ask("right", "alpha", "beta")).startswith("engine;")
        until(lambda: metric(front, "documents") == 2)
        refused = ask("wrong", "beta", "alpha", "gamma")
        assert refused.status_code == 401 and "x-slotcache-order" not in refused.headers
        until(lambda: len(front.host.orders) == 3)
        assert order_of(ask("right", "epsilon", "delta")).endswith("expected=0/2")
        until(lambda: metric(front, "documents") == 4)
        assert order_of(ask("right", "beta", "alpha")).endswith("expected=2/2")


def test_a_text_is_counted_by_the_key_that_brought_it():
    def play(body):
        refusal = response("403 Forbidden", b'{"error":{}}')
        return refusal if b"of one" in body else response("200 OK", b'{"tokens":[1,2,3]}')

    async def count(url):
        lengths = Lengths(10)
        async with Upstream(FrontSettings(upstream=url)) as upstream:
            counting = Counting(upstream, lengths)
            for name in ("one", "two", "three", "two"):
                headers = [(b"authorization", f"Bearer {name}".encode()), (b"x-other", b"1")]
                counting.add([Document("a", f"The secret of {name}")], ENGINES["llama"], headers, b'"m"')
            assert counting._working
            await counting._working
        return len(lengths._counted)

    with scripted(answer=play) as upstream:
        assert asyncio.run(count(upstream.url)) == 2
    keys = [re.search(rb"Bearer (\w+)", head) for head, _ in upstream.requests]
    texts = [re.search(rb"secret of (\w+)", body) for _, body in upstream.requests]
    assert [found and found[1] for found in keys] == [found and found[1] for found in texts] == [b"one", b"two", b"three"]
