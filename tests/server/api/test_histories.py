"""Histories of other servers' threads: an unknown or null thing in one never ends it, on any API, whole and streamed."""

import json
import os
import random
import re
from typing import Any

import pytest
from support.dialects import CHAT, MESSAGES, OLLAMA
from support.template_shapes import ALTERNATES, LOSES, SMALL, TAKES

from server.conftest import REST, running

TEMPLATE = TAKES.replace("m.content }}", 'm.content }}{{ "(" + m.reasoning_content + ")" if m.reasoning_content }}')
LIVES = int(os.environ.get("SLOTCACHE_LIVES", "15"))  # histories at random of each template
LENGTH = {CHAT: {"max_tokens": 2}, MESSAGES: {"max_tokens": 2}, OLLAMA: {"options": {"num_predict": 2}}}
every = pytest.mark.parametrize("api", [CHAT, MESSAGES, OLLAMA], ids=str)
IMAGE = "[image: not shown, since this model reads text only]"
FILE = "[file: not shown, since this model reads text only]"
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
FOUND = {"type": "web_search_result", "url": "https://a.org", "title": "A town", "encrypted_content": "RXM="}
PAGE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is warm."}, "title": "Town"}
FETCHED = {"type": "web_fetch_result", "url": "https://a.org", "content": PAGE, "retrieved_at": "2026-01-01"}
RAN = {"type": "bash_code_execution_result", "stdout": "4\n", "stderr": "", "return_code": 0, "content": []}
REFERENCE = {"type": "tool_reference", "tool_name": "look"}
TOOLS_FOUND = {"type": "tool_search_tool_search_result", "tool_references": [REFERENCE]}
FAILED = {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}
SAID = {"type": "text", "text": "It is warm."}


def result(kind, content, **fields):
    return {"type": f"{kind}_tool_result", "tool_use_id": "srvtoolu_1", "content": content} | fields


# The block; what the model is shown in its place; the kind that `warnings` count.
BLOCKS: list[tuple[Any, str, str]] = [
    (
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "warm"}},
        '[server_tool_use: web_search\n{"query":"warm"}]',
        "server_tool_use (1)",
    ),
    (result("web_search", [FOUND]), "[web_search_tool_result: https://a.org\nA town]", "web_search_tool_result (1)"),
    (result("web_search", FAILED), "[web_search_tool_result: max_uses_exceeded]", "web_search_tool_result (1)"),
    (
        result("web_fetch", FETCHED),
        "[web_fetch_tool_result: https://a.org\nIt is warm.\nTown]",
        "web_fetch_tool_result (1)",
    ),
    (result("bash_code_execution", RAN), "[bash_code_execution_tool_result: 4]", "bash_code_execution_tool_result (1)"),
    (
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "s", "input": {}},
        "[mcp_tool_use: echo\n{}]",
        "mcp_tool_use (1)",
    ),
    (
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": [SAID]},
        "[mcp_tool_result: It is warm.]",
        "mcp_tool_result (1)",
    ),
    (result("tool_search", TOOLS_FOUND), "[tool_search_tool_result: look]", "tool_search_tool_result (1)"),
    ({"type": "compaction", "content": "They spoke of a town."}, "They spoke of a town.", ""),
    ({"type": "compaction", "content": None}, "", ""),
    ({"type": "container_upload", "file_id": "file_1"}, "", "container_upload (1)"),
    (REFERENCE, "[tool_reference: look]", "tool_reference (1)"),
    (PDF, FILE, "file (1)"),
    (PDF | {"source": {"type": "url", "url": "https://a.org/a.pdf"}}, FILE, "file (1)"),
    ({"type": "image", "source": {"type": "url", "url": "https://a.org/a.png"}}, IMAGE, "image (1)"),
    ({"type": "redacted_thinking", "data": "x"}, "", ""),
    ({"type": "text", "text": None}, "", ""),
    ({"type": "text", "text": "It is warm.", "citations": None, "cache_control": None}, "It is warm.", ""),
    ({"type": "sorcery", "spell": "x"}, "", "sorcery (1)"),
    ({"type": None}, "", "other (1)"),
    ({}, "", "other (1)"),
    (5, "", "other (1)"),
    ([], "", "other (1)"),
    (None, "", ""),
    ("It is warm.", "It is warm.", ""),
]  # fmt: skip
# Beside these, what parts of a chat may be.
PARTS: list[tuple[Any, str, str]] = [
    *BLOCKS,
    ({"type": "input_text", "text": "It is warm."}, "It is warm.", ""),
    ({"type": "output_text", "text": "It is warm."}, "It is warm.", ""),
    ({"type": "refusal", "refusal": None}, "", ""),
    ({"type": "image_url", "image_url": None}, IMAGE, "image (1)"),
    ({"type": "tool_result", "tool_use_id": "c", "content": [SAID]}, "[tool_result: It is warm.]", "tool_result (1)"),
]


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny, chat_template=TEMPLATE) as up:
        yield up


def post(server, api, messages, **fields):
    body = {"model": "tiny", "stream": False, "messages": messages} | LENGTH[api] | fields
    return server.http.post(api.path, json=body)


def said(role, *parts):
    return {"role": role, "content": list(parts)}


def text(text):
    return {"type": "text", "text": text}


def prompt(server, messages, **fields):
    answer = server.http.post("/apply-template", json={"messages": messages} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


def num_tokens(api, answer):
    assert answer.status_code == 200, answer.text
    return api.read(answer.json()).num_prompt


def count(server, messages):
    return num_tokens(CHAT, post(server, CHAT, messages, cache_prompt=False))


def warned(answer):
    return "; ".join(answer.json().get("warnings", []))


@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize(("api", "block", "shown", "kind"), [
    *((MESSAGES, *row) for row in BLOCKS), *((CHAT, *row) for row in PARTS), *((OLLAMA, *row) for row in PARTS)
], ids=str)  # fmt: skip
def test_a_part_of_a_history_is_a_text_or_nothing(server, api, block, shown, kind, role):
    earlier = [said("user", text("Hi"))] * (role == "assistant")
    history = [*earlier, said(role, text("Well."), block)]
    after = [*([said("assistant", text("So."))] * (role == "user")), said("user", text("And?"))]
    answer = post(server, api, [*history, *after])
    plain = [*earlier, said(role, text("Well."), *([text(shown)] if shown else [])), *after]
    assert num_tokens(api, answer) == count(server, plain)
    assert warned(answer).endswith(kind) and bool(kind) == bool(warned(answer)), warned(answer)


@pytest.mark.parametrize(("block", "shown", "kind"), PARTS, ids=str)
def test_the_prompt_shows_it(server, block, shown, kind):
    history = [said("user", text("Hi")), said("assistant", text("Well."), block), said("user", text("And?"))]
    plain = [history[0], said("assistant", text("Well."), *([text(shown)] if shown else [])), history[2]]
    assert prompt(server, history) == prompt(server, plain)


@every
@pytest.mark.parametrize(("block", "shown", "kind"), BLOCKS, ids=str)
def test_what_the_question_brings_is_read_or_refused(server, api, block, shown, kind):
    answer = post(server, api, [said("user", text("Hi"), block)])
    assert answer.status_code == (400 if kind else 200), answer.text
    if kind and api != OLLAMA:
        assert "messages[0].content[1]" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("block", "shown", "kind"), BLOCKS, ids=str)
def test_a_result_of_a_tool_is_no_question(server, block, shown, kind):
    if kind == "other (1)":  # what has no type is data there
        shown, kind = json.dumps(block, separators=(",", ":")), ""
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    content = {"type": "tool_result", "tool_use_id": "c", "content": [SAID, block]}
    answer = post(server, MESSAGES, [said("user", text("Hi")), said("assistant", call), said("user", content)])
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    plain = [said("user", text("Hi")), {"role": "assistant", "content": None, "tool_calls": [called]},
             {"role": "tool", "tool_call_id": "c", "content": [SAID, *([text(shown)] if shown else [])]}]  # fmt: skip
    assert num_tokens(MESSAGES, answer) == count(server, plain)
    assert warned(answer).endswith(kind)


CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "4"}
# Messages of a chat between two questions, and what they stand for.
TURNS: list[tuple[Any, Any]] = [
    ([{"role": "assistant"}], [{"role": "assistant", "content": ""}]),
    ([{"role": "assistant", "content": None}], [{"role": "assistant", "content": ""}]),
    ([{"role": "assistant", "reasoning_content": "Hm."}],
     [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]),
    ([{"role": "assistant", "content": "A", "reasoning_content": ["Hm."]}],
     [{"role": "assistant", "content": "A", "reasoning_content": "Hm."}]),
    ([said("assistant", {"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("A"))],
     [{"role": "assistant", "content": [text("A")], "reasoning_content": "Hm."}]),
    ([said("assistant", {"type": "reasoning", "text": "Hm."}, text("A"))],
     [{"role": "assistant", "content": [text("A")], "reasoning_content": "Hm."}]),
    ([said("assistant", {"type": "thinking", "thinking": None}, text("A"))], [said("assistant", text("A"))]),
    ([said("assistant", text("A"), {"type": "tool_use", "id": "c", "name": "look", "input": {}}), RESULT],
     [said("assistant", text("A")) | {"tool_calls": [CALLED]}, RESULT]),
    ([said("assistant", {"type": "tool_use", "id": "c", "name": "look", "input": {}}) | {"tool_calls": [CALLED]}, RESULT],
     [said("assistant") | {"tool_calls": [CALLED]}, RESULT]),
    ([{"role": "assistant", "content": 5}], [{"role": "assistant", "content": "5"}]),
    ([{"role": "user"}, {"role": "assistant", "content": "A"}],
     [{"role": "user", "content": ""}, {"role": "assistant", "content": "A"}]),
    ([None, {"role": "assistant", "content": "A"}], [{"role": "assistant", "content": "A"}]),
    ([{"role": "assistant", "content": "A", "tool_calls": None, "name": None, "refusal": None, "audio": None}],
     [{"role": "assistant", "content": "A"}]),
    *(([{"role": "assistant", "content": None, "tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "c"} | given],
       [{"role": "assistant", "content": None, "tool_calls": [CALLED]}, RESULT | {"content": shown}])
      for given, shown in (({}, ""), ({"content": None}, ""), ({"content": 4.5}, "4.5"), ({"content": True}, "true"),
                           ({"content": {"a": [1, None]}}, '{"a":[1,null]}'), ({"content": [{"a": 1}, "b"]}, '{"a":1}\nb'),
                           ({"content": SAID}, "It is warm."), ({"content": ["a", None, text("b")]}, "a\nb"))),
]  # fmt: skip


@pytest.mark.parametrize(("given", "meant"), TURNS, ids=str)
def test_messages_of_a_chat_that_lack_something(server, given, meant):
    earlier, after = said("user", text("Hi")), said("user", text("And?"))
    assert prompt(server, [earlier, *given, after]) == prompt(server, [earlier, *meant, after])
    answer = post(server, CHAT, [earlier, *given, after])
    assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text


# Calls that say nothing of a function, and the entries that they leave.
MALFORMED: list[tuple[Any, int]] = [
    ([{"id": "c", "type": "function", "function": {"name": None, "arguments": "{}"}}], 1),
    ([{"id": "c", "type": "function", "function": {"arguments": "{}"}}], 1),
    ([{"id": "c", "type": "function"}], 1),
    ([{"id": "c", "type": "function", "function": None}], 1),
    ([{"id": "c", "type": "custom", "custom": {"name": None, "input": "x"}}], 1),
    (["look", 5, [], {}], 4),
    ([None], 0),
    ({"id": "c"}, 1),
    ("look", 1),
    (5, 1),
]


@pytest.mark.parametrize("api", [CHAT, OLLAMA], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["alone", "beside another"])
@pytest.mark.parametrize(("calls", "number"), MALFORMED, ids=str)
def test_calls_that_name_no_function_are_left_out(server, api, calls, number, whole):
    if not whole and not isinstance(calls, list):
        calls = [calls]
        number = 1
    arguments: Any = "{}" if api == CHAT else {}
    good = [] if whole else [{"id": "g", "type": "function", "function": {"name": "look", "arguments": arguments}}]
    given = {"role": "assistant", "content": "Well.", "tool_calls": [*calls, *good] if good else calls}
    answer = post(server, api, [said("user", text("Hi")), given, *([RESULT | {"tool_call_id": "g"}] if good else []),
                                 said("user", text("And?"))])  # fmt: skip
    meant = {"role": "assistant", "content": "Well."} | ({"tool_calls": [CALLED | {"id": "g"}]} if good else {})
    results = [RESULT | {"tool_call_id": "g"}] if good else []
    plain = [said("user", text("Hi")), meant, *results, said("user", text("And?"))]
    assert num_tokens(api, answer) == count(server, plain)
    assert warned(answer).endswith(f"tool_calls ({number})" if number else "")


@pytest.mark.parametrize("block", [
    {"type": "tool_use", "id": "c", "name": None, "input": {}}, {"type": "tool_use"},
    {"type": "tool_use", "id": "c", "input": {}},
], ids=str)  # fmt: skip
def test_a_call_of_messages_without_a_name_is_left_out(server, block):
    history = [said("user", text("Hi")), said("assistant", text("Well."), block), said("user", text("And?"))]
    answer = post(server, MESSAGES, history)
    assert num_tokens(MESSAGES, answer) == count(server, [history[0], said("assistant", text("Well.")), history[2]])
    assert "tool_calls (1)" in warned(answer)


@every
def test_each_turn_of_such_a_thread_finds_the_last_one_and_streams(server, api):
    blocks = [block for block, *_ in BLOCKS]
    turns = [
        said("user", text("Hi")), said("assistant", text("Well."), *blocks), said("user", text("And?")),
        said("assistant", *blocks), said("user", text("So?")),
    ]  # fmt: skip
    cached = {"cache_prompt": True, "cache_scope": f"thread {api}"}
    before = 0
    for end in (1, 3, 5):
        answer = post(server, api, turns[:end], **cached)
        whole = num_tokens(api, answer)
        assert answer.json()["slotcache"]["cached_tokens"] >= before - REST
        before = whole - 16
    streamed = post(server, api, turns, stream=True, **cached)
    last = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if "warnings" in line][-1]
    reported = last if "warnings" in last else last["message"]
    assert streamed.status_code == 200 and reported["warnings"] == answer.json()["warnings"]


def test_warnings_of_many_kinds_are_few(server):
    parts = [{"type": f"kind_{number}\n\x1b[31m" + "x" * 1000} for number in range(500)]
    answer = post(server, CHAT, [said("user", *parts), said("assistant", text("A")), said("user", text("And?"))])
    assert answer.status_code == 200 and len(warned(answer)) < 1000 and warned(answer).isprintable()


def test_a_long_text_of_an_unknown_part_is_cut(server):
    long = {"type": "sorcery", "text": "warm " * 20_000}
    history = [said("user", long), said("assistant", text("A")), said("user", text("And?"))]
    shown = prompt(server, history)
    assert 8000 < len(shown) < 9000 and "[sorcery: warm warm" in shown


@pytest.mark.parametrize("template", [ALTERNATES, LOSES], ids=["refuses", "loses"])
def test_ids_and_calls_of_a_message_that_is_no_answer_break_no_template(tiny, template):
    with running(tiny, chat_template=template) as up:
        for role in ("user", "system", "function", "tool"):
            odd = {"role": role, "content": "Hm.", "tool_calls": [CALLED], "tool_call_id": True}
            answer = post(up, CHAT, [said("user", text("Hi")), odd, said("user", text("And?"))])
            assert answer.status_code == 200 and warned(answer).endswith("tool_calls (1)"), answer.text
        blank = {"role": "tool", "content": ""}
        for end in (2, 3, 4, 5):
            answer = post(up, CHAT, [*[blank, said("system", text("Sing."))] * end, blank, said("user", text("And?"))])
            assert answer.status_code == 200, answer.text


@every
@pytest.mark.parametrize("role", ["king", None, 5, []], ids=str)
def test_a_role_that_is_not_known_counts_as_a_user_s(server, api, role):
    history = [said("user", text("Hi")), said("assistant", text("A")), said(role, text("Hm.")), said("assistant", text("B"))]
    answer = post(server, api, [*history, said("user", text("And?"))])
    meant = [*history[:2], said("user", text("Hm.")), history[3], said("user", text("And?"))]
    assert num_tokens(api, answer) == count(server, meant) and "count as a user's" in warned(answer)
    refused = post(server, api, [said("user", text("Hi")), said(role, text("Hm."))])
    assert refused.status_code == 400 and "messages[1].role is" in refused.text


@every
def test_null_stands_for_nothing_in_lists(server, api):
    hi = said("user", text("Hi"), None)
    mine = MINE | {"description": None, "cache_control": None} if api == MESSAGES else FUNCTION | {"type": None}
    documents = [None, {"id": "a", "text": "It is warm."}]
    fields: dict[str, Any] = {"tools": [None, mine], "stop": [None, "zz"], "documents": documents, "lora": [None]}
    if api == MESSAGES:
        fields |= {"system": [None, text("Sing."), text(None)], "stop_sequences": ["zz", None]}
    answer = post(server, api, [None, hi | {"documents": None}, None], **fields)
    assert answer.status_code == 200 and not warned(answer), answer.text
    assert [one["id"] for one in answer.json()["slotcache"]["documents"]] == ["a"]


def test_a_long_thought_is_not_cut(server):
    thought = " Hm." * 5000 + "\n"
    for part in ({"type": "thinking", "thinking": thought}, {"type": "reasoning", "text": thought}):
        history = [said("user", text("Hi")), said("assistant", part, text("A")), said("user", text("And?"))]
        plain = [history[0], said("assistant", text("A")) | {"reasoning_content": thought}, history[2]]
        assert prompt(server, history) == prompt(server, plain) and thought in prompt(server, history)


def test_a_deep_part_is_no_failure(server):
    deep: Any = "warm"
    for _ in range(150):
        deep = {"type": "sorcery", "content": [deep]}
    for api in (CHAT, MESSAGES, OLLAMA):
        history = [said("user", deep), said("assistant", text("A"), deep), said("tool", deep), said("user", text("And?"))]
        assert post(server, api, history).status_code == 200


# ---- ids ----------------------------------------------------------------------------------------------------------------

IDS = """\
{%- for m in messages %}<{{ m.role }}{% if "tool_call_id" in m %} {{ m.tool_call_id }}{% endif %}>{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.id }}={{ call.function.name }}{{ call.function.arguments | tojson }};
{%- endfor %}{% endfor %}"""


@pytest.fixture(scope="module")
def with_ids(tiny):
    with running(tiny, chat_template=IDS) as up:
        yield up


def called(*names, ids=()):
    calls: list[Any] = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    for call, id in zip(calls, ids, strict=False):
        call["id"] = id
    return {"role": "assistant", "content": None, "tool_calls": calls}


PAIRS: list[tuple[Any, Any, str]] = [
    (called("look", "find"), [{}, {}], "01"),
    (called("look", "find"), [{"name": "find"}, {"name": "look"}], "10"),
    (called("look", "find"), [{"tool_call_id": None}, {"tool_call_id": ""}], "01"),
    (called("look", "find"), [{"tool_call_id": "x"}, {"tool_call_id": "y"}], "01"),
    (called("look", "find"), [{"tool_call_id": "x", "name": "find"}, {"tool_call_id": "y", "name": "look"}], "10"),
    (called("look", "find", ids=("a", "b")), [{"tool_call_id": "b"}, {"tool_call_id": "a"}], "10"),
    (called("look", "find", ids=("a", "b")), [{"tool_call_id": "x"}, {"tool_call_id": "b"}], "01"),
    (called("look", "find", ids=(None, "")), [{}, {}], "01"),
    (called("look", "look", ids=(7, 8)), [{"tool_call_id": 8}, {"tool_call_id": 7}], "10"),
    (called("look", "look", "find", ids=("a", "a", "b")), [{"tool_call_id": "a"}, {"tool_call_id": "a"}], "00"),
]


@pytest.mark.parametrize(("call", "results", "order"), PAIRS, ids=str)
def test_results_belong_to_calls_by_their_ids_else_by_name_and_order(with_ids, call, results, order):
    messages = [said("user", text("Hi")), call, *({"role": "tool", "content": "4"} | one for one in results)]
    shown = prompt(with_ids, messages)
    ids = re.findall("([^;>]*)=(?:look|find)", shown)
    assert re.findall("<tool ([^>]*)>", shown) == [ids[int(place)] for place in order] and "None" not in shown
    named = [{("tool_name" if name == "name" else name): value for name, value in one.items()} for one in messages]
    wanted = num_tokens(CHAT, post(with_ids, CHAT, messages, cache_prompt=False))
    assert [num_tokens(OLLAMA, post(with_ids, OLLAMA, said)) for said in (messages, named)] == [wanted, wanted]


@pytest.mark.parametrize("given", [{}, {"tool_call_id": None}, {"tool_call_id": "", "name": None}])
def test_the_word_none_never_stands_for_an_id(with_ids, given):
    messages = [said("user", text("Hi")), {"role": "tool", "content": "4"} | given, said("user", text("And?"))]
    assert "None" not in prompt(with_ids, messages)


# ---- tools and their choice ---------------------------------------------------------------------------------------------

LOOK: Any = {"name": "look", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FUNCTION = {"type": "function", "function": LOOK}
MINE = {"name": "look", "input_schema": LOOK["parameters"]}


@pytest.mark.parametrize("hosted", [
    {"type": "mcp_toolset", "mcp_server_name": "s"}, {"type": "web_search_20250305", "name": "web_search"},
    {"type": "tool_search_tool_regex", "name": "tool_search_tool_regex"}, {"type": "web_search"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
], ids=str)  # fmt: skip
@every
def test_hosted_tools_beside_functions_are_left_out(server, api, hosted):
    mine = MINE if api == MESSAGES else FUNCTION
    hi = [said("user", text("Hi"))]
    answer = post(server, api, hi, tools=[mine, None, hosted])
    assert num_tokens(api, answer) == num_tokens(api, post(server, api, hi, tools=[mine]))
    assert f"tools: {hosted['type']} left out" in warned(answer)
    alone = post(server, api, hi, tools=[hosted])
    assert num_tokens(api, alone) == num_tokens(api, post(server, api, hi))


CHOICES = ["any", "required", {"type": "any"}, {"type": "required"}, {"type": "tool", "name": "look"},
           {"type": "function", "name": "look"}]  # fmt: skip


@every
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_in_the_words_of_another_api_is_heeded(server, api, choice):
    mine = MINE if api == MESSAGES else FUNCTION
    most: Any = {"options": {"num_predict": 100, "seed": 1}} if api == OLLAMA else {"max_tokens": 100, "seed": 1}
    answer = post(server, api, [said("user", text("Hi"))], tools=[mine], tool_choice=choice, **most)
    assert answer.status_code == 200 and '"look"' in answer.text, answer.text


@every
@pytest.mark.parametrize("choice", ["auto", "none", {"type": "auto"}, {"type": "none"}], ids=str)
def test_a_choice_that_demands_nothing(server, api, choice):
    mine = MINE if api == MESSAGES else FUNCTION
    for fields in ({"tools": [mine]}, {}):
        assert post(server, api, [said("user", text("Hi"))], tool_choice=choice, **fields).status_code == 200


# ---- whatever comes -----------------------------------------------------------------------------------------------------

LEAVES: list[Any] = [None, "", 0, 1.5, True, "warm", [], {}]
KINDS: list[Any] = [*(block["type"] for block, *_ in PARTS if isinstance(block, dict) and "type" in block), "tool_use", 5]
NAMES = [
    "text",
    "thinking",
    "signature",
    "id",
    "name",
    "input",
    "content",
    "source",
    "title",
    "function",
    "arguments",
    "data",
]
FIELDS = ["tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "tool_name", "function_call", "refusal"]


def anything(choose: random.Random, depth: int = 0) -> Any:
    if depth > 3 or choose.random() < 0.4:
        return choose.choice(LEAVES)
    if choose.random() < 0.3:
        return [anything(choose, depth + 1) for _ in range(2)]
    part = {name: anything(choose, depth + 1) for name in choose.sample(NAMES, 4)}
    return part | ({"type": choose.choice(KINDS)} if choose.random() < 0.8 else {})


def any_message(choose: random.Random) -> Any:
    call = {"id": anything(choose, 4), "function": {"name": choose.choice(["look", None, 5]), "arguments": anything(choose)}}
    message = {"role": choose.choice(["user", "assistant", "tool", "system", "developer", "function", "king", None])}
    if choose.random() < 0.9:
        message["content"] = anything(choose)
    message |= {name: anything(choose) for name in choose.sample(FIELDS, choose.randrange(4))}
    return message | ({"tool_calls": [call, anything(choose)]} if choose.random() < 0.3 else {})


@pytest.mark.parametrize("name", SMALL)
def test_no_history_is_refused(tiny, name):
    choose = random.Random(name)
    with running(tiny, chat_template=SMALL[name]) as up:
        for _ in range(LIVES):
            history = [any_message(choose) for _ in range(choose.randrange(1, 6))]
            for api in (CHAT, MESSAGES, OLLAMA):
                answer = post(up, api, [*history, said("user", text("And?"))])
                assert answer.status_code == 200, (answer.text, history)
