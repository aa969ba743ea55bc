"""Checkpoints in pieces of a few MiB, each replaced as a whole."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

PIECE = 63 << 18  # bytes: under 16 MiB
Content = dict[str, Any]  # tensors, numbers and dicts of them, as torch saves and loads them


def save(folder: Path, name: str, content: Content) -> None:
    """Write `name-0.bin`, `name-1.bin`, ...: all pieces are written before the first takes its place."""
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


def load(folder: Path, name: str, device: str = "cpu") -> Content:
    """What `save` wrote. Raises FileNotFoundError, and ValueError where the pieces are not those of one checkpoint."""
    paths = sorted(folder.glob(f"{name}-*.bin"), key=lambda path: int(path.stem.rpartition("-")[2]))
    if not paths:
        raise FileNotFoundError(f"no {name}-0.bin in {folder}")
    data = b"".join(path.read_bytes() for path in paths)
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError(f"the {len(paths)} pieces {name}-*.bin in {folder} are not those of one checkpoint")
    return torch.load(io.BytesIO(data[32:]), map_location=device, weights_only=True)


def halved(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors with 16 bits a number, on the CPU."""
    return {name: tensor.detach().to(dtype).cpu() for name, tensor in tensors.items()}


def halved_state(state: Content) -> Content:
    """An optimizer's state with 16 bits a number; loading makes them wide again."""
    moments = {
        number: {name: value.bfloat16().cpu() if value.ndim else value for name, value in moment.items()}
        for number, moment in state["state"].items()
    }
    return state | {"state": moments}
