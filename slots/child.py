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

    is_asked: when this process ends, the child gets SIGTERM and may shut down in its own way; otherwise it gets SIGKILL.

    The other arguments are those of `Popen`. Only Linux ends the child: on other systems the child must notice that its
    stdin has ended.
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
    """Let Linux end a process once the other end of a pipe is closed, as when the process that has it open ends.

    lifeline: the read end of the pipe, which the process also has open. Nothing is ever written to the pipe.
    is_asked: as in `start_child`.

    The kernel's PR_SET_PDEATHSIG does not suffice: it kills the child as soon as the thread that started it ends.
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

    timeout: in seconds.
    goes_on: called ten times a second; once it returns False, the process is killed as after a timeout.
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
    """Handle a signal as ctrl-C is handled. The ctrl-C handler of an event loop cancels the loop's tasks."""
    ctrl_c = signal.getsignal(signal.SIGINT)
    (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(number, frame)


@contextmanager
def ends_in_order(handler: Callable[[int, FrameType | None], object] = as_ctrl_c) -> Generator[None]:
    """Handle SIGTERM and SIGHUP, so that this process can end its children in order. Only for the main thread.

    A signal that is ignored stays ignored, such as SIGHUP under nohup.
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
