"""Instructions that change within a session: they stay as they began, and what changed is said behind the last message."""

import itertools
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.server.chat import sessions, volatile
from slotcache.server.chat.chat_files import ChatFiles
from slotcache.server.chat.sessions import Sessions
from slotcache.server.chat.volatile import ChangedText
from support.dialects import CHATS

from server.conftest import running

FRONT = "You are a careful assistant who reads documents about the sea and the land.\n" * 8
LINEAGE = ("", "session", "tools")


def instructions(*lines):
    return {"role": "system", "content": f"{FRONT}{''.join(lines)}Be brief.\n{FRONT}"}


def said(role, text):
    return {"role": role, "content": text}


def settled(texts, messages) -> tuple[list[Any], Any]:
    return texts.settle(LINEAGE, messages)


def test_the_first_request_is_as_it_was_sent():
    messages = [instructions("Today is Monday.\n"), said("user", "Hello")]
    assert settled(Sessions(), messages) == (messages, ())


def test_a_changed_line_is_said_after_the_last_message():
    texts, first = Sessions(), [instructions("Today is Monday.\n"), said("user", "Hello")]
    settled(texts, first)
    shown, moved = settled(texts, [instructions("Today is Tuesday.\n"), *first[1:], said("user", "Again")])
    assert shown[:2] == first and moved == (ChangedText("Today is Monday.\n", "Today is Tuesday.\n"),)
    assert shown[2]["content"] == 'Again\n\nToday is Tuesday. [In the instructions, in place of "Today is Monday."]'


DAYS = st.sampled_from(["", "Today is Monday.\n", "Today is Tuesday.\n", "Today is Wednesday.\nIt rains. "])
COUNTS = st.sampled_from(["", "Turn 1. ", "Turn 2. "])
ROLES = st.sampled_from(["user", "tool"])


@given(st.lists(st.tuples(DAYS, COUNTS, ROLES), min_size=1, max_size=8))
def test_each_prompt_goes_on_from_the_one_before(turns):
    """And says all that its request says: in front, or in the last line that is about the same place."""
    texts, history, before = Sessions(), [], []
    for at, (day, count, role) in enumerate(turns):
        history.append(said(role if at else "user", f"message {at}"))
        front = instructions(count, "Always.\n", day)
        shown, moved = settled(texts, [front, *history])
        assert shown[: len(before)] == before
        assert settled(texts, [front, *history]) == (shown, moved), "a second try is the same prompt"
        whole = shown[0]["content"]
        for change in moved:
            assert change.before in whole
        if not moved:
            assert whole == front["content"]
        for text in filter(None, (day, count)):
            lines = [
                line for message in shown for line in message["content"].split("\n\n") if "Tod" in line or "Turn" in line
            ]
            assert any(part.strip() in "\n".join(lines) for part in text.split(". ")), "nothing is lost"
        history.append(said("assistant", f"answer {at}"))
        before = [*shown, history[-1]]


def test_what_is_as_it_began_is_said_again():
    texts, history = Sessions(), [said("user", "a")]
    for day in ("Monday", "Tuesday", "Tuesday", "Monday"):
        shown, moved = settled(texts, [instructions(f"Today is {day}.\n"), *history])
        last = shown[-1]["content"]
        history += [said("assistant", "b"), said("user", "c")]
    assert not moved and last == 'c\n\nToday is Monday. [In the instructions, in place of "Today is Tuesday."]'
    assert [message["content"] for message in shown].count("c") == 1, "it is not said twice that it is Tuesday"


@pytest.mark.parametrize(
    "other",
    [
        {"role": "system", "content": "Quite another text."},
        instructions("A line that is long. ".replace(" ", "-") * 60),
        {"role": "system", "content": instructions()["content"].replace("sea", "sun")},
        {"role": "system", "content": [{"type": "text", "text": FRONT}, {"type": "text", "text": FRONT}]},
    ],
)
def test_other_instructions_stay_as_they_are(other):
    texts = Sessions()
    settled(texts, [instructions("Today is Monday.\n"), said("user", "Hello")])
    messages = [other, said("user", "Hello")]
    assert settled(texts, messages) == (messages, ())
    assert settled(texts, [instructions("Today is Tuesday.\n"), said("user", "Hello")])[1], "and the first ones are known"


@pytest.mark.parametrize(("between", "moves"), [(10, True), (volatile.MOST_UNITS, False)])
def test_pieces_far_apart_are_not_compared(between, moves):
    """The time for that grows with the square of the lines between them."""

    def front(day):
        return [instructions(f"{day}.\n", *(f"line {at}\n" for at in range(between)), f"{day}.\n"), said("user", "Hello")]

    texts = Sessions()
    settled(texts, front("Monday"))
    shown, moved = settled(texts, front("Tuesday"))
    assert bool(moved) is moves and (shown == front("Tuesday")) is not moves


def test_sessions_share_nothing():
    texts = Sessions()
    settled(texts, [instructions("I am Ann.\n"), said("user", "Hello")])
    messages = [instructions("I am Bob.\n"), said("user", "Hello")]
    assert texts.settle(("", "another", "tools"), messages) == (messages, ())


def test_parts_and_no_message_to_say_it_in():
    texts = Sessions()
    first, second = ([said_in_parts(day), {"role": "user", "content": [part("Hello")]}] for day in ("Monday", "Tuesday"))
    settled(texts, first)
    shown, _ = settled(texts, second)
    assert shown[0] == first[0] and shown[1]["content"][0] == part("Hello")
    assert len(shown[1]["content"]) == 2
    alone = [said_in_parts("Friday")]
    assert settled(texts, alone) == (alone, ())


def part(text):
    return {"type": "text", "text": text}


def said_in_parts(day):
    return {"role": "system", "content": [part(FRONT), part(f"Today is {day}.")]}


def reminded(text, block, in_parts=False):
    if not in_parts:
        return said("user", f"{text}\n\n{block}" if block else text)
    return {"role": "user", "content": [part(text), *([part(block)] if block else [])]}


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_reminder_stays_where_it_was_when_it_moves_on(in_parts):
    texts, front, history, before = Sessions(), instructions(), [], []
    for turn in range(4):
        block = f"<reminder>Open: {turn}.</reminder>"
        sent = [front, *history, reminded(f"question {turn}", block, in_parts)]
        shown, moved = settled(texts, sent)
        assert shown[: len(before)] == before and shown[-1] == sent[-1], "the last one is as it was sent"
        assert len(moved) == turn and all(not change.after for change in moved)
        history += [reminded(f"question {turn}", "", in_parts), said("assistant", f"answer {turn}")]
        before = [*shown, history[-1]]


def test_a_reminder_that_changes_in_its_place_is_said_again():
    texts, front, history, before = Sessions(), instructions(), [], []
    for at, number in enumerate((3, 3, 2, 3, None, None)):
        question = reminded("question", "" if number is None else f"<to-do>{number} open</to-do>")
        shown, _ = settled(texts, [front, question, *history])
        assert shown[: len(before)] == before
        lines = ["", "", "[Now: <to-do>2 open</to-do>]", "[Now: <to-do>3 open</to-do>]"]
        lines += ['[In a message, "<to-do>3 open</to-do>" does not hold any more.]', ""]
        last = shown[-1]["content"] if at else ""
        assert last == (f"result {at}\n\n{lines[at]}" if lines[at] else f"result {at}" if at else "")
        history += [said("assistant", f"call {at}"), said("tool", f"result {at + 1}")]
        before = [*shown, history[-2]]


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("question", "<system-reminder>\nTo-dos: <b>2</b>.\n</system-reminder>"),
        ("question", '<a>1</a>\n<b kind="x">2</b>\n'),
        ("", "<a>1</a>"),
    ],
)
def test_blocks_at_the_end_are_reminders(text, block):
    shown, moved = two_turns(f"{text}\n\n{block}" if text else block, text)
    assert shown[1] == said("user", f"{text}\n\n{block}" if text else block) and len(moved) == 1


@pytest.mark.parametrize("text", ["question</a>", "<a>1</a> question", "<a>1</b>", f"<a>{'1' * volatile.LONGEST}</a>"])
def test_other_text_is_none(text):
    shown, moved = two_turns(text, "question")
    assert shown[1] == said("user", "question") and not moved


def two_turns(text, later):
    texts = Sessions()
    settled(texts, [instructions(), said("user", text)])
    return settled(texts, [instructions(), said("user", later), said("assistant", "answer"), said("user", "and then?")])


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_INSTRUCTIONS", 10_000)
    texts = Sessions()
    for at in range(40):
        texts.settle(("", str(at), ""), [instructions(), said("user", "Hello")])
    assert 0 < len(fronts_of(texts)) <= 10_000 // len(FRONT)
    texts.forget("")
    assert not fronts_of(texts)


def fronts_of(texts):
    every = [one for session in texts._sessions.values() for one in session.instructions.values()]
    return [front for one in every for front in one.fronts]


def num_instructions(texts):
    """The characters of all texts that are remembered."""
    fronts = fronts_of(texts)
    lines = [said for front in fronts for said in front.lines.values()]
    pieces = [change for _, changes in lines for change in changes.values()]
    return sum(len(line) for line, _ in lines) + sum(len(piece.before) + len(piece.after) for piece in pieces)


def test_all_that_is_remembered_counts(monkeypatch):
    """A line holds all pieces that are others by then, also those that an earlier line has told of."""
    monkeypatch.setattr(sessions, "MOST_INSTRUCTIONS", 1 << 20)
    texts, front, history = Sessions(), instructions(), []
    for turn in range(40):
        letter = "x" if turn == 0 else "y"
        blocks = [reminded(f"question {at}", f"<a>{letter * 900}</a>") for at in range(50)]
        blocks[0] = reminded("question", f"<a>{turn}</a>")
        history.append(said("user", f"message {turn}"))
        settled(texts, [front, *blocks, *history])
        assert num_instructions(texts) < sessions.MOST_INSTRUCTIONS
    monkeypatch.setattr(sessions, "MOST_INSTRUCTIONS", 1 << 17)
    settled(texts, [front, *(reminded(f"question {at}", "<a></a>") for at in range(1000))])
    assert not fronts_of(texts), "a short line takes its key and its objects"


# ---- over a restart -----------------------------------------------------------------------------------------------------


def on_disk(folder):
    files = ChatFiles(folder)
    return Sessions(files), files


def kept_in(folder):
    return sorted(folder.glob("*.instructions"))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_restarted_server_says_what_it_would_have_said(tmp_path, restarts):
    """Each prompt goes on from the one before, which the disk has the KV of."""
    (texts, files), history, before = on_disk(tmp_path), [], []
    for at, day in enumerate(("Monday", "Tuesday", "Tuesday", "Wednesday", "Monday")):
        if restarts and at:
            files.close()
            texts, files = on_disk(tmp_path)
        history.append(said("user", f"message {at}"))
        shown, _ = settled(texts, [instructions(f"Today is {day}.\n"), *history])
        assert shown[: len(before)] == before
        history.append(said("assistant", f"answer {at}"))
        before = [*shown, history[-1]]
    assert before[-2]["content"] == 'message 4\n\nToday is Monday. [In the instructions, in place of "Today is Wednesday."]'
    files.close()
    assert len(kept_in(tmp_path)) == 4, "the instructions, and three lines"


def test_instructions_are_read_once_for_all_lines(tmp_path, monkeypatch):
    """Else many short messages behind long instructions would cost the product of both."""
    read, digest = [], volatile.blake2b
    monkeypatch.setattr(volatile, "blake2b", lambda data=b"", **size: (read.append(len(data)), digest(data, **size))[1])
    texts, files = on_disk(tmp_path)
    settled(texts, [instructions(), *(reminded(f"question {at}", "<a>1</a>") for at in range(20))])
    files.close()
    assert len([size for size in read if size > len(FRONT)]) == 1 and len(kept_in(tmp_path)) == 21


def test_what_is_forgotten_has_no_files(tmp_path, monkeypatch):
    texts, files = on_disk(tmp_path)
    for session in ("a", "b"):
        for day in ("Monday", "Tuesday"):
            texts.settle(("", session, ""), [instructions(f"{day}.\n"), said("user", f"It is {day}")])
    files.settle()
    assert len(kept_in(tmp_path)) == 4
    texts.forget("", "a")
    files.settle()
    assert len(kept_in(tmp_path)) == 2
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 1)
    texts.settle(("", "c", ""), [instructions(), said("user", "Hello")])
    files.close()
    assert len(kept_in(tmp_path)) == 1


def test_damaged_files_are_left_out_and_go(tmp_path):
    texts, files = on_disk(tmp_path)
    for day in ("Monday", "Tuesday"):
        settled(texts, [instructions(f"{day}.\n"), said("user", "Hello")])
    files.close()
    front = max(kept_in(tmp_path), key=lambda file: file.stat().st_size)
    front.write_bytes(front.read_bytes()[:-1])
    texts, files = on_disk(tmp_path)
    messages = [instructions("Tuesday.\n"), said("user", "Hello")]
    assert settled(texts, messages) == (messages, ()), "a line of what is not known is not said"
    files.close()
    assert len(kept_in(tmp_path)) == 1


def test_a_file_that_is_too_large_is_never_read(tmp_path, monkeypatch):
    """A folder that was damaged must not fill memory."""
    texts, files = on_disk(tmp_path)
    settled(texts, [instructions(), reminded("Hello", "<a>1</a>")])
    files.close()
    huge, (kept, _) = tmp_path / "huge.instructions", kept_in(tmp_path)
    huge.write_bytes(b"")
    os.truncate(huge, volatile.MOST_IN_FILES + 1)  # a hole: it takes no disk
    read, really = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), really(path))[1])
    texts, files = on_disk(tmp_path)
    assert num_instructions(texts) and len(read) == 2 and huge not in read
    files.settle()
    assert len(kept_in(tmp_path)) == 2
    files.close()
    monkeypatch.setattr(volatile, "MOST_IN_FILES", max(file.stat().st_size for file in kept_in(tmp_path)))
    os.utime(kept, (0, 0))
    texts, files = on_disk(tmp_path)
    files.close()
    assert kept not in kept_in(tmp_path), "of too many, the oldest"


def test_a_copy_of_a_file_is_left_out_and_goes(tmp_path):
    texts, files = on_disk(tmp_path)
    for day in ("Monday", "Tuesday"):
        settled(texts, [instructions(f"{day}.\n"), said("user", "Hello")])
    files.close()
    for file in kept_in(tmp_path):
        (tmp_path / f"copy of {file.name}").write_bytes(file.read_bytes())
    texts, files = on_disk(tmp_path)
    files.close()
    assert len(fronts_of(texts)) == 1 and len(kept_in(tmp_path)) == 2


def test_damaged_files_are_reported_once_and_what_cannot_be_read_now_stays(tmp_path, caplog, monkeypatch):
    texts, files = on_disk(tmp_path)
    for session in ("a", "b", "c"):
        texts.settle(("", session, ""), [instructions(), said("user", "Hello")])
    files.close()
    damaged, unread, whole = kept_in(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    really = Path.read_bytes

    def read(path):
        if path == unread:
            raise OSError(5, "Input/output error")
        return really(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    texts, files = on_disk(tmp_path)
    files.close()
    assert len(fronts_of(texts)) == 1 and kept_in(tmp_path) == [unread, whole]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_files_are_read_as_they_have_always_been_written(tmp_path):
    """Their form is that of folders that servers have."""

    def write(key, **fields):
        content = msgspec.msgpack.encode({"lineage": LINEAGE, "front": front, "key": key, **fields})
        name = blake2b(front + key, digest_size=16).hexdigest()
        digest = blake2b(content, digest_size=16).digest()
        (tmp_path / f"{name}.instructions").write_bytes(b"slotcache instructions 1\n" + digest + content)

    hello = said("user", "Hello")
    first, texts = instructions("Monday.\n"), ((instructions("Monday.\n")["content"],),)
    front = blake2b(msgspec.msgpack.encode((LINEAGE, texts)), digest_size=16).digest()
    write(b"", texts=texts)
    place = (0, 0, len(FRONT))
    write(
        blake2b(msgspec.json.encode(hello), digest_size=16).digest(),
        line="It is Tuesday.",
        changes=[(place, ("Monday.\n", "Tuesday.\n"))],
    )
    restored, files = on_disk(tmp_path)
    shown, moved = settled(restored, [instructions("Tuesday.\n"), hello, said("assistant", "Yes"), said("user", "And?")])
    files.close()
    assert shown[:2] == [first, said("user", "Hello\n\nIt is Tuesday.")] and shown[3] == said("user", "And?")
    assert moved == (ChangedText("Monday.\n", "Tuesday.\n"),) and len(kept_in(tmp_path)) == 2


# ---- over a server, by the tokens that it computes ----------------------------------------------------------------------

SYSTEM = "You are a careful assistant who reads documents about the sea and the land and the old town. " * 12
QUESTION = "The tide comes in at noon, and the boats come back to the harbour with it; what is their load? " * 12


@pytest.fixture(scope="module")
def templated(tiny):
    with running(tiny, chat_template="chatml") as up:
        yield up


def session(server, line, turns=8, **fields):
    """Run a session whose instructions have a line for each turn; return the tokens computed, and the last answer."""
    history, computed, answer = [], 0, {}
    for turn in range(turns):
        history.append({"role": "user", "content": f"{turn}: {QUESTION}"})
        system = {"role": "system", "content": f"{SYSTEM}\n{line(turn)}{SYSTEM}"}
        answer = server.chat(messages=[system, *history], **fields)
        history.append(answer["choices"][0]["message"])
        computed += answer["timings"]["prompt_n"]
    return computed, answer


LINES = {
    "a date": lambda turn: f"Today's date: 2026-11-{turn + 1:02}\n",
    "a counter": lambda turn: f"Turn {turn + 1}\n",
}


@pytest.mark.parametrize("name", LINES)
def test_a_session_computes_as_much_as_one_without_the_line(templated, name):
    line = LINES[name]
    without, _ = session(templated, lambda turn: "", cache_scope=f"{name} none")
    moved, last = session(templated, line, cache_scope=name, volatile="move")
    assert moved <= 1.05 * without
    assert last["slotcache"]["moved"] == [{"before": line(0), "after": line(7)}]
    _, unmoved = session(templated, line, turns=4, cache_scope=f"{name} unmoved")
    first, whole = unmoved["slotcache"]["cached_tokens"], unmoved["usage"]["prompt_tokens"]
    assert first < whole / 2, "the line alone is why the rest is computed again"


def test_a_session_goes_on_after_a_restart(tiny, tmp_path):
    """From the KV on disk, which stands on the instructions that the session began with."""
    asked = {"session_id": "restarted", "volatile": "move", "max_tokens": 1}
    turns = [{"role": "user", "content": f"{turn}: {QUESTION}"} for turn in range(3)]
    answer: Any = None
    for turn in range(3):
        with running(tiny, chat_template="chatml", cache_dir=str(tmp_path)) as server:
            system = {"role": "system", "content": f"{SYSTEM}\nTurn {turn}\n{SYSTEM}"}
            answer = server.chat(messages=[system, *turns[: turn + 1]], **asked)
    assert answer["slotcache"]["moved"] == [{"before": "Turn 0\n", "after": "Turn 2\n"}]
    assert answer["slotcache"]["source"] == "disk" and answer["timings"]["prompt_n"] < answer["usage"]["prompt_tokens"] / 3


def test_who_does_not_opt_in_is_left_alone(templated):
    for fields in ({"session_id": "off", "volatile": "move", "cache_prompt": False}, {"cache_scope": "silent"}):
        _, last = session(templated, LINES["a date"], turns=4, **fields)
        assert "moved" not in last["slotcache"]
    _, last = session(templated, LINES["a date"], turns=4, volatile="move")
    assert "moved" not in last["slotcache"] and any("volatile" in warning for warning in last["warnings"])


def test_a_header_names_the_session(templated):
    body = {"max_tokens": 1, "volatile": "move"}
    for day in (1, 2):
        messages = [{"role": "system", "content": f"{SYSTEM}\nDay {day}\n{SYSTEM}"}, {"role": "user", "content": "Hello"}]
        answer = templated.http.post(
            "/v1/chat/completions", json=body | {"messages": messages}, headers={"X-Session-Id": "by header"}
        ).json()
    assert answer["slotcache"]["moved"] == [{"before": "Day 1\n", "after": "Day 2\n"}]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 and "warnings" not in answer


def test_a_dropped_scope_is_forgotten(templated):
    fields = {"cache_scope": "dropped", "volatile": "move"}
    session(templated, LINES["a counter"], turns=1, **fields)
    templated.http.delete("/v1/cache?scope=dropped")
    _, last = session(templated, lambda turn: "Turn 9\n", turns=1, **fields)
    assert "moved" not in last["slotcache"]


@pytest.mark.parametrize("api", CHATS, ids=str)
def test_all_apis_move_it(templated, api):
    asked: Any = {"volatile": "move", "session_id": str(api), "most": 1, "stream": False}
    systems = [f"{SYSTEM}\nDay {day}\n{SYSTEM}" for day in (1, 2)]
    _, answer = (api.ask(templated, system=system, **asked).json() for system in systems)
    assert answer["slotcache"]["moved"] == [{"before": "Day 1\n", "after": "Day 2\n"}]


# ---- what a small real model makes of it ----------------------------------------------------------------------------------

SMOLLM2 = Path(os.environ.get("SLOTCACHE_WEIGHTS", ".")) / "smollm2.gguf"
DAYS_NAMED = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "1 May", "2 June", "3 July"]
BRANCHES = ["main", "dev", "stable", "next", "fix-1", "fix-2", "blue", "red", "green", "yellow"]
HELLO = said("user", "Hello!")
POLITE = "You are a helpful assistant. You answer questions of the user. You are polite, and you say what you know."
BRIEF = "Answer each question in one short sentence. Do not ask anything back. Read these instructions before you answer."
ABOUT = {
    "Today is {}.": ("What day is today?", DAYS_NAMED),
    "The current branch is {}.": ("What is the current branch?", BRANCHES),
}


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="SLOTCACHE_WEIGHTS names no folder with smollm2.gguf")
@pytest.mark.parametrize("turns", [1, 2])
def test_a_small_model_answers_as_many_questions_about_a_moved_line(turns):
    """20 of them. turns: that the line has changed in, which says it once in the long form, and then in the short one."""
    right = {"off": 0, "move": 0}
    with running(SMOLLM2, ctx_size=4096, threads=1) as up:
        for volatile_, line, at in itertools.product(right, ABOUT, range(10)):
            (question, words), answer = ABOUT[line], {}
            fields = {"volatile": volatile_, "session_id": f"{line} {at} {volatile_}", "ignore_eos": False}
            for turn in range(turns + 1):
                moment = line.format(words[(at + turn - turns) % 10])
                messages = [said("system", f"{POLITE}\n{moment}\n{BRIEF}"), HELLO]
                messages += [said("assistant", "Hello! How can I help you?"), said("user", question)] * (turn == turns)
                answer = up.chat(messages=messages, max_tokens=24 if turn == turns else 1, **fields)
            assert bool(answer["slotcache"].get("moved")) is (volatile_ == "move")
            right[volatile_] += words[at] in answer["choices"][0]["message"]["content"]
    assert right["move"] >= right["off"] > 10, right


def test_a_session_that_is_back_after_a_restart_can_be_ended(tiny, tmp_path):
    monday, tuesday = ([instructions(f"Today is {day}.\n"), said("user", "Hello")] for day in ("Monday", "Tuesday"))
    fields = {"session_id": "s", "volatile": "move", "cache_prompt": None}
    with running(tiny, cache_dir=str(tmp_path)) as server:
        server.chat(messages=monday, **fields)
    with running(tiny, cache_dir=str(tmp_path)) as server:
        assert server.http.delete("/v1/sessions/s").json()["tokens"] == 0
        assert server.http.delete("/v1/sessions/s").status_code == 404
        assert not server.chat(messages=tuesday, **fields)["slotcache"].get("moved")
