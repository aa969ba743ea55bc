"""The wheel in an empty environment, away from the checkout: its modules, and a server. `make wheel-test` runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import files, version
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).with_name("slotcache")
ROOMS = ("server", "slots", "ordering", "retrieval", "models", "front", "bench")
QUESTION, ANSWER = "What is the entrance fee of the Clock Museum?", "The entrance fee of the Clock Museum is six francs."
PATIENCE = 120  # seconds, of the server's whole life


def check_modules() -> None:
    """Compare the modules with the checkout's: none is missing, and none is left of an earlier build."""
    installed = {str(file).removeprefix("slotcache/") for file in files("slotcache") or () if file.suffix == ".py"}
    assert installed == {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}


def check_version() -> None:
    """Compare the wheel's number with the one that the installed command tells, and with the checkout's."""
    printed = subprocess.run([str(COMMAND), "--version"], capture_output=True, text=True, check=True).stdout
    assert printed == f"slotcache {version('slotcache')}\n"
    assert f'\nVERSION = "{version("slotcache")}"\n' in (ROOT / "server/config/settings.py").read_text("utf-8")


def check_server(folder: str) -> None:
    """Start a server in an empty home, ask it and its page, and stop it as ctrl-C does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(COMMAND), "serve", "--port", str(port)]
    environment = {"PATH": os.environ["PATH"], "HOME": folder}
    with subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        watch = Timer(PATIENCE, server.kill)
        watch.start()
        try:
            check_answers(address(server.stderr))
        finally:
            server.send_signal(signal.SIGINT)
            server.stderr.read()
            watch.cancel()
    assert server.returncode == 0


def address(log: Iterable[str]) -> str:
    """Return the address that the server tells when it is ready."""
    read = []
    for line in log:
        read.append(line)
        if ready := re.search(r"ready on (\S+)", line):
            return ready[1]
    raise AssertionError("".join(read))


def check_answers(url: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "documents": [{"id": "museum", "text": ANSWER}]}
    asked = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urlopen(asked))["choices"][0]["message"]["content"]
    print(QUESTION, answer)
    assert answer == ANSWER
    assert b"page/app.js" in urlopen(url).read() and urlopen(f"{url}/page/app.js").read()


if __name__ == "__main__":
    check_modules()
    check_version()
    with TemporaryDirectory() as home:
        check_server(home)
