"""Retrieval and prefill at the same time: a search that finds its documents in stages, with a server that reads along.

RAGCache, section 5.3 (dynamic speculative pipelining): what a vector search holds for the best so far often is what it
ends with, and prefilling that meanwhile costs nobody anything where the machine is idle.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import TypeVar

D = TypeVar("D")
Post = Callable[[str, dict[str, object]], Awaitable[object]]
"""Sends a JSON body to a path of the server, e.g. `lambda path, body: client.post(path, json=body)` of an httpx client."""


async def read_along(post: Post, chat: Mapping[str, object], stages: AsyncIterable[list[D]]) -> list[D]:
    """Have the server prefill while a search goes on; its last stage's documents, to be sent with the chat.

    chat: the body of the chat completion to come, without documents. stages: the best documents so far, the last stage's
    being the result; a stage like the one before is not sent again. Whatever fails here only costs the head start.
    """
    turn: dict[str, object] = {**chat, "id": secrets.token_hex(8), "stream": False}
    await _tell(post, turn)
    documents: list[D] = []
    async for found in stages:
        if found != documents:
            documents = found
            await _tell(post, turn | {"documents": documents})
    return documents


async def _tell(post: Post, body: dict[str, object]) -> None:
    with contextlib.suppress(Exception):
        await post("/v1/speculate", body)
