"""`slotcache docs`: the indexes of folders that were served, and the end of those that nobody uses."""

import logging
import os
import time

import pytest
from slotcache.retrieval.indexes import lock_index, stored_indexes
from slotcache.server.cli import main

from server.conftest import running, until

DAY = 86_400
NOTE = "The ferryman of Skarrow is called Ibo."


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "notes").mkdir()
    (folder / "note.md").write_text(NOTE)
    return folder


@pytest.fixture
def db(tmp_path):
    (db := tmp_path / "db").mkdir(mode=0o700)
    return db


def serve(tiny, folder, db):
    with running(tiny, docs=str(folder), docs_db=str(db), embedding_model="none") as server:
        until(lambda: server.folder_index.watcher.state == "ready")


def docs(capsys, *arguments):
    code = main(["docs", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def age(db, days):
    for file in db.iterdir():
        os.utime(file, (time.time() - days * DAY,) * 2)


def holds_text(db):
    return any(b"ferryman" in file.read_bytes() for file in db.iterdir())


def test_an_index_is_listed_with_its_folder_and_removed_with_its_text(tiny, folder, db, capsys):
    serve(tiny, folder, db)
    (db / "mine.db").write_text("no index")
    (index,) = stored_indexes(db)
    assert holds_text(db) and index.paths == (str(folder),) and index.used > time.time() - DAY
    code, out, _ = docs(capsys, "list", "--docs-db", db)
    assert code == 0 and f"{index.name}  " in out and f"  {folder}\n1 index, " in out
    code, out, _ = docs(capsys, "remove", folder, "--docs-db", db)
    assert code == 0 and out.startswith("1 index removed, 0.")
    assert [file.name for file in db.iterdir()] == ["mine.db"]
    assert docs(capsys, "remove", index.name, "--docs-db", db)[0] == 2
    assert docs(capsys, "list", "--docs-db", db / "none")[1].startswith("0 indexes, 0.0 MiB")


def test_an_index_that_a_server_has_stays(tiny, folder, db, capsys):
    with running(tiny, docs=str(folder), docs_db=str(db), embedding_model="none") as server:
        until(lambda: server.folder_index.watcher.state == "ready")
        age(db, 100)
        code, out, err = docs(capsys, "remove", folder, "--docs-db", db)
        assert code == 2 and out.startswith("0 indexes removed") and "a server uses its index" in err
        assert docs(capsys, "remove", "--unused", 90, "--docs-db", db)[1].startswith("0 indexes removed")
        assert server.http.post("/v1/search", json={"query": "ferryman"}).json()["results"]
    (index,) = stored_indexes(db)
    assert index.used > time.time() - DAY, "the end of the server was its last use"


@pytest.mark.parametrize(("days", "is_kept"), [(89, True), (91, False)])
def test_a_start_removes_the_indexes_that_no_server_had_for_90_days(tiny, folder, db, tmp_path, caplog, days, is_kept):
    serve(tiny, folder, db)
    age(db, days)
    (other := tmp_path / "other").mkdir()
    with caplog.at_level(logging.INFO, "slotcache"):
        serve(tiny, other, db)
    found = [index.paths for index in stored_indexes(db)]
    assert found == [(str(other),), (str(folder),)][: 1 + is_kept] and holds_text(db) == is_kept
    logged = [line for line in caplog.messages if line.startswith(f"the index of {folder} was unused for 90 days: removed ")]
    assert len(logged) == (not is_kept)


def test_a_start_goes_on_where_what_is_old_cannot_be_removed(tiny, folder, db, caplog):
    (db / "0123456789abcdef-300.db").mkdir()
    age(db, 100)
    with caplog.at_level(logging.INFO, "slotcache"):
        serve(tiny, folder, db)
    assert "indexes unused for 90 days cannot be removed: [Errno" in caplog.text


@pytest.mark.parametrize("name", ["two\u2028lines", "two\nlines", "two\x85lines"], ids=["u2028", "newline", "x85"])
def test_a_folder_may_have_any_name(tmp_path, name):
    os.close(lock_index(tmp_path / "0123456789abcdef-300.db", [name, "/notes"]))
    (tmp_path / "0123456789abcdef-300.db").touch()
    assert [index.paths for index in stored_indexes(tmp_path)] == [(name, "/notes")]


def test_an_index_of_an_earlier_version_is_one_too(tiny, folder, db, capsys):
    serve(tiny, folder, db)
    (lock,) = db.glob("*.lock")
    lock.write_text("")
    assert "(made by an earlier version)" in docs(capsys, "list", "--docs-db", db)[1]
    lock.unlink()
    assert len(stored_indexes(db)) == 1
    assert docs(capsys, "remove", "--unused", 0, "--docs-db", db)[1].startswith("1 index removed")
    assert not list(db.iterdir())


def test_a_lock_that_was_removed_is_not_taken_for_the_one_that_is_there(tmp_path, monkeypatch):
    database, opened = tmp_path / "0123456789abcdef-300.db", os.open

    def removing(path, *more):
        descriptor = opened(path, *more)
        if (lock := database.with_suffix(".lock")) == path and not seen:
            seen.append(path)
            lock.unlink()
        return descriptor

    seen = []
    monkeypatch.setattr(os, "open", removing)
    os.close(lock_index(database, ["/notes"]))
    assert seen and database.with_suffix(".lock").read_text() == "/notes"


def test_what_cannot_be_removed_is_one_line(capsys, tmp_path):
    code, out, err = docs(capsys, "remove", "--docs-db", tmp_path)
    assert (code, out) == (2, "") and err.startswith("slotcache: expected an index that `slotcache docs list` shows")
    with pytest.raises(SystemExit):
        main(["docs", "remove", "--unused", "soon"])
    assert capsys.readouterr().err == "slotcache: argument --unused: soon: expected a number of days\n"
