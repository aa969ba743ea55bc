"""The dry run: how documents would stand, what that would reuse, and that asking changes nothing."""

import json

import pytest

from server.conftest import running

DOCUMENTS = [{"id": f"o{number}", "text": f"Report {number} on the {name} and its keepers. " * 4} for number, name in
             enumerate(["well", "gate", "wall", "barn"])]  # fmt: skip
MESSAGES = [{"role": "user", "content": "Who keeps it?"}]


def order(server, documents, **fields):
    answer = server.http.post("/v1/documents/order", json={"documents": documents} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_it_reports_what_the_chat_will_do_and_changes_nothing(server):
    fields = {"messages": MESSAGES, "cache_scope": "dry"}
    fresh = order(server, DOCUMENTS[:3], **fields)
    assert fresh["order"] == ["o0", "o1", "o2"] and fresh["cached_tokens"] == 0
    assert order(server, DOCUMENTS[:3], **fields) == fresh
    server.chat(**fields, documents=DOCUMENTS[:3])
    shuffled = [DOCUMENTS[3], DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]
    reported = order(server, shuffled, **fields)
    assert reported["order"] == ["o0", "o1", "o2", "o3"]
    assert reported["cached_tokens"] == sum(reported["tiers"].values()) > 100
    assert "o3" in reported["miss"]["why"]
    answer = server.chat(**fields, documents=shuffled)
    assert answer["slotcache"]["cached_tokens"] == reported["cached_tokens"]
    assert answer["slotcache"]["documents"] == reported["documents"]
    assert answer["usage"]["prompt_tokens"] == reported["prompt_tokens"]
    assert order(server, shuffled, messages=MESSAGES, cache_scope="another")["cached_tokens"] == 0


def test_its_miss_reads_as_the_answer_s(server):
    fields = {"messages": MESSAGES, "cache_scope": "words"}
    server.chat(**fields, documents=DOCUMENTS[:2])
    shuffled = DOCUMENTS[1::-1]
    reported = order(server, shuffled, **fields)["miss"]
    assert reported["why"] == "the hints are not cached here", "the documents are, and their ranking is another one"
    assert server.chat(**fields, documents=shuffled)["slotcache"]["miss"] == reported


@pytest.mark.parametrize("caches", [True, False])
def test_it_foresees_a_chat_that_leaves_the_cache_alone(server, caches):
    fields = {"messages": MESSAGES, "cache_scope": "alone or not", "best": "last"}
    server.chat(**fields, documents=DOCUMENTS[:3])
    reported = order(server, SWAPPED, **fields, cache_prompt=caches)
    body = fields | {"documents": SWAPPED, "cache_prompt": caches}
    counted = server.http.post("/v1/chat/completions/input_tokens", json=body)
    answer = server.chat(**fields, documents=SWAPPED, cache_prompt=caches)
    report = answer["slotcache"]
    assert {name: report[name] for name in ("documents", "cached_tokens", "miss")} == {
        name: reported[name] for name in ("documents", "cached_tokens", "miss")
    }
    assert reported["reordered"]["gained_tokens"] == report["reordered"]["gained_tokens"]
    assert counted.json()["input_tokens"] == reported["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_documents_alone_are_those_of_a_first_question(server):
    server.chat("Who was it?", documents=DOCUMENTS[:2], cache_scope="alone")
    reported = order(server, [DOCUMENTS[1], DOCUMENTS[0]], cache_scope="alone")
    assert reported["order"] == ["o0", "o1"]


def test_documents_that_are_to_stay_stay(server):
    server.chat(messages=MESSAGES, documents=DOCUMENTS[:3], cache_scope="stay")
    shuffled = [DOCUMENTS[2], DOCUMENTS[1], DOCUMENTS[0]]
    assert order(server, shuffled, cache_scope="stay", messages=MESSAGES)["order"] == ["o0", "o1", "o2"]
    assert order(server, shuffled, cache_scope="stay", messages=MESSAGES, keep_first=1)["order"] == ["o2", "o1", "o0"]
    kept = server.chat(messages=MESSAGES, documents=shuffled, cache_scope="stay", keep_last=1)
    assert [document["id"] for document in kept["slotcache"]["documents"]][-1] == "o0"


PLACES = {"free": ["o0", "o1", "o2"], "first": ["o1", "o0", "o2"], "last": ["o0", "o2", "o1"]}
"""The order of o1, o0 and o2, of which o1 is the best, where o0, o1 and o2 are cached in that order."""
SWAPPED = [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2]]


def ids(answer):
    return [document["id"] for document in answer["slotcache"]["documents"]]


@pytest.mark.parametrize("best", PLACES)
def test_the_best_document_has_its_place(server, best):
    fields = {"messages": MESSAGES, "cache_scope": f"place {best}"}
    server.chat(**fields, documents=DOCUMENTS[:3])
    assert order(server, SWAPPED, **fields, best=best)["order"] == PLACES[best]
    assert order(server, SWAPPED, **fields, best=best, best_price_ms=1e-9)["order"] == PLACES["free"]
    dear = order(server, SWAPPED, **fields, best=best, best_price_ms=1e9)
    assert dear["order"] == PLACES[best if best == "last" else "first"]
    answer = server.chat(**fields, documents=SWAPPED, best=best)
    assert ids(answer) == PLACES[best] and answer["slotcache"]["documents"][0]["rank"] == 1 + (best != "first")


def test_the_place_is_a_setting_and_a_request_may_say_otherwise(tiny):
    with running(tiny, best="last", best_price_ms=1_000_000) as up:
        fields = {"messages": MESSAGES, "cache_scope": "set"}
        up.chat(**fields, documents=DOCUMENTS[:3], document_order="retrieval", best="free")
        assert order(up, SWAPPED, **fields)["order"] == PLACES["last"]
        assert order(up, SWAPPED, **fields, best="first")["order"] == PLACES["first"]
        assert order(up, SWAPPED, **fields, best="free", best_price_ms=0)["order"] == PLACES["free"]
        assert order(up, SWAPPED, **fields, keep_first=1)["order"] == PLACES["first"], "what is kept is the request's wish"
        assert order(up, SWAPPED, **fields, document_order="retrieval")["order"] == ["o0", "o2", "o1"]


def test_the_best_document_of_an_earlier_turn_stays_there(server):
    fields = {"conversation": "best", "cache_scope": "best", "best": "last"}
    first = server.chat("Who keeps it?", documents=DOCUMENTS[:2], **fields)
    second = server.chat("And then?", documents=[DOCUMENTS[0], *DOCUMENTS[2:]], **fields)
    assert ids(first) == ["o1", "o0"] and ids(second) == ["o1", "o0", "o2", "o3"]
    assert [one["rank"] for one in second["slotcache"]["documents"]] == [2, 1, 2, 3]


# ---- what the answer tells of its order, in each API -------------------------------------------------------------------

USER = MESSAGES[0]
APIS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": USER["content"], "max_output_tokens": 4},
    "/api/chat": {"messages": MESSAGES, "model": "tiny", "options": {"num_predict": 4}},
}


def report_of(server, path, stream, **fields):
    """The report of an answer, whole or streamed."""
    body = APIS[path] | {"cache_prompt": True, "stream": stream} | fields
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["slotcache"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    reported = (event.get("response", {}).get("slotcache", event.get("slotcache")) for event in events)
    (report,) = [one for one in reported if one]
    return report


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_each_api_reports_the_order_and_its_gain(server, path, stream):
    scope = {"cache_scope": f"gain {path} {stream}"}
    assert "reordered" not in report_of(server, path, stream, documents=DOCUMENTS[:3], **scope)
    reported = order(server, SWAPPED, messages=MESSAGES, **scope)
    report = report_of(server, path, stream, documents=SWAPPED, **scope)
    assert report["documents"] == reported["documents"]
    assert [(one["id"], one["rank"], one["moved"]) for one in report["documents"]] == [
        ("o0", 2, True),
        ("o1", 1, True),
        ("o2", 3, False),
    ]
    in_rank = report["cached_tokens"] - report["reordered"]["gained_tokens"]
    assert report["reordered"]["gained_tokens"] == reported["reordered"]["gained_tokens"] > 100 > in_rank >= 0
    assert report["reordered"]["gained_ms"] > 0 and reported["reordered"]["gained_ms"] > 0
    assert report["reordered"]["hint"] == reported["reordered"]["hint"] == "Most relevant: o1"


@pytest.mark.parametrize("path", APIS)
def test_a_place_that_there_is_not_is_refused_in_each_api(server, path):
    given = {"documents": DOCUMENTS[:2]} | APIS[path]
    refused = server.http.post(path, json=given | {"best": "middle"})
    assert refused.status_code == 400 and "best is 'middle': expected one of free, first, last" in refused.text
    refused = server.http.post(path, json=given | {"best": "last", "keep_first": 1})
    assert refused.status_code == 400 and "keep_first is 1: both say what stands there, send one of them" in refused.text
    refused = server.http.post(path, json=given | {"best_price_ms": -1})
    assert refused.status_code == 400 and ">= 0" in refused.text


def test_an_order_that_costs_reuse_says_so(server):
    fields = {"messages": MESSAGES, "cache_scope": "cost"}
    server.chat(**fields, documents=DOCUMENTS[:3])
    report = server.chat(**fields, documents=DOCUMENTS[:3], best="last")["slotcache"]
    assert [one["id"] for one in report["documents"]] == ["o1", "o2", "o0"]
    assert report["reordered"]["gained_tokens"] < -100 and report["reordered"]["gained_ms"] < 0


def test_the_gain_is_the_difference_of_two_prompts(server):
    """Also where all of the prompt is cached in rank: its last tokens are computed then, too."""
    fields = {"messages": MESSAGES, "cache_scope": "difference", "documents": DOCUMENTS[:3]}
    server.chat(**fields)
    in_rank = server.chat(**fields)["slotcache"]
    last = server.chat(**fields, best="last")["slotcache"]
    assert last["reordered"]["gained_tokens"] == last["cached_tokens"] - in_rank["cached_tokens"]


@pytest.mark.parametrize("caches", [True, False])
def test_choices_share_their_prompt_in_any_order(server, caches):
    """What a choice has from its sibling is no gain of the order that both have."""
    fields = {"messages": MESSAGES, "cache_scope": "choices", "n": 3, "best": "last", "cache_prompt": caches}
    choices = server.chat(**fields, documents=DOCUMENTS[:3])["choices"]
    assert [one["slotcache"]["cached_tokens"] > 100 for one in choices] == [False, True, True]
    assert [one["slotcache"]["reordered"]["gained_tokens"] for one in choices] == [0, 0, 0]
    assert [one["slotcache"]["reordered"]["gained_ms"] for one in choices] == [0, 0, 0]


def test_choices_report_the_gain_of_the_first_one(server):
    fields = {"messages": [{"role": "user", "content": "Who keeps it? " * 30}], "cache_scope": "gain of choices"}
    server.chat(**fields, documents=DOCUMENTS[:3])
    first, second = (one["slotcache"] for one in server.chat(**fields, documents=SWAPPED, n=2)["choices"])
    assert second["reordered"] == first["reordered"] and first["reordered"]["gained_tokens"] > 100
    assert second["cached_tokens"] > first["cached_tokens"]


def test_the_hint_is_the_line_in_the_prompt(server):
    fields = {"messages": MESSAGES, "cache_scope": "line", "verbose": True}
    server.chat(**fields, documents=DOCUMENTS)
    given = [DOCUMENTS[at] for at in (3, 1, 0, 2)]
    answer = server.chat(**fields, documents=given)
    hint = answer["slotcache"]["reordered"]["hint"]
    assert hint == "Most relevant: o3 > o1" and f"{hint}\n\nWho keeps it?" in answer["__verbose"]["prompt"]
    silent = server.chat(**fields, documents=given[::-1], order_hint=False)["slotcache"]
    assert silent["reordered"]["hint"] == ""


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


OF_CHATS = {
    "document_order": "sorted",
    "best": "last",
    "best_price_ms": 5,
    "order_hint": True,
    "keep_last": 1,
    "dedup": "off",
}
TEXTS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/completion": {"prompt": "Hi", "n_predict": 1},
    "/api/generate": {"prompt": "Hi", "model": "tiny", "raw": True, "stream": False, "options": {"num_predict": 1}},
}


@pytest.mark.parametrize("field", OF_CHATS)
@pytest.mark.parametrize("path", TEXTS)
def test_a_text_has_no_documents_to_order(server, path, field):
    """A field that decides nothing is named in a warning."""
    answer = server.http.post(path, json=TEXTS[path] | {field: OF_CHATS[field]})
    assert answer.json()["warnings"] == [f"{field} is no field of this route; it has no effect"], answer.text
    assert "warnings" not in server.http.post(path, json=TEXTS[path]).json()
