"""The road of a chat: the modules that one streamed chat runs through, and the calls between them.

`python tests/road.py [-v]` serves the built-in model in this process, and counts with `sys.setprofile` what happens while
one warm chat with two documents gets three tokens. -v also prints the modules, by the calls into each.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if "slotcache" not in sys.modules:  # of this checkout, whatever is installed
    package = ModuleType("slotcache")
    package.__path__ = [str(ROOT)]
    sys.modules["slotcache"] = package

from slotcache.models.demo import FILE as MODEL  # noqa: E402
from slotcache.server.config.settings import Settings  # noqa: E402
from slotcache.server.serve import make_server, run  # noqa: E402

TOKENS = 3


class Road:
    """Counts calls from one of our files into another, in all threads, while it is open."""

    def __init__(self) -> None:
        self.is_open = False
        self.files: Counter[str] = Counter()
        self.edges: Counter[tuple[str, str]] = Counter()
        self._ours: dict[str, str | None] = {}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Be told of an event in any thread (`sys.setprofile`)."""
        if not self.is_open or event != "call" or (callee := self._module(frame)) is None:
            return
        self.files[callee] += 1
        caller = frame.f_back
        while caller is not None and self._module(caller) is None:
            caller = caller.f_back  # through a library, such as asyncio
        above = None if caller is None else self._module(caller)
        if above is not None and above != callee:
            self.edges[above, callee] += 1

    def _module(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._ours:
            path = Path(name)
            ours = path.is_relative_to(ROOT) and path != Path(__file__).resolve() and ".venv" not in path.parts
            self._ours[name] = ".".join(path.relative_to(ROOT).with_suffix("").parts) if ours else None
        return self._ours[name]


def chat(url: str, question: str) -> None:
    """Send one streamed chat with two documents, and read it to its end."""
    documents = [
        {"id": "express", "text": "The departure time of the Skarrow Express is 7:40."},
        {"id": "museum", "text": "The entrance fee of the Clock Museum is six francs."},
    ]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "documents": documents,
        "cache_prompt": True,
        "stream": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def measure() -> Road:
    """Serve, warm up, and count one chat."""
    road = Road()
    threading.setprofile(road.note)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server, host = make_server(Settings(port=port, ctx_size=4096, threads=1, idle_prefill=False))
    thread = threading.Thread(target=lambda: asyncio.run(run(server, host, MODEL)))
    thread.start()
    try:
        while host.service is None:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{port}"
        for question in ("When does the Skarrow Express leave?", "What is the entrance fee of the Clock Museum?"):
            chat(url, question)
        time.sleep(0.5)  # what is stored behind an answer is stored
        road.is_open = True
        chat(url, "And when does the museum open?")
        time.sleep(0.2)
        road.is_open = False
    finally:
        server.should_exit = True
        thread.join()
        threading.setprofile(None)
    return road


if __name__ == "__main__":
    found = measure()
    if "-v" in sys.argv:
        for module, calls in found.files.most_common():
            print(f"{calls:5} {module}")
    print(f"{len(found.files)} modules, {len(found.edges)} edges, {sum(found.edges.values())} calls between files")
