"""The tables of the index, and the rules that hold in each whole index."""

from __future__ import annotations

SCHEMA_VERSION = 3

SCHEMA = (
    "create table origin(name text primary key, value text not null) without rowid",
    """create table file(
        id integer primary key, path text unique not null, size integer not null, mtime_ns integer not null,
        ctime_ns integer not null, hash text not null, state text not null, reason text not null)""",
    """create table chunk(
        number integer primary key autoincrement, id text not null, key text unique not null, title text not null,
        text text not null, tokens integer not null)""",
    "create index chunk_id on chunk(id)",
    """create table place(
        file integer not null, number integer not null, chunk integer not null, page integer, start integer not null,
        stop integer not null, primary key (file, number)) without rowid""",
    "create index place_chunk on place(chunk)",
    "create table vector(chunk integer primary key, x blob not null)",
    "create table popularity(chunk integer primary key, uses integer not null)",
    # `spaced` is a function of each connection: see `unspaced`.
    "create view told as select number, spaced(title) as title, spaced(text) as text from chunk",
    # Not contentless: deleting from that needs SQLite 3.43. No trigger adds to it: a statement with a trigger is a
    # savepoint, where FTS5 writes out what it has, and a chunk takes a third more time.
    """create virtual table words using fts5(
        title, text, content='told', content_rowid='number', tokenize='porter unicode61')""",
    """create trigger chunk_removed after delete on chunk begin
        insert into words(words, rowid, title, text) values ('delete', old.number, spaced(old.title), spaced(old.text));
        delete from vector where chunk = old.number;
        delete from popularity where chunk = old.number;
    end""",
)
TABLES = ("origin", "file", "chunk", "place", "vector", "popularity", "words")

VIOLATIONS = {
    "a place without its file": "select 1 from place left join file on file.id = place.file where file.id is null",
    "a place without its chunk": "select 1 from place left join chunk on chunk.number = place.chunk where id is null",
    "a chunk in no file": "select 1 from chunk where not exists (select 1 from place where place.chunk = chunk.number)",
    "a vector without its chunk": "select 1 from vector left join chunk on number = vector.chunk where number is null",
    "uses without their chunk": """
        select 1 from popularity left join chunk on number = popularity.chunk where number is null""",
    "a file with a gap": "select 1 from place group by file having max(number) != count(*) or min(number) != 1",
    "an indexed file without chunks": """
        select 1 from file where (state = 'indexed') != exists (select 1 from place where place.file = file.id)""",
}
