"""Retrieval and prefill at the same time, for a search that finds its documents in stages.

RAGCache, section 5.3 (dynamic speculative pipelining): the best documents of an early stage are often the final ones.
Their prefill during the search costs other requests nothing while the machine is idle.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import TypeVar

D = TypeVar("D")
Post = Callable[[str, dict[str, object]], Awaitable[object]]
"""Sends a JSON body to a path of the server. With httpx: `lambda path, body: client.post(path, json=body)`."""


async def read_along(post: Post, chat: Mapping[str, object], stages: AsyncIterable[list[D]]) -> list[D]:
    """Have the server prefill during a search. Return the documents of the last stage, to be sent with the chat.

    chat: the body of the later chat completion, without documents. stages: after each stage the best documents so far, in
    rank; the last stage is the result. A stage that changes nothing is not sent. An error of `post` is ignored: it costs
    only the head start.
    """
    turn: dict[str, object] = {**chat, "id": secrets.token_hex(8), "stream": False}
    await _speculate(post, turn)
    documents: list[D] = []
    async for found in stages:
        if found != documents:
            documents = found
            await _speculate(post, turn | {"documents": documents})
    return documents


async def _speculate(post: Post, body: dict[str, object]) -> None:
    with contextlib.suppress(Exception):
        await post("/v1/speculate", body)
