"""`slotcache docs`: list and remove the indexes of `--docs`, which contain the text of every folder that was served."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..models.model_files import cache_folder
from ..retrieval.indexes import KeptIndex, remove_unused, stored_indexes
from .config.flags import Parser

DAY = 86_400  # s


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code. If the command fails, the code is 2, and one line on stderr says why."""
    chosen = _parser().parse_args(argv)
    folder = Path(chosen.docs_db).expanduser() if chosen.docs_db else cache_folder() / "docs"
    try:
        return chosen.command(chosen, folder)
    except OSError as error:
        print(f"slotcache: {error.filename or folder}: {error.strerror or error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="slotcache docs", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="show the size, last use and folders of each index", allow_abbrev=False)
    removing = commands.add_parser("remove", help="delete indexes; a server makes them again", allow_abbrev=False)
    removing.add_argument("names", nargs="*", metavar="INDEX", help="the index's name as `list` shows it, or its folder")
    removing.add_argument("--unused", type=_days, metavar="DAYS", help="delete indexes unused for this long; 0: all")
    for one, command in ((listing, _list), (removing, _remove)):
        one.add_argument("--docs-db", default="", metavar="FOLDER", help="as for serve; default: in the user's cache")
        one.set_defaults(command=command)
    return parser


def _days(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a number of days")
    return int(text)


def _list(chosen: argparse.Namespace, folder: Path) -> int:
    found = stored_indexes(folder)
    if found:
        print(f"{'index':{len(found[0].name)}}  {'MiB':>9}  {'last use':16}  of")
    for index in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(index.used))
        print(f"{index.name}  {index.num_bytes / 2**20:9,.1f}  {used}  {_printable(index)}")
    print(f"{_counted(len(found))}, {sum(index.num_bytes for index in found) / 2**20:,.1f} MiB: {folder}")
    return 0


def _counted(number: int) -> str:
    return f"{number} index{'' if number == 1 else 'es'}"


def _printable(index: KeptIndex) -> str:
    if not index.paths:
        return "(made by an earlier version)"
    return ", ".join(path if path.isprintable() else ascii(path) for path in index.paths)


def _remove(chosen: argparse.Namespace, folder: Path) -> int:
    if not chosen.names and chosen.unused is None:
        print("slotcache: expected an index that `slotcache docs list` shows, a folder, or --unused DAYS", file=sys.stderr)
        return 2
    gone, code = [], 0
    for name in chosen.names:
        asked = {name, str(Path(name).expanduser().resolve())}
        named = [index for index in stored_indexes(folder) if asked & {index.name, *index.paths}]
        if not named:
            print(f"slotcache: {name}: no such index: `slotcache docs list` shows all", file=sys.stderr)
            code = 2
        for index in named:
            if index.remove():
                gone.append(index)
            else:
                print(f"slotcache: {name}: a server uses its index {index.name}: stop the server first", file=sys.stderr)
                code = 2
    if chosen.unused is not None:
        gone += remove_unused(folder, time.time() - chosen.unused * DAY)
    print(f"{_counted(len(gone))} removed, {sum(index.num_bytes for index in gone) / 2**20:,.1f} MiB")
    return code
