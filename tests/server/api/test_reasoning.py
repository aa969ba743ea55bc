"""The fields about reasoning mean the same on every route: the table of docs/api.md, over a real port."""

import json

import pytest
from docs.markdown import CODE, read, rows, section
from support.dialects import CALLERS, CHAT, CHATS, GENERATE, MESSAGES, OLLAMA, RESPONSES

from server.api.test_ollama import THINKING
from server.conftest import running

every = pytest.mark.parametrize("api", CHATS, ids=str)


@pytest.fixture(scope="module")
def thinking(tiny, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(THINKING)
    with running(tiny, chat_template_file=str(file)) as up:
        yield up


def post(server, api, **fields):
    return api.ask(server, **{"most": 24, "stream": False} | fields)


def figures_of(api, answer):
    """The tokens of the prompt, the reasoning and the content of an answer."""
    said = api.read(answer)
    return said.num_prompt, said.thought, said.text


def asked(server, api, **fields):
    answer = post(server, api, **fields)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json(), answer.json()["warnings"]
    return figures_of(api, answer.json())


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


@every
@pytest.mark.parametrize("fields", ON, ids=str)
def test_the_model_reasons(thinking, api, fields):
    num_prompt, thought, content = asked(thinking, api, **fields)
    assert num_prompt == asked(thinking, CHAT)[0] and thought and not content


@every
@pytest.mark.parametrize("fields", OFF, ids=str)
def test_the_model_does_not_reason(thinking, api, fields):
    num_prompt, thought, content = asked(thinking, api, **fields)
    assert num_prompt > asked(thinking, CHAT)[0] and content and not thought


@every
@pytest.mark.parametrize("fields", LOW, ids=str)
def test_how_much_it_reasons_reaches_the_template(thinking, api, fields):
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    num_prompt, thought, _ = asked(thinking, api, **fields)
    assert num_prompt == asked(thinking, CHAT, **kwargs)[0] > asked(thinking, CHAT)[0] and thought


@every
@pytest.mark.parametrize("fields", SHORT, ids=str)
def test_a_budget_ends_it(thinking, api, fields):
    _, thought, content = asked(thinking, api, **fields)
    assert thought and content and len(thought) < len(asked(thinking, CHAT)[1]) / 2


@every
@pytest.mark.parametrize("fields", HIDDEN, ids=str)
def test_the_answer_leaves_it_out(thinking, api, fields):
    fields = {"enable_thinking": True} | fields
    assert asked(thinking, api, **fields) == (asked(thinking, CHAT)[0], "", "")
    _, thought, content = asked(thinking, api, **fields, reasoning_budget_tokens=3)
    assert content == asked(thinking, api, enable_thinking=True, reasoning_budget_tokens=3)[2] != "" and not thought
    streamed = post(thinking, api, **fields, reasoning_budget_tokens=3, stream=True)
    assert streamed.status_code == 200 and "thinking" not in streamed.text
    for name in ("reasoning_content", "reasoning_text"):
        assert f'"{name}"' not in streamed.text


@every
@pytest.mark.parametrize("fields", IN_CONTENT, ids=str)
def test_it_stands_in_the_content(thinking, api, fields):
    num_prompt, thought, content = asked(thinking, api, enable_thinking=True, **fields)
    assert num_prompt == asked(thinking, CHAT)[0] and content and not thought
    assert asked(thinking, api, enable_thinking=True, separate_reasoning=True)[1]


def test_messages_do_not_reason_unless_they_are_asked_to(thinking):
    off = asked(thinking, MESSAGES)
    assert off == asked(thinking, MESSAGES, think=False) and off[2] and not off[1]
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}}
    assert asked(thinking, MESSAGES, output_config={"effort": "low"}) == asked(thinking, CHAT, **kwargs)


def test_the_text_that_a_message_leaves_out_is_sealed(thinking):
    display = {"type": "enabled", "display": "omitted"}
    (block,) = post(thinking, MESSAGES, thinking=display).json()["content"]
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


@every
@pytest.mark.parametrize(("fields", "unused", "switch"), OFF_AND_MUCH, ids=str)
def test_how_much_has_no_effect_beside_off(thinking, api, fields, unused, switch):
    answer = post(thinking, api, **fields).json()
    assert answer["warnings"] == [f"{unused} has no effect: {switch} switches reasoning off"]
    assert figures_of(api, answer) == asked(thinking, api, enable_thinking=False)


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


@every
@pytest.mark.parametrize(("fields", "one", "other"), CONTRADICTIONS, ids=str)
def test_a_contradiction_is_refused_with_both_names(thinking, api, fields, one, other):
    answer = post(thinking, api, **fields)
    assert answer.status_code == 400, answer.text
    assert f"{one} and {other} contradict each other: send one of them" in json.dumps(answer.json())


@every
def test_what_has_no_meaning_here_is_named(thinking, api):
    fields = {"thinking": {"type": "enabled", "clear_thinking": True}, "reasoning": {"efort": "low"}}
    warnings = post(thinking, api, **fields).json()["warnings"]
    assert sorted(warning.split(" is not known")[0] for warning in warnings) == [
        "'reasoning.efort'",
        "'thinking.clear_thinking'",
    ]
    if api in CALLERS:
        choice = {"type": "auto"} if api is MESSAGES else {"type": "function", "name": "f"}
        tools = api.tools(f={"type": "object"})["tools"]
        answer = post(thinking, api, tools=tools, tool_choice=choice | {"odd": 1}, think=False).json()
        assert [warning.split(" is not known")[0] for warning in answer["warnings"]] == ["'tool_choice.odd'"]


@every
def test_a_template_without_reasoning_is_reported(server, api):
    for fields, name in (
        ({"think": True}, "think"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"enable_thinking": True}, "enable_thinking"),
    ):
        warnings = post(server, api, **fields).json()["warnings"]
        assert warnings == [f"{name} has no effect: the chat template knows no reasoning"]
    for fields in ({"think": False}, {"thinking": {"type": "adaptive"}}, {"reasoning_effort": "none"}):
        assert "warnings" not in post(server, api, **fields).json(), fields


def test_a_strict_server_refuses_what_has_no_effect(tiny):
    with running(tiny, strict=True) as up:
        for api in CHATS:
            for fields in ({"reasoning": {"enabled": False, "effort": "high"}}, {"reasoning": {"efort": "low"}}):
                answer = post(up, api, **fields)
                assert answer.status_code == 400 and "--strict refuses it" in answer.text, answer.text
            assert post(up, api, reasoning={"enabled": False}).status_code == 200
        for api, fields in (
            (OLLAMA, {"truncate": True}),
            (GENERATE, {"shift": True}),
            (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            (RESPONSES, {"context_management": [{"type": "compaction"}]}),
        ):
            answer = post(up, api, **fields)
            assert answer.status_code == 400 and "--strict refuses it" in answer.text, answer.text
            assert next(iter(fields)) in answer.text


def test_a_text_has_no_reasoning(thinking):
    for fields in ({"think": True}, {"reasoning": {"effort": "low"}}, {"include_reasoning": False}):
        answer = post(thinking, GENERATE, raw=True, **fields)
        assert answer.status_code == 400 and answer.json()["error"].startswith("raw: ")
    assert post(thinking, GENERATE, raw=True, think=False).status_code == 200
    answer = thinking.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "enable_thinking": True}).json()
    assert answer["warnings"] == ["enable_thinking is no field of this route; it has no effect"]


def test_the_table_has_the_fields_of_these_tests():
    described = {name for cells in rows(section(read("docs/api.md"), "### Reasoning")) for name in CODE.findall(cells[0])}
    tested = {name for fields in (*ON, *OFF, *LOW, *SHORT, *HIDDEN, *IN_CONTENT) for name in fields}
    assert tested - {"chat_template_kwargs"} <= described
