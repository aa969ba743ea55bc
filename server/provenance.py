"""What KV was computed with. Only the same model with the same settings may take it back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import llama_cpp

from ..models.context import Context
from ..models.device import devices
from ..models.model import Model
from .settings import Settings

SHAPING = ("cache_type_k", "cache_type_v", "flash_attn", "repack", "gpu_layers")


@dataclass(frozen=True, slots=True)
class Provenance:
    """model: the digest of its files. settings: the digest of all else that makes KV differ. Both 32 hexadecimal digits."""

    model: str
    settings: str

    @property
    def folder(self) -> str:
        """The name of a folder for just this KV."""
        return hashlib.blake2b((self.model + self.settings).encode(), digest_size=8).hexdigest()


def provenance_of(settings: Settings, model: Model, context: Context) -> Provenance:
    """What this server's KV is computed with. Reads the whole model where that was never done. Raises ModelError."""
    parts = (
        context.num_cells if model.rope_depends_on_context else 0,
        llama_cpp.__version__,
        *(device.description for device in devices()),
        *(getattr(settings, name) for name in SHAPING),
    )
    return Provenance(model.digest(), hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest())
