"""Learns, by rendering, which shapes of histories a chat template accepts, and rewrites histories for it.

Programs send histories that many templates refuse, or from which templates silently omit a text. A history stays as it is if
the template shows all texts of a history of this shape. A history of a shape that the template refuses, or shows only in
part, is rewritten. The place of a text in a rewritten history depends only on the messages before the text. The prompt of
each turn therefore starts with the prompt of the previous turn.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from .template_messages import Message, Run, TemplateMessage

Neighbours = tuple[str, str]
"""Two neighbouring places of a history, the earlier one first. A place is a role or one of these words.

`front`: the system messages at the start. `calls`: an answer with calls that follows another answer. `call`: a call that has
no result yet. `orphan`: a result for which no call waits. An empty first place is the start of the history. An empty second
place is its end."""

PARAGRAPH, LINE = "\n\n", "\n"
_SYSTEM = "[System: ", "]"
_RESULT = "<tool_response>\n", "\n</tool_response>"  # from the same models as the fallback notation of calls
_NO_RESULT = "(no result)"
_ID = re.compile("[0-9A-Za-z]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes of histories that a template accepts.

    refused: the pairs of neighbouring messages that have to be rewritten for the template.
    shows_calls: the template shows tool calls.
    shows_both: the template shows the content of an answer that also has calls.
    takes_ids: the template accepts call ids of any form.
    """

    refused: frozenset[Neighbours] = frozenset()
    shows_calls: bool = True
    shows_both: bool = True
    takes_ids: bool = True

    def takes(self, before: str, role: str) -> bool:
        return (before, role) not in self.refused

    def take(self, said: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """Return a history in a shape that the template accepts.

        If the template accepts the history as it is, return it unchanged.
        """
        if not self.takes_ids:
            said = list(map(_with_short_ids, said))
        if not self.refused:
            return list(said)
        history = _History(self)
        for message in said:
            history.add(message)
        return history.end()


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool call.

    id: the call's id; empty if it has none.
    answer: the message with the call.
    """

    id: str
    name: str
    call: Mapping[str, object]
    answer: TemplateMessage

    @property
    def message(self) -> TemplateMessage:
        """An answer that consists of this call alone."""
        fields = {**self.answer.fields, "tool_calls": [self.call]}
        return replace(_empty("assistant", self.answer.at), fields=fields)


class _Waiting:
    """Tool calls, in order, that wait for their result or for an answer of their own.

    Calls wait for answers if the template accepts only one call per answer.
    """

    def __init__(self, calls: Sequence[_Call] = ()) -> None:
        self._calls: list[_Call | None] = list(calls)
        self._first, self._num = 0, len(calls)
        self._places: dict[str, deque[int]] = {}
        for at, call in enumerate(calls):
            self._places.setdefault(call.id, deque()).append(at)

    def __len__(self) -> int:
        return self._num

    def take(self, id: str) -> _Call | None:
        """Remove and return the first call with this id, or with any id if `id` is empty; None if there is no such call."""
        at = self._first
        if id:
            places = self._places.get(id, ())
            while places and self._calls[places[0]] is None:
                places.popleft()
            if not places:
                return None
            at = places.popleft()
        while at < len(self._calls) and self._calls[at] is None:
            at = self._first = at + 1
        if at >= len(self._calls):
            return None
        call, self._calls[at] = self._calls[at], None
        self._num -= 1
        return call

    def take_all(self) -> list[_Call]:
        """Remove and return all calls."""
        calls = [call for call in self._calls if call is not None]
        self._calls, self._first, self._num, self._places = [], 0, 0, {}
        return calls


class _History:
    """A history that is rewritten message by message."""

    def __init__(self, shapes: Shapes) -> None:
        self._takes, self._shapes = shapes.takes, shapes
        self._messages: list[TemplateMessage] = []
        self._more: list[tuple[int | None, str]] = []  # texts to add to the content of the last message
        self._is_front = True  # all messages so far are system messages
        self._opens: str | None = None  # the separator before the next user message, which continues the last one
        self._open = _Waiting()  # calls that wait for a result
        self._later = _Waiting()  # calls that wait for an answer of their own, as the template accepts one call per answer

    @property
    def _before(self) -> str:
        """The place before the next message (see `Neighbours`)."""
        if self._open:
            return "call"
        role = self._messages[-1].role if self._messages else ""
        return "front" if role == "system" and self._is_front else role

    def add(self, message: TemplateMessage) -> None:
        match message.role:
            case "system":
                self._add_system(message)
            case "assistant":
                self._add_answer(message)
            case "tool":
                self._add_result(message)
            case _:
                self._add_user(message)
        last = self._messages[-1].role if self._messages else "system"
        self._is_front = self._is_front and "system" in (message.role, last)  # a blank result adds no message

    def end(self) -> list[TemplateMessage]:
        self._close("")
        if self._before == "front" and not self._takes("front", ""):
            self._append(_empty("user", self._messages[-1].at))
        self._flush()
        return self._messages

    def _add_system(self, message: TemplateMessage) -> None:
        """Add a system message.

        If the template refuses a system message at this place, add the message's text to the last message or to a new user
        message.
        """
        before = self._before
        if self._is_front and self._messages and (before == "user" or not self._takes("front", "system")):
            self._join(message, PARAGRAPH)
        elif before == "" and not self._takes("", "system"):
            self._append(replace(message, role="user", runs=(_one_run(message),), is_list=False), opens=LINE)
        elif self._takes(before, "system"):
            self._answer_later()
            self._append(message)
        elif before == "system":
            self._join(message, PARAGRAPH)
        elif message.is_blank:
            pass
        elif before in ("user", "tool"):
            self._join(_wrapped(message, _SYSTEM), PARAGRAPH)
        else:
            self._add_user(_wrapped(message, _SYSTEM), opens=PARAGRAPH)

    def _add_user(self, message: TemplateMessage, opens: str | None = None) -> None:
        self._close("user")
        before = self._before
        if before == "user" and self._opens is not None:
            self._join(message, self._opens)
            self._opens = None
        elif before in ("user", "tool") and not self._takes(before, "user"):
            self._join(message, PARAGRAPH)
        else:
            self._append(message, opens)

    def _add_answer(self, message: TemplateMessage) -> None:
        before = self._before
        self._close("assistant")
        calls = _calls_of(message) if self._shapes.shows_calls else []
        role = "calls" if calls and before == "assistant" else "assistant"
        is_refused = before in ("", "front", "assistant") and not self._takes(before, role)
        # In one answer, reasoning must not follow content.
        joins = before == "assistant" and not message.reasoning and (not calls or self._shapes.shows_both)
        if is_refused and joins:
            self._join(message, PARAGRAPH)
            last = self._messages[-1]
            self._messages[-1] = replace(last, fields={**last.fields, **message.fields})
        else:
            if is_refused:
                self._append(_empty("user", message.at))
            self._append(message)
        if len(calls) > 1 and not self._takes("call", "call"):
            last = self._messages[-1]
            self._messages[-1] = replace(last, fields=calls[0].message.fields)
            self._later = _Waiting(calls[1:])
            calls = calls[:1]
        if calls:
            self._open = _Waiting(calls)

    def _add_result(self, message: TemplateMessage) -> None:
        id = _id_of(message.fields.get("tool_call_id"))
        call = self._open.take(id)
        if call is None and (call := self._later.take(id)) is not None:
            self._answer_calls()
            self._append(call.message)
        if call is not None and self._takes("call", "tool"):
            self._append(message if id or not call.id else _with_id(message, call.id))
            return
        self._answer_later()
        if self._before in ("", "front") and not self._takes(self._before, "orphan") and self._takes("user", "orphan"):
            self._append(_empty("user", message.at))
        if self._takes(self._before, "orphan"):
            self._open.take("")
            self._append(message if id or self._shapes.takes_ids else _with_id(message, _short("")))
        elif not message.is_blank:
            self._add_user(replace(_wrapped(message, _RESULT), fields={}))

    def _close(self, role: str) -> None:
        """End all open calls before a message of this role.

        If the template requires a result between a call and a message of this role, add a result for each open call.
        """
        self._answer_later()
        if self._open:
            if not self._takes("call", role):
                self._answer_calls()
            self._open = _Waiting()

    def _answer_later(self) -> None:
        if not self._later:
            return
        for call in self._later.take_all():
            self._answer_calls()
            self._append(call.message)
            self._open = _Waiting([call])

    def _answer_calls(self) -> None:
        for call in self._open.take_all():
            if self._takes("call", "tool"):
                fields = {"tool_call_id": call.id, "name": call.name}
                at = call.answer.at
                self._append(TemplateMessage(role="tool", at=at, runs=(((None, _NO_RESULT),),), fields=fields))

    def _append(self, message: TemplateMessage, opens: str | None = None) -> None:
        self._flush()
        self._messages.append(message)
        self._opens = opens

    def _join(self, message: TemplateMessage, between: str) -> None:
        """Append a text to the content of the last message."""
        if message.is_blank:
            return
        if self._more or not self._messages[-1].is_blank:
            self._more.append((None, between))
        self._more += _one_run(message)

    def _flush(self) -> None:
        if self._more:
            *runs, last = self._messages[-1].runs or ((),)
            self._messages[-1] = replace(self._messages[-1], runs=(*runs, (*last, *self._more)))
            self._more = []


def _empty(role: str, at: int) -> TemplateMessage:
    return TemplateMessage(role=role, at=at, runs=(), fields={})


def _one_run(message: TemplateMessage) -> Run:
    """Return the texts of a message as one run, with each part on a line of its own."""
    lines = [text for run in message.runs for text in ((None, LINE), *run)]
    return tuple(lines[1:])


def _wrapped(message: TemplateMessage, around: tuple[str, str]) -> TemplateMessage:
    """Return a user message with the texts of another message, enclosed by two texts."""
    first, last = around
    run = ((None, first), *_one_run(message), (None, last))
    return replace(message, role="user", runs=(run,), is_list=False)


def _list_of_calls(message: TemplateMessage) -> Sequence[object]:
    calls = message.fields.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _calls_of(message: TemplateMessage) -> list[_Call]:
    calls: list[_Call] = []
    for call in _list_of_calls(message):
        if isinstance(call, Mapping):
            function = call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            calls.append(_Call(_id_of(call.get("id")), str(name or ""), call, message))
    return calls


def _with_id(message: TemplateMessage, id: str) -> TemplateMessage:
    return replace(message, fields={**message.fields, "tool_call_id": id})


def _id_of(id: object) -> str:
    return "" if id is None else str(id)


def _with_short_ids(message: TemplateMessage) -> TemplateMessage:
    """Return a message in which each call id is nine letters or digits.

    A call id of any other form is replaced by its hash.
    """
    fields = dict(message.fields)
    if calls := _list_of_calls(message):
        fields["tool_calls"] = [_with_short_id(call, number) for number, call in enumerate(calls)]
    elif message.role == "tool" and (id := _id_of(fields.get("tool_call_id"))):
        fields["tool_call_id"] = _short(id)
    return replace(message, fields=fields) if fields != message.fields else message


def _with_short_id(call: object, number: int) -> object:
    if not isinstance(call, Mapping):
        return call
    return {**call, "id": _short(_id_of(call.get("id")) or str(number))}


def _short(id: str) -> str:
    return id if _ID.fullmatch(id) else sha256(id.encode(errors="surrogatepass")).hexdigest()[:9]


# ---- learning ----------------------------------------------------------------------------------------------------------

Tools = Sequence[Mapping[str, object]]
Render = Callable[[Sequence[TemplateMessage], Tools | None], str]
"""Renders a history, with or without tools. Returns "" if the template refuses the history."""

_TOOL = {
    "type": "function",
    "function": {"name": "trial", "description": "Try.", "parameters": {"type": "object", "properties": {}}},
}

# In a trial each letter is a message. s: system, u: user, a: answer, c: answer with a call, d: answer with two calls, b:
# answer with content and a call, r and t: results of the first and the second call, o: result of an unknown call.
_LETTERS = {
    **dict.fromkeys("rto", ("tool", 0)),
    "s": ("system", 0), "u": ("user", 0), "a": ("assistant", 0), "c": ("assistant", 1), "d": ("assistant", 2),
    "b": ("assistant", 1),
}  # fmt: skip
_TRIAL_IDS = "trial0000", "trial0001", "trial0002"
_STRANGE_IDS = {"E": "", "L": "functions.trial:0/" * 3}
_CALLED = frozenset("bcdo")
_CALLS, _BOTH = ("uc", "ucrau"), ("ubr", "ubrau")
_WITH_IDS = "Eucr", "Eucrau", "Lucr", "Lucrau"
TRIALS: Mapping[Neighbours, tuple[str, ...]] = {
    ("", "system"): ("su", "sua", "sucr"),
    ("front", "system"): ("ssu", "ssua"),
    ("user", "user"): ("uu", "suuau", "uauu"),
    ("assistant", "assistant"): ("uaa", "suaau"),
    ("assistant", "calls"): ("uacr", "suacrau"),
    ("", "assistant"): ("au", "a", "cr", "crau"),
    ("front", "assistant"): ("sau", "sa", "scr", "scrau"),
    ("call", "tool"): ("ucr", "ucrau", "sucrau", "ucrcr"),
    ("call", "call"): ("udrt", "udrtau"),
    ("tool", "user"): ("ucru", "sucruau"),
    ("call", "user"): ("ucu", "sucuau", "udru"),
    ("call", "assistant"): ("uca", "ucau", "udrau", "uccr"),
    ("call", ""): ("uc", "sucrauc", "udr"),
    ("front", ""): ("s",),
    ("user", "system"): ("us", "susau", "usu"),
    ("tool", "system"): ("ucrs", "sucrsau"),
    ("assistant", "system"): ("suas", "uasu", "suasua"),
    ("system", "system"): ("uassu", "suss"),
    ("user", "orphan"): ("uo", "uoau"),
    ("", "orphan"): ("o", "oau", "ou"),
    ("front", "orphan"): ("so", "soau", "sou"),
    ("assistant", "orphan"): ("uao", "uaou", "uaoau"),
    ("tool", "orphan"): ("ucro", "ucroau"),
    ("call", "orphan"): ("uco", "ucoau"),
    ("system", "orphan"): ("uso", "uasoa"),
    ("call", "system"): ("ucsrau", "ucsu"),
}


def learn_shapes(render: Render) -> Shapes:
    """Find out which pairs of neighbouring messages have to be rewritten for a template.

    A pair must be rewritten if the template refuses it, or omits or moves its texts, but shows more texts once the pair is
    rewritten.
    """
    shapes = Shapes(shows_calls=_num_shown(Shapes(), render, _CALLS) > 0)
    shapes = replace(shapes, shows_both=_num_shown(shapes, render, _BOTH) == len(_BOTH))
    for neighbours, trials in TRIALS.items():
        shapes = _better(shapes, replace(shapes, refused=shapes.refused | {neighbours}), render, trials)
    return _better(shapes, replace(shapes, takes_ids=False), render, _WITH_IDS)


def _better(shapes: Shapes, rewritten: Shapes, render: Render, trials: Sequence[str]) -> Shapes:
    """Return `rewritten` if with it a template shows all texts in more renderings of the trials; otherwise `shapes`."""
    shown, most = _num_shown(shapes, render, trials), sum(len(_tools(trial)) for trial in trials)
    return rewritten if shown < most and _num_shown(rewritten, render, trials) > shown else shapes


def _num_shown(shapes: Shapes, render: Render, trials: Sequence[str]) -> int:
    """Count the renderings of `trials` in which a template shows all texts of the trial."""
    return sum(_shows(shapes, render, trial, tools) for trial in trials for tools in _tools(trial))


def _tools(trial: str) -> Sequence[Tools | None]:
    """A trial is rendered once or twice. Return the tools for each rendering.

    A trial with calls is rendered once, with tools. A trial without calls is rendered twice: with tools, and without.
    """
    return ([_TOOL],) if _CALLED.intersection(trial) else ([_TOOL], None)


def _shows(shapes: Shapes, render: Render, trial: str, tools: Tools | None) -> bool:
    """Return whether a template shows all texts of a trial, in order.

    The order does not matter if an answer has several texts: content and a call, or two calls. If a trial has a system
    message that is not at the start, the template must write the same text before the first message as it does without the
    system message.
    """
    said, words = _trial(trial, shapes.shows_calls)
    shown = render(shapes.take(said), tools)
    places = [shown.find(word) for word in words]
    if -1 in places or (places != sorted(places) and {"b", "d"}.isdisjoint(trial)):
        return False
    if trial[0] == "s" or "s" not in trial:
        return True
    # Some templates start with a default text if there is no system message.
    plain = render(shapes.take([one for one in said if one.role != "system"]), tools)
    return plain[: plain.find(words[0])] == shown[: places[0]]


def _trial(letters: str, shows_calls: bool) -> tuple[list[TemplateMessage], list[str]]:
    """Return the history of a trial, and its texts."""
    said: list[TemplateMessage] = []
    words: list[str] = []
    ids = _TRIAL_IDS
    for at, letter in enumerate(letters):
        if letter in _STRANGE_IDS:
            ids = (_STRANGE_IDS[letter],) * 3
            continue
        role, num_calls = _LETTERS[letter]
        called = [f"needle{len(words) + more:02}" for more in range(num_calls if shows_calls else 0)]
        words += called
        fields: dict[str, object] = {}
        if called:
            fields = {"tool_calls": [_call(*call) for call in zip(ids, called, strict=False)]}
        elif role == "tool":
            fields = {"tool_call_id": ids["rto".index(letter)]}
        content = ""
        if not called or letter == "b":
            words.append(content := f"needle{len(words):02}")
        said.append(TemplateMessage(role=role, at=at, runs=(((at, content),),), fields=fields))
    return said, words


def _call(id: str, word: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": "trial", "arguments": json.dumps({"city": word})}}
