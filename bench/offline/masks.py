"""Cost of grammars: the mask of each token, in this process, over a vocabulary as large as those of today's models."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from time import perf_counter

import numpy as np
from gguf import GGUFWriter, TokenType

from ...models.grammar import Grammar, Grammars
from ...models.json_schema import GrammarSource
from ...models.model import Model
from ..journal import note
from ..random_models import PRE_TOKENIZER, Vocabulary, train
from ..report import Bar, Report, Table, median

MERGES = 4000
LIMIT = 0.2  # ms: of the median mask
MOST_TOKENS = 400  # of an answer

TEXT, COUNT, NUMBER = {"type": "string", "maxLength": 60}, {"type": "integer", "minimum": 0}, {"type": "number"}
PERSON = {"name": TEXT, "email": {"type": "string", "format": "email"}, "age": COUNT, "notes": TEXT}
CALL = {"name": {"enum": ["search", "read_file", "write_file"]}, "arguments": {"properties": {"path": TEXT, "query": TEXT}}}
OPTIONS = [f"option {number} of {number % 7}" for number in range(500)]
SCHEMAS = {
    "a record": {"properties": PERSON, "required": list(PERSON), "additionalProperties": False},
    "a list of points": {"items": {"items": NUMBER, "minItems": 2, "maxItems": 2}, "minItems": 8, "maxItems": 16},
    "a call of a function": {"properties": CALL, "required": list(CALL), "additionalProperties": False},
    "some of 500 names": {"items": {"enum": OPTIONS}, "minItems": 10, "maxItems": 10},
    "any object": {"type": "object"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench masks`."""
    add = parser.add_argument
    add("--tokens", type=int, default=150_000, help="of the vocabulary (default: %(default)s)")
    add("--answers", type=int, default=20, help="to each grammar, with random logits (default: %(default)s)")
    add("--model", type=Path, metavar="GGUF", help="measure with the vocabulary of this model instead")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Measure milliseconds a token: of the mask, which another thread computes, and of the thread that chooses tokens."""
    with tempfile.TemporaryDirectory() as folder:
        model = Model(args.model or _write(Path(folder) / "vocabulary.gguf", args.tokens), vocab_only=True)
    grammars = Grammars(model)
    try:
        rows: list[tuple[str, int, float, float, float, float, float]] = []
        masks: list[float] = []
        for name, schema in SCHEMAS.items():
            grammar = grammars.compile(GrammarSource("json_schema", json.dumps(schema))).result()
            times = [time for seed in range(args.answers) for time in _answer(model, grammar, seed)]
            computed, applied, accepted = ([1000 * time for time in column] for column in zip(*times, strict=True))
            masks += map(sum, zip(computed, applied, strict=True))
            late = sorted(computed)[int(0.95 * len(computed))]
            rows.append((name, len(times), median(computed), late, max(computed), median(applied), median(accepted)))
            note(row=rows[-1])
    finally:
        grammars.close()
        model.close()
    columns = ("JSON of", "tokens", "mask median ms", "p95", "most", "put on the logits", "go on, forced tokens")
    title = f"masks: a vocabulary of {model.num_vocab:,} tokens, random logits"
    bars = [Bar(1, "median of a mask and of putting it on the logits", median(masks), LIMIT, unit=" ms")]
    return Report("masks", [Table(title, columns, rows)], bars)


def _answer(model: Model, grammar: Grammar, seed: int) -> list[tuple[float, float, float]]:
    """Return the seconds of each sampled token: its mask, the mask's use, and going on behind it."""
    constraint, random = grammar.start(fast_forward=True), np.random.default_rng(seed)
    constraint.take_forced()
    noise = random.standard_normal((8, model.num_vocab), np.float32)
    times: list[tuple[float, float, float]] = []
    for number in range(MOST_TOKENS):
        logits = noise[number % len(noise)].copy()
        began = perf_counter()
        constraint.compute()
        computed = perf_counter()
        constraint.apply(logits)
        applied = perf_counter()
        token = int(logits.argmax())
        if model.is_end(token):
            break
        chosen = perf_counter()
        constraint.accept(token)
        forced = constraint.take_forced()
        times.append((computed - began, applied - computed, perf_counter() - chosen))
        if forced and model.is_end(forced[-1]):
            break
    return times


def _write(path: Path, size: int) -> Path:
    """Write a vocabulary without weights, in which each token is a text: words, and pairs of words."""
    words = _filled(train(size, min(MERGES, size - 512)))
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.bos)
    writer.add_eos_token_id(words.eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def _filled(words: Vocabulary) -> Vocabulary:
    """Return a vocabulary whose unused tokens are pairs of its words."""
    normal = [token for token, kind in zip(words.tokens, words.types, strict=True) if kind == TokenType.NORMAL]
    free = [at for at, kind in enumerate(words.types) if kind == TokenType.UNUSED]
    known, tokens, types = set(words.tokens), list(words.tokens), list(words.types)
    pairs = (first + second for second, first in product(normal[256:], normal[256:]))
    for at, pair in zip(free, islice(dict.fromkeys(pair for pair in pairs if pair not in known), len(free)), strict=False):
        tokens[at], types[at] = pair, int(TokenType.NORMAL)
    return replace(words, tokens=tuple(tokens), types=tuple(types))
