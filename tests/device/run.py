"""Run a command whose llama.cpp finds a device that is not the CPU: `python tests/device/run.py rpc|rpc2|vulkan COMMAND`.

rpc: the CPU of another process, by llama.cpp's RPC backend (`make device-test` builds it in build/device). For llama.cpp it
is a GPU: KV is not in the memory of the server's process, all state moves by copies, and no callback aborts a batch. It
computes with the kernels of the CPU, so results can be compared bit for bit. It says nothing about speed.

Each process of the command gets such a device of its own, since an RPC server answers one client at a time. It ends with its
client, and the next one gets its port: llama.cpp calls a device by its address, and KV on disk is that of a device. All
listen on loopback only. DEVICE_THREADS (1): the threads that a device computes with. rpc2: two of them a process.

vulkan: Mesa's device in software (llvmpipe), with npm's Vulkan build of llama.cpp: the code that computes on cards. A kernel
is compiled at its first use, in seconds; build/device/shaders keeps them between runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "device"
DEADLINE = 30.0  # s until a device listens

# ---- Vulkan in software -------------------------------------------------------------------------------------------------

PACKAGE = Path("node_modules/@node-llama-cpp/linux-x64-vulkan/bins/linux-x64-vulkan")
DRIVERS = Path("/usr/share/vulkan/icd.d")  # Mesa's llvmpipe among those of cards, which tests do not compute on


def software_driver() -> Path | None:
    """Return the file that names Mesa's driver in software to Vulkan's loader; None: it is not installed."""
    return next(iter(sorted(DRIVERS.glob("lvp_icd*.json"))), None)


def vulkan_library() -> Path | None:
    """Return the folder of npm's Vulkan build: that of SLOTCACHE_VULKAN, this environment's, or `make device-test`'s."""
    beside = (Path(sys.prefix, "llama.cpp", "vulkan", PACKAGE), BUILD / "vulkan" / PACKAGE)
    named = os.environ.get("SLOTCACHE_VULKAN")
    return next((folder for folder in ([Path(named)] if named else beside) if folder.is_dir()), None)


def missing_for_vulkan() -> str:
    """Return what is missing to run on Vulkan in software, and how to get it; "" if all is there."""
    if software_driver() is None:
        return "Vulkan in software is missing: apt-get install mesa-vulkan-drivers"
    if vulkan_library() is None:
        return "npm's Vulkan build is missing: slotcache install vulkan, or make device-test (with npm)"
    return ""


def vulkan() -> dict[str, object]:
    """Return the variables with which llama.cpp finds Mesa's device in software, and no card beside it."""
    shaders = BUILD / "shaders"
    shaders.mkdir(parents=True, exist_ok=True)
    driver = software_driver()
    return {
        "SLOTCACHE_LLAMA": vulkan_library(),
        "GGML_VK_VISIBLE_DEVICES": 0,
        "VK_DRIVER_FILES": driver,
        "VK_ICD_FILENAMES": driver,  # of older loaders
        "MESA_SHADER_CACHE_DIR": shaders,
    }


# ---- The CPU of another process, by RPC ---------------------------------------------------------------------------------

LIBRARIES, PLUGIN = BUILD / "llama" / "bin", BUILD / "plugin.so"


class Lender:
    """Starts a device for each connection, and ends it when the connection closes."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._devices: set[subprocess.Popen[bytes]] = set()
        self._ports: list[int] = []  # of devices that have ended
        self._lock, self._is_open = threading.Lock(), True
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all devices."""
        with self._lock:
            self._is_open = False
            for device in self._devices:
                device.terminate()
        self._listening.close()
        for device in list(self._devices):
            device.wait()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._lend, args=(client,), daemon=True).start()

    def _lend(self, client: socket.socket) -> None:
        with self._lock:
            port = self._ports.pop() if self._ports else free_port()
        command = [sys.executable, str(Path(__file__).with_name("server.py")), str(LIBRARIES), str(port), str(self._threads)]
        with self._lock:
            if not self._is_open:
                return
            # A session of its own: ctrl-C ends the client first, which would abort if its device were gone.
            device = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            self._devices.add(device)
        with client, contextlib.suppress(OSError):
            if listens(port, device):
                client.sendall(f"127.0.0.1:{port}\n".encode())
                client.recv(1)  # until it ends
        device.terminate()
        device.wait()
        with self._lock:
            self._devices.discard(device)
            self._ports.append(port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int, device: subprocess.Popen[bytes]) -> bool:
    """Wait until a device listens; return False if it ended or took too long."""
    end = time.monotonic() + DEADLINE
    while device.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def rpc(devices: int = 1) -> Iterator[dict[str, object]]:
    """Lend devices for a while. Yields the variables with which llama.cpp finds one, or two, in each process."""
    lender = Lender(int(os.environ.get("DEVICE_THREADS", "1")))
    try:
        yield {
            "LLAMA_CPP_LIB_PATH": LIBRARIES,
            "GGML_BACKEND_PATH": PLUGIN,
            "SLOTCACHE_DEVICE_PORT": lender.port,
            "SLOTCACHE_DEVICES": devices,
        }
    finally:
        lender.close()


# ---- The command --------------------------------------------------------------------------------------------------------


def missing_for_rpc() -> str:
    return "" if PLUGIN.exists() else f"{PLUGIN} is not built: make device-test"


DEVICES = {
    "rpc": (missing_for_rpc, rpc),
    "rpc2": (missing_for_rpc, lambda: rpc(2)),
    "vulkan": (missing_for_vulkan, lambda: contextlib.nullcontext(vulkan())),
}


def main(device: str = "", *command: str) -> int:
    if device not in DEVICES or not command:
        print("usage: run.py rpc|rpc2|vulkan COMMAND ...", file=sys.stderr)
        return 2
    what_is_missing, lend = DEVICES[device]
    if missing := what_is_missing():
        print(missing, file=sys.stderr)
        return 2
    with lend() as variables:
        running = subprocess.Popen(command, env=os.environ | {name: str(value) for name, value in variables.items()})
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, lambda *_: running.terminate())
        while True:
            try:
                return running.wait()
            except KeyboardInterrupt:  # the command got it, too, and ends by itself
                continue


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
