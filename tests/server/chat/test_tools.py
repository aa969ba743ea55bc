"""Tools of a request: definitions checked, choices understood, shown by templates that know no tools."""

import json
from time import process_time

import pytest
from slotcache.models.json_schema import GrammarError
from slotcache.models.named_templates import DEFAULT_TEMPLATE
from slotcache.models.template import ChatTemplate
from slotcache.server.chat.body import ChatRequest
from slotcache.server.chat.tools import Rendering, read_tools
from slotcache.server.formats.call_grammar import GrammarWriter
from slotcache.server.formats.families import FORMATS, GENERIC
from slotcache.server.formats.json_text import parameter_types
from slotcache.server.http.api_errors import RequestError

USER = {"role": "user", "content": "Hi"}


def tool(name="look", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def request(tools=None, choice=None, **fields):
    return ChatRequest(messages=[USER], tools=tools, tool_choice=choice, **fields)


@pytest.mark.parametrize(
    ("tools", "choice", "where"),
    [
        ([{"type": "function"}], None, "tools[0]"),
        ([tool(), {"type": "web_search"}], None, "tools[1]"),
        ([tool(name="")], None, "tools[0].function.name"),
        ([tool(name="a b")], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1]"),
        ([tool(type="string")], None, "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
        ([tool()], "always", "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([], "required", "tool_choice"),
        (None, {"type": "function", "function": {"name": "look"}}, "tool_choice"),
    ],
)
def test_bad_tools_are_refused_by_name(tools, choice, where):
    with pytest.raises(RequestError) as error:
        read_tools(request(tools, choice))
    assert error.value.param == where


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["a", "b"]),
        ("auto", "auto", ["a", "b"]),
        ("none", "none", ["a", "b"]),
        ("required", "required", ["a", "b"]),
        ({"type": "function", "function": {"name": "b"}}, "required", ["b"]),
        ({"type": "function", "name": "b"}, "required", ["b"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("b")]}},
            "required",
            ["b"],
        ),
    ],
)
def test_choices(choice, mode, names):
    use = read_tools(request([tool("a"), tool("b")], choice))
    assert (use.mode, [each.name for each in use.tools]) == (mode, names)
    assert bool(use.types()) == (mode != "none")


def test_without_tools_nothing_is_called():
    assert read_tools(request()).types() == {} == read_tools(request([tool()], parse_tool_calls=False)).types()


def rendered(messages, tools=None, written=GENERIC.written):
    template = ChatTemplate(DEFAULT_TEMPLATE, "<s>", "</s>")
    pieces = Rendering(template, written, {}).pieces(messages, ChatRequest(messages=messages, tools=tools))
    return "".join(piece.text for piece in pieces), pieces


@pytest.mark.parametrize("system", [None, "Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_template_without_tools_gets_them_in_its_system_message(system):
    messages = [*([{"role": "system", "content": system}] if system else []), USER]
    text, pieces = rendered(messages, [tool("look_up")])
    assert text.startswith("<|im_start|>system\nBe brief." if system else "<|im_start|>system\n# Tools")
    assert '"name": "look_up"' in text and '{"name": <function-name>, "arguments": <args-json-object>}' in text
    assert [piece.text for piece in pieces if piece.message == len(messages) - 1] == ["Hi"]
    assert rendered(messages)[0].count("look_up") == 0


@pytest.mark.parametrize("row", [*FORMATS, GENERIC], ids=lambda row: row.name)
def test_calls_that_a_template_leaves_out_stand_in_the_content_as_the_family_reads_them(row):
    arguments = {"city": 'a "b" {c}', "days": 3, "more": [1, "x"]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
    _, pieces = rendered([USER, {"role": "assistant", "content": None, "tool_calls": [call]}], written=row.written)
    (text,) = (piece.text for piece in pieces if piece.message == 1)
    types = {"look": parameter_types({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})}
    opened = row.channels.starts[0] if row.channels else ""
    reader = row.reader(types, seed="", opened=opened)
    read = [fragment for fragment in (*reader.push(text), *reader.finish())]
    joined = "".join(getattr(fragment, "text", "") for fragment in read)
    assert read[0].name == "look" and json.loads(joined) == arguments


@pytest.mark.parametrize("row", [row for row in FORMATS if row.written.parameter], ids=lambda row: row.name)
def test_names_and_values_of_a_client_are_no_control_tokens_in_a_grammar(row):
    """An answer that must fit the grammar would hold the tokens themselves."""
    controls = {tag: 7 for tag in row.tags if not tag.isspace()}

    def tokens(key, value):
        schema = {"type": "object", "properties": {key: {"enum": [value]}, f"{key}2": {"type": "string"}}}
        writer = GrammarWriter(controls)
        return writer.lark(writer.calls(row.written, [("look", schema)], False)).count("<[7]>")

    for tag in controls:
        assert tokens(f"a{tag}b", f"c{tag}d") == tokens("ab", "cd")


def test_the_grammar_of_a_tool_takes_no_longer_than_its_definition():
    shared, required = (
        {"$defs": {f"d{at}": {} for at in range(4000)}, "properties": {f"p{at}": {"type": "integer"} for at in range(4000)}},
        {"properties": (names := {str(at): {"type": "string"} for at in range(5000)}), "required": [*names][::-1]},
    )
    form = next(row.written for row in FORMATS if row.written.parameter)
    with pytest.raises(GrammarError, match="expected at most"):
        GrammarWriter({}).calls(form, [("look", shared)], True)
    began = process_time()
    GrammarWriter({}).calls(form, [("look", required)], True)
    assert process_time() - began < 4


@pytest.mark.parametrize(
    "shared",
    [{"enum": [*map(str, range(20_000))]}, {"type": [*map(str, range(20_000))]}, {"$ref": "#/" + "a/" * 20_000}],
    ids=lambda shared: next(iter(shared)),
)
def test_what_many_parameters_refer_to_is_looked_at_once(shared):
    began = process_time()
    parameters = {str(at): {"$ref": "#/$defs/shared"} for at in range(20_000)}
    assert len(parameter_types({"$defs": {"shared": shared}, "properties": parameters})) == 20_000
    assert process_time() - began < 4
