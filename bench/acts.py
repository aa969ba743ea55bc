"""Acts of a mixed load, one for each route: chats, texts, tokens, cache and conversation routes, wrong requests."""

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from ..models.demo.corpus import Corpus
from .bystanders import PATH, Reader

SCOPES = 6
TURNS = 6  # of a conversation, before the next one begins
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
