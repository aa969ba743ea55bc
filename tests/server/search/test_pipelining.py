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


def test_what_stands_in_front_is_started_at_once_and_ends_where_documents_are_handed_over():
    async def shown():
        order = []

        async def front():
            order.append("front")
            try:
                await asyncio.Event().wait()
            finally:
                order.append("ended")

        async def prefill(leading):
            order.append("documents")

        ahead = StagePrefetch(prefill, 0.01)
        ahead.begin(front)
        ahead.show(hits("a"))
        await asyncio.sleep(0)
        started = [*order]
        await ahead.settled()
        await asyncio.sleep(0)
        return started, order

    started, order = asyncio.run(shown())
    assert started == ["front"] and sorted(order) == ["documents", "ended", "front"]


def test_what_stands_in_front_ends_with_a_search_that_is_over():
    async def stopped():
        ended = asyncio.Event()

        async def front():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        ahead = StagePrefetch(front)  # type: ignore[arg-type]
        ahead.begin(front)
        await asyncio.sleep(0)
        ahead.stop()
        await ended.wait()

    asyncio.run(asyncio.wait_for(stopped(), 60))
