"""The dry run: how documents would stand, what that would reuse, and that asking changes nothing."""

import pytest

DOCUMENTS = [{"id": f"o{number}", "text": f"Report {number} on the {name} and its keepers. " * 4} for number, name in
             enumerate(["well", "gate", "wall", "barn"])]  # fmt: skip
MESSAGES = [{"role": "user", "content": "Who keeps it?"}]


def order(server, documents, **fields):
    answer = server.http.post("/v1/documents/order", json={"documents": documents} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_it_tells_what_the_chat_will_do_and_changes_nothing(server):
    fields = {"messages": MESSAGES, "cache_scope": "dry"}
    fresh = order(server, DOCUMENTS[:3], **fields)
    assert fresh["order"] == ["o0", "o1", "o2"] and fresh["cached_tokens"] == 0
    assert order(server, DOCUMENTS[:3], **fields) == fresh
    server.chat(**fields, documents=DOCUMENTS[:3])
    shuffled = [DOCUMENTS[3], DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]
    told = order(server, shuffled, **fields)
    assert told["order"] == ["o0", "o1", "o2", "o3"]
    assert told["cached_tokens"] == sum(told["tiers"].values()) > 100
    assert "o3" in told["miss"]["why"]
    answer = server.chat(**fields, documents=shuffled)
    assert answer["slotcache"]["cached_tokens"] == told["cached_tokens"]
    assert answer["slotcache"]["documents"] == told["documents"]
    assert answer["usage"]["prompt_tokens"] == told["prompt_tokens"]
    assert order(server, shuffled, messages=MESSAGES, cache_scope="another")["cached_tokens"] == 0


def test_its_miss_reads_as_the_answer_s(server):
    fields = {"messages": MESSAGES, "cache_scope": "words"}
    server.chat(**fields, documents=DOCUMENTS[:2])
    shuffled = DOCUMENTS[1::-1]
    told = order(server, shuffled, **fields)["miss"]
    assert told["why"] == "the hints are not cached here", "the documents are, and their ranking is another one"
    assert server.chat(**fields, documents=shuffled)["slotcache"]["miss"] == told


def test_documents_alone_are_those_of_a_first_question(server):
    server.chat("Who was it?", documents=DOCUMENTS[:2], cache_scope="alone")
    told = order(server, [DOCUMENTS[1], DOCUMENTS[0]], cache_scope="alone")
    assert told["order"] == ["o0", "o1"]


def test_documents_that_are_to_stay_stay(server):
    server.chat(messages=MESSAGES, documents=DOCUMENTS[:3], cache_scope="stay")
    shuffled = [DOCUMENTS[2], DOCUMENTS[1], DOCUMENTS[0]]
    assert order(server, shuffled, cache_scope="stay", messages=MESSAGES)["order"] == ["o0", "o1", "o2"]
    assert order(server, shuffled, cache_scope="stay", messages=MESSAGES, keep_first=1)["order"] == ["o2", "o1", "o0"]
    kept = server.chat(messages=MESSAGES, documents=shuffled, cache_scope="stay", keep_last=1)
    assert [document["id"] for document in kept["slotcache"]["documents"]][-1] == "o0"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "documents"),
        ({"documents": [{"id": "x"}]}, "documents[0].text"),
        ({"documents": ["a"], "keep_first": -1}, "keep_first"),
    ],
)
def test_what_cannot_be_ordered_is_refused(server, body, param):
    answer = server.http.post("/v1/documents/order", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
