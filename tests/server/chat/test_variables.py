"""What a request and the settings give to the chat template."""

import pytest
from slotcache.models.named_templates import named_template, names
from slotcache.models.template import ChatTemplate
from slotcache.server.config.settings import Settings
from slotcache.server.serve import serve

from server.conftest import running

USER = {"role": "user", "content": "Hi"}
SHOWN = "enable_thinking", "reasoning_effort", "preserve_thinking", "mood"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|"
    + "|".join(f"{{{{ {name} }}}}" for name in SHOWN)
    + "|{% if add_generation_prompt and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tiny):
    with running(tiny, chat_template=TEMPLATE) as up:
        yield up


def shown(server, **fields):
    answer = server.http.post("/apply-template", json={"messages": [USER]} | fields)
    assert answer.status_code == 200, answer.text
    return dict(zip(SHOWN, answer.json()["prompt"].split("|")[1:], strict=False))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["True", "", "True", ""]),
        ({"reasoning_effort": "low"}, ["True", "low", "True", ""]),
        ({"reasoning": {"effort": "high"}}, ["True", "high", "True", ""]),
        ({"reasoning_effort": "none"}, ["False", "", "True", ""]),
        ({"chat_template_kwargs": {"enable_thinking": False, "mood": "calm"}}, ["False", "", "True", "calm"]),
        ({"chat_template_kwargs": {"preserve_reasoning": False, "enable_thinking": None}}, ["True", "", "False", ""]),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}, ["True", "high", "True", ""]),
    ],
)
def test_the_fields_of_a_request(server, fields, expected):
    assert shown(server, **fields) == dict(zip(SHOWN, expected, strict=True))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reasoning": "off"}, ["False", "", "True", ""]),
        ({"reasoning_effort": "low", "reasoning_preserve": False}, ["True", "low", "False", ""]),
        ({"chat_template_kwargs": '{"mood": "calm", "enable_thinking": false}'}, ["False", "", "True", "calm"]),
    ],
)
def test_the_settings_are_the_defaults_of_the_fields(tiny, settings, expected):
    with running(tiny, chat_template=TEMPLATE, **settings) as up:
        assert shown(up) == dict(zip(SHOWN, expected, strict=True))
        assert shown(up, chat_template_kwargs={"enable_thinking": True, "mood": "glad"})["enable_thinking"] == "True"


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"enable_thinking": "yes"}, "chat_template_kwargs.enable_thinking"),
        ({"preserve_reasoning": 1}, "chat_template_kwargs.preserve_reasoning"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
    ],
)
def test_what_is_no_variable_is_refused(server, kwargs, param):
    answer = server.http.post("/apply-template", json={"messages": [USER], "chat_template_kwargs": kwargs})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "llama33"}, "--chat-template llama33: expected Jinja or one of chatml, llama2,"),
        ({"chat_template": "llama3", "chat_template_file": "some.jinja"}, "give one of them"),
        ({"chat_template_kwargs": "[1]"}, "--chat-template-kwargs: expected an object of JSON"),
        ({"chat_template_kwargs": '{"tools": []}'}, "--chat-template-kwargs: tools comes from each request"),
    ],
    ids=["unknown name", "two templates", "no object", "a field of requests"],
)
def test_settings_that_no_template_can_use_end_the_start(tiny, capsys, settings, message):
    assert serve(Settings(model=str(tiny), ctx_size=1024, threads=1, **settings)) == 2
    assert message in capsys.readouterr().err


def test_a_template_in_the_home_folder_is_found_and_one_that_is_no_text_ends_the_start(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!")
    with running(tiny, chat_template_file="~/chat.jinja") as up:
        assert up.http.post("/apply-template", json={"messages": [USER]}).json()["prompt"] == "Hi!"
    file.write_bytes(b"\xff")
    assert serve(Settings(model=str(tiny), ctx_size=1024, threads=1, chat_template_file="~/chat.jinja")) == 2
    assert "cannot read the chat template ~/chat.jinja: 'utf-8' codec" in capsys.readouterr().err


def test_a_template_by_name(tiny):
    with running(tiny, chat_template="llama3") as up:
        messages = [{"role": "system", "content": " S "}, USER]
        prompt = up.http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == (
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("name", names())
def test_each_named_template_shows_a_whole_chat(name):
    source = named_template(name)
    assert source is not None
    said = ["Be brief.", "Hi", "Hello.", "Bye"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    pieces = ChatTemplate(source, "<s>", "</s>").pieces(messages)
    assert [piece.text for piece in pieces if piece.message is not None] == said
    continued_parts = ChatTemplate(source, "<s>", "</s>").continued(messages[:3])
    assert continued_parts[-1].text == "Hello."


def test_an_unknown_name_is_no_template():
    assert named_template("llama33") is None
