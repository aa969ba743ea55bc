"""The arguments of calls that models and clients wrote badly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.models.call_arguments import argument_object, argument_text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("nothing", [None, "", "  \n", "null", "[]", '""', "{}", [], {}], ids=repr)
def test_nothing_is_no_arguments(nothing):
    assert argument_object(nothing) == {}
    assert json.loads(argument_text(nothing)) == {}


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("{", {}),
        ('{"a": "b', {"a": "b"}),
        ('{"a": "b  ', {"a": "b  "}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": "b\\\\', {"a": "b\\"}),
        ('{"a": "b\\"', {"a": 'b"'}),
        ('{"a": "b\\u00e', {"a": "b"}),
        ('{"a": "\\ud83d', {"a": "\ufffd"}),
        ('{"a": "line\nline', {"a": "line\nline"}),
        ('{"a": 1, ', {"a": 1}),
        ('{"a": 1, "b', {"a": 1, "b": None}),
        ('{"a": 1, "b":', {"a": 1, "b": None}),
        ('{"a": tr', {"a": None}),
        ('{"a": [1, {"b": ["c', {"a": [1, {"b": ["c"]}]}),
    ],
)
def test_a_text_that_was_cut_is_completed(cut, expected):
    assert argument_object(cut) == expected
    assert json.loads(argument_text(cut)) == expected


@pytest.mark.parametrize(
    "text", ["x", '"x"', '["x"]', "5", '{"a": 1}}', '{"a" "b"}', '{"a": ]', "[" * 100_000, '{"a":' * 100_000]
)
def test_another_text_is_the_one_argument(text):
    assert argument_object(text) == {"arguments": text}


def test_another_value_is_the_one_argument_as_json():
    assert argument_object(["x"]) == {"arguments": '["x"]'}
    assert argument_object(0) == {"arguments": "0"}


def test_the_text_of_an_object_stays_as_it_is():
    assert argument_text('{"a":1 , "b":"\\u00e9"}') == '{"a":1 , "b":"\\u00e9"}'
    assert argument_text({"a": "é"}) == '{"a": "é"}'
    assert argument_object('{"a": "\\ud83d"}') == {"a": "\ufffd"}


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.data())
def test_each_start_of_an_object_is_one(value, data):
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    cut = argument_object(text[: data.draw(st.integers(1, len(text)))])
    assert set(cut) <= {"arguments"} | set(value) or len(set(cut) - set(value)) == 1  # the last key may be cut
    assert argument_object(text) == value
    assert "arguments" not in cut or "arguments" in value
