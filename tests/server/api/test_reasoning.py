"""The fields about reasoning mean the same on every route: the table of docs/api.md, over a real port."""

import json

import pytest
from docs.markdown import CODE, read, rows, section

from server.api.test_ollama import THINKING
from server.conftest import running

USER = [{"role": "user", "content": "Tell me of the town."}]
COMMON = {"model": "tiny", "temperature": 0, "ignore_eos": True}
CHAT = "/v1/chat/completions"
ROUTES = {
    CHAT: {"messages": USER, "max_tokens": 24},
    "/v1/messages": {"messages": USER, "max_tokens": 24},
    "/v1/responses": {"input": USER[0]["content"], "max_output_tokens": 24, "store": False},
    "/api/chat": {"messages": USER, "max_tokens": 24, "stream": False},
    "/api/generate": {"prompt": USER[0]["content"], "max_tokens": 24, "stream": False},
}


@pytest.fixture(scope="module")
def thinking(tiny, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(THINKING)
    with running(tiny, chat_template_file=str(file)) as up:
        yield up


def post(server, path, **fields):
    return server.http.post(path, json=COMMON | ROUTES[path] | fields)


def joined(parts, kind, name):
    return "".join(part[name] for part in parts if part["type"] == kind)


def told(path, answer):
    """The tokens of the prompt, the reasoning and the content of an answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return answer["usage"]["prompt_tokens"], message.get("reasoning_content") or "", message["content"] or ""
    if path == "/v1/messages":
        blocks = answer["content"]
        num_prompt = sum(answer["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))
        return num_prompt, joined(blocks, "thinking", "thinking"), joined(blocks, "text", "text")
    if path == "/v1/responses":
        parts = [part for item in answer["output"] for part in item["content"]]
        texts = (joined(parts, kind, "text") for kind in ("reasoning_text", "output_text"))
        return answer["usage"]["input_tokens"], *texts
    message = answer["message"] if path == "/api/chat" else answer
    name = "content" if path == "/api/chat" else "response"
    return answer["prompt_eval_count"], message.get("thinking") or "", message[name]


def asked(server, path, **fields):
    answer = post(server, path, **fields)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json(), answer.json()["warnings"]
    return told(path, answer.json())


ON = [
    {"enable_thinking": True},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"think": True},
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "adaptive"}},
    {"reasoning": {"enabled": True}},
    {"enable_thinking": True, "think": True, "reasoning": {"enabled": True}, "include_reasoning": True},
]
OFF = [
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"think": False},
    {"think": "none"},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "none", "think": False, "reasoning_budget_tokens": 0},
]
LOW = [
    {"reasoning_effort": "low"},
    {"reasoning": {"effort": "low"}},
    {"reasoning": {"effort": "low", "enabled": True}},
    {"think": "low"},
    {"enable_thinking": True, "chat_template_kwargs": {"reasoning_effort": "low"}},
]
SHORT = [
    {"reasoning_budget_tokens": 3},
    {"thinking_budget_tokens": 3},
    {"reasoning": {"max_tokens": 3}},
    {"thinking": {"type": "enabled", "budget_tokens": 3}},
]
HIDDEN = [{"reasoning": {"exclude": True}}, {"include_reasoning": False}]
IN_CONTENT = [{"separate_reasoning": False}, {"reasoning_format": "none"}]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", ON, ids=str)
def test_the_model_reasons(thinking, path, fields):
    num_prompt, thought, content = asked(thinking, path, **fields)
    assert num_prompt == asked(thinking, CHAT)[0] and thought and not content


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", OFF, ids=str)
def test_the_model_does_not_reason(thinking, path, fields):
    num_prompt, thought, content = asked(thinking, path, **fields)
    assert num_prompt > asked(thinking, CHAT)[0] and content and not thought


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", LOW, ids=str)
def test_how_much_it_reasons_reaches_the_template(thinking, path, fields):
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    num_prompt, thought, _ = asked(thinking, path, **fields)
    assert num_prompt == asked(thinking, CHAT, **kwargs)[0] > asked(thinking, CHAT)[0] and thought


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", SHORT, ids=str)
def test_a_budget_ends_it(thinking, path, fields):
    _, thought, content = asked(thinking, path, **fields)
    assert thought and content and len(thought) < len(asked(thinking, CHAT)[1]) / 2


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", HIDDEN, ids=str)
def test_the_answer_leaves_it_out(thinking, path, fields):
    fields = {"enable_thinking": True} | fields
    assert asked(thinking, path, **fields) == (asked(thinking, CHAT)[0], "", "")
    _, thought, content = asked(thinking, path, **fields, reasoning_budget_tokens=3)
    assert content == asked(thinking, path, enable_thinking=True, reasoning_budget_tokens=3)[2] != "" and not thought
    streamed = post(thinking, path, **fields, reasoning_budget_tokens=3, stream=True)
    assert streamed.status_code == 200 and "thinking" not in streamed.text
    for name in ("reasoning_content", "reasoning_text"):
        assert f'"{name}"' not in streamed.text


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("fields", IN_CONTENT, ids=str)
def test_it_stands_in_the_content(thinking, path, fields):
    num_prompt, thought, content = asked(thinking, path, enable_thinking=True, **fields)
    assert num_prompt == asked(thinking, CHAT)[0] and content and not thought
    assert asked(thinking, path, enable_thinking=True, separate_reasoning=True)[1]


def test_messages_do_not_reason_unless_they_are_asked_to(thinking):
    off = asked(thinking, "/v1/messages")
    assert off == asked(thinking, "/v1/messages", think=False) and off[2] and not off[1]
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}}
    assert asked(thinking, "/v1/messages", output_config={"effort": "low"}) == asked(thinking, CHAT, **kwargs)


def test_the_text_that_a_message_leaves_out_is_sealed(thinking):
    display = {"type": "enabled", "display": "omitted"}
    (block,) = post(thinking, "/v1/messages", thinking=display).json()["content"]
    assert block["type"] == "thinking" and not block["thinking"] and block["signature"]
    assert asked(thinking, CHAT, thinking=display)[1:] == ("", "")


OFF_AND_MUCH = [
    ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning.effort", "reasoning.enabled"),
    ({"enable_thinking": False, "reasoning_effort": "high"}, "reasoning_effort", "enable_thinking"),
    ({"think": False, "reasoning": {"max_tokens": 9}}, "reasoning.max_tokens", "think"),
    ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens", "thinking.type"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        "reasoning_effort",
        "chat_template_kwargs.enable_thinking",
    ),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "unused", "switch"), OFF_AND_MUCH, ids=str)
def test_how_much_has_no_effect_beside_off(thinking, path, fields, unused, switch):
    answer = post(thinking, path, **fields).json()
    assert answer["warnings"] == [f"{unused} has no effect: {switch} switches reasoning off"]
    assert told(path, answer) == asked(thinking, path, enable_thinking=False)


CONTRADICTIONS = [
    ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking", "thinking.type"),
    ({"think": "high", "enable_thinking": False}, "think", "enable_thinking"),
    ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "reasoning.enabled", "reasoning_effort"),
    (
        {"think": True, "chat_template_kwargs": {"enable_thinking": False}},
        "think",
        "chat_template_kwargs.enable_thinking",
    ),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort", "reasoning.effort"),
    ({"reasoning_budget_tokens": 3, "reasoning": {"max_tokens": 4}}, "reasoning_budget_tokens", "reasoning.max_tokens"),
    ({"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude", "include_reasoning"),
    ({"separate_reasoning": True, "reasoning_format": "none"}, "reasoning_format", "separate_reasoning"),
    ({"separate_reasoning": False, "include_reasoning": False}, "separate_reasoning", "include_reasoning"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "one", "other"), CONTRADICTIONS, ids=str)
def test_a_contradiction_is_refused_with_both_names(thinking, path, fields, one, other):
    answer = post(thinking, path, **fields)
    assert answer.status_code == 400, answer.text
    assert f"{one} and {other} contradict each other: send one of them" in json.dumps(answer.json())


@pytest.mark.parametrize("path", ROUTES)
def test_what_has_no_meaning_here_is_named(thinking, path):
    fields = {"thinking": {"type": "enabled", "clear_thinking": True}, "reasoning": {"efort": "low"}}
    warnings = post(thinking, path, **fields).json()["warnings"]
    assert sorted(warning.split(" is not known")[0] for warning in warnings) == [
        "'reasoning.efort'",
        "'thinking.clear_thinking'",
    ]
    choice = {"type": "auto", "odd": 1} if path == "/v1/messages" else {"type": "function", "name": "f", "odd": 1}
    if path != "/api/generate":
        tool = {"name": "f", "input_schema": {"type": "object"}} if path == "/v1/messages" else {"type": "function"}
        tool |= {"name": "f"} if path == "/v1/responses" else {"function": {"name": "f"}} if path != "/v1/messages" else {}
        answer = post(thinking, path, tools=[tool], tool_choice=choice, think=False).json()
        assert [warning.split(" is not known")[0] for warning in answer["warnings"]] == ["'tool_choice.odd'"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_template_without_reasoning_is_told_of(server, path):
    for fields, name in (
        ({"think": True}, "think"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"enable_thinking": True}, "enable_thinking"),
    ):
        warnings = post(server, path, **fields).json()["warnings"]
        assert warnings == [f"{name} has no effect: the chat template knows no reasoning"]
    for fields in ({"think": False}, {"thinking": {"type": "adaptive"}}, {"reasoning_effort": "none"}):
        assert "warnings" not in post(server, path, **fields).json(), fields


def test_a_strict_server_refuses_what_has_no_effect(tiny):
    with running(tiny, strict=True) as up:
        for path in ROUTES:
            for fields in ({"reasoning": {"enabled": False, "effort": "high"}}, {"reasoning": {"efort": "low"}}):
                answer = post(up, path, **fields)
                assert answer.status_code == 400 and "--strict refuses it" in answer.text, answer.text
            assert post(up, path, reasoning={"enabled": False}).status_code == 200
        for path, fields in (
            ("/api/chat", {"truncate": True}),
            ("/api/generate", {"shift": True}),
            ("/v1/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            ("/v1/responses", {"context_management": [{"type": "compaction"}]}),
        ):
            answer = post(up, path, **fields)
            assert answer.status_code == 400 and "--strict refuses it" in answer.text, answer.text
            assert next(iter(fields)) in answer.text


def test_a_text_has_no_reasoning(thinking):
    for fields in ({"think": True}, {"reasoning": {"effort": "low"}}, {"include_reasoning": False}):
        answer = post(thinking, "/api/generate", raw=True, **fields)
        assert answer.status_code == 400 and answer.json()["error"].startswith("raw: ")
    assert post(thinking, "/api/generate", raw=True, think=False).status_code == 200
    answer = thinking.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "enable_thinking": True}).json()
    assert answer["warnings"] == ["enable_thinking is no field of this route; it has no effect"]


def test_the_table_has_the_fields_of_these_tests():
    described = {name for cells in rows(section(read("docs/api.md"), "### Reasoning")) for name in CODE.findall(cells[0])}
    tested = {name for fields in (*ON, *OFF, *LOW, *SHORT, *HIDDEN, *IN_CONTENT) for name in fields}
    assert tested - {"chat_template_kwargs"} <= described
