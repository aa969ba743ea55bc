"""Child processes that end when this process ends, even if this process is killed."""

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
    """Start a child process that ends when this process ends. Raises OSError.

    is_asked: if True, the child gets SIGTERM when this process ends, so that it can shut down in its own way. If False, the
        child gets SIGKILL.

    The other arguments are those of `Popen`. Only Linux sends a signal when this process ends. On other systems the child
    has to end itself when its stdin is closed.
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
    """Let Linux send a signal to a process when the write end of a pipe is closed.

    When this process ends, the system closes the write end.

    lifeline: the read end of the pipe; the process must have it open, too. Nothing is ever written to the pipe.
    is_asked: as in `start_child`.

    PR_SET_PDEATHSIG would not do: it kills the child when the thread that started it ends, not when this process ends.
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
    """Run a process to its end, and capture its output. Raises OSError, and TimeoutExpired after a timeout.

    timeout: in seconds. After `timeout` seconds, the process is killed.
    goes_on: called ten times a second. Once `goes_on` returns False, the process is killed, and TimeoutExpired is raised.
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
    """Wait for a process.

    Return what the process wrote to stdout and to stderr. Raises TimeoutExpired, as `run_child` does.
    """
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
    """Send SIGTERM to a process. Kill the process if it still runs after `patience` seconds."""
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
    """Handle a signal as ctrl-C is handled. The ctrl-C handler of an event loop cancels the loop's tasks."""
    ctrl_c = signal.getsignal(signal.SIGINT)
    (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(number, frame)


@contextmanager
def ends_in_order(handler: Callable[[int, FrameType | None], object] = as_ctrl_c) -> Generator[None]:
    """Within the block, handle SIGTERM and SIGHUP, so that this process can end its children before it ends.

    Use it in the main thread only. If a signal is ignored, such as SIGHUP under nohup, it stays ignored.
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
