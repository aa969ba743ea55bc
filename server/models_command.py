"""`slotcache models`: list and show the models that `serve` would offer with the same flags, and remove their KV."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..models.errors import ModelError
from ..models.model_files import digest, files_of
from ..slots.store.archive import StoredFolder, folders, remove
from ..slots.store.private_folder import FolderError
from .config.flags import Parser, add_arguments, settings_of, with_dashes
from .config.settings import Settings, SettingsError
from .engine.fit import Decision, fit, open_model
from .http.api_errors import RequestError, unknown_model
from .serve import model_path
from .service.models import entries_of

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that are known without loading it.

    size: bytes of the model's files.
    context: tokens of context that fit now; 0 if the model generates no text or no context fits.
    kv_*: the size of the model's KV in --cache-dir, including KV that was computed with other settings.
    memory: lines that describe how the model and its context fit into memory.
    problem: why the model cannot be served; empty if it can be served.
    """

    name: str
    file: str
    size: int = 0
    architecture: str = ""
    description: str = ""
    parameters: int = 0
    layers: int = 0
    context_train: int = 0
    context: int = 0
    bytes_of_token: int = 0
    kv_records: int = 0
    kv_tokens: int = 0
    kv_bytes: int = 0
    memory: tuple[str, ...] = ()
    problem: str = ""


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code. If the command fails, the code is 2, and one line on stderr says why."""
    chosen = _parser().parse_args(with_dashes(argv))
    try:
        return chosen.command(chosen, settings_of(chosen))
    except (ModelError, FolderError, SettingsError, RequestError, OSError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="slotcache models", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, help in (
        ("list", _list, "each model's file, architecture, size, the context that fits now, and its KV in --cache-dir"),
        ("show", _show, "the same for one model, and how it fits into memory"),
        ("remove-kv", _remove_kv, "delete a model's KV in --cache-dir, even while a server uses it"),
    ):
        one = commands.add_parser(
            name,
            help=help,
            description=f"{help}. The other flags are those of serve: --help-all shows them.",
            allow_abbrev=False,
        )
        if command is not _list:
            one.add_argument("name", metavar="NAME", help="the model's name, as in requests")
        one.add_argument("--json", action="store_true", help="print JSON")
        add_arguments(one, shown=False)
        one.set_defaults(command=command)
    return parser


# ---- the commands -------------------------------------------------------------------------------------------------------


def _list(chosen: argparse.Namespace, settings: Settings) -> int:
    stored = _stored(settings)
    found = [_facts(name, own, path, stored) for name, own, path in _models(settings)]
    if chosen.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    width = max(len(one.name) for one in found)
    print(f"{'model':{width}}  {'architecture':14} {'MiB':>9} {'context':>9} {'KV tokens':>10} {'KV MiB':>9}  file")
    for one in found:
        sizes = f"{one.size / MIB:9,.1f} {one.context or '-':>9} {one.kv_tokens:10,} {one.kv_bytes / MIB:9,.1f}"
        print(f"{one.name:{width}}  {one.architecture or '-':14} {sizes}  {one.file}")
        if one.problem:
            print(f"{'':{width}}  {one.problem}")
    return 0


def _show(chosen: argparse.Namespace, settings: Settings) -> int:
    name, own, path = _named(settings, chosen.name)
    facts = _facts(name, own, path, _stored(settings))
    if chosen.json:
        print(json.dumps(asdict(facts), indent=2))
        return 0
    lines = [f"{name}: {facts.file}, {facts.size / MIB:,.1f} MiB"]
    if facts.architecture:
        lines += [f"{facts.architecture}: {facts.description}, {facts.parameters:,} parameters, {facts.layers} layers"]
        lines += [f"trained for {facts.context_train:,} tokens; KV {facts.bytes_of_token:,} bytes a token"]
    lines += [f"context that fits now: {facts.context:,} tokens"] if facts.context else []
    lines += [*facts.memory, *filter(None, [facts.problem])]
    if settings.cache_dir:
        size = f"{facts.kv_tokens:,} tokens in {facts.kv_records:,} records, {facts.kv_bytes / MIB:,.1f} MiB"
        lines.append(f"KV in {settings.cache_dir}: {size}")
    print("\n  ".join(lines))
    return 0


def _remove_kv(chosen: argparse.Namespace, settings: Settings) -> int:
    if not settings.cache_dir:
        raise SettingsError("KV is stored only in a --cache-dir: give the folder of the servers with --cache-dir FOLDER")
    _, _, path = _named(settings, chosen.name)
    removed = [remove(one.path) for one in _of(_stored(settings), path)]
    num_records, num_bytes = sum(one[0] for one in removed), sum(one[1] for one in removed)
    if chosen.json:
        print(json.dumps({"records": num_records, "bytes": num_bytes}))
    else:
        print(f"{num_records:,} records deleted, {num_bytes / MIB:,.1f} MiB")
    return 0


# ---- the models ---------------------------------------------------------------------------------------------------------


def _models(settings: Settings) -> list[tuple[str, Settings, Path]]:
    """Return the name, the settings and the file of each model. Raises SettingsError and ModelError."""
    if entries := entries_of(settings):
        return [(entry.name, entry.settings, entry.path) for entry in entries]
    path = model_path(settings)
    return [(settings.names(path)[0], settings, path)]


def _named(settings: Settings, name: str) -> tuple[str, Settings, Path]:
    """Return the name, the settings and the file of one model. Raises RequestError if no model has this name."""
    known = {one[0]: one for one in _models(settings)}
    if name not in known:
        raise unknown_model(name, known)
    return known[name]


def _stored(settings: Settings) -> list[StoredFolder]:
    root = Path(settings.cache_dir).expanduser()
    return [StoredFolder.of(path) for path in folders(root)] if settings.cache_dir and root.is_dir() else []


def _of(stored: Sequence[StoredFolder], path: Path) -> Iterator[StoredFolder]:
    """Return the cache folders of a model. The first call reads the whole file of the model. Raises ModelError."""
    of_model = digest(files_of(path)) if stored else ""
    return (one for one in stored if one.model == of_model)


def _facts(name: str, settings: Settings, path: Path, stored: Sequence[StoredFolder]) -> ModelFacts:
    try:
        size = sum(file.stat().st_size for file in files_of(path))
        model = open_model(settings, path, is_simulated=True)
    except (ModelError, SettingsError, OSError) as error:
        return ModelFacts(name=name, file=str(path), problem=str(error))
    uses = [use for one in _of(stored, path) for use in one.scopes]
    decision, problem = _decision(settings, path)
    found = ModelFacts(
        name=name,
        file=str(path),
        size=size,
        architecture=model.metadata("general.architecture") or "",
        description=model.description,
        parameters=model.num_parameters,
        layers=model.num_layers,
        context_train=model.context_train,
        context=decision.chosen.placement.cells if decision else 0,
        bytes_of_token=model.kv_bytes(settings.cache_type_k, settings.cache_type_v),
        kv_records=sum(use.num_records for use in uses),
        kv_tokens=sum(use.num_tokens for use in uses),
        kv_bytes=sum(use.num_bytes for use in uses),
        memory=tuple(decision.lines()) if decision else (),
        problem=problem if model.can_chat else "it generates no text: serve it with --embedding-model or --rerank-model",
    )
    model.close()
    return found


def _decision(settings: Settings, path: Path) -> tuple[Decision | None, str]:
    """Return how a model fits into memory now, or why it does not."""
    try:
        return fit(settings, path)[1], ""
    except (ModelError, SettingsError) as error:
        return None, str(error)
