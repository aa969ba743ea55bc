"""Measures bursts of questions on one region (RAGCache++'s and CacheWeaver's workload), compared with llama-server."""

from __future__ import annotations

import argparse

from ..comparison import Outcome, compare, differences, pace, problems, table
from ..report import Bar, BenchError, Report
from ..servers import add_clients, add_options, arms_for, separate_arms
from ..trace import Query, burst

LIST_AT_MOST = 20
"""Differing queries that are printed. The JSON result has all queries."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench burst`."""
    add_options(parser)
    add_clients(parser)
    add = parser.add_argument
    add("--queries", type=int, default=200, help="default: %(default)s")
    add("--regions", type=int, default=50, help="regions of documents (default: %(default)s)")
    add("-k", type=int, default=5, help="documents of a query (default: %(default)s)")
    add("--burst", type=int, default=10, help="queries on one region in a row (default: %(default)s)")
    add("--overlap", type=float, default=0.6, help="share of documents kept from query to query (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--documents-attention", choices=("joint", "separate"), default="joint", help="default: %(default)s")
    add("--ahead", action="store_true", help="with separate: read all documents once before the measurement")
    add("--joint", action="store_true", help="with separate: add an arm with joint attention")
    add("--cache-reuse", type=int, default=0, metavar="N", help="with separate: add an arm of llama-server with this flag")
    add("--no-order-hint", dest="order_hint", action="store_false", help="leave the retrieval ranking out of prompts")


def run(args: argparse.Namespace) -> Report:
    """Send the same queries with the same documents to every arm. Only the order of the documents may differ."""
    try:
        queries = burst(args.queries, args.regions, burst=args.burst, k=args.k, overlap=args.overlap, seed=args.seed)
    except ValueError as error:
        raise BenchError(error) from error
    if args.documents_attention == "separate":
        return _separate(queries, args)
    # With one client, llama-server has its own default number of slots; under load, as many slots as slotcache.
    arms = arms_for(args, ("auto", "retrieval"), args.parallel if args.concurrency > 1 else None)
    outcomes = compare(arms, queries, args)
    own, notes = outcomes[0], problems(outcomes)
    theirs = next((outcome for outcome in outcomes if outcome.arm.name == "llama-server"), None)
    if theirs is None and not args.url:
        notes.append("no llama-server was given (--llama-server PATH): nothing to compare with")
    bars = [] if theirs is None else _ratios(own, theirs, args.concurrency)
    if not args.url:
        bars.append(_order(own, outcomes[1], is_new=args.burst == 1 and args.queries <= args.regions))
    if args.concurrency == 1:
        reuse_bars, reuse_notes = _reuse(own, more_is_right="--idle-sets" in args.slotcache_args)
        bars, notes = reuse_bars + bars, notes + reuse_notes
    title = f"burst: {args.queries} queries, {args.burst} in a row on one of {args.regions} regions, "
    title += f"{pace(args)}, k = {args.k}, overlap {args.overlap:.0%}"
    data = {"arms": [outcome.data() for outcome in outcomes]}
    return Report("burst", [table(title, outcomes)], bars=bars, notes=notes, data=data)


def _separate(queries: list[Query], args: argparse.Namespace) -> Report:
    """Compare slotcache, which attends to each document separately, with llama-server."""
    documents = sorted({document for query in queries for document in query.documents}) if args.ahead else []
    groups = [tuple(documents[at : at + args.k]) for at in range(0, len(documents), args.k)]
    ahead = [Query(f"ahead {at}", 1, "Which?", group) for at, group in enumerate(groups)]
    outcomes = compare(separate_arms(args, ahead), queries, args)
    own, theirs = outcomes[0], next((outcome for outcome in outcomes if outcome.arm.name == "llama-server"), None)
    bars = [] if theirs is None else _separate_bars(own, theirs, args)
    read = ", documents read ahead" if args.ahead else ""
    title = f"burst, documents read separately: {args.queries} queries, {pace(args)}, k = {args.k}{read}"
    data = {"arms": [outcome.data() for outcome in outcomes]}
    return Report("burst", [table(title, outcomes)], bars=bars, notes=problems(outcomes), data=data)


def _separate_bars(own: Outcome, theirs: Outcome, args: argparse.Namespace) -> list[Bar]:
    p50, mean = own.ttft.p50 / theirs.ttft.p50, own.ttft.mean / theirs.ttft.mean
    if args.concurrency > 1:
        total = own.seconds / theirs.seconds
        return [Bar(1, "mean TTFT over llama-server's", mean, 0.5), Bar(1, "total time over llama-server's", total, 0.5)]
    if args.ahead:
        return [Bar(1, "TTFT p50 over llama-server's", p50, 0.2)]
    return [Bar(1, "TTFT p50 over llama-server's", p50, 0.35), Bar(1, "mean TTFT over llama-server's", mean, 0.45)]


def _ratios(own: Outcome, theirs: Outcome, concurrency: int) -> list[Bar]:
    mean = own.ttft.mean / theirs.ttft.mean
    if concurrency > 1:
        total = own.seconds / theirs.seconds
        return [
            Bar(3, "mean TTFT over llama-server's", mean, 0.75),
            Bar(3, "total time over llama-server's", total, 0.75),
        ]
    p50 = own.ttft.p50 / theirs.ttft.p50
    return [Bar(2, "TTFT p50 over llama-server's", p50, 0.65), Bar(2, "mean TTFT over llama-server's", mean, 0.75)]


def _order(own: Outcome, unordered: Outcome, is_new: bool) -> Bar:
    """Return the bar on ordering documents. is_new: whether every document is new, so that no order can gain anything."""
    p50 = own.ttft.p50 / unordered.ttft.p50
    if is_new:
        return Bar(4, "TTFT p50 with every document new, over retrieval order's", p50, 1.01)
    return Bar(2, "TTFT p50 over retrieval order's", p50, 0.75)


def _reuse(own: Outcome, more_is_right: bool) -> tuple[list[Bar], list[str]]:
    """Return the bar and the notes on the round that differs most from the prediction."""
    found, compared = max((differences(run, more_is_right) for run in own.runs), key=lambda pair: len(pair[0]))
    if not compared:
        return [], [f"{own.arm.name} does not name the documents it used: reuse is not compared with the prediction"]
    equal = f"documents reused as predicted{' or more' * more_is_right} in {compared - len(found)} of {compared} queries"
    lines = [one.text() for one in found[:LIST_AT_MOST]]
    what = "are fewer than" if more_is_right else "differ from"
    bar = Bar(2, f"queries whose reused documents {what} the exhaustive search's", float(len(found)), 0)
    return [bar], [equal, *lines, *(["..."] if len(found) > LIST_AT_MOST else [])]
