"""A server with a fault in it: `python -m slotcache.bench.faulty FAULT serve ...`. Each SIGUSR1 sets it off once.

The server is the command line's own. Only what it stands on is broken, so that it needs no door for faults itself.
"""

import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

FATAL = -3  # what llama_decode returns for an error that it does not recover from
ALMOST_FULL = 64 << 10  # bytes: the log fits, KV does not
SLOW = 1.0  # s


class Killed(BaseException):
    """An error that no handler of the engine catches: its thread ends."""


class Trigger:
    """Signals that have come and have not done their harm."""

    def __init__(self) -> None:
        self._shots = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._shots += 1

    def pull(self) -> bool:
        if not self._shots:
            return False
        self._shots -= 1
        return True


def decode(trigger: Trigger) -> None:
    """The next step's computation fails."""
    from ..models.runner import Runner

    _break(Runner, "_decode", lambda real: lambda *given, **named: FATAL if trigger.pull() else real(*given, **named))


def allocation(trigger: Trigger) -> None:
    """There is no memory for the next copy of KV."""
    from ..models.runner import Runner

    _break(Runner, "_write", lambda real: _raising(real, trigger, MemoryError("no memory for a copy of KV")))


def killed(trigger: Trigger) -> None:
    """The thread that computes ends in its next step."""
    from ..models.runner import Runner

    _break(Runner, "run", lambda real: _raising(real, trigger, Killed("the thread was killed")))


def full_disk(trigger: Trigger) -> None:
    """No file may grow any more."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    trigger.on_signal = lambda number, frame: resource.setrlimit(resource.RLIMIT_FSIZE, (ALMOST_FULL, most))


def slow_disk(trigger: Trigger) -> None:
    """What waits for the disk waits long, from the start."""
    for name in ("fsync", "replace"):
        _break(os, name, _late)


FAULTS: dict[str, Callable[[Trigger], None]] = {
    "none": lambda trigger: None,
    "decode": decode,
    "allocation": allocation,
    "killed": killed,
    "full-disk": full_disk,
    "slow-disk": slow_disk,
}


def main(arguments: list[str]) -> None:
    """Serve with the fault that comes first, the rest being the arguments of `slotcache`."""
    trigger = Trigger()
    FAULTS[arguments[0]](trigger)
    signal.signal(signal.SIGUSR1, lambda number, frame: trigger.on_signal(number, frame))
    sys.argv = ["slotcache", *arguments[1:]]
    runpy.run_module("slotcache.server.cli", run_name="__main__", alter_sys=True)


def _break(owner: Any, name: str, broken: Callable[[Any], Any]) -> None:
    """Replace a function by what `broken` makes of it. Raises AttributeError where it has moved."""
    setattr(owner, name, broken(getattr(owner, name)))


def _raising(real: Callable[..., Any], trigger: Trigger, error: BaseException) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if trigger.pull():
            raise error
        return real(*given, **named)

    return call


def _late(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        time.sleep(SLOW)
        return real(*given, **named)

    return call


if __name__ == "__main__":
    main(sys.argv[1:])
