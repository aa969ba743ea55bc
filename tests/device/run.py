"""Run a command whose llama.cpp finds a device that is not the CPU: `python tests/device/run.py COMMAND ...`.

The device is the CPU of another process, by llama.cpp's RPC backend (`make device-test` builds it in build/device). For
llama.cpp it is a GPU: KV is not in the memory of the server's process, all state moves by copies, and no callback aborts a
batch. It computes with the kernels of the CPU, so results can be compared bit for bit. It says nothing about speed.

Each process of the command gets a device of its own, since an RPC server answers one client at a time. It ends with its
client, and the next one gets its port: llama.cpp calls a device by its address, and KV on disk is that of a device. All
listen on loopback only. DEVICE_THREADS (1): the threads that a device computes with.
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
from pathlib import Path
from subprocess import DEVNULL

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "device"
LIBRARIES, PLUGIN = BUILD / "llama" / "bin", BUILD / "plugin.so"
DEADLINE = 30.0  # s until a device listens


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


def environment(port: int) -> dict[str, str]:
    """Return the environment in which llama.cpp finds the device."""
    found = {"LLAMA_CPP_LIB_PATH": LIBRARIES, "GGML_BACKEND_PATH": PLUGIN, "SLOTCACHE_DEVICE_PORT": port}
    return os.environ | {name: str(value) for name, value in found.items()}


def main(command: list[str]) -> int:
    if not command:
        print("usage: run.py COMMAND ...", file=sys.stderr)
        return 2
    if not PLUGIN.exists():
        print(f"{PLUGIN} is not built: make device-test", file=sys.stderr)
        return 2
    lender = Lender(int(os.environ.get("DEVICE_THREADS", "1")))
    try:
        running = subprocess.Popen(command, env=environment(lender.port))
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, lambda *_: running.terminate())
        while True:
            try:
                return running.wait()
            except KeyboardInterrupt:  # the command got it, too, and ends by itself
                continue
    finally:
        lender.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
