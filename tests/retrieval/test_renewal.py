"""An index of an older form: it answers until the new one has all files, and what was computed for the same texts stays."""

import asyncio
import sqlite3

import numpy as np
import pytest
from slotcache.retrieval import Embedder, Index, Query, writing
from slotcache.retrieval.store import count_uses, likeliest

VERSION_3 = """
create table origin(name text primary key, value text not null) without rowid;
create table file(
    id integer primary key, path text unique not null, size integer not null, mtime_ns integer not null,
    ctime_ns integer not null, hash text not null, state text not null, reason text not null);
create table chunk(
    number integer primary key autoincrement, id text not null, key text unique not null, title text not null,
    text text not null, tokens integer not null);
create index chunk_id on chunk(id);
create table place(
    file integer not null, number integer not null, chunk integer not null, page integer, start integer not null,
    stop integer not null, primary key (file, number)) without rowid;
create index place_chunk on place(chunk);
create table vector(chunk integer primary key, x blob not null);
create table popularity(chunk integer primary key, uses integer not null);
create view told as select number, spaced(title) as title, spaced(text) as text from chunk;
create virtual table words using fts5(
    title, text, content='told', content_rowid='number', tokenize='porter unicode61');
create trigger chunk_removed after delete on chunk begin
    insert into words(words, rowid, title, text) values ('delete', old.number, spaced(old.title), spaced(old.text));
    delete from vector where chunk = old.number;
    delete from popularity where chunk = old.number;
end;
pragma user_version = 3;
"""
"""The tables as they were before texts had a language."""

OLD_TABLES = {
    3: VERSION_3,
    4: VERSION_3.replace("reason text not null", "reason text not null, left_out text not null default '{}'").replace(
        "= 3", "= 4"
    ),
}

NOTES = {
    "tides": "The moon raises two tides a day.",
    "ports": "The port closes at low water.",
    "old": "A note that is old.",
}


class Counting:
    def __init__(self):
        self.texts = []

    def __call__(self, texts):
        self.texts += texts
        return np.ones((len(texts), 8), np.float32)


@pytest.fixture
def folder(folder):
    for name, text in NOTES.items():
        (folder / f"{name}.md").write_text(text)
    return folder


def put_old(version, tmp_path, make):
    """Write an index of an old version of the notes, with the chunks that this version makes, and one more."""
    index = make(Counting())
    index.refresh()
    chunks = index.store.chunks(index.store.all_numbers().tolist()).values()
    with index.store.reading() as connection:
        keys = dict(connection.execute("select number, key from chunk"))
    index.close()
    for path in tmp_path.glob("index*"):
        path.unlink()
    old = sqlite3.connect(tmp_path / "index.db", isolation_level=None)
    old.create_function("spaced", 1, lambda text: text)
    old.executescript(OLD_TABLES[version])
    old.executemany("insert into origin values (?, ?)", [("chunks", "1, 300 tokens"), ("vectors", "letters")])
    for at, chunk in enumerate(chunks, 1):
        path = chunk.places[0].path
        columns = "id, path, size, mtime_ns, ctime_ns, hash, state, reason"
        old.execute(f"insert into file({columns}) values (?, ?, 1, 1, 1, 'x', 'indexed', '')", (at, path))
        row = (at, chunk.id, keys[chunk.number], chunk.title, chunk.text, chunk.tokens)
        old.execute("insert into chunk values (?, ?, ?, ?, ?, ?)", row)
        old.execute("insert into words(rowid, title, text) values (?, ?, ?)", (at, chunk.title, chunk.text))
        old.execute("insert into place values (?, 1, ?, null, 0, ?)", (at, at, len(chunk.text)))
        old.execute("insert into vector values (?, ?)", (at, np.full(8, at, np.float16).tobytes()))
    old.execute("insert into popularity values (2, 7)")
    old.close()


def found(index, question, embed=None):
    return [hit.chunk.text for hit in asyncio.run(index.search(embed).hits(Query(text=question, min_score=0.0)))]


async def embed_query(text):
    return np.ones(8, np.float32)


@pytest.mark.parametrize("version", OLD_TABLES)
def test_an_index_of_an_old_version_answers_until_all_files_are_read(version, folder, make, tmp_path):
    put_old(version, tmp_path, make)
    (folder / "old.md").unlink()
    (folder / "new.md").write_text("The tide of today is high.")
    embed = Counting()
    index = make(embed)
    assert index.progress.chunks == 0 and found(index, "tides") == [NOTES["tides"]]
    assert len(found(index, "tides", embed_query)) == 3, "its vectors are searched, too"
    (first,) = asyncio.run(index.search().hits(Query(text="tides")))
    assert [chunk.text for chunk in index.expand(first.chunk.id)] == [NOTES["tides"]]
    assert found(index, "note") == [NOTES["old"]]
    scan, seen = index.scan(), []
    assert len(scan.changed) == 3 == index.progress.files_left

    def look():
        seen.append((index.progress.files_left, sorted(found(index, "tides"))))
        return len(seen) < 4

    assert not index.read_all(scan.changed, look)
    assert {left for left, _ in seen} >= {3, 2} and {tuple(texts) for _, texts in seen} == {(NOTES["tides"],)}
    index = make(embed)
    assert found(index, "tides") == [NOTES["tides"]], "it answers after a new start as well"
    assert index.refresh() and not embed.texts[1:] and embed.texts == ["The tide of today is high."]
    assert sorted(found(index, "tides")) == [NOTES["tides"], "The tide of today is high."] and not found(index, "note")
    assert index.progress.vectors == index.progress.chunks == 3
    (popular,) = index.store.chunks(likeliest(index.store, 10)[:1]).values()
    assert popular.text == {at: text for at, text in enumerate(sorted(NOTES.values()), 1)}.get(0, popular.text)
    assert sorted(path.name for path in tmp_path.glob("index*.db")) == ["index.db"]
    index.store.check()


def test_uses_are_kept(make, tmp_path, monkeypatch):
    index = make()
    index.refresh()
    (hit,) = asyncio.run(index.search().hits(Query(text="tides")))
    count_uses(index.store, {hit.chunk.id: 5})
    index.close()
    monkeypatch.setattr(writing, "VERSION", writing.VERSION + 1)
    monkeypatch.setattr("slotcache.retrieval.store.READABLE", range(3, writing.VERSION + 1))
    index = make()
    assert found(index, "tides") == [NOTES["tides"]] and index.progress.chunks == 0
    assert index.refresh()
    (first,) = index.store.chunks(likeliest(index.store, 100)[:1]).values()
    assert first.id == hit.chunk.id


def test_a_file_of_a_strange_version_is_made_anew(make, tmp_path):
    make().refresh()
    make().close()
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("pragma user_version = 2")
    connection.close()
    index = make()
    assert index.progress.chunks == 0 and found(index, "tides") == []
    assert index.refresh() and found(index, "tides") == [NOTES["tides"]]


def test_a_damaged_old_index_is_removed(make, tmp_path):
    (tmp_path / "index.old.db").write_bytes(b"no database" * 1000)
    index = make()
    assert index.refresh() and found(index, "tides") == [NOTES["tides"]]
    assert not (tmp_path / "index.old.db").exists()


@pytest.mark.parametrize("version", OLD_TABLES)
def test_an_old_index_that_another_process_has_open_answers(version, make, tmp_path):
    put_old(version, tmp_path, make)
    other = sqlite3.connect(tmp_path / "index.db", isolation_level=None)
    try:
        other.execute("pragma journal_mode = wal")
        other.execute("update popularity set uses = 8")
        index = make()
        assert index.progress.chunks == 0 and found(index, "tides") == [NOTES["tides"]]
        assert index.refresh() and found(index, "tides") == [NOTES["tides"]]
        index.store.check()
        (popular,) = index.store.chunks(likeliest(index.store, 10)[:1]).values()
        assert popular.text in NOTES.values()
    finally:
        other.close()


def test_two_servers_renew_one_index(folder, make, tmp_path):
    put_old(4, tmp_path, make)
    first = make(Counting())
    second = Index([folder], tmp_path / "index.db", embedder=Embedder("letters", embed := Counting()))
    try:
        assert found(first, "tides") == found(second, "tides") == [NOTES["tides"]]
        assert first.refresh() and found(first, "tides") == [NOTES["tides"]]
        assert found(second, "tides") == [NOTES["tides"]]
        assert second.refresh() and found(second, "tides") == [NOTES["tides"]]
        assert not embed.texts and sorted(path.name for path in tmp_path.glob("index*.db")) == ["index.db"]
    finally:
        second.close()
    assert found(make(), "tides") == [NOTES["tides"]], "it starts again"


def test_an_empty_old_index_is_removed(make, tmp_path):
    (tmp_path / "index.old.db").touch()
    index = make()
    assert index.refresh() and found(index, "tides") == [NOTES["tides"]]
    assert not (tmp_path / "index.old.db").exists()
