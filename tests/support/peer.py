"""Runs llama-server, to compare the prompts that it makes from chats."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DEADLINE = 300.0  # s to load the model


@contextmanager
def llama_server(program: str, model: Path, *flags: str) -> Iterator[httpx.Client]:
    """Run a llama-server with a small model on a free port. Yield a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = ["-c", "512", "-np", "1", "-t", "1", "--no-repack", "--no-warmup"]
    command = [program, "-m", str(model), "--port", str(port), *size, *flags]
    libraries = os.environ | {"LD_LIBRARY_PATH": str(Path(program).parent)}
    running = subprocess.Popen(command, env=libraries, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
            _wait(running, client)
            yield client
    finally:
        running.terminate()
        running.wait()


def prompt_of(client: httpx.Client, chat: Mapping[str, Any]) -> str | None:
    """Return the prompt that llama-server makes from a chat; None if it refuses the chat."""
    return client.post("/apply-template", json=chat).json().get("prompt")


def _wait(running: "subprocess.Popen[bytes]", client: httpx.Client) -> None:
    end = time.monotonic() + DEADLINE
    while running.poll() is None and time.monotonic() < end:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError("llama-server did not start")
