"""Server processes: start, readiness, stop, and the reason of a failed start."""

import os
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from slotcache.bench.report import ServerError
from slotcache.bench.servers import Server, ServerOptions, free_port, llama_server_command, slotcache_command

SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked < 3 else 200)
        self.end_headers()
print("loading", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_runs_while_the_context_lasts() -> None:
    port = free_port()
    server = Server([sys.executable, "-c", SERVE, str(port)], port)
    with server:
        pid = server.pid
        assert pid is not None and is_running(pid)
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200, "503 means it is still loading"
        assert "loading" in server.tail()
    assert not is_running(pid) and server.pid is None
    assert not server.log.exists(), "a log that nobody needs is cleaned up"


def test_ctrl_c_stops_it_too() -> None:
    port = free_port()
    server = Server([sys.executable, "-c", SERVE, str(port)], port)
    pid = None
    with pytest.raises(KeyboardInterrupt), server:
        pid = server.pid
        raise KeyboardInterrupt
    assert pid is not None and not is_running(pid)


def test_a_server_that_ignores_a_polite_end_is_ended() -> None:
    port = free_port()
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE
    with Server([sys.executable, "-c", stubborn, str(port)], port) as server:
        pid = server.pid
        assert pid is not None
        server.stop(patience=0.1)
    assert not is_running(pid)


def test_a_crash_is_shown_whole_however_many_threads_there_were() -> None:
    crashing = "import faulthandler, os, threading; faulthandler.enable(); hold = threading.Event()\n"
    crashing += "for _ in range(20): threading.Thread(target=hold.wait, daemon=True).start()\n"
    crashing += "print('before it', flush=True); os.kill(os.getpid(), 11)"
    with pytest.raises(ServerError) as raised, Server([sys.executable, "-c", crashing], free_port()):
        pass
    assert "Fatal Python error: Segmentation fault" in str(raised.value) and str(raised.value).count("hread 0x") == 21


def test_a_failing_start_shows_the_command_and_the_log() -> None:
    port = free_port()
    failing = "import sys; print('no such model: x.gguf'); sys.exit(3)"
    with pytest.raises(ServerError) as raised, Server([sys.executable, "-c", failing], port):
        pass
    assert "ended with code 3 before it was ready" in str(raised.value)
    assert "no such model: x.gguf" in str(raised.value) and sys.executable in str(raised.value)


def test_an_illegal_instruction_comes_with_a_hint() -> None:
    dying = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(ServerError, match=r"was ended by SIGILL \(try --repack off\)"):
        Server([sys.executable, "-c", dying], free_port()).__enter__()


def test_a_start_that_takes_too_long_is_given_up() -> None:
    server = Server([sys.executable, "-c", "import signal; signal.pause()"], free_port(), deadline=0.2)
    with pytest.raises(ServerError, match="was not ready after"), server:
        pass
    assert server.pid is None


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ServerError, match="cannot start /no/such/llama-server"):
        Server(["/no/such/llama-server"], free_port()).__enter__()


def test_commands_use_the_same_flags() -> None:
    options = ServerOptions(Path("m.gguf"), context=4096, slots=4, threads=2, flash_attention="on", extra=("-b", "256"))
    flags = "--host 127.0.0.1 --port 81 -m m.gguf -c 4096 -np 4 -t 2 -fa on -b 256".split()  # noqa: SIM905
    assert llama_server_command("bin/llama-server", options, 81) == ["bin/llama-server", *flags, "--no-webui"]
    command = slotcache_command(options, 81)
    assert command[-len(flags) - 1 :] == ["serve", *flags]
    off = ServerOptions(Path("m.gguf"), repack="off")
    assert "--no-repack" in llama_server_command("x", off, 81)
    assert slotcache_command(off, 81)[-2:] == ["--repack", "off"]
    assert "-np" not in llama_server_command("x", ServerOptions(Path("m.gguf")), 81), "its own default"
