"""A row of a table of settings: from the field of a dataclass to flags, variables, help and documentation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from ...models.samplers.parameters import NUMBER, NUMBERS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = str | int | float | bool
T = TypeVar("T")
OF_LLAMA = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""The parameters of sampling that llama-server reads from its variables, too."""


class SettingsError(Exception):
    """Settings that no server can be started with."""


def row(
    default: T,
    flags: tuple[str, ...],
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int = 1 << 31,
    words: Mapping[str, int] | None = None,
    fixed: Mapping[str, str] | None = None,
    separator: str = "",
    llama: str = "",
) -> T:
    """Declare a field of `Settings`.

    choices: where its type has none. least, most: of a number. words: texts for some numbers. fixed: flags without a value,
    and the value of each. separator: between the values of a flag given several times. llama: llama-server's variable.
    """
    about = {"flags": flags, "help": help, "choices": choices, "least": least, "most": most, "clamps": False}
    about |= {"words": words or {}, "fixed": fixed or {}, "separator": separator, "llama": llama}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. The environment may hold a flag's value, as SLOTCACHE_<NAME>; the command line wins.

    words, fixed, separator, llama: as in `row`; fixed holds the flags that turn a switch off, too. clamps: a number outside
    the range becomes the nearest one in it.
    """

    name: str
    default: Value
    flags: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    least: int | float
    most: int | float
    clamps: bool
    words: Mapping[str, int]
    fixed: Mapping[str, str]
    separator: str
    llama: str

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def may_be_bare(self) -> bool:
        """Whether the flag alone means on."""
        return self.is_switch or {"on", "off"} <= {*self.choices}

    @property
    def variable(self) -> str:
        return f"SLOTCACHE_{self.name.upper()}"

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables of the environment that may hold its value; an earlier one wins."""
        return (self.variable, *filter(None, [self.llama]))

    def parse(self, text: str) -> Value:
        """Return the value that a text stands for. Raises ValueError."""
        if self.is_switch:
            return parse_switch(text)
        if self.choices:
            return self._choose(text)
        if isinstance(self.default, str):
            return text
        number = self.words[text] if text in self.words else _parse_number(text, type(self.default))
        nearest = min(max(number, self.least), self.most)
        if not isfinite(number) or (nearest != number and not self.clamps):
            raise ValueError(f"expected {self.least} to {self.most}")
        return nearest

    def _choose(self, text: str) -> str:
        if self.may_be_bare:
            with contextlib.suppress(ValueError):
                return written(parse_switch(text))
        found = next((choice for choice in self.choices if choice.lower() == text.lower()), None)
        if found is None:
            raise ValueError(f"expected one of {', '.join(self.choices)}")
        return found


def listed(text: str) -> frozenset[str]:
    """Split a setting that holds several values, separated by commas."""
    return frozenset(filter(None, map(str.strip, text.split(","))))


def parse_switch(text: str) -> bool:
    """Parse on/off, true/false, yes/no or 1/0. Raises ValueError."""
    if text.lower() in ("on", "true", "1", "yes", "enabled"):
        return True
    if text.lower() in ("off", "false", "0", "no", "disabled"):
        return False
    raise ValueError("expected on or off")


def _parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    """Parse a number. Raises ValueError."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError("expected a whole number" if kind is int else "expected a number") from None


def _negations(default: Value, flags: tuple[str, ...]) -> dict[str, str]:
    """Return the flags that turn a switch off: `--no-` in front of each long one."""
    return {f"--no-{flag[2:]}": "off" for flag in flags if flag.startswith("--")} if isinstance(default, bool) else {}


def table_of(unset: DataclassInstance) -> tuple[Setting, ...]:
    """Return the settings that the fields of a dataclass declare. unset: an object with the defaults."""
    kinds = get_type_hints(type(unset))
    declared = [one for one in fields(unset) if one.metadata]
    rows = [_setting(one, getattr(unset, one.name), kinds[one.name]) for one in declared]
    return tuple(sorted(rows, key=lambda setting: setting.name in NUMBERS))


def _setting(declared: Field[Value], default: Value, kind: type) -> Setting:
    about = _about_number(declared.name) if NUMBER in declared.metadata else dict(declared.metadata)
    about["choices"] = about["choices"] or get_args(kind)
    about["fixed"] = about["fixed"] | _negations(default, about["flags"])
    return Setting(name=declared.name, default=default, **about)


def _about_number(name: str) -> dict[str, Any]:
    """Return the row of a parameter of sampling."""
    number = NUMBERS[name]
    return {
        "flags": number.flags,
        "help": f"default of a request's `{name}`: {number.help}",
        "choices": (),
        "least": number.least,
        "most": number.most,
        "clamps": not number.is_strict,
        "words": {},
        "fixed": {},
        "separator": "",
        "llama": f"LLAMA_ARG_{name.upper()}" if name in OF_LLAMA else "",
    }


def as_markdown(settings: Sequence[Setting]) -> str:
    """Return a table of settings for the documentation."""
    rows = [
        f"| {_code(setting.flags)} | {_code(setting.variables)} | {written(setting.default) or '-'} | {setting.help} |"
        for setting in settings
    ]
    return "\n".join(["| flag | environment | default | what it does |", "|---|---|---|---|", *rows])


def _code(names: Sequence[str]) -> str:
    return f"`{'`, `'.join(names)}`"


def written(value: Value) -> str:
    """Return a value as one writes it on the command line."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
