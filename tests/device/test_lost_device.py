"""A device that is lost while it computes: each request ends once, and the server goes on or ends."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from unittest.mock import ANY

import httpx
import pytest
from server.conftest import DEADLINE, free_port, running, text_of, until
from server.engine.test_engine import CHAT, LONG, Stream
from server.engine.test_failed_steps import about
from server.test_cli import command, wait_until_ready
from slotcache.models.demo import FILE
from slotcache.models.errors import RunnerError
from support.on_device import HAS_OWN_KERNELS, needs_device

pytestmark = needs_device
SERVER = str(Path(__file__).with_name("server.py"))
ENDLESS = LONG | {"max_tokens": 4000}


def lost(*_):
    raise RunnerError("as if the device was lost")


def test_each_request_ends_once_and_the_server_goes_on_when_the_device_is_back(monkeypatch, caplog):
    with running(FILE, is_timed=False, parallel=2, failed_steps=ANY) as server:
        streams = [Stream(server, ENDLESS) for _ in range(4)]  # two of them wait
        until(lambda: len(server.service.open) == 4 and sum(stream.began.is_set() for stream in streams) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(server.service.engine.runner, "run", lost)
            for stream in streams:
                assert [event["error"]["type"] for event in stream.finals] == ["server_error"]
                assert stream.events[-1] == "[DONE]"
            assert server.http.post(CHAT, json=about("Calder")).status_code == 500
        logged = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(logged) == server.service.engine.num_failed_steps
        assert all(record.getMessage().startswith("a step failed: ") for record in logged)
        assert text_of(server.chat(**about("Calder"))) == "The river of Calder is Vennet."


@pytest.mark.skipif(HAS_OWN_KERNELS, reason="only RPC's device is a process, which can be ended")
def test_a_server_whose_device_is_gone_ends_and_says_so(tmp_path):
    """llama.cpp ends the process in the middle of a batch: the stream gets its last event before, and ends."""
    arguments = ("serve", "-m", FILE, "--port", port := free_port(), "-c", 8192, "-fa", "off", "-t", 1)
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until_ready(process, port)
            url = f"http://127.0.0.1:{port}"
            device = httpx.get(f"{url}/props", timeout=DEADLINE).json()["device"]
            with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=DEADLINE) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(server_of(device), signal.SIGKILL)
                *_, last, done = filter(None, lines)
                assert "llama.cpp has ended the server: " in last and "RPC server crashed" in last and done == "data: [DONE]"
            _, log = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGABRT
    assert len([line for line in log.splitlines() if "RPC server crashed" in line]) == 1


def server_of(device):
    """Return the id of the process that is this device: its name or description has the port that it listens at."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = file.read_bytes().decode("utf-8", "replace").split("\0")
            if len(words) > 4 and words[1] == SERVER and words[3] in str(device):
                return int(file.parent.name)
    raise AssertionError(f"no process is {device}")
