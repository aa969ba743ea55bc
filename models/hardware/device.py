"""The devices that ggml was built for and found, with their memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_cpp
from llama_cpp._ctypes_extensions import load_shared_library

from .. import log

# The package's own `_ggml` looks beside itself even where LLAMA_CPP_LIB_PATH names another build of the libraries.
FOLDER = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")
libggml = load_shared_library("ggml", FOLDER)
KINDS = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")


@dataclass(frozen=True, slots=True)
class Device:
    """name: ggml's ("CUDA0", "CPU"). free, total: bytes of memory, 0 where the backend does not say."""

    name: str
    description: str
    kind: str
    free: int
    total: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("GPU", "integrated GPU")


@cache
def load_backends() -> None:
    """Make ready llama.cpp's backends, once in a process.

    Some builds have them as libraries beside its own, and GGML_BACKEND_PATH names one of another place.
    """
    log.capture()
    llama_cpp.llama_backend_init()
    libggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    libggml.ggml_backend_load_all_from_path(os.fsencode(FOLDER))


def devices() -> list[Device]:
    """Every device of this build, GPUs first."""
    return sorted(map(_device, _handles()), key=lambda device: not device.is_gpu)


def _handles() -> list[int]:
    load_backends()
    library = libggml
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    return [library.ggml_backend_dev_get(index) for index in range(library.ggml_backend_dev_count())]


def _device(handle: int) -> Device:
    library = libggml
    pointer = ctypes.c_void_p(handle)
    for function in (library.ggml_backend_dev_name, library.ggml_backend_dev_description):
        function.restype = ctypes.c_char_p
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=library.ggml_backend_dev_name(pointer).decode(),
        description=library.ggml_backend_dev_description(pointer).decode("utf-8", "replace"),
        kind=KINDS[library.ggml_backend_dev_type(pointer)],
        free=free.value,
        total=total.value,
    )


def buffer_types() -> dict[str, int]:
    """Return the address of each device's usual kind of memory, by ggml's name for it."""
    library = libggml
    library.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    library.ggml_backend_buft_name.restype = ctypes.c_char_p
    kinds = [library.ggml_backend_dev_buffer_type(ctypes.c_void_p(handle)) for handle in _handles()]
    return {library.ggml_backend_buft_name(ctypes.c_void_p(kind)).decode(): kind for kind in kinds if kind}


def supports_offload() -> bool:
    """Whether this build of llama.cpp can put layers on a GPU at all."""
    return bool(llama_cpp.llama_supports_gpu_offload())
