"""The tokens that a vocabulary has for filling in the middle of a text (Bavarian et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import llama_cpp

from .model import Model

NEEDED = {
    "prefix": llama_cpp.llama_vocab_fim_pre,
    "suffix": llama_cpp.llama_vocab_fim_suf,
    "middle": llama_cpp.llama_vocab_fim_mid,
}


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Ids. repository, file: in front of a repository's name and of each file's; -1: the vocabulary has none."""

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int

    @classmethod
    def of(cls, model: Model) -> Self | None:
        """Return the tokens of a model; None if it lacks one of the three that every infill needs."""
        needed = {name: int(find(model.vocab)) for name, find in NEEDED.items()}
        if min(needed.values()) < 0:
            return None
        repository, file = llama_cpp.llama_vocab_fim_rep(model.vocab), llama_cpp.llama_vocab_fim_sep(model.vocab)
        return cls(**needed, repository=int(repository), file=int(file))
