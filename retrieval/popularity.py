"""The chunks that questions ask for most, and those that the next question may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .store import Store


def count_uses(store: Store, uses: Mapping[str, int]) -> None:
    """Count more uses of chunks, by their ids. Those that are gone are not counted. It waits for a file that is written."""
    query = """
        insert into popularity select number, ? from chunk where id = ?
        on conflict(chunk) do update set uses = uses + excluded.uses"""
    with store.writing() as connection:
        connection.executemany(query, [(count, id) for id, count in uses.items()])


def likeliest(store: Store, most_tokens: int) -> list[int]:
    """Return the numbers of the likeliest chunks, up to `most_tokens` tokens as they are counted here.

    First those with the most uses, then those of the files changed last, in a file's order.
    """
    chosen: dict[int, None] = {}
    for number, tokens in _by_likelihood(store):
        most_tokens -= 0 if number in chosen else tokens
        if most_tokens < 0:
            break
        chosen[number] = None
    return list(chosen)


def _by_likelihood(store: Store) -> Iterable[tuple[int, int]]:
    """Yield numbers and tokens, some of them twice. A file is read at a time: a search waits for no more."""
    popular = "select number, tokens from popularity join chunk on number = chunk order by uses desc, number"
    newest = "select id from file where state = 'indexed' order by mtime_ns desc, path"
    of_file = """
        select chunk, tokens from place join chunk on chunk.number = place.chunk
        where file = ? order by place.number"""
    with store.reading() as connection:
        rows, files = connection.execute(popular).fetchall(), connection.execute(newest).fetchall()
    yield from rows
    for file in files:
        with store.reading() as connection:
            rows = connection.execute(of_file, file).fetchall()
        yield from rows
