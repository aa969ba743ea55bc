"""Values that stand without quotes become what the schema wants; what they refer to is found in few steps."""

import json
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.server.formats.json_text import parameter_types, typed

INTEGER, NUMBER, BOOLEAN, LIST = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "array"}
OBJECT, TEXT, MAYBE = {"type": "object"}, {"type": "string"}, {"type": ["string", "null"]}
COLOUR = {"enum": ["red", "'", "5", 5, None]}
DEFINED = {"$ref": "#/$defs/Colour"}
ROOT = {"$defs": {"Colour": {"type": "string", "enum": ["red", "dark green"]}}}


def wanted(schema):
    return parameter_types(ROOT | {"properties": {"it": schema}})["it"]


def value(text, schema):
    return typed(text, wanted(schema))


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5.0", INTEGER, "5"),
        ("1e3", INTEGER, "1000"),
        ("+7", INTEGER, "7"),
        ("-1.50e1", INTEGER, "-15"),
        ("12345678901234567890.0", INTEGER, "12345678901234567890"),
        ("007", INTEGER, "7"),
        (" 3\n", INTEGER, "3"),
        ('"3"', INTEGER, "3"),
        ("5.5", INTEGER, '"5.5"'),
        ("1e999", INTEGER, '"1e999"'),
        ("", INTEGER, '""'),
        ("+", INTEGER, '"+"'),
        (".", NUMBER, '"."'),
        (".5", NUMBER, "0.5"),
        ("-.5e2", NUMBER, "-0.5e2"),
        ("5.", NUMBER, "5"),
        ("5.0", NUMBER, "5.0"),
        ("1e999", NUMBER, '"1e999"'),
        ("NaN", NUMBER, '"NaN"'),
        ("-Infinity", NUMBER, '"-Infinity"'),
        ("[1e999]", LIST, '"[1e999]"'),
        ("TRUE", BOOLEAN, "true"),
        ("False", BOOLEAN, "false"),
        ("yes", BOOLEAN, '"yes"'),
        ("NONE", {"type": "null"}, "null"),
        ("['a', 'b']", LIST, '["a", "b"]'),
        ("('it\\'s', \"x\\n\", None,)", LIST, '["it\'s", "x\\n", null]'),
        ("[True, .5, +2, '\\ud83d\\ude00', 'a \"b\", c: d']", LIST, '[true, 0.5, 2, "😀", "a \\"b\\", c: d"]'),
        ("['open", LIST, '"[\'open"'),
        ("{'a': True, 'b': {'c': [1, 2,]}}", OBJECT, '{"a": true, "b": {"c": [1, 2]}}'),
        ("{'a'}", OBJECT, "\"{'a'}\""),
        ("['a']", OBJECT, "\"['a']\""),
        ("['a']", {"type": ["array", "string"]}, '["a"]'),
        ("['a']", {}, "\"['a']\""),
        ('{"a": 1}', {"properties": {"a": INTEGER}}, '{"a": 1}'),
        ('"red"', COLOUR, '"red"'),
        ("'red'", COLOUR, '"red"'),
        (" red\n", COLOUR, '"red"'),
        ("'", COLOUR, '"\'"'),
        ("5", COLOUR, '"5"'),
        ("null", COLOUR, "null"),
        ('"dark green"', DEFINED, '"dark green"'),
        ("'dark green'", {"allOf": [DEFINED]}, '"dark green"'),
        ("blue ", DEFINED, '"blue "'),
        ('"on"', {"const": "on"}, '"on"'),
        ('"red"', {"anyOf": [DEFINED, {"type": "null"}]}, '"red"'),
        ('"a \\"b\\""', MAYBE, '"a \\"b\\""'),
        ("'a'", MAYBE, "\"'a'\""),
        ('"a', MAYBE, '"\\"a"'),
        ("None", MAYBE, "null"),
        ("null", {"type": "string", "nullable": True}, "null"),
        ('"5"', {"type": ["string", "integer"]}, '"5"'),
        ("5", {"type": ["string", "integer"]}, "5"),
        ('"a"', {}, '"\\"a\\""'),
        ('"a"', TEXT, '"\\"a\\""'),
        ('"\\ud83d"', MAYBE, '"\\"\\\\ud83d\\""'),
    ],
)
def test_a_value_is_what_the_schema_wants(text, schema, expected):
    assert json.loads(value(text, schema)) == json.loads(expected)
    assert type(json.loads(value(text, schema))) is type(json.loads(expected))


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
    ).filter(lambda value: isinstance(value, list | dict))
)
def test_what_python_writes_is_read(written):
    schema = LIST if isinstance(written, list) else OBJECT
    if "\\U" not in (text := repr(written)):
        assert json.loads(value(text, schema)) == written
    assert json.loads(value(json.dumps(written), schema)) == written


@given(
    st.text(st.sampled_from("[]{}(),:'\"\\ 1.eE+-aTrue\n")),
    st.sampled_from([INTEGER, NUMBER, BOOLEAN, LIST, MAYBE, COLOUR, {}]),
)
def test_any_text_becomes_json(text, schema):
    json.loads(value(text, schema))


@pytest.mark.parametrize("schema", [LIST, INTEGER, NUMBER, COLOUR, MAYBE])
@pytest.mark.parametrize("unit", ["['a',", "'\\", "[", "9", "(1,)", "[' "])
def test_a_long_value_takes_linear_time(unit, schema):
    def spent(size):
        text, began = "[" + unit * (size // len(unit)) + "]", process_time()
        value(text, schema)
        return process_time() - began

    few = spent(20_000)
    assert any(spent(200_000) < 40 * max(few, 0.005) for _ in range(2))
