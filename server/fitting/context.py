"""From settings to the context of a model."""

from __future__ import annotations

from ...models.context import ContextSettings, num_sequences
from ...models.hardware.cores import fast_cores
from ...models.model import Model
from ..settings import Settings

DEFAULT_CONTEXT = 16384  # cells without --ctx-size, for models that were trained for more


def num_cells(settings: Settings, model: Model) -> int:
    """Return the cells that a server wants."""
    return settings.ctx_size or min(model.context_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def context_settings(settings: Settings, model: Model) -> ContextSettings:
    return ContextSettings(
        num_cells=num_cells(settings, model),
        batch=max(settings.batch_size, settings.parallel),
        micro_batch=settings.ubatch_size,
        flash_attention=settings.flash_attn,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        threads=settings.threads or fast_cores(),
        num_sequences=num_sequences(model, settings.parallel, moves_idle=settings.cache_ram > 0),
    )
