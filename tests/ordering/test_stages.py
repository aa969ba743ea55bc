"""The client's side of a search in stages."""

import asyncio

from slotcache.ordering.policy import read_along

CHAT = {"messages": [{"role": "user", "content": "What is there?"}], "temperature": 0, "stream": True}


async def stages(*found):
    for documents in found:
        yield documents


def sent_for(*found):
    bodies = []

    async def post(path, body):
        assert path == "/v1/speculate"
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


def test_two_turns_have_different_ids():
    assert sent_for()[0][0]["id"] != sent_for()[0][0]["id"]


def test_a_server_that_cannot_be_reached_only_costs_the_head_start():
    async def post(path, body):
        raise ConnectionError("nobody there")

    assert asyncio.run(read_along(post, CHAT, stages(["a"], ["b"]))) == ["b"]
