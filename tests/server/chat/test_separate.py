"""Chats whose documents are read separately, over HTTP."""

import pytest
from slotcache.models.demo import FILE
from slotcache.slots.reuse import Source
from support.architectures import windowed
from support.dialects import CHATS

from server.conftest import REST, running, text_of, until

NAMES = ("Baker", "Smith", "Miller", "Priest", "Tailor")
DOCUMENTS = [
    {"id": f"d{at}", "text": f"{name} keeps {at + 7} boats behind the mill, as its book says. " * 6}
    for at, name in enumerate(NAMES)
]
SAME = 2  # tokens with which all of these documents begin
SEPARATE = {"documents_attention": "separate"}


def ask(server, ranks, question="How many boats does the smith keep?", **fields):
    return server.chat(question, documents=[DOCUMENTS[at] for at in ranks], **(SEPARATE | fields))


def report_of(answer):
    return answer["slotcache"]


def test_a_document_is_computed_once_and_serves_at_any_place(server):
    first = ask(server, [0, 1, 2], cache_scope="any place")
    report = report_of(first)
    assert report["documents_attention"] == "separate"
    assert [one["cached_tokens"] for one in report["documents"]] == [0, SAME, SAME]
    assert report["cached_tokens"] == 2 * SAME == first["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = ask(server, [2, 3, 0], cache_scope="any place")
    report = report_of(again)
    assert report["source"] == "moved"
    assert [one["id"] for one in report["documents"]] == ["d2", "d3", "d0"]  # as they were sent
    assert [one["cached_tokens"] == one["tokens"] for one in report["documents"]] == [True, False, True]
    assert report["documents"][1]["cached_tokens"] == SAME
    lines = server.http.get("/metrics").text.splitlines()
    by_source = {line.split('"')[1]: float(line.split()[-1]) for line in lines if "slotcache_cached_tokens_total{" in line}
    assert set(by_source) == set(Source) - {Source.NONE} and by_source["moved"] > 0
    assert sum(by_source.values()) == server.metric("llamacpp:prompt_tokens_cached_total")


def test_the_answer_is_the_same_with_an_empty_and_a_warm_cache(server):
    given = ((4, 1, 2), (1, 0), (2, 4, 3))
    fresh = {ranks: text_of(ask(server, ranks, cache_prompt=False, max_tokens=24)) for ranks in given}
    for _ in range(2):
        for ranks, text in fresh.items():
            assert text_of(ask(server, ranks, cache_scope="warm", max_tokens=24)) == text
    jointly = {"documents_attention": "joint", "document_order": "retrieval", "max_tokens": 24}
    joint = text_of(ask(server, (4, 1, 2), cache_scope="warm", **jointly))
    alone = text_of(ask(server, (4, 1, 2), cache_prompt=False, **jointly))
    assert joint == alone != fresh[4, 1, 2]


def test_a_conversation_goes_on(server):
    fields = SEPARATE | {"conversation": "boats", "cache_scope": "talk"}
    first = server.chat("How many has the smith?", documents=DOCUMENTS[:3], **fields)
    second = server.chat("And the tailor?", documents=DOCUMENTS[3:], **fields)
    assert report_of(second)["cached_tokens"] > report_of(first)["cached_tokens"] + 100
    assert [one["id"] for one in report_of(second)["documents"]] == ["d0", "d1", "d2", "d3", "d4"]
    turned = report_of(ask(server, [4, 3, 0], cache_scope="talk"))
    assert turned["source"] == "moved"


def test_warming_reads_documents_ahead(server):
    body = {"messages": [{"role": "user", "content": "?"}], "documents": DOCUMENTS, "cache_scope": "ahead"} | SEPARATE
    warmed = server.http.post("/v1/cache/warm", json=body)
    assert warmed.status_code == 200 and warmed.json()["slotcache"]["documents_attention"] == "separate"
    report = report_of(ask(server, [3, 1], cache_scope="ahead"))
    assert all(one["cached_tokens"] == one["tokens"] for one in report["documents"])


def test_a_pin_keeps_the_documents_where_they_were_read(server):
    body = {"messages": [{"role": "user", "content": "?"}], "documents": DOCUMENTS, "cache_scope": "pinned"} | SEPARATE
    for pin in (True, False):
        assert server.http.post("/v1/cache/warm", json=body | {"pin": pin}).status_code == 200
        runs = server.http.get("/v1/cache", params={"scope": "pinned"}).json()["runs"]
        assert len(runs) > 2 * len(DOCUMENTS) and [run["pinned"] for run in runs] == [pin] * len(runs)


@pytest.mark.parametrize("api", CHATS, ids=str)
def test_all_apis_have_them(server, api):
    asked = {"documents": DOCUMENTS[:2], "most": 2, "stream": False} | SEPARATE
    answer = api.ask(server, **asked)
    assert answer.status_code == 200 and answer.json()["slotcache"]["documents_attention"] == "separate"


def test_scopes_do_not_share(server):
    ask(server, [0, 1], cache_scope="mine")
    assert report_of(ask(server, [1, 0], cache_scope="yours"))["cached_tokens"] == SAME


def test_the_choices_of_one_request(server):
    answer = server.chat("Who?", documents=DOCUMENTS[:2], n=3, cache_scope="choices", **SEPARATE)
    assert len({one["message"]["content"] for one in answer["choices"]}) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (SEPARATE | {"document_order": "auto"}, "document_order"),
        (SEPARATE | {"best": "last"}, "best"),
        ({"documents_attention": "none"}, "documents_attention"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(server, fields, param):
    body = {"messages": [{"role": "user", "content": "Who?"}], "documents": DOCUMENTS[:1]} | fields
    refused = server.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_documents_are_read_while_they_are_searched(server):
    scope = {"cache_scope": "searched"}
    for documents in ([], DOCUMENTS[:2]):
        body = {"messages": [{"role": "user", "content": "Who?"}], "documents": documents} | SEPARATE | scope
        assert server.http.post("/v1/speculate", json=body).json()["state"] == "started"
        until(lambda: not len(server.service.engine.background))
    report = report_of(ask(server, [1, 0], **scope))
    assert all(one["cached_tokens"] == one["tokens"] for one in report["documents"])


def test_a_model_whose_kv_cannot_be_moved_says_why(tmp_path):
    with running(windowed(tmp_path / "windowed.gguf"), documents_attention="separate") as server:
        body = {"messages": [{"role": "user", "content": "Who?"}], "documents": DOCUMENTS[:1]}
        refused = server.http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents_attention")
        assert "cannot be moved" in refused.json()["error"]["message"]
        joint = server.http.post("/v1/chat/completions", json=body | {"documents_attention": "joint", "max_tokens": 2})
        assert joint.status_code == 200


def test_the_rest_of_a_prompt_is_computed(server):
    ask(server, [0, 1], cache_scope="rest")
    again = ask(server, [0, 1], cache_scope="rest")
    assert again["usage"]["prompt_tokens"] - report_of(again)["cached_tokens"] == REST


def test_a_prompt_is_shown_as_its_text(server):
    body = {"messages": [{"role": "user", "content": "Who?"}], "documents": DOCUMENTS[:2], "max_tokens": 2, "verbose": True}
    joint = body | {"documents_attention": "joint", "document_order": "retrieval"}
    shown = [server.http.post("/apply-template", json=asked) for asked in (joint, body | SEPARATE)]
    assert shown[0].status_code == 200 and shown[0].json() == shown[1].json()
    answer = server.http.post("/v1/chat/completions", json=body | SEPARATE).json()
    assert answer["__verbose"]["prompt"] == shown[0].json()["prompt"]


def test_the_reuse_of_documents_that_have_been_read_is_foreseen(server):
    body = {"messages": [{"role": "user", "content": "Who?"}], "cache_scope": "foreseen"} | SEPARATE
    ask(server, [0, 1, 2], cache_scope="foreseen")
    documents = [DOCUMENTS[at] for at in (2, 0, 1)]
    foreseen = server.http.post("/v1/documents/order", json=body | {"documents": documents}).json()["cached_tokens"]
    assert foreseen == report_of(server.chat(documents=documents, **body))["cached_tokens"] > 100


def test_copies_that_only_requests_keep_are_counted():
    messages = [{"role": "user", "content": "Who?", "documents": DOCUMENTS}]
    body = {"messages": messages, "stream": True, "max_tokens": 2000, "ignore_eos": True, **SEPARATE}
    with running(FILE, cache_ram=0) as server:
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: server.metric("slotcache_copies_bytes") > 0)
        until(lambda: server.metric("slotcache_copies_bytes") == 0)
