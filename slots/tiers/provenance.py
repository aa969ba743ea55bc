"""The model and the settings that computed a run's KV. Only the same model with the same settings may take it back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Provenance:
    """model: the digest of its files. settings: the digest of every setting that changes KV. Each 32 hexadecimal digits."""

    model: str
    settings: str

    @property
    def folder(self) -> str:
        """The name of the folder for just this KV."""
        return hashlib.blake2b((self.model + self.settings).encode(), digest_size=8).hexdigest()
