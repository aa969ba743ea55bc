"""The same raw prompts to both servers: are the greedy answers the same tokens, with and without a cache?"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from ..journal import note
from ..report import Bar, BenchError, Report, Table
from ..servers import DATA_VARIABLE, add_options, arms_for
from ..trace import mtrag, prose

PATIENCE = 600.0  # s for an answer
SHORTEST = 150  # words of a prompt; the longest one has twice as many
EQUAL = 0.95  # the share of answers that shall be the same
ONE_BATCH = "--ctx-checkpoints 0"
"""For models with a window or recurrent layers, llama-server keeps a checkpoint in front of a prompt's last 4 tokens. It
computes these by themselves, and fewer than 8 tokens are rounded otherwise. slotcache computes them with the others.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: ids. margins: of each, how much more likely than the second best it was, in nats."""

    tokens: list[int]
    margins: list[float]
    prompt_tokens: int
    cached_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench equality`."""
    add_options(parser, context=4096, slots=1, max_tokens=64)
    parser.set_defaults(flash_attn="off")
    add = parser.add_argument
    add("--prompts", type=int, default=20, help="of 200 to 400 tokens (default: %(default)s)")
    text = "folder with mtrag_retrieved/, whose passages are the prompts; without it they are random sentences"
    add("--data", type=Path, default=os.environ.get(DATA_VARIABLE), help=f"{text} (default: ${DATA_VARIABLE})")


def run(args: argparse.Namespace) -> Report:
    """Ask slotcache without a cache and with one, and llama-server without one. Show where two answers part."""
    lengths = [SHORTEST + SHORTEST * number // args.prompts for number in range(args.prompts)]
    prompts = _passages(args.data, lengths) if args.data else [prose(f"equality {words}", words) for words in lengths]
    answers: dict[str, list[Answer]] = {}
    args.llama_args = f"{ONE_BATCH} {args.llama_args}"
    arms = arms_for(args, llama_slots=1)
    if len(arms) < 2:
        raise BenchError("--llama-server PATH: equality is measured beside it")
    for arm in arms:
        with arm.up() as url:
            answers[f"{arm.name}, no cache"] = [_ask(url, prompt, args.max_tokens, cache=False) for prompt in prompts]
            if arm.name == "slotcache":
                answers["slotcache, cached"] = [_ask_again(url, prompt, args.max_tokens) for prompt in prompts]
    own, cached, theirs = (answers[name] for name in ("slotcache, no cache", "slotcache, cached", "llama-server, no cache"))
    pairs = {"slotcache and llama-server": (own, theirs), "slotcache, no cache and cached": (own, cached)}
    rows = [row for name, (one, other) in pairs.items() for row in _partings(name, one, other)]
    columns = ("answers", "prompt", "its tokens", "they part at", "margin, nats", "of the other")
    reused = sum(answer.cached_tokens for answer in cached) / sum(answer.prompt_tokens for answer in cached)
    bars = [Bar(8, "answers equal to llama-server's, without a cache", _equal(own, theirs), EQUAL, at_least=True)]
    notes = [
        f"with the cache {_equal(own, cached):.0%} of the answers are those without it; it had {reused:.0%} of their prompts"
    ]
    table = Table(f"equality: {args.prompts} prompts, {args.max_tokens} tokens, greedy", columns, rows)
    return Report("equality", [table], bars=bars, notes=notes, data={"arms": [arm.describe() for arm in arms]})


def _passages(folder: Path, lengths: Sequence[int]) -> list[str]:
    """Return the beginnings of passages of the corpus, one for each number of words, from all over it."""
    texts = dict.fromkeys(text for query in mtrag(folder) for _, text in query.documents)
    long = [text for text in texts if len(text.split()) >= lengths[-1]]
    if len(long) < len(lengths):
        raise BenchError(f"--data {folder}: {len(long)} passages are long enough, of {len(lengths)}")
    chosen = long[:: len(long) // len(lengths)]
    return [" ".join(text.split()[:words]) for text, words in zip(chosen, lengths, strict=False)]


def _ask(url: str, prompt: str, max_tokens: int, *, cache: bool) -> Answer:
    fields = {"n_predict": max_tokens, "temperature": 0, "n_probs": 2, "return_tokens": True, "cache_prompt": cache}
    request = Request(f"{url}/completion", json.dumps({"prompt": prompt} | fields).encode())
    with build_opener(ProxyHandler({})).open(request, timeout=PATIENCE) as response:
        answer: dict[str, Any] = json.load(response)
    margins = [_margin(chosen["top_logprobs"]) for chosen in answer["completion_probabilities"]]
    timings = answer["timings"]
    found = Answer(answer["tokens"], margins, timings["prompt_n"] + timings["cache_n"], timings["cache_n"])
    note(url=url, cache=cache, **asdict(found))
    return found


def _ask_again(url: str, prompt: str, max_tokens: int) -> Answer:
    _ask(url, prompt, max_tokens, cache=True)
    return _ask(url, prompt, max_tokens, cache=True)


def _margin(best: Sequence[dict[str, float]]) -> float:
    return best[0]["logprob"] - best[1]["logprob"]


def _equal(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    return sum(a.tokens == b.tokens for a, b in zip(one, other, strict=True)) / len(one)


def _partings(name: str, one: Sequence[Answer], other: Sequence[Answer]) -> Iterator[tuple[str | int | float, ...]]:
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.tokens != b.tokens:
            at = next(at for at, (mine, its) in enumerate(zip_longest(a.tokens, b.tokens)) if mine != its)
            margins = (answer.margins[at] if at < len(answer.margins) else float("nan") for answer in (a, b))
            yield (name, number, a.prompt_tokens, at, *margins)
