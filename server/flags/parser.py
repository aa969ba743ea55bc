"""The settings of a command: from its arguments, then from the environment, then the defaults."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from ..settings import SETTINGS, Settings
from .llama import FOREIGN, Foreign
from .setting import Setting, Value, written

PREFIX = "LLAMA_ARG_"  # of llama-server's variables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of all settings, and llama-server's others, which it refuses or notes."""
    parser.set_defaults(notes=[], given=frozenset())
    add_settings(parser, SETTINGS)
    for foreign in FOREIGN:
        parser.add_argument(*foreign.flags, action=_Foreign, nargs=foreign.num_values, foreign=foreign)


def add_settings(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    """Give a parser the flags of some settings.

    Switches take an optional on/off: `--cache-prompt`, `--cache-prompt off`. Each has a flag `--no-...` as well.
    """
    for setting in settings:
        parser.add_argument(
            *setting.flags,
            dest=setting.name,
            default=from_environment(setting),
            help=f"{setting.help} (default: {written(setting.default)})".replace("%", "%%"),
            type=_argument_type(setting),
            metavar="on|off" if setting.is_switch else "|".join(setting.choices) or type(setting.default).__name__,
            nargs="?" if setting.may_be_bare else None,
            const=setting.parse("on") if setting.may_be_bare else None,
            action=_Store,
            separator=setting.separator,
        )
        for flag, text in setting.fixed.items():
            value = setting.parse(text)
            parser.add_argument(flag, dest=setting.name, action=_Store, nargs=0, const=value, help=argparse.SUPPRESS)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings among parsed arguments."""
    given = arguments.given.union(setting.name for setting in SETTINGS if variable_of(setting))
    return Settings(**{setting.name: getattr(arguments, setting.name) for setting in SETTINGS}, given=given)


def notes_of(arguments: argparse.Namespace) -> list[str]:
    """Return a line for each flag and each variable of llama-server that was given and has no effect here."""
    known = {variable for setting in SETTINGS for variable in setting.variables}
    heeded = {foreign.variable for foreign in FOREIGN if not foreign.says}
    told = {foreign.variable: foreign.says for foreign in FOREIGN}
    unheeded = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known | heeded)
    return [*arguments.notes, *(f"{name} has no effect: {told.get(name, 'it is not known here')}" for name in unheeded)]


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Write the names of long flags with dashes, as llama-server does: `--ctx_size` is `--ctx-size`."""
    return [_with_dashes(argument) if argument.startswith("--") else argument for argument in arguments]


def _with_dashes(argument: str) -> str:
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value


class _Store(argparse.Action):
    """A flag of a setting. separator: between its values, when it is given several times; "": the last one counts.

    The settings whose flags are given are named in the namespace's `given`.
    """

    def __init__(self, *, dest: str, separator: str = "", **options: object) -> None:
        super().__init__(dest=dest, **options)  # type: ignore[arg-type]
        self._separator = separator

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        given: frozenset[str] = getattr(namespace, "given", frozenset())
        value = self.const if self.nargs == 0 else values
        if self._separator and self.dest in given:
            value = f"{getattr(namespace, self.dest)}{self._separator}{value}"
        setattr(namespace, self.dest, value)
        namespace.given = given | {self.dest}


class _Foreign(argparse.Action):
    """A flag of llama-server that no setting stands for."""

    def __init__(self, *, foreign: Foreign, dest: str, **options: object) -> None:
        super().__init__(dest=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)  # type: ignore[arg-type]
        self._foreign = foreign

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        foreign = self._foreign
        if foreign.refused:
            parser.exit(2, f"slotcache: {option_string} is not supported: {foreign.says}\n")
        if foreign.says:
            namespace.notes = [*namespace.notes, f"{option_string} has no effect: {foreign.says}"]


def _argument_type(setting: Setting) -> Callable[[str], Value]:
    """Return a parser that raises argparse's error, which names the flag."""

    def parse(text: str) -> Value:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def variable_of(setting: Setting) -> str | None:
    """Return the variable of the environment that a setting's value comes from."""
    return next((name for name in setting.variables if name in os.environ), None)


def from_environment(setting: Setting) -> Value:
    variable = variable_of(setting)
    if variable is None:
        return setting.default
    try:
        return setting.parse(os.environ[variable])
    except ValueError as error:
        raise SystemExit(f"slotcache: {variable}={os.environ[variable]!r}: {error}") from None
