"""Answers read: by family, in any cutting, in linear time."""

import json
import re
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from slotcache.models.detokenizer import TextStream
from slotcache.server.formats.answer import decoded_arguments, message
from slotcache.server.formats.families import FORMATS, GENERIC, THINK, CallNotation, detect
from slotcache.server.formats.json_text import parameter_types
from slotcache.server.formats.readers import ReadParts, SteppedReader


@dataclass(frozen=True)
class Case:
    """A row of answers.toml."""

    family: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, ...], ...] = ()
    opened: str = ""


CASES = [Case(**row) for row in tomllib.loads(Path(__file__).with_name("answers.toml").read_text())["answers"]]
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"get_weather": parameter_types(SCHEMA), "get_time": parameter_types({"properties": {"city": {"type": "string"}}})}
BY_NAME = {row.name: row for row in (*FORMATS, GENERIC)}
THOUGHTS = {
    "command-r7b": "<|START_THINKING|>",
    "seed": "<seed:think>",
    "gemma-4": "<|channel>thought",
    "solar": "<|think|>",
    "mistral-args": "[THINK]",
}


def row_of(family):
    """The row of a family, with the tags of reasoning that its templates have."""
    return detect("".join((*BY_NAME[family].signs, THOUGHTS.get(family, THINK.starts[0]))))


def read(case, cuts=(), **options) -> dict[str, Any]:
    reader = row_of(case.family).reader(TOOLS, seed="0", opened=case.opened, **options)
    fragments = []
    for start, end in zip((0, *cuts), (*cuts, len(case.text)), strict=True):
        fragments += reader.push(case.text[start:end])
    return message([*fragments, *reader.finish()])


def without_ids(said):
    calls = [{**call, "id": ""} for call in said.get("tool_calls", ())]
    return {**said, "tool_calls": calls} if calls else said


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:24]!r}")
def test_answers(case: Case):
    said = read(case)
    assert (said["content"] or "", said.get("reasoning_content", "")) == (case.content, case.reasoning)
    calls = said.get("tool_calls", [])
    for call, (name, arguments, *id) in zip(calls, case.calls, strict=True):
        assert call["function"]["name"] == name
        assert json.loads(call["function"]["arguments"]) == json.loads(arguments)
        assert call["id"] and id in ([], [call["id"]])
    whole = without_ids(said)
    for size in (1, 2, 3, 7):
        assert without_ids(read(case, range(size, len(case.text), size))) == whole


@pytest.mark.parametrize(
    "text", ["<tool_", "<tool_call>", "Yes.<tool_call>\n", '<tool_call>\n{"na', '<tool_call>{"name": "get_we']
)
def test_of_a_call_that_was_cut_before_its_name_nothing_is_said(text):
    reader = row_of("hermes").reader(TOOLS, seed="0")
    assert message([*reader.push(text), *reader.finish(is_cut=True)]) == {
        "role": "assistant",
        "content": text.partition("<")[0],
    }
    assert read(Case("hermes", text))["content"] == text, "of a whole answer it is content"


@pytest.mark.parametrize("end", ["", "\n", "\n<", "\n</tool", "\n</tool_call", "\n</tool_call>\n<tool_c"])
def test_a_tag_that_is_cut_after_a_call_is_no_content(end):
    reader = row_of("hermes").reader(TOOLS, seed="0")
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kiel"}}' + end
    said: Any = message([*reader.push(text), *reader.finish(is_cut=True)])
    assert (len(said["tool_calls"]), said["content"] or "") == (1, "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:24]!r}")
def test_a_call_that_is_cut_does_not_look_whole(case):
    """Cut anywhere, its arguments are all that they are in the whole answer, or no JSON."""
    for length in range(len(case.text)):
        reader = row_of(case.family).reader(TOOLS, seed="0", opened=case.opened)
        said: Any = message([*reader.push(case.text[:length]), *reader.finish(is_cut=True)])
        for call, (_, arguments, *_) in zip(said.get("tool_calls", ()), case.calls, strict=False):
            found = decoded_arguments(call["function"]["arguments"])
            assert found is None or found == json.loads(arguments), case.text[:length]


@st.composite
def mangled(draw):
    """A family, and text of its answers: parts of several, in any order, cut off anywhere."""
    texts = [case.text for case in CASES if case.family == (family := draw(st.sampled_from(sorted(BY_NAME))))]
    texts += ["<", "{", '"', "\n", " ", "Yes", "</think>"]
    parts = draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4))
    cut = [part[: draw(st.integers(0, len(part)))] if draw(st.booleans()) else part for part in parts]
    return Case(family, "".join(cut), opened=draw(st.sampled_from(("", *row_of(family).tags))))


@given(mangled(), st.data())
def test_cuts_change_nothing(case, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(case.text)), max_size=40)))
    options = {"thinks": data.draw(st.booleans())}
    whole = without_ids(read(case, **options))
    assert without_ids(read(case, cuts, **options)) == whole
    assert without_ids(read(case, range(1, len(case.text)), **options)) == whole


def stopped(case, stops, cuts=(), is_cut=False):
    """The text of an answer up to a stop string in its content, and that string. Each piece of it is a token."""
    pieces = [case.text[start:end].encode() for start, end in zip((0, *cuts), (*cuts, len(case.text)), strict=True)]
    reader = row_of(case.family).reader(TOOLS, seed="0", opened=case.opened)
    assert isinstance(reader, SteppedReader)
    stream = TextStream(stops, pieces.__getitem__, ReadParts(reader))
    settled = "".join(map(stream.push, range(len(pieces)))) + stream.finish(is_cut)
    return settled, stream.stopped


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.text[:24]!r}")
def test_stop_strings_count_in_content_only(case):
    """Every other piece of the text as a stop string: one of content ends it there, none of reasoning or of a call does."""
    whole = read(case)
    for at in range(0, len(case.text) - 2, 2):
        stop = case.text[at : at + 3]
        text, found = stopped(case, [stop], range(1, len(case.text)))
        place = case.content.find(stop)
        if place < 0:
            assert (text, found) == (case.text, None)
            continue
        assert found == stop or stop == "e.T"  # of gemma-4's case, in which reasoning stands there
        said = read(replace(case, text=text))
        if found:
            assert (said["content"] or "").rstrip() == case.content[:place].rstrip()
        assert len(said.get("tool_calls", ())) <= len(whole.get("tool_calls", ()))


def test_white_space_around_reasoning_and_calls_is_no_content():
    case = Case("hermes", f"<think>\n\na\n\n</think>\n\nOk.\n\n{CASES[1].text}\n\nDone.\n\nMore.")
    text, found = stopped(case, ["\n\n"], range(1, len(case.text)))
    assert found == "\n\n" and text == case.text.removesuffix("\n\nMore.")
    assert stopped(case, ["More", "Done"])[1] == "Done"


@given(mangled(), st.lists(st.text('<>/a \n{"', min_size=1, max_size=3), min_size=1, max_size=3), st.booleans(), st.data())
def test_stop_strings_are_found_however_the_text_is_cut(case, stops, is_cut, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(case.text)), max_size=40)))
    text, found = stopped(case, stops, is_cut=is_cut)
    assert stopped(case, stops, cuts, is_cut) == stopped(case, stops, range(1, len(case.text)), is_cut) == (text, found)
    assert case.text.startswith(text) and (found is not None or text == case.text)
    if found:
        content, whole = read(replace(case, text=text))["content"] or "", read(case)["content"] or ""
        assert whole.startswith(content.rstrip())


@given(mangled())
def test_calls_are_of_known_tools_with_their_parts_in_order(case):
    for call in read(case).get("tool_calls", ()):
        assert call["function"]["name"] in TOOLS and call["id"]
        assert call["function"]["arguments"].startswith("{")


TAGGED = [row for row in FORMATS if row.written.parameter and not row.written.separator]


@st.composite
def values(draw):
    """A family that writes values between tags, and a text with its tags in it, none of which may end it."""
    row = draw(st.sampled_from(TAGGED))
    shape: Any = row.shapes[0]
    ends = [end.replace("{key}", "city") for end in shape.body.value_ends]
    pieces = [*ends, *shape.body.begins, *shape.after_call, *shape.tags, "\n", " ", "x", "</", "<", "é"]
    value = "".join(draw(st.lists(st.sampled_from([*pieces, *(piece.strip() for piece in pieces)]), max_size=8)))
    begins, after_call = (
        "|".join(re.escape(tag) for tag in tags if not any(end.startswith(tag) for end in ends) or is_part)
        for tags, is_part in ((shape.body.begins, False), ((*shape.body.begins, *shape.after_call), True))
    )
    written = ends[-1].join((value, ""))
    assume(not re.search(rf"(^|\n)({begins})|({'|'.join(map(re.escape, ends))})\s*({after_call})", written))
    assume(not any(value.lstrip().startswith(tag) for tag in shape.body.value_opens if tag != "\n"))
    assume("]]>" not in value)
    return row, value


@given(values(), st.data())
def test_a_tag_in_a_value_does_not_end_it(written, data):
    row, value = written
    arguments = {"city": value, "days": 3}
    text = row.written.text([("get_weather", json.dumps(arguments)), ("get_time", json.dumps({"city": "Oslo"}))])
    said = read(Case(row.name, text + "\nDone."))
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said["tool_calls"]]
    assert calls == [("get_weather", arguments), ("get_time", {"city": "Oslo"})] and said["content"] == "Done."
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=40)))
    for each in (cuts, range(1, len(text))):
        assert without_ids(read(Case(row.name, text + "\nDone."), each)) == without_ids(said)


@pytest.mark.parametrize("unit", ["<tool_", "{", '{"name": ', " ", '"', "\\", "(("])
@pytest.mark.parametrize("family", ["hermes", "llama-3", "qwen3-coder", "gemma-4", "lfm-2", "mistral", "harmony"])
def test_time_is_linear(family, unit):
    """Ten times the text takes about ten times as long, and not a hundred times."""

    def spent(size):
        start = next(iter(row_of(family).tags))
        text = start + unit * (size // len(unit))
        began = time.process_time()
        read(Case(family, text), range(64, len(text), 64))
        return time.process_time() - began

    few = spent(20_000)
    assert any(spent(200_000) < 50 * max(few, 0.005) for _ in range(2))


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_control_tokens_never_are_content(family):
    controls = row_of(family).tags
    for case in (case for case in CASES if case.family == family):
        said = read(case, controls=controls)
        assert not any(tag in (said["content"] or "") for tag in controls if len(tag) > 3)


def test_thoughts_stay_in_the_content_on_request():
    case = Case("hermes", "Hm.\n</think>\n\nYes.", opened="<think>\n")
    assert read(case, thinks=False) == {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}


def test_ids_have_the_family_s_form():
    mistral = read(Case("mistral-args", "[TOOL_CALLS]get_time[ARGS]{}"))
    assert len(id := mistral["tool_calls"][0]["id"]) == 9 and id.isalnum()
    assert read(Case("hermes", '<tool_call>{"name": "get_time"}</tool_call>'))["tool_calls"][0]["id"].startswith("call_")


def test_a_call_with_half_of_a_character_is_no_call_that_was_cut():
    assert decoded_arguments(r'{"a": "x\ud83d"}') == {"a": "x\ufffd"}
    assert decoded_arguments(r'{"a": "x\ud83d"') is None


def test_a_call_in_a_notation_of_its_own_has_no_half_of_a_character():
    written = CallNotation("$name($arguments)", parameter="$key=$value", quote="'")
    assert written.text([("f", r'{"a": "x\ud83d", "b": ["\ude00"]}')]) == "f(a='x\ufffd'b=[\"\ufffd\"])"
