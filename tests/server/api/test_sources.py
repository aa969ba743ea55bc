"""Folders of documents inside the server, over a real port: how they are read, and what the routes show of them."""

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slotcache.models.demo import FILE
from slotcache.models.demo.corpus import SUGGESTED, Corpus
from slotcache.retrieval import Index
from slotcache.server.config.settings import Settings
from slotcache.server.search import folder as folder_module
from slotcache.server.serve import serve, with_bundled_documents
from support.encoders import bert
from support.notes import NOTES, collection, files, is_ready, write

from server.conftest import running, until
from server.engine.test_generations import blocked_step


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus.load().write(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder_index(corpus, tmp_path_factory):
    """A server of the embedded model over the bundled documents."""
    with running(FILE, docs=str(corpus), docs_db=str(tmp_path_factory.mktemp("db")), flash_attn="auto") as up:
        until(lambda: is_ready(up))
        yield up


def test_the_folders_are_listed_page_by_page(folder_index, corpus):
    whole = collection(folder_index)
    assert whole["path"] == str(corpus) and whole["stages"] == ["lexical"]
    assert whole["progress"] == {"unit": "files", "done": 60, "total": 60}
    assert {file["state"] for file in whole["files"]} == {"indexed"}
    assert all(file["chunks"] == 1 and file["vectors"] == 0 for file in whole["files"])
    paths, after = [], ""
    while after is not None:
        page = folder_index.http.get("/v1/sources", params={"limit": 25, "after": after}).json()
        paths += [file["path"] for file in page["collections"][0]["files"]]
        after = page["next"]
    assert paths == [file["path"] for file in whole["files"]] == sorted(path.name for path in corpus.iterdir())
    for limit in ("0", "x", "1001", "²"):
        assert folder_index.http.get("/v1/sources", params={"limit": limit}).status_code == 400


def test_headings_become_questions_and_what_was_not_read_is_counted(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO, "slotcache.docs")
    folder = write(tmp_path / "notes", {"a.md": "# The tides\n\nTwo a day.", "b.md": "# Why two?\n\nThe moon."})
    for name, changed in (("a.md", 2), ("b.md", 1)):
        os.utime(folder / name, (changed, changed))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (folder / ".hidden.md").write_text("Skipped.")
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))
        shown = collection(up)
        assert shown["questions"] == ["What is “The tides” about?", "Why two?"] and shown["not_read"] == 2
        assert shown["progress"] == {"unit": "files", "done": 4, "total": len(shown["files"])}
        assert any("files: 3 new or changed, 0 gone, 2 not read; documents: 2; " in line for line in caplog.messages)
        (folder / "broken.pdf").unlink()
        (folder / ".hidden.md").unlink()
        (folder / "a.md").unlink()
        up.http.post("/v1/sources/refresh", json={})
        until(lambda: is_ready(up) and collection(up)["questions"] == ["Why two?"])
        assert "not_read" not in collection(up)


def test_a_server_without_documents_says_so(server):
    for path in ("/v1/sources", "/v1/sources/abc"):
        answer = server.http.get(path)
        assert answer.status_code == 501 and "--docs" in answer.json()["error"]["message"]
    assert server.http.post("/v1/sources/refresh", json={}).status_code == 501
    assert server.http.get("/props").json()["ui_settings"] == {"sources": False}


def test_another_scope_learns_nothing(folder_index):
    for answer in (
        folder_index.http.get("/v1/sources", params={"scope": "other"}),
        folder_index.http.get("/v1/sources/abc", params={"scope": "other"}),
        folder_index.http.post("/v1/sources/refresh", json={"cache_scope": "other"}),
    ):
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "documents_of_another_scope"
        assert "corpus" not in answer.text


def test_changes_are_noticed_and_files_that_cannot_be_read_have_a_reason(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (folder / "link.md").symlink_to("/etc/hostname")
    (folder / ".hidden").write_text("hidden")
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db")) as up:
        until(lambda: is_ready(up))
        assert up.http.get("/props").json()["ui_settings"] == {"sources": True}
        found = files(up)
        assert {path: file["state"] for path, file in found.items()} == {
            ".hidden": "skipped",
            "broken.pdf": "failed",
            "deep/stone.txt": "indexed",
            "link.md": "skipped",
            "tides.md": "indexed",
        }
        assert all(file["error"] for file in found.values() if file["state"] != "indexed")
        write(folder, {"new.md": "# New\n\nA river of stone."})
        (folder / "tides.md").unlink()
        until(lambda: "new.md" in files(up) and "tides.md" not in files(up))
    assert up.folder_index.index.folders[0].root == folder and not (tmp_path / "db").stat().st_mode & 0o077


def test_folders_whose_names_are_no_text_are_read_and_shown(tiny, tmp_path):
    names = (b"old\xff", rb"old\udcff")
    folders = [write(tmp_path / os.fsdecode(name), {f"{number}.md": f"Note {number}."}) for number, name in enumerate(names)]
    with running(tiny, docs="\n".join(map(str, folders)), docs_db=str(tmp_path / "db")) as up:
        until(lambda: is_ready(up))
        shown = up.http.get("/v1/sources").json()["collections"]
    assert [Path(one["path"]).name for one in shown] == [r"old\xff", r"old\udcff"]
    assert [[file["path"] for file in one["files"]] for one in shown] == [[r"old\udcff/0.md"], [r"old\\udcff/1.md"]]


def test_without_a_watch_changes_wait_for_a_refresh(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))
        write(folder, {"new.md": "# New\n\nA river of stone."})
        assert "new.md" not in files(up)
        assert up.http.post("/v1/sources/refresh", json={}).json()["state"] == "started"
        until(lambda: "new.md" in files(up))


def test_after_a_refresh_ready_means_that_its_changes_are_in(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))
        for number in range(12):
            write(folder, {f"{number}.md": f"# {number}\n\nA river of stone."})
            up.http.post("/v1/sources/refresh", json={})
            if number % 2:  # while the work that it began still runs
                write(folder, {f"{number} more.md": f"# {number}\n\nA river of sand."})
                up.http.post("/v1/sources/refresh", json={})
            until(lambda: is_ready(up))
            assert {f"{number}.md", f"{number} more.md" if number % 2 else f"{number}.md"} <= set(files(up))


def test_an_index_in_its_own_folder_is_no_document_of_it(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(folder / "db")) as up:
        until(lambda: "tides.md" in files(up) and is_ready(up))
        assert all(file["state"] == "skipped" for path, file in files(up).items() if path.startswith("db/"))
        scans, scan = [], up.folder_index.index.scan
        up.folder_index.index.scan = lambda: scans.append(1) or scan()
        write(folder, {"new.md": "# New\n\nA river of stone."})
        until(lambda: "new.md" in files(up))
        time.sleep(1.5)
        assert len(scans) <= 3, "what the index writes is no change"


def test_a_folder_that_changes_all_the_time_is_looked_at_now_and_then(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), docs_watch=False) as up:
        until(lambda: is_ready(up))
        scans, scan = [], up.folder_index.index.scan

        def slow_scan():
            time.sleep(0.1)
            scans.append(time.monotonic())
            return scan()

        up.folder_index.index.scan = slow_scan
        while len(scans) < 4:
            up.folder_index.watcher.refresh()
            time.sleep(0.01)
        assert scans[-1] - scans[0] > 3 * 0.4
        until(lambda: is_ready(up))


def test_several_folders_are_several_collections(tiny, tmp_path):
    first, second = (write(tmp_path / name / "notes", NOTES) for name in "ab")
    with running(tiny, docs=f"{first}\n{second}", docs_db=str(tmp_path / "db")) as up:
        until(lambda: is_ready(up))
        shown = up.http.get("/v1/sources").json()["collections"]
        assert [one["path"] for one in shown] == [str(first), str(second)]
        assert [file["path"] for file in shown[1]["files"]] == ["notes-2/deep/stone.txt", "notes-2/tides.md"]


def test_vectors_are_computed_in_gaps_and_kept(tiny, tmp_path):
    folder, encoder = write(tmp_path / "notes", NOTES), bert(tmp_path / "bert.gguf")
    settings: dict[str, Any] = {"docs": str(folder), "docs_db": str(tmp_path / "db"), "embedding_model": str(encoder)}
    with running(tiny, **settings) as up:
        until(lambda: is_ready(up))
        assert collection(up)["stages"] == ["lexical", "fused"]
        assert all(file["vectors"] == file["chunks"] == 1 for file in files(up).values())
        assert up.vectors.computed.texts == 2
    with running(tiny, **settings) as up:
        until(lambda: is_ready(up))
        assert up.vectors.computed.texts == 0, "the vectors of the last start are still there"


def test_vectors_in_clusters_have_a_stage_and_a_metric(tiny, tmp_path, monkeypatch):
    pytest.importorskip("faiss", reason="pip install 'slotcache[ann]'")
    monkeypatch.setattr(folder_module, "Index", partial(Index, clusters_from=2))
    folder, encoder = write(tmp_path / "notes", NOTES), bert(tmp_path / "bert.gguf")
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db"), embedding_model=str(encoder)) as up:
        until(lambda: collection(up)["stages"] == ["lexical", "provisional", "fused"])
        until(lambda: is_ready(up))
        assert up.metric("slotcache_docs_clusters") == 1
        found = up.http.post("/v1/search", json={"query": "stone"}).json()
        assert found["stage"] == "fused" and len(found["results"]) == 2


def test_files_are_read_while_vectors_wait_for_a_gap(tiny, tmp_path):
    folder, encoder = write(tmp_path / "notes", NOTES), bert(tmp_path / "bert.gguf")
    settings: dict[str, Any] = {"docs": str(folder), "docs_db": str(tmp_path / "db"), "embedding_model": str(encoder)}
    endless = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 20000, "ignore_eos": True, "stream": True}
    with running(tiny, ctx_size=24000, docs_watch=False, **settings) as up:
        until(lambda: is_ready(up))
        with up.http.stream("POST", "/v1/chat/completions", json=endless) as stream:
            lines = stream.iter_lines()
            next(lines)
            with blocked_step(up):
                for name in ("new.md", "newer.md"):
                    write(folder, {name: f"# {name}\n\nA river of stone."})
                    up.http.post("/v1/sources/refresh", json={})
                    until(lambda name=name: name in files(up))
                assert up.service.open and files(up)["new.md"]["vectors"] == files(up)["newer.md"]["vectors"] == 0
        until(lambda: files(up)["new.md"]["vectors"] == files(up)["newer.md"]["vectors"] == 1)


def test_two_servers_have_an_index_each(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    settings: dict[str, Any] = {"docs": str(folder), "docs_db": str(tmp_path / "db")}
    with running(tiny, **settings) as first, running(tiny, **settings) as second:
        until(lambda: is_ready(first) and is_ready(second))
        assert files(first) == files(second)
        assert len(list((tmp_path / "db").glob("*.db"))) == 2
    with running(tiny, **settings):
        assert len(list((tmp_path / "db").glob("*.db"))) == 2


def test_a_server_may_stop_while_it_reads(tiny, tmp_path):
    many = {f"{number}.md": f"# Note {number}\n\nThe number is {number}.\n" for number in range(300)}
    folder = write(tmp_path / "notes", many)
    settings: dict[str, Any] = {"docs": str(folder), "docs_db": str(tmp_path / "db")}
    with running(tiny, **settings) as up:
        until(lambda: up.folder_index.index.progress.chunks > 0)
        assert not is_ready(up)
    with running(tiny, **settings) as up:
        until(lambda: is_ready(up))
        assert up.folder_index.index.progress.chunks == 300
        assert "failed" not in {file["state"] for file in files(up).values()}
        up.folder_index.index.store.check()


def test_a_folder_that_is_not_there_ends_the_start_with_a_line(tmp_path, capsys):
    assert serve(Settings(docs=str(tmp_path / "missing"), port=0, model=str(FILE))) == 2
    assert f"--docs {tmp_path / 'missing'}: there is no such file" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_a_file_without_permission_has_a_reason(tiny, tmp_path):
    folder = write(tmp_path / "notes", NOTES)
    (folder / "tides.md").chmod(0)
    with running(tiny, docs=str(folder), docs_db=str(tmp_path / "db")) as up:
        until(lambda: is_ready(up))
        assert files(up)["tides.md"]["state"] == "failed"


def test_the_built_in_model_comes_with_its_documents_and_questions(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert with_bundled_documents(Settings(docs="mine"), FILE).docs == "mine"
    assert with_bundled_documents(Settings(), tmp_path / "other.gguf").docs == ""
    docs = with_bundled_documents(Settings(), FILE).docs
    with running(FILE, docs=docs) as up:
        until(lambda: is_ready(up))
        shown = collection(up)
    assert shown["path"] == docs and len(shown["files"]) == 60 and shown["questions"] == list(SUGGESTED)
