"""llama.cpp ends the process: by a failed assertion of its own, or since a device is gone."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from slotcache.models.demo import FILE

from server.conftest import DEADLINE, free_port
from server.engine.test_engine import CHAT, LONG
from server.test_cli import wait_until_ready

DIES = """
import sys
from threading import Event, Thread
from slotcache.models import llama
from slotcache.models.runner import Runner
from slotcache.server.cli import main
from slotcache.server.engine.engine import Engine

decode, start, engines, steps = Runner._decode, Engine.start, [], iter(range(30))

def abort():
    llama.library.ggml_abort(b"device.c", 7, b"the device is gone")

def dies(runner, **given):
    if next(steps, None) is None:
        {how}
        abort()
    return decode(runner, **given)

def begin(engine, *given):
    engines.append(engine)
    start(engine, *given)

Runner._decode, Engine.start = dies, begin
sys.exit(main(sys.argv[1:]))
"""
SEVERAL = "any(Thread(target=abort, daemon=True).start() for _ in range(4))"
HANGS = "llama.MOST_WORDS = 1.0; engines[0].inbox.put(Event().wait)"
WHY = "llama.cpp has ended the server: device.c:7: the device is gone"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("", id="in a step"),
        pytest.param(SEVERAL, id="in several threads of a step"),
        pytest.param(HANGS, id="what waits for the step would hang"),
    ],
)
def test_clients_are_informed_before_llama_cpp_ends_the_process(how):
    arguments = ("serve", "-m", FILE, "--port", port := free_port(), "-c", 8192, "--no-idle-prefill")
    command = [sys.executable, "-c", DIES.format(how=how), *map(str, arguments)]
    body, url = {**LONG, "max_tokens": 4000}, f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, ThreadPoolExecutor() as pool:
        try:
            wait_until_ready(process, port)
            whole = pool.submit(httpx.post, url + CHAT, json=body | {"stream": False}, timeout=DEADLINE)
            with httpx.stream("POST", url + CHAT, json=body, timeout=DEADLINE) as answer:
                *_, last, done = filter(None, answer.iter_lines())
            assert WHY in last and done == "data: [DONE]"
            assert whole.result().status_code == 500 and whole.result().json()["error"]["message"] == WHY
            _, log = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGABRT
    assert [line for line in log.splitlines() if "the device is gone" in line] == ["device.c:7: the device is gone"]
