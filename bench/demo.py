"""`slotcache demo`: asks questions about the bundled documents, each with reuse and without."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

from ..models.demo import FILE
from ..models.demo.corpus import Corpus, CorpusQuestion
from ..slots.child import ends_in_order
from .report import ServerError
from .servers import Server, ServerOptions, events, free_port, slotcache_command

SCRIPT = (
    "Which river does Tarnwick lie on?",
    "Who is the mayor of Tarnwick?",
    "What does Ilse Farrow do?",
    "When is the Tarnwick Hat Fair?",
    "At what time does the Ennick Ferry leave?",
    "When is the Museum of Hats closed?",
)
NUM_DOCUMENTS = 3
TIMEOUT = 60.0  # s for an answer


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ttft: the time to the first token, in seconds. documents: (id, tokens, cached tokens), in prompt order."""

    text: str
    ttft: float
    prompt_tokens: int
    cached_tokens: int
    documents: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question of the script, with an answer with reuse and an answer without."""

    question: CorpusQuestion
    reused: Answer
    computed: Answer


def demo(url: str = "", model: Path | None = None) -> int:
    """Run the conversation on the server at `url`, or on a new server. Return the exit code, 130 after ctrl-C."""
    try:
        with ends_in_order(), _server(url, model) as address:
            steps = []
            for step in converse(address):
                print(_describe(len(steps) + 1, step), flush=True)
                steps.append(step)
        print(_table(steps))
        return 0
    except (ServerError, URLError, TimeoutError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def converse(url: str) -> Iterator[Exchange]:
    """Ask the script turn by turn. The server does not repeat documents that are already in the conversation."""
    corpus = Corpus.load()
    asked = {one.question: one for one in corpus.questions}
    scope = f"demo {time.time_ns()}"  # a new scope, so that KV of an earlier demo is not reused
    ask(url, [{"role": "user", "content": "Hello"}], scope, reuse=False)  # not counted: the first request is slow
    history: list[dict[str, Any]] = []
    for question in (asked[text] for text in SCRIPT):
        found = question.ranked[:NUM_DOCUMENTS]
        documents = [
            {"id": name, "title": corpus.documents[name].title, "text": corpus.documents[name].text} for name in found
        ]
        history.append({"role": "user", "content": question.question, "documents": documents})
        computed = ask(url, history, scope, reuse=False)
        reused = ask(url, history, scope, reuse=True)
        yield Exchange(question, reused, computed)
        history.append({"role": "assistant", "content": reused.text})


def ask(url: str, messages: list[dict[str, Any]], scope: str, reuse: bool) -> Answer:
    """Stream one greedy answer. Raises URLError and TimeoutError."""
    body = {"messages": messages, "max_tokens": 60, "temperature": 0, "stream": True, "cache_prompt": reuse}
    body |= {"stream_options": {"include_usage": True}, "cache_scope": scope}
    text, first, usage, own = "", 0.0, {}, {}
    began = time.perf_counter()
    for event in events(f"{url}/v1/chat/completions", body, TIMEOUT):
        for choice in event.get("choices") or ():
            if piece := choice["delta"].get("content"):
                first = first or time.perf_counter() - began
                text += piece
        usage, own = event.get("usage") or usage, event.get("slotcache") or own
    documents = tuple((one["id"], one["tokens"], one["cached_tokens"]) for one in own.get("documents", ()))
    return Answer(text, first, usage.get("prompt_tokens", 0), own.get("cached_tokens", 0), documents)


@contextmanager
def _server(url: str, model: Path | None) -> Iterator[str]:
    if url:
        yield url.rstrip("/")
        return
    port = free_port()
    with Server(slotcache_command(ServerOptions(model or FILE), port), port) as server:
        yield server.url


def _describe(number: int, step: Exchange) -> str:
    mark = "" if step.reused.text == step.question.answer else f"   (expected: {step.question.answer})"
    lines = [f"{number}. {step.question.question}", f"   {step.reused.text}{mark}"]
    for verb, wanted in (("computed", False), ("reused", True)):
        names = [f"[{name}]" for name, tokens, cached in step.reused.documents if (cached >= tokens) == wanted]
        if names:
            lines.append(f"   {verb}: {' '.join(names)}")
    both = f"first token after {1000 * step.reused.ttft:.0f} ms, without reuse {1000 * step.computed.ttft:.0f} ms"
    return "\n".join([*lines, f"   {step.reused.cached_tokens} of {step.reused.prompt_tokens} tokens reused; {both}", ""])


def _table(steps: list[Exchange]) -> str:
    lines = ["turn  prompt tokens  reused  TTFT ms  without reuse  answer"]
    for number, step in enumerate(steps, 1):
        right = "right" if step.reused.text == step.question.answer else "wrong"
        same = "" if step.reused.text == step.computed.text else ", another without reuse"
        lines.append(
            f"{number:4}  {step.reused.prompt_tokens:13}  {step.reused.cached_tokens:6}  {1000 * step.reused.ttft:7.1f}"
            f"  {1000 * step.computed.ttft:13.1f}  {right}{same}"
        )
    return "\n".join(lines)
