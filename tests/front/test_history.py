"""Conversations through a front: each turn keeps its text, and no document is shown twice."""

import json
from dataclasses import dataclass

import pytest
from slotcache.ordering.document import Document
from slotcache.ordering.prompt import document_text

from front.conftest import Ordering, ordering
from front.test_front import DOCUMENTS, cached, documents, order_of, text_of
from front.upstreams import Scripted, response, scripted

ANSWER = b'{"choices":[{"message":{"role":"assistant","content":"Yes."}}],"usage":{"prompt_tokens":900}}'


@dataclass
class Recorded(Ordering):
    upstream: Scripted

    def chats(self):
        """The heads and bodies of the chats that the upstream got."""
        return [(head.lower(), body) for head, body in self.upstream.requests if b"/tokenize" not in head]

    def sent(self):
        """The body of the last one."""
        return json.loads(self.chats()[-1][1])


@pytest.fixture
def recorded():
    """A front of an upstream that keeps what it got."""
    with scripted(answer=lambda body: response("200 OK", ANSWER)) as upstream, ordering(upstream.url, dialect="vllm") as up:
        yield Recorded(**vars(up), upstream=upstream)


def user(text, *names):
    return {"role": "user", "content": text} | ({"documents": documents(*names)} if names else {})


def test_a_document_is_shown_once_in_a_conversation(recorded):
    first = [user("One?", "alpha", "beta"), {"role": "assistant", "content": "Yes."}]
    recorded.chat(messages=[*first, user("Two?", "beta", "gamma")])
    contents = [message["content"] for message in recorded.sent()["messages"]]
    assert contents == [text_of("alpha", "beta") + "One?", "Yes.", text_of("gamma") + "See [beta] above.\n\nTwo?"]


def test_the_ranking_names_what_is_referred_to(recorded):
    first = [user("One?", "alpha"), {"role": "assistant", "content": "Yes."}]
    recorded.chat(messages=[*first, user("Two?", "gamma")])
    recorded.chat(messages=[*first, user("Two?", "alpha", "beta", "gamma")])
    hint = "See [alpha] above.\n\nMost relevant: alpha > beta\n\n"
    assert recorded.sent()["messages"][2]["content"] == text_of("gamma", "beta") + hint + "Two?"
    recorded.chat(messages=[*first, user("Two?", "gamma", "alpha", "beta")])
    unmoved = text_of("gamma", "beta") + "See [alpha] above.\n\nTwo?"
    assert recorded.sent()["messages"][2]["content"] == unmoved


def test_dedup_off_shows_it_again(recorded):
    first = [user("One?", "alpha"), {"role": "assistant", "content": "Yes."}]
    recorded.chat(messages=[*first, user("Two?", "alpha")], dedup="off")
    assert recorded.sent()["messages"][2]["content"] == text_of("alpha") + "Two?"


def test_a_turn_keeps_its_order_when_the_cache_has_moved_on(recorded):
    recorded.chat(messages=[user("Zero?", "beta")])
    recorded.chat(messages=[user("One?", "alpha", "beta")])
    first = recorded.sent()["messages"][0]
    assert first["content"].startswith(text_of("beta", "alpha"))
    for _ in range(2):
        recorded.chat(messages=[user("Other?", "alpha")])
    turns = [user("One?", "alpha", "beta"), {"role": "assistant", "content": "Yes."}, user("Two?", "gamma")]
    answer = recorded.chat(messages=turns)
    assert recorded.sent()["messages"][0] == first
    assert order_of(answer).startswith("rank; order=1; repeated=0; expected=2/3")


def test_a_conversation_reuses_its_own_prompt(front):
    first = front.chat(messages=[user("One?", "alpha", "beta", "gamma")], cache_scope="own")
    answer = first.json()["choices"][0]["message"]["content"]
    messages = [user("One?", "alpha", "beta", "gamma"), {"role": "assistant", "content": answer}, user("Two?", "beta")]
    second = front.chat(messages=messages, cache_scope="own")
    assert cached(second) >= first.json()["usage"]["prompt_tokens"] - 8


def test_a_tools_list_of_documents_counts_as_documents(recorded):
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    found = json.dumps({"results": [DOCUMENTS["alpha"] | {"score": 0.5}, DOCUMENTS["beta"]]})
    messages = [
        user("?"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": found},
    ]
    recorded.chat(messages=messages)
    assert recorded.sent()["messages"][2] == {"role": "tool", "tool_call_id": "1", "content": text_of("alpha", "beta")}
    recorded.chat(messages=messages, tool_documents="off")
    assert recorded.sent()["messages"][2]["content"] == found


def test_parts_of_a_message_stay_parts(recorded):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    text = {"type": "text", "text": "What?", "own": 1}
    for given, sent in (
        ([text, image], [text | {"text": text_of("alpha") + "What?"}, image]),
        ([image, text], [{"type": "text", "text": text_of("alpha")}, image, text]),
        ([], [{"type": "text", "text": text_of("alpha")}]),
    ):
        recorded.chat(messages=[{"role": "user", "content": given, "documents": documents("alpha")}])
        assert recorded.sent()["messages"][0]["content"] == sent


def test_other_fields_stay_as_they_were(recorded):
    odd = '{"messages":[{"role":"user","content":"?","n":1.50}],"seed":12345678901234567890123,"x":{"b":1,"a":[]},'
    given = [document | {"score": 1} for document in documents("alpha")]
    body = odd + f'"documents":{json.dumps(given)},"document_order":"retrieval","keep_first":1}}'
    recorded.http.post("/v1/chat/completions", content=body)
    sent = recorded.sent()
    assert sent.keys() == {"messages", "seed", "x"}
    assert (sent["seed"], sent["x"]) == (12345678901234567890123, {"b": 1, "a": []})


def test_the_affinity_header_names_the_conversation_or_the_first_document(recorded):
    def session():
        lines = dict(line.split(b": ", 1) for line in recorded.chats()[-1][0].split(b"\r\n") if b": " in line)
        return lines.get(b"x-session-id", b"").decode()

    recorded.chat("Without?")
    assert session() == ""
    recorded.chat("?", conversation="talk-1")
    assert session() == "talk-1"
    recorded.chat("?", documents=documents("alpha"), conversation={"id": "naïve\n"})
    assert len(session()) == 32 and "conversation" not in recorded.sent()
    recorded.chat("?", documents=documents("alpha", "beta"))
    by_documents = session()
    recorded.chat("Other?", documents=documents("gamma", "alpha"))
    assert session() == by_documents != ""
    recorded.http.post("/v1/chat/completions", json={"messages": [user("?", "beta")]}, headers={"X-Session-Id": "mine"})
    assert session() == "mine"


def test_systems_models_and_scopes_have_caches_of_their_own(recorded):
    def order(*names, **fields):
        messages = [{"role": "system", "content": fields.pop("system", "s")}, user("?", *names)]
        return order_of(recorded.chat(messages=messages, **fields)).split(";")[0]

    assert order("alpha", "beta") == "rank"
    assert order("gamma", "alpha") == "cached"
    assert order("delta", "alpha", system="t") == "rank"
    for name, value in (("model", "m"), ("cache_scope", "c"), ("cache_salt", "c"), ("tools", [{"type": "x"}])):
        assert order("delta", "alpha", **{name: value}) == "rank", name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": "text"}, "documents"),
        ({"documents": [{"id": "a"}]}, "documents[0].text"),
        ({"documents": [{"text": "a"}], "document_order": "best"}, "document_order"),
        ({"documents": [{"text": "a"}], "keep_first": -1}, "keep_first"),
        ({"documents": [{"text": "a"}], "best": "middle"}, "best"),
        ({"documents": [{"text": "a"}], "best": "last", "keep_last": 1}, "best"),
        ({"documents": [{"text": "a"}], "best_price_ms": 5}, "best_price_ms"),
        ({"documents": [{"text": "a"}], "conversation": {"id": "a", "history": "new"}}, "conversation.history"),
        ({"documents": [{"text": "a"}], "messages": [{"role": "system", "content": "s"}]}, "documents"),
        ({"messages": [{"role": "assistant", "content": "s", "documents": ["a"]}]}, "messages[0].documents"),
    ],
)
def test_documents_that_cannot_be_used_are_named(recorded, fields, param):
    answer = recorded.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not recorded.chats()


def test_the_best_document_has_its_place(recorded):
    recorded.chat("?", documents=documents("alpha", "beta", "gamma"))
    for best, ranks in (("free", "2,1,3"), ("first", "1,2,3"), ("last", "2,3,1")):
        answer = recorded.chat("?", documents=documents("beta", "alpha", "gamma"), best=best)
        assert f"order={ranks};" in order_of(answer) and "best" not in recorded.sent()
    first = [user("?", "beta", "alpha"), {"role": "assistant", "content": "Yes."}]
    answer = recorded.chat(messages=[*first, user("And?", "beta", "gamma", "delta")], best="last")
    assert "order=1,2; repeated=1" in order_of(answer), "the best one stands in the earlier turn"


def test_the_text_of_documents_is_that_of_the_library(recorded):
    text = "A text without an id.\n\n[x] It looks like a label."
    recorded.chat("?", documents=[text])
    assert recorded.sent()["messages"][0]["content"] == document_text(Document.parse(text)) + "?"


def test_no_field_of_a_tools_result_is_lost(recorded):
    found = {"results": documents("alpha"), "next": "page 2"}
    recorded.chat(messages=[user("Find it."), {"role": "tool", "tool_call_id": "1", "content": json.dumps(found)}])
    assert recorded.sent()["messages"][1]["content"] == text_of("alpha") + "next: page 2"


def test_hints_may_stand_at_the_ranks_of_what_they_refer_to(recorded):
    """RAGBoost, section 6: the prompt of documents 1, 5 and 2 is a hint, 5, and a hint."""
    first = [user("One?", "alpha", "beta"), {"role": "assistant", "content": "Yes."}]
    turns = [[*first, user("Two?", "alpha", "gamma", "beta", "delta")], [*first, user("Two?", "alpha", "delta", "gamma")]]
    recorded.chat(messages=turns[0], dedup="in_place")
    hints = ["See [alpha] above.\n\n", "See [beta] above.\n\n"]
    whole = hints[0] + text_of("gamma") + hints[1] + text_of("delta") + "Two?"
    assert recorded.sent()["messages"][2]["content"] == whole
    again = recorded.chat(messages=turns[1], dedup="in_place")
    assert order_of(again) == "cached; order=2,1; repeated=1; expected=3/4", "behind the same hint"
    placed = hints[0] + text_of("gamma", "delta") + "Most relevant: alpha > delta\n\nTwo?"
    assert recorded.sent()["messages"][2]["content"] == placed
