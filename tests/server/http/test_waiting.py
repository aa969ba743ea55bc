"""Requests that wait for a disk, an index or the engine take no thread that others need."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
from slotcache.server.api import endpoint
from slotcache.server.engine import slot_files
from slotcache.server.http.bodies import LARGEST

from server.conftest import DEADLINE, running, until

MANY = min(32, (os.cpu_count() or 1) + 4) + 4  # more than the event loop has threads
LARGE = json.dumps({"content": "Hello", "user": "x" * 100_000}).encode()  # decoded in one of those


def connections(up):
    return len(up.uvicorn.server_state.connections)


@contextmanager
def engine_blocked(up, monkeypatch):
    """The engine stands still between two steps."""
    gate = Event()
    up.service.engine.inbox.put(lambda: gate.wait(DEADLINE))
    try:
        yield
    finally:
        gate.set()


@contextmanager
def disk_blocked(up, monkeypatch):
    """The thread of the disk tier stands still before it deletes anything."""
    (tier,) = up.service.tiers
    gate, forget, drop = Event(), tier._forget, tier.drop
    monkeypatch.setattr(tier, "_forget", lambda scopes: gate.wait(DEADLINE) and forget(scopes))
    monkeypatch.setattr(tier, "drop", lambda scope: drop(scope, DEADLINE))
    try:
        yield
    finally:
        gate.set()


@contextmanager
def conversations_blocked(up, monkeypatch):
    """The thread of stored conversations stands still before it writes anything."""
    files = up.service.conversations._files
    gate, change = Event(), files._change
    monkeypatch.setattr(files, "_change", lambda *given: gate.wait(DEADLINE) and change(*given))
    try:
        yield
    finally:
        gate.set()


@contextmanager
def index_blocked(up, monkeypatch):
    """Somebody reads the index of the documents for long."""
    with up.host.folder_index.index.store.reading():
        yield


@pytest.mark.parametrize(
    ("blocked", "method", "path", "body"),
    [
        (engine_blocked, "POST", "/slots/0?action=restore", {"filename": "kept"}),
        (disk_blocked, "DELETE", "/v1/cache?scope=s{}", None),
        (conversations_blocked, "DELETE", "/v1/conversations/c{}", None),
        (index_blocked, "POST", "/v1/search", {"query": "tides"}),
        (index_blocked, "GET", "/v1/sources", None),
    ],
)
def test_however_many_wait_others_have_their_threads(tiny, tmp_path, monkeypatch, blocked, method, path, body):
    (docs := tmp_path / "docs").mkdir()
    (docs / "tides.md").write_text("# Tides\n\nTwo tides a day.")
    for folder in ("slots", "cache"):
        (tmp_path / folder).mkdir(mode=0o700)
    folders = {"slot_save_path": str(tmp_path / "slots"), "cache_dir": str(tmp_path / "cache"), "docs": str(docs)}
    with running(tiny, **folders, docs_db=str(tmp_path / "db")) as up, ThreadPoolExecutor(MANY) as clients:
        up.chat("Two tides a day. " * 10, cache_prompt=True)
        assert up.http.post("/slots/0?action=save", json={"filename": "kept"}).status_code == 200
        if blocked is conversations_blocked:
            for number in range(MANY):
                up.chat(conversation=f"c{number}", cache_prompt=True, max_tokens=1)
        before = connections(up)
        with blocked(up, monkeypatch):
            waiting = [clients.submit(up.http.request, method, path.format(number), json=body) for number in range(MANY)]
            until(lambda: connections(up) >= min(before + MANY - 1, MANY))
            assert up.http.post("/tokenize", content=LARGE).status_code == 200
            assert not all(one.done() for one in waiting)
        assert {one.result().status_code for one in waiting} == {200}


def test_one_history_at_a_time_is_copied_for_a_file(tiny, tmp_path, monkeypatch):
    gate, write, copied = Event(), slot_files.record_file.write, []
    monkeypatch.setattr(slot_files.record_file, "write", lambda *given: gate.wait(DEADLINE) and write(*given))
    with running(tiny, slot_save_path=str(tmp_path), parallel=1) as up, ThreadPoolExecutor(3) as clients:
        up.chat("Two tides a day.", cache_prompt=True)
        save = up.service.view.slot_store._histories.save
        monkeypatch.setattr(up.service.view.slot_store._histories, "save", lambda slot: (copied.append(1), save(slot))[1])
        body = {"filename": "a"}
        saves = [clients.submit(up.http.post, "/slots/0?action=save", json=body) for _ in range(3)]
        try:
            until(lambda: copied and connections(up) >= 3)
            assert up.http.get("/slots").status_code == 200  # the engine has answered what came before it
            assert len(copied) == 1
        finally:
            gate.set()
        assert {one.result().status_code for one in saves} == {200} and len(copied) == 3


def test_bodies_take_their_room_until_they_are_decoded(tiny, monkeypatch):
    """Else any number of them could wait for a thread, each in memory."""
    gate, decode = Event(), endpoint.decode_request
    monkeypatch.setattr(endpoint, "decode_request", lambda *given: gate.wait(DEADLINE) and decode(*given))
    body = json.dumps({"content": "Hello", "user": "x" * 1_000_000}).encode()
    with running(tiny, max_body=1) as up, ThreadPoolExecutor(LARGEST) as clients:
        room = up.host.bodies.room
        first = [clients.submit(up.http.post, "/tokenize", content=body) for _ in range(LARGEST)]
        until(lambda: up.host.bodies.room < 500_000)
        try:
            refused = up.http.post("/tokenize", content=body)
            assert refused.status_code == 503 and refused.headers["Retry-After"]
        finally:
            gate.set()
        assert [one.result().status_code for one in first] == [200] * LARGEST
        until(lambda: up.host.bodies.room == room)
        assert up.http.post("/tokenize", content=body).status_code == 200
