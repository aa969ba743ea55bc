"""The LoRA adapters that a request asks for."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MOST_ADAPTERS, MOST_SCALE = 64, 1e4  # adapters of a request, the scale of one

Scale = Annotated[float, Meta(ge=-MOST_SCALE, le=MOST_SCALE)]


class AdapterScale(Struct, frozen=True):
    """A LoRA adapter by its number, and its scale."""

    id: Annotated[int, Meta(ge=0)]
    scale: Scale


AdapterList = Annotated[list[AdapterScale], Meta(max_length=MOST_ADAPTERS)]


class AdapterScales(Struct, frozen=True):
    """`POST /lora-adapters`: a list of these alone, as llama-server has it, or in this field. Others get a scale of 0."""

    adapters: AdapterList
