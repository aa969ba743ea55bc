"""The stages of a search that are computed ahead: which, and how many."""

import asyncio

from slotcache.retrieval import Hit, StoredChunk
from slotcache.server.http.api_errors import RequestError
from slotcache.server.search.retrieve import StagePrefetch


def hits(*ids):
    return [Hit(chunk=StoredChunk(1, id, "", "text", 1, ()), score=1.0) for id in ids]


async def handed(*stages, delay=0.0, lasts=True, fails=False):
    """The ids that were handed over, for stages one after the other. lasts: each lasts until its own are."""
    found = []

    async def prefill(leading):
        found.append("".join(hit.chunk.id for hit in leading))
        if fails:
            raise RequestError("no room")

    ahead = StagePrefetch(prefill, delay)
    for stage in stages:
        ahead.show(hits(*stage))
        await (ahead.settled() if lasts else asyncio.sleep(0))
    await ahead.settled()
    ahead.stop()
    return found


def test_documents_are_handed_over_where_they_differ():
    assert asyncio.run(handed("abcd", "abcd", "abdc", "bac", "bac", "")) == ["abcd", "abdc", "bac"]


def test_a_short_stage_is_left_out():
    assert asyncio.run(handed("abc", "bac", delay=0.05, lasts=False)) == ["bac"]


def test_an_error_costs_the_head_start_only():
    assert asyncio.run(handed("abc", "bac", fails=True)) == ["abc", "bac"]


def test_nothing_is_handed_over_after_the_stop():
    async def stopped():
        found = []
        ahead = StagePrefetch(found.append, 0.01)  # type: ignore[arg-type]
        ahead.show(hits("a"))
        ahead.stop()
        await asyncio.sleep(0.03)
        return found

    assert asyncio.run(stopped()) == []
