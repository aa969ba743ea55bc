"""Differences in the messages that chat templates expect, and how they are found: by rendering."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .marks import Unmarked
from .messages import Message, Said, merge_system

Shown = dict[str, object]
Render = Callable[["Dialect", Sequence[Message], bool], str]
"""Renders messages in a dialect, with or without a generation prompt; empty if the template refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a template expects.

    parts: contents are lists of parts, even if they are only text. takes_lists: they may be lists. text_arguments: a tool
    call's arguments are JSON text (as in the API), not the decoded object (as in training). nones: `tools` and `documents`
    are defined, as None, if the request has none. merges_system: a system message is refused or left out. thinking_part:
    reasoning is a part of the content, of type thinking. thinks_or_says: a message with calls has reasoning or content.
    tool_responses: the results of tools belong to the message that called them. thinks: the model reasons if it may.
    """

    parts: bool = False
    takes_lists: bool = False
    text_arguments: bool = False
    nones: bool = True
    merges_system: bool = False
    thinking_part: bool = False
    thinks_or_says: bool = False
    tool_responses: bool = False
    thinks: bool = False

    def show(self, said: Sequence[Said], marks: Unmarked) -> list[Shown]:
        """Return the messages for the template, with placeholders for texts of the client."""
        if self.merges_system:
            said = merge_system(said)
        shown = [self._message(one, marks) for one in said]
        return _with_tool_responses(shown) if self.tool_responses else shown

    def _message(self, said: Said, marks: Unmarked) -> Shown:
        fields: Shown = {**said.fields, "role": said.role}
        calls = fields.get("tool_calls")
        if isinstance(calls, list) and not self.text_arguments:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        shown = marks.values(fields) | {"content": self._content(said, marks)}
        if not said.reasoning:
            return shown
        thought = marks.reasoning(said.reasoning, said.at)
        if self.thinking_part:
            content = shown["content"]
            texts = content if isinstance(content, list) else _text_parts([content])
            return shown | {"content": [{"type": "thinking", "thinking": thought}, *texts]}
        if self.thinks_or_says and calls:
            del shown["content"]
        return shown | {"reasoning_content": thought, "thinking": thought}

    def _content(self, said: Said, marks: Unmarked) -> object:
        texts = [marks.content(text, at, said.role == "assistant") for at, text in said.texts]
        if said.is_list:
            return _text_parts(texts)
        content = "\n".join(texts)
        return _text_parts([content]) if self.parts and content else content


def _text_parts(texts: Sequence[object]) -> list[Shown]:
    return [{"type": "text", "text": text} for text in texts]


# ---- learning ----------------------------------------------------------------------------------------------------------

_QUESTION: Message = {"role": "user", "content": "question"}
_ID = "trial0000"  # some templates want nine letters and digits


def learn(render: Render) -> Dialect:
    """Find the dialect of a template: in each step the first one that shows what it should."""
    dialect = _learn_contents(render)
    for step in (_learn_lists, _learn_system, _learn_arguments, _learn_reasoning, _learn_results, _learn_thinking):
        dialect = step(dialect, render)
    return dialect


def _learn_contents(render: Render) -> Dialect:
    """Find the first dialect in which the template shows a user's content."""
    dialects = [Dialect(parts=parts, nones=nones) for parts in (False, True) for nones in (True, False)]
    message = {"role": "user", "content": "needle"}
    return next((dialect for dialect in dialects if "needle" in render(dialect, [message], False)), Dialect())


def _learn_lists(dialect: Dialect, render: Render) -> Dialect:
    lists = replace(dialect, takes_lists=True)
    shown = render(lists, [{"role": "user", "content": _text_parts(["first", "second"])}], False)
    return lists if "first" in shown and "second" in shown and not _prints(shown, "text") else dialect


def _learn_system(dialect: Dialect, render: Render) -> Dialect:
    messages = [{"role": "system", "content": "needle"}, _QUESTION]
    merged = replace(dialect, merges_system=True)
    apart, together = ("needle" in render(one, messages, False) for one in (dialect, merged))
    return merged if together and not apart else dialect


def _learn_arguments(dialect: Dialect, render: Render) -> Dialect:
    """Choose text for a tool call's arguments if the template renders only text well."""

    def render_call(arguments: object) -> str:
        return render(replace(dialect, text_arguments=True), [_call(arguments)], False)

    as_object = render_call({"needle": 1})
    # No model was trained on a dict as Python prints it.
    fits = "needle" in as_object and "{'needle'" not in as_object
    return replace(dialect, text_arguments=not fits and "needle" in render_call('{"needle": 1}'))


def _learn_reasoning(dialect: Dialect, render: Render) -> Dialect:
    answer = {"role": "assistant", "content": "answer", "reasoning_content": "needle"}
    by_parts = replace(dialect, thinking_part=True)
    shown, shown_by_parts = (render(one, [_QUESTION, answer], False) for one in (dialect, by_parts))
    if "needle" not in shown and "needle" in shown_by_parts and not _prints(shown_by_parts, "thinking"):
        return by_parts
    call = [_QUESTION, {**_call("{}"), **answer}]
    one = replace(dialect, thinks_or_says=True)
    return one if not render(dialect, call, False) and render(one, call, False) else dialect


def _learn_results(dialect: Dialect, render: Render) -> Dialect:
    """Learn whether tool results stand elsewhere if they belong to the message of the call."""
    messages = [_QUESTION, _call("{}"), {"role": "tool", "tool_call_id": _ID, "content": "needle"}]
    joined = replace(dialect, tool_responses=True)
    as_joined, as_message = (render(one, messages, False).partition("needle") for one in (joined, dialect))
    return joined if as_joined[1] and as_joined[0][-12:] != as_message[0][-12:] else dialect


def _learn_thinking(dialect: Dialect, render: Render) -> Dialect:
    """Learn whether the model reasons: its template shows reasoning, or asks for it at the end of a prompt."""
    answer = {"role": "assistant", "content": "answer", "reasoning_content": "needle"}
    shows = "needle" in render(dialect, [_QUESTION, answer], False)
    thinking = replace(dialect, thinks=True)
    ends = [render(one, [_QUESTION], True).rpartition("question")[2] for one in (dialect, thinking)]
    return thinking if shows or ends[0] != ends[1] else dialect


def _prints(shown: str, name: str) -> bool:
    """Whether a template wrote a value as Python or JSON has it, with the names of its fields: it knows no such value."""
    return f"'{name}'" in shown or f'"{name}"' in shown


def _call(arguments: object) -> Message:
    function = {"name": "trial", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}


# ---- parts of messages -------------------------------------------------------------------------------------------------


def _with_parsed_arguments(call: object) -> object:
    """Decode the JSON text of a tool call's arguments. Unchanged if it is no object."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_tool_responses(shown: Sequence[Shown]) -> list[Shown]:
    """Move the results of tools into the message before them that called the tools, and then the answer to them."""
    joined: list[Shown] = []
    names: dict[str, object] = {}
    responses: list[Shown] = []
    is_called = False
    for message in shown:
        calls = message.get("tool_calls")
        if message["role"] == "tool" and is_called:
            name = names.get(str(message.get("tool_call_id")), message.get("name"))
            responses.append({"name": name, "response": message["content"]})
            joined[-1]["tool_responses"] = responses
        elif is_called and responses and message["role"] == "assistant" and not (calls or joined[-1]["content"]):
            joined[-1]["content"] = message["content"]
            is_called = False
        else:
            joined.append(message)
            is_called = isinstance(calls, list) and bool(calls)
            if isinstance(calls, list):
                names, responses = dict(map(_id_and_name, calls)), []
    return joined


def _id_and_name(call: object) -> tuple[str, object]:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return "", None
    return str(call.get("id")), function.get("name")
