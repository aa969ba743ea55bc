"""Writes scripts with which a shell completes the command line: `slotcache completion bash`, `zsh` or `fish`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from shlex import quote

BASH = """_slotcache() {{
    local words="{commands}"
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" = 1 ] && words="{commands}"
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _slotcache slotcache
"""

Commands = Mapping[str, argparse.ArgumentParser]
"""The parsers of commands, by name."""


def script_of(shell: str, commands: Commands) -> str:
    """Return the script with which a shell completes commands and flags. shell: bash, zsh or fish."""
    return SHELLS[shell](commands)


def _bash(commands: Commands) -> str:
    cases = [f'        {name}) words="{" ".join(_flags(parser))}" ;;' for name, parser in commands.items()]
    choices = {
        flag: some
        for parser in commands.values()
        for action in parser._actions
        if (some := _choices(action))
        for flag in action.option_strings
    }
    rows = [f'        {flag}) words="{" ".join(map(str, some))}" ;;' for flag, some in choices.items()]
    return BASH.format(commands=" ".join(commands), cases="\n".join(cases), choices="\n".join(rows))


def _choices(action: argparse.Action) -> list[str]:
    """Return the values that an argument allows, or an empty list if it allows any value.

    An argument for a setting lists the allowed values in its metavar.
    """
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return [str(choice) for choice in action.choices or ()] or (shown.split("|") if "|" in shown else [])


def _zsh(commands: Commands) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(commands)}"


def _fish(commands: Commands) -> str:
    lines = [f"complete -c slotcache -n __fish_use_subcommand -f -a {name}" for name in commands]
    for name, parser in commands.items():
        for flag in filter(lambda flag: flag.startswith("-"), _flags(parser)):
            lines.append(f"complete -c slotcache -n '__fish_seen_subcommand_from {name}' {_fish_flag(flag)}")
    return "\n".join(lines) + "\n"


def _fish_flag(flag: str) -> str:
    kind = "-l" if flag.startswith("--") else "-o" if len(flag) > 2 else "-s"
    return f"{kind} {quote(flag.lstrip('-'))}"


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags that --help-all shows, and the choices of positional arguments."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS or getattr(action, "whole_help", ""):
            yield from action.option_strings or map(str, action.choices or ())


SHELLS: dict[str, Callable[[Commands], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
