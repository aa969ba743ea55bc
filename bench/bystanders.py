"""Well-behaved clients beside a fault. They record their answers, how each request ends, and the status of /health."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import aiohttp

from ..models.demo.corpus import Corpus
from .dialect import Body

PATH = "/v1/chat/completions"
NUM_PROMPTS = 6  # of each bystander, asked in this order
LOOK = 0.05  # s between two polls of /health
SLOW_HEALTH = 2.0  # s: a later answer does not count


@dataclass(frozen=True, slots=True)
class Ending:
    """One request as its client saw it.

    finals: the number of events that end the stream; an error is one. refused: no server accepted the connection.
    """

    prompt: str
    status: int = 0
    text: str = ""
    finals: int = 0
    done: bool = False
    error: str | None = None
    refused: bool = False
    arrivals: tuple[float, ...] = ()

    @property
    def longest_gap(self) -> float:
        """Seconds between two pieces of text, or between the request and the first piece."""
        return max((later - earlier for earlier, later in pairwise(self.arrivals)), default=0.0)

    @property
    def ended_once(self) -> bool:
        """Whether the stream ended with one final event and [DONE], or the request with one error body."""
        return self.refused or (self.finals == 1 and (self.done or self.status != 200))


@dataclass(slots=True)
class Reader:
    """The events of one stream."""

    prompt: str
    text: str = ""
    finals: int = 0
    done: bool = False
    error: str | None = None
    arrivals: list[float] = field(default_factory=lambda: [perf_counter()])
    """The time of the request, then of each piece of text."""

    def read(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        data = line[6:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.finals, self.error = self.finals + 1, str(event["error"].get("message"))
        for choice in event.get("choices") or ():
            if piece := choice["delta"].get("content"):
                self.text += piece
                self.arrivals.append(perf_counter())
            self.finals += choice["finish_reason"] is not None

    def ending(self, status: int = 0, error: str | None = None) -> Ending:
        failed = error or self.error
        return Ending(
            self.prompt,
            status=status,
            text=self.text,
            finals=self.finals,
            done=self.done,
            error=failed,
            arrivals=tuple(self.arrivals),
        )


@dataclass(slots=True)
class Health:
    """The status of `/health` over time: 0 if the connection was refused, None if no answer came in time."""

    looks: list[tuple[float, int | None]] = field(default_factory=list)

    async def watch(self, http: aiohttp.ClientSession) -> None:
        """Poll until cancelled."""
        while True:
            self.looks.append((perf_counter(), await health(http)))
            await asyncio.sleep(LOOK)


async def health(http: aiohttp.ClientSession) -> int | None:
    try:
        async with http.get("/health", timeout=aiohttp.ClientTimeout(total=SLOW_HEALTH)) as answer:
            return answer.status
    except TimeoutError:
        return None
    except aiohttp.ClientError:
        return 0


def prompts(number: int, max_tokens: int) -> list[Body]:
    """Return the requests of bystander `number`, in a scope of its own: greedy questions with their documents.

    Each answer ends with the model's end token. Tokens forced after that token depend on how sums round, and rounding
    depends on the other requests in a step.
    """
    corpus = Corpus.load()
    chosen = corpus.questions[number * NUM_PROMPTS : (number + 1) * NUM_PROMPTS]
    return [
        {
            "messages": [{"role": "user", "content": one.question}],
            "documents": [{"id": name, "text": corpus.documents[name].text} for name in one.ranked],
            "document_order": "retrieval",  # the same prompt each time: the cache must not change it
            "cache_prompt": True,
            "cache_scope": f"bystander {number}",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        for one in chosen
    ]


async def ask(http: aiohttp.ClientSession, body: Mapping[str, Any], timeout: float) -> Ending:
    """Stream one chat. Never raises."""
    reader = Reader(f"{body['cache_scope']}: {body['messages'][-1]['content']}")
    answered = False
    try:
        async with http.post(PATH, json=body, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
            answered = True
            if response.status != 200:
                told = json.loads(await response.read())["error"]["message"]
                return Ending(reader.prompt, response.status, finals=1, error=told)
            async for line in response.content:
                reader.read(line)
            return reader.ending(200)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        # A connection that ends without a head: a server that is going down may not have read the request.
        return reader.ending(error=str(error)) if answered else Ending(reader.prompt, error=str(error), refused=True)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return reader.ending(error=f"{type(error).__name__}: {error}")


async def live(
    http: aiohttp.ClientSession, bodies: Sequence[Mapping[str, Any]], enough: asyncio.Event, timeout: float
) -> list[Ending]:
    """Ask as one bystander: every prompt once, then again from the first, until `enough` is set.

    Stop early if a request does not end properly or the server refuses the connection.
    """
    endings: list[Ending] = []
    while len(endings) < len(bodies) or not enough.is_set():
        endings.append(await ask(http, bodies[len(endings) % len(bodies)], timeout))
        if endings[-1].refused or not endings[-1].ended_once:
            break
    return endings
