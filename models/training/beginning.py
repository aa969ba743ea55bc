"""The weights of an exported model as a checkpoint to train on from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from gguf import GGUFReader
from gguf.quants import dequantize

from .checkpoint import Checkpoint
from .export import NAMES
from .network import NetworkShape


def read(path: Path, shape: NetworkShape) -> Checkpoint:
    """Return the weights of a GGUF that `export` wrote for a network of this shape, without the optimizers' state."""
    names = {stored: name for name, stored in NAMES.items()}
    weights = {
        names.get(tensor.name, tensor.name.removesuffix(".weight")): torch.from_numpy(
            dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in GGUFReader(path).tensors
    }
    return {"weights": weights, "shape": asdict(shape), "progress": {}}
