"""What is known of sessions: how much of it, what leaves first, and what is forgotten."""

import subprocess
import sys
from pathlib import Path
from sys import getsizeof
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.models.jinja import TemplateError
from slotcache.server.chat import sessions
from slotcache.server.chat.chat_files import ChatFiles
from slotcache.server.chat.history import HistoryMessage
from slotcache.server.chat.sessions import Branch, Sessions, spoken
from slotcache.server.chat.volatile import Instructions
from slotcache.slots.scope import Scope

BRANCH = 400 + getsizeof("")  # bytes of 100 tokens
FRONT = "You are a careful assistant who reads documents about the sea and the land.\n" * 40


def branch(first, length=100):
    return Branch(Scope.shared(""), np.arange(first, first + length, dtype=np.int32), length)


def said(role, text):
    return {"role": role, "content": text}


def instructions(line):
    return said("system", f"{FRONT}{line}\n{FRONT}")


def moves(known, line, lineage):
    """Whether a session has instructions from which these go on, with another line."""
    return bool(known.settle(lineage, [instructions(line), said("user", f"It is {line}")])[1])


SUMMARY = "A long summary of all that was said. " * 10
ASKED = HistoryMessage.of(said("user", "Sum up"))
SHORTENED = HistoryMessage.of(said("user", f"What was said until now:\n{SUMMARY}\nGo on."))
OPTIONS = b'{"messages": []}'


def shortens(known, key):
    """Let a session have its history summed up, and go on with the summary; return what it is likely to ask then."""
    answer = HistoryMessage.of(said("assistant", SUMMARY))
    likely = known.note_chat(key, OPTIONS, [ASKED, answer])
    known.note_chat(key, OPTIONS, [SHORTENED, HistoryMessage.of(said("assistant", "Yes."))])
    return likely


@pytest.mark.parametrize(("bound", "most"), [("MOST_SESSIONS", 3), ("MOST_BYTES", 3 * BRANCH)])
def test_those_used_last_stay(monkeypatch, bound, most):
    monkeypatch.setattr(sessions, bound, most)
    known = Sessions()
    for number in (0, 1, 2, 0, 3, 4):
        known.note_prompt(("", str(number)), branch(1000 * number))
    assert [len(known.forget("", str(number))) for number in range(5)] == [1, 0, 0, 1, 1]


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
        assert known.note_prompt(name, answered(first, answer), ["nothing of it"]) == []
    (done,) = known.note_prompt(name, answered(0, "Next."), ["Told: The first sub-agent's. And more", "The second one"])
    assert done.tokens[0] == 1000
    assert [one.tokens[0] for one in known.forget(*name)] == [2000, 3000, 0], "and its own last turn, which it goes on from"


def test_a_chat_ends_with_a_text_or_with_a_call():
    text = "The last message of an agent that has done its work."
    asked = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
    reported = [{"role": "tool", "content": "Three"}, {"role": "user", "content": [{"type": "text", "text": "Four"}]}]
    entries = [HistoryMessage.of(message) for message in (*asked, *reported, {"role": "assistant", "content": f" {text}\n"})]
    assert spoken(entries) == (text, ["Four", "Three"])
    call = {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert spoken([*entries[:-1], HistoryMessage.of(call)])[0] == ""
    assert spoken([HistoryMessage.of({"role": "assistant", "content": "Done."})]) == ("", [])


def test_an_ended_session_is_forgotten_whole_and_others_are_not():
    known = Sessions()
    for key in (ended := ("mine", "a")), ("mine", "b"), ("yours", "a"):
        moves(known, "Monday", (*key, "tools"))
        known.note_prompt(key, branch(0))
        shortens(known, key)
    assert len(known.forget(*ended)) == 1 and known.forget(*ended) == []
    for key in (ended, ("mine", "b"), ("yours", "a")):
        others = key != ended
        assert moves(known, "Tuesday", (*key, "tools")) is others
        assert (shortens(known, key) is not None) is others
        assert len(known.forget(*key)) == others


def test_a_forgotten_scope_keeps_the_prompts_of_its_sessions():
    """Those that run have KV in the cache still: it leaves first once their session ends."""
    known, key = Sessions(), ("mine", "a")
    moves(known, "Monday", (*key, "tools"))
    known.note_prompt(key, branch(0))
    shortens(known, key)
    assert known.forget("mine") == []
    assert not moves(known, "Tuesday", (*key, "tools")) and shortens(known, key) is None
    assert len(known.forget(*key)) == 1


def test_prompts_are_evicted_before_instructions(monkeypatch):
    """Without these a session's next prompt goes on from no earlier one."""
    monkeypatch.setattr(sessions, "MOST_BYTES", 3 * len(FRONT))
    known = Sessions()
    moves(known, "Monday", ("", "old", "tools"))
    for number in range(10):
        known.note_prompt(("", str(number)), branch(1000 * number))
    assert len(known.forget("", "0")) == 0 < len(known.forget("", "9"))
    assert moves(known, "Tuesday", ("", "old", "tools"))


def test_of_too_many_instructions_the_oldest_are_evicted(monkeypatch):
    """They take no room from what sessions ask today."""
    monkeypatch.setattr(sessions, "MOST_INSTRUCTIONS", 3 * len(FRONT))
    known = Sessions()
    known.note_prompt(("", "new"), branch(0))
    for name in ("old", "newer", "new"):
        moves(known, "Monday", ("", name, "tools"))
    assert moves(known, "Tuesday", ("", "new", "tools")) and len(known.forget("", "new")) == 1
    assert not moves(known, "Tuesday", ("", "old", "tools"))


@pytest.mark.parametrize("bound", ["MOST_INSTRUCTIONS", "MOST_BYTES"])
def test_a_session_that_alone_is_too_large_takes_no_other_with_it(monkeypatch, bound):
    monkeypatch.setattr(sessions, bound, 6 * len(FRONT))
    known = Sessions()
    moves(known, "Monday", ("", "small", "tools"))
    known.note_prompt(("", "small"), branch(0))
    if bound == "MOST_BYTES":
        known.note_prompt(("", "large"), branch(0, 2 * len(FRONT)))
        assert known.forget("", "large") == []
    else:
        moves(known, "x" * 5 * len(FRONT), ("", "large", "tools"))
        assert not moves(known, "Tuesday", ("", "large", "tools"))
    assert moves(known, "Tuesday", ("", "small", "tools")) and len(known.forget("", "small")) == 1


def test_a_session_has_some_sets_of_tools_with_instructions(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_TOOLS", 2)
    known = Sessions()
    for tools in ("one", "two", "one", "three"):
        moves(known, "Monday", ("", "a", tools))
    assert [moves(known, "Tuesday", ("", "a", tools)) for tools in ("one", "three", "two")] == [True, True, False]


@pytest.mark.parametrize("name", ["a", None])
def test_what_is_forgotten_while_a_prompt_is_made_stays_so(tmp_path, monkeypatch, name):
    """And who forgets waits for no prompt: the event loop does."""
    started, goes_on, settle = Event(), Event(), Instructions.settle

    def slow(self, messages):
        started.set()
        assert goes_on.wait(60)
        return settle(self, messages)

    monkeypatch.setattr(Instructions, "settle", slow)
    files = ChatFiles(tmp_path)
    known = Sessions(files)
    thread = Thread(target=moves, args=(known, "Monday", ("mine", "a", "tools")))
    thread.start()
    assert started.wait(60)
    known.forget("mine", name)
    known.note_prompt(("mine", "b"), branch(0))
    goes_on.set()
    thread.join()
    files.close()
    assert not [*tmp_path.glob("*.instructions")]
    monkeypatch.undo()
    assert not moves(known, "Tuesday", ("mine", "a", "tools"))


KEYS = st.tuples(st.sampled_from(["", "mine"]), st.sampled_from(["", "a", "b"]))
ACTS = st.one_of(
    st.tuples(st.just("settle"), KEYS, st.sampled_from(["Monday", "Tuesday", "x" * 2000])),
    st.tuples(st.just("prompt"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("shorten"), KEYS, st.none()),
    st.tuples(st.just("forget"), KEYS, st.booleans()),
)


@given(st.lists(ACTS, max_size=20))
def test_all_bytes_count_and_no_bound_is_passed(acts):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sessions, "MOST_SESSIONS", 4)
        monkeypatch.setattr(sessions, "MOST_INSTRUCTIONS", most_kept := 5 * len(FRONT))
        monkeypatch.setattr(sessions, "MOST_BYTES", most := 6 * len(FRONT))
        known = Sessions()
        for act, (scope, name), value in acts:
            if act == "settle":
                moves(known, value, (scope, name, "tools"))
            elif act == "prompt":
                known.note_prompt((scope, name), branch(1000 * value))
            elif act == "shorten":
                shortens(known, (scope, name))
            else:
                known.forget(scope, name if value else None)
            counts = [session.sizes for session in known._sessions.values()]
            assert [known._num_kept, known._num_cached] == [sum(size[at] for size in counts) for at in (0, 1)]
            assert len(known) <= 4 and known._num_kept <= most_kept and known._num_kept + known._num_cached <= most


def test_prompts_that_fail_leave_no_more_sessions_than_others(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    known = Sessions()
    for number in range(9):
        with pytest.raises(TemplateError):
            known.settle(("", str(number), ""), [said("system", 5), said("user", "And now?")])
    assert len(known) <= 3


WRITER = """
import sys
from itertools import count
from pathlib import Path
from server.chat.test_sessions import moves
from slotcache.server.chat.chat_files import ChatFiles
from slotcache.server.chat.sessions import Sessions

files = ChatFiles(Path(sys.argv[1]))
known = Sessions(files)
for number in count():
    moves(known, f"Line {number} {number}", ("mine", "again", "tools"))
    for name in range(3):
        moves(known, f"Line {number}", ("mine", f"{number}-{name}", "tools"))
        moves(known, f"Line {number}", ("mine", "all", f"tools {number}"))
    files.settle()
    print(number, flush=True)
"""


def test_a_killed_server_loses_no_session_that_was_written(tmp_path):
    """Killed at any place: what was on the disk goes on, and what was not is as if it had never been said."""
    script, tests = [sys.executable, "-c", WRITER, str(tmp_path)], Path(__file__).parents[2]
    for kill in range(4):
        with subprocess.Popen(script, text=True, stdout=subprocess.PIPE, cwd=tests) as writer:
            assert writer.stdout is not None
            written = [int(writer.stdout.readline()) for _ in range(3 + kill)][-1]
            writer.kill()
        files = ChatFiles(tmp_path)
        known = Sessions(files)
        for number in range(written + 1):
            assert all(moves(known, "Now", ("mine", f"{number}-{name}", "tools")) for name in range(3))
            assert moves(known, "Now", ("mine", "all", f"tools {number}"))
        assert moves(known, "Now", ("mine", "again", "tools"))
        assert not moves(known, "Now", ("mine", f"{written + 9}-0", "tools"))
        known.forget("mine")
        for number in range(written + 3):
            for name in range(3):
                known.forget("mine", f"{number}-{name}")
        files.close()
        assert not [*tmp_path.glob("*.instructions")]


def test_where_there_are_too_many_a_turn_looks_at_no_more_than_are_evicted(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 50)
    known, looked = Sessions(), []
    for number in range(50):
        known.note_prompt(("", str(number)), branch(1000 * number))
    size = sessions.Session.is_too_large.fget
    assert size is not None
    monkeypatch.setattr(sessions.Session, "is_too_large", property(lambda one: looked.append(one) or size(one)))
    for number in range(50, 60):
        known.note_prompt(("", str(number)), branch(1000 * number))
    assert len(known) == 50 and len(looked) == 10
