"""The provenance of this server's KV, and its fingerprint, from its settings and its model."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version

import llama_cpp

from ..models.context import Context
from ..models.hardware.device import devices
from ..models.model import Model
from ..slots.tiers.provenance import Provenance
from .settings import Settings

SAMPLE = 1 << 16  # bytes


def build_info() -> str:
    """Return the build: of llama.cpp, and of this server."""
    return f"b{llama_cpp.__version__}-slotcache-{_version()}"


def fingerprint_of(settings: Settings, model: Model, template: str) -> str:
    """Return OpenAI's `system_fingerprint`: the same for every server of this build, this model and these settings.

    It begins with the build, as llama-server's does. Of the weights it reads only the end of the file.
    """
    with model.path.open("rb") as file:
        file.seek(max(model.path.stat().st_size - SAMPLE, 0))
        end = file.read(SAMPLE)
    parts = (_version(), model.description, model.size, end, template, *_shaping(settings))
    return f"b{llama_cpp.__version__}-{hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()}"


def provenance_of(settings: Settings, model: Model, context: Context) -> Provenance:
    """Return the provenance of this server's KV. Reads the whole model the first time. Raises ModelError."""
    parts = (
        context.num_cells if model.rope_depends_on_context else 0,
        llama_cpp.__version__,
        *_shaping(settings),
    )
    return Provenance(model.digest(), hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest())


def _shaping(settings: Settings) -> tuple[object, ...]:
    """Return the devices and the settings that shape KV."""
    return (
        *(device.description for device in devices()),
        settings.cache_type_k,
        settings.cache_type_v,
        settings.flash_attn,
        settings.repack,
        settings.gpu_layers,
        *(settings.n_cpu_moe, settings.cpu_moe, settings.override_tensor),
    )


def _version() -> str:
    try:
        return version("slotcache")
    except PackageNotFoundError:
        return "0"
