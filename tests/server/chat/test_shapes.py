"""Histories of many shapes on many templates: none is refused, no text is lost, and each goes on where the last one ended.

SLOTCACHE_TEMPLATES: a folder of *.jinja, such as llama.cpp's models/templates. Small ones stand for them without it.
"""

import random
import re
from functools import cache
from typing import Any

import pytest
from slotcache.models.template import ChatTemplate
from slotcache.server.chat.body import ChatRequest
from slotcache.server.chat.tools import Rendering
from slotcache.server.formats.families import detect
from support.template_shapes import ALTERNATES, ASKED, LOSES, MOVES, NO_SYSTEM, REAL, SMALL, TAKES, TOOLS, history

TEMPLATES = SMALL | REAL
BEHAVIOURS = {
    "a system's message in the middle": ["suasua", "uasu", "suasuau", "suasuasua"],
    "behind a question": ["us", "sus", "susau"],
    "behind a result": ["ucrs", "sucrs", "sucrsau", "ucrsu"],
    "last": ["suas", "suauas"],
    "several in front": ["ssu", "ssuau", "ssssu"],
    "several in the middle": ["suassu", "usss"],
    "alone": ["s", "ss", "sa"],
    "beside a call": ["ucsr", "ucsu"],
    "a user behind a result": ["ucru", "sucruau", "ucruc"],
    "several users": ["uu", "suuau", "suauu"],
    "several answers": ["uaa", "suaau", "uaac", "uacrau"],
    "an answer first": ["a", "au", "sau", "crau", "scrau"],
    "a call without a result": ["uc", "ucu", "sucuau", "udru", "uca", "ucau"],
    "results": ["ucr", "ucrau", "udrr", "udrrau", "ucrcrau"],
    "results without ids": ["udnn", "udnnn", "ucnnau", "unu", "udnrau"],
    "a result without its call": ["o", "ou", "sou", "oau", "uou", "uaou", "uaoau", "ucroau", "uco"],
}
IDS = ["call0000{}", "toolu_01ABCDEFGHIJKLMNOPQRSTUV.w:{}", "functions.look:{}"]
CUT = ['{"city": "fog', '{"city": "fog"', '{"city": "fog", "b']
ARGUMENTS = [None, "", "  ", "null", '["fog"]', '"fog"', "fog", *CUT, ["fog"], {"city": "fog"}]
# Templates that shorten the common prefix themselves: they put tools in front of the last question, or drop the reasoning's
# tags, of which these answers have none, once another question follows.
BREAKS = re.compile("Mistral-Small-3.2|Mistral-Nemo|Qwen3.5|StepFun|DeepSeek-V3.2")


@cache
def rendering(name: str) -> Rendering:
    source = TEMPLATES[name]
    return Rendering(ChatTemplate(source, "<s>", "</s>"), detect(source).written, {})


def shown(name: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    pieces = rendering(name).pieces(messages, ChatRequest(messages=messages, **fields))
    return "".join(piece.text for piece in pieces)


def on(source: str, letters: str, **fields: Any) -> str:
    name = next(name for name, one in SMALL.items() if one == source)
    text = shown(name, history(letters)[0], **fields)
    return re.sub("needle0([0-9])x", r"\1", text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_no_text_is_refused_or_lost(name, behaviour):
    for letters in BEHAVIOURS[behaviour]:
        messages, words = history(letters)
        for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": False}):
            text = shown(name, messages, **fields)
            assert [word for word in words if word not in text] == [], (letters, fields, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_of_other_models_and_none(name):
    messages = [*history("uc")[0], {"role": "tool", "content": "warm"}]
    del messages[1]["tool_calls"][0]["id"]
    for said in (messages, *(history("udrraucrau", id)[0] for id in IDS)):
        assert "look" in shown(name, said, tools=TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_arguments_that_are_no_object(name, arguments):
    messages, _ = history("ucrau")
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert "fog" in shown(name, messages) or "fog" not in str(arguments)
    del messages[1]["tool_calls"][0]["function"]["arguments"]
    assert "look" in shown(name, messages)


def sessions(name: str, count: int) -> list[str]:
    """Return random sessions, as letters."""
    choose = random.Random(name)
    return ["".join(choose.choices("sssuuuaacddrrron", k=choose.randrange(2, 9))) for _ in range(count)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_request_of_a_session_goes_on_where_the_last_one_ended(name):
    for session in sessions(name, 20):
        tools = TOOLS if len(session) % 2 else None
        before, needed = "", 0
        for end in range(1, len(session) + 1):
            messages, words = history(session[:end])
            text = shown(name, messages, tools=tools, add_generation_prompt=False)
            assert [word for word in words if word not in text] == [], (session[:end], text)
            if messages[-1]["role"] == "assistant" or waits(messages):
                continue
            if not BREAKS.search(name):
                assert text[:needed] == before[:needed], (session[:end], before, text)
            before, needed = text, max(text.find(word) + len(word) for word in words)


def waits(messages: list[dict[str, Any]]) -> bool:
    """Whether a call still waits for its result: no program asks for an answer then."""
    called = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    return bool(called - {message.get("tool_call_id") for message in messages})


def test_a_template_that_takes_everything_gets_everything_as_it_is():
    assert on(TAKES, "ssuusaacsrou", add_generation_prompt=False) == (
        "<system>0<end><system>1<end><user>2<end><user>3<end><system>4<end><assistant>5<end><assistant>6<end>"
        '<assistant>{"name": "look", "arguments": {"city": "7"}}<end><system>8<end><tool>9<end><tool>needle10x<end>'
        "<user>needle11x<end>"
    )


@pytest.mark.parametrize(
    ("source", "letters", "expected"),
    [
        (NO_SYSTEM, "su", "<user>0\n1<end>"),
        (NO_SYSTEM, "ssu", "<user>0\n\n1\n2<end>"),
        (NO_SYSTEM, "sa", "<user>0<end><assistant>1<end>"),
        (NO_SYSTEM, "usau", "<user>0\n\n[System: 1]<end><assistant>2<end><user>3<end>"),
        (NO_SYSTEM, "uasu", "<user>0<end><assistant>1<end><user>[System: 2]\n\n3<end>"),
        (NO_SYSTEM, "uas", "<user>0<end><assistant>1<end><user>[System: 2]<end>"),
        (NO_SYSTEM, "uu", "<user>0\n\n1<end>"),
        (NO_SYSTEM, "uaa", "<user>0<end><assistant>1\n\n2<end>"),
        (NO_SYSTEM, "au", "<user><end><assistant>0<end><user>1<end>"),
        (NO_SYSTEM, "uaou", "<user>0<end><assistant>1<end><user><tool_response>\n2\n</tool_response>\n\n3<end>"),
        (ASKED, "ssuasu", "<system>0\n\n1<end><user>2<end><assistant>3<end><user>[System: 4]\n\n5<end>"),
        (ASKED, "s", "<system>0<end><user><end>"),
        (ASKED, "ucrs", "<user>0<end><assistant>look(city=1)<end><tool>2\n\n[System: 3]<end>"),
        (MOVES, "suasu", "0;<user>1<end><assistant>2<end><user>[System: 3]\n\n4<end>"),
        (LOSES, "suas", "<system>0<end><user>1<end><assistant>2<end><user>[System: 3]<end>"),
        (LOSES, "uo", "<user>0<end><user><tool_response>\n1\n</tool_response><end>"),
        (
            LOSES,
            "udrr",
            '<user>0<end><call look>{"city": "1"}<end><result look>3<end><call look>{"city": "2"}<end><result look>4<end>',
        ),
        (ALTERNATES, "suau", "<<0>>[INST]1[/INST]2</s>[INST]3[/INST]"),
        (
            ALTERNATES,
            "ucru",
            '[INST]0[/INST][CALL]call00000{"name": "look", "arguments": {"city": "1"}}[RESULT]call00000:2\n\n3',
        ),
        (
            ALTERNATES,
            "ucu",
            '[INST]0[/INST][CALL]call00000{"name": "look", "arguments": {"city": "1"}}[RESULT]call00000:(no result)\n\n2',
        ),
    ],
)
def test_where_a_text_stands(source, letters, expected):
    assert on(source, letters, add_generation_prompt=False) == expected


def test_ids_that_a_template_refuses_are_the_same_in_call_and_result_and_in_every_turn():
    messages, _ = history("udrrau", "functions.look:{}")
    ids = re.findall(r"\](\w{9})[{:]", shown("ALTERNATES", messages))
    assert len(ids) == 4 and ids[:2] == ids[2:] and ids[0] != ids[1]
    assert ids == re.findall(r"\](\w{9})[{:]", shown("ALTERNATES", messages[:4]))
    assert "functions.look:0" not in shown("ALTERNATES", messages)
    assert "call00000" in shown("ALTERNATES", history("ucr")[0])


def test_a_text_that_is_moved_belongs_to_its_message():
    """So its special tokens are plain text, and the documents of a message stand with it."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "<s>"}, {"role": "user", "content": "Bye"}]
    pieces = rendering("NO_SYSTEM").pieces(messages, ChatRequest(messages=messages))
    assert [(piece.text, piece.message) for piece in pieces if piece.message is not None] == [
        ("Hi", 0),
        ("<s>", 1),
        ("Bye", 2),
    ]


def test_reasoning_never_stands_after_content_of_one_answer():
    messages, _ = history("uaa")
    messages[2]["reasoning_content"] = "why"
    assert shown("NO_SYSTEM", messages) == (
        "<user>needle00x<end><assistant>needle01x<end><user><end><assistant>needle02x<end><assistant>"
    )
