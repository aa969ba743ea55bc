"""Conversations that the server remembers, with the real client over a real port."""

from typing import Any

import openai
import pytest
from slotcache.server.chat.body import ChatRequest
from slotcache.server.chat.conversations import Conversation, Conversations
from slotcache.server.chat.history import HistoryMessage
from support.weighing import weight

from server.conftest import running, until

TEXTS = [f"Text {number} is about the {name} of the town and its long history. " * 3 for number, name in
         enumerate(["bakery", "school", "station", "harbour", "museum"])]  # fmt: skip
SYSTEM = {"role": "system", "content": "Answer briefly."}


def documents(*numbers):
    return [{"id": f"d{number}", "text": TEXTS[number]} for number in numbers]


def user(content):
    return {"role": "user", "content": content}


def ask(server, messages, scope="", stream=False, max_tokens=6, **extra):
    """A chat through the real client; greedy unless told otherwise."""
    sampling = {name: extra.pop(name) for name in ("temperature", "seed", "store") if name in extra}
    return server.openai.chat.completions.create(
        model="tiny",
        messages=[user(messages)] if isinstance(messages, str) else messages,
        max_tokens=max_tokens,
        stream=stream,
        extra_body={"cache_prompt": True, "ignore_eos": True, "cache_scope": scope} | extra,
        **{"temperature": 0} | sampling,
    )


def text(answer):
    return answer.choices[0].message.content


def said(answer):
    return {"role": "assistant", "content": text(answer)}


def conversation_of(answer):
    return answer.slotcache["conversation"]


def used(answer):
    return [document["id"] for document in answer.slotcache["documents"]]


def rendered(server, messages, scope="", **fields):
    """The prompt that this request would have."""
    body = {"messages": messages, "cache_prompt": True, "cache_scope": scope} | fields
    return server.http.post("/apply-template", json=body).json()["prompt"]


def shown(server, id, scope=""):
    return server.http.get(f"/v1/conversations/{id}", params={"scope": scope})


def test_only_the_new_message_is_sent(server):
    scope, messages, answer = "new", [SYSTEM, user("Tell me of the town.")], None
    for number, question in enumerate(["Tell me of the town.", "And of its river?", "And then?"]):
        sent = messages if number == 0 else [user(question)]
        cached_before = answer.usage.total_tokens - 1 if answer else 0
        if answer:
            messages = [*messages, said(answer), user(question)]
        alone = rendered(server, messages, scope)
        assert rendered(server, sent, scope, conversation="c") == alone
        answer = ask(server, sent, scope, conversation="c")
        assert answer.slotcache["cached_tokens"] == cached_before
        about = {"id": "c", "turns": number + 1, "messages": len(messages), "remembered": True}
        assert conversation_of(answer).items() >= about.items()
        assert conversation_of(answer)["messages_kept"] == max(len(messages) - 1, 0) * bool(number)


@pytest.mark.parametrize("sends", ["new", "whole", "whole with documents"])
def test_the_order_of_an_earlier_turn_stays_whatever_is_cached_now(server, sends):
    scope = f"order {sends}"
    first = ask(server, "What is it?", scope, conversation={"id": "c"}, documents=documents(0, 1, 2))
    before = rendered(server, [user("What is it?")], scope, conversation={"id": "c", "history": "whole"})
    server.http.delete("/v1/cache", params={"scope": scope})
    ask(server, "What is it?", scope, documents=documents(2, 1, 0))
    asked = user("What is it?") | {"documents": documents(0, 1, 2)}
    messages = {
        "new": [],
        "whole": [user("What is it?"), said(first)],
        "whole with documents": [asked, said(first)],
    }[sends]
    assert used(ask(server, [asked, said(first), user("And?")], scope)) == ["d2", "d1", "d0"]  # nobody remembers
    second = ask(server, [*messages, user("And?")], scope, conversation="c")
    assert used(second) == used(first) == ["d0", "d1", "d2"]
    prompt = rendered(server, [user("More?")], scope, conversation="c")
    assert prompt.startswith(before) and prompt.count("[d1]\n") == 1 and f"{text(second)}<|im_end|>" in prompt


def test_an_edited_trimmed_or_branched_history_is_kept_as_far_as_it_is_the_same(server):
    scope, messages = "edited", [SYSTEM, user("One?")]
    for question in ("Two?", "Three?"):
        messages += [said(ask(server, messages, scope, conversation="c")), user(question)]
    messages.append(said(ask(server, messages, scope, conversation="c")))
    histories = {
        "the same": (messages, 7),
        "an edited answer": ([*messages[:2], {"role": "assistant", "content": "No."}, *messages[3:]], 2),
        "an edited question": ([*messages[:3], user("Other?"), *messages[4:]], 3),
        "other instructions": ([{"role": "system", "content": "Sing."}, *messages[1:]], 0),
        "the oldest turn cut off": ([SYSTEM, *messages[3:]], 1),
        "no instructions": (messages[1:], 0),
        "the last turn taken back": (messages[:5], 5),
    }
    for history, same in histories.values():
        whole = [*history, user("And?")]
        assert rendered(server, whole, scope, conversation="c") == rendered(server, whole, scope)
        answer = ask(server, whole, scope, conversation="c", store=False)
        assert (conversation_of(answer)["messages"], conversation_of(answer)["messages_kept"]) == (len(whole), same)
        assert text(answer) == text(ask(server, whole, scope, cache_prompt=False))
    again = ask(server, messages[:6], scope, conversation="c", store=False)  # the last answer once more
    assert conversation_of(again)["messages_kept"] == 6 and text(again) == messages[6]["content"]


def test_other_documents_for_an_earlier_turn_are_shown(server):
    scope = "changed"
    first = ask(server, "What is it?", scope, conversation="c", documents=documents(0, 1))
    for now, kept in ((documents(0, 2), 0), ([], 0), (documents(0, 1), 3)):
        messages = [user("What is it?") | {"documents": now}, said(first), user("And?")]
        answer = ask(server, messages, scope, conversation="c", store=False)
        assert sorted(used(answer)) == [document["id"] for document in now]
        assert conversation_of(answer)["messages_kept"] == min(kept, 2)


def test_messages_may_say_what_they_are(server):
    scope = "kind"
    ask(server, "One?", scope, conversation="c")
    once_more = {"conversation": {"id": "c", "history": "whole"}}
    assert rendered(server, [user("One?")], scope, **once_more) == rendered(server, [user("One?")], scope)
    instructed = rendered(server, [SYSTEM, user("Two?")], scope, conversation={"id": "c", "history": "new"})
    assert instructed.index("One?") < instructed.index("Answer briefly.") < instructed.index("Two?")
    wrong = server.http.post(
        "/v1/chat/completions", json={"messages": [user("?")], "conversation": {"id": "c", "history": 1}}
    )
    assert wrong.status_code == 400 and "history" in wrong.json()["error"]["param"]


def test_an_answer_goes_on_from_the_ids_that_were_sampled(server):
    scope = "ids"
    answer = ask(server, "Go on.", scope, conversation="c", temperature=2.0, seed=3, max_tokens=40)
    server.service.answers._entries.clear()  # what is known by text alone
    messages = [user("Go on."), said(answer), user("And?")]
    again = ask(server, messages, scope, max_tokens=1)
    assert again.slotcache["cached_tokens"] < answer.usage.total_tokens - 1  # its text is cut into other tokens
    following = ask(server, messages, scope, conversation="c", max_tokens=1)
    assert following.slotcache["cached_tokens"] == answer.usage.total_tokens - 1
    assert rendered(server, messages, scope, conversation="c") == rendered(server, messages, scope)


def test_a_stop_string_leaves_text_that_is_not_what_was_sampled(server):
    scope = "stop"
    whole = text(ask(server, "Go on.", scope, max_tokens=16))
    cut = ask(server, "Go on.", scope, max_tokens=16, stop=[whole[5:8]], conversation="c")
    assert text(cut) == whole[: whole.index(whole[5:8])]
    messages = [user("Go on."), said(cut), user("And?")]
    assert rendered(server, [user("And?")], scope, conversation="c") == rendered(server, messages, scope)


def test_documents_of_remembered_turns_are_referred_to(server):
    scope = "dedup"
    ask(server, "What is it?", scope, conversation="c", documents=documents(0, 1))
    answer = ask(server, "And now?", scope, conversation="c", documents=documents(1, 2))
    assert used(answer) == ["d0", "d1", "d2"] and answer.slotcache["repeated"] == ["d1"]
    third = ask(server, "At last?", scope, conversation="c", documents=documents(2, 0, 3))
    assert used(third) == ["d0", "d1", "d2", "d3"] and third.slotcache["repeated"] == ["d1", "d2", "d0"]
    assert third.slotcache["cached_tokens"] == answer.usage.total_tokens - 1
    other = ask(server, "What?", scope, conversation="other", documents=documents(1))
    assert other.slotcache["repeated"] == []
    off = ask(server, "Again?", scope, conversation="c", documents=documents(1), dedup="off")
    assert used(off) == ["d0", "d1", "d2", "d3", "d1"] and off.slotcache["repeated"] == third.slotcache["repeated"]


def test_any_answer_may_be_gone_on_from(server):
    scope = "branches"
    first = ask(server, "One?", scope, store=True)
    second = ask(server, "Two?", scope, previous_response_id=first.id)
    third = ask(server, "Other two?", scope, previous_response_id=first.id)
    fourth = ask(server, "Three?", scope, previous_response_id=second.id)
    assert [conversation_of(answer)["previous"] for answer in (first, second, third, fourth)] == [
        None,
        first.id,
        first.id,
        second.id,
    ]
    prompt = rendered(server, [user("Four?")], scope, previous_response_id=fourth.id)
    whole = [user("One?"), said(first), user("Two?"), said(second), user("Three?"), said(fourth), user("Four?")]
    assert prompt == rendered(server, whole, scope)
    assert third.slotcache["cached_tokens"] >= first.usage.total_tokens - 1
    # The conversation goes on where its last answer did; a branch is found by its own id.
    assert shown(server, conversation_of(first)["id"], scope).json()["last_response_id"] == fourth.id


@pytest.mark.parametrize("id", ["chatcmpl-1", "", "x" * 500])
def test_an_answer_that_is_not_remembered_is_a_404(server, id):
    with pytest.raises(openai.NotFoundError) as refused:
        ask(server, "And?", "unknown", previous_response_id=id)
    error: Any = refused.value.body
    assert error["param"] == "previous_response_id" and error["code"] == "previous_response_not_found"
    assert error["type"] == "not_found_error" and "send the whole history" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": ""}, "conversation"),
        ({"conversation": "x" * 257}, "conversation"),
        ({"conversation": {"id": ""}}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"conversation": "c", "previous_response_id": "r"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_with_a_conversation(server, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, "?", "wrong", **fields)
    error: Any = refused.value.body
    assert error["param"] == param


def test_scopes_never_meet(server):
    mine = ask(server, "My secret is violet.", "mine", conversation="c")
    yours = ask(server, "Which?", "yours", conversation="c")
    assert conversation_of(yours)["messages"] == 1 and conversation_of(yours)["previous"] is None
    assert "violet" not in rendered(server, [user("?")], "yours", conversation="c")
    with pytest.raises(openai.NotFoundError):
        ask(server, "Which?", "yours", previous_response_id=mine.id)
    assert "violet" not in shown(server, "c", "yours").text and "violet" in shown(server, "c", "mine").text
    assert server.http.delete("/v1/conversations/c", params={"scope": "theirs"}).status_code == 404
    assert shown(server, "c", "mine").status_code == 200
    assert shown(server, "c", "x" * 300).json()["error"]["param"] == "scope"


def test_a_conversation_is_shown_and_forgotten(server):
    scope = "shown"
    ask(server, "What is it?", scope, conversation="town/1", documents=documents(0, 1))
    answer = ask(server, "And?", scope, conversation="town/1", documents=documents(1))
    body = shown(server, "town/1", scope).json()
    assert (body["id"], body["object"], body["turns"]) == ("town/1", "conversation", 2)
    assert body["last_response_id"] == answer.id and len(body["response_ids"]) == 2 and body["bytes"] > 1000
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2
    assert body["messages"][0]["documents"] == ["d0", "d1"] and body["messages"][2]["repeated"] == ["d1"]
    assert body["messages"][3]["content"] == text(answer) and "bakery" not in str(body)
    gone = server.http.delete("/v1/conversations/town/1", params={"scope": scope}).json()
    assert gone["deleted"] is True and gone["id"] == "town/1"
    for missing in (shown(server, "town/1", scope), server.http.delete("/v1/conversations/town/1")):
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "conversation_not_found"
    with pytest.raises(openai.NotFoundError):
        ask(server, "And?", scope, previous_response_id=answer.id)


def test_without_leave_nothing_is_remembered(server):
    for refusal in ({"cache_prompt": False}, {"store": False}):
        answer = ask(server, "Mine?", "leave", conversation="c", **refusal)
        assert conversation_of(answer)["remembered"] is False
    assert not hasattr(ask(server, "Mine?", "leave", cache_prompt=False, store=True).slotcache, "conversation")
    plain = ask(server, "Mine?", "leave")
    assert "conversation" not in plain.slotcache and shown(server, "c", "leave").status_code == 404
    with pytest.raises(openai.NotFoundError):
        ask(server, "And?", "leave", previous_response_id=plain.id)
    server.http.post("/v1/cache/warm", json={"messages": [user("?")], "conversation": "c", "cache_scope": "leave"})
    assert shown(server, "c", "leave").status_code == 404


def test_two_requests_at_once_branch_and_the_last_to_end_is_gone_on_from(server):
    scope = "at once"
    first = ask(server, "One?", scope, conversation="c")
    slow = ask(server, "Slow?", scope, stream=True, max_tokens=400, conversation="c")
    slow_chunk = next(chunk for chunk in slow if chunk.choices[0].delta.content)
    quick = ask(server, "Quick?", scope, conversation="c")
    assert conversation_of(quick)["previous"] == first.id
    assert shown(server, "c", scope).json()["last_response_id"] == quick.id
    last = list(slow)[-1]
    assert last.slotcache["conversation"]["previous"] == first.id
    body = shown(server, "c", scope).json()
    assert body["response_ids"] == [first.id, quick.id, slow_chunk.id] and body["last_response_id"] == slow_chunk.id
    for answer, question in ((quick.id, "Quick?"), (slow_chunk.id, "Slow?")):
        prompt = rendered(server, [user("And?")], scope, previous_response_id=answer)
        assert [word in prompt for word in ("One?", "Quick?", "Slow?")] == [True, question == "Quick?", question == "Slow?"]


def test_a_cancelled_or_refused_answer_leaves_the_conversation_as_it_was(server):
    scope = "cancelled"
    first = ask(server, "One?", scope, conversation="c")
    before = shown(server, "c", scope).json()
    cancelled = server.metric("slotcache_requests_total", end="cancelled")
    stream = ask(server, "Never mind.", scope, stream=True, max_tokens=4000, conversation="c")
    next(iter(stream))
    stream.close()
    until(lambda: server.metric("slotcache_requests_total", end="cancelled") == cancelled + 1)
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(server, "word " * 9000, scope, conversation="c")
    assert shown(server, "c", scope).json() == before
    assert conversation_of(ask(server, "Two?", scope, conversation="c"))["previous"] == first.id


def test_what_is_deleted_while_an_answer_is_under_way_stays_deleted(server):
    scope = "deleted"
    ask(server, "One?", scope, conversation="c")
    stream = ask(server, "Two?", scope, stream=True, max_tokens=200, conversation="c")
    next(iter(stream))
    assert server.http.delete("/v1/conversations/c", params={"scope": scope}).status_code == 200
    assert list(stream)[-1].slotcache["conversation"]["remembered"] is False
    assert shown(server, "c", scope).status_code == 404


def test_the_least_recently_used_is_evicted(tiny):
    with running(tiny, conversations=2) as server:
        for name in ("a", "b", "a", "c"):
            ask(server, "Who?", conversation=name)
        assert [shown(server, name).status_code for name in "abc"] == [200, 404, 200]
        assert server.metric("slotcache_conversations") == 2
        sizes = [shown(server, name).json()["bytes"] for name in "ac"]
        assert server.metric("slotcache_conversation_bytes") == sum(sizes)
        assert conversation_of(ask(server, "Who?", conversation="b"))["messages"] == 1


class Store:
    """A store whose clock is set by hand."""

    def __init__(self, number=1000, size=1 << 20, age=10):
        self.now = 0.0
        self.conversations = Conversations(number, size, age, lambda: self.now)

    def turn(self, id, content="?", scope=""):
        """One turn more of a conversation; whether it is remembered."""
        ref = self.conversations.ref(ChatRequest(messages=[], conversation=id, cache_scope=scope), caches=True)
        assert ref is not None
        entries = (*ref.entries, HistoryMessage.of(user(content)))
        return self.conversations.remember(ref, f"{id}-{len(entries)}", entries)

    @property
    def ids(self):
        return {id for id in "abc" if self.conversations.find("", id)}


def test_stores_that_share_a_bound_lose_the_least_recently_used_of_all():
    first, second = Store(number=3), Store(number=3)
    for now, (store, id) in enumerate(((first, "a"), (second, "a"), (first, "b"))):
        store.now = now
        store.turn(id)
    both = [first.conversations, second.conversations]
    for store in both:
        store.share(both)
    assert (first.ids, second.ids) == ({"a", "b"}, {"a"})  # all together are not too many
    first.now = second.now = 3
    first.turn("a")
    second.turn("c")
    assert (first.ids, second.ids) == ({"a", "b"}, {"c"})  # of another one than the store that grows, or its own
    first.now = second.now = 4
    second.turn("b")
    assert (first.ids, second.ids) == ({"a"}, {"b", "c"})
    assert (first.conversations.num_evicted, second.conversations.num_evicted) == (1, 1)


def test_a_conversation_that_is_not_used_is_forgotten():
    store = Store(age=10)
    store.turn("a")
    store.now = 8
    store.turn("b")
    store.now = 11
    assert store.ids == {"b"}
    store.turn("b")
    store.now = 20
    assert store.ids == {"b"}
    store.now = 22
    assert store.ids == set() and store.conversations.num_bytes == 0
    with pytest.raises(Exception, match="is remembered"):
        store.conversations.ref(ChatRequest(messages=[], previous_response_id="b-2"), caches=True)


def test_bytes_are_bounded_and_shared_history_counts_once():
    store = Store(size=100_000)
    store.turn("a", "x" * 40_000)
    alone = store.conversations.num_bytes
    assert store.turn("a") and 40_000 < alone < store.conversations.num_bytes < alone + 4000
    assert store.turn("b", "x" * 40_000) and store.ids == {"a", "b"}
    assert store.turn("a") and store.turn("c", "x" * 40_000) and store.ids == {"a", "c"}
    assert not store.turn("b", "x" * 100_000) and store.ids == {"a", "c"}
    assert not store.turn("a", "x" * 100_000) and store.ids == {"c"}
    store.conversations.forget("", "c")
    assert store.conversations.num_bytes == 0
    assert not Store(number=0).turn("a")


class Looked(tuple):
    """A history that counts the entries that are looked at."""

    number = 0

    def __contains__(self, entry):
        Looked.number += len(self)
        return super().__contains__(entry)

    def __iter__(self):
        Looked.number += len(self)
        return super().__iter__()


def test_to_delete_an_answer_takes_no_more_than_its_conversation_is_large():
    conversation = Conversation("", "c")
    for answer in range(20):
        history = Looked(HistoryMessage.of({"role": "user", "content": f"{answer} {at}"}) for at in range(50))
        conversation.add(str(answer), history, is_head=True)
    Looked.number = 0
    assert conversation.remove("3") == []
    assert 0 < Looked.number <= 20 * 50


def test_what_is_deleted_before_its_first_answer_has_ended_stays_deleted(server):
    scope = "deleted first"
    for conversation in ("c", {"id": "c", "history": "new"}):
        stream = ask(server, "One?", scope, stream=True, max_tokens=200, conversation=conversation)
        next(stream)
        assert shown(server, "c", scope).status_code == 404
        gone = server.http.delete("/v1/conversations/c", params={"scope": scope})
        assert gone.status_code == 200 and gone.json()["deleted"] is True
        assert list(stream)[-1].slotcache["conversation"]["remembered"] is False
        assert shown(server, "c", scope).status_code == 404
    assert conversation_of(ask(server, "One?", scope, conversation="c"))["remembered"] is True  # another one of that name


def test_what_is_deleted_while_its_prompt_is_made_stays_deleted(server, monkeypatch):
    scope, builder, deleted = "deleted early", server.service.builder, []
    chat = builder.chat

    def delete_and_make(*args):
        deleted.append(server.http.delete("/v1/conversations/c", params={"scope": scope}).status_code)
        return chat(*args)

    monkeypatch.setattr(builder, "chat", delete_and_make)
    assert conversation_of(ask(server, "One?", scope, conversation="c"))["remembered"] is False and deleted == [200]


def test_a_conversation_without_an_answer_or_a_request_is_not_there(server):
    """However long a trace of a request that was given up stays in memory: it is the collector's to decide."""
    asked = ChatRequest(messages=[{"role": "user", "content": "One?"}], cache_scope="given up", conversation="c")
    trace = server.service.conversations.ref(asked, caches=True)
    assert trace.conversation.id == "c"
    assert server.http.delete("/v1/conversations/c", params={"scope": "given up"}).status_code == 404


def test_what_was_evicted_may_be_deleted_while_an_answer_is_under_way(tiny):
    with running(tiny, conversations=1) as server:
        ask(server, "One?", conversation="c")
        stream = ask(server, "Two?", stream=True, max_tokens=400, conversation="c")
        next(stream)
        ask(server, "One?", conversation="other")
        assert server.http.delete("/v1/conversations/c").status_code == 200
        assert list(stream)[-1].slotcache["conversation"]["remembered"] is False
        assert shown(server, "c").status_code == 404 and shown(server, "other").status_code == 200


def test_the_next_turn_finds_the_one_before_however_soon_it_comes(server):
    """The turn is remembered before its client can have read the answer."""
    answers = [ask(server, f"{number}?", "soon", max_tokens=1, conversation="c") for number in range(20)]
    assert [conversation_of(answer)["turns"] for answer in answers] == list(range(1, 21))


SHAPES = {
    "short": [{}],
    "long": [{"content": "word " * 600}],
    "Greek": [{"content": "λόγος " * 200}],
    "nested": [{"more": [[]] * 3000}],
    "many fields": [{f"field{number}": number for number in range(400)}],
    "documents": [{"documents": documents(0, 1, 2, 3, 4)}],
    "documents that come again": [{"documents": documents(0, 1)}, {"documents": documents(1, 0, 2)}],
    "many turns": [{}] * 40,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_conversation_takes_is_counted_as_it_is(server, shape):
    for extra in SHAPES[shape]:
        ask(server, [user("What is it?") | extra], shape, max_tokens=2, conversation="c")
    conversation = server.service.conversations.find(shape, "c")
    shared = [one.shown.hint for answer in conversation.answers.values() for one in answer if one.shown]
    counted, real = shown(server, "c", shape).json()["bytes"], weight(conversation, apart=shared)
    assert real / 1.5 < counted < real * 1.5
