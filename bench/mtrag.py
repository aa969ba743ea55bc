"""MT-RAG's human conversations with real retrieval: history, documents and questions as their users met them."""

import argparse
import os
from pathlib import Path

from .arms import arms_for
from .comparison import compare, problems, table
from .error import BenchError, Skip
from .options import DATA_VARIABLE, add_options
from .report import Report
from .trace import mtrag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench mtrag`."""
    add_options(parser)
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with mtrag_retrieved/")
    add("--retriever", choices=("elser", "bm25", "bge"), default="elser", help="default: %(default)s")
    add("--query-form", choices=("lastturn", "rewrite", "questions"), default="rewrite", help="default: %(default)s")
    add("-k", type=int, default=5, help="documents of a turn (default: %(default)s)")
    add("--sessions", type=int, default=8, help="conversations, 0 for all (default: %(default)s)")
    add("--turns", type=int, default=3, help="turns of each, 0 for all (default: %(default)s)")
    add("--active", type=int, default=4, help="conversations interleaved at a time (default: %(default)s)")
    add("--concurrency", type=int, default=1, help="clients at a time (default: %(default)s)")
    add("--no-order-hint", dest="order_hint", action="store_false", help="leave the retrieval ranking out of prompts")


def run(args: argparse.Namespace) -> Report:
    """Turns carry the documents of earlier turns in their history, as every arm sends it."""
    if not args.data or not Path(args.data).is_dir():
        raise Skip(f"mtrag needs --data PATH or {DATA_VARIABLE}: a folder that holds mtrag_retrieved/")
    try:
        queries = mtrag(
            Path(args.data),
            args.retriever,
            args.query_form,
            args.k,
            sessions=args.sessions or None,
            turns=args.turns or None,
            active=args.active,
        )
    except (OSError, ValueError) as error:
        raise BenchError(f"--data {args.data}: {error}") from error
    lanes = args.parallel if args.concurrency > 1 else None
    outcomes = compare(arms_for(args, ("auto", "retrieval"), lanes), queries, args, args.concurrency)
    title = f"mtrag: {len(queries)} turns, {args.retriever}, {args.query_form}, k = {args.k}, {args.concurrency} at a time"
    data = {"arms": [outcome.data() for outcome in outcomes]}
    return Report("mtrag", [table(title, outcomes)], (), problems(outcomes), data)
