"""The values of fields that a request leaves out, as the settings say them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...models.samplers.parameters import NUMBERS, Sampling
from ..errors import RequestError
from ..flags.setting import SettingsError
from ..settings import Settings
from .sampling import SamplingOptions, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """caches: of `cache_prompt`. drafts: of `draft`. limit: of `max_tokens`; -1: no limit. sampling: of all its fields."""

    caches: bool
    drafts: bool
    limit: int
    sampling: Sampling

    @classmethod
    def of(cls, settings: Settings, vocabulary: Vocabulary, of_file: Mapping[str, Any] | None = None) -> Self:
        """Return the defaults that the settings say. Raises SettingsError.

        of_file: the sampling that the model's file recommends, for the settings that are not given.
        """
        unset = {name: value for name, value in (of_file or {}).items() if not settings.is_given(name)}
        samplers = unset.pop("samplers", settings.samplers.split(";"))
        asked = SamplingOptions(
            samplers=settings.sampling_seq or [name for name in samplers if name],
            dry_sequence_breakers=_breakers(settings.dry_sequence_breaker),
            logit_bias=[_bias(text) for text in settings.logit_bias.split(",") if text],
            ignore_eos=settings.ignore_eos,
        )
        numbers = Sampling().changed({name: getattr(settings, name) for name in NUMBERS} | unset)
        try:
            sampling = asked.sampling(vocabulary, numbers)
        except RequestError as error:
            raise SettingsError(f"the settings of sampling: {error}") from None
        drafts = settings.draft != "off"
        return cls(caches=settings.cache_prompt, drafts=drafts, limit=settings.predict, sampling=sampling)


def _breakers(text: str) -> list[str] | None:
    """Return the texts of --dry-sequence-breaker; None: llama-server's."""
    if not text or text == "none":
        return [] if text else None
    return [line.replace("\\n", "\n").replace("\\t", "\t") for line in text.split("\n")]


def _bias(text: str) -> tuple[int, float | bool]:
    """Return a token and its bias: 15043+1, 15043-0.5, 15043-inf for never. Raises SettingsError."""
    found = re.fullmatch(r"\s*([0-9]{1,9})(?:(-inf)|([+-][0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?))\s*", text)
    if found is None:
        raise SettingsError(f"--logit-bias {text!r}: expected a token's id and a bias, such as 15043+1 or 15043-inf")
    return int(found[1]), False if found[2] else float(found[3])
