"""The sampling fields of all bodies, and their defaults."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self

import numpy as np
from msgspec import Meta, defstruct

from ...models.sampling_params import ALIASES, FLOAT, NUMBERS, SAMPLERS, UNSET, Sampling
from ..config.settings import Draft, Settings, SettingsError
from ..http.api_errors import RequestError

JsonValue = Any  # a decoded value whose type is not checked here: msgspec knows no `object`
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Window = Annotated[int, Meta(ge=-1, lt=1 << 31)]  # a number of tokens or a time; -1: the longest
MAX_BIASES = 1 << 15  # most tokens of a logit_bias: their logits change at every token
MAX_PROBS, MAX_TOP = 100, 20  # most candidates listed for each token, in llama-server's field and in OpenAI's field
MOST_LISTED = 4_000_000  # most tokens with probabilities in an unstreamed answer: each takes 80 bytes
MAX_SAMPLERS, MAX_BREAKERS, MAX_BREAKER = 32, 64, 256  # most names; texts that end a repetition; characters of such a text


class SamplingVocabulary(Protocol):
    """The parts of a model that the sampling fields need."""

    num_vocab: int

    @property
    def ends(self) -> frozenset[int]: ...

    def tokenize(self, text: str, special: bool = False, begin: bool = False) -> np.ndarray: ...


def _given(name: str) -> tuple[str, Any, None]:
    """Return the definition of a field for a number: its name, type and default.

    If numbers outside the field's range are refused, the type has this range. If such numbers are clamped instead, the
    type has no range, and the clamping happens later.
    """
    parameter = NUMBERS[name]
    kind: Any = Int32
    if not isinstance(getattr(UNSET, name), int):
        kind = Annotated[float, Meta(ge=parameter.least, le=parameter.most)] if parameter.is_strict else float
    elif parameter.is_strict:
        kind = Annotated[int, Meta(ge=parameter.least, lt=parameter.most + 1)]
    return name, kind | None, None


Numeric = defstruct("Numeric", [_given(name) for name in NUMBERS], frozen=True)
"""A struct with a field for each parameter that is a number."""


class SamplingOptions(Numeric, frozen=True):
    """The sampling fields. A number outside its range is clamped, unless the type of its field refuses it.

    `Numeric` already declares all fields for numbers. This class declares a field for a number again only if the field is
    OpenAI's, or if its range differs from its parameter's range.
    """

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, JsonValue] | list[JsonValue] | None = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None

    repeat_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(min_length=1, max_length=MAX_BREAKERS)] | None = None
    samplers: str | list[str] | None = None
    ignore_eos: bool | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] | None = None
    post_sampling_probs: bool = False

    def check_sampling(self) -> None:
        """Refuse fields that contradict each other. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true beside it", param="top_logprobs")
        if any(len(text) > MAX_BREAKER for text in self.dry_sequence_breakers or ()):
            raise RequestError(
                f"dry_sequence_breakers: expected at most {MAX_BREAKER} characters each", param="dry_sequence_breakers"
            )

    def sampling(self, vocabulary: SamplingVocabulary, defaults: Sampling) -> Sampling:
        """Return the sampling parameters: the request's values, and the defaults for unset fields. Raises RequestError."""
        given: dict[str, JsonValue] = {name: value for name in NUMBERS if (value := getattr(self, name)) is not None}
        if given.get("dry_base", 1) < 1:
            del given["dry_base"]
        if self.samplers is not None:
            given["samplers"] = _names_of(self.samplers, vocabulary)
        if self.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias, vocabulary)
        if self.ignore_eos is not None:
            given["banned"] = vocabulary.ends if self.ignore_eos else frozenset()
        given |= {"n_probs": self._num_probs(), "post_sampling_probs": self.post_sampling_probs}
        return defaults.changed(given)

    @property
    def shows_tokens(self) -> bool:
        return self._num_probs() is not None

    def _num_probs(self) -> int | None:
        """Return the number of candidates to list for each token; None: the request asks for no log probabilities."""
        if self.n_probs:
            return self.n_probs
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.logprobs if self.logprobs is not True else self.top_logprobs or 0


def _names_of(samplers: str | Sequence[str], vocabulary: SamplingVocabulary) -> tuple[str, ...]:
    """Return the names of samplers. samplers: a list of names, or a text of letters. Raises RequestError."""
    if len(samplers) > MAX_SAMPLERS:
        raise RequestError(f"samplers: expected at most {MAX_SAMPLERS} of them", param="samplers")
    known = {letter: name for name, letter in SAMPLERS.items()} if isinstance(samplers, str) else ALIASES
    for given in samplers:
        if given.lower() not in known:
            wanted = ", ".join(f"{name} ({letter})" for name, letter in SAMPLERS.items())
            raise RequestError(f"samplers has {reprlib.repr(given)}: expected some of {wanted}", param="samplers")
    names = tuple(known[given.lower()] for given in samplers)
    if "infill" in names and not vocabulary.ends:
        raise RequestError("samplers has 'infill', and the model has no token that ends an answer", param="samplers")
    return names


def _biases(given: dict[str, JsonValue] | Sequence[JsonValue], vocabulary: SamplingVocabulary) -> dict[int, float]:
    """Return the bias of each token, by its id. Raises RequestError.

    If an entry has a text instead of an id, its bias applies to all tokens of the text. If several entries apply to a
    token, their biases are added.
    """
    if len(given) > MAX_BIASES:
        raise _wrong_bias(f"it has {len(given):,} entries: expected at most {MAX_BIASES:,}")
    biases: dict[int, float] = {}
    for token, bias in _tokens_with_biases(given, vocabulary):
        if not 0 <= token < vocabulary.num_vocab:
            raise _wrong_bias(f"it names token {reprlib.repr(token)}: expected an id from 0 to {vocabulary.num_vocab - 1}")
        biases[token] = biases.get(token, 0.0) + bias
    if len(biases) > MAX_BIASES:
        raise _wrong_bias(f"its texts have {len(biases):,} tokens: expected at most {MAX_BIASES:,}")
    if sum(bias == -math.inf for bias in biases.values()) >= vocabulary.num_vocab:
        raise _wrong_bias("it forbids every token")
    return biases


def _tokens_with_biases(
    given: dict[str, JsonValue] | Sequence[JsonValue], vocabulary: SamplingVocabulary
) -> Iterable[tuple[int, float]]:
    pairs = given.items() if isinstance(given, dict) else given
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _wrong_bias(f"it has {reprlib.repr(pair)}: expected a token and its bias")
        name, value = pair
        bias = _bias(value)
        if isinstance(name, str) and not re.fullmatch(r"-?[0-9]+", name):
            yield from ((int(token), bias) for token in vocabulary.tokenize(name))
        elif type(name) is int or (isinstance(name, str) and len(name) < 10):
            yield int(name), bias
        else:
            raise _wrong_bias(f"it names {reprlib.repr(name)}: expected an id or a text")


def _bias(value: JsonValue) -> float:
    if value is False:
        return -math.inf
    if isinstance(value, int | float) and value is not True:
        return float(min(max(value, -FLOAT), FLOAT))
    raise _wrong_bias(f"it has the bias {reprlib.repr(value)}: expected a number, or false for never")


def _wrong_bias(why: str) -> RequestError:
    return RequestError(f"logit_bias: {why}", param="logit_bias")


# ---- The defaults of a request's fields, from the settings. -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The defaults for fields that a request does not set.

    caches: the default of `cache_prompt`. limit: the default of `max_tokens`; -1: no limit. sampling: the defaults of the
    sampling fields.
    """

    caches: bool
    draft: Draft
    limit: int
    sampling: Sampling

    @classmethod
    def of(cls, settings: Settings, vocabulary: SamplingVocabulary, of_file: Mapping[str, Any] | None = None) -> Self:
        """Return the defaults that the settings give. Raises SettingsError.

        of_file: the sampling parameters that the model's file recommends. A recommended value applies if the user has not
        set its parameter.
        """
        unset = {name: value for name, value in (of_file or {}).items() if not settings.is_given(name)}
        samplers = unset.pop("samplers", settings.samplers.split(";"))
        asked = SamplingOptions(
            samplers=settings.sampling_seq or [name for name in samplers if name],
            dry_sequence_breakers=_breakers(settings.dry_sequence_breaker),
            logit_bias=[_default_bias(text) for text in settings.logit_bias.split(",") if text],
            ignore_eos=settings.ignore_eos,
        )
        numbers = Sampling().changed({name: getattr(settings, name) for name in NUMBERS} | unset)
        try:
            sampling = asked.sampling(vocabulary, numbers)
        except RequestError as error:
            raise SettingsError(f"the settings of sampling: {error}") from None
        draft = settings.draft_mode
        return cls(caches=settings.cache_prompt, draft=draft, limit=settings.predict, sampling=sampling)


def _breakers(text: str) -> list[str] | None:
    """Return the texts in --dry-sequence-breaker; None: it is unset, so that llama-server's default texts apply."""
    if not text or text == "none":
        return [] if text else None
    return [line.replace("\\n", "\n").replace("\\t", "\t") for line in text.split("\n")]


def _default_bias(text: str) -> tuple[int, float | bool]:
    """Parse a token and its bias, such as 15043+1, 15043-0.5, or 15043-inf for never. Raises SettingsError."""
    found = re.fullmatch(r"\s*([0-9]{1,9})(?:(-inf)|([+-][0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?))\s*", text)
    if found is None:
        raise SettingsError(f"--logit-bias {text!r}: expected a token's id and a bias, such as 15043+1 or 15043-inf")
    return int(found[1]), False if found[2] else float(found[3])
