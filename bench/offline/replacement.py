"""Eviction policies compared: the server's own prefix tree and host tier, driven with traces, without computation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from ...slots.eviction import POLICIES, EvictionPolicy
from ...slots.node import Node
from ...slots.profile import Profile
from ...slots.scope import Scope
from ...slots.tiers.host import HostTier
from ...slots.tree import PrefixTree
from ..options import DATA_VARIABLE
from ..report import Bar, Report, Table
from .accesses import Accesses, conversations, mooncake, prefixes, skewed

NEVER = 1 << 40
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
OPTIMUM = "optimum"
REQUIRED = 1.06  # RAGCache, section 7.3: 1.06 to 1.62 times LRU's hit rate
DEEPER = 0.75 / 1000
"""Extra cost of a token for each token before it: on 2 cores, token 1,000 costs 1.75 times the first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench replacement`."""
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with mtrag_retrieved/ and mooncake/")
    add("--requests", type=int, default=4000, help="most requests of each trace, 0 for all (default: %(default)s)")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Return hit rates by tokens, at capacities that are shares of a trace's footprint."""
    traces = [skewed()]
    notes = []
    if args.data and Path(args.data).is_dir():
        traces += [conversations(Path(args.data)), mooncake(Path(args.data))]
    else:
        notes.append(f"without --data PATH or {DATA_VARIABLE}: only the skewed trace, which is made here")
    tables, rates = [], {}
    for trace in traces:
        trace = Accesses(trace.name, trace.prompts[: args.requests or None], trace.tokens)
        footprint = trace.footprint
        rates[trace.name] = {}
        for share in SHARES:
            print(f"  {trace.name}: {share:.0%} of {footprint:,} blocks", file=sys.stderr, flush=True)
            rates[trace.name][share] = _hit_rates(trace, round(share * footprint))
        tables.append(_table(trace.name, footprint, rates[trace.name]))
    margins = [rate["pgdsf"] / rate["lru"] for rate in rates["skewed"].values()]
    bars = [Bar(2, "least hit rate of PGDSF over LRU's, skewed", min(margins), REQUIRED, at_least=True, unit="x")]
    return Report("replacement", tables, bars=bars, notes=notes, data={"hit_rates": rates})


SCOPE = Scope.shared("")


def hit_rate(trace: Accesses, capacity: int, replacement: EvictionPolicy) -> float:
    """Return the share of all blocks that were cached, for a host tier of `capacity` blocks.

    The pool has room for one prompt, so all idle KV moves to the host tier, as in the server.
    """
    longest = max(len(blocks) for blocks, _ in trace.prompts)
    tree = PrefixTree(2 * longest, 8, HostTier(capacity, replacement), profile=_Costs(trace.tokens))
    foresight = replacement if isinstance(replacement, Foresight) else None
    hits = total = 0
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
        tree.ledger.advance(sequence, len(blocks))
        tree.release(sequence)
        tree.ledger.take_operations()
    return hits / total


class Foresight(EvictionPolicy):
    """Evicts the run with the latest next use first (Belady): close to the best hit rate that any policy can reach.

    now: the request whose path is in use; None while runs only move.
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
    """The cost of a prompt token by its depth, as measured on a CPU."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._by_depth = DEEPER * tokens


def _next_uses(trace: Accesses) -> list[np.ndarray]:
    """For each prefix of each prompt, return the number of the next prompt with the same prefix."""
    coming: dict[Hashable, int] = {}
    uses: list[np.ndarray] = []
    for number in reversed(range(len(trace.prompts))):
        names = prefixes(trace.prompts[number][0])
        uses.append(np.array([coming.get(name, NEVER) for name in names]))
        coming.update(dict.fromkeys(names, number))
    return uses[::-1]


def _hit_rates(trace: Accesses, capacity: int) -> dict[str, float]:
    rates = {policy: hit_rate(trace, capacity, EvictionPolicy(policy)) for policy in POLICIES}
    return rates | {OPTIMUM: hit_rate(trace, capacity, Foresight(trace))}


def _table(name: str, footprint: int, rates: dict[float, dict[str, float]]) -> Table:
    policies: Sequence[str] = [*POLICIES, OPTIMUM]
    rows = [
        (f"{share:.0%}", *(100 * rate[policy] for policy in policies), rate["pgdsf"] / rate["lru"])
        for share, rate in rates.items()
    ]
    return Table(f"{name}: hit rate by tokens, %, of {footprint:,} blocks", ("capacity", *policies, "pgdsf over lru"), rows)
