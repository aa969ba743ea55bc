"""The grammar of calls and their reader agree: what the one lets through, the other reads as the call that it is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from slotcache.models.json_schema import LIMITS, GrammarSource, define
from slotcache.server.formats.answer import message
from slotcache.server.formats.call_grammar import GrammarWriter
from slotcache.server.formats.families import FORMATS
from slotcache.server.formats.json_text import parameter_types

TAGGED = {row.name: row for row in FORMATS if row.written.parameter and not row.written.separator}
TOKENIZER = LLTokenizer("byte")
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"path": TEXT, "text": TEXT, "mode": {"enum": ["a", "b"]}, "note": TEXT, "days": {"type": "integer"}},
    "required": ["path", "text"],
}


def grammar(row, schema=SCHEMA):
    writer = GrammarWriter({})
    rule = writer.calls(row.written, [("write", schema)], parallel=False)
    return define(GrammarSource("lark", writer.lark(rule), tuple(writer.schemas.items()), may_name_tokens=True), [])


GRAMMARS = {name: grammar(row) for name, row in TAGGED.items()}


def fitting(name, wish):
    """The text of a call that a model writes which wishes to write this text: bytes that do not fit are left out."""
    matcher = LLMatcher(TOKENIZER, GRAMMARS[name], log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    written = bytearray()

    def put(byte):
        if matcher.validate_tokens([byte]) == 1:
            assert matcher.consume_token(byte)
            written.append(byte)

    for byte in wish.encode():
        put(byte)
        if matcher.is_stopped():
            break
    return written.decode(), matcher


def call(name, arguments):
    """A call as the family writes it."""
    text = TAGGED[name].written.text([("write", json.dumps(arguments))])
    return text.replace('type="object"', 'type="integer"')  # of the only parameter that is no text


def read(name, text):
    reader = TAGGED[name].reader({"write": parameter_types(SCHEMA)}, seed="0")
    return message([*reader.push(text), *reader.finish()])


def arguments(name, text):
    said: Any = read(name, text)
    (made,) = said["tool_calls"]
    assert not said["content"] and made["function"]["name"] == "write"
    return json.loads(made["function"]["arguments"])


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("given", [{}, {"note": "n"}, {"mode": "b", "note": "n", "days": 3}, {"days": -1}])
def test_a_call_fits_and_is_read(name, given):
    wished = {"path": "a.md", "text": "one\n\ntwo < 3", **given}
    text, matcher = fitting(name, call(name, wished))
    assert matcher.is_accepting() and arguments(name, text) == wished


@pytest.mark.parametrize("name", sorted(TAGGED.keys() - {"minimax-m3"}))  # whose tags all begin with one control token
def test_a_closing_tag_in_a_text_fits(name):
    """Behind it the text goes on, and no parameter that is required is lost."""
    shape: Any = TAGGED[name].shapes[0]
    closes = shape.body.value_ends[-1].replace("{key}", "path")
    wished = {"path": f"a{closes}b\n{closes}\nc", "text": "d"}
    text, matcher = fitting(name, call(name, wished))
    assert matcher.is_accepting() and arguments(name, text) == wished


@pytest.mark.parametrize("name", TAGGED)
def test_a_call_does_not_end_without_what_is_required(name):
    wished = call(name, {"path": "a"})
    text, matcher = fitting(name, wished)
    assert not matcher.is_accepting() and text != wished


@given(st.data())
def test_what_fits_is_read_as_it_was_written(data):
    name = data.draw(st.sampled_from(sorted(TAGGED)))
    shape: Any = TAGGED[name].shapes[0]
    tags = [
        tag.replace("{key}", "path")
        for tag in (*shape.tags, *shape.body.value_ends)
        if "CDATA" not in tag and "]]>" not in tag
    ]
    pieces = st.lists(st.sampled_from([*tags, "\n", " ", "x", "path", "days", "note", "1"]), max_size=8).map("".join)
    wished = {"path": data.draw(pieces), "text": data.draw(pieces)}
    if data.draw(st.booleans()):
        wished["note"] = data.draw(pieces)
    # What of the wish does not fit may leave the call open: then its end is written once more.
    text, matcher = fitting(name, call(name, wished) + 2 * call(name, {"path": "p", "text": "t"}))
    if matcher.is_accepting():
        found = arguments(name, text)
        assert {"path", "text"} <= found.keys() <= SCHEMA["properties"].keys()
        again, _ = fitting(name, call(name, found))
        assert arguments(name, again) == found
