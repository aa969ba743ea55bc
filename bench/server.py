"""A server process: started for one arm of a benchmark, polled until it is ready, and stopped by its process id."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from urllib.request import ProxyHandler, build_opener

from .error import ServerError

HOST = "127.0.0.1"
TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server; both servers use the same flags. `lanes`: None for the server's own default."""

    model: Path
    context: int = 16384
    lanes: int | None = None
    threads: int = os.cpu_count() or 1
    flash_attention: str = "auto"
    repack: str = "default"
    """`on` or `off` in every arm, or `default`: each engine's own default."""
    extra: tuple[str, ...] = ()

    def flags(self, port: int) -> list[str]:
        """Return the flags that both servers know."""
        lanes = ["-np", str(self.lanes)] if self.lanes else []
        flags = ["--host", HOST, "--port", str(port), "-m", str(self.model), "-c", str(self.context), *lanes]
        return [*flags, "-t", str(self.threads), "-fa", self.flash_attention, *self.extra]


def llama_server_command(binary: str, options: ServerOptions, port: int) -> list[str]:
    """Return the command of llama-server: its defaults with these flags, without its web page."""
    return [binary, *options.flags(port), *llama_repack(options.repack), "--no-webui"]


def llama_repack(repack: str) -> list[str]:
    """Return llama.cpp's flag for `repack`; its programs repack by default."""
    return {"on": ["--repack"], "off": ["--no-repack"]}.get(repack, [])


def slotcache_command(options: ServerOptions, port: int) -> list[str]:
    """Return the command of `slotcache serve` in this Python environment."""
    repack = [] if options.repack == "default" else ["--repack", options.repack]
    return [*own_command(), "serve", *options.flags(port), *repack]


def own_command() -> list[str]:
    """Return the beginning of slotcache's commands. In a bare checkout it runs the module, which must be importable."""
    script = shutil.which("slotcache", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-m", "slotcache.server.cli"]


def free_port() -> int:
    """Return a port that no program listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Server:
    """Runs `command` while the context lasts. Entering waits until `/health` answers 200.

    Raises ServerError, with the end of the log, if the process ends or `deadline` seconds pass first.
    """

    def __init__(self, command: Sequence[str], port: int, deadline: float = 300.0) -> None:
        self.command, self.deadline = list(command), deadline
        self.url = f"http://{HOST}:{port}"
        with tempfile.NamedTemporaryFile(prefix="slotcache-bench-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None if the process does not run."""
        return self._process.pid if self._process else None

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll() if self._process else None

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            try:
                # A session of its own: ctrl-C reaches only the benchmark, which then stops the server in order.
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise ServerError(f"cannot start {self.command[0]}: {error}") from error
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process and (code := self._process.poll()) is not None:
            print(self._failure(f"{_ended(code)} while it was measured"), file=sys.stderr)
        self.stop()
        if error is None or kind is KeyboardInterrupt:
            self.log.unlink(missing_ok=True)
        else:
            print(f"the server's log is {self.log}", file=sys.stderr)

    def stop(self, patience: float = 10.0) -> None:
        """Ask the process to end; kill it after `patience` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def _wait(self) -> None:
        assert self._process is not None
        started, told = monotonic(), 0
        while not self._is_healthy():
            waited = monotonic() - started
            if (code := self._process.poll()) is not None:
                raise ServerError(self._failure(f"{_ended(code)} before it was ready"))
            if waited > self.deadline:
                raise ServerError(self._failure(f"was not ready after {self.deadline:.0f} s"))
            if waited - told >= 5:
                told = int(waited)
                print(f"waiting for {Path(self.command[0]).name}: {told} s", file=sys.stderr, flush=True)
            sleep(0.05)  # between two polls of a server that may take minutes to load

    def _is_healthy(self) -> bool:
        direct = build_opener(ProxyHandler({}))  # a server on this machine is not behind a proxy
        with contextlib.suppress(OSError), direct.open(f"{self.url}/health", timeout=2) as answer:
            return answer.status == 200
        return False

    def _failure(self, what: str) -> str:
        return f"{' '.join(self.command)}\n{what}; the end of its log ({self.log}):\n{self.tail()}"


def _ended(code: int) -> str:
    """Describe how a process ended. The name of a signal says more than its number."""
    if code >= 0:
        return f"ended with code {code}"
    # Some machines report AMX but forbid its use, and repacked weights use it.
    hint = " (try --repack off)" if -code == signal.SIGILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
