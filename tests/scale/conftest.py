"""Two replicas of the embedded model on Ray Serve. `make scale-test` installs Ray; without it, these tests are skipped."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from front.conftest import free_port

ROOT = Path(__file__).parents[2]
START, STOP = 120.0, 60.0  # s
REPLICA = "x-slotcache-replica"
# `serve run` with a Ray of its own, whatever else runs on this machine, and without the ten processes of a dashboard.
ALONE = "import ray; ray.init('local', include_dashboard=False); from ray.serve.scripts import cli; cli()"
VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
KEY = "the-key"
PAGE = "https://page.example"
USUAL = {"max_tokens": 4, "temperature": 0, "cache_prompt": True, "ignore_eos": True}


@dataclass
class Replicas:
    """Replicas that are up. log: what Ray and they say. process: of `serve run`."""

    url: str
    http: httpx.Client
    log: Path
    process: subprocess.Popen[bytes]

    def chat(self, content="What is it?", **fields):
        """A chat completion, greedy and short unless told otherwise; the response."""
        messages = fields.pop("messages", None) or [{"role": "user", "content": content}]
        return self.http.post("/v1/chat/completions", json=USUAL | {"messages": messages} | fields)

    def engines(self) -> dict[str, int]:
        """The process of each replica, by its name: the file that it logs to has it."""
        return {name: pid for pid in below(self.process.pid) for name in logged_by(pid)}

    def names(self) -> set[str]:
        """The replicas that serve."""
        try:
            answer = self.http.get("/v1/replicas")
        except httpx.HTTPError:
            return set()
        return {one["id"] for one in answer.json()["data"]} if answer.status_code == 200 else set()

    def kill(self, name: str) -> None:
        os.kill(self.engines()[name], signal.SIGKILL)

    def until(self, condition, deadline=START):
        end = time.monotonic() + deadline
        while not (found := condition()):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.1)
        return found


def below(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    found, ahead = set(), {pid}
    while ahead:
        found |= ahead
        ahead = {child for child, parent in parents.items() if parent in ahead} - found
    return found


def logged_by(pid: int) -> set[str]:
    """The names of the engines that a process is: none or one."""
    names = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = Path(os.readlink(link)).name
        except OSError:
            continue
        if target.startswith("replica_slotcache_Engine_"):
            names.add(target.removeprefix("replica_slotcache_Engine_").removesuffix(".log"))
    return names


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})


@contextmanager
def running(folder: Path, **settings):
    """Replicas with some settings changed."""
    (folder / "path").mkdir()
    (folder / "path" / "slotcache").symlink_to(ROOT)  # Ray's workers import the package, too
    port, log = free_port(), folder / "serve.log"
    usual = {"ctx_size": 4096, "cache_ram": 256, "flash_attn": "off", "idle_prefill": False}
    app = {"name": "slotcache", "route_prefix": "/", "import_path": "slotcache.front.ray_app:app", "args": usual | settings}
    file = folder / "serve.json"  # JSON is YAML
    file.write_text(json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}))
    environment = os.environ | VARIABLES | {"SLOTCACHE_API_KEY": KEY, "PYTHONPATH": str(folder / "path")}
    with log.open("wb") as said, client(f"http://127.0.0.1:{port}") as http:
        process = subprocess.Popen(
            [sys.executable, "-c", ALONE, "run", str(file)], env=environment, stdout=said, stderr=said
        )
        up = Replicas(str(http.base_url), http, log, process)

        try:
            up.until(lambda: len(up.names()) == settings["replicas"])
            yield up
        finally:
            started = below(process.pid)
            process.terminate()
            process.wait(STOP)
            end = time.monotonic() + STOP
            while left := [pid for pid in started if Path(f"/proc/{pid}/cmdline").exists()]:
                assert time.monotonic() < end, f"these processes are left: {left}"
                time.sleep(0.1)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    with running(folder, replicas=2, cache_dir=str(folder / "cache"), cors_origins=PAGE) as up:
        yield up
