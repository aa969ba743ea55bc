"""Prefill while a search still runs: python examples/speculate.py [URL]

The search has two stages. The server prefills the first stage's documents while the second stage runs.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import httpx
from slotcache.ordering.policy import read_along

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
QUESTION = "When does the Skarrow Express leave?"
EXPRESS = {"id": "express", "text": "The departure time of the Skarrow Express is 7:40."}
MUSEUM = {"id": "museum", "text": "The entrance fee of the Clock Museum is six francs."}


async def stages() -> AsyncIterator[list[dict[str, str]]]:
    """A keyword search at once, then a slower search that corrects it."""
    yield [EXPRESS]
    await asyncio.sleep(0.2)
    yield [EXPRESS, MUSEUM]


async def main() -> None:
    chat = {"messages": [{"role": "user", "content": QUESTION}], "cache_prompt": True, "max_tokens": 100, "temperature": 0}
    async with httpx.AsyncClient(base_url=URL, timeout=60) as http:
        documents = await read_along(lambda path, body: http.post(path, json=body), chat, stages())
        answer = (await http.post("/v1/chat/completions", json=chat | {"documents": documents})).json()
    print(f"> {QUESTION}\n{answer['choices'][0]['message']['content']}")
    print(f"  {answer['slotcache']['cached_tokens']} prompt tokens were computed during the search")


asyncio.run(main())
