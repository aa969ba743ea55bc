"""Stored conversations over a restart: their files, and what a server makes of them."""

import errno
import os
import subprocess
import sys
import time
from hashlib import blake2b
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import msgspec
import numpy as np
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slotcache.ordering.document import Document
from slotcache.server.chat.body import ChatRequest
from slotcache.server.chat.chat_files import DIGEST, DamagedFile
from slotcache.server.chat.chat_prompt import DocumentSet
from slotcache.server.chat.conversation_files import (
    MAGIC,
    SUFFIX,
    ConversationFiles,
    HistoryVocabulary,
    StoredAnswer,
    decode,
    encode,
    free_conversation_files,
)
from slotcache.server.chat.conversations import Conversations
from slotcache.server.chat.history import HistoryMessage
from slotcache.slots.store import private_folder
from slotcache.slots.store.private_folder import FolderError

from server.chat.test_conversations import ask, conversation_of, documents, rendered, shown, text, used, user
from server.conftest import running

VOCABULARY = HistoryVocabulary(100, lambda scope, text: np.arange(len(text), dtype=np.int32) % 100)


def files(folder):
    return sorted(folder.rglob(f"*{SUFFIX}"))


class Server:
    """A store with files, which may be opened again."""

    def __init__(self, folder, **changed):
        self.folder, self.changed = folder, {"number": 1000, "size": 1 << 20, "age": 1000} | changed
        self.open()

    def open(self):
        bounds = (self.changed["number"], self.changed["size"], self.changed["age"])
        self.conversations = Conversations(*bounds, files=ConversationFiles(self.folder))
        self.conversations.restore(VOCABULARY)

    def restart(self, **changed):
        self.conversations.close()
        self.changed |= changed
        self.open()

    def turn(self, id, content, scope="", after=None):
        return self.end(self.begin(id, scope, after), id, content)

    def begin(self, id, scope="", after=None):
        named = {"conversation": id} if after is None else {"previous_response_id": after}
        return self.conversations.ref(ChatRequest(messages=[], cache_scope=scope, **named), caches=True)

    def end(self, ref, id, content):
        assert ref is not None
        entries = (*ref.entries, HistoryMessage.of(user(content)))
        answer = f"{id}/{content[:20]}"
        assert self.conversations.remember(ref, answer, entries)
        return answer

    def head(self, id):
        conversation = self.conversations.find("", id)
        assert conversation is not None
        return conversation.head

    def said(self, id, scope=""):
        conversation = self.conversations.find(scope, id)
        assert conversation is not None
        return {answer: [entry.message["content"] for entry in history] for answer, history in conversation.answers.items()}


@pytest.fixture
def store(tmp_path):
    server = Server(tmp_path / "answers")
    yield server
    server.conversations.close()


def test_a_restarted_server_goes_on_as_if_it_had_not_stopped(tiny, tmp_path):
    """The order of documents, the sampled ids and the head come back, and the KV of the disk fits them."""
    fields = {"scope": "mine", "conversation": "c", "temperature": 2.0, "max_tokens": 24}
    goes_on = {"scope": "mine", "documents": documents(3, 0), "max_tokens": 24}
    found, prompt = {}, ""
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        with running(tiny, cache_dir=str(folder)) as server:
            ask(server, "What?", "mine", documents=documents(2, 1, 0))
            first = ask(server, "What is it?", documents=documents(0, 1, 2), seed=1, **fields)
            second = ask(server, "And now?", documents=documents(1, 3), seed=2, **fields)
            branch = ask(server, "Or then?", "mine", previous_response_id=first.id, seed=3, max_tokens=24)
            before = shown(server, "c", "mine").json()
            if not restarts:
                found[False] = ask(server, "At last?", conversation="c", **goes_on)
                prompt = rendered(server, [user("?")], "mine", previous_response_id=branch.id)
        assert used(first) == ["d2", "d1", "d0"], "the order is not the retrieval's, or this test shows nothing"
        if restarts:
            with running(tiny, cache_dir=str(folder)) as server:
                assert shown(server, "c", "mine").json() == before
                assert shown(server, "c").status_code == 404
                found[True] = ask(server, "At last?", conversation="c", **goes_on)
                again = rendered(server, [user("?")], "mine", previous_response_id=branch.id)
            assert again == prompt and found[True].slotcache["source"] == "disk"
            assert found[True].slotcache["cached_tokens"] >= second.usage.total_tokens - 1
    assert text(found[True]) == text(found[False]) and used(found[True]) == used(found[False])
    assert conversation_of(found[True]) | {"previous": ""} == conversation_of(found[False]) | {"previous": ""}


def test_two_servers_on_one_folder_mix_no_histories(tiny, tmp_path, caplog):
    """Each numbers its entries itself: in one store, Bob's answer went on from Alice's messages."""
    with running(tiny, cache_dir=str(tmp_path)) as first, running(tiny, cache_dir=str(tmp_path)) as second:
        warned = [record.getMessage() for record in caplog.records if "another server" in record.message]
        assert len(warned) == 1 and warned[0].endswith("-1")
        for server, name in ((first, "Alice"), (second, "Bob"), (first, "Alice"), (second, "Bob")):
            ask(server, f"I am {name}.", conversation="c", max_tokens=4)
        ask(second, "Only Bob asks this.", conversation="d", max_tokens=4)
        ask(first, "Both ask this.", conversation="e", max_tokens=4)
        ask(second, "Both ask this.", conversation="e", max_tokens=4)
        assert first.http.delete("/v1/conversations/e").status_code == 200
        assert shown(second, "e").status_code == 200
    assert len({file.parent for file in tmp_path.glob("*/*.kv")}) == 1, "KV is shared"
    with running(tiny, cache_dir=str(tmp_path)) as first, running(tiny, cache_dir=str(tmp_path)) as second:
        for server, name in ((first, "Alice"), (second, "Bob")):
            said = [entry["content"] for entry in shown(server, "c").json()["messages"] if entry["role"] == "user"]
            assert said == [f"I am {name}."] * 2
        assert [shown(server, "d").status_code for server in (first, second)] == [404, 200]
        assert [shown(server, "e").status_code for server in (first, second)] == [404, 200]


def test_files_whose_thread_does_not_start_leave_no_lock(tmp_path, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", fail)
        with pytest.raises(RuntimeError):
            ConversationFiles(tmp_path / "answers")
    ConversationFiles(tmp_path / "answers").close()


def test_a_killed_server_leaves_no_lock(tmp_path):
    ConversationFiles(tmp_path / "answers").close()
    lock = f"lock({str(tmp_path / 'answers' / 'lock')!r})"
    script = f"from slotcache.slots.store.private_folder import lock; {lock}\nprint(flush=True); input()"
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(BlockingIOError):
            ConversationFiles(tmp_path / "answers")
        other.kill()
    files = ConversationFiles(tmp_path / "answers")
    beside = free_conversation_files(tmp_path / "answers")
    assert beside.folder == tmp_path / "answers-1"
    files.close()
    again = free_conversation_files(tmp_path / "answers")
    assert again.folder == files.folder
    for one in (beside, again):
        one.close()


def test_a_lock_whose_file_is_never_the_one_that_is_opened_is_refused(tmp_path, monkeypatch):
    """Some file systems number a file anew each time."""
    monkeypatch.setattr("os.path.samestat", lambda one, other: False)
    with pytest.raises(OSError, match="another file has the name"):
        private_folder.lock(tmp_path / "lock")


def test_a_folder_without_locks_is_refused_with_what_is_right(tmp_path, monkeypatch):
    def no_locks(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(private_folder, "lock", no_locks)
    with pytest.raises(FolderError, match=r"cannot be locked: No locks available: expected a folder"):
        free_conversation_files(tmp_path / "answers")


def test_deleted_conversations_leave_no_file(tiny, tmp_path):
    with running(tiny, cache_dir=str(tmp_path)) as server:
        answer = ask(server, "My secret is violet.", conversation="c")
        ask(server, "Mine is, too.", conversation="other")
        server.service.conversations.settle()
        assert len(files(tmp_path)) == 2 and any(b"violet" in file.read_bytes() for file in files(tmp_path))
        assert server.http.delete("/v1/conversations/c").status_code == 200
        assert len(files(tmp_path)) == 1 and not any(b"violet" in file.read_bytes() for file in files(tmp_path))
    modes = {path.stat().st_mode & 0o777 for path in [files(tmp_path)[0], files(tmp_path)[0].parent]}
    assert modes == {0o600, 0o700}
    with running(tiny, cache_dir=str(tmp_path)) as server:
        assert shown(server, "other").status_code == 200 and shown(server, "c").status_code == 404
        with pytest.raises(openai.NotFoundError):
            ask(server, "And?", previous_response_id=answer.id)


def test_a_file_has_every_part_of_an_answer():
    tokens = np.array([5, 99, 0], np.int32)
    shown = DocumentSet(
        (Document("a", "A text.", "Title"), Document("b", "B text.")),
        (tokens, tokens[:1]),
        policy="auto",
        hint=lambda text: tokens,
        repeated=("z",),
        ranking=("z", "a", "b"),
        location=tokens[1:],
        order=(1, 0),
        keep_first=1,
        keep_last=0,
        longest_hint=7,
    )
    entries = {
        3: HistoryMessage.of({"role": "system", "content": "Sing."}, one_turn=True),
        4: HistoryMessage.of(user("What?"), ("k", *shown.keys), shown),
        9: HistoryMessage.of({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, sampled=tokens),
    }
    stored = StoredAnswer(
        scope="s", conversation="c", created=12.5, id="a", number=10, headed=11, parent="b", history=(0, 3, 4, 9),
        entries=entries, record=b'{"id": "a"}',
    )  # fmt: skip
    back = decode(b"".join(encode(stored)), VOCABULARY)
    assert (back.scope, back.conversation, back.created, back.id, back.number) == ("s", "c", 12.5, "a", 10)
    assert (back.headed, back.parent, back.history, back.record) == (11, "b", (0, 3, 4, 9), b'{"id": "a"}')
    for number, entry in back.entries.items():
        given = entries[number]
        assert (entry.role, entry.said, entry.keys, entry.one_turn) == (given.role, given.said, given.keys, given.one_turn)
    assert back.entries[9].sampled is not None and back.entries[9].sampled.tolist() == [5, 99, 0]
    other = back.entries[4].shown
    assert other is not None and other.documents == shown.documents and other.hint is not None
    assert [one.tolist() for one in (*other.tokens, other.location)] == [[5, 99, 0], [5], [99, 0]]
    for name in ("policy", "repeated", "ranking", "order", "keep_first", "keep_last", "longest_hint", "keys"):
        assert getattr(other, name) == getattr(shown, name)
    assert other.hint("abc").tolist() == [0, 1, 2]
    with pytest.raises(DamagedFile, match="tokens"):
        decode(b"".join(encode(stored)), HistoryVocabulary(99, VOCABULARY.tokenize))


def test_every_changed_byte_is_noticed(store):
    store.turn("c", "One?")
    store.conversations.settle()
    (file,) = files(store.folder)
    whole = file.read_bytes()
    for data in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))):
        with pytest.raises(DamagedFile):
            decode(data, VOCABULARY)
    for length in range(len(whole)):
        with pytest.raises(DamagedFile):
            decode(whole[:length], VOCABULARY)


def test_a_file_that_is_too_large_takes_no_other_with_it(store):
    store.turn("c", "Hello")
    store.conversations.close()
    huge = store.folder / f"{'0' * 32}{SUFFIX}"
    huge.touch()
    os.truncate(huge, (1 << 20) + 1)
    store.open()
    assert store.said("c") == {"c/Hello": ["Hello"]}
    store.conversations.settle()
    assert len(files(store.folder)) == 1


@pytest.mark.parametrize("damage", ["damaged", "foreign name", "empty", "a folder"])
def test_a_damaged_file_is_left_out_with_one_warning(store, caplog, damage):
    store.turn("c", "One?")
    for content in ("Two?", "Three?"):
        store.turn("d", content)
    store.conversations.close()
    folder, (of_c, *_) = store.folder, sorted(files(store.folder), key=lambda file: file.stat().st_mtime_ns)
    if damage == "damaged":
        of_c.write_bytes(of_c.read_bytes()[:-1])
    elif damage == "foreign name":
        of_c.rename(folder / f"{'0' * 32}{SUFFIX}")
    elif damage == "empty":
        of_c.write_bytes(b"")
    else:
        of_c.unlink()
        of_c.mkdir()
    store.open()
    assert store.conversations.find("", "c") is None and store.said("d") == {
        "d/Two?": ["Two?"],
        "d/Three?": ["Two?", "Three?"],
    }
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (damage != "a folder")
    store.conversations.settle()
    assert len([file for file in files(folder) if file.is_file()]) == 2


def test_an_answer_without_its_history_is_left_out_and_a_branch_beside_it_stays(store):
    first = store.turn("c", "One?")
    second = store.turn("c", "Two?", after=first)
    store.turn("c", "Three?", after=second)
    store.turn("c", "Else?", after=first)
    store.conversations.settle()
    by_age = {
        answer: store.folder / store.conversations.find("", "c").stored(answer).file_name for answer in store.said("c")
    }
    by_age[second].unlink()
    store.restart()
    assert store.said("c") == {"c/One?": ["One?"], "c/Else?": ["One?", "Else?"]}
    assert store.head("c") == first, "the one that was the head last"
    store.conversations.settle()  # it is written as the head
    by_age[first].unlink()
    store.restart()
    assert store.conversations.find("", "c") is None and store.conversations.num_bytes == 0
    store.conversations.settle()
    assert files(store.folder) == []


def test_one_answer_may_be_deleted_and_the_others_keep_their_history(store):
    first = store.turn("c", "One?")
    second = store.turn("c", "Two?", after=first)
    third = store.turn("c", "Three?", after=second)
    for deleted, left in ((first, {second, third}), (third, {second})):
        assert store.conversations.forget_answer("other", deleted) is False
        assert (
            store.conversations.forget_answer("", deleted) is True
            and store.conversations.forget_answer("", deleted) is False
        )
        for _ in range(2):
            assert set(store.said("c")) == left and store.said("c")[second] == ["One?", "Two?"]
            counted = store.conversations.num_bytes
            store.restart()
            assert store.conversations.num_bytes == counted
        assert len(files(store.folder)) == len(left)
    assert b"Three?" not in b"".join(file.read_bytes() for file in files(store.folder))
    assert store.conversations.forget_answer("", second) and store.conversations.num_bytes == 0
    store.restart()
    assert files(store.folder) == [] and len(store.conversations) == 0


def test_the_answer_before_a_deleted_head_is_the_head_again(store):
    """In memory and on disk: both chose another answer each, by their own order."""
    first = store.turn("c", "One?")
    second = store.turn("c", "Two?")
    branch = store.turn("c", "Or?", after=first)
    third = store.turn("c", "Three?")
    assert store.head("c") == third
    for deleted, head in ((third, second), (second, first), (first, branch)):
        assert store.conversations.forget_answer("", deleted) and store.head("c") == head
        store.restart()
        assert store.head("c") == head
        assert store.turn("c", "Next?", after=head) and store.conversations.forget_answer("", store.head("c"))
        assert store.head("c") == head


@pytest.mark.parametrize("restarts", [False, True])
def test_the_head_again_is_the_answer_that_was_continued_and_not_the_head_before(store, restarts):
    first = store.turn("c", "One?")
    origins = [store.begin("c"), store.begin("c")]
    second, other = (store.end(ref, "c", content) for ref, content in zip(origins, ("Two?", "Or?"), strict=True))
    assert store.head("c") == other
    if restarts:
        store.restart()
    assert store.conversations.forget_answer("", other) and store.head("c") == first
    store.restart()
    assert store.head("c") == first and set(store.said("c")) == {first, second}


def test_an_answer_goes_on_from_the_one_before_a_deleted_one(store):
    answers = [store.turn("c", content) for content in ("One?", "Two?", "Three?", "Four?")]
    store.turn("c", "Or?", after=answers[0])
    for deleted in answers[1:3]:
        assert store.conversations.forget_answer("", deleted) and store.head("c") == answers[3]
    store.restart()
    assert store.conversations.forget_answer("", answers[3]) and store.head("c") == answers[0]


ACTS = st.lists(st.tuples(st.sampled_from(["turn", "after", "delete", "restart"]), st.integers(0, 9)), max_size=14)


@given(ACTS)
@example([("turn", 0), ("turn", 0), ("after", 0), ("delete", 1)])
@settings(deadline=None, max_examples=60)
def test_memory_and_disk_agree_on_every_conversation(acts):
    with TemporaryDirectory() as folder:
        server, number = Server(Path(folder, "answers")), count()
        for act, at in [*acts, ("restart", 0)]:
            conversation = server.conversations.find("", "c")
            known = list(conversation.answers) if conversation else []
            if act == "turn":
                server.turn("c", f"{next(number)}?")
            elif act == "after" and known:
                server.turn("c", f"{next(number)}?", after=known[at % len(known)])
            elif act == "delete" and known:
                server.conversations.forget_answer("", known[at % len(known)])
            elif act == "restart" and known:
                before = server.head("c"), server.said("c"), server.conversations.num_bytes
                server.restart()
                assert (server.head("c"), server.said("c"), server.conversations.num_bytes) == before
        server.conversations.close()


def test_files_of_an_earlier_version_are_read(store):
    answers = [store.turn("c", content) for content in ("One?", "Two?")]
    branch = store.turn("c", "Or?", after=answers[0])
    store.conversations.close()
    for file in files(store.folder):
        content = file.read_bytes()[len(MAGIC) + DIGEST :]
        known = msgspec.msgpack.decode(content)
        known["is_head"] = known.pop("headed") > 0
        del known["parent"]
        content = msgspec.msgpack.encode(known)
        file.write_bytes(MAGIC + blake2b(content, digest_size=DIGEST).digest() + content)
    store.open()
    assert store.head("c") == answers[1] and set(store.said("c")) == {*answers, branch}
    assert store.conversations.forget_answer("", answers[1]) and store.head("c") == answers[0], (
        "the one that was the head before"
    )


def test_bounds_hold_over_a_restart_and_age_goes_on(store):
    for id in "abcd":
        store.turn(id, "x" * 10_000)
    store.restart(number=2)
    assert [store.conversations.find("", id) is not None for id in "abcd"] == [False, False, True, True]
    store.conversations.settle()
    assert len(files(store.folder)) == 2
    of_c, of_d = (store.folder / store.conversations.find("", id).stored(f"{id}/{'x' * 20}").file_name for id in "cd")
    os.utime(of_c, (time.time() - 5000, time.time() - 5000))
    store.restart()
    assert store.conversations.find("", "c") is None and store.conversations.find("", "d") is not None
    store.restart(size=9000)
    assert store.conversations.find("", "d") is None
    store.conversations.settle()
    assert not of_c.exists() and not of_d.exists()


def test_scopes_do_not_meet_in_files(store):
    store.turn("c", "Mine.", scope="mine")
    store.turn("c", "Yours.", scope="yours")
    store.restart()
    assert store.said("c", "mine") == {"c/Mine.": ["Mine."]} and store.said("c", "yours") == {"c/Yours.": ["Yours."]}
    assert not any("mine" in file.name or "Mine" in file.name for file in files(store.folder))


def test_a_record_is_written_with_its_answer(store):
    answer = store.turn("c", "One?")
    store.conversations.settle()
    store.conversations.attach("", answer, b'{"id": 1}')
    store.conversations.attach("", "unknown", b"{}")
    before = store.conversations.num_bytes
    store.restart()
    assert (
        store.conversations.find_answer("", answer).records == {answer: b'{"id": 1}'}
        and store.conversations.num_bytes == before
    )


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_the_files(store, caplog):
    store.folder.chmod(0o500)
    if os.access(store.folder, os.W_OK):
        store.folder.rename(store.folder.with_name("moved"))
    for content in ("One?", "Two?"):
        store.turn("c", content)
    store.conversations.settle()
    assert len([record for record in caplog.records if "cannot write" in record.message]) == 1
    assert store.said("c")["c/Two?"] == ["One?", "Two?"]
    moved = store.folder.with_name("moved")
    if moved.exists():
        moved.rename(store.folder)
    store.folder.chmod(0o700)
    store.turn("c", "Three?")
    store.conversations.settle()
    assert any("can write" in record.message for record in caplog.records) and len(files(store.folder)) == 1
