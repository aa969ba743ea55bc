"""Simulates eviction policies on traces, and measures their hit rates."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...slots.costs import Profile
from ...slots.eviction import POLICIES, EvictionPolicy
from ...slots.host import HostMemory
from ...slots.prefix_tree import PrefixTree
from ...slots.radix import Node
from ...slots.scope import Scope
from ..journal import note
from ..report import Bar, Report, Table
from ..servers import DATA_VARIABLE
from ..trace import mtrag

# ---- The traces of the simulation: the accesses of a cache over time, as prompts of blocks. -----------------------------
#
# A block stands for `BLOCK` tokens of a prompt. In Mooncake's trace, it stands for 512 tokens, and its name also depends on
# the blocks before it.

BLOCK = 16  # tokens
SYSTEM = 6  # blocks of the system prompt at the start of every prompt
QUESTION = 2  # blocks of a question, which no other prompt has
ANSWER = 6  # blocks of an answer in the history
WORDS_TO_TOKENS = 1.3


@dataclass(frozen=True, slots=True)
class Accesses:
    """A trace. prompts: the blocks of each prompt (int32), and the ends of its documents. tokens: the tokens of a block."""

    name: str
    prompts: Sequence[tuple[np.ndarray, tuple[int, ...]]]
    tokens: int = BLOCK

    @property
    def footprint(self) -> int:
        """The blocks in an unlimited cache, which are as many as the different prefixes."""
        return len({prefix for blocks, _ in self.prompts for prefix in prefixes(blocks)})


def prefixes(blocks: np.ndarray) -> list[Hashable]:
    """Return a name for each prefix of a prompt; equal prefixes have equal names."""
    names, name = [], 0
    for block in blocks.tolist():
        name = hash((name, block))
        names.append(name)
    return names


def skewed(requests: int = 4000, documents: int = 1000, hot: float = 0.03, share: float = 0.6, k: int = 2) -> Accesses:
    """Return a random trace with RAGCache's skew (section 3.2): 3 % of the documents get 60 % of the retrievals.

    The documents' lengths vary widely.
    """
    rng = random.Random(0)
    lengths = [max(4, round(rng.lognormvariate(4.5, 0.8))) for _ in range(documents)]
    popular = round(documents * hot)
    blocks = _Blocks()

    def draw() -> int:
        return rng.randrange(popular) if rng.random() < share else rng.randrange(popular, documents)

    prompts = []
    for number in range(requests):
        chosen: list[int] = []
        while len(chosen) < k:
            if (document := draw()) not in chosen:
                chosen.append(document)
        prompts.append(blocks.prompt([(f"d{one}", lengths[one]) for one in chosen], f"q{number}"))
    return Accesses("skewed", prompts)


def conversations(folder: Path) -> Accesses:
    """Return MT-RAG's conversations. A turn's prompt has all earlier turns, with documents from a real retriever."""
    blocks = _Blocks()
    histories: dict[str, list[tuple[str, int]]] = {}
    prompts = []
    for query in mtrag(folder, active=8):
        history = histories.setdefault(query.session, [])
        history += [(text, _num_blocks(text)) for _, text in query.documents]
        asked = f"{query.session} {query.turn}"
        prompts.append(blocks.prompt(history, asked))
        history += [(asked, QUESTION), (f"{asked} answered", ANSWER)]
    return Accesses("MT-RAG", prompts)


def mooncake(folder: Path, name: str = "conversation") -> Accesses:
    """Return an hour of production requests, with 512 tokens per block."""
    with gzip.open(folder / "mooncake" / f"{name}_trace.jsonl.gz", "rt") as lines:
        rows = [np.array(json.loads(line)["hash_ids"], np.int32) for line in lines]
    return Accesses("Mooncake", [(row, tuple(range(1, len(row)))) for row in rows if len(row)], tokens=512)


class _Blocks:
    """Numbers the blocks of texts. Equal texts have the same numbers."""

    def __init__(self) -> None:
        self._known: dict[str, np.ndarray] = {}
        self._next = 0

    def prompt(self, parts: Sequence[tuple[str, int]], question: str) -> tuple[np.ndarray, tuple[int, ...]]:
        pieces = [self.of("system", SYSTEM), *(self.of(*part) for part in parts), self.of(question, QUESTION)]
        ends = np.cumsum([len(piece) for piece in pieces])
        return np.concatenate(pieces), tuple(ends[:-1].tolist())

    def of(self, text: str, size: int) -> np.ndarray:
        if text not in self._known:
            self._known[text] = np.arange(self._next, self._next + size, dtype=np.int32)
            self._next += size
        return self._known[text]


def _num_blocks(text: str) -> int:
    return max(1, round(len(text.split()) * WORDS_TO_TOKENS / BLOCK))


NEVER = 1 << 40
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
OPTIMUM = "optimum"
BY = ("tokens", "time")
REQUIRED = 1.06  # RAGCache, section 7.4: 1.06 to 1.62 times LRU's hit rate
DEEPER = 0.75 / 1000
"""The extra cost of a token for each token before it: on 2 cores, token 1,000 costs 1.75 times the first token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench replacement`."""
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with mtrag_retrieved/ and mooncake/")
    add("--requests", type=int, default=4000, help="most requests of each trace, 0 for all (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure hit rates by tokens and by time, with capacities that are shares of a trace's footprint."""
    traces = [skewed()]
    notes = []
    if args.data and Path(args.data).is_dir():
        traces += [conversations(Path(args.data)), mooncake(Path(args.data))]
    else:
        notes.append(f"without --data PATH or {DATA_VARIABLE}: only the skewed trace, which is made here")
    tables, rates = [], {by: {trace.name: {} for trace in traces} for by in BY}
    for trace in traces:
        trace = Accesses(trace.name, trace.prompts[: args.requests or None], trace.tokens)
        footprint = trace.footprint
        for share in SHARES:
            print(f"  {trace.name}: {share:.0%} of {footprint:,} blocks", file=sys.stderr, flush=True)
            found = _rates(trace, round(share * footprint))
            for at, by in enumerate(BY):
                rates[by][trace.name][share] = {policy: rate[at] for policy, rate in found.items()}
            note(trace=trace.name, share=share, **{f"by_{by}": rates[by][trace.name][share] for by in BY})
        tables += [_table(trace.name, footprint, rates[by][trace.name], by) for by in BY]
    margins = [rate["pgdsf"] / rate["lru"] for rate in rates["tokens"]["skewed"].values()]
    bars = [Bar(2, "least hit rate of PGDSF over LRU's, skewed", min(margins), REQUIRED, at_least=True, unit="x")]
    data = {"hit_rates": rates["tokens"], "time_rates": rates["time"]}
    return Report("replacement", tables, bars=bars, notes=notes, data=data)


SCOPE = Scope.shared("")


def hit_rates(trace: Accesses, capacity: int, replacement: EvictionPolicy) -> tuple[float, float]:
    """Return the share of all blocks that were cached, and the share of the computing time that this saved.

    The host tier has `capacity` blocks. Before each request runs, all idle KV moves from the pool to this tier.
    """
    longest = max(len(blocks) for blocks, _ in trace.prompts)
    profile = _Costs(trace.tokens)
    tree = PrefixTree(2 * longest, 8, HostMemory(capacity, replacement), profile=profile)
    foresight = replacement if isinstance(replacement, Foresight) else None
    hits = total = 0
    saved = seconds = 0.0
    for number, (blocks, stops) in enumerate(trace.prompts):
        if foresight:
            foresight.now = number
        sequence = tree.claim(SCOPE, blocks, stops).sequence
        if foresight:
            foresight.now = None
        while tree.evict():
            pass
        tree.copies.restore(sequence)
        hits += sequence.length
        total += len(blocks)
        saved += profile.seconds(0, sequence.length)
        seconds += profile.seconds(0, len(blocks))
        tree.device.advance(sequence, len(blocks))
        tree.release(sequence)
        tree.device.take_operations()
    return hits / total, saved / seconds


class Foresight(EvictionPolicy):
    """Evicts the run (a node of the prefix tree) whose next use is latest (Belady). No policy can be much better.

    now: the number of the current request; None while runs only move between tiers.
    """

    def __init__(self, trace: Accesses) -> None:
        super().__init__()
        self.now: int | None = None
        self._next_use = _next_uses(trace)
        self._known: dict[Node, float] = {}

    def priority(self, node: Node) -> float:
        if self.now is not None:
            self._known[node] = -float(self._next_use[self.now][node.end - 1])
        return self._known.get(node, node.host_priority)


class _Costs(Profile):
    """The cost of a prompt token by its position, as measured on a CPU."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._by_depth = DEEPER * tokens


def _next_uses(trace: Accesses) -> list[np.ndarray]:
    """Return, for each prefix of each prompt, the number of the next prompt with the same prefix."""
    coming: dict[Hashable, int] = {}
    uses: list[np.ndarray] = []
    for number in reversed(range(len(trace.prompts))):
        names = prefixes(trace.prompts[number][0])
        uses.append(np.array([coming.get(name, NEVER) for name in names]))
        coming.update(dict.fromkeys(names, number))
    return uses[::-1]


def _rates(trace: Accesses, capacity: int) -> dict[str, tuple[float, float]]:
    rates = {policy: hit_rates(trace, capacity, EvictionPolicy(policy)) for policy in POLICIES}
    return rates | {OPTIMUM: hit_rates(trace, capacity, Foresight(trace))}


def _table(name: str, footprint: int, rates: dict[float, dict[str, float]], by: str) -> Table:
    policies: Sequence[str] = [*POLICIES, OPTIMUM]
    percents = {share: [100 * rate[policy] for policy in policies] for share, rate in rates.items()}
    rows = [(f"{share:.0%}", *percents[share], rate["pgdsf"] / rate["lru"]) for share, rate in rates.items()]
    return Table(f"{name}: hit rate by {by}, %, of {footprint:,} blocks", ("capacity", *policies, "pgdsf over lru"), rows)
