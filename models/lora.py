"""LoRA adapters: loads adapters, and applies a set of them, with scales, for each request."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..slots.scope import OF_PROCESS
from . import llama
from .errors import ModelError, UnknownAdapter
from .model import Model, check_file
from .model_files import KnownFiles

NO_ADAPTERS = ""  # the name of the empty set
SOFTWARE = "llvmpipe"  # in the description of Mesa's Vulkan for CPUs, where some requests damage llama.cpp's heap


class Adapters:
    """The adapters of a model, numbered from 0. Create this object before any context of the model.

    The adapters are freed with the weights, and loaded again with them. A set of adapters has a name, which contains the
    adapters' scales and the digests of their files. KV that was computed with sets of the same name is equal bit for bit,
    until the weights are unloaded. KV of a single adapter is also equal bit for bit after later loads and in other
    processes. llama.cpp adds several adapters in the order of their addresses, so each load rounds their sum differently.

    usual: the scale of each adapter for requests that set no scale. After the load, only the event loop uses `usual`.
    """

    def __init__(self, model: Model, paths: Sequence[Path] = (), scales: Sequence[float] = ()) -> None:
        self.paths, self.usual = tuple(paths), dict.fromkeys(range(len(paths)), 0.0) | dict(enumerate(scales))
        for path in paths:
            check_file(path)
        if bad := [device for device in model.split.devices() if paths and SOFTWARE in device.description]:
            raise ModelError(f"LoRA adapters end the process on {bad[0]}: --device none computes them on the CPU")
        self._model, files = model, [KnownFiles([path]) for path in paths]
        self._load()
        self._digests = [known.digest()[:16] for known in files]
        model.weights.known += files
        self._process = secrets.token_hex(4)
        model.weights.on_load.append(self._load)

    def _load(self) -> None:
        """Load all adapters. When the model's weights are freed, the adapters are freed, too. Raises ModelError."""
        self._handles = [_load(self._model, path) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def set_usual(self, scales: Mapping[int, float]) -> None:
        """Change the usual scales. An adapter without an entry in `scales` gets the scale 0. Raises UnknownAdapter."""
        self._check(scales)
        self.usual = dict.fromkeys(self.usual, 0.0) | {**scales}

    def name(self, scales: Mapping[int, float] | None = None) -> str:
        """Return the name of the set of adapters with these scales.

        An adapter without a scale, or with scale 0, is not in the set.

        scales: the scales by adapter number; None for the usual scales.

        Raises UnknownAdapter.
        """
        scales = self.usual if scales is None else scales
        self._check(scales)
        used = [(number, float(np.float32(scale))) for number, scale in sorted(scales.items())]
        entries = [f"{number}:{self._digests[number]}*{scale!r}" for number, scale in used if scale]
        return ",".join(entries) + (f"{OF_PROCESS}{self._process}" if len(entries) > 1 else "")

    def _check(self, scales: Mapping[int, float]) -> None:
        for number in scales:
            if not 0 <= number < len(self):
                raise UnknownAdapter(number, len(self))

    def apply(self, context: llama.llama_context_p, name: str) -> None:
        """Let a context compute with the set of adapters that has this name, until the next call."""
        used = [entry.split(":") for entry in name.partition(OF_PROCESS)[0].split(",")] if name else []
        handles = [self._handles[int(number)] for number, _ in used]
        scales = [float(rest.partition("*")[2]) for _, rest in used]
        pointers = (ctypes.c_void_p * len(used))(*handles)
        numbers = (ctypes.c_float * len(used))(*scales)
        llama.llama_set_adapters_lora(context, pointers, len(used), numbers)


def _load(model: Model, path: Path):
    """Load one adapter. Raises ModelError."""
    handle = llama.llama_adapter_lora_init(model.handle, str(path).encode())
    if not handle:
        raise ModelError(f"cannot load the LoRA adapter {path}: {llama.last_complaint()}")
    if llama.llama_adapter_get_alora_n_invocation_tokens(handle):
        raise ModelError(f"{path} is an activated LoRA adapter, which applies to a part of the prompt only: not supported")
    return handle
