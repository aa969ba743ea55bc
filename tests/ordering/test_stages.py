"""The client's side of a search in stages."""

import asyncio

from slotcache.ordering.policy import read_along

CHAT = {"messages": [{"role": "user", "content": "What is there?"}], "temperature": 0, "stream": True}


async def stages(*found):
    for documents in found:
        yield documents
        for _ in range(3):  # a stage takes longer than to send it
            await asyncio.sleep(0)


def sent_for(*found):
    bodies = []

    async def post(path, body):
        assert path == "/v1/speculate"
        await asyncio.sleep(0)
        bodies.append(body)

    documents = asyncio.run(read_along(post, CHAT, stages(*found)))
    return bodies, documents


def test_the_turn_is_opened_at_once_and_each_new_stage_is_sent_under_one_id():
    bodies, documents = sent_for(["a"], ["a", "b"], ["c", "b"])
    assert [body.get("documents") for body in bodies] == [None, ["a"], ["a", "b"], ["c", "b"]]
    assert len({body["id"] for body in bodies}) == 1 and documents == ["c", "b"]
    assert all(body["messages"] == CHAT["messages"] for body in bodies)


def test_a_stage_that_changes_nothing_is_not_sent_again():
    bodies, documents = sent_for(["a"], ["a"], ["a"])
    assert len(bodies) == 2 and documents == ["a"]


def test_the_search_does_not_wait_for_the_server_which_gets_the_newest_stage_next():
    bodies, answered = [], asyncio.Event()

    async def post(path, body):
        bodies.append(body.get("documents"))
        await answered.wait()

    async def slow_server():
        async def search():
            for documents in (["a"], ["b"], ["c"]):
                yield documents
                await asyncio.sleep(0)
            answered.set()
            yield ["c"]
            await asyncio.sleep(0.01)
            answered.clear()
            yield ["d"]
            await asyncio.sleep(0.01)

        return await read_along(post, CHAT, search())

    assert asyncio.run(slow_server()) == ["d"], "the answer to the last one is not waited for"
    assert bodies == [None, ["c"], ["d"]]


def test_two_turns_have_different_ids():
    assert sent_for(["a"])[0][0]["id"] != sent_for(["a"])[0][0]["id"]


def test_a_server_that_cannot_be_reached_only_costs_the_head_start():
    async def post(path, body):
        raise ConnectionError("nobody there")

    assert asyncio.run(read_along(post, CHAT, stages(["a"], ["b"]))) == ["b"]
