"""The prompts of sessions: how many are remembered, and which leave."""

import numpy as np
import pytest
from slotcache.server.chat import sessions
from slotcache.server.chat.history import HistoryMessage
from slotcache.server.chat.sessions import Branch, Sessions, spoken
from slotcache.slots.scope import Scope


def branch(first, length):
    return Branch(Scope.shared(""), np.arange(first, first + length, dtype=np.int32), length)


@pytest.mark.parametrize(("bound", "most", "length"), [("MOST_SESSIONS", 3, 5), ("MOST_TOKENS", 300, 100)])
def test_those_used_last_stay(monkeypatch, bound, most, length):
    monkeypatch.setattr(sessions, bound, most)
    known = Sessions()
    for number in (0, 1, 2, 0, 3, 4):
        known.note(("", str(number)), branch(1000 * number, length))
    assert [len(known.forget("", str(number))) for number in range(5)] == [1, 0, 0, 1, 1]
    known.note(("", "5"), branch(0, 2 * most))
    assert known.forget("", "5"), "the newest one stays, whatever its length"


def test_what_others_quote_to_the_end_is_done():
    def answered(first, answer):
        return Branch(Scope.shared(""), np.arange(first, first + 100, dtype=np.int32), 100, answer)

    known, name = Sessions(), ("", "one")
    for first, answer in (
        (0, "The parent's own."),
        (1000, "The first sub-agent's."),
        (2000, "The second one's."),
        (3000, ""),
    ):
        assert known.note(name, answered(first, answer), ["nothing of it"]) == []
    (done,) = known.note(name, answered(0, "Next."), ["Told: The first sub-agent's. And more", "The second one"])
    assert done.tokens[0] == 1000
    assert [one.tokens[0] for one in known.forget(*name)] == [2000, 3000, 0], "and its own last turn, which it goes on from"


def test_a_chat_ends_with_a_text_or_with_a_call():
    text = "The last message of an agent that has done its work."
    asked = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
    told = [{"role": "tool", "content": "Three"}, {"role": "user", "content": [{"type": "text", "text": "Four"}]}]
    entries = [HistoryMessage.of(message) for message in (*asked, *told, {"role": "assistant", "content": f" {text}\n"})]
    assert spoken(entries) == (text, ["Four", "Three"])
    call = {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert spoken([*entries[:-1], HistoryMessage.of(call)])[0] == ""
    assert spoken([HistoryMessage.of({"role": "assistant", "content": "Done."})]) == ("", [])
