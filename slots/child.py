"""Child processes: each ends when this process ends, for whatever reason."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE
from time import monotonic
from types import FrameType
from typing import BinaryIO

LOOK = 0.1  # s between looks at whether to go on


def start_child(
    command: Sequence[str],
    *,
    is_asked: bool = False,
    stdin: int | None = DEVNULL,
    stdout: int | BinaryIO | None = None,
    stderr: int | BinaryIO | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that lives no longer than this one. Raises OSError.

    is_asked: it ends by SIGTERM, in its own way, as servers do; else by SIGKILL. The other arguments are Popen's. On other
    systems than Linux the child itself has to notice that this process has ended: its stdin ends.
    """
    lifeline, end = os.pipe()
    process = None
    try:
        process = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=start_new_session,
            pass_fds=(lifeline,) if sys.platform == "linux" else (),
        )
        tie(process.pid, lifeline, is_asked=is_asked)
    except BaseException:
        os.close(end)
        if process is not None:  # ctrl-C, before the tie
            process.kill()
        raise
    finally:
        os.close(lifeline)
    weakref.finalize(process, os.close, end)
    return process


def tie(pid: int, lifeline: int, *, is_asked: bool = False) -> None:
    """Let Linux end a process when a pipe's other end is closed, as all files of a process are when it ends.

    lifeline: the pipe's end for reading, which the process has, too. Nothing is ever written to it. The kernel's
    PR_SET_PDEATHSIG would not do: it depends on the thread that started the process, which may end long before.
    """
    with suppress(ImportError, OSError):  # another system, or one that only looks like Linux
        from fcntl import F_SETFL, F_SETOWN, F_SETSIG, fcntl

        fcntl(lifeline, F_SETOWN, pid)
        fcntl(lifeline, F_SETSIG, signal.SIGTERM if is_asked else signal.SIGKILL)
        fcntl(lifeline, F_SETFL, os.O_ASYNC)


def run_child(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a process to its end, and capture what it prints. Raises OSError, and TimeoutExpired once the process is killed.

    goes_on: asked ten times a second; if it returns False, the time is over.
    """
    with start_child(command, stdout=PIPE, stderr=PIPE, env=env) as process:
        try:
            printed, errors = _to_end(process, timeout, goes_on)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, printed, errors)


def _to_end(
    process: subprocess.Popen[bytes], timeout: float | None, goes_on: Callable[[], bool] | None
) -> tuple[bytes, bytes]:
    """Return what a process prints until it ends. Raises TimeoutExpired."""
    if goes_on is None:
        return process.communicate(timeout=timeout)
    latest = monotonic() + (math.inf if timeout is None else timeout)
    while True:
        try:
            return process.communicate(timeout=LOOK)
        except subprocess.TimeoutExpired:
            if not goes_on() or monotonic() >= latest:
                raise


def stop_child(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ask a process to end; kill it after `patience` seconds."""
    process.terminate()
    try:
        process.wait(patience)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


ENDS = ("SIGTERM", "SIGHUP")  # signals that end a process at once, unless it has a handler


def as_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Do what ctrl-C does. An event loop has a handler for ctrl-C that cancels its tasks."""
    ctrl_c = signal.getsignal(signal.SIGINT)
    (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(number, frame)


@contextmanager
def ends_in_order(handler: Callable[[int, FrameType | None], object] = as_ctrl_c) -> Generator[None]:
    """Handle the signals that end this process, so that its children are ended in order. Main thread only.

    An ignored signal stays ignored: SIGHUP under nohup.
    """
    numbers = [number for name in ENDS if (number := getattr(signal, name, None)) is not None]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, usual in before.items():
        if usual is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
