"""Well-behaved clients beside a fault: what they are answered, whether each request ends once, and what health says."""

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
NUM_PROMPTS = 6  # of each bystander, asked in turn
LOOK = 0.05  # s between two looks at health
SLOW_HEALTH = 2.0  # s: later than this is no answer


@dataclass(frozen=True, slots=True)
class Ending:
    """One request as its client saw it. finals: events that end it, an error being one. refused: there was no server."""

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
        """Seconds between two pieces of text, or between asking and the first one."""
        return max((later - earlier for earlier, later in pairwise(self.arrivals)), default=0.0)

    @property
    def ended_once(self) -> bool:
        """A stream ends with one final event and [DONE], a refusal with its body."""
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
    """When it was asked, then when each piece of text came."""

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
    """What `/health` said, by time: the status, 0 where there was no server, None where there was no answer."""

    looks: list[tuple[float, int | None]] = field(default_factory=list)

    async def watch(self, http: aiohttp.ClientSession) -> None:
        """Look until cancelled."""
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
    """What bystander `number` asks, in a scope of its own: questions with their documents, greedy.

    Each answer ends where the model ends it: what it is forced to say after that hangs on how sums round, which beside
    others is not always the same.
    """
    corpus = Corpus.load()
    chosen = corpus.questions[number * NUM_PROMPTS : (number + 1) * NUM_PROMPTS]
    return [
        {
            "messages": [{"role": "user", "content": one.question}],
            "documents": [{"id": name, "text": corpus.documents[name].text} for name in one.ranked],
            "document_order": "retrieval",  # the same prompt each time, whatever is cached
            "cache_prompt": True,
            "cache_scope": f"bystander {number}",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        for one in chosen
    ]


async def ask(http: aiohttp.ClientSession, body: Mapping[str, Any], timeout: float) -> Ending:
    """One streamed chat. Never raises."""
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
    """One bystander: every prompt once, then over again until it is enough, a request has no end, or there is no server."""
    endings: list[Ending] = []
    while len(endings) < len(bodies) or not enough.is_set():
        endings.append(await ask(http, bodies[len(endings) % len(bodies)], timeout))
        if endings[-1].refused or not endings[-1].ended_once:
            break
    return endings
