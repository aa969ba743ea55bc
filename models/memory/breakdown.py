"""The memory that a context takes on each device, by llama.cpp's own count.

Of all places that tell it only one is whole, a C++ function of libllama that llama-server's `--fit` asks, too. The log
counts no weights unless they are loaded, and no public function counts anything. Weights could be counted from the
file, yet the place of each tensor is llama.cpp's choice: it depends on the device, the layer, and the operations that a
backend has.

The function returns a `std::map`, which is read here as GNU's library lays it out. llama-cpp-python is pinned to one
version, so no other layout can come with an update unseen; a map that looks otherwise is an error and not a wrong number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import llama_cpp

from ..errors import NotCounted
from ..hardware.device import libggml

HOST = "CPU"
FUNCTION = "_Z26llama_get_memory_breakdownPK13llama_context"
MOST_BUFFERS = 256  # kinds of buffers; a larger number is no number


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes on one device. kv: with recurrent states. compute: the graphs' buffer."""

    device: str
    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


class _Map(ctypes.Structure):
    _fields_ = (
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_size_t),
        ("root", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    )


class _Node(ctypes.Structure):
    _fields_ = (
        ("color", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("buffer_type", ctypes.c_void_p),
        ("weights", ctypes.c_size_t),
        ("kv", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    )


def breakdown(context: llama_cpp.llama_context_p) -> tuple[Use, ...]:
    """Return the use of each device. Raises NotCounted if this build of llama.cpp does not tell it.

    llama.cpp leaves out the logits of a step in host memory, a row for each sequence: they are added.
    """
    function = getattr(llama_cpp.llama_cpp._lib, FUNCTION, None)
    if function is None:
        raise NotCounted("this build of llama.cpp does not tell what memory it takes: --fit has no effect")
    function.restype, function.argtypes = _Map, [llama_cpp.llama_context_p_ctypes]
    found = function(context)  # its few nodes stay allocated: only C++ can free them
    if found.count > MOST_BUFFERS or bool(found.root) != bool(found.count):
        raise NotCounted("this build of llama.cpp tells the memory that it takes in an unknown way: --fit has no effect")
    uses = {HOST: Use(HOST, 0, 0, _logit_bytes(context))}
    for node in _nodes(found.root):
        name = _device_of(node.buffer_type)
        use = uses.get(name, Use(name, 0, 0, 0))
        uses[name] = replace(
            use, weights=use.weights + node.weights, kv=use.kv + node.kv, compute=use.compute + node.compute
        )
    return tuple(sorted(uses.values(), key=lambda use: use.device == HOST))


def _logit_bytes(context: llama_cpp.llama_context_p) -> int:
    model = llama_cpp.llama_get_model(context)
    assert model
    vocab = llama_cpp.llama_model_get_vocab(model)
    assert vocab
    return llama_cpp.llama_n_seq_max(context) * llama_cpp.llama_vocab_n_tokens(vocab) * ctypes.sizeof(ctypes.c_float)


def _nodes(address: int | None) -> Iterator[_Node]:
    if address:
        node = _Node.from_address(address)
        yield from _nodes(node.left)
        yield node
        yield from _nodes(node.right)


def _device_of(buffer_type: int) -> str:
    """Return the name of the device that a buffer's memory belongs to. Memory that a device shares is the host's."""
    library, pointer = libggml, ctypes.c_void_p(buffer_type)
    library.ggml_backend_buft_is_host.restype = ctypes.c_bool
    library.ggml_backend_buft_get_device.restype = ctypes.c_void_p
    library.ggml_backend_dev_name.restype = ctypes.c_char_p
    device = library.ggml_backend_buft_get_device(pointer)
    if library.ggml_backend_buft_is_host(pointer) or not device:
        return HOST
    return library.ggml_backend_dev_name(ctypes.c_void_p(device)).decode()
