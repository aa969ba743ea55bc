"""The only access to llama.cpp: finds its library, checks the layout of its structures, and binds its functions."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import logging
import os
import platform
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Annotated, Any, NewType, TypeVar, get_args, get_type_hints

from ..slots.child import run_child
from . import builds, cards
from .errors import LibraryError
from .trial import PATIENCE, failure

# ---- The library --------------------------------------------------------------------------------------------------------

VARIABLES = ("SLOTCACHE_LLAMA", "LLAMA_CPP_LIB_PATH")
"""Environment variables with a folder whose library is used instead of an installed one."""
NAMES = ("libllama.so", "libllama.v*.so", "libllama.*.v*.so", "xllamacpp*.so", "libllama.dylib")
REMEDY = (
    "pip install 'slotcache[llama]' builds one that fits, slotcache install or 'slotcache[prebuilt]' brings one; "
    "in a checkout, make serve"
)
MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's numbers
SEGMENT = 56  # bytes of a segment's row in an ELF file


@dataclass(frozen=True, slots=True)
class Library:
    """A library file of llama.cpp.

    origin: the package that it came with, or the environment variable that names it.
    version: the package's version, else llama.cpp's.
    """

    path: Path
    origin: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.origin} {self.version}".rstrip()

    def refused(self, reason: str) -> LibraryError:
        return LibraryError(f"llama.cpp of {self} is refused: {self.path} {reason}; {REMEDY}")


PASSED_OVER: dict[str, str] = {}
"""Why a build or a card is not used at this start. The keys are names of builds, `auto` and `hardware.FAILED`."""


def find() -> Library:
    """Return the library to use, from the first place of `places` that is not rejected.

    Raises LibraryError if there is none.

    A build for cards is used only if it passes a trial on a card, in a separate process. If the build fails the trial, the
    next place is tried.
    """
    for place in places():
        build = place.origin.removeprefix("npm-")
        if build not in cards.CARD_BUILDS or not (reason := builds.failure_on_card(build)):
            return _in_folder(place)
        PASSED_OVER[build] = reason
    reasons = "; ".join(f"{build}: {reason}" for build, reason in PASSED_OVER.items())
    raise LibraryError(f"llama.cpp is not installed{f' ({reasons})' if reasons else ''}: {REMEDY}")


def places() -> Iterator[Library]:
    """Yield the places that may have a library, in the order of preference.

    First come the folders in the environment variables VARIABLES, then the builds that `slotcache install` chose (all
    builds for cards if it has not run), then Python packages, and at last npm's other builds.
    """
    for variable in VARIABLES:
        if folder := os.environ.get(variable):
            yield Library(Path(os.path.expanduser(folder)), variable)
    first = builds.installed_builds().builds
    yield from _npm(first)
    for module, package, folder in (("llama_cpp", "llama-cpp-python", "lib"), ("xllamacpp", "xllamacpp", "")):
        if (spec := find_spec(module)) and spec.origin:  # no origin: a folder of that name, not a package
            yield Library(Path(spec.origin).parent / folder, package, _version_of(package))
    yield from _npm([build for build in cards.BUILDS if build not in first])


def _npm(names: Iterable[str]) -> Iterator[Library]:
    for build in names:
        if (folder := builds.package_folder(build)).is_dir():
            origin = "npm" if build == "cpu" else f"npm-{build}"
            yield Library(builds.library_folder(build), origin, _version_in(folder / "package.json"))


def _in_folder(place: Library) -> Library:
    """Return the library in a folder. Raises LibraryError."""
    place = replace(place, path=place.path.absolute())  # a bare name would be searched in the system's folders
    try:
        names = os.listdir(place.path)
        found = [place.path / name for pattern in NAMES for name in sorted(fnmatch.filter(names, pattern))]
        found = [path for path in found if path.is_file()]
    except OSError as error:
        raise place.refused(f"cannot be read: {error.strerror}") from None
    if not found:
        raise place.refused(f"has none of {', '.join(NAMES)}")
    return replace(place, path=found[0])


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _version_in(description: Path) -> str:
    """Return the version in an npm package's description; "" if it has none."""
    try:
        return str(json.loads(description.read_text())["version"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


LOADING = """
import ctypes, sys
class Result(ctypes.Structure): _fields_ = (("bytes", ctypes.c_char * 65536),)
library = ctypes.CDLL(sys.argv[1])
for name in "llama_version", "llama_model_default_params", "llama_context_default_params":
    if function := getattr(library, name, None):
        function.restype = ctypes.c_char_p if name == "llama_version" else Result
        function()
print("passed")
"""
"""A program that loads a library and calls the first functions that this module calls. A result has room for any layout."""


def _open(found: Library) -> ctypes.CDLL:
    """Load a library. Another process loads it first, because the library may crash. Raises LibraryError."""
    try:
        if sys.platform == "linux":
            _check_file(found)
        if reason := failure(found.path, "loads", [sys.executable, "-I", "-S", "-c", LOADING, str(found.path)]):
            raise found.refused(f"cannot be loaded: {reason}")
        return ctypes.CDLL(str(found.path))
    except OSError as error:
        raise found.refused(f"cannot be loaded: {error}") from None


def _check_file(found: Library) -> None:
    """Raise LibraryError if a file is incomplete or for another CPU, since loading it would end the process."""
    with found.path.open("rb") as file:
        head, size = file.read(64), os.fstat(file.fileno()).st_size
        if len(head) < 64 or head[:6] != b"\x7fELF\2\1":
            raise found.refused("is no library of a 64-bit Linux")
        if _number(head, 18, 2) != MACHINES.get(platform.machine()):
            raise found.refused(f"is not for {platform.machine()}, this machine's CPU")
        start, width, count = _number(head, 32, 8), _number(head, 54, 2), _number(head, 56, 2)
        if width != SEGMENT or start + width * count > size:
            raise found.refused("is incomplete")
        file.seek(start)
        rows = file.read(width * count)
    sections_end = _number(head, 40, 8) + _number(head, 58, 2) * _number(head, 60, 2)
    segment_ends = [_number(rows, at + 8, 8) + _number(rows, at + 32, 8) for at in range(0, width * count, width)]
    if max(sections_end, *segment_ends) > size:
        raise found.refused("is incomplete")


def _number(data: bytes, at: int, width: int) -> int:
    return int.from_bytes(data[at : at + width], "little")


LIBRARY = find()
library = _open(LIBRARY)

# ---- The backends beside the library: what they need, and why one is not loaded. ----------------------------------------

BACKENDS = re.compile(r"libggml-(cuda|vulkan|hip|sycl|metal)\b.*\.(so|dylib)")  # backends for cards
CUDA_RUNTIME = re.compile(rb"libcudart\.so\.(\d+)")
HEAD = 1 << 20  # the first bytes of a backend's file, which name the libraries that it needs
OPENING = """
import ctypes, sys
for needed in sys.argv[2:]: ctypes.CDLL(needed, ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1])
"""


def backends() -> list[Path]:
    """Return the backends for cards in the library's folder."""
    with contextlib.suppress(OSError):
        return sorted(path for path in LIBRARY.path.parent.iterdir() if BACKENDS.fullmatch(path.name) and path.is_file())
    return []


def _needed(backend: Path) -> list[Path]:
    """Return the CUDA libraries that a backend needs, from pip packages or the system.

    The system's loader may not find some of these libraries.
    """
    with contextlib.suppress(OSError), backend.open("rb") as file:
        if found := CUDA_RUNTIME.search(file.read(HEAD)):
            return cards.runtime(int(found[1]), cards.root_folder())
    return []


def open_needed() -> None:
    """Open the libraries that the backends need, so that the backends find them in this process."""
    for backend in backends():
        for path in _needed(backend):
            with contextlib.suppress(OSError):  # `why_not_loaded` reports it
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def why_not_loaded(backend: Path) -> str:
    """Return why a backend cannot be opened, with the remedy if it is known. A separate process tries to open it."""
    command = [sys.executable, "-I", "-S", "-c", OPENING, str(backend), *map(str, _needed(backend))]
    try:
        done = run_child(command, timeout=PATIENCE)
    except (OSError, TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return "it can be opened, and finds nothing to compute on"
    said = (done.stderr.decode("utf-8", "replace").splitlines() or [f"ended with code {done.returncode}"])[-1]
    remedy = next((remedy for name, remedy in cards.REMEDIES.items() if name in said), "")
    return said.removeprefix("OSError: ") + (f": {remedy}" if remedy else "")


# ---- The types of llama.h -----------------------------------------------------------------------------------------------

llama_model_p = NewType("llama_model_p", int)
llama_context_p = NewType("llama_context_p", int)
llama_memory_t = NewType("llama_memory_t", int)
llama_vocab_p = NewType("llama_vocab_p", int)
llama_sampler_p = NewType("llama_sampler_p", int)
llama_adapter_lora_p = NewType("llama_adapter_lora_p", int)
ggml_backend_dev_t = NewType("ggml_backend_dev_t", int)
ggml_backend_reg_t = NewType("ggml_backend_reg_t", int)
function_p = NewType("function_p", int)
ggml_backend_buffer_type_t = NewType("ggml_backend_buffer_type_t", int)

llama_token = ctypes.c_int32
ggml_abort_callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
ggml_last_words_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
llama_progress_callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)

LLAMA_VOCAB_TYPE_SPM, LLAMA_VOCAB_TYPE_BPE, LLAMA_VOCAB_TYPE_WPM = 1, 2, 3
LLAMA_ROPE_TYPE_NORM, LLAMA_ROPE_TYPE_NEOX = 0, 2
LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_CONTROL, LLAMA_TOKEN_ATTR_USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
LLAMA_TOKEN_ATTR_LSTRIP, LLAMA_TOKEN_ATTR_RSTRIP = 1 << 7, 1 << 8
LLAMA_KV_OVERRIDE_TYPE_INT, LLAMA_KV_OVERRIDE_TYPE_FLOAT = 0, 1
LLAMA_KV_OVERRIDE_TYPE_BOOL, LLAMA_KV_OVERRIDE_TYPE_STR = 2, 3
LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW = 0, 1, 2
LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED, LLAMA_ROPE_SCALING_TYPE_NONE = -1, 0
LLAMA_ROPE_SCALING_TYPE_LINEAR, LLAMA_ROPE_SCALING_TYPE_YARN = 1, 2
LLAMA_STATE_SEQ_FLAGS_NONE, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY = 0, 1


class llama_model_kv_override_value(ctypes.Union):
    _fields_ = (
        ("val_i64", ctypes.c_int64),
        ("val_f64", ctypes.c_double),
        ("val_bool", ctypes.c_bool),
        ("val_str", ctypes.c_char * 128),
    )


class llama_model_kv_override(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int), ("key", ctypes.c_char * 128), ("value", llama_model_kv_override_value))


class llama_model_params(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", llama_progress_callback),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


class llama_context_params(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("ctx_type", ctypes.c_int),
        ("rope_scaling_type", ctypes.c_int),
        ("pooling_type", ctypes.c_int),
        ("attention_type", ctypes.c_int),
        ("flash_attn_type", ctypes.c_int),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", ctypes.c_void_p),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("embeddings", ctypes.c_bool),
        ("offload_kqv", ctypes.c_bool),
        ("no_perf", ctypes.c_bool),
        ("op_offload", ctypes.c_bool),
        ("swa_full", ctypes.c_bool),
        ("kv_unified", ctypes.c_bool),
        ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", ctypes.c_void_p),
    )


class llama_sampler_chain_params(ctypes.Structure):
    _fields_ = (("no_perf", ctypes.c_bool),)


class llama_batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(llama_token)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class llama_token_data(ctypes.Structure):
    _fields_ = (("id", llama_token), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class llama_token_data_array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(llama_token_data)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


# ---- Binding ------------------------------------------------------------------------------------------------------------
# The signatures below use llama.h's types. Each is a Python type, with the type that ctypes passes.

int32_t = Annotated[int, ctypes.c_int32]
uint32_t = Annotated[int, ctypes.c_uint32]
uint64_t = Annotated[int, ctypes.c_uint64]
size_t = Annotated[int, ctypes.c_size_t]
bool_t = Annotated[bool, ctypes.c_bool]
float_t = Annotated[float, ctypes.c_float]
char_p = Annotated[bytes, ctypes.c_char_p]
buffer_p = Annotated[ctypes.Array[ctypes.c_char] | bytes, ctypes.c_char_p]
pointer = Annotated[int | ctypes.c_void_p | ctypes.Array, ctypes.c_void_p]
size_p = Annotated[ctypes.Array[ctypes.c_size_t], ctypes.POINTER(ctypes.c_size_t)]
float_p = Annotated[ctypes.Array[ctypes.c_float], ctypes.POINTER(ctypes.c_float)]
adapters_p = Annotated[ctypes.Array[ctypes.c_void_p], ctypes.POINTER(ctypes.c_void_p)]
token_data_array_p = Annotated[ctypes.Array[llama_token_data_array], ctypes.POINTER(llama_token_data_array)]
abort_callback_t = Annotated[Callable[[ctypes.c_void_p], bool], ggml_abort_callback]
last_words_callback_t = Annotated[Callable[[bytes], None], ggml_last_words_callback]
log_callback_t = Annotated[Callable[[int, bytes, ctypes.c_void_p], None], llama_log_callback]

F = TypeVar("F", bound=Callable)


def bind(signature: F) -> F:
    """Return the library's function with the name and the types of a signature. Raises LibraryError."""
    function = getattr(library, signature.__name__, None)
    if function is None:
        raise LIBRARY.refused(f"lacks {signature.__name__}")
    *arguments, function.restype = map(_passed, get_type_hints(signature, include_extras=True).values())
    function.argtypes = arguments
    return function


def _passed(hint: Any) -> Any:
    """Return the ctypes type for a type in a signature: `c_void_p` for a handle, and the class itself for a structure."""
    hint = next((part for part in get_args(hint) if type(None) in get_args(hint) and part is not type(None)), hint)
    if isinstance(hint, NewType):
        return ctypes.c_void_p
    return None if hint is type(None) else getattr(hint, "__metadata__", [hint])[0]


# fmt: off
# One function a line.

# ---- The library, and ggml's devices ------------------------------------------------------------------------------------


def llama_version() -> char_p: ...
def llama_backend_init() -> None: ...
def llama_supports_gpu_offload() -> bool_t: ...
def llama_max_devices() -> size_t: ...
def llama_print_system_info() -> char_p: ...
def llama_log_set(log_callback: log_callback_t, user_data: pointer, /) -> None: ...
def ggml_set_abort_callback(callback: last_words_callback_t, /) -> function_p | None: ...
def ggml_backend_load_all_from_path(dir_path: char_p, /) -> None: ...
def ggml_backend_dev_count() -> size_t: ...
def ggml_backend_dev_get(index: size_t, /) -> ggml_backend_dev_t: ...
def ggml_backend_dev_name(device: ggml_backend_dev_t, /) -> char_p: ...
def ggml_backend_dev_description(device: ggml_backend_dev_t, /) -> char_p: ...
def ggml_backend_dev_memory(device: ggml_backend_dev_t, free: size_p, total: size_p, /) -> None: ...
def ggml_backend_dev_type(device: ggml_backend_dev_t, /) -> int32_t: ...
def ggml_backend_dev_buffer_type(device: ggml_backend_dev_t, /) -> ggml_backend_buffer_type_t | None: ...
def ggml_backend_dev_backend_reg(device: ggml_backend_dev_t, /) -> ggml_backend_reg_t | None: ...
def ggml_backend_reg_get_proc_address(reg: ggml_backend_reg_t, name: char_p, /) -> function_p | None: ...
def ggml_backend_buft_name(buft: ggml_backend_buffer_type_t, /) -> char_p: ...
def ggml_backend_buft_is_host(buft: ggml_backend_buffer_type_t, /) -> bool_t: ...
def ggml_backend_buft_get_device(buft: ggml_backend_buffer_type_t, /) -> ggml_backend_dev_t | None: ...


# ---- Models -------------------------------------------------------------------------------------------------------------


def llama_model_default_params() -> llama_model_params: ...
def llama_ftype_name(ftype: int32_t, /) -> char_p | None: ...
def llama_model_load_from_file(path_model: char_p, params: llama_model_params, /) -> llama_model_p | None: ...
def llama_model_free(model: llama_model_p, /) -> None: ...
def llama_model_get_vocab(model: llama_model_p, /) -> llama_vocab_p | None: ...
def llama_model_rope_type(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_ctx_train(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_embd(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_embd_inp(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_embd_out(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_layer(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_head(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_head_kv(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_swa(model: llama_model_p, /) -> int32_t: ...
def llama_model_n_cls_out(model: llama_model_p, /) -> uint32_t: ...
def llama_model_meta_val_str(model: llama_model_p, key: char_p, buf: buffer_p, buf_size: size_t, /) -> int32_t: ...
def llama_model_desc(model: llama_model_p, buf: buffer_p, buf_size: size_t, /) -> int32_t: ...
def llama_model_ftype(model: llama_model_p, /) -> int32_t: ...
def llama_model_size(model: llama_model_p, /) -> uint64_t: ...
def llama_model_chat_template(model: llama_model_p, name: char_p | None, /) -> char_p | None: ...
def llama_model_n_params(model: llama_model_p, /) -> uint64_t: ...
def llama_model_has_encoder(model: llama_model_p, /) -> bool_t: ...
def llama_model_has_decoder(model: llama_model_p, /) -> bool_t: ...
def llama_model_is_recurrent(model: llama_model_p, /) -> bool_t: ...
def llama_model_is_hybrid(model: llama_model_p, /) -> bool_t: ...
def llama_adapter_lora_init(model: llama_model_p, path_lora: char_p, /) -> llama_adapter_lora_p | None: ...
def llama_adapter_get_alora_n_invocation_tokens(adapter: llama_adapter_lora_p, /) -> uint64_t: ...


# ---- Contexts -----------------------------------------------------------------------------------------------------------


def llama_context_default_params() -> llama_context_params: ...
def llama_init_from_model(model: llama_model_p, params: llama_context_params, /) -> llama_context_p | None: ...
def llama_free(ctx: llama_context_p, /) -> None: ...
def llama_n_ctx(ctx: llama_context_p, /) -> uint32_t: ...
def llama_n_batch(ctx: llama_context_p, /) -> uint32_t: ...
def llama_n_seq_max(ctx: llama_context_p, /) -> uint32_t: ...
def llama_n_rs_seq(ctx: llama_context_p, /) -> uint32_t: ...
def llama_get_model(ctx: llama_context_p, /) -> llama_model_p | None: ...
def llama_pooling_type(ctx: llama_context_p, /) -> int32_t: ...
def llama_set_adapters_lora(
    ctx: llama_context_p, adapters: adapters_p, n_adapters: size_t, scales: float_p, /
) -> int32_t: ...
def llama_decode(ctx: llama_context_p, batch: llama_batch, /) -> int32_t: ...
def llama_set_n_threads(ctx: llama_context_p, n_threads: int32_t, n_threads_batch: int32_t, /) -> None: ...
def llama_set_abort_callback(
    ctx: llama_context_p, abort_callback: abort_callback_t, abort_callback_data: pointer, /
) -> None: ...
def llama_synchronize(ctx: llama_context_p, /) -> None: ...
def llama_get_logits(ctx: llama_context_p, /) -> float_p: ...
def llama_get_embeddings(ctx: llama_context_p, /) -> float_p: ...
def llama_get_embeddings_seq(ctx: llama_context_p, seq_id: int32_t, /) -> float_p: ...


# ---- Memory and states --------------------------------------------------------------------------------------------------


def llama_get_memory(ctx: llama_context_p, /) -> llama_memory_t | None: ...
def llama_memory_clear(mem: llama_memory_t, data: bool_t, /) -> None: ...
def llama_memory_seq_rm(mem: llama_memory_t, seq_id: int32_t, p0: int32_t, p1: int32_t, /) -> bool_t: ...
def llama_memory_seq_cp(
    mem: llama_memory_t, seq_id_src: int32_t, seq_id_dst: int32_t, p0: int32_t, p1: int32_t, /
) -> None: ...
def llama_state_seq_get_size(ctx: llama_context_p, seq_id: int32_t, /) -> size_t: ...
def llama_state_seq_get_size_ext(ctx: llama_context_p, seq_id: int32_t, flags: uint32_t, /) -> size_t: ...
def llama_state_seq_get_data_ext(
    ctx: llama_context_p, dst: pointer, size: size_t, seq_id: int32_t, flags: uint32_t, /
) -> size_t: ...
def llama_state_seq_set_data_ext(
    ctx: llama_context_p, src: pointer, size: size_t, dest_seq_id: int32_t, flags: uint32_t, /
) -> size_t: ...


# ---- Vocabulary ---------------------------------------------------------------------------------------------------------


def llama_vocab_type(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_n_tokens(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_get_text(vocab: llama_vocab_p, token: int32_t, /) -> char_p: ...
def llama_vocab_get_attr(vocab: llama_vocab_p, token: int32_t, /) -> int32_t: ...
def llama_vocab_is_eog(vocab: llama_vocab_p, token: int32_t, /) -> bool_t: ...
def llama_vocab_bos(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_eos(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_sep(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_get_add_bos(vocab: llama_vocab_p, /) -> bool_t: ...
def llama_vocab_get_add_eos(vocab: llama_vocab_p, /) -> bool_t: ...
def llama_vocab_get_add_sep(vocab: llama_vocab_p, /) -> bool_t: ...
def llama_vocab_fim_pre(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_fim_suf(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_fim_mid(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_fim_rep(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_vocab_fim_sep(vocab: llama_vocab_p, /) -> int32_t: ...
def llama_tokenize(
    vocab: llama_vocab_p,
    text: char_p,
    text_len: int32_t,
    tokens: pointer,
    n_tokens_max: int32_t,
    add_special: bool_t,
    parse_special: bool_t,
    /,
) -> int32_t: ...
def llama_token_to_piece(
    vocab: llama_vocab_p, token: int32_t, buf: buffer_p, length: int32_t, lstrip: int32_t, special: bool_t, /
) -> int32_t: ...


# ---- Samplers -----------------------------------------------------------------------------------------------------------


def llama_sampler_chain_default_params() -> llama_sampler_chain_params: ...
def llama_sampler_accept(smpl: llama_sampler_p, token: int32_t, /) -> None: ...
def llama_sampler_apply(smpl: llama_sampler_p, cur_p: token_data_array_p, /) -> None: ...
def llama_sampler_free(smpl: llama_sampler_p, /) -> None: ...
def llama_sampler_chain_init(params: llama_sampler_chain_params, /) -> llama_sampler_p: ...
def llama_sampler_chain_add(chain: llama_sampler_p, smpl: llama_sampler_p, /) -> None: ...
def llama_sampler_init_dist(seed: uint32_t, /) -> llama_sampler_p: ...
def llama_sampler_init_top_k(k: int32_t, /) -> llama_sampler_p: ...
def llama_sampler_init_top_p(p: float_t, min_keep: size_t, /) -> llama_sampler_p: ...
def llama_sampler_init_min_p(p: float_t, min_keep: size_t, /) -> llama_sampler_p: ...
def llama_sampler_init_typical(p: float_t, min_keep: size_t, /) -> llama_sampler_p: ...
def llama_sampler_init_temp(t: float_t, /) -> llama_sampler_p: ...
def llama_sampler_init_temp_ext(t: float_t, delta: float_t, exponent: float_t, /) -> llama_sampler_p: ...
def llama_sampler_init_xtc(p: float_t, t: float_t, min_keep: size_t, seed: uint32_t, /) -> llama_sampler_p: ...
def llama_sampler_init_top_n_sigma(n: float_t, /) -> llama_sampler_p: ...
def llama_sampler_init_mirostat(
    n_vocab: int32_t, seed: uint32_t, tau: float_t, eta: float_t, m: int32_t, /
) -> llama_sampler_p: ...
def llama_sampler_init_mirostat_v2(seed: uint32_t, tau: float_t, eta: float_t, /) -> llama_sampler_p: ...
def llama_sampler_init_adaptive_p(target: float_t, decay: float_t, seed: uint32_t, /) -> llama_sampler_p: ...
def llama_sampler_init_infill(vocab: llama_vocab_p, /) -> llama_sampler_p: ...
def llama_sampler_sample(smpl: llama_sampler_p, ctx: llama_context_p, idx: int32_t, /) -> int32_t: ...


for _name, _signature in list(globals().items()):
    if _name.startswith(("llama_", "ggml_")) and isfunction(_signature):
        globals()[_name] = bind(_signature)

# fmt: on

if not LIBRARY.version:
    LIBRARY = replace(LIBRARY, version=llama_version().decode())

# ---- The layout of the parameters ---------------------------------------------------------------------------------------
# ctypes checks nothing. A library of another version, with one field more or less, would read wrong flags.

DEFAULTS = (
    (
        llama_model_params,
        {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True},
    ),
    (
        llama_context_params,
        {
            **{"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1},
            **{"n_threads": 4, "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1},
            **{"flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0},
            **{"yarn_beta_slow": -1.0, "defrag_thold": -1.0, "type_k": 1, "type_v": 1},
            **{"offload_kqv": True, "no_perf": True, "op_offload": True, "swa_full": True},
        },
    ),
)
"""The structures that are passed by value at set-up, with their defaults. Fields that are not listed are 0 or null."""
CANARY = b"\xa5"
SPARE = 256  # bytes after our structure, which a larger structure of the library would overwrite


def check_layout() -> None:
    """Compare the library's parameter structures with ours, by defaults and sizes.

    Raise LibraryError if the structures differ.
    """
    for layout, defaults in DEFAULTS:
        params, spare = _defaults_of(layout)
        wrong = [name for name, *_ in layout._fields_ if (getattr(params, name) or 0) != defaults.get(name, 0)]
        if spare != CANARY * SPARE or wrong:
            where = f"from {wrong[0]} on" if wrong else "after its last field"
            raise LIBRARY.refused(f"has another layout of {layout.__name__} {where}")


def _defaults_of(layout: type[ctypes.Structure]) -> tuple[ctypes.Structure, bytes]:
    """Let the library write its defaults into our structure. Return the filled structure, and the SPARE bytes after it."""

    class Padded(ctypes.Structure):
        _fields_ = (("params", layout), ("spare", ctypes.c_char * SPARE))

    symbol = layout.__name__.replace("_params", "_default_params"), library
    padded = Padded()
    ctypes.memset(ctypes.addressof(padded), CANARY[0], ctypes.sizeof(padded))
    if platform.machine() in ("x86_64", "AMD64"):  # here the caller passes the result's address as a hidden first argument
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(symbol)(ctypes.addressof(padded))
        return padded.params, ctypes.string_at(ctypes.addressof(padded) + Padded.spare.offset, SPARE)
    return ctypes.CFUNCTYPE(Padded)(symbol)().params, CANARY * SPARE


check_layout()

# ---- The libraries that this process has loaded, and the threads that OpenMP keeps. -------------------------------------

MAPS = Path("/proc/self/maps")
HARD = 2  # omp.h: omp_pause_hard


def loaded_libraries() -> set[Path]:
    """Return the libraries that this process has loaded. Raises OSError if Linux does not list the loaded libraries."""
    lines = MAPS.read_text().splitlines()
    return set(map(Path, {line.split(maxsplit=5)[5] for line in lines if "/" in line and ".so" in line}))


def release_workers() -> None:
    """End the worker threads that GNU's OpenMP keeps for the calling thread. A later computation gets new workers.

    If there are more workers than cores, OpenMP lets each worker sleep at every barrier. A worker that sleeps at barriers is
    slower than a worker that spins. OpenMP would also count the workers that it keeps for a thread that no longer computes.
    """
    with contextlib.suppress(OSError):
        for path in loaded_libraries():
            if path.name.startswith("libgomp"):
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(str(path)).omp_pause_resource_all(HARD)


# ---- llama.cpp's log, forwarded to Python's log. The last errors are kept for error messages. ---------------------------

logger = logging.getLogger("slotcache.llama")
ERROR = 4  # ggml's levels: 1 debug, 2 info, 3 warning, 4 error, 5 continued
NO_REASON = "failed to load model"  # the end of a line that only says that a load has failed
COMPLAINTS: deque[str] = deque(maxlen=8)
PLACED = re.compile(r"load_tensors: layer +(\d+) assigned to device ([^,]+),")
LAYERS: dict[int, str] = {}
"""The device of each layer and of the output (last) in the newest loaded model. No function of llama.cpp reports this."""
HEEDED: dict[tuple[str, str], str] = {}
"""The metadata overrides that llama.cpp has read, by key and type.

The value is "" if llama.cpp used the override; otherwise, it is the type that llama.cpp expected."""
USED = re.compile(r"Using metadata override \( *(\w+)\) '(.*)' =")
MISTYPED = re.compile(r"Bad metadata override type for key '(.*)', expected (\w+) but got (\w+)")


@llama_log_callback
def _forward(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level == ERROR and not line.endswith(NO_REASON):
        COMPLAINTS.append(line)
    if found := PLACED.match(line):
        LAYERS[int(found[1])] = found[2]
    if "metadata override" in line:
        if found := USED.search(line):
            HEEDED[found[2], found[1]] = ""
        elif found := MISTYPED.search(line):
            HEEDED.setdefault((found[1], found[3]), found[2])
    if line:
        logger.debug("%s", line)


def capture() -> None:
    """Send llama.cpp's log to the logger `slotcache.llama` at DEBUG, instead of to stderr."""
    llama_log_set(_forward, ctypes.c_void_p(0))


MOST_WORDS = 5.0  # s that all `LAST_WORDS` together may take
LAST_WORDS: list[Callable[[str], None]] = []
"""Functions to call with the reason before llama.cpp ends the process. Any thread may call them."""
_SPEAKING = threading.RLock()


@ggml_last_words_callback
def _abort(message: bytes) -> None:
    reason = message.decode("utf-8", "replace")
    _SPEAKING.acquire()  # never released: other threads with the same error wait here until the process ends
    end = threading.Timer(MOST_WORDS, os.abort)
    end.daemon = True
    with contextlib.suppress(Exception):
        end.start()
        print(reason, file=sys.stderr, flush=True)  # ggml prints nothing if it has a callback
    for act in list(LAST_WORDS):
        with contextlib.suppress(Exception):
            act(reason)


def before_abort(act: Callable[[str], None]) -> Callable[[], None]:
    """Let `act` be called with the reason when llama.cpp is about to end the process.

    Return a function that removes `act` again.

    llama.cpp ends the process after the loss of a device or an internal error.
    """
    LAST_WORDS.append(act)
    ggml_set_abort_callback(_abort)
    return lambda: LAST_WORDS.remove(act)


def last_complaint() -> str:
    """Return the last error that llama.cpp has logged, for our error messages."""
    return COMPLAINTS[-1] if COMPLAINTS else "llama.cpp gave no reason"
