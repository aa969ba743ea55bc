"""A form of the answer that cannot be compiled or enforced is refused: on every route, in every field, and for every tool.

No such request is answered without its form, and none costs a token.
"""

import json

import jsonschema
import pytest
from slotcache.server.chat.decode import REFUSED

from server.api.test_infill import MARKS, model_with
from server.api.test_tools import FAMILIES, TEMPLATE
from server.conftest import running

USER = [{"role": "user", "content": "Write an example"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ROUTES = {
    CHAT: {"messages": USER},
    RESPONSES: {"input": "Write an example"},
    MESSAGES: {"messages": USER},
    "/v1/completions": {"prompt": "Write an example"},
    "/completion": {"prompt": "Write an example"},
    "/completions": {"prompt": "Write an example"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}
FIXED = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}
SCHEMAS = [
    # No schemas at all.
    False, {"type": "hiccup"}, {"type": 3}, {"type": []}, {"type": None}, {"type": ["string", "hiccup"]},
    {"properties": []}, {"properties": None}, {"properties": {"a": 3}}, {"items": None}, {"items": "string"}, {"allOf": {}},
    {"anyOf": []}, {"oneOf": []}, {"required": "a"}, {"required": [3]}, {"enum": "abc"}, {"enum": []}, {"enum": None},
    {"pattern": 3}, {"format": 3}, {"minLength": "3"}, {"minLength": -1}, {"minLength": 1.5}, {"minimum": "3"},
    {"minItems": True}, {"maxItems": "1"}, {"multipleOf": 0}, {"$ref": 3}, {"patternProperties": {"(": {}}},
    # References that lead nowhere, away, or round in a circle.
    {"$ref": "#/nowhere"}, {"$ref": "http://localhost/schema"}, {"$ref": "#"}, {"$dynamicRef": "#"},
    {"$defs": {"a": 3}, "$ref": "#/$defs/a"}, {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    # Expressions that cannot be compiled.
    *({"type": "string", "pattern": pattern} for pattern in (
        "(", "[z-a]", "a{3,1}", r"\p{Foo}", "a\\", "^a$\\", r"^hello (there indeed\!$",
    )),
    {"patternProperties": {"a\\": {}}, "additionalProperties": False},
    # Nothing fits.
    {"type": "string", "minLength": 5, "maxLength": 3}, {"minItems": 3, "maxItems": 1}, {"minimum": 5, "maximum": 3},
    {"type": "integer", "minimum": 1.2, "maximum": 1.8}, {"const": 3, "type": "string"}, {"const": "abc", "maxLength": 2},
    {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, FIXED | {"type": "integer"},
    {"allOf": [{"type": "string"}, {"type": "null"}]}, {"type": "number", "multipleOf": 7, "minimum": 1, "maximum": 6},
    # What llguidance would take for a wider one.
    {"exclusiveMinimum": 0, "maximum": 0.5}, {"exclusiveMaximum": -2, "minimum": -2.5},
    {"type": ["number", "null"], "exclusiveMinimum": 2, "exclusiveMaximum": 2.0001},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]},
]  # fmt: skip
LOOSE = [
    {"minLenght": 3}, {"properties": {"a": {"type": "string", "minLenght": 3}}}, {"not": {"minimum": 3}},
    {"items": {"type": "null"}, "uniqueItems": True}, {"$defs": {"a": {"not": {}}}, "type": "null"},
    {"type": "number", "not": {"type": "integer"}},
    {"contains": {"type": "null"}}, {"dependentRequired": {"a": ["b"]}}, {"if": {"type": "null"}, "then": False},
    {"propertyNames": {"minLength": 3}, "type": "object"}, {"unevaluatedProperties": False},
    {"type": "string", "pattern": r"(a)\1"}, {"type": "string", "pattern": "^a(?=b)"},
    {"type": "string", "pattern": r"\bfoo\b"}, {"patternProperties": {"^(?!x)": {"type": "null"}}, "type": "object"},
]  # fmt: skip
"""Schemas with a word that is not enforced."""
STRICT = [schema | {"strict": True} for schema in LOOSE]
GBNF = [
    " ", "# a remark", 'rule ::= "a"', "root ::= missing", "root ::= root", 'root ::= "a', "root ::= [a", 'root ::= ("a"',
    'root ::= "a")', 'root ::= "a"{3,1}', 'root ::= "a"{', "root ::= <|im_end|>", "root ::= <[5]>", "root ::= !<[5]>",
    'root = "a"', "root ::= [z-a]", 'start: "a"', '{"type": "object"}', "root ::= this is (not valid GBNF", "root ::= /a/",
]  # fmt: skip
REGEX = [
    "(",
    "(a",
    "a)",
    "[",
    "[z-a]",
    "a{3,1}",
    "*a",
    r"(a)\1",
    "(?=a)b",
    "(?<=a)b",
    r"\p{Foo}",
    "(?z)a",
    "\\",
    "ab\\",
    r"\x",
]
LARK = [
    " ", "begin: 1", "start", "start: X", "start: start", 'start: "a"{3,1}', "start: /(/", "start: /a", "start: /a(?=b)/",
    "start: <|im_end|>", "start: <[5]>", "start: %json {}", '%llguidance {}\nstart: "a"', "start: @x", 
    '%lark {}\nstart: "a"',
    'start[temperature=1]: "a"', 'start[stop="x"]: "a"', "%import common.FOO\nstart: FOO", "%declare X\nstart: X",
]  # fmt: skip
FORMS = [
    {"schema": {"type": "null"}}, {"json_schema": {"schema": {"type": "null"}}}, {"type": "hiccup"}, {"type": None},
    {"a": 1},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}, {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "schema": []}, {"type": "json_object", "schema": 3},
    {"type": "text", "schema": {"type": "null"}},
    {"type": "text", "json_schema": {"schema": {"type": "null"}}}, {"type": "regex", "pattern": "a"},
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}} for schema in SCHEMAS),
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}} for schema in LOOSE),
]  # fmt: skip
BOTH = [
    {"grammar": 'root ::= "a"', "json_schema": {"type": "null"}},
    {"regex": "a", "response_format": {"type": "json_object"}},
    {"regex": "a", "lark_grammar": 'start: "a"'},
]
ELSEWHERE = [
    {"guided_json": {"type": "null"}}, {"guided_regex": "a"}, {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'root ::= "a"'},
    {"structured_outputs": {"regex": "a"}}, {"structural_tag": "{}"}, {"ebnf": 'root ::= "a"'}, {"format": "json"},
    {"format": {"type": "null"}}, {"output_format": {"type": "json_schema", "schema": {"type": "null"}}},
    {"grammar_lazy": True}, {"grammar_triggers": [{"type": 0, "value": "a"}]},
]  # fmt: skip
"""The names that other servers have for it."""
FIELDS = {
    "json_schema": [{"json_schema": schema} for schema in [*SCHEMAS, *STRICT]],
    "response_format": [{"response_format": form} for form in FORMS],
    "grammar": [{"grammar": text} for text in GBNF],
    "regex": [{"regex": text} for text in REGEX],
    "lark_grammar": [{"lark_grammar": text} for text in LARK],
    "both": BOTH,
    "elsewhere": ELSEWHERE,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with(tmp_path_factory, MARKS)


@pytest.fixture(scope="module")
def server(model):
    with running(model) as up:
        yield up


def post(server, route, **fields):
    body = ROUTES[route] | {"max_tokens": 8, "temperature": 1.0, "seed": 3, "cache_prompt": False}
    return server.http.post(route, json=body | fields)


def check_refused(server, route, wishes):
    """Each is a 400 that says why, whole or as a stream, and before the model has computed anything."""
    before = server.metric("slotcache_generated_tokens_total"), server.metric("slotcache_steps_total")
    for number, wish in enumerate(wishes):
        answer = post(server, route, **wish, stream=bool(number % 2))
        assert answer.status_code == 400, (wish, answer.text)
        assert answer.json()["error"]["message"], wish
    assert (server.metric("slotcache_generated_tokens_total"), server.metric("slotcache_steps_total")) == before


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", FIELDS)
def test_what_cannot_be_compiled_or_enforced_is_refused_on_every_route(server, route, field):
    check_refused(server, route, FIELDS[field])
    assert post(server, route, regex="[ab]").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_forms_of_other_dialects_are_refused_likewise(server, stream):
    null = {"type": "json_schema", "name": "a", "schema": {"type": "null"}}
    wishes = [{"type": "json_schema", "name": "a", "schema": schema} for schema in [*SCHEMAS, *STRICT]]
    wishes += [{"type": "json_schema"}, {"type": "hiccup"}, {"type": "text", "schema": {"type": "null"}}, {"schema": {}}]
    check_refused(server, RESPONSES, [{"text": {"format": wish}} for wish in wishes])
    check_refused(server, MESSAGES, [{"output_config": {"format": wish}} for wish in wishes])
    for route, form in ((RESPONSES, {"text": {"format": null}}), (MESSAGES, {"output_config": {"format": null}})):
        check_refused(server, route, [form | {"response_format": {"type": "json_object"}}, form | {"regex": "a"}])
    plain = {"text": {"format": {"type": "text"}}}
    check_refused(server, RESPONSES, [plain | {"response_format": {"type": "json_object"}}])
    shaped = {"type": "json_object", "schema": {"const": {"a": 1}}}
    answer = post(server, RESPONSES, text={"format": shaped}, max_tokens=40).json()
    assert answer["output"][-1]["content"][0]["text"] == '{"a": 1}'


def test_a_misspelt_form_is_a_warning(server):
    for route, name in ((RESPONSES, "text"), (MESSAGES, "output_config")):
        (warning,) = post(server, route, **{name: {"fromat": {"type": "json_schema"}}}).json()["warnings"]
        assert f"'{name}.fromat' is not known (did you mean {name}.format?)" in warning


OBJECTS = [{"type": "object", "properties": {"a": schema}, "required": ["a"]} for schema in SCHEMAS]
OBJECTS += [{"type": "object", "properties": {"a": schema}, "required": ["a"], "strict": True} for schema in LOOSE]


@pytest.mark.parametrize("schema", LOOSE, ids=json.dumps)
def test_what_is_not_enforced_is_left_out_and_named(server, schema):
    """In each dialect's place for it, and in the schema of a tool that must be called."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    for route, fields in (
        (CHAT, {"json_schema": schema}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/completions", {"json_schema": schema}),
        (CHAT, {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}),
        (RESPONSES, {"tools": [{"type": "function"} | tool], "tool_choice": "required"}),
    ):
        answer = post(server, route, **fields)
        assert answer.status_code == 200, answer.text
        (warning,) = answer.json()["warnings"]
        assert ": not enforced: " in warning and "strict: true" in warning


@pytest.mark.parametrize("form", ["base64", "jwt", "binary", "uri-reference", "path", "password", "regex", "my-own"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_format_that_is_a_remark_never_fails(server, form, strict):
    schema = {"type": "string", "format": form, "maxLength": 3, "strict": strict}
    answer = post(server, CHAT, json_schema=schema)
    assert answer.status_code == 200 and ("warnings" in answer.json()) == (form not in ("binary", "path", "password"))
    jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), schema)


FITTING = [
    {"type": "string", "maxLength": 2, "nullable": True}, {"enum": ["a", "b"], "type": "string", "nullable": True},
    {"nullable": True, "$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, 2]}}}, {"anyOf": [{"const": 1}], "nullable": True},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
    {"not": {"type": ["string", "array", "object", "number"]}}, {"type": ["integer", "null"], "not": {"type": "null"}},
    {"enum": [1, 2, 3], "not": {"const": 2}}, {"enum": [1, 2, 3], "not": {"enum": [1, 2]}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"type": "null"}, "maxProperties": 2},
    {"type": "object", "propertyNames": {"type": "string"}, "properties": {"a": {"type": "null"}}, "required": ["a"]},
    {"enum": [1, 2], "enumNames": ["one", "two"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", FITTING, ids=json.dumps)
def test_words_that_llguidance_does_not_know_are_enforced_where_they_can_be(server, schema):
    answer = post(server, "/v1/completions", json_schema=schema | {"strict": True}, n=8, max_tokens=60, temperature=1.5)
    assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text
    ended = [choice["text"] for choice in answer.json()["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    schema = (
        schema if "nullable" not in schema else {"anyOf": [schema, {"type": "null"}]} | {"$defs": schema.get("$defs", {})}
    )
    for text in ended:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_must_fit_a_schema_that_cannot_be_is_refused(model, family, tmp_path):
    """The schema of one parameter: some families write its value as it stands, without JSON."""
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE + "{# " + FAMILIES[family] + " #}")
    objects = [
        *OBJECTS,
        {"type": "object", "required": ["b"], "additionalProperties": False},
        {"not": {}, "strict": True},
        {"allOf": [{"type": "null"}]},
    ]
    with running(model, chat_template_file=str(file)) as up:
        named = {"type": "function", "function": {"name": "f"}}
        for choice in ("required", named) if family == next(iter(FAMILIES)) else (named,):
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}} for schema in objects]
            check_refused(up, CHAT, [{"tools": [tool], "tool_choice": choice} for tool in tools])


def test_a_call_of_other_dialects_is_refused_likewise(server):
    tools = [{"type": "function", "name": "f", "parameters": schema} for schema in OBJECTS]
    check_refused(server, RESPONSES, [{"tools": [tool], "tool_choice": "required"} for tool in tools])
    tools = [{"name": "f", "input_schema": schema} for schema in OBJECTS]
    check_refused(server, MESSAGES, [{"tools": [tool], "tool_choice": {"type": "any"}} for tool in tools])


ENDLESS = {"grammar": 'root ::= "a" root'}, {"lark_grammar": 'start: "a" start'}, {"grammar": 'root ::= "a"{99999999}'}


@pytest.mark.parametrize("wish", ENDLESS, ids=["gbnf", "lark", "repeats"])
@pytest.mark.parametrize("route", ["/v1/completions", "/completion", CHAT])
def test_an_answer_whose_form_breaks_on_the_way_is_an_error_and_never_free(server, route, wish):
    answer = post(server, route, **wish, max_tokens=600)
    text = answer.text
    if answer.status_code == 200:
        choice = answer.json() if route == "/completion" else answer.json()["choices"][0]
        text = choice["message"]["content"] if route == CHAT else choice["content" if route == "/completion" else "text"]
        assert set(text) == {"a"}
    else:
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_grammar"


TRICKY = [
    FIXED | {"maxLength": 2}, {"type": "string", "pattern": "^[ab]+$", "minLength": 3, "maxLength": 4},
    {"type": "string", "format": "date", "pattern": "^2"}, {"enum": [1, 5, "a"], "minimum": 3},
    {"enum": ["a", "b"], "pattern": "^b"},
    {"allOf": [{"minLength": 2}, {"maxLength": 3, "type": "string"}]}, {"anyOf": [{"type": "string"}], "maxLength": 2},
    {"type": "integer", "minimum": 1, "exclusiveMinimum": 5, "maximum": 7},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1, "additionalProperties": False},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "additionalProperties": False,
     "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
    {"type": "null", "x-guidance": {"lenient": True}},
]  # fmt: skip


@pytest.mark.parametrize("schema", TRICKY, ids=json.dumps)
def test_keywords_that_meet_are_enforced_together(server, schema):
    answer = post(server, "/v1/completions", json_schema=schema, n=8, max_tokens=60, temperature=1.5)
    assert answer.status_code == 200, answer.text
    ended = [choice["text"] for choice in answer.json()["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def test_all_names_that_other_servers_have_are_known():
    assert {name for wish in ELSEWHERE for name in wish} <= set(REFUSED)
