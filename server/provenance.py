"""The provenance of this server's KV, from its settings and its model."""

from __future__ import annotations

import hashlib

import llama_cpp

from ..models.context import Context
from ..models.device import devices
from ..models.model import Model
from ..slots.tiers.provenance import Provenance
from .settings import Settings


def provenance_of(settings: Settings, model: Model, context: Context) -> Provenance:
    """Return the provenance of this server's KV. Reads the whole model the first time. Raises ModelError."""
    parts = (
        context.num_cells if model.rope_depends_on_context else 0,
        llama_cpp.__version__,
        *(device.description for device in devices()),
        settings.cache_type_k,
        settings.cache_type_v,
        settings.flash_attn,
        settings.repack,
        settings.gpu_layers,
    )
    return Provenance(model.digest(), hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest())
