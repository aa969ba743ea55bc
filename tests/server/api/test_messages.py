"""Anthropic's Messages over a real port, and its answers event by event."""

import pytest
from slotcache.server.api.messages import BlocksMessage, messages_of, system_text
from slotcache.server.api.reply import seal
from support.dialects import MESSAGES

from server.conftest import REST, running

HELLO = {"role": "user", "content": "Tell me of the town."}
USUAL = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "messages": [HELLO]}


def post(server, path="/v1/messages", **fields):
    return server.http.post(path, json=USUAL | fields)


def message(server, **fields):
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_message_has_anthropic_s_usage_and_no_times(server):
    answer = message(server)
    parts = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 12}
    assert answer["usage"] == {"input_tokens": answer["usage"]["input_tokens"]} | parts and "timings" not in answer
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)


def test_usage_parts_the_prompt(server):
    system = {"type": "text", "text": "Sing. " * 20, "cache_control": {"type": "ephemeral"}}
    marked = {"system": [system], "cache_scope": "usage"}
    first, again = message(server, **marked)["usage"], message(server, **marked)["usage"]
    total = first["input_tokens"] + first["cache_creation_input_tokens"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (1, 0)
    assert (again["input_tokens"], again["cache_read_input_tokens"]) == (1, total - REST)
    assert again["cache_creation_input_tokens"] == REST - 1
    streamed = MESSAGES.events_of(post(server, stream=True, **marked))
    known = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}  # before the prompt is looked up in the cache
    assert streamed[0]["message"]["usage"] == {"input_tokens": total, "output_tokens": 0} | known
    assert streamed[-2]["usage"] == again


BILL = "x-anthropic-billing-header: "


@pytest.mark.parametrize("is_block", [True, False])
def test_another_billing_line_costs_nothing(server, is_block):
    """So Claude Code opens each request: its version differs from session to session, its checksum each time."""

    def asked(bill, **fields):
        texts = [bill, "You are an agent. " * 40]
        system = [{"type": "text", "text": text} for text in texts] if is_block else "\n".join(texts)
        return message(server, system=system, cache_prompt=True, cache_scope=f"bill {is_block}", **fields)["usage"]

    first = f"{BILL}cc_version=2.1.77.abc; cc_entrypoint=cli; cch=00000;"
    total = asked(first)["input_tokens"] + asked(first)["cache_read_input_tokens"] + REST - 1
    for bill in (
        "cc_version=2.1.77.abc; cc_entrypoint=cli; cch=defa0;",
        "cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=0123456789",
        "cc_version=2.1.77.f01; cc_entrypoint=sdk-py; cch=00000; cc_workload=cron;",
        "cc_version=2.1.77.f01; cc_entrypoint=cli;",
    ):
        usage = asked(BILL + bill)
        assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == REST, bill
    assert total > 200
    for bill in (f"About {BILL}cch={{}};", "cch={};", f"{BILL}of {{}}", f"{BILL}cch=0; in {{}}"):  # texts like any other
        asked(bill.format("fa690"))
        assert asked(bill.format("1c8b4"))["cache_read_input_tokens"] < 100, bill


def test_no_more_than_a_billing_line_may_have_is_read():
    """Nor are the marks of blocks at any depth: each level would be gone through for each of its blocks."""
    assert len(str(system_text(f"{BILL} " + "a=b; " * 100_000))) > 400_000
    deep = {"type": "tool_result", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
    message = BlocksMessage("user", [{"type": "tool_result", "content": [deep]}])
    assert [one.get("cache_control") for one in messages_of([message], False)] == [None]
    assert [one["cache_control"]["type"] for one in messages_of([BlocksMessage("user", [deep])], False)] == ["ephemeral"]


def test_documents_are_ordered_where_a_request_asks(server):
    texts = [f"The fee of museum {number} is {number} francs. " * 3 for number in range(3)]
    sources = [{"type": "text", "media_type": "text/plain", "data": text} for text in texts]
    blocks = [{"type": "document", "source": source, "title": f"M{at}"} for at, source in enumerate(sources)]
    asked = {"type": "text", "text": "Which?"}
    fields = {"cache_prompt": True, "cache_scope": "blocks", "document_order": "auto"}
    message(server, messages=[{"role": "user", "content": [*blocks, asked]}], **fields)
    again = message(server, messages=[{"role": "user", "content": [*blocks[::-1], asked]}], **fields)
    assert again["usage"]["cache_read_input_tokens"] > sum(map(len, texts)) / 4
    del fields["document_order"]
    plain = message(server, messages=[{"role": "user", "content": [*blocks[::-1], asked]}], **fields)
    assert plain["usage"]["cache_read_input_tokens"] < 40


BOATS = {"id": "boats", "text": "The smith keeps nine boats behind the mill. " * 3}
BLOCK = {"type": "search_result", "source": "boats", "title": "", "content": [{"type": "text", "text": BOATS["text"]}]}
ASKED = {"type": "text", "text": "How many boats?"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "seen"}


@pytest.mark.parametrize(
    ("content", "history"),
    [("How many boats?", []), ([ASKED], []), ([RESULT], [CALL]), ([RESULT, ASKED], [CALL])],
)
def test_a_message_may_have_documents(server, content, history):
    before = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": history}] if history else []
    said = {"role": "user", "content": content, "documents": [BOATS]}
    answer = message(server, messages=[*before, said], documents_attention="separate")
    (shown,) = answer["slotcache"]["documents"]
    assert shown["id"] == "boats" and 20 < shown["tokens"] < answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"role": "assistant", "content": "Nine.", "documents": [BOATS]}, "only users and tools"),
        ({"role": "user", "content": [BLOCK], "documents": [BOATS]}, "give one of them"),
        ({"role": "user", "content": "Who?", "documents": [5]}, "documents[0]"),
        ({"role": "user", "content": [], "documents": [BOATS]}, "which has documents"),
    ],
)
def test_documents_in_the_wrong_place_are_refused(server, said, wrong):
    asked = {"role": "user", "content": "How many?"}
    answer = post(server, messages=[asked, said, asked], document_order="retrieval")
    assert answer.status_code == 400 and wrong in answer.json()["error"]["message"]


def test_blocks_are_read_separately_where_a_request_asks(server):
    answer = message(server, messages=[{"role": "user", "content": [BLOCK, ASKED]}], documents_attention="separate")
    assert [one["id"] for one in answer["slotcache"]["documents"]] == ["boats"]
    assert answer["slotcache"]["documents_attention"] == "separate"


@pytest.mark.parametrize("most", [None, -1])
def test_an_answer_needs_a_length(server, most):
    assert MESSAGES.refused(post(server, max_tokens=most)).startswith("max_tokens")


def test_a_message_of_too_many_values_is_too_large(server):
    assert MESSAGES.refused(post(server, messages=[{"role": "user", "content": [[]] * 300_000}]), 413)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/unknown"])
def test_refusals_in_front_of_the_routes_are_anthropics_too(tiny_with_key, path):
    answer = tiny_with_key.http.post(path, json=USUAL)
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    allowed = tiny_with_key.http.post(path, json=USUAL, headers={"X-Api-Key": "secret", "anthropic-version": "2023-06-01"})
    assert allowed.status_code == (404 if path.endswith("unknown") else 200)
    assert allowed.json().get("type") == {"count_tokens": None, "messages": "message"}.get(path.split("/")[-1], "error")
    other = tiny_with_key.http.post("/v1/messagess", json=USUAL)
    assert "type" not in other.json()


@pytest.fixture(scope="module")
def tiny_with_key(tiny):
    with running(tiny, api_key="secret") as up:
        yield up


def test_tokens_are_counted_without_max_tokens(server):
    counted = server.http.post("/v1/messages/count_tokens", json={"messages": [HELLO], "system": "Sing."})
    assert counted.json() == {"input_tokens": message(server, system="Sing.")["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("text", "signature", "is_lost"),
    [
        ("", seal("I think."), False),
        ("", seal("I think.")[:-3], True),
        ("", "EqQBCgIYAhIM", True),
        ("I think.", "EqQBCgIYAhIM", False),
        ("", "", False),
    ],
    ids=["whole", "damaged", "foreign", "beside its text", "none"],
)
def test_reasoning_in_a_seal_that_cannot_be_read_is_counted(server, text, signature, is_lost):
    thinking = {"type": "thinking", "thinking": text, "signature": signature}
    history = [HELLO, {"role": "assistant", "content": [thinking, {"type": "text", "text": "It is old."}]}, HELLO]
    warnings = message(server, messages=history).get("warnings", [])
    assert [warning.endswith("was left out: thinking (1)") for warning in warnings] == [True] * is_lost
