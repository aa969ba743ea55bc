"""Measures MT-RAG's human conversations, with documents from a real retriever."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from ..comparison import Outcome, compare, pace, problems, table
from ..report import Bar, BenchError, Report, Skip
from ..server_api import ChatApi
from ..servers import DATA_VARIABLE, Arm, add_clients, add_options, arms_for
from ..trace import mtrag


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of reuse that is added to the earlier parts: request fields, server flags, and whether sessions share KV."""

    name: str
    fields: dict[str, Any]
    flags: tuple[str, ...] = ("--window", "0")
    own_scope: bool = False


PLAIN = {"document_order": "retrieval", "dedup": "off"}
PARTS = (
    Part("own history only", PLAIN, own_scope=True),
    Part("+ prefixes of others", PLAIN),
    Part("+ order", {"document_order": "auto", "dedup": "off"}),
    Part("+ de-duplication", {"document_order": "auto", "dedup": "auto"}),
    Part("+ queue", {"document_order": "auto", "dedup": "auto"}, flags=()),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench mtrag`."""
    add_options(parser)
    add_clients(parser)
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with mtrag_retrieved/")
    add("--retriever", choices=("elser", "bm25", "bge"), default="elser", help="default: %(default)s")
    add("--query-form", choices=("lastturn", "rewrite", "questions"), default="rewrite", help="default: %(default)s")
    add("-k", type=int, default=5, help="documents of a turn (default: %(default)s)")
    add("--sessions", type=int, default=8, help="conversations, 0 for all (default: %(default)s)")
    add("--turns", type=int, default=3, help="turns of each conversation, 0 for all (default: %(default)s)")
    add("--active", type=int, default=4, help="conversations interleaved at a time (default: %(default)s)")
    add("--parts", action="store_true", help="one arm for each part of slotcache, added to the parts before it")
    add("--no-order-hint", dest="order_hint", action="store_false", help="leave the retrieval ranking out of prompts")


def run(args: argparse.Namespace) -> Report:
    """Send all turns to every arm. The history of a turn has the documents of earlier turns."""
    if not args.data or not Path(args.data).is_dir():
        raise Skip(f"mtrag needs --data PATH or {DATA_VARIABLE}: a folder that holds mtrag_retrieved/")
    try:
        picked = {"sessions": args.sessions or None, "turns": args.turns or None, "active": args.active}
        queries = mtrag(Path(args.data), args.retriever, args.query_form, args.k, **picked)
    except (OSError, ValueError) as error:
        raise BenchError(f"--data {args.data}: {error}") from error
    slots = args.parallel if args.concurrency > 1 else None
    arms = arms_for(args, ("auto", "retrieval"), slots)
    if args.parts:
        arms = _parts(args) + [arm for arm in arms if arm.name == "llama-server"]
    outcomes = compare(arms, queries, args)
    title = f"mtrag: {len(queries)} turns, {args.retriever}, {args.query_form}, k = {args.k}, {pace(args)}"
    data = {"arms": [outcome.data() for outcome in outcomes]}
    return Report("mtrag", [table(title, outcomes)], bars=_bars(outcomes, args.parts), notes=problems(outcomes), data=data)


def _parts(args: argparse.Namespace) -> list[Arm]:
    if args.url:
        raise BenchError("--parts starts a server for each part: leave --url out")
    hint = {} if args.order_hint else {"order_hint": False}
    apis = [ChatApi(documents_field=True, extra=part.fields | hint, own_scope=part.own_scope) for part in PARTS]
    arms = [arms_for(args, slotcache_flags=part.flags)[0] for part in PARTS]
    return [replace(arm, name=part.name, api=api) for arm, part, api in zip(arms, PARTS, apis, strict=True)]


def _bars(outcomes: Sequence[Outcome], parts: bool) -> list[Bar]:
    theirs = next((outcome for outcome in outcomes if outcome.arm.name == "llama-server"), None)
    if theirs is None:
        return []
    own = outcomes[-2 if parts else 0]
    computed = p50 = nan  # a figure needs all answers of both arms
    if not problems([own, theirs]):
        computed = own.total("computed_tokens") / theirs.total("computed_tokens")
        p50 = own.ttft.p50 / theirs.ttft.p50
    return [
        Bar(3, "prompt tokens computed, of llama-server's", computed, 0.75),
        Bar(3, "TTFT p50, of llama-server's", p50, 0.75),
    ]
