"""The engines that a front may have as its upstream: how each one counts tokens and reports cached tokens."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic

import msgspec

from ..ordering.document import Document
from ..ordering.prompt import document_text
from ..server.http.api_errors import RequestError
from .chat_documents import NO_JSON
from .events import data_of, split
from .lengths import Lengths
from .prefills import Prefill
from .upstream import Headers, Upstream, credentials_of

# ---- The tokens of a prompt as each engine reports them in its answer, read while the answer passes. --------------------

MOST_TOKENS = 1 << 31  # the largest figure that is read: integers of JSON may be too large for any float
FIGURES = re.compile(rb'"(?:usage|timings|slotcache)"\s*:\s*\{')  # in an answer's text, the quotes would be escaped

TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|refusal)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{')
"""Finds a token in a chunk of an answer. A chunk with the role alone may come before the first token."""


@dataclass(frozen=True, slots=True)
class EngineFeedback:
    """What an engine reports of a prompt: the number of tokens, and the number of cached tokens; None for a number that is
    not reported.

    documents: the ids of the documents in the order of the prompt; empty if they are not reported.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    documents: tuple[str, ...] = ()

    @classmethod
    def read(cls, answer: object) -> EngineFeedback:
        """Return the figures of a decoded answer, or of a chunk of it."""
        usage, timings = _part(answer, "usage"), _part(answer, "timings")
        cached = _first(
            _number(_part(usage, "prompt_tokens_details"), "cached_tokens"),  # OpenAI, vLLM, SGLang, llama-server
            _number(usage, "prompt_cache_hit_tokens"),  # DeepSeek
            _number(timings, "cache_n"),  # llama-server
        )
        computed = _number(timings, "prompt_n")
        prompt = computed + cached if computed is not None and cached is not None else None
        return cls(_first(_number(usage, "prompt_tokens"), prompt), cached, _ids(_part(answer, "slotcache")))

    def __or__(self, later: EngineFeedback) -> EngineFeedback:
        """Return the newest value of each figure."""
        return EngineFeedback(
            _first(later.prompt_tokens, self.prompt_tokens),
            _first(later.cached_tokens, self.cached_tokens),
            later.documents or self.documents,
        )


class FirstChunk:
    """Records the time of an answer's first token. Reads nothing else from the answer.

    prefill: measures how long the prompt waits for this token.
    """

    def __init__(self, prefill: Prefill | None) -> None:
        self._prefill = prefill

    def events(self, events: bytes) -> bytes:
        if self._prefill is not None and TOKEN.search(events):
            self._prefill.token()
            self._prefill = None
        return events

    def body(self, status: int, body: bytes) -> None:
        pass


class Listener(FirstChunk):
    """Records the time of the first token, as `FirstChunk` does, and also reads what the answer reports of its prompt.

    hides_usage: whether the chunk with the usage is removed, since the client did not ask for it.
    feedback: what the answer reports; None before the first token, and for an answer with an error.
    """

    def __init__(self, hides_usage: bool, prefill: Prefill | None = None) -> None:
        super().__init__(prefill)
        self._hides_usage = hides_usage
        self.feedback: EngineFeedback | None = None

    def events(self, events: bytes) -> bytes:
        waited = self._prefill
        super().events(events)
        if self._prefill is not waited:
            self.feedback = self.feedback or EngineFeedback()
        if not FIGURES.search(events):
            return events
        return b"".join(event for event in split(events) if self._is_shown(event))

    def body(self, status: int, body: bytes) -> None:
        if status == 200:
            self.feedback = EngineFeedback.read(decode(body))

    def _is_shown(self, event: bytes) -> bool:
        if not FIGURES.search(event):
            return True
        chunk = decode(data_of(event))
        self.feedback = (self.feedback or EngineFeedback()) | EngineFeedback.read(chunk)
        return not (self._hides_usage and _part(chunk, "choices") == [] and _part(chunk, "usage") is not None)


def decode(data: bytes) -> object:
    """Return decoded JSON; None if the data is not JSON."""
    try:
        return msgspec.json.decode(data)
    except NO_JSON:
        return None


def _ids(report: object) -> tuple[str, ...]:
    documents = _part(report, "documents")
    ids = [_part(document, "id") for document in documents] if isinstance(documents, list) else []
    return tuple(id for id in ids if isinstance(id, str))


def _part(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else None


def _number(value: object, name: str) -> int | None:
    number = _part(value, name)
    return number if isinstance(number, int) and 0 <= number <= MOST_TOKENS else None


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)


@dataclass(frozen=True, slots=True)
class EngineApi:
    """The API of an engine.

    knows_documents: whether the engine orders documents itself, and gets requests unchanged.
    reports_in_streams: whether a stream reports its tokens even if the client does not ask for the usage.
    text_field: the field of `POST /tokenize` for the text; empty if the engine has no such route.
    no_begin: the field of `POST /tokenize` that is set to false, so that the engine adds no BOS token.
    """

    name: str
    knows_documents: bool = False
    reports_in_streams: bool = False
    text_field: str = ""
    no_begin: str = ""


ENGINES = {
    engine.name: engine
    for engine in (
        EngineApi("slotcache", knows_documents=True, reports_in_streams=True, text_field="content", no_begin="add_special"),
        EngineApi("llama", reports_in_streams=True, text_field="content", no_begin="add_special"),
        EngineApi("vllm", text_field="prompt", no_begin="add_special_tokens"),
        EngineApi("sglang", text_field="prompt", no_begin="add_special_tokens"),
        EngineApi("openai"),
    )
}
ASK_AGAIN = 30.0  # seconds until the next question, if the upstream has no list of models
NO_ROUTE = (404, 405, 501)  # statuses of routes that an engine does not have for any client
OWNERS = {"llamacpp": "llama", "vllm": "vllm", "sglang": "sglang", "slotcache": "slotcache"}
"""The engine, by the `owned_by` of its models."""


class Finder:
    """Finds out once which engine the upstream is.

    dialect: the engine's name, or `auto` to ask the upstream.
    """

    def __init__(self, upstream: Upstream, dialect: str) -> None:
        self._upstream = upstream
        self._known = ENGINES.get(dialect)
        self._until = inf

    async def engine(self, headers: Headers) -> EngineApi:
        """Return the engine that the upstream's list of models names.

        headers: the headers of the client's request.
        """
        if self._known is not None and monotonic() < self._until:
            return self._known
        try:
            answer = await self._upstream.fetch("GET", "/v1/models", headers)
        except RequestError:
            return ENGINES["openai"]  # for now: the answer to the request itself will say what is wrong
        if answer.status not in (200, *NO_ROUTE):
            return ENGINES["openai"]  # this client may not read the list, or not now; another client may
        self._known = ENGINES[OWNERS.get(_owner(answer.body), "openai")]
        self._until = inf if answer.status == 200 else monotonic() + ASK_AGAIN
        return self._known


def _owner(body: bytes) -> str:
    """Return the owner of the first model in a list of models; empty if the body is no such list."""
    try:
        models = decode(body)
        first = models["data"][0] if isinstance(models, Mapping) else {}
        return str(first.get("owned_by", ""))
    except (LookupError, TypeError, AttributeError):
        return ""


# ---- Tokens of new documents, counted by the upstream in the background. ------------------------------------------------

MAX_WAITING = 200  # documents; the tokens of further documents are guessed by their characters
LONGEST = 50_000  # characters, likewise


@dataclass(frozen=True, slots=True)
class Waiting:
    """A document whose tokens are to be counted.

    headers, model: the credentials and the model of the request that brought the document, so that the document's text is
        sent under the client's own key.
    """

    text: str
    engine: EngineApi
    headers: Headers
    model: bytes


class Counting:
    """Asks the upstream's `/tokenize` once for each new document, one at a time. For one event loop only."""

    def __init__(self, upstream: Upstream, lengths: Lengths) -> None:
        self._upstream, self._lengths = upstream, lengths
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()  # by the documents' keys
        self._working: asyncio.Task[None] | None = None
        self._has_route = True

    def add(self, documents: Iterable[Document], engine: EngineApi, headers: Headers, model: bytes) -> None:
        """Queue documents for counting.

        headers: the headers of the request that brought the documents.
        model: the model's name in the request, as JSON.
        """
        if not self._has_route or not engine.text_field:
            return
        own = credentials_of(headers)
        for document in documents:
            if len(self._waiting) < MAX_WAITING and len(document.text) <= LONGEST and document.key not in self._lengths:
                self._waiting.setdefault(document.key, Waiting(document_text(document), engine, own, model))
        if self._waiting and (self._working is None or self._working.done()):
            self._working = asyncio.create_task(self._work())

    def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        """Count the tokens of all waiting documents. If the upstream fails, drop all waiting documents.

        After a failure, the counting starts again when a new document is added.
        """
        while self._waiting:
            key, asked = self._waiting.popitem(last=False)
            body = {"model": msgspec.Raw(asked.model), asked.engine.text_field: asked.text, asked.engine.no_begin: False}
            try:
                answer = await self._upstream.fetch("POST", "/tokenize", asked.headers, msgspec.json.encode(body))
            except RequestError:
                self._waiting.clear()
                return
            if (tokens := _count_in(answer.body)) is not None:
                self._lengths.count(key, tokens)
            elif answer.status in NO_ROUTE:
                self._has_route = False
                self._waiting.clear()


def _count_in(body: bytes) -> int | None:
    """Return the number of tokens in an answer; None if it has no tokens."""
    answer = decode(body)
    tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
    return len(tokens) if isinstance(tokens, list) else None
