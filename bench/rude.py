"""Rude clients, their acts, and the well-behaved ones beside them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ..models.demo.corpus import Corpus
from .server_api import Body

# ---- Bystanders ---------------------------------------------------------------------------------------------------------
# Well-behaved clients beside a fault. They record their answers, how each request ends, and the status of /health.

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


# ---- Acts ---------------------------------------------------------------------------------------------------------------
# Acts of a mixed load, one for each route: chats, texts, tokens, cache and conversation routes, wrong requests.

SCOPES = 6
TURNS = 6  # of a conversation, before the next one begins
LONGEST, MOST_TOKENS = 40, 200  # documents of 30 words in a long prompt, and tokens of its answer
CORPUS = Corpus.load()
TIMEOUT = aiohttp.ClientTimeout(total=120)


class Lost(Exception):
    """A request that was neither answered nor refused with a reason."""


class Visitor:
    """One client of the mixed load. The same seed gives the same acts."""

    def __init__(self, http: aiohttp.ClientSession, seed: int) -> None:
        self._http, self._rng = http, random.Random(f"visitor {seed}")
        self._seed, self._turns = seed, 0
        self._answers: list[tuple[str, str]] = []  # scope and id of stored answers

    async def act(self) -> str:
        """Do one act and return its name. Raises Lost."""
        acts = list(ACTS)
        (name,) = self._rng.choices(acts, [ACTS[act][0] for act in acts])
        try:
            await ACTS[name][1](self)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise Lost(f"{name}: {type(error).__name__}: {error}") from None
        return name

    # ---- chats -----------------------------------------------------------------------------------------------------

    def _chat(self, **more: Any) -> dict[str, Any]:
        asked = self._rng.choice(CORPUS.questions)
        names = self._rng.sample(asked.ranked, self._rng.randint(0, len(asked.ranked)))
        documents = [{"id": name, "text": CORPUS.documents[name].text} for name in names]
        body = {"messages": [{"role": "user", "content": asked.question}], "documents": documents, "max_tokens": 40}
        return body | {"temperature": 0, "cache_prompt": True, "cache_scope": self._scope()} | more

    def _conversation(self) -> str:
        return f"visitor {self._seed} {self._turns // TURNS}"

    def _scope(self) -> str:
        return f"soak {self._rng.randrange(SCOPES)}"

    async def chat(self) -> None:
        await self._answered(self._chat())

    async def stream(self) -> None:
        reader = Reader("")
        async with self._post(PATH, self._chat(stream=True)) as answer:
            if answer.status != 200:
                return await self._check(answer)
            async for line in answer.content:
                reader.read(line)
        if reader.finals != 1 or not reader.done or reader.error:
            raise Lost(f"a stream had {reader.finals} final events: {reader.error}")

    async def fill(self) -> None:
        """Ask with a long prompt, several of which are more than the pool holds. Each answer must have all its tokens."""
        names = self._rng.choices(list(CORPUS.documents), k=self._rng.randint(1, LONGEST))
        text, wanted = " ".join(CORPUS.documents[name].text for name in names), self._rng.randint(1, MOST_TOKENS)
        prompt = {"messages": [{"role": "user", "content": text}], "documents": [], "ignore_eos": True, "max_tokens": wanted}
        answer = await self._answered(self._chat(**prompt))
        if "usage" in answer and answer["usage"]["completion_tokens"] != wanted:
            raise Lost(f"{answer['usage']['completion_tokens']} tokens instead of {wanted}")

    async def leave(self) -> None:
        async with self._post(PATH, self._chat(stream=True, ignore_eos=True, max_tokens=400)) as answer:
            await answer.content.read(1 + self._rng.randrange(2000))
            answer.close()

    async def converse(self) -> None:
        chat = self._chat(conversation=self._conversation(), cache_scope=f"soak {self._seed % SCOPES}")
        self._turns += 1
        answer = await self._answered(chat)
        if "id" in answer:
            self._answers = [*self._answers[-9:], (chat["cache_scope"], answer["id"])]

    async def branch(self) -> None:
        if not self._answers:
            return await self.converse()
        scope, id = self._rng.choice(self._answers)
        await self._answered(self._chat(cache_scope=scope, previous_response_id=id, store=False))

    async def look_back(self) -> None:
        way = self._rng.choice((self._http.get, self._http.get, self._http.delete))
        scope = f"soak {self._seed % SCOPES}"
        async with way(f"/v1/conversations/{self._conversation()}", params={"scope": scope}, timeout=TIMEOUT) as answer:
            await self._check(answer)

    async def warm(self) -> None:
        await self._answered(self._chat(pin=True, ttl=5), "/v1/cache/warm")

    async def speculate(self) -> None:
        await self._answered(self._chat(id="soak"), "/v1/speculate")

    async def order(self) -> None:
        await self._answered(self._chat(), "/v1/documents/order")

    async def template(self) -> None:
        await self._answered(self._chat(), "/apply-template")

    # ---- other routes --------------------------------------------------------------------------------------------------

    async def complete(self) -> None:
        path = self._rng.choice(("/v1/completions", "/completion"))
        text = self._rng.choice(list(CORPUS.documents.values())).text
        await self._answered({"prompt": text, "max_tokens": 20, "temperature": 0, "cache_prompt": True}, path)

    async def tokens(self) -> None:
        text = self._rng.choice(list(CORPUS.documents.values())).text
        cut = await self._answered({"content": text}, "/tokenize")
        back = await self._answered({"tokens": cut["tokens"]}, "/detokenize")
        if back["content"] != text:
            raise Lost("tokens are not the text that they were cut from")

    async def show(self) -> None:
        paths = ("/health", "/v1/models", "/props", "/slots", "/metrics", "/v1/cache")
        async with self._http.get(self._rng.choice(paths), timeout=TIMEOUT) as answer:
            await self._check(answer)

    async def drop(self) -> None:
        async with self._http.delete("/v1/cache", params={"scope": self._scope()}, timeout=TIMEOUT) as answer:
            await self._check(answer)

    async def slot(self) -> None:
        action = self._rng.choice(("save", "restore", "erase"))
        await self._answered({"filename": f"slot-{self._seed}"}, f"/slots/{self._rng.randrange(2)}?action={action}")

    async def nonsense(self) -> None:
        """Send a wrong request. The server must refuse it with a reason."""
        wrong = self._rng.choice((b"{", b'{"messages": 1}', b"[]", json.dumps(self._chat(messages=[])).encode()))
        async with self._http.post(
            PATH, data=wrong, headers={"Content-Type": "application/json"}, timeout=TIMEOUT
        ) as answer:
            if answer.status != 400:
                raise Lost(f"nonsense was answered {answer.status}")
            await self._check(answer)

    # ---- sending -------------------------------------------------------------------------------------------

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._http.post(path, json=body, timeout=TIMEOUT)

    async def _answered(self, body: Mapping[str, Any], path: str = PATH) -> dict[str, Any]:
        async with self._post(path, body) as answer:
            await self._check(answer)
            return json.loads(await answer.read())

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        """Accept an answer, or a refusal with a reason. Raises Lost for any error of the server itself."""
        content = await answer.read()
        is_refusal = answer.status < 500 or answer.status in (501, 503)
        if answer.status < 400 or (is_refusal and "error" in json.loads(content)):
            return
        raise Lost(
            f"{answer.method} {answer.url.path} was answered {answer.status}: {content[:200].decode(errors='replace')}"
        )


ACTS: dict[str, tuple[int, Callable[[Visitor], Awaitable[None]]]] = {
    "chat": (6, Visitor.chat),
    "stream": (8, Visitor.stream),
    "fill": (2, Visitor.fill),
    "leave": (3, Visitor.leave),
    "converse": (6, Visitor.converse),
    "branch": (2, Visitor.branch),
    "look back": (1, Visitor.look_back),
    "warm": (1, Visitor.warm),
    "speculate": (2, Visitor.speculate),
    "order": (1, Visitor.order),
    "template": (1, Visitor.template),
    "complete": (2, Visitor.complete),
    "tokens": (2, Visitor.tokens),
    "show": (2, Visitor.show),
    "drop": (1, Visitor.drop),
    "slot": (1, Visitor.slot),
    "nonsense": (1, Visitor.nonsense),
}
"""By name: the weight of an act in the mix, and the act."""


UNREAD = 2048  # bytes of the client's receive buffer
AT_ONCE = 2  # clients that do not read: they must not take all slots
PACE = 0.5  # s between two clients, and between two bytes of a slow client
PROMISED = 4 << 20  # Content-Length of a body that never ends
SENT = 1 << 20


def _request(length: int) -> bytes:
    lines = (f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _body(question: str, max_tokens: int) -> bytes:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "cache_scope": "rude", "cache_prompt": True}
    return json.dumps(body).encode()


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD)
    connection.settimeout(10)
    connection.connect((parts.hostname, parts.port))
    return connection


async def stall(url: str, count: int, tokens: int) -> list[socket.socket]:
    """Request long streams without reading them, a few at a time. Return the open connections."""
    connections: list[socket.socket] = []
    for number in range(count):
        connection = await asyncio.to_thread(_connected, url)
        body = _body(f"Tell me about number {number}.", tokens)
        await asyncio.to_thread(connection.sendall, _request(len(body)) + body)
        connections.append(connection)
        if number % AT_ONCE:
            await asyncio.sleep(PACE)
    return connections


async def leave(url: str, count: int, seed: int = 0) -> None:
    """Connect and disconnect: within the head, within the body, before the answer, or during it."""
    rng = random.Random(seed)
    for number in range(count):
        connection = await asyncio.to_thread(_connected, url)
        body = _body(f"What is number {number}?", 200)
        whole = _request(len(body)) + body
        part = rng.choice((10, len(whole) - 20, len(whole), len(whole)))
        connection.sendall(whole[:part])
        if part == len(whole) and rng.random() < 0.7:
            await asyncio.to_thread(connection.recv, 1 + rng.randrange(600))
        if rng.random() < 0.5:  # with a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def dawdle(url: str, count: int, patience: float) -> int:
    """Send bodies that never end: half of the clients stop after a part, half send a byte now and then.

    Return the number of connections that the server still holds after `patience` seconds.
    """
    async with asyncio.TaskGroup() as clients:
        held = [clients.create_task(_dawdle(url, number % 2 == 0, patience)) for number in range(count)]
    return sum(task.result() for task in held)


async def _dawdle(url: str, stops: bool, patience: float) -> bool:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    dripping = asyncio.create_task(_send(writer, stops))
    try:
        await asyncio.wait_for(reader.read(), patience)  # reads to the end of the connection, with or without an answer
        return False
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        dripping.cancel()
        writer.close()


async def _send(writer: asyncio.StreamWriter, stops: bool) -> None:
    writer.write(_request(PROMISED) + (b" " * SENT if stops else b""))
    while not stops and not writer.is_closing():  # a closed connection accepts bytes and drops them
        writer.write(b" ")
        await asyncio.sleep(PACE)
