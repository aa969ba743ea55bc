"""The command `slotcache`: serve, launch, order, batch, demo, doctor, install, cache, models, generate, bench."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..models.errors import LibraryError
from .config.flags import add_arguments, notes_of, settings_of, with_dashes
from .config.settings import VERSION
from .http.log import configure

logger = logging.getLogger("slotcache")
WITH_OWN_PARSER = {
    "bench": "bench.cli",
    "generate": "bench.random_models",
    "cache": "server.cache_command",
    "models": "server.models_command",
    "install": "server.install_command",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. 2: the command cannot be done; one line on stderr says why."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] and arguments[0] in WITH_OWN_PARSER:
        module = _bench_module(WITH_OWN_PARSER[arguments[0]])
        return module.main(arguments[1:]) if module else 2
    # What follows -- is the agent's own.
    cut = arguments.index("--") if arguments[:1] == ["launch"] and "--" in arguments else len(arguments)
    chosen = _parser().parse_args(with_dashes(arguments[:cut]), argparse.Namespace(rest=arguments[cut + 1 :]))
    try:
        configure(getattr(chosen, "log_format", "text"), getattr(chosen, "log_file", ""), getattr(chosen, "verbose", False))
    except OSError as error:
        print(f"slotcache: --log-file: {error}", file=sys.stderr)
        return 2
    try:
        return chosen.command(chosen)
    except LibraryError as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slotcache", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"slotcache {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serving = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    add_arguments(serving)
    serving.set_defaults(command=_serve)
    launching = commands.add_parser(
        "launch", help="start a coding agent with settings of its own, and the server if none runs", allow_abbrev=False
    )
    launching.add_argument("client", metavar="CLIENT", help="its command: claude, for example; another one names all")
    launching.add_argument("--print", action="store_true", dest="prints", help="print its settings, write and start nothing")
    add_arguments(launching)
    launching.set_defaults(command=_launch)
    ordering = commands.add_parser("order", help="order the documents of chats for another server", allow_abbrev=False)
    _module("front.settings").add_arguments(ordering)
    ordering.set_defaults(command=_order)
    batching = commands.add_parser("batch", help="answer a file of requests, without a server", allow_abbrev=False)
    batching.add_argument(
        "input", metavar="IN", type=Path, help="a file of OpenAI's batch lines: custom_id, method, url, body"
    )
    batching.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        required=True,
        help="the file of the answers; what it has already is not computed again",
    )
    add_arguments(batching)
    batching.set_defaults(command=_batch)
    doctor = commands.add_parser("doctor", help="what this machine has, and what would fit", allow_abbrev=False)
    add_arguments(doctor)
    doctor.add_argument(
        "--time", action="store_true", help="time each llama.cpp that is installed, with -m or a built-in model"
    )
    doctor.set_defaults(command=_doctor)
    showing = commands.add_parser(
        "demo", help="a conversation about bundled documents, with reuse and without", allow_abbrev=False
    )
    showing.add_argument("--url", default="", help="of a server that runs already; without it one is started")
    showing.add_argument("-m", "--model", type=Path, help="GGUF to serve instead of the built-in model")
    showing.add_argument("--page", action="store_true", help="open the page over these documents instead, until ctrl-C")
    showing.set_defaults(command=_demo)
    commands.add_parser(
        "install", help="fetch a llama.cpp for this CPU or this card: slotcache install --help", add_help=False
    )
    commands.add_parser("cache", help="what is in a --cache-dir: slotcache cache --help", add_help=False)
    commands.add_parser("models", help="the models that serve would have: slotcache models --help", add_help=False)
    commands.add_parser("generate", help="write a model with random weights: slotcache generate --help", add_help=False)
    commands.add_parser("bench", help="measure a server over HTTP: slotcache bench --help", add_help=False)
    return parser


def _serve(chosen: argparse.Namespace) -> int:
    from .serve import serve

    for note in notes_of(chosen):
        logger.warning("%s", note)
    return serve(settings_of(chosen))


def _launch(chosen: argparse.Namespace) -> int:
    from .launch import launch

    return launch(settings_of(chosen), chosen.client, chosen.rest, prints=chosen.prints)


def _batch(chosen: argparse.Namespace) -> int:
    from .offline import answer_file

    return answer_file(settings_of(chosen), chosen.input, chosen.output)


def _order(chosen: argparse.Namespace) -> int:
    return _module("front.cli").order(chosen)


def _demo(chosen: argparse.Namespace) -> int:
    bench = _module("bench.demo")
    if not chosen.page:
        return bench.demo(chosen.url, chosen.model)
    if chosen.url:
        bench.open_page(chosen.url)
        return 0
    from .serve import serve_bundled

    return serve_bundled(str(chosen.model or ""), bench.free_port(), bench.open_page)


def _doctor(chosen: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(settings_of(chosen), chosen.time)


def _bench_module(name: str) -> ModuleType | None:
    """Import a module that needs the extra `bench`; None, and a line on stderr, where one is missing."""
    try:
        return _module(name)
    except LibraryError as error:
        print(f"slotcache: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"slotcache: {error.name} is missing: pip install 'slotcache[bench]'", file=sys.stderr)
    return None


def _module(name: str) -> ModuleType:
    """Import a module of another room. By name: those rooms stand above this one, and one may need a package of its own."""
    return import_module(f"..{name}", __package__)


if __name__ == "__main__":
    sys.exit(main())
