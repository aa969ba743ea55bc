"""The command `slotcache`: serve, order, demo, doctor, generate, bench."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from .flags.parser import add_arguments, notes_of, settings_of, with_dashes
from .log.setup import configure

logger = logging.getLogger("slotcache")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. 2: the command cannot be done; one line on stderr says why."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["bench"]:  # has its own flags, and must not need a server's
        from ..bench.cli import main as bench

        return bench(arguments[1:])
    parser = _parser()
    chosen = parser.parse_args(with_dashes(arguments))
    try:
        configure(getattr(chosen, "log_format", "text"), getattr(chosen, "log_file", ""), getattr(chosen, "verbose", False))
    except OSError as error:
        print(f"slotcache: --log-file: {error}", file=sys.stderr)
        return 2
    return chosen.command(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slotcache", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serving = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    add_arguments(serving)
    serving.set_defaults(command=_serve)
    ordering = commands.add_parser("order", help="order the documents of chats for another server", allow_abbrev=False)
    _add_order(ordering)
    doctor = commands.add_parser("doctor", help="what this machine has, and what would fit", allow_abbrev=False)
    add_arguments(doctor)
    doctor.set_defaults(command=_doctor)
    showing = commands.add_parser(
        "demo", help="a conversation about bundled documents, with reuse and without", allow_abbrev=False
    )
    showing.add_argument("--url", default="", help="of a server that runs already; without it one is started")
    showing.add_argument("-m", "--model", type=Path, help="GGUF to serve instead of the built-in model")
    showing.add_argument("--page", action="store_true", help="open the page over these documents instead, until ctrl-C")
    showing.set_defaults(command=_demo)
    generating = commands.add_parser("generate", help="write a model with random weights", allow_abbrev=False)
    _add_generate(generating)
    commands.add_parser("bench", help="measure a server over HTTP: slotcache bench --help", add_help=False)
    return parser


def _serve(chosen: argparse.Namespace) -> int:
    from .serve import serve

    for note in notes_of(chosen):
        logger.warning("%s", note)
    return serve(settings_of(chosen))


def _add_order(parser: argparse.ArgumentParser) -> None:
    from ..front.settings import add_arguments

    add_arguments(parser)
    parser.set_defaults(command=_order)


def _order(chosen: argparse.Namespace) -> int:
    try:
        from ..front.cli import order
    except ModuleNotFoundError as error:
        print(f"slotcache: {error.name} is missing: pip install 'slotcache[front]'", file=sys.stderr)
        return 2
    return order(chosen)


def _demo(chosen: argparse.Namespace) -> int:
    from ..bench.demo import demo, open_page

    if not chosen.page:
        return demo(chosen.url, chosen.model)
    if chosen.url:
        open_page(chosen.url)
        return 0
    from ..bench.server import free_port
    from .serve import serve_bundled

    return serve_bundled(str(chosen.model or ""), free_port(), open_page)


def _doctor(chosen: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(settings_of(chosen))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    from ..models.shapes import SHAPES

    parser.add_argument("shape", choices=SHAPES, help="a named shape")
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"other than the named shape's {name}")
    parser.add_argument("--quantisation", help="F32, F16, Q8_0 or Q4_0")
    parser.set_defaults(command=_generate)


def _generate(chosen: argparse.Namespace) -> int:
    from dataclasses import fields, replace

    from ..models.generate import generate
    from ..models.shapes import SHAPES, Shape

    names = [field.name for field in fields(Shape)]
    changed = {name: value for name in names if (value := getattr(chosen, name, None)) is not None}
    try:
        path = generate(chosen.out, replace(SHAPES[chosen.shape], **changed), chosen.seed)
    except (ValueError, OSError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {path.stat().st_size / 2**20:,.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
