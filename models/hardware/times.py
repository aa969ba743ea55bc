"""The times of a model's work on one device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..digest import cache_folder, keep
from .device import Device

NUMBERS = {"int": int, "float": float}
LARGEST = 1 << 16  # bytes of a file of times


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds, and the numbers of tokens and cells that they are for.

    step, chunk, double: one token, `chunk_tokens`, and twice that, in an empty pool. short_deep, chunk_deep: one token less
    than a chunk, and a chunk, behind `depth` tokens. step_idle, chunk_idle: beside `idle` cells of other prompts. save,
    restore: a run of `depth` tokens to host memory and back; save_few, restore_few: of `few` tokens.
    depth and idle are 0 for a model whose memory cannot be cut: its runs do not move.
    """

    chunk_tokens: int
    step: float
    chunk: float
    double: float
    depth: int = 0
    short_deep: float = 0.0
    chunk_deep: float = 0.0
    few: int = 0
    save: float = 0.0
    restore: float = 0.0
    save_few: float = 0.0
    restore_few: float = 0.0
    idle: int = 0
    step_idle: float = 0.0
    chunk_idle: float = 0.0


@dataclass(frozen=True, slots=True)
class Subject:
    """All that times depend on: the device, the build of llama.cpp, the shape of the model, and the settings."""

    device: list[object]
    engine: list[object]
    model: list[object]
    settings: list[object]


def kept_times(subject: Subject) -> Times | None:
    """Return the times that are kept of a subject; None: none are, or they cannot be read."""
    return _read(_place(subject))[1]


def keep_times(subject: Subject, times: Times) -> None:
    """Keep times in the user's cache directory, beside the digests. Without one, a device is timed at every start."""
    with contextlib.suppress(OSError):
        keep(_place(subject), json.dumps(asdict(subject) | {"times": asdict(times)}, indent=1))


def times_on(device: Device) -> Iterator[tuple[str, Times]]:
    """Yield the models that were timed on a device, with their times."""
    for path in sorted(_folder().glob("*.json")):
        found, times = _read(path)
        if times is not None and found.get("device") == identify(device):
            yield str(found["model"][0]), times


def identify(device: Device) -> list[object]:
    return [device.name, device.description, device.total]


def summarize(times: Times) -> str:
    """Return the times in one line."""
    line = f"a token {1e3 * times.step:.2f} ms, {times.chunk_tokens} tokens {1e3 * times.chunk:.2f} ms"
    if not times.idle:
        return line
    kept = 1e9 * max(times.step_idle - times.step, 0.0) / times.idle
    return (
        f"{line}, {times.depth} tokens to host memory {1e3 * times.save:.2f} ms and back {1e3 * times.restore:.2f} ms, "
        f"{kept:.0f} ns a step for an idle cell"
    )


def _read(path: Path) -> tuple[dict, Times | None]:
    """Return what a file holds, and its times; None: it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST))
        Subject(**{field.name: list(found[field.name]) for field in fields(Subject)})
        numbers = {field.name: NUMBERS[str(field.type)](found["times"][field.name]) for field in fields(Times)}
        if numbers["chunk_tokens"] and all(math.isfinite(number) and number >= 0 for number in numbers.values()):
            return found, Times(**numbers)
    return {}, None


def _folder() -> Path:
    return cache_folder() / "times"


def _place(subject: Subject) -> Path:
    name = hashlib.blake2b(json.dumps(asdict(subject)).encode(), digest_size=16).hexdigest()
    return _folder() / f"{name}.json"
