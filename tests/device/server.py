"""A process that offers its CPU as a device: `server.py FOLDER PORT THREADS`, with the folder of llama.cpp's libraries.

It ends when its standard input does, so that it does not outlive the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

CPU = 0  # ggml's number for this type of device


def serve(folder: Path, port: int, threads: int) -> None:
    """Answer one client after the other, until the process is ended."""
    ggml, rpc = ctypes.CDLL(str(folder / "libggml.so")), ctypes.CDLL(str(folder / "libggml-rpc.so"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(CPU))
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start(f"127.0.0.1:{port}".encode(), None, threads, len(devices), devices)


def end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
