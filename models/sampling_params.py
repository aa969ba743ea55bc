"""The sampling parameters of a request, with the bounds of each number, and the parameters that a file recommends."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from .detokenizer import ReasoningLimit
    from .grammar import Grammar


T = TypeVar("T", int, float)
Number = int | float
FLOAT, INT = 3.0e38, (1 << 31) - 1  # the largest numbers that llama.cpp's samplers accept
RANDOM = (1 << 32) - 1  # the seed that llama.cpp replaces by a random one; -1 has the same bits
MAX_WINDOW = 4096  # most tokens that penalties look back on, so that a longer context does not make steps slower
SAMPLERS = {  # the samplers that a request can order, each with its letter
    "penalties": "e", "dry": "d", "top_n_sigma": "s", "top_k": "k", "typ_p": "y", "top_p": "p", "min_p": "m", "xtc": "x",
    "temperature": "t", "infill": "i", "adaptive_p": "a",
}  # fmt: skip
ALIASES = (  # llama.cpp's names of the samplers
    {name.replace("_", mark): name for name in SAMPLERS for mark in ("_", "-", "")}
    | {"temp": "temperature", "typ": "typ_p", "nucleus": "top_p"}
)  # fmt: skip
FEW = 1000  # the largest `top_k` for which sorting is fast
ORDER = tuple(name for name in SAMPLERS if name not in ("infill", "adaptive_p"))
NUMBER = "number"  # key in the metadata of a field
BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that is a number.

    least, most: the bounds of the number.
    is_strict: refuse a number outside the range, instead of taking the nearest number in it.
    """

    help: str
    flags: tuple[str, ...]
    least: Number
    most: Number
    is_strict: bool

    def nearest(self, number: Number) -> Number:
        return min(max(number, self.least), self.most)


def number(
    default: T,
    help: str,
    *flags: str,
    least: Number | None = None,
    most: Number | None = None,
    strict: bool = False,
) -> T:
    """Declare a parameter.

    flags: the flags of the parameter. By default, the field's name becomes its only flag.
    least: the lower bound. By default, an int has the lower bound 0, and a float has none.
    """
    if least is None:
        least = 0 if isinstance(default, int) else -FLOAT
    if most is None:
        most = INT if isinstance(default, int) else FLOAT
    return field(default=default, metadata={NUMBER: Parameter(help, flags, least, most, is_strict=strict)})


@dataclass(frozen=True, slots=True)
class Numbers:
    """The parameters that are numbers, named as in requests.

    Each number is a field of a request, and a setting of the server.
    """

    temperature: float = number(0.8, "0: the most probable token", "--temp", "--temperature", least=0.0)
    dynatemp_range: float = number(0.0, "how far the entropy moves the temperature")
    dynatemp_exponent: float = number(1.0, "exponent of the entropy for `dynatemp_range`", "--dynatemp-exp")
    top_k: int = number(40, "the k most probable tokens; 0: all")
    top_p: float = number(0.95, "the most probable tokens up to this total probability; 1: all", least=0.0, most=1.0)
    min_p: float = number(0.05, "tokens with at least this share of the highest probability; 0: all", least=0.0, most=1.0)
    top_n_sigma: float = number(
        -1.0, "tokens within n standard deviations of the best logit; 0 or less: all", "--top-nsigma", "--top-n-sigma"
    )
    typical_p: float = number(
        1.0, "the most typical tokens up to this total probability; 1: all", "--typical", "--typical-p"
    )
    min_keep: int = number(0, "fewest tokens that `top_p`, `min_p`, `typical_p` and `xtc` keep", strict=True)
    xtc_probability: float = number(
        0.0, "how often all tokens above `xtc_threshold` but the least probable are removed", least=0.0, most=1.0
    )
    xtc_threshold: float = number(0.1, "XTC's probability threshold; above 0.5: off", least=0.0, most=1.0)
    repeat_last_n: int = number(
        64, f"last tokens that penalties consider; -1: {MAX_WINDOW}, the most", least=-1, strict=True
    )
    repeat_penalty: float = number(1.0, "divisor of the logits of used tokens; 1: none", least=1e-30, most=1e30, strict=True)
    presence_penalty: float = number(0.0, "subtracted from the logits of used tokens")
    frequency_penalty: float = number(0.0, "subtracted from a token's logit for each use")
    dry_multiplier: float = number(0.0, "penalty of a token that continues a repeated sequence; 0: none")
    dry_base: float = number(1.75, "growth of the `dry_multiplier` penalty with each token, at least 1")
    dry_allowed_length: int = number(2, "length up to which a sequence may be repeated", strict=True)
    dry_penalty_last_n: int = number(
        64, f"last tokens that are searched for repeated sequences; -1: {MAX_WINDOW}, the most", least=-1, strict=True
    )
    mirostat: int = number(0, "1 or 2: this Mirostat version replaces all samplers", most=2)
    mirostat_tau: float = number(5.0, "Mirostat's target entropy", "--mirostat-ent")
    mirostat_eta: float = number(0.1, "Mirostat's learning rate", "--mirostat-lr")
    adaptive_target: float = number(-1.0, "target probability of `adaptive_p`; below 0: none", most=1.0)
    adaptive_decay: float = number(0.9, "share of its past that `adaptive_p` keeps", least=0.0, most=0.99, strict=True)
    seed: int = number(-1, "-1: random", "-s", "--seed", least=-(1 << 63), most=1 << 63)


@dataclass(frozen=True, slots=True)
class Sampling(Numbers):
    """The sampling parameters of one request.

    samplers: names of SAMPLERS, in the order of sampling.
    """

    samplers: tuple[str, ...] = ORDER
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned: frozenset[int] = frozenset()  # tokens that are never chosen: the end tokens with `ignore_eos`
    n_probs: int | None = None  # report the logprobs of each token and of this many top tokens
    post_sampling_probs: bool = False  # logprobs after the samplers, instead of the model's
    grammar: Grammar | None = None  # the grammar of the answer
    reasoning: ReasoningLimit | None = None  # how long the answer's reasoning may be

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy of the parameters, with the given values in place of the old ones.

        A number outside its range becomes the nearest number in the range.
        """
        taken = dict(values)
        for name in values.keys() & NUMBERS.keys():
            taken[name] = NUMBERS[name].nearest(values[name])
        return replace(self, **taken)

    def varied(self, choice: int) -> Self:
        """Return the parameters for one of several answers. Each answer gets another seed, so that the answers differ."""
        return self if self.seed in (-1, RANDOM) or not choice else replace(self, seed=(self.seed + choice) % RANDOM)

    def seeded(self) -> Self:
        """Return the parameters with a known seed: -1 is replaced by a random seed."""
        return replace(self, seed=secrets.randbelow(RANDOM)) if self.seed in (-1, RANDOM) else self

    @property
    def repeat_window(self) -> int:
        """How many tokens the penalties look back on; 0 if they are off."""
        none = self.repeat_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return 0 if none else _window(self.repeat_last_n)

    @property
    def dry_window(self) -> int:
        """How many tokens are searched for repeated sequences; 0 if `dry` is off."""
        return 0 if self.dry_multiplier == 0.0 else _window(self.dry_penalty_last_n)

    @property
    def keeps_best(self) -> bool:
        """Whether sampling always chooses the token with the best logit.

        Penalties and biases may change the logits, and so the best token, before sampling chooses.
        """
        if self.temperature > 0 or self.dynatemp_range > 0 or "temperature" not in self.samplers:
            return False
        may_drop = {
            "typ_p": self.typical_p < 1,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "infill": True,
            "adaptive_p": True,
        }
        return not self.mirostat and not any(may_drop.get(name, False) for name in self.samplers)

    @property
    def sorts_all(self) -> bool:
        """Whether a sampler sorts all tokens of the vocabulary."""
        sorters = {"typ_p": self.typical_p < 1, "temperature": self.dynatemp_range > 0, "top_k": self.top_k > FEW}
        first = next((name for name in self.samplers if sorters.get(name) or (name == "top_k" and self.top_k)), "")
        return self.mirostat > 0 or sorters.get(first, False)

    def shown(self) -> dict[str, object]:
        """Return the parameters in force, named as in llama-server's `generation_settings`."""
        numbers: dict[str, object] = {name: getattr(self, name) for name in NUMBERS}
        biases = self.logit_bias | dict.fromkeys(sorted(self.banned), -FLOAT)
        return numbers | {
            "seed": self.seed % (RANDOM + 1),
            "repeat_last_n": _window(self.repeat_last_n),
            "dry_penalty_last_n": _window(self.dry_penalty_last_n),
            "samplers": list(self.samplers),
            "dry_sequence_breakers": list(self.dry_sequence_breakers),
            "logit_bias": [{"token": token, "bias": bias if bias > -FLOAT else None} for token, bias in biases.items()],
            "ignore_eos": bool(self.banned),
            "n_probs": self.n_probs or 0,
            "post_sampling_probs": self.post_sampling_probs,
        }


def _window(wanted: int) -> int:
    return MAX_WINDOW if wanted < 0 else min(wanted, MAX_WINDOW)


def _flags(name: str) -> tuple[str, ...]:
    return (f"--{name.replace('_', '-')}",)


NUMBERS: dict[str, Parameter] = {
    declared.name: replace(parameter, flags=parameter.flags or _flags(declared.name))
    for declared in fields(Numbers)
    if (parameter := declared.metadata[NUMBER])
}
"""The parameters that are numbers, by name."""
GREEDY = Sampling(temperature=0.0)


# ---- Recommended --------------------------------------------------------------------------------------------------------
# The sampling parameters that a GGUF file recommends in its keys `general.sampling.*`. llama-server uses them, too.

logger = logging.getLogger("slotcache")

PREFIX = "general.sampling."
OTHER_NAMES = {"temperature": "temp", "repeat_last_n": "penalty_last_n", "repeat_penalty": "penalty_repeat"}
OF_FILES = (
    *("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "repeat_last_n", "repeat_penalty"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
"""The parameters that llama.cpp reads from a file."""


def recommended(metadata: Callable[[str], str | None]) -> dict[str, Any]:
    """Return the parameters that a model's file recommends, including `samplers`.

    Numbers are returned as in the file, even if they are outside their range: `Sampling.changed` corrects them. Values that
    are not numbers, and unknown samplers, are left out with a warning.

    metadata: returns a value of the file as text; None if the file has none.
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
    return kind(number)  # a file may have 40.0 where llama.cpp reads an integer


def _names(text: str) -> tuple[str, ...]:
    names = [name for name in text.lower().split(";") if name]
    if unknown := [name for name in names if name not in ALIASES]:
        logger.warning("the file orders samplers that are not known here, which are left out: %.80r", ", ".join(unknown))
    return tuple(dict.fromkeys(ALIASES[name] for name in names if name in ALIASES))


UNSET = Sampling()
