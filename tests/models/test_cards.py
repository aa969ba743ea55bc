"""The cards of a machine below a root folder, the table of builds, and the door's way from one build to the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slotcache.models import builds, cards, hardware, llama
from slotcache.models.builds import InstalledBuilds
from slotcache.models.cards import Card, Libraries
from slotcache.models.errors import LibraryError

from models.test_llama import LIBRARY

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@x)  Tue Sep 23\nGCC version:\n"
RTX = Card("NVIDIA", "NVIDIA GeForce RTX 3060", "580.95.05", "8.6")
AMD = Card("AMD", "AMD card 0x744c", "amdgpu")
INTEL = Card("Intel", "Intel card", "xe")


class Machine:
    """A root folder with what Linux tells of cards."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def nvidia(self, driver: str = "580.95.05", reported: str = "") -> None:
        """told: what nvidia-smi prints; "": it fails."""
        self.file("proc/driver/nvidia/version", VERSION.format(driver))
        self.file("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA GeForce RTX 3060\nIRQ:\t 1\n")
        does = f"echo '{reported}'" if reported else "exit 9"
        self.file("usr/bin/nvidia-smi", f"#!/bin/sh\n{does}\n").chmod(0o755)

    def drm(self, node: str, driver: str, device: str = "0x744c") -> None:
        self.file(f"dev/dri/{node}")
        folder = self.file(f"sys/class/drm/{node}/device/device", f"{device}\n").parent
        (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def libraries(self, *names: str, folder: str = "usr/lib/x86_64-linux-gnu") -> None:
        for name in names:
            self.file(f"{folder}/{name}")

    def cuda(self, version: int, **where: str) -> None:
        self.libraries(*(f"{name}.so.{version}" for name in ("libcudart", "libcublasLt", "libcublas")), **where)

    def choice(self) -> cards.BuildChoice:
        return cards.choose(cards.find_cards(self.root), cards.find_libraries(self.root, ()))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


def test_nvidia_s_program_reports_the_capability(machine):
    machine.nvidia(reported="8.6, 580.95.05, NVIDIA GeForce RTX 3060")
    assert cards.find_cards(machine.root) == [RTX]


def test_without_its_program_the_driver_names_the_card(machine):
    machine.nvidia("535.1")
    assert cards.find_cards(machine.root) == [Card("NVIDIA", "NVIDIA GeForce RTX 3060", "535.1")]


def test_a_container_sees_the_host_s_driver_and_no_card(machine):
    machine.nvidia()
    machine.file(".dockerenv")
    assert cards.find_cards(machine.root) == []
    machine.file("dev/nvidiactl")
    assert len(cards.find_cards(machine.root)) == 1


def test_a_driver_without_a_card_is_none(machine):
    machine.file("proc/driver/nvidia/version", VERSION.format("580.1"))
    assert cards.find_cards(machine.root) == []


def test_windows_lends_its_card(machine):
    machine.file("dev/dxg")
    machine.libraries("libcuda.so.1", folder="usr/lib/wsl/lib")
    assert cards.find_cards(machine.root) == [Card("NVIDIA", "NVIDIA card")]


@pytest.mark.parametrize(
    "driver, maker",
    [("amdgpu", "AMD"), ("i915", "Intel"), ("xe", "Intel"), *((name, "") for name in ("nouveau", "virtio-pci", "vmwgfx"))],
)
def test_a_card_is_known_by_its_driver(machine, driver, maker):
    machine.drm("renderD128", driver)
    machine.file("dev/dri/renderD129")  # nothing is known of it
    assert [card.maker for card in cards.find_cards(machine.root)] == ([maker] if maker else [])


def test_a_node_that_cannot_be_opened_names_the_group(machine, monkeypatch):
    machine.drm("renderD128", "amdgpu")
    machine.libraries("libvulkan.so.1")
    assert machine.choice().builds == ("vulkan", "cpu")
    monkeypatch.setattr(cards.os, "access", lambda *_: False)  # root may open all
    choice = machine.choice()
    assert (
        choice.builds == ("cpu",)
        and "AMD card 0x744c (driver amdgpu) is not used: add yourself to the group render" in choice.line
    )


def test_libraries_of_the_system_and_of_pip_are_found_whole_or_not(machine, tmp_path):
    assert cards.find_libraries(machine.root, ()) == Libraries()
    machine.libraries("libvulkan.so.1", "libcudart.so.13")  # and no cuBLAS
    assert cards.find_libraries(machine.root, ()) == Libraries(vulkan=True)
    pip = Machine(tmp_path / "site")
    pip.cuda(13, folder="nvidia/cu13/lib")
    assert cards.find_libraries(machine.root, [str(pip.root)]) == Libraries(True, frozenset({13}))
    first, *_ = cards.runtime(13, machine.root, [str(pip.root)])
    assert first == pip.root / "nvidia/cu13/lib/libcudart.so.13"
    machine.cuda(12, folder="usr/local/cuda-12.8/lib64")
    assert cards.find_libraries(machine.root, ()) == Libraries(True, frozenset({12}))
    pip.libraries("libcudart.so.12", folder="nvidia/cuda_runtime/lib")
    pip.libraries("libcublas.so.12", "libcublasLt.so.12", folder="nvidia/cublas/lib")
    assert len(cards.runtime(12, tmp_path / "none", [str(pip.root)])) == 3


BOTH, LOADER = Libraries(True, frozenset({13})), Libraries(vulkan=True)
BARRED = Card("AMD", "AMD card", "amdgpu", barred="add yourself to the group render")


@pytest.mark.parametrize(
    "found, libraries, chosen, said",
    [
        ([], BOTH, "cpu", ""),
        ([RTX], BOTH, "cuda vulkan cpu", "libraries of CUDA are there"),
        ([RTX], Libraries(cuda=frozenset({13})), "cuda cpu", "libraries of CUDA are there"),
        ([RTX], LOADER, "vulkan cpu", "cuda may be faster, and costs 143 MB, with the libraries of CUDA 13 590 MB"),
        ([RTX], Libraries(True, frozenset({12})), "vulkan cpu", "cuda may be faster"),
        ([Card("NVIDIA", "RTX 5090", "590.1", "12.0")], BOTH, "cuda vulkan cpu", "RTX 5090"),
        ([Card("NVIDIA", "RTX 4090", "570.1", "8.9")], BOTH, "vulkan cpu", "cuda12 may be faster"),
        ([Card("NVIDIA", "H100", "580.1", "9.0")], BOTH, "vulkan cpu", "cuda12 may be faster"),
        ([Card("NVIDIA", "RTX 2080", "580.1", "7.5")], BOTH, "vulkan cpu", "cuda12"),
        ([Card("NVIDIA", "of an unknown capability", "580.1")], BOTH, "vulkan cpu", "cuda12"),
        ([Card("NVIDIA", "GTX 970", "470.1")], BOTH, "vulkan cpu", ""),
        ([AMD], BOTH, "vulkan cpu", ""),
        ([INTEL, RTX], BOTH, "cuda vulkan cpu", ""),
        ([INTEL], Libraries(), "cpu", f"(driver xe) is not used: Vulkan's loader is missing: {cards.INSTALL_LOADER}"),
        ([RTX], Libraries(), "cpu", "loader is missing"),
        ([BARRED], BOTH, "cpu", "AMD card (driver amdgpu) is not used: add yourself to the group render"),
        ([BARRED, INTEL], BOTH, "vulkan cpu", ""),
    ],
)  # fmt: skip
def test_the_table_of_builds(found, libraries, chosen, said):
    choice = cards.choose(found, libraries)
    assert " ".join(choice.builds) == chosen and said in choice.line and bool(choice.line) == bool(said or RTX in found)


@pytest.mark.parametrize(
    "asked, chosen", [("auto", "vulkan cpu"), ("cpu", "cpu"), ("cuda12", "cuda12 vulkan cpu"), ("tpu", "")]
)
def test_it_runs_before_anything_is_installed(machine, asked, chosen):
    machine.nvidia()
    machine.libraries("libvulkan.so.1")
    command = [sys.executable, "-I", "-S", cards.__file__, asked]
    done = subprocess.run(command, env=os.environ | {"SLOTCACHE_ROOT": str(machine.root)}, capture_output=True, text=True)
    assert (done.stdout.strip(), bool(done.returncode)) == (chosen, not chosen)
    assert done.stderr == ("" if chosen else "LLAMA=tpu: expected one of auto, cpu, vulkan, cuda, cuda12\n")


# ---- The door -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path, monkeypatch):
    """npm's builds in an environment without packages, each with a file that has the library's name."""
    for variable in llama.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(llama, "find_spec", lambda _: None)
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "llama.cpp")
    monkeypatch.setattr(llama, "PASSED_OVER", {})

    def put(*names: str) -> None:
        for build in names:
            builds.library_folder(build).mkdir(parents=True)
            kind = "" if build in ("cpu", "cuda12") else f".{build}"
            (builds.library_folder(build) / f"libllama{kind}.v0.5.0.so").touch()
            (builds.package_folder(build) / "package.json").write_text('{"version": "3.22.1"}')

    return put


def test_the_door_takes_the_first_build_whose_trial_passes(there, monkeypatch):
    reasons = {"cuda": "libcublas.so.13: cannot open", "vulkan": "it finds no card"}
    monkeypatch.setattr(builds, "failure_on_card", lambda build: reasons.get(build, ""))
    there("cpu", "vulkan", "cuda")
    assert str(llama.find()) == "npm 3.22.1" and reasons == llama.PASSED_OVER
    assert [place.origin for place in llama.places()] == ["npm-cuda", "npm-vulkan", "npm"]
    del reasons["vulkan"]
    found = llama.find()
    assert str(found) == "npm-vulkan 3.22.1" and found.path.name == "libllama.vulkan.v0.5.0.so"
    reasons.clear()
    assert llama.find().path.name == "libllama.cuda.v0.5.0.so"


def test_the_door_tries_what_was_installed_last(there, monkeypatch):
    monkeypatch.setattr(builds, "failure_on_card", lambda build: "")
    there("cpu", "vulkan", "cuda")
    builds.keep_installed(InstalledBuilds("vulkan", ("vulkan",)))
    assert llama.find().origin == "npm-vulkan"
    builds.keep_installed(InstalledBuilds("", ()))
    assert llama.find().origin == "npm" and builds.installed_builds() == InstalledBuilds("", ())
    (builds.FOLDER / "installed.json").write_text("[]")
    assert builds.installed_builds() == InstalledBuilds()


def test_without_another_library_the_reasons_are_reported(there, monkeypatch):
    monkeypatch.setattr(builds, "failure_on_card", lambda build: "it finds no card")
    there("vulkan")
    with pytest.raises(LibraryError, match=r"not installed \(vulkan: it finds no card\): pip install"):
        llama.find()


def test_the_backend_for_cuda_12_is_put_beside_its_library(there):
    there("cuda12")
    backend = builds.package_folder("cuda12").parent / builds.BACKEND_OF_CUDA12
    backend.parent.mkdir(parents=True)
    backend.write_text("a backend")
    for _ in range(2):
        builds.finish("cuda12")
    assert (builds.library_folder("cuda12") / "libggml-cuda.so").read_text() == "a backend"


def test_a_trial_on_a_card_is_kept_with_its_driver(there, tmp_path, machine, monkeypatch):
    monkeypatch.setenv("SLOTCACHE_ROOT", str(machine.root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tried = f"open({str(tmp_path / 'tried')!r}, 'a').write('.'); print('passed')"
    monkeypatch.setattr(builds, "command", lambda *_: [sys.executable, "-c", tried])
    there("vulkan")
    machine.nvidia("570.1")

    def times() -> int:
        assert builds.failure_on_card("vulkan") == ""
        return len((tmp_path / "tried").read_text())

    assert (times(), times()) == (1, 1)
    machine.nvidia("580.1")
    assert (times(), times()) == (2, 2)
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "1")
    assert (times(), times()) == (3, 3)
    machine.file("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: NVIDIA GeForce RTX 4090\n")
    assert (times(), times()) == (4, 4), "another card with the same driver"
    machine.drm("renderD128", "amdgpu")
    assert (times(), times()) == (5, 5)
    monkeypatch.setattr(cards.os, "access", lambda *_: False)
    assert (times(), times()) == (6, 6), "this user may open it no more"
    monkeypatch.setattr(builds, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('it is computed wrongly')"])
    monkeypatch.setattr(cards.os, "access", lambda *_: True)
    machine.nvidia("590.1")
    reason = builds.failure_on_card("vulkan")
    assert reason.startswith("it is computed wrongly (kept in ") and reason.endswith(": remove it to try again)")
    monkeypatch.setattr(builds, "command", lambda *_: [sys.executable, "-c", "print('passed')"])
    assert builds.failure_on_card("vulkan") == reason, "a card that fails is not tried at each start"
    assert builds.failure_on_card("vulkan", again=True) == "" == builds.failure_on_card("vulkan")


# ---- What is not used ---------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, machine, monkeypatch):
    """This library in a folder of its own, on a machine that seems to have these cards, and no device but the CPU."""
    monkeypatch.setenv("SLOTCACHE_ROOT", str(machine.root))
    monkeypatch.setattr(builds, "FOLDER", tmp_path / "llama.cpp")
    monkeypatch.setattr(llama, "LIBRARY", llama.Library(tmp_path / "lib" / LIBRARY.name, "npm", "3.22.1"))
    monkeypatch.setattr(hardware, "devices", lambda: [])
    (tmp_path / "lib").mkdir()
    asked = hardware.unused_card, hardware.unloaded_backends
    for function in asked:
        function.cache_clear()
    yield tmp_path / "lib"
    for function in asked:
        function.cache_clear()


def test_a_backend_that_does_not_load_is_named_with_the_reason(here):
    (here / "libggml-vulkan.so").write_text("no library")
    (here / "libggml-vulkan.so.txt").touch()
    (here / "libggml-cpu-haswell.so").touch()
    ((name, reason),) = hardware.unloaded_backends().items()
    assert name == "libggml-vulkan.so" and ("file too short" in reason or "invalid ELF" in reason)


@pytest.mark.skipif(not cards.has_builds(), reason="a C compiler for ELF")
def test_a_library_that_a_backend_lacks_has_its_remedy(here):
    try:
        subprocess.run(
            ["cc", "-shared", "-o", here / "libcublas.so.13", "-Wl,-soname,libcublas.so.13", "-x", "c", os.devnull],
            check=True,
        )
    except OSError:
        pytest.skip("needs a C compiler")
    subprocess.run(
        ["cc", "-shared", "-o", here / "libggml-cuda.so", "-Wl,--no-as-needed", here / "libcublas.so.13"], check=True
    )
    (here / "libcublas.so.13").unlink()
    (reason,) = hardware.unloaded_backends().values()
    assert reason.startswith("libcublas.so.13: cannot open") and reason.endswith(": pip install 'slotcache[cuda]'")


def test_cuda_s_libraries_are_opened_before_the_backend(here, machine, monkeypatch):
    (here / "libggml-cuda.so").write_bytes(b"\x7fELF...libcudart.so.13\0libcublas.so.13\0")
    machine.cuda(13)
    opened = []
    monkeypatch.setattr(llama.ctypes, "CDLL", lambda path, mode: opened.append((Path(path).name, mode)))
    llama.open_needed()
    names = ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13"]
    assert opened == [(name, llama.ctypes.RTLD_GLOBAL) for name in names]


def test_a_card_that_is_not_used_is_reported_with_the_remedy(here, machine, monkeypatch):
    assert hardware.unused_card() == ""
    machine.nvidia(reported="8.6, 580.95.05, NVIDIA GeForce RTX 3060")
    machine.libraries("libvulkan.so.1")

    def reported() -> str:
        hardware.unused_card.cache_clear()
        return hardware.unused_card()

    begins = "NVIDIA GeForce RTX 3060 (driver 580.95.05) is not used: "
    assert (
        reported()
        == f"{begins}npm 3.22.1 is a build for the CPU; make serve LLAMA=vulkan or slotcache install vulkan (24 MB)"
    )
    builds.keep_installed(InstalledBuilds("auto", (), {"vulkan": "it finds no card"}))
    assert reported().startswith(f"{begins}vulkan: it finds no card; make serve LLAMA=vulkan") and reported().endswith(
        "once that is mended"
    )
    monkeypatch.setattr(llama, "PASSED_OVER", {"auto": "the CPU computes m.gguf faster"})
    monkeypatch.setattr(llama, "LIBRARY", llama.Library(here / LIBRARY.name, "npm-vulkan"))
    assert reported().endswith("auto: the CPU computes m.gguf faster; make serve LLAMA=vulkan takes it nonetheless")
    monkeypatch.setattr(hardware, "devices", lambda: [hardware.Device("Vulkan0", "a card", "GPU", 1, 1)])
    assert reported() == ""
