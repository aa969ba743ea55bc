"""`slotcache cache`: list, verify, prune, export and import the KV of a cache folder, even while servers use the folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..models.errors import ModelError
from ..slots.store.archive import (
    ArchiveError,
    Progress,
    ScopeUse,
    StoredFolder,
    damage,
    export,
    folders,
    import_archive,
    prune,
    prune_unused,
    records,
)
from ..slots.store.private_folder import FolderError
from ..slots.store.record_file import CorruptFile
from .config.flags import Parser
from .load import machine
from .stored_batches import StoredBatches, delete

BAR = 24  # characters
NOTHING = "nothing to export: the folder has no KV in the common scope"
DAY = 86_400 * 10**9  # ns


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    The code is 1 if a record is damaged. If the command fails, the code is 2, and one line on stderr says why.
    """
    chosen = _parser().parse_args(argv)
    try:
        if not chosen.folder.is_dir() and chosen.command is not _import:
            raise ArchiveError("no such folder")
        return chosen.command(chosen)
    except (ArchiveError, CorruptFile, OSError) as error:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        print(f"slotcache: {getattr(chosen, 'file', chosen.folder)}: {said}", file=sys.stderr)
    except (FolderError, ModelError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="slotcache cache", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: object, help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, allow_abbrev=False)
        one.set_defaults(command=command)
        return one

    def add_folder(one: argparse.ArgumentParser) -> None:
        one.add_argument("folder", type=Path, metavar="FOLDER", help="the --cache-dir of the servers")

    add_folder(add("list", _list, "records, tokens, bytes and last use, by model and scope"))
    add_folder(add("verify", _verify, "read each record to its last byte; exit code 1 if one is damaged"))
    pruning = add("prune", _prune, "delete the records of least worth, or unused records")
    add_folder(pruning)
    what = pruning.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--size", type=_natural, metavar="MIB", help="keep at most this much: the records that a server would keep"
    )
    what.add_argument("--unused", type=_natural, metavar="DAYS", help="delete the records unused for this many days")
    text = "delete the files of /v1/files and /v1/batches, which earlier versions had"
    what.add_argument("--batches", action="store_true", help=text)
    exporting = add("export", _export, "write the KV of the common scope to a file, for another machine")
    add_folder(exporting)
    exporting.add_argument("-o", "--output", dest="file", type=Path, required=True, metavar="FILE", help="a tar")
    exporting.add_argument(
        "--of", default="", metavar="NAME", help="which KV to export if there is more than one kind: a name shown by `list`"
    )
    importing = add("import", _import, "put the KV of an export into a folder")
    importing.add_argument("file", type=Path, metavar="FILE", help="a file written by `export`")
    add_folder(importing)
    text = "accept KV from another llama.cpp or CPU, too: answers report it as imported, and their bits may differ"
    importing.add_argument("--import-foreign", action="store_true", help=text)
    return parser


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 on")
    return int(text)


# ---- the commands -------------------------------------------------------------------------------------------------------


def _list(chosen: argparse.Namespace) -> int:
    num_records, num_bytes = 0, 0
    for path in folders(chosen.folder):
        stored = StoredFolder.of(path)
        print(_title(stored))
        print(f"  {'scope':24} {'records':>8} {'tokens':>10} {'MiB':>9}  {'oldest use':16}  {'newest use':16}")
        for use in stored.scopes:
            print(_row(json.dumps(use.scope) if use.scope else "(common)", use))
        if stored.unreadable:
            print(_row("(unreadable)", stored.unreadable))
        for use in (*stored.scopes, *filter(None, [stored.unreadable])):
            num_records, num_bytes = num_records + use.num_records, num_bytes + use.num_bytes
    if (batches := StoredBatches.of(chosen.folder)).num_files:
        print(f"{batches}: prune --batches deletes them")
    print(f"{num_records:,} records, {num_bytes / 2**20:,.1f} MiB")
    return 0


def _title(stored: StoredFolder) -> str:
    origin = stored.origin
    if origin is None:
        return f"{stored.path.name}  model {stored.model[:8] or 'unknown'}, build unknown"
    words = json.dumps(f"{origin.model}, {origin.build}")[1:-1]  # escaped: they may come from an archive
    return f"{stored.path.name}  {words}{', imported' if origin.is_imported else ''}"


def _row(name: str, use: ScopeUse) -> str:
    times = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at / 1e9)) for at in (use.oldest, use.newest))
    return f"  {name:24} {use.num_records:8,} {use.num_tokens:10,} {use.num_bytes / 2**20:9,.1f}  {'  '.join(times)}"


def _verify(chosen: argparse.Namespace) -> int:
    found = [stored for path in folders(chosen.folder) for stored in records(path)]
    done, total, num_damaged, progress = 0, sum(stored.size for stored in found), 0, _bar("verify")
    for stored in found:
        if why := damage(stored):
            num_damaged += 1
            print(f"{stored.path}: {why}")
        done += stored.size
        progress(done, total)
    print(f"{len(found):,} records, {num_damaged:,} damaged")
    return 1 if num_damaged else 0


def _prune(chosen: argparse.Namespace) -> int:
    if chosen.batches:
        return _prune_batches(chosen.folder)
    before = _total(chosen.folder)
    if chosen.size is not None:
        prune(chosen.folder, chosen.size << 20)
    else:
        prune_unused(chosen.folder, time.time_ns() - chosen.unused * DAY)
    after = _total(chosen.folder)
    print(f"{before[0] - after[0]:,} records deleted, {(before[1] - after[1]) / 2**20:,.1f} MiB; {after[0]:,} are left")
    return 0


def _prune_batches(root: Path) -> int:
    stored = StoredBatches.of(root)
    try:
        delete(root)
    except BlockingIOError:
        raise ArchiveError("a server of an earlier version uses this folder: stop it first") from None
    print(f"deleted: {stored}")
    return 0


def _total(root: Path) -> tuple[int, int]:
    sizes = [stored.size for path in folders(root) for stored in records(path)]
    return len(sizes), sum(sizes)


def _export(chosen: argparse.Namespace) -> int:
    if chosen.file.exists() and not chosen.file.is_file():
        raise ArchiveError("it is not a file")
    named = [path for path in folders(chosen.folder) if chosen.of in ("", path.name)]
    holding = [path for path in named if any(use.scope == "" for use in StoredFolder.of(path).scopes)]
    if len(holding) != 1:
        known = ", ".join(path.name for path in holding)
        raise ArchiveError(f"KV of several models or settings: choose with --of {known}" if holding else NOTHING)
    manifest, num_damaged = export(holding[0], chosen.file, _bar("export"))
    print(f"{manifest.records:,} records of the common scope, {manifest.bytes / 2**20:,.1f} MiB: {chosen.file}")
    if num_damaged:
        print(f"{num_damaged:,} damaged records are left out")
    return 0


def _import(chosen: argparse.Namespace) -> int:
    done = import_archive(chosen.file, chosen.folder, machine(), chosen.import_foreign, _bar("import"))
    print(
        f"{done.num_new:,} records of {done.manifest.records:,} are new{', as imported' * done.is_foreign}: {done.folder}\n"
        "a server finds them at its next start"
    )
    return 0


def _bar(what: str) -> Progress:
    """Return a function that draws a progress bar, or does nothing if stderr is not a terminal."""

    def show(done: int, total: int) -> None:
        share = done / total if total else 1.0
        end = "\n" if done >= total else ""
        print(f"\r{what} [{'#' * round(BAR * share):{BAR}}] {share:4.0%}", end=end, file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda done, total: None
