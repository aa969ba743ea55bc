"""The cards of this machine, the libraries that they need, and the builds of llama.cpp to try on them.

`make serve` runs this file before any package is installed. This file therefore imports only the standard library, and no
module of this package. All files are read below a root folder. Tests
set the root folder with SLOTCACHE_ROOT.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUILDS = {  # npm's builds: the MB to download, and the builds to try if the build fails
    "cpu": (11, ()),
    "vulkan": (24, ("cpu",)),
    "cuda": (143, ("vulkan", "cpu")),
    "cuda12": (188, ("vulkan", "cpu")),
}
CARD_BUILDS = ("cuda", "cuda12", "vulkan")
RUNTIMES = {"cuda": (13, 447), "cuda12": (12, 684)}  # CUDA's version, and the MB of its libraries as pip packages
INSTALL_LOADER = "apt-get install libvulkan1 mesa-vulkan-drivers"
REMEDIES = {  # by the library that is missing
    "libcuda.so": "NVIDIA's driver is missing: for containers, docker run --gpus all",
    "libcudart.so.13": "pip install 'slotcache[cuda]'",
    "libcublas.so.13": "pip install 'slotcache[cuda]'",
    "libcudart.so.12": "pip install 'slotcache[cuda12]'",
    "libcublas.so.12": "pip install 'slotcache[cuda12]'",
    "libvulkan.so": INSTALL_LOADER,
}
NO_DRIVER = (
    "it finds no card: Vulkan's driver comes with mesa-vulkan-drivers for AMD and Intel, and with NVIDIA's driver, "
    "in containers by NVIDIA_DRIVER_CAPABILITIES=all"
)
DRM = {"amdgpu": "AMD", "i915": "Intel", "xe": "Intel"}  # the maker, by the Linux drivers with which Vulkan computes
PATIENCE = 10  # s for a program that asks the driver


@dataclass(frozen=True, slots=True)
class Card:
    """A card and its driver.

    maker: NVIDIA, AMD or Intel.
    driver: the driver's version or name.
    capability: the compute capability of an NVIDIA card ("8.6"); "" if unknown.
    barred: why this user cannot use the card; "" if the user can.
    """

    maker: str
    name: str
    driver: str = ""
    capability: str = ""
    barred: str = ""

    def __str__(self) -> str:
        return f"{self.name} (driver {self.driver})" if self.driver else self.name

    @property
    def driver_number(self) -> int:
        return int(self.driver.partition(".")[0]) if self.driver[:1].isdigit() else 0

    @property
    def runs_cuda(self) -> bool:
        """Whether npm's build for CUDA 13 has machine code for this card."""
        return self.driver_number >= 580 and (self.capability in ("8.6", "8.9") or self.capability.startswith("12."))


@dataclass(frozen=True, slots=True)
class Libraries:
    """The installed libraries, apart from the driver.

    vulkan: Vulkan's loader is installed.
    cuda: the versions of CUDA for which both cudart and cuBLAS are installed.
    """

    vulkan: bool = False
    cuda: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BuildChoice:
    """The builds to try.

    builds: the builds in order.
    line: a message for the user, or "".
    """

    builds: tuple[str, ...]
    line: str = ""


def chain(build: str) -> tuple[str, ...]:
    """Return a build, followed by the builds to try if it fails."""
    return (build, *BUILDS[build][1])


def choose(cards: Sequence[Card], libraries: Libraries) -> BuildChoice:
    """Return the builds to try if the user has not named a build. The result depends only on the arguments."""
    usable = [card for card in cards if not card.barred]
    if not usable:
        return BuildChoice(chain("cpu"), "; ".join(f"{card} is not used: {card.barred}" for card in cards))
    nvidia = next((card for card in usable if card.maker == "NVIDIA"), None)
    if nvidia and nvidia.runs_cuda and 13 in libraries.cuda:
        builds = chain("cuda") if libraries.vulkan else ("cuda", "cpu")
        return BuildChoice(builds, f"{nvidia}: its libraries of CUDA are there")
    card = nvidia or usable[0]
    if not libraries.vulkan:
        return BuildChoice(chain("cpu"), f"{card} is not used: Vulkan's loader is missing: {INSTALL_LOADER}")
    return BuildChoice(chain("vulkan"), _offer(card))


def _offer(card: Card) -> str:
    """Return a message that a build for CUDA may be faster, with its download size; "" if the card cannot use CUDA."""
    build = "cuda" if card.runs_cuda else "cuda12" if card.driver_number >= 550 else ""
    if card.maker != "NVIDIA" or not build:
        return ""
    (size, _), (version, more) = BUILDS[build], RUNTIMES[build]
    return f"{card}: {build} may be faster, and costs {size} MB, with the libraries of CUDA {version} {size + more} MB"


# ---- The hardware and libraries of this machine -------------------------------------------------------------------------


def root_folder() -> Path:
    return Path(os.environ.get("SLOTCACHE_ROOT") or "/")


def find_cards(root: Path) -> list[Card]:
    """Return the cards that have a driver, NVIDIA's cards first. Software devices and virtual cards are left out."""
    return [*_nvidia(root), *_drm(root)]


def find_libraries(root: Path, packages: Iterable[str] = sys.path) -> Libraries:
    """Return the installed libraries.

    packages: folders with pip packages.
    """
    packages = list(packages)
    cuda = frozenset(version for version, _ in RUNTIMES.values() if runtime(version, root, packages))
    return Libraries(vulkan=any(_in_system(root, "libvulkan.so.1")), cuda=cuda)


def runtime(version: int, root: Path, packages: Iterable[str] = sys.path) -> list[Path]:
    """Return the paths of the libraries of a CUDA version, in the order in which the caller must open them.

    If one of the libraries is missing, return an empty list. Libraries from pip packages are preferred, since the loader may
    not find the system's libraries.
    """
    names = (f"libcudart.so.{version}", f"libcublasLt.so.{version}", f"libcublas.so.{version}")
    folders = (f"cu{version}", "cuda_runtime", "cublas")
    of_pip = [Path(package, "nvidia", folder, "lib") for package in packages for folder in folders]
    found = [_first([*(folder / name for folder in of_pip), *_in_system(root, name)]) for name in names]
    return [path for path in found if path] if all(found) else []


def _first(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


FOLDERS = (
    *("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "usr/local/lib/*-linux-gnu", "usr/lib/wsl/lib"),
    *("usr/local/cuda/lib64", "usr/local/cuda-*/lib64", "opt/cuda/lib64", "run/opengl-driver/lib"),
)


def _in_system(root: Path, name: str) -> Iterator[Path]:
    """Yield the files of a library in the system's folders."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if root == Path("/") else ():
        if folder and (path := Path(folder, name)).is_file():
            yield path
    for pattern in FOLDERS:
        yield from sorted(root.glob(f"{pattern}/{name}"))


def _nvidia(root: Path) -> list[Card]:
    """Return NVIDIA's cards, from the output of a program or else from the driver's files.

    WSL lacks the driver's files. If no program answers in WSL, assume one card.
    """
    driver, is_wsl = root / "proc/driver/nvidia", _is_wsl(root)
    try:
        seen = re.search(r"\b\d{3,}\.\d[\d.]*", (driver / "version").read_text())
    except OSError:
        seen = None
    is_container = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    if not is_wsl and (seen is None or (is_container and not (root / "dev/nvidiactl").exists())):  # only the host has it
        return []
    if rows := [row for line in _asked(root) if len(row := [cell.strip() for cell in line.split(",", 2)]) == 3]:
        return [Card("NVIDIA", name, version or (seen[0] if seen else ""), capability) for capability, version, name in rows]
    names = [_model(file) for file in sorted(driver.glob("gpus/*/information"))] or ["NVIDIA card"] * is_wsl
    return [Card("NVIDIA", name, seen[0] if seen else "") for name in names]


def _is_wsl(root: Path) -> bool:
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def _model(information: Path) -> str:
    with suppress(OSError):
        for line in information.read_text().splitlines():
            title, _, name = line.partition(":")
            if title.strip() == "Model":
                return name.strip()
    return "NVIDIA card"


CUDA = """
import ctypes
cuda, number, name = ctypes.cdll.LoadLibrary("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(256)
def asked(function, at, *arguments):
    if function(ctypes.byref(number), *arguments, at):
        raise SystemExit(1)
    return number.value
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(number))
for index in range(number.value):
    device = asked(cuda.cuDeviceGet, index)
    capability = [asked(cuda.cuDeviceGetAttribute, device, attribute) for attribute in (75, 76)]
    cuda.cuDeviceGetName(name, 256, device)
    print(*capability, sep=".", end=f", , {name.value.decode()}\\n")
"""
"""A program that prints the lines of `nvidia-smi` without the driver's version.

It runs in a separate process, since the driver may crash it."""


def _asked(root: Path) -> list[str]:
    """Return a line for each card: its capability, the driver's version, its name. Return [] if no program answers."""
    query = ["--query-gpu=compute_cap,driver_version,name", "--format=csv,noheader"]
    programs = (root / folder / "nvidia-smi" for folder in ("usr/bin", "usr/local/bin", "usr/lib/wsl/lib", "opt/bin"))
    commands = [[str(program), *query] for program in programs if program.is_file()][:1]
    if root == Path("/"):
        commands.append([sys.executable, "-I", "-S", "-c", CUDA])
    for command in commands:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.splitlines()
    return []


def _drm(root: Path) -> Iterator[Card]:
    """Yield the cards that have a render node in Linux."""
    for node in sorted(root.glob("dev/dri/renderD*")):
        with suppress(OSError):
            driver = Path(os.readlink(root / "sys/class/drm" / node.name / "device/driver")).name
            if maker := DRM.get(driver):
                barred = "" if _is_open(node) else f"add yourself to the group render, to open {node}"
                yield Card(maker, f"{maker} card {_device_number(root, node)}".rstrip(), driver, barred=barred)


def _device_number(root: Path, node: Path) -> str:
    """Return the maker's device number of a node's card; "" if Linux does not report it."""
    with suppress(OSError):
        return (root / "sys/class/drm" / node.name / "device/device").read_text().strip()
    return ""


def _is_open(node: Path) -> bool:
    """Return whether this user may use a node's card."""
    return os.access(node, os.R_OK | os.W_OK)


NO_CARD = "SLOTCACHE_NO_CARD"  # an environment variable: with any value, no card computes
VISIBLE = (
    *(NO_CARD, "GGML_VK_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ONEAPI_DEVICE_SELECTOR", "VK_ICD_FILENAMES", "VK_DRIVER_FILES", "VK_LOADER_DRIVERS_SELECT"),
)


def drivers(root: Path) -> tuple[object, ...]:
    """Return a value that changes with the cards, their drivers, this user's permissions and the environment.

    The call is fast, since it asks no driver.
    """
    with_version = [file.read_text() for file in root.glob("proc/driver/nvidia/version")]
    models = [_model(file) for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    nodes = [(node.name, _device_number(root, node), _is_open(node)) for node in sorted(root.glob("dev/dri/renderD*"))]
    manifests = sorted((file.name, file.stat().st_mtime_ns) for file in root.glob("usr/share/vulkan/icd.d/*.json"))
    return with_version, models, nodes, manifests, [os.environ.get(name) for name in VISIBLE]


def has_builds() -> bool:
    """Return whether npm has builds for this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def main(asked: str = "auto", *packages: str) -> None:
    """Print the builds to try for `asked`. Print to stderr why a card is not used.

    packages: folders with pip packages.
    """
    if asked != "auto":
        choice = BuildChoice(chain(asked))
    elif has_builds():
        choice = choose(find_cards(root := root_folder()), find_libraries(root, packages))
    else:
        choice = BuildChoice(chain("cpu"))
    if choice.line and choice.builds[0] == "cpu":
        print(choice.line, file=sys.stderr)
    print(*choice.builds)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] not in ("auto", *BUILDS):
        sys.exit(f"LLAMA={sys.argv[1]}: expected one of auto, {', '.join(BUILDS)}")
    main(*sys.argv[1:])
