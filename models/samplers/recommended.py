"""The sampling that a GGUF file recommends: its keys `general.sampling.*`, which llama-server honours, too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite, nan
from typing import Any

from .parameters import ALIASES, Sampling

logger = logging.getLogger("slotcache")

PREFIX = "general.sampling."
OTHER_NAMES = {"temperature": "temp", "repeat_last_n": "penalty_last_n", "repeat_penalty": "penalty_repeat"}
OF_FILES = (
    *("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "repeat_last_n", "repeat_penalty"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
"""The parameters that llama.cpp knows in a file."""


def recommended(metadata: Callable[[str], str | None]) -> dict[str, Any]:
    """Return the parameters that a file recommends, `samplers` among them.

    Numbers are as the file has them: see `Sampling.changed`. What llama.cpp does not know is left out, with a warning.

    metadata: a value of the file as text; None: it has none.
    """
    found: dict[str, Any] = {}
    for name in OF_FILES:
        key = PREFIX + OTHER_NAMES.get(name, name)
        if (text := metadata(key)) is not None and (number := _number(key, text, type(getattr(UNSET, name)))) is not None:
            found[name] = number
    if names := _names(metadata(f"{PREFIX}sequence") or ""):
        found["samplers"] = names
    return found


def _number(key: str, text: str, kind: type[int] | type[float]) -> int | float | None:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        logger.warning("the file has %s = %.40r: expected a number; it is left out", key, text)
        return None
    return kind(number)  # a file may have 40.0 where llama.cpp reads a whole number


def _names(text: str) -> tuple[str, ...]:
    names = [name for name in text.lower().split(";") if name]
    if unknown := [name for name in names if name not in ALIASES]:
        logger.warning("the file orders samplers that are not known here, which are left out: %.80r", ", ".join(unknown))
    return tuple(dict.fromkeys(ALIASES[name] for name in names if name in ALIASES))


UNSET = Sampling()
