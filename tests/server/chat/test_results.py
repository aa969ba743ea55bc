"""Tool results as documents: only on request, and a prompt that grows keeps its prefix."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.ordering.document import TOOLS, documents_in
from slotcache.server.chat.tool_results import LEAST, ResultTexts, blocks_of, rewrite

PARAGRAPHS = [
    f"Article {at}. " + f"The parties agree on point {at} of the contract and on nothing else. " * 4 for at in range(12)
]
FILE = "\n\n".join(PARAGRAPHS) + "\n"
OTHER = FILE.replace("point 5", "point fifty")
DOCUMENTS = [{"id": f"d{at}", "text": f"The light of tower {at} is green. " * 6, "score": 1 / (at + 1)} for at in range(4)]


def asked(*contents, **fields):
    """An agent's conversation that has called a tool for each of these contents."""
    messages: list[dict] = [{"role": "system", "content": "You read files."}, {"role": "user", "content": "Compare them."}]
    for at, content in enumerate(contents):
        call = {"id": f"call{at}", "type": "function", "function": {"name": "read", "arguments": json.dumps({"n": at})}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call{at}", "content": content} | fields)
    return messages


def prompt(server, messages, **fields):
    return server.http.post("/apply-template", json={"messages": messages} | fields).json()["prompt"]


# ---- the text ----------------------------------------------------------------------------------------------------------


def test_a_file_read_twice_is_shown_once():
    texts = ResultTexts()
    texts.number = 1
    assert texts.show(FILE).text == "[result 1]\n" + FILE
    texts.number = 2
    again = texts.show(FILE)
    assert again.results == ("result 1",) and len(again.text) < 200
    assert again.text.startswith("[result 2]\n[23 lines as in result 1, from ")


def test_a_changed_paragraph_is_shown_whole():
    shown, referred = rewrite([{"role": "tool", "content": FILE}, {"role": "tool", "content": OTHER}])
    second = str(shown[1]["content"])
    assert "point fifty" in second and "point 4" not in second and len(second) < len(OTHER) / 3
    assert referred == {1: ("result 1",)}


def test_values_of_another_file_are_shown_in_it():
    values = "Targets:\n" + "".join(f"- Availability of zone {at}: 99.{at} %\n" for at in range(9)) + "\n"
    first, second = PARAGRAPHS[0] + "\n\n" + values + FILE, PARAGRAPHS[1] + "\n\n" + values + OTHER
    shown, _ = rewrite([{"role": "tool", "content": text} for text in (first, second, second)])
    assert str(shown[1]["content"]).count("Availability") == 9 and len(str(shown[1]["content"])) < len(second) / 2
    assert "zone 4" not in str(shown[2]["content"]), "the whole file stands above"


def test_what_is_shown_of_a_later_result_can_be_referred_to():
    third = PARAGRAPHS[1] + "\n\n" + OTHER.split("\n\n")[5] + "\n\n" + "Something new. " * 20
    shown, referred = rewrite([{"role": "tool", "content": text} for text in (FILE, OTHER, third)])
    assert referred[2] == ("result 1", "result 2")
    assert "Something new" in str(shown[2]["content"])


def test_short_results_and_other_roles_stay():
    messages = [{"role": role, "content": text} for role in ("user", "assistant", *TOOLS) for text in ("short", "short")]
    assert rewrite(messages) == (messages, {})
    long = [{"role": role, "content": FILE} for role in ("user", "user", "assistant", "system")]
    assert rewrite(long) == (long, {})


@given(st.lists(st.lists(st.sampled_from([*PARAGRAPHS, "", "x", "}\n{"]), max_size=12), max_size=5))
def test_a_conversation_that_grows_keeps_what_it_showed(results):
    messages = [{"role": "tool", "content": "\n".join(lines)} for lines in results]
    whole, _ = rewrite(messages)
    for length in range(len(messages)):
        assert rewrite(messages[:length])[0] == whole[:length]


@given(st.text(alphabet="ab \n\r\u2028", max_size=300))
def test_blocks_joined_are_the_text(text):
    blocks = list(blocks_of(text))
    assert "".join(block for block, _ in blocks) == text
    lines = 0
    for block, start in blocks:
        assert start == lines
        lines += len(block.splitlines())


def test_a_large_result_takes_time_in_its_length():
    for text in ("\n" * 1_000_000, "a\n" * 500_000, "x" * 1_000_000, (PARAGRAPHS[0] + "\n") * 5_000):
        rewrite([{"role": "tool", "content": text}] * 3)


# ---- documents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        DOCUMENTS,
        json.dumps(DOCUMENTS),
        json.dumps({"query": "towers", "results": DOCUMENTS}),
        json.dumps([{"doc_id": item["id"], "content": item["text"]} for item in DOCUMENTS]),
    ],
)
def test_lists_of_documents_are_found(content):
    found = documents_in({"role": "tool", "content": content}, "here")
    assert [document.id for document in found] == ["d0", "d1", "d2", "d3"]
    assert found[0].text == DOCUMENTS[0]["text"].strip()


def test_further_fields_are_shown_and_ranks_are_not():
    content = json.dumps([{"id": 7, "text": "A text.", "url": "https://a.example", "score": 0.5, "tags": ["x", "y"]}])
    (document,) = documents_in({"role": "tool", "content": content}, "here")
    assert document.text == 'url: https://a.example\ntags: ["x", "y"]\nA text.'


def test_no_field_of_a_result_is_lost():
    item = {"id": "a", "doc_id": "b", "title": "T", "snippet": "Short.", "content": "All of it.", "distance": "5 km"}
    message = {"role": "tool", "content": json.dumps({"next": "page 2", "results": [item | {"index": 1}], "total": 9})}
    (document,) = documents_in(message, "here")
    assert (document.id, document.title) == ("a", "T")
    assert document.text == "doc_id: b\ncontent: All of it.\ndistance: 5 km\nShort."
    assert rewrite([message])[0][0]["content"] == "next: page 2\ntotal: 9"


@pytest.mark.parametrize(
    "content",
    ["", "[1, 2]", "{}", "[", '{"results": 7}', '[{"id": 1}]', '[{"text": "no id"}]', "[]", None, 7, "[" * 100_000,
     [{"type": "text", "text": "a", "id": "x"}], json.dumps([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}])],
)  # fmt: skip
def test_anything_else_stays_as_it_is(content):
    assert documents_in({"role": "tool", "content": content}, "here") == ()


# ---- a server ----------------------------------------------------------------------------------------------------------


def test_without_the_request_no_prompt_is_rewritten(server):
    messages = asked(FILE, FILE, json.dumps(DOCUMENTS))
    plain = prompt(server, messages)
    assert plain.count(FILE.strip()) == 2 and json.dumps(DOCUMENTS) in plain
    assert prompt(server, messages, tool_documents="off") == plain
    rewritten = prompt(server, messages, tool_documents="auto")
    assert rewritten.count(PARAGRAPHS[3]) == 1 and "as in result 1" in rewritten and "score" not in rewritten


def test_documents_of_a_tool_are_ordered_by_the_cache_and_not_shown_twice(server):
    first = asked(json.dumps(DOCUMENTS))
    server.chat(messages=first, tool_documents="auto")
    turned = asked(json.dumps(DOCUMENTS[2:] + DOCUMENTS[:2]))
    answer = server.chat(messages=turned, tool_documents="auto")["slotcache"]
    assert [document["id"] for document in answer["documents"]] == ["d0", "d1", "d2", "d3"]
    assert all(document["cached_tokens"] == document["tokens"] for document in answer["documents"])
    twice = asked(json.dumps(DOCUMENTS), json.dumps(DOCUMENTS[:2]))
    assert server.chat(messages=twice, tool_documents="auto")["slotcache"]["repeated"] == ["d0", "d1"]


def test_a_tool_message_may_have_documents_without_the_option(server):
    answer = server.chat(messages=asked("", documents=DOCUMENTS))["slotcache"]
    assert [document["id"] for document in answer["documents"]] == ["d0", "d1", "d2", "d3"]


def test_a_repeated_text_shows_in_the_answer_and_costs_less(server):
    before = server.chat(messages=asked(FILE), tool_documents="auto")
    after = server.chat(messages=asked(FILE, OTHER), tool_documents="auto")
    assert after["slotcache"]["repeated"] == ["result 1"]
    assert after["timings"]["cache_n"] >= before["usage"]["prompt_tokens"] - 8
    whole = server.chat(messages=asked(FILE, OTHER))
    assert after["usage"]["prompt_tokens"] < 0.75 * whole["usage"]["prompt_tokens"]


def test_a_stored_conversation_keeps_what_it_showed(server):
    options = {"conversation": "agent", "tool_documents": "auto"}
    server.chat(messages=asked(FILE), **options)
    new = [{"role": "tool", "tool_call_id": "call1", "content": OTHER}]
    answer = server.chat(messages=new, **options | {"conversation": {"id": "agent", "history": "new"}})
    assert answer["slotcache"]["repeated"] == ["result 1"]
    stored = server.http.get("/v1/conversations/agent").json()
    assert OTHER in str([message["content"] for message in stored["messages"]]).replace("\\n", "\n")


def test_the_least_repetition_is_worth_a_reference():
    assert all(len(paragraph) > LEAST for paragraph in PARAGRAPHS)
