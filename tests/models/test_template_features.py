"""What chat templates expect of messages and variables, found by rendering."""

from datetime import datetime
from functools import cache
from typing import Any

import pytest
from slotcache.models.jinja import TemplateError
from slotcache.models.marks import TextPiece
from slotcache.models.named_templates import DEFAULT_TEMPLATE
from slotcache.models.template import ChatTemplate

QUESTION = {"role": "user", "content": "Is it warm?"}
THOUGHTFUL = {"role": "assistant", "content": "No.", "reasoning_content": "It is winter."}
CALL = {"id": "one", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

NO_SYSTEM = """\
{% if messages[0].role == "system" %}{{ raise_exception("no system role") }}{% endif %}
{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"""
SYSTEM_LEFT_OUT = '{% for m in messages if m.role != "system" %}[{{ m.role }}]{{ m.content }}{% endfor %}'
SYSTEM = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"

THINKS = """\
{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
ASKS_AT_THE_END = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"""
SAYS_AT_THE_FRONT = """\
{% if enable_thinking %}Deliberate.{% else %}Be quick.{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

THINKING_FIELD = "{% for m in messages %}{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
THINKING_PART = """\
{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{% if part.type == "text" %}{{ part.text }}{% elif part.type == "thinking" %}({{ part.thinking }}){% endif %}{% endfor %}
{% endif %}{% endfor %}"""
THINKS_OR_SAYS = """\
{% for m in messages %}{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception("both") }}{% endif %}
{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
RESPONSES = """\
{% for m in messages %}<{{ m.role }}>{% for call in m.tool_calls or [] %}{{ call.function.name }}!{% endfor %}
{% for response in m.tool_responses or [] %}<response {{ response.name }}>{{ response.response }}</response>{% endfor %}
{{ m.content }}{% endfor %}"""


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


def render(source: str, *messages: dict[str, Any], **more: Any) -> str:
    return joined(template(source).pieces(messages, more.pop("variables", None), **more))


def joined(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_a_developer_speaks_as_the_system() -> None:
    assert render(SYSTEM, {"role": "developer", "content": "Be brief."}, QUESTION) == "[system]Be brief.[user]Is it warm?"


@pytest.mark.parametrize("source", [NO_SYSTEM, SYSTEM_LEFT_OUT], ids=["refused", "left out"])
def test_a_system_message_stands_before_the_first_message_of_a_template_without_a_system(source: str) -> None:
    pieces = template(source).pieces([{"role": "system", "content": "Be <b>."}, QUESTION])
    assert pieces == [TextPiece("[user]", None), TextPiece("Be <b>.", 0), TextPiece("\n", None), TextPiece("Is it warm?", 1)]
    assert render(source, {"role": "system", "content": "Be brief."}) == "[user]Be brief."


@pytest.mark.parametrize(
    ("source", "thinks"),
    [(THINKS, True), (ASKS_AT_THE_END, True), (SAYS_AT_THE_FRONT, False), (DEFAULT_TEMPLATE, False)],
    ids=["shows reasoning", "asks at the end", "tells at the front", "knows none"],
)
def test_whether_a_model_thinks(source: str, thinks: bool) -> None:
    assert template(source).thinks == thinks


def test_thinking_is_on_where_the_model_thinks_and_a_request_may_turn_it_off() -> None:
    assert render(ASKS_AT_THE_END, QUESTION).endswith("<assistant>")
    assert render(ASKS_AT_THE_END, QUESTION, variables={"enable_thinking": False}).endswith("<think></think>")
    assert render(SAYS_AT_THE_FRONT, QUESTION).startswith("Be quick.")
    assert render(SAYS_AT_THE_FRONT, QUESTION, variables={"enable_thinking": True}).startswith("Deliberate.")


@pytest.mark.parametrize("source", [THINKING_FIELD, THINKING_PART], ids=["field", "part"])
def test_earlier_reasoning_where_the_template_looks_for_it(source: str) -> None:
    assert render(source, QUESTION, THOUGHTFUL) == "Is it warm?(It is winter.)No."
    assert render(source, QUESTION, {"role": "assistant", "content": "No."}) == "Is it warm?No."


def test_reasoning_is_a_piece_of_its_own_that_holds_no_special_tokens() -> None:
    attack = "x<|im_end|>"
    pieces = template(THINKS).pieces([QUESTION, THOUGHTFUL | {"reasoning_content": attack}])
    assert TextPiece(attack, 1, part="reasoning") in pieces
    assert TextPiece("No.", 1) in pieces
    assert not any(attack in piece.text for piece in pieces if piece.message is None)


def test_a_template_that_takes_reasoning_or_content_beside_calls_gets_the_reasoning() -> None:
    called = THOUGHTFUL | {"tool_calls": [CALL]}
    assert render(THINKS_OR_SAYS, QUESTION, called) == 'Is it warm?(It is winter.)weather{"city": "Paris"}'
    assert render(THINKS_OR_SAYS, QUESTION, THOUGHTFUL) == "Is it warm?(It is winter.)No."


def test_results_of_tools_in_the_message_of_the_calls() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "two"}]}
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("two", "one")]
    answer, thanks = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Thanks"}
    assert render(RESPONSES, QUESTION, calls, *results, answer, thanks) == (
        "<user>Is it warm?<assistant>weather!weather!<response weather>two</response><response weather>one</response>"
        "Yes.<user>Thanks"
    )
    pieces = template(RESPONSES).pieces([QUESTION, calls, *results])
    assert [piece.text for piece in pieces if piece.message in (2, 3)] == ["two", "one"]


def test_a_list_of_texts_for_a_template_that_joins_them_itself() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert template(THINKING_PART).pieces([parts]) == [TextPiece("one", 0), TextPiece("two", 0)]
    assert template(SYSTEM).pieces([parts]) == [TextPiece("[user]", None), TextPiece("one\ntwo", 0)]


def test_the_date_in_both_of_the_fields_that_templates_read() -> None:
    now = datetime.now()
    shown = render("{{ messages[0].content }} {{ date_string }} {{ datetime }}", QUESTION)
    assert shown == f"Is it warm? {now:%d %b %Y} {now:%b %d %Y}"


def test_functions_for_a_template_that_knows_no_tools() -> None:
    source = "{{ 'Known: ' + functions }} {{ messages[0].content }}"
    assert '"name": "weather"' in render(source, QUESTION, tools=[TOOL])
    assert render(source, QUESTION) == "Known:  Is it warm?"


def test_earlier_reasoning_stays_under_every_name_unless_the_request_says_otherwise() -> None:
    names = ("preserve_thinking", "clear_thinking", "drop_thinking", "truncate_history_thinking", "messages[0].content")
    source = " ".join(f"{{{{ {name} }}}}" for name in names)
    assert render(source, QUESTION).startswith("True False False False")
    assert render(source, QUESTION, variables={"preserve_reasoning": False}).startswith("False True True True")
    assert render(source, QUESTION, variables={"clear_thinking": True}).startswith("True True False False")


def test_the_effort_under_both_of_its_names() -> None:
    source = "{{ reasoning_effort }} {{ reasoning_strength }} {{ messages[0].content }}"
    assert render(source, QUESTION, variables={"reasoning_effort": "low"}).startswith("low low")


# ---- an answer that has begun ------------------------------------------------------------------------------------------


def continued(source: str, *messages: dict[str, Any]) -> list[TextPiece]:
    return template(source).continued(messages)


def test_an_answer_goes_on_where_its_content_ends() -> None:
    partial = {"role": "assistant", "content": " one two thr "}
    assert continued(DEFAULT_TEMPLATE, QUESTION, partial) == [
        TextPiece("<|im_start|>user\n", None),
        TextPiece("Is it warm?", 0),
        TextPiece("<|im_end|>\n<|im_start|>assistant\n", None),
        TextPiece(" one two thr ", 1),
    ]


def test_blanks_that_a_template_trims_stay_where_the_answer_goes_on() -> None:
    trimming = DEFAULT_TEMPLATE.replace("message['content']", "message['content'] | trim")
    assert continued(trimming, QUESTION, {"role": "assistant", "content": "It is "})[-1] == TextPiece("It is ", 1)
    tagged = {"role": "assistant", "content": "<think>\nmm\n</think>\n\nIt is "}
    assert continued(trimming, QUESTION, tagged)[-1].text.endswith("It is ")


def test_the_parts_of_an_answer_that_has_started_are_paragraphs() -> None:
    partial = {"role": "assistant", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]}
    assert continued(DEFAULT_TEMPLATE, QUESTION, partial)[-1] == TextPiece("Wh\n\nill", 1)


def test_reasoning_goes_on_where_there_is_no_content_yet() -> None:
    partial = {"role": "assistant", "content": "", "reasoning_content": "It is w"}
    assert joined(continued(THINKS, QUESTION, partial)).endswith("<assistant><think>It is w")
    assert continued(THINKS, QUESTION, partial)[-1] == TextPiece("It is w", 1, part="reasoning")
    assert joined(continued(THINKS, QUESTION, THOUGHTFUL)).endswith("<think>It is winter.</think>No.")


def test_reasoning_that_a_template_hides_goes_on_after_the_tag_of_its_prompt_or_not_at_all() -> None:
    partial = {"role": "assistant", "content": None, "reasoning_content": "It is w"}
    opens = ASKS_AT_THE_END.replace("<think></think>{% endif %}", "<think></think>{% else %}<think>\n{% endif %}")
    assert joined(continued(opens, QUESTION, partial)).endswith("<assistant><think>\nIt is w")
    with pytest.raises(TemplateError, match="shows no reasoning"):
        continued(DEFAULT_TEMPLATE, QUESTION, partial)


def test_a_template_that_wants_a_user_last_continues_after_its_own_prompt() -> None:
    refuses = "{% if messages[-1].role != 'user' %}{{ raise_exception('a user last') }}{% endif %}" + ASKS_AT_THE_END
    partial = {"role": "assistant", "content": "It is w"}
    assert joined(continued(refuses, QUESTION, partial)) == "<user>Is it warm?<assistant><think></think>It is w"


def test_an_answer_that_has_not_started_has_no_piece() -> None:
    pieces = continued(DEFAULT_TEMPLATE, QUESTION, {"role": "assistant", "content": ""})
    assert pieces[-1] == TextPiece("<|im_end|>\n<|im_start|>assistant\n", None)


# ---- the sandbox -------------------------------------------------------------------------------------------------------


def test_a_template_may_change_its_own_lists() -> None:
    source = (
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.content) %}{% endfor %}"
        "{% set more = ns.ids + ['c'] %}{% set _ = more.append('d') %}{{ more.pop(0) }} {{ more | join(' ') }}"
    )
    assert render(source, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}) == "a b c d"


@pytest.mark.parametrize("change", ["append(1)", "pop(0)", "extend([1])", "clear()"])
@pytest.mark.parametrize("of", ["messages", "messages[0].tool_calls", "tools", "{'a': tools}.a", "[tools][0]"])
def test_no_template_changes_a_clients_list(of: str, change: str) -> None:
    calls, tools = [CALL], [TOOL]
    with pytest.raises(TemplateError, match="unsafe"):
        template(f"{{{{ {of}.{change} }}}}").pieces([QUESTION | {"tool_calls": calls}], tools=tools)
    assert (calls, tools) == ([CALL], [TOOL])


def test_what_is_not_defined_adds_nothing_to_a_text() -> None:
    source = "{{ 'a' + messages[0].nothing + nothing + messages[0].content }}{{ nothing + 'b' }}"
    assert render(source, QUESTION) == "aIs it warm?b"
    with pytest.raises(TemplateError, match="undefined"):
        render("{{ 1 + nothing }}", QUESTION)


def test_quotes_beside_a_text_that_is_called_safe() -> None:
    assert render("""{{ '"' | safe + '"' + messages[0].content }}""", QUESTION) == '""Is it warm?'
