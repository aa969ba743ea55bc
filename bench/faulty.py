"""Runs a server with a fault: `python -m slotcache.bench.faulty FAULT serve ...`. Each SIGUSR1 triggers the fault once.

The server has no code for faults. Functions that it calls are replaced instead.
"""

from __future__ import annotations

import asyncio
import os
import resource
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from ..models.runner import Runner, States
from ..server.api.stream import SsePing
from ..server.http.connection import Connection

FATAL = -3  # llama_decode's code for a fatal error
ALMOST_FULL = 64 << 10  # most bytes of a file: enough for the log, too few for KV
SLOW = 1.0  # s that a slow disk takes
EAGER, EVER = 0.001, 1e9  # s between two pings, and s of patience
NARROW = 4096  # bytes of the system's buffer


class Killed(BaseException):
    """An error that the engine does not handle, so that its thread ends."""


class Trigger:
    """Counts the received signals that have not caused a fault yet."""

    def __init__(self) -> None:
        self._shots = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._shots += 1

    def pull(self) -> bool:
        if not self._shots:
            return False
        self._shots -= 1
        return True


Fault = Callable[[Trigger], None]


def _replace(owner: Any, name: str, broken: Callable[[Any], Any]) -> None:
    """Replace a function with `broken(function)`. Raises AttributeError if the function does not exist."""
    setattr(owner, name, broken(getattr(owner, name)))


def _instead(owner: Any, name: str, happens: Callable[[], Any]) -> Fault:
    """Return a fault that, once triggered, replaces the function's next call with a call of `happens`."""

    def fault(trigger: Trigger) -> None:
        _replace(owner, name, lambda real: lambda *of, **named: happens() if trigger.pull() else real(*of, **named))

    return fault


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def happens() -> NoReturn:
        raise error

    return happens


def full_disk(trigger: Trigger) -> None:
    """Simulate a full disk from the trigger on: no file can grow beyond `ALMOST_FULL`."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    trigger.on_signal = lambda number, frame: resource.setrlimit(resource.RLIMIT_FSIZE, (ALMOST_FULL, most))


def slow_disk(trigger: Trigger) -> None:
    """Simulate a slow disk from the start: each wait for it takes `SLOW` seconds more."""
    for name in ("fsync", "replace"):
        _replace(os, name, lambda real: lambda *of, **named: (time.sleep(SLOW), real(*of, **named))[1])


def eager(trigger: Trigger) -> None:
    """From the start, ping every stream each millisecond, and wait forever for clients that do not read."""
    _replace(SsePing, "__init__", lambda real: lambda self, send, interval, event: real(self, send, EAGER, event))
    _replace(Connection, "connection_made", lambda real: lambda self, transport: (_narrow(transport), real(self, transport)))
    Connection.patience = EVER


def _narrow(transport: asyncio.Transport) -> None:
    """Give the system only a small buffer for output that a client has not read."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW)


FAULTS: dict[str, Fault] = {
    "none": lambda trigger: None,
    "decode": _instead(Runner, "_decode", lambda: FATAL),
    "allocation": _instead(States, "_copy", _raising(MemoryError("no memory for a copy of KV"))),
    "killed": _instead(Runner, "run", _raising(Killed("the thread was killed"))),
    "full-disk": full_disk,
    "slow-disk": slow_disk,
    "eager": eager,
}


def main(arguments: list[str]) -> None:
    """Serve with the fault `arguments[0]`. All other arguments are passed to `slotcache`."""
    trigger = Trigger()
    FAULTS[arguments[0]](trigger)
    signal.signal(signal.SIGUSR1, lambda number, frame: trigger.on_signal(number, frame))
    sys.argv = ["slotcache", *arguments[1:]]
    runpy.run_module("slotcache.server.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
