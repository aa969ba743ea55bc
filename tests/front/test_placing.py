"""Where requests go among replicas of slotcache, and what answers teach; without Ray."""

import asyncio
import json
import pickle
from pathlib import Path

import pytest
from server.conftest import DEADLINE
from slotcache.front.placing import (
    ANSWER,
    DECODING,
    MAX_NAME,
    MOST_BEFORE,
    MOST_PLACED,
    Answering,
    AnswerReport,
    Asked,
    Fleets,
    Forward,
    Needs,
    ReplicaAnswer,
    meant_for,
)
from slotcache.front.placing import AnsweredConversation as Remembered
from slotcache.front.replica_settings import Replicas, at_rank, read_settings
from slotcache.server.app import make_app
from slotcache.server.config.settings import Settings, SettingsError

REMEMBERED = Remembered(id="conv-1", remembered=True)
NAMES = ["r0", "r1"]
DOCUMENTS = [{"id": name, "text": f"The {name} house is red. " * 20} for name in "abcd"]


def asked(fleets, path="/v1/chat/completions", *, method="POST", query=b"", only="", **fields):
    body = json.dumps({"messages": [{"role": "user", "content": "Which?"}]} | fields).encode() if method == "POST" else b""
    forward = Forward(method, path, query, [(b"content-type", b"application/json")], body=body, only=only)
    return Asked(forward, Needs.of(forward, "off"), fleets)


def send(fleets, names=NAMES, answers=None, **fields):
    """Send a request to its best replica, which answers at once; return its name."""
    one = asked(fleets, **fields)
    one.accepted_by(one.rank(names)[0])
    answer = ReplicaAnswer(status=200)
    if answers:
        answer.id, answer.report = answers.pop("id", "a1"), AnswerReport(**answers)
    one.answered(answer)
    return one.replica


def test_documents_find_their_replica_and_new_ones_the_emptier():
    fleets = Fleets()
    assert send(fleets, documents=DOCUMENTS[:2]) == "r0"
    assert send(fleets, documents=DOCUMENTS[2:]) == "r1"
    assert send(fleets, documents=[DOCUMENTS[3], DOCUMENTS[2]]) == "r1"
    one = asked(fleets, documents=[DOCUMENTS[1], DOCUMENTS[0]])
    assert one.rank(NAMES) == ["r0", "r1"]
    one.accepted_by("r0")
    assert "2 documents" in one.why


@pytest.mark.parametrize(
    "changed", [{"cache_scope": "mine"}, {"lora": [{"id": 0}]}, {"messages": [{"role": "user", "content": "x"}]}]
)
def test_documents_count_as_cached_in_one_scope_after_one_text(changed):
    fleets = Fleets()
    assert (
        send(fleets, documents=DOCUMENTS, messages=[{"role": "system", "content": "A"}, {"role": "user", "content": "?"}])
        == "r0"
    )
    one = asked(fleets, documents=DOCUMENTS, **changed)
    assert one.rank(NAMES)[0] == "r1", "the emptier one"
    one.accepted_by("r1")
    assert "0 documents (0 tokens)" in one.why


def test_work_in_flight_drives_requests_away_until_it_is_done():
    fleets = Fleets()
    send(fleets, documents=DOCUMENTS[:1])
    busy = [asked(fleets, documents=DOCUMENTS[:1]) for _ in range(5)]
    for one in busy:
        one.accepted_by(one.rank(NAMES)[0])
    assert {one.replica for one in busy} == {"r0", "r1"}
    for one in busy:
        one.answered(ReplicaAnswer())
    assert (fleets.ahead("r0"), fleets.ahead("r1")) == (0.0, 0.0)


@pytest.mark.parametrize("id", ["a/b", "a/input_items", "50%25", "%41", "a b", "c\u00e9"])
def test_a_path_names_the_conversation_that_its_replica_reads_in_it(id):
    fleets = Fleets()
    home = send(fleets, conversation=id)
    for method in ("GET", "HEAD", "DELETE"):
        one = asked(fleets, path=f"/v1/conversations/{id}", method=method)
        assert one.is_bound and one.rank(NAMES) == [home]
    assert asked(fleets, path=f"/v1/conversations/{id}", method="GET", query=b"scope=x&scope=").is_bound, "the last one"
    assert not asked(fleets, path=f"/v1/conversations/{id}", method="GET", query=b"scope=&scope=x").is_bound


def test_what_continues_an_answer_is_counted_where_it_is():
    fleets = Fleets()
    home = send(fleets, path="/v1/responses", input="Hello", answers={"id": "resp_7", "conversation": REMEMBERED})
    fleets.add(home, 1000.0)
    counted = asked(fleets, path="/v1/responses/input_tokens", input="More", previous_response_id="resp_7")
    assert counted.rank(NAMES) == [home]


def test_a_client_that_disconnects_while_a_replica_accepts_leaves_no_work():
    fleets = Fleets()
    one = asked(fleets, documents=DOCUMENTS)
    name, *_ = one.rank(NAMES)
    one.answered(ReplicaAnswer())  # in the ingress, while the router hears that the replica has accepted
    one.accepted_by(name)
    assert fleets.ahead(name) == 0.0


def work_of(**fields):
    fleets = Fleets()
    one = asked(fleets, **fields)
    one.accepted_by(one.rank(NAMES)[0])
    return fleets.ahead(one.replica)


def test_a_short_answer_is_less_work():
    assert work_of(max_tokens=10) == work_of() - 90 * DECODING
    for unknown in (True, -1, 5000, "10", None, [[]]):
        assert work_of(max_tokens=unknown) == work_of()


@pytest.mark.parametrize("value", [b"1e999", b"9" * 5000, b"[" * 9000 + b"]" * 9000])
@pytest.mark.parametrize("name", [b"cache_scope", b"max_tokens"])
def test_values_that_no_number_holds_are_left_to_the_replica(name, value):
    body = b'{"messages": [{"role": "user", "content": "x"}], "%s": %s}' % (name, value)
    forward = Forward("POST", "/v1/chat/completions", b"", [(b"content-type", b"application/json")], body)
    needs = Needs.of(forward, "off")
    assert (needs.scope, needs.answer) == ("", ANSWER)


def test_a_request_of_any_size_is_placed_at_once():
    """The router ranks in one event loop for all requests, and remembers names: neither may grow with a body."""
    documents = [f"{number}" for number in range(5000)]
    earlier = [{"role": "user", "content": f"{number}"} for number in range(3000)]
    needs = asked(Fleets(), documents=documents).needs
    assert [part.document.text for part in needs.documents if part.document] == documents[:MOST_PLACED]
    needs = asked(Fleets(), messages=earlier, cache_scope="s" * MAX_NAME).needs
    assert len(needs.history) == MOST_BEFORE and max(map(len, needs.history)) < 2 * MAX_NAME
    assert needs.history[0] == asked(Fleets(), messages=earlier[:-1], cache_scope="s" * MAX_NAME).needs.own


@pytest.mark.parametrize(
    "named",
    [
        {"conversation": "c" * (MAX_NAME + 1)},
        {"cache_scope": "s" * (MAX_NAME + 1)},
        {"previous_response_id": "r" * (MAX_NAME + 1)},
        {"path": f"/v1/conversations/{'c' * (MAX_NAME + 1)}", "method": "GET"},
        {"path": "/v1/responses/r", "method": "GET", "query": b"scope=" + b"s" * (MAX_NAME + 1)},
    ],
)
def test_a_name_that_a_replica_refuses_is_not_remembered(named):
    one = asked(Fleets(), **named)
    one.accepted_by(one.rank(NAMES)[0])
    assert one.needs == Needs()


def test_a_conversation_is_bound_to_its_replica_and_begins_anew_when_that_is_gone():
    fleets = Fleets()
    assert asked(fleets, conversation="c").is_unknown
    home = send(fleets, conversation="c", documents=DOCUMENTS)
    for one in (
        asked(fleets, conversation={"id": "c", "history": "new"}),
        asked(fleets, path="/v1/responses", conversation={"id": "c"}, input="More", messages=None),
        asked(fleets, path="/v1/conversations/c", method="GET"),
        asked(fleets, path="/v1/conversations/c", method="DELETE"),
    ):
        assert one.is_bound and one.rank(NAMES) == [home], "no other one knows it"
    others = [name for name in NAMES if name != home]
    assert not asked(fleets, conversation="c", cache_scope="other").is_bound, "a name in another scope is another one"
    one = asked(fleets, conversation="c")
    one.accepted_by(one.rank(others)[0])
    assert one.replica == others[0] and "begins anew" in one.why
    again = asked(fleets, conversation="c")
    assert again.rank(others) == others and not again.begins_anew


def test_the_last_answer_of_a_replica_that_goes_is_not_looked_for_there():
    """Ray lets a replica answer what it has begun; by then no other request can go there."""
    fleets = Fleets()
    reported = AnswerReport(conversation=Remembered(id="c", remembered=True))
    one = asked(fleets, conversation="c")
    name, other = one.rank(NAMES)
    one.accepted_by(name)
    asked(fleets).rank([other])
    one.answered(ReplicaAnswer(status=200, id="a1", report=reported))
    again = asked(fleets, conversation="c")
    assert again.is_unknown and again.rank([other]) == [other]
    again.accepted_by(other)
    assert "begins anew" in again.why
    one.answered(ReplicaAnswer(status=200, id="a2", report=reported))
    assert asked(fleets, conversation="c").is_bound, "it has a new place by now"


def test_stored_answers_are_found_by_their_ids():
    fleets = Fleets()
    reported = {"conversation": {"id": "conv-1", "remembered": True}}
    answer = ReplicaAnswer()
    answer.read({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    event = {"type": "response.completed", "response": {"id": "resp_7", "slotcache": {"documents": [], **reported}}}
    answer.read({"type": "http.response.body", "body": b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n"})
    one = asked(fleets, path="/v1/responses", input="Hello", cache_scope="mine")
    one.rank(NAMES)
    one.accepted_by("r1")
    one.answered(answer)
    assert asked(fleets, path="/v1/responses", input="More", previous_response_id="resp_7", cache_scope="mine").rank(
        NAMES
    ) == ["r1"]
    assert asked(fleets, path="/v1/responses/resp_7", method="GET", query=b"scope=mine").rank(NAMES) == ["r1"]
    assert asked(fleets, path="/v1/conversations/conv-1", method="DELETE", query=b"scope=mine").rank(NAMES) == ["r1"]
    assert asked(fleets, path="/v1/responses/resp_7/input_items", method="GET").is_unknown


def test_a_history_that_is_sent_whole_stays_where_it_is():
    fleets = Fleets()
    first = [{"role": "user", "content": "Which?"}]
    send(fleets)
    assert send(fleets, messages=first, documents=DOCUMENTS) == "r0"
    later = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "Why?"}]
    one = asked(fleets, messages=later)
    for _ in range(3):
        fleets.add("r0", 1000)
    assert one.rank(NAMES) == ["r0", "r1"], "but it may go elsewhere: it is whole"
    assert asked(fleets, messages=later, cache_scope="mine").rank(NAMES)[0] == "r1"


def test_many_requests_that_continue_one_history_do_not_all_wait_at_one_replica():
    """Beyond its queue, it would refuse them while the others have nothing to do."""
    fleets = Fleets()
    first = [{"role": "user", "content": "Which?"}]
    home = send(fleets, messages=first)
    many = []
    for number in range(100):
        one = asked(
            fleets, messages=[*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": f"{number}"}]
        )
        one.accepted_by(one.rank(NAMES)[0])
        many.append(one)
    replicas = [one.replica for one in many]
    assert replicas[:10] == [home] * 10 and 30 < replicas.count(home) < 70
    for one in many:
        one.answered(ReplicaAnswer())
    long = [{"role": "user", "content": "word " * 40_000}]
    home = send(fleets, messages=long)
    fleets.add(home, 100_000.0)
    one = asked(fleets, messages=[*long, {"role": "assistant", "content": "a"}, {"role": "user", "content": "More"}])
    assert one.rank(NAMES)[0] == home, "to compute it anew takes longer"


@pytest.mark.parametrize("path", ["/v1/cache/warm", "/v1/chat/completions/input_tokens", "/apply-template"])
def test_a_prefix_that_is_only_warmed_or_counted_is_no_history(path):
    """Else all chats behind one system prompt would stay where that prompt was warmed."""
    fleets = Fleets()
    system = {"role": "system", "content": "Be kind."}
    home = send(fleets, path=path, messages=[system], conversation="c")
    fleets.add(home, 10.0)
    assert asked(fleets, messages=[system, {"role": "user", "content": "?"}]).rank(NAMES)[0] != home
    assert asked(fleets, conversation="c").is_unknown


def test_an_answer_corrects_what_was_expected():
    fleets = Fleets()
    reuse = [{"id": one["id"], "tokens": 90, "cached_tokens": 0} for one in DOCUMENTS[1::-1]]
    body = json.dumps({"id": "chatcmpl-1", "slotcache": {"documents": reuse}}).encode()
    for _ in range(2):
        one = asked(fleets, documents=DOCUMENTS[:2])
        one.accepted_by(one.rank(NAMES)[0])
        answer = ReplicaAnswer()
        answer.read({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        answer.read({"type": "http.response.body", "body": body})
        one.answered(answer)
    best = asked(fleets, documents=DOCUMENTS[:2])
    best.accepted_by(best.rank(NAMES)[0])
    assert "2 documents (180 tokens)" in best.why, "counted by the replica, in its order"


def test_an_answer_in_pieces_is_read_once_it_is_whole():
    body = json.dumps({"id": "chatcmpl-1", "slotcache": {"documents": []}, "choices": [{"text": "x" * 100}]}).encode()
    answer = ReplicaAnswer()
    answer.read({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    for byte in body:
        assert answer.report is None
        answer.read({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
    # To read what has come so far with each piece would be quadratic in their number.
    assert answer.report is None
    answer.read({"type": "http.response.body", "body": b"", "more_body": False})
    assert answer.report == AnswerReport() and bytes(answer.body) == body


def test_a_replica_gets_the_request_alone():
    one = asked(Fleets(), documents=DOCUMENTS)
    assert pickle.loads(pickle.dumps(one)) == one.forward


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"messages": 5}', b'{"messages": [{}], "documents": 7}', b'{"input": [1]}', b"\xff"]
)
def test_requests_that_cannot_be_read_go_anywhere(body):
    forward = Forward("POST", "/v1/chat/completions", body=body)
    assert Needs.of(forward, "auto") == Needs()
    one = Asked(forward, Needs(), Fleets())
    assert one.rank(NAMES) == NAMES and one.prompt, "a router that raises would let the request wait for ever"


def test_a_named_replica_takes_the_request():
    one = asked(Fleets(), only="r1")
    assert one.rank(NAMES) == ["r1"]


def test_a_request_for_a_replica_that_is_just_gone_reaches_no_other_one():
    """Ray has it go to another one, which must not drop its own cache for it, say."""
    forward = pickle.loads(pickle.dumps(asked(Fleets(), path="/v1/cache", method="DELETE", only="r1")))

    async def refused_by(name):
        answer = ReplicaAnswer()
        async for messages in Answering(meant_for(name, fail, forward), forward).messages():
            for message in messages:
                answer.read(message)
        return answer.status, json.loads(answer.body)["error"]["message"]

    async def fail(*_):
        raise AssertionError("it was not for this one")

    status, message = asyncio.run(refused_by("r0"))
    assert status == 404 and "no replica 'r1'" in message
    assert meant_for("r1", fail, forward) is fail and meant_for("r0", fail, Forward("GET", "/")) is fail


def test_settings_come_from_arguments_then_from_the_environment(monkeypatch):
    monkeypatch.setenv("SLOTCACHE_PARALLEL", "3")
    monkeypatch.setenv("SLOTCACHE_REPLICAS", "5")
    own, settings = read_settings({"replicas": 4, "ui": False, "ctx_size": "2048"})
    assert own == Replicas(replicas=4) and own.most == 4
    assert (settings.parallel, settings.ui, settings.ctx_size) == (3, False, 2048)
    assert read_settings({"max_replicas": 8})[0].most == 8


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("port", 80, "http_options"),
        ("api_key", "secret", "Ray logs the arguments"),
        ("replica", 2, "expected one of replicas"),
        ("replicas", 0, "expected 1 to"),
        ("parallel", "many", "expected a whole number"),
        ("parallel", True, "expected a number"),
        ("ctx_size", 4096.5, "expected a whole number"),
        ("ctx_size", None, "expected a number"),
        ("temperature", [1], "expected a number"),
        ("model", None, "expected a text in quotes"),
        ("alias", True, "expected a text in quotes"),
        ("alias", 10, "expected a text in quotes"),
        ("allowed_hosts", ["a", "b"], "expected a text in quotes"),
        ("ui", 7, "expected on or off"),
        ("flash_attn", None, "expected one of"),
        ("max_replicas", 1, "expected 2 or more"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_right(name, value, right):
    with pytest.raises(SettingsError, match=name) as refused:
        read_settings({name: value})
    assert right in str(refused.value) and "secret" not in str(refused.value)


def test_a_wrong_variable_is_an_error_that_a_worker_of_ray_can_report(monkeypatch):
    monkeypatch.setenv("SLOTCACHE_REPLICAS", "two")
    with pytest.raises(SettingsError, match="SLOTCACHE_REPLICAS='two': expected a whole number"):
        read_settings({})


def test_no_two_replicas_have_one_cache_folder(tmp_path):
    """Of three replicas the first one leaves, the third one gets its rank, and a new one the rank of the third."""
    settings = Settings(cache_dir=str(tmp_path / "cache"))
    # Locks of one process exclude each other as those of several do.
    folders = [at_rank(settings, rank).cache_dir for rank in (0, 2, 2, 2)]
    assert [Path(folder).name for folder in folders] == ["replica-0", "replica-2", "replica-1", "replica-3"]
    assert at_rank(Settings(), 2) == Settings()


def test_yaml_may_say_switches_and_texts_in_its_own_way():
    _, settings = read_settings({"flash_attn": False, "ui": "off", "alias": "10", "temperature": 1})
    assert (settings.flash_attn, settings.ui, settings.alias, settings.temperature) == ("off", False, "10", 1.0)


def test_an_application_answers_without_a_port_and_notices_that_its_client_disconnects(engine):
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Go"}], "stream": True, "max_tokens": 5000, "ignore_eos": True}
    )
    head = [(b"content-type", b"application/json"), (b"host", b"localhost")]

    async def run():
        forward = Forward("POST", "/v1/chat/completions", headers=head, body=body.encode())
        answering = Answering(make_app(engine.host), forward).messages()
        messages = await anext(answering)
        assert messages[0]["status"] == 200
        while not any(b"content" in message.get("body", b"") for message in messages):
            messages = await anext(answering)
        await answering.aclose()
        health = Answering(make_app(engine.host), Forward("GET", "/health"))
        assert [message["type"] async for some in health.messages() for message in some] == [
            "http.response.start",
            "http.response.body",
        ]

    before = engine.metric("slotcache_requests_total", end="cancelled")
    asyncio.run_coroutine_threadsafe(run(), engine.service.engine.outbox.loop).result(DEADLINE)
    assert engine.metric("slotcache_requests_total", end="cancelled") == before + 1


def test_a_body_that_was_unpacked_is_not_unpacked_again():
    """The replica has the same reader."""
    headers = [(b"content-encoding", b"gzip"), (b"x-other", b"1")]
    scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    assert Forward.of(scope, b"{}").headers == [(b"x-other", b"1")]
