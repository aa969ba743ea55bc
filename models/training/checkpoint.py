"""Checkpoints in pieces of a few MiB, each replaced atomically."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import NotRequired, TypedDict

import torch  # pyright: ignore[reportMissingImports]

PIECE = 63 << 18  # bytes: under 16 MiB


class Checkpoint(TypedDict):
    """The content of a checkpoint. shape: fields of a NetworkShape. progress: fields of a Progress.

    optimizers: their states; only in checkpoints to continue from.
    """

    weights: dict[str, torch.Tensor]
    shape: dict
    progress: dict
    optimizers: NotRequired[list[dict]]


def save(folder: Path, name: str, content: Checkpoint) -> None:
    """Write `name-0.bin`, `name-1.bin`, ...: all new pieces are complete before the first one replaces an old piece."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    data = hashlib.sha256(data).digest() + data
    folder.mkdir(parents=True, exist_ok=True)
    moves = []
    for number, start in enumerate(range(0, len(data), PIECE)):
        path = folder / f"{name}-{number}.bin"
        partial = path.with_suffix(".partial")
        partial.write_bytes(data[start : start + PIECE])
        moves.append((partial, path))
    for partial, path in moves:
        os.replace(partial, path)


def load(folder: Path, name: str, device: str = "cpu") -> Checkpoint:
    """Return the content that `save` wrote. Raises FileNotFoundError, and ValueError if the pieces do not match."""
    paths = sorted(folder.glob(f"{name}-*.bin"), key=lambda path: int(path.stem.rpartition("-")[2]))
    if not paths:
        raise FileNotFoundError(f"no {name}-0.bin in {folder}")
    data = b"".join(path.read_bytes() for path in paths)
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError(f"the {len(paths)} pieces {name}-*.bin in {folder} are not those of one checkpoint")
    return torch.load(io.BytesIO(data[32:]), map_location=device, weights_only=True)


def halved(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors with 16 bits a number, on the CPU."""
    return {name: tensor.detach().to(dtype).cpu() for name, tensor in tensors.items()}


def halved_state(state: dict) -> dict:
    """Return an optimizer's state with 16 bits a number; loading widens them again."""
    moments = {
        number: {name: value.bfloat16().cpu() if value.ndim else value for name, value in moment.items()}
        for number, moment in state["state"].items()
    }
    return state | {"state": moments}
