"""A server with a fault: `python -m slotcache.bench.faulty FAULT serve ...`. Each SIGUSR1 triggers the fault once.

The server itself is unchanged. Only functions that it calls are replaced, so that it needs no code for faults.
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

FATAL = -3  # llama_decode's code for an error that cannot be recovered
ALMOST_FULL = 64 << 10  # bytes of a file: enough for the log, too little for KV
SLOW = 1.0  # s
EAGER, EVER = 0.001, 1e9  # s
NARROW = 4096  # bytes


class Killed(BaseException):
    """An error that no handler of the engine catches: the engine thread ends."""


class Trigger:
    """Counts the signals that have arrived and have not yet caused a fault."""

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
    """Replace a function by `broken(function)`. Raises AttributeError if the function was renamed."""
    setattr(owner, name, broken(getattr(owner, name)))


def _instead(owner: Any, name: str, happens: Callable[[], Any]) -> Fault:
    """Return a fault: when triggered, it calls `happens` instead of the function's next call."""

    def fault(trigger: Trigger) -> None:
        _replace(owner, name, lambda real: lambda *of, **named: happens() if trigger.pull() else real(*of, **named))

    return fault


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def happens() -> NoReturn:
        raise error

    return happens


def full_disk(trigger: Trigger) -> None:
    """Make the disk full when triggered: no file can grow any more."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    trigger.on_signal = lambda number, frame: resource.setrlimit(resource.RLIMIT_FSIZE, (ALMOST_FULL, most))


def slow_disk(trigger: Trigger) -> None:
    """Make every wait for the disk long, from the start."""
    for name in ("fsync", "replace"):
        _replace(os, name, lambda real: lambda *of, **named: (time.sleep(SLOW), real(*of, **named))[1])


def eager(trigger: Trigger) -> None:
    """From the start, ping every stream each millisecond, and wait without a limit for clients that read nothing."""
    _replace(SsePing, "__init__", lambda real: lambda self, send, interval, event: real(self, send, EAGER, event))
    _replace(Connection, "connection_made", lambda real: lambda self, transport: (_narrow(transport), real(self, transport)))
    Connection.patience = EVER


def _narrow(transport: asyncio.Transport) -> None:
    """Let the system buffer only little output that a client has not read."""
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
    """Serve with the fault `arguments[0]`. The other arguments are those of `slotcache`."""
    trigger = Trigger()
    FAULTS[arguments[0]](trigger)
    signal.signal(signal.SIGUSR1, lambda number, frame: trigger.on_signal(number, frame))
    sys.argv = ["slotcache", *arguments[1:]]
    runpy.run_module("slotcache.server.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
