"""Tensors that stand elsewhere than their layer: the experts of a mixture, which many cards have no memory for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..errors import ModelError
from ..hardware.device import buffer_types
from .breakdown import HOST

EXPERTS = r"\.ffn_(gate|up|gate_up|down)_(ch)?exps"
"""The names of expert tensors, behind their block."""

MOST_LAYERS = 512  # of any model, by llama.cpp


class Row(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Override:
    """The place of the tensors whose name a regular expression matches. buffer: ggml's name of a kind of memory."""

    pattern: str
    buffer: str


def parse_overrides(text: str) -> tuple[Override, ...]:
    """Parse PATTERN=BUFFER,... as llama-server's --override-tensor has it. Raises ModelError."""
    found = []
    for entry in filter(None, text.split(",")):
        pattern, equals, buffer = entry.rpartition("=")
        known = buffer_types()
        if not equals or not pattern or buffer not in known:
            raise ModelError(f"--override-tensor {entry}: expected PATTERN=BUFFER, a buffer of {', '.join(known)}")
        found.append(Override(pattern, buffer))
    return tuple(found)


def experts_on_host(num_layers: int) -> tuple[Override, ...]:
    """Keep the experts of the first layers in host memory."""
    return tuple(Override(rf"blk\.{layer}{EXPERTS}", HOST) for layer in range(min(num_layers, MOST_LAYERS)))


def as_array(overrides: tuple[Override, ...]) -> ctypes.Array[Row] | None:
    """Return llama.cpp's array, which must live as long as a model may be loaded with it; None: there are none."""
    if not overrides:
        return None
    known = buffer_types()
    rows = [(override.pattern.encode(), known[override.buffer]) for override in overrides]
    return (Row * (len(rows) + 1))(*rows, (None, None))
