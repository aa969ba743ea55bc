"""The prompts of sessions: how many are remembered, and which leave."""

import numpy as np
import pytest
from slotcache.server.service import sessions
from slotcache.server.service.sessions import Branch, Sessions
from slotcache.slots.scope import Scope


def branch(first, length):
    return Branch(Scope.shared(""), np.arange(first, first + length, dtype=np.int32), length)


@pytest.mark.parametrize(("bound", "most", "length"), [("MOST_SESSIONS", 3, 5), ("MOST_TOKENS", 300, 100)])
def test_those_used_last_stay(monkeypatch, bound, most, length):
    monkeypatch.setattr(sessions, bound, most)
    known = Sessions()
    for number in (0, 1, 2, 0, 3, 4):
        known.note(("", str(number)), branch(1000 * number, length))
    assert [len(known.end(("", str(number)))) for number in range(5)] == [1, 0, 0, 1, 1]
    known.note(("", "5"), branch(0, 2 * most))
    assert known.end(("", "5")), "the newest one stays, whatever its length"
