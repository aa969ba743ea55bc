"""The cores, the devices, the unused cards and the memory of this machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import builds, cards, llama

# ---- The number of threads that compute fastest on this CPU, from what Linux reports. -----------------------------------

SYSTEM = Path("/sys")


def fast_cores(system: Path = SYSTEM) -> int:
    """Return the number of cores on which a process should compute, 1 or more.

    After each matrix product, all threads wait for the slowest thread. A computation is slow if two threads share a core, if
    one thread runs on an efficiency core and the others on performance cores, or if it has more threads than a container's
    CPU quota.
    """
    usable = _usable()
    if performance := usable & set(_listed(system / "devices/cpu_core/cpus")):  # of a hybrid Intel CPU
        usable = performance
    cores = {_siblings(system, cpu) for cpu in usable}
    return max(1, min(len(cores), _quota(system)))


def _usable() -> set[int]:
    """Return the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))  # not Linux


def _siblings(system: Path, cpu: int) -> frozenset[int]:
    """Return the CPUs of the core to which a CPU belongs."""
    return frozenset(_listed(system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or frozenset({cpu})


def _quota(system: Path) -> int:
    """Return a container's CPU quota in whole CPUs, 1 or more; a large number if there is no quota."""
    with suppress(OSError, ValueError):
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            return max(1, int(quota) // int(period))
    return 1 << 16


def _listed(file: Path) -> Iterator[int]:
    """Yield the numbers of a list such as 0-3,8; none if the file is missing."""
    with suppress(OSError, ValueError):
        for part in file.read_text().split(","):
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


# ---- The features of the CPU that a build uses --------------------------------------------------------------------------

CPU_INFO = Path("/proc/cpuinfo")
FEATURES = {  # features that speed up matrix products: llama.cpp's name, Linux's name
    "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni", "AVX_VNNI": "avx_vnni",
    "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "SVE": "sve",
}  # fmt: skip


def used_features() -> list[str]:
    """Return the CPU features for which llama.cpp was compiled, by llama.cpp's names."""
    load_backends()
    return re.findall(r"(\w+) = 1", llama.llama_print_system_info().decode())


def unused_features(used: Collection[str], cpu_info: Path = CPU_INFO) -> list[str]:
    """Return which of FEATURES this CPU has but `used` lacks; an empty list if Linux does not list the CPU's features."""
    with suppress(OSError):
        has = set(cpu_info.read_text().split())
        return [name for name, flag in FEATURES.items() if flag in has and name not in used]
    return []


def cpu_name() -> str:
    """Return the CPU's name from Linux or Python."""
    with suppress(OSError):
        lines = CPU_INFO.read_text().splitlines()
        return next((line for line in lines if line.startswith("model name")), "")
    return platform.processor()


# ---- The devices that ggml supports and has found, with their memory. ---------------------------------------------------

KINDS = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")
INTEGRATED = "integrated GPU"  # its memory is the host's
GPUS = ("GPU", INTEGRATED)  # llama.cpp prefers the first kind


@dataclass(frozen=True, slots=True)
class Device:
    """A device of ggml.

    name: ggml's name ("CUDA0", "CPU").
    free, total: bytes of memory; 0 if the backend does not report them.
    """

    name: str
    description: str
    kind: str
    free: int
    total: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in GPUS

    def __str__(self) -> str:
        return f"{self.name} ({self.description})"


@cache
def load_backends() -> None:
    """Load llama.cpp's backends, once per process.

    Some builds have a library for each backend in llama.cpp's folder. GGML_BACKEND_PATH may name a library elsewhere.
    """
    llama.capture()
    llama.open_needed()
    llama.llama_backend_init()
    llama.ggml_backend_load_all_from_path(os.fsencode(llama.LIBRARY.path.parent))


def devices() -> list[Device]:
    """Return the devices that may compute: discrete GPUs first, then integrated GPUs, then the rest."""
    return sorted(map(_device, _handles()), key=lambda device: (*GPUS, device.kind).index(device.kind))


def _handles() -> list[llama.ggml_backend_dev_t]:
    load_backends()
    found = [llama.ggml_backend_dev_get(index) for index in range(llama.ggml_backend_dev_count())]
    return [handle for handle in found if not (is_without_card() and _kind(handle) in GPUS)]


def _kind(handle: llama.ggml_backend_dev_t) -> str:
    return KINDS[llama.ggml_backend_dev_type(handle)]


def _device(handle: llama.ggml_backend_dev_t) -> Device:
    free, total = (ctypes.c_size_t * 1)(), (ctypes.c_size_t * 1)()
    llama.ggml_backend_dev_memory(handle, free, total)
    return Device(
        name=llama.ggml_backend_dev_name(handle).decode(),
        description=llama.ggml_backend_dev_description(handle).decode("utf-8", "replace"),
        kind=_kind(handle),
        free=free[0],
        total=total[0],
    )


def buffer_types() -> dict[str, int]:
    """Return the address of each device's default buffer type, by ggml's name of the buffer type."""
    kinds = map(llama.ggml_backend_dev_buffer_type, _handles())
    return {llama.ggml_backend_buft_name(kind).decode(): kind for kind in kinds if kind}


def device_handles() -> dict[str, llama.ggml_backend_dev_t]:
    """Return llama.cpp's handle of each device, by ggml's name of the device."""
    return {llama.ggml_backend_dev_name(handle).decode(): handle for handle in _handles()}


def splits_rows(name: str) -> bool:
    """Return whether a device's backend can split the rows of matrices among several of its devices."""
    registry = llama.ggml_backend_dev_backend_reg(device_handles()[name])
    return bool(registry and llama.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_split_buffer_type"))


def supports_offload() -> bool:
    """Return whether this build of llama.cpp can put layers on a GPU."""
    return llama.llama_supports_gpu_offload()


# ---- Unused cards -------------------------------------------------------------------------------------------------------

HIDDEN = {"GGML_VK_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "", cards.NO_CARD: "1"}
"""The environment of a process that uses no card. If it is set before CUDA and Vulkan are loaded, they find no card.

If they find a card nonetheless, `devices` leaves it out, and no model is loaded on it."""
FAILED = "trial"  # the key in `llama.PASSED_OVER` for a card that failed its trial


def is_without_card() -> bool:
    """Return whether no card may compute in this process."""
    return bool(os.environ.get(cards.NO_CARD))


def hide_cards(name: str, why: str) -> None:
    """Let no card compute from now on, in this process and its children.

    name, why: a key for `llama.PASSED_OVER`, and the reason to store under it.
    """
    os.environ.update(HIDDEN, **{llama.VARIABLES[0]: str(llama.LIBRARY.path.parent)})  # children use the same library
    llama.PASSED_OVER[name] = why
    unused_card.cache_clear()


def no_devices() -> ctypes.Array[ctypes.c_void_p] | None:
    """Return an empty list of devices for llama.cpp if no card may compute.

    If a card may compute, return None: llama.cpp then finds the devices itself. Without the empty list, llama.cpp computes
    large batches on a card even if the card has no layer.
    """
    return (ctypes.c_void_p * 1)() if is_without_card() else None


@cache
def unloaded_backends() -> dict[str, str]:
    """Return the backends for cards in the library's folder that are not loaded, with the reason.

    The result is empty if Linux does not list the loaded libraries.
    """
    load_backends()
    with suppress(OSError):
        loaded = llama.loaded_libraries()
        return {path.name: llama.why_not_loaded(path) for path in llama.backends() if path.resolve() not in loaded}
    return {}


@cache
def unused_card() -> str:
    """Return a message that a card is not used, with the reason and the remedy; "" if a card is used or none is found."""
    root = cards.root_folder()
    if any(device.is_gpu for device in devices()):
        return ""
    if is_without_card() and not llama.PASSED_OVER:
        return f"{cards.NO_CARD} is set: no card computes"
    found, failed = cards.find_cards(root), llama.PASSED_OVER.get(FAILED, "")
    if not found:
        return failed
    choice = cards.choose(found, cards.find_libraries(root))
    if choice.builds[0] == "cpu":
        return failed or choice.line
    if failed:
        return f"{failed}; {_remedy(choice.builds[0], ())}"
    card = next(card for card in found if not card.barred)
    reasons = dict(builds.installed_builds().passed_over) | llama.PASSED_OVER | unloaded_backends()
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or f"{llama.LIBRARY} is a build for the CPU"
    return f"{card} is not used: {why}; {_remedy(choice.builds[0], reasons)}"


def _remedy(build: str, tried: Collection[str]) -> str:
    if "auto" in tried:
        return f"make serve LLAMA={llama.LIBRARY.origin.removeprefix('npm-')} takes it nonetheless"
    if llama.LIBRARY.origin in llama.VARIABLES:
        return f"{llama.LIBRARY.origin} names this build: without it, make serve LLAMA={build} takes another one"
    again = ", once that is mended" if build in tried else f" ({cards.BUILDS[build][0]} MB)"
    return f"make serve LLAMA={build} or slotcache install {build}{again}"


# ---- Memory -------------------------------------------------------------------------------------------------------------
# The memory that programs can still use, of the machine or of this process's container.

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Container:
    """The files with the memory figures of a container.

    cached: the lines of `stat` that count the page cache.
    """

    limit: str
    used: str
    stat: str
    cached: tuple[str, ...]


CONTAINERS = (  # cgroups of version 2 and of version 1
    Container("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    Container(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes of free memory. The page cache counts as free: the system frees it when programs need memory."""
    folder = root / "sys/fs/cgroup"
    left = [room for container in CONTAINERS if (room := _room(folder, container)) is not None]
    return max(min([_of_machine(root / "proc/meminfo"), *left]), 0)


def _of_machine(file: Path) -> int:
    with suppress(OSError, KeyError):
        return _counts(file, ":")["MemAvailable"] << 10
    with suppress(ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS reports only the total


def _room(folder: Path, container: Container) -> int | None:
    """Return the bytes that a container has left; None if it has no limit."""
    with suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in (container.limit, container.used))
        counts = _counts(folder / container.stat, "")
        return limit - used + sum(counts.get(name, 0) for name in container.cached)
    return None


def _counts(file: Path, mark: str) -> dict[str, int]:
    """Return the names and numbers in a file that has a name and a number on each line. Raises OSError.

    mark: a text to remove from the end of each name.
    """
    return dict(_lines(file.read_text(), mark))


def _lines(text: str, mark: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, number, *_ = [*line.split(), "", ""]
        if number.isdecimal():
            yield name.removesuffix(mark), int(number)


HOST = "CPU"
