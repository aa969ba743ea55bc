"""The weights of an exported model as a checkpoint to train on from, with more layers where they are wanted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from gguf import GGUFReader
from gguf.quants import dequantize

from .checkpoint import Checkpoint
from .export import NAMES
from .network import NetworkShape

TAUGHT = 2  # layers at the end
OUTPUTS = ("attn_output", "ffn_down")


def read(path: Path, shape: NetworkShape) -> Checkpoint:
    """Return the weights of a GGUF that `export` wrote for a network of this shape, without the optimizers' state.

    A network of more layers begins as the same function: its new layers come before the last two, which are taught where to
    look (finders.py), and add nothing until training changes them.
    """
    names = {stored: name for name, stored in NAMES.items()}
    weights = {
        names.get(tensor.name, tensor.name.removesuffix(".weight")): torch.from_numpy(
            dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in GGUFReader(path).tensors
    }
    return {"weights": _grown(weights, shape.layers), "shape": asdict(shape), "progress": {}}


def _grown(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return weights for `layers` layers. New layers copy those below the last two, and their output matrices are zero."""
    had = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))
    front = max(had - TAUGHT, 1)
    sources = [*range(front), *(number % front for number in range(layers - had)), *range(front, had)]
    grown = {name: weight for name, weight in weights.items() if not name.startswith("blk.")}
    for number, source in enumerate(sources):
        is_new = front <= number < front + layers - had
        for name, weight in weights.items():
            if name.startswith(f"blk.{source}."):
                part = name.split(".", 2)[2]
                grown[f"blk.{number}.{part}"] = weight * 0 if is_new and part in OUTPUTS else weight.clone()
    return grown
