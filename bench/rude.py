"""Clients of a server under attack: well-behaved bystanders, visitors that make a mixed load, and rude clients."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from time import monotonic, perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ..models.demo.corpus import Corpus
from .report import BenchError
from .server_api import Body

PATH = "/v1/chat/completions"
CORPUS = Corpus.load()

# ---- Bystanders ---------------------------------------------------------------------------------------------------------
# Well-behaved clients beside an attack. They record their answers, how each request ends, and the status of /health.

NUM_PROMPTS = 6  # prompts of each bystander
BETWEEN = 0.2  # s between two texts for the tokeniser
LOOK = 0.05  # s between two polls of /health
SLOW_HEALTH = 2.0  # s until an answer is too late to count


@dataclass(slots=True)
class Ending:
    """One request, as its client saw it.

    finals: the number of events that end the stream, including error events.
    done: whether the stream had its [DONE] line.
    refused: whether the server accepted no connection.
    arrivals: the time of the request, then the time of each piece of text.
    """

    prompt: str
    status: int = 0
    text: str = ""
    finals: int = 0
    done: bool = False
    error: str | None = None
    refused: bool = False
    arrivals: list[float] = field(default_factory=list)

    @property
    def longest_gap(self) -> float:
        """Seconds between two pieces of text, or between the request and the first piece."""
        return max((later - earlier for earlier, later in pairwise(self.arrivals)), default=0.0)

    @property
    def ended_once(self) -> bool:
        """Whether the stream ended with one final event and [DONE], or the request with one error body."""
        return self.refused or (self.finals == 1 and (self.done or self.status != 200))

    def read(self, line: bytes) -> None:
        """Read one line of the stream."""
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


@dataclass(slots=True)
class Health:
    """The status of `/health` over time: 0 if the connection was refused, None if no answer arrived in time."""

    looks: list[tuple[float, int | None]] = field(default_factory=list)

    async def watch(self, http: aiohttp.ClientSession) -> None:
        """Poll until cancelled."""
        while True:
            await self.look(http)
            await asyncio.sleep(LOOK)

    async def look(self, http: aiohttp.ClientSession) -> None:
        at, status = perf_counter(), None
        try:
            async with http.get("/health", timeout=aiohttp.ClientTimeout(total=SLOW_HEALTH)) as answer:
                status = answer.status
        except TimeoutError:
            pass
        except aiohttp.ClientError:
            status = 0
        self.looks.append((at, status))


def chats(number: int, max_tokens: int) -> list[Body]:
    """Return the chats of bystander `number`, in its own cache scope: greedy questions with their documents.

    Each answer ends with the model's end token. Tokens forced after it would depend on rounding, and so on the other
    requests in a step.
    """
    return [
        {
            "messages": [{"role": "user", "content": one.question}],
            "documents": [{"id": name, "text": CORPUS.documents[name].text} for name in one.ranked],
            "document_order": "retrieval",  # a fixed order, so that the cache does not change the prompt
            "cache_prompt": True,
            "cache_scope": f"bystander {number}",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        for one in CORPUS.questions[number * NUM_PROMPTS : (number + 1) * NUM_PROMPTS]
    ]


def texts(number: int) -> list[Body]:
    """Return the texts that bystander `number` sends to the tokeniser, which needs no slot."""
    return [{"content": one.question} for one in CORPUS.questions[number * NUM_PROMPTS : (number + 1) * NUM_PROMPTS]]


async def ask(http: aiohttp.ClientSession, body: Mapping[str, Any], timeout: float) -> Ending:
    """Stream one chat, or tokenise one text. Never raises."""
    is_chat, answered = "messages" in body, False
    name = f"{body['cache_scope']}: {body['messages'][-1]['content']}" if is_chat else body["content"]
    ending = Ending(name, arrivals=[perf_counter()])
    try:
        path = PATH if is_chat else "/tokenize"
        async with http.post(path, json=body, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
            answered = True
            if response.status != 200:
                ending.error, ending.finals = json.loads(await response.read())["error"]["message"], 1
            elif is_chat:
                async for line in response.content:
                    ending.read(line)
            else:
                ending.text, ending.finals, ending.done = await response.text(), 1, True
                ending.arrivals.append(perf_counter())
            ending.status = response.status
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        # The connection ended without a response. A server that is shutting down may not have read the request.
        ending.error, ending.refused = str(error), not answered
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        ending.error = f"{type(error).__name__}: {error}"
    return ending


async def live(
    http: aiohttp.ClientSession, bodies: Sequence[Mapping[str, Any]], enough: asyncio.Event, timeout: float
) -> list[Ending]:
    """Ask as one bystander: send every prompt once, then again from the first one, until `enough` is set.

    The bystander stops early if a request does not end properly or the server refuses the connection.
    """
    endings: list[Ending] = []
    while len(endings) < len(bodies) or not enough.is_set():
        body = bodies[len(endings) % len(bodies)]
        endings.append(await ask(http, body, timeout))
        if endings[-1].refused or not endings[-1].ended_once:
            break
        await asyncio.sleep(0.0 if "messages" in body else BETWEEN)
    return endings


# ---- Visitors -----------------------------------------------------------------------------------------------------------
# Clients that make a mixed load: chats, texts, tokens, the routes of cache and conversations, and wrong requests.

SCOPES = 6
TURNS = 6  # turns of a conversation, before the next conversation begins
LONGEST, MOST_TOKENS = 40, 200  # the most documents (of 30 words) in a long prompt, and the most tokens of its answer
SHOWN = ("/health", "/v1/models", "/props", "/slots", "/metrics", "/v1/cache")
COMPLETION = {"max_tokens": 20, "temperature": 0, "cache_prompt": True}
SAVED, FILE = ("save", "restore", "erase"), {"filename": "slot"}
TIMEOUT = aiohttp.ClientTimeout(total=120)


class Lost(Exception):
    """A request was neither answered nor refused with a reason."""


Act = Callable[["Visitor"], Awaitable[object]]


class Visitor:
    """One client of the mixed load. The same seed chooses the same acts."""

    def __init__(self, http: aiohttp.ClientSession, seed: int) -> None:
        self._http, self.rng = http, random.Random(f"visitor {seed}")
        self.seed, self._turns = seed, 0
        self._answers: list[tuple[str, str]] = []  # scope and id of stored answers

    async def act(self) -> str:
        """Do one act and return its name. Raises Lost."""
        (name,) = self.rng.choices(list(ACTS), [weight for weight, _ in ACTS.values()])
        try:
            await ACTS[name][1](self)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise Lost(f"{name}: {type(error).__name__}: {error}") from None
        return name

    async def stream(self) -> None:
        ending = Ending("")
        async with self._post(PATH, self.chat(stream=True)) as answer:
            if answer.status != 200:
                return await self._check(answer)
            async for line in answer.content:
                ending.read(line)
        if ending.finals != 1 or not ending.done or ending.error:
            raise Lost(f"a stream had {ending.finals} final events: {ending.error}")

    async def fill(self) -> None:
        """Ask with a prompt so long that the pool has no room for several. Each answer must have all its tokens."""
        names = self.rng.choices(list(CORPUS.documents), k=self.rng.randint(1, LONGEST))
        text, wanted = " ".join(CORPUS.documents[name].text for name in names), self.rng.randint(1, MOST_TOKENS)
        prompt = {"messages": [{"role": "user", "content": text}], "documents": [], "ignore_eos": True, "max_tokens": wanted}
        answer = await self.answered(PATH, self.chat(**prompt))
        if "usage" in answer and answer["usage"]["completion_tokens"] != wanted:
            raise Lost(f"{answer['usage']['completion_tokens']} tokens instead of {wanted}")

    async def disconnect(self) -> None:
        async with self._post(PATH, self.chat(stream=True, ignore_eos=True, max_tokens=400)) as answer:
            await answer.content.read(1 + self.rng.randrange(2000))
            answer.close()

    async def converse(self) -> None:
        chat = self.chat(conversation=self.conversation, cache_scope=self.own_scope)
        self._turns += 1
        answer = await self.answered(PATH, chat)
        if "id" in answer:
            self._answers = [*self._answers[-9:], (chat["cache_scope"], answer["id"])]

    async def branch(self) -> None:
        if not self._answers:
            return await self.converse()
        scope, id = self.rng.choice(self._answers)
        await self.answered(PATH, self.chat(cache_scope=scope, previous_response_id=id, store=False))

    async def tokens(self) -> None:
        text = self.text()
        cut = await self.answered("/tokenize", {"content": text})
        if (await self.answered("/detokenize", {"tokens": cut["tokens"]}))["content"] != text:
            raise Lost("tokens are not the text that they were cut from")

    async def nonsense(self) -> None:
        """Send a wrong request. The server must refuse it with a reason."""
        wrong = self.rng.choice((b"{", b'{"messages": 1}', b"[]", json.dumps(self.chat(messages=[])).encode()))
        headers = {"Content-Type": "application/json"}
        async with self._http.post(PATH, data=wrong, headers=headers, timeout=TIMEOUT) as answer:
            if answer.status != 400:
                raise Lost(f"nonsense was answered {answer.status}")
            await self._check(answer)

    def chat(self, **more: Any) -> dict[str, Any]:
        asked = self.rng.choice(CORPUS.questions)
        names = self.rng.sample(asked.ranked, self.rng.randint(0, len(asked.ranked)))
        documents = [{"id": name, "text": CORPUS.documents[name].text} for name in names]
        body = {"messages": [{"role": "user", "content": asked.question}], "documents": documents, "max_tokens": 40}
        return body | {"temperature": 0, "cache_prompt": True, "cache_scope": self.any_scope} | more

    def text(self) -> str:
        return self.rng.choice(list(CORPUS.documents.values())).text

    @property
    def conversation(self) -> str:
        return f"visitor {self.seed} {self._turns // TURNS}"

    @property
    def own_scope(self) -> str:
        return f"soak {self.seed % SCOPES}"

    @property
    def any_scope(self) -> str:
        return f"soak {self.rng.randrange(SCOPES)}"

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._http.post(path, json=body, timeout=TIMEOUT)

    async def answered(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._post(path, body) as answer:
            await self._check(answer)
            return json.loads(await answer.read())

    async def asked(self, method: str, path: str, **params: str) -> None:
        async with self._http.request(method, path, params=params, timeout=TIMEOUT) as answer:
            await self._check(answer)

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        """Accept an answer, or a refusal with a reason. Raises Lost for an error of the server itself."""
        content = await answer.read()
        is_refusal = answer.status < 500 or answer.status in (501, 503)
        if answer.status < 400 or (is_refusal and "error" in json.loads(content)):
            return
        reason = content[:200].decode(errors="replace")
        raise Lost(f"{answer.method} {answer.url.path} was answered {answer.status}: {reason}")


def _chats(path: str = PATH, **more: Any) -> Act:
    """Return an act that sends a chat's body to a route."""
    return lambda visitor: visitor.answered(path, visitor.chat(**more))


ACTS: dict[str, tuple[float, Act]] = {
    "chat": (6, _chats()),
    "stream": (8, Visitor.stream),
    "fill": (2, Visitor.fill),
    "leave": (3, Visitor.disconnect),
    "converse": (6, Visitor.converse),
    "branch": (2, Visitor.branch),
    "look back": (0.7, lambda one: one.asked("GET", f"/v1/conversations/{one.conversation}", scope=one.own_scope)),
    "forget": (0.3, lambda one: one.asked("DELETE", f"/v1/conversations/{one.conversation}", scope=one.own_scope)),
    "warm": (1, _chats("/v1/cache/warm", pin=True, ttl=5)),
    "speculate": (2, _chats("/v1/speculate", id="soak")),
    "order": (1, _chats("/v1/documents/order")),
    "template": (1, _chats("/apply-template")),
    "complete": (1, lambda one: one.answered("/v1/completions", {"prompt": one.text(), **COMPLETION})),
    "complete natively": (1, lambda one: one.answered("/completion", {"prompt": one.text(), **COMPLETION})),
    "tokens": (2, Visitor.tokens),
    "show": (2, lambda one: one.asked("GET", one.rng.choice(SHOWN))),
    "drop": (1, lambda one: one.asked("DELETE", "/v1/cache", scope=one.any_scope)),
    "slot": (1, lambda one: one.answered(f"/slots/{one.rng.randrange(2)}?action={one.rng.choice(SAVED)}", FILE)),
    "nonsense": (1, Visitor.nonsense),
}
"""The acts by name, each with its weight in the mix."""


# ---- Rude clients -------------------------------------------------------------------------------------------------------

UNREAD = 2048  # bytes of the client's receive buffer
AT_ONCE = 2  # clients without reading that start together: they must not take all slots
PACE = 0.5  # s between two clients, and between two bytes of a slow client
BACK = 1.0  # s until a client whose connection was closed opens another one
HALVES = (
    b"",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
)
"""What clients send before they wait: nothing, half a head, half a body, or a request whose connection they keep open."""


def _request(length: int) -> bytes:
    lines = (f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


ENDLESS = ((_request(4 << 20) + b" " * (1 << 20), False), (_request(4 << 20), True))
"""Requests whose bodies never end: one stops after a part, the other sends a byte now and then."""


def _question(question: str, max_tokens: int) -> bytes:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "cache_scope": "rude", "cache_prompt": True}
    sent = json.dumps(body).encode()
    return _request(len(sent)) + sent


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD)
    connection.settimeout(10)
    connection.connect((parts.hostname, parts.port))
    return connection


async def stall(url: str, count: int, tokens: int) -> list[socket.socket]:
    """Start long streams, a few at a time, without reading them. Return the open connections."""
    connections: list[socket.socket] = []
    for number in range(count):
        connection = await asyncio.to_thread(_connected, url)
        await asyncio.to_thread(connection.sendall, _question(f"Tell me about number {number}.", tokens))
        connections.append(connection)
        if number % AT_ONCE:
            await asyncio.sleep(PACE)
    return connections


async def disconnect(url: str, count: int, seed: int = 0) -> None:
    """Connect and disconnect: within the head, within the body, before the answer, or during the answer."""
    rng = random.Random(seed)
    for number in range(count):
        connection = await asyncio.to_thread(_connected, url)
        whole = _question(f"What is number {number}?", 200)
        part = rng.choice((10, len(whole) - 20, len(whole), len(whole)))
        connection.sendall(whole[:part])
        if part == len(whole) and rng.random() < 0.7:
            await asyncio.to_thread(connection.recv, 1 + rng.randrange(600))
        if rng.random() < 0.5:  # with a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def dawdle(url: str, count: int, patience: float) -> int:
    """Send bodies that never end. Return how many connections are still open after `patience` seconds."""
    bodies = (body for _, body in zip(range(count), cycle(ENDLESS), strict=False))
    kept = await asyncio.gather(*(_keep_open(url, sent, patience, drips=drips) for sent, drips in bodies))
    return sum(is_open for _, is_open in kept)


def crowd(url: str, count: int, seconds: float) -> int:
    """Keep connections half open, and replace each one that the server closes. Return how many were opened in all.

    Needs a separate process, whose limit of open files it raises. Raises BenchError if this limit is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < count + 100:
        raise BenchError(f"this bench opens {count:,} connections itself: raise its own `ulimit -n`")

    async def all_of_them() -> int:
        halves = (sent for _, sent in zip(range(count), cycle(HALVES), strict=False))
        kept = await asyncio.gather(*(_keep_open(url, sent, seconds, again=True) for sent in halves))
        return sum(opened for opened, _ in kept)

    return asyncio.run(all_of_them())


async def _keep_open(url: str, sent: bytes, seconds: float, *, drips: bool = False, again: bool = False) -> tuple[int, bool]:
    """Send a part of a request, and read until the server closes the connection or `seconds` pass.

    drips: continue to send a byte now and then.
    again: open another connection when the server closes one.

    Return how many connections were opened, and whether the last connection is still open at the end.
    """
    parts, end, opened = urlsplit(url), monotonic() + seconds, 0
    while (left := end - monotonic()) > 0 and (again or not opened):
        try:
            async with asyncio.timeout(left):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                opened += 1
                dripping = asyncio.create_task(_drip(writer)) if drips else None
                try:
                    writer.write(sent)
                    while await reader.read(1 << 16):
                        pass
                finally:
                    if dripping:
                        dripping.cancel()
                    writer.close()
        except TimeoutError:
            return opened, True
        except OSError:
            pass
        if again:
            await asyncio.sleep(min(BACK, max(end - monotonic(), 0.0)))
    return opened, False


async def _drip(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():  # a closed connection accepts bytes and drops them
        await asyncio.sleep(PACE)
        writer.write(b" ")
