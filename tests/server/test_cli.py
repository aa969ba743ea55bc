"""The command as a user runs it: a process of its own."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from slotcache.front.orders import FrontMetrics
from slotcache.models import llama
from slotcache.models.demo.corpus import SUGGESTED
from slotcache.models.hardware import used_features
from slotcache.models.model_files import packaged_file
from slotcache.server import load, serve
from slotcache.server.cli import main
from slotcache.server.config.settings import SETTINGS, VERSION, Settings
from slotcache.server.engine import fit
from slotcache.server.serve import make_server
from support.on_device import needs_cpu
from support.processes import children, ended, watched

from server.conftest import DEADLINE, free_port, running, until

ROOT = Path(__file__).parents[2]
START = (
    "import sys, types; package = types.ModuleType('slotcache'); package.__path__ = [sys.argv[1]];"
    "sys.modules['slotcache'] = package; from slotcache.server.cli import main; sys.exit(main(sys.argv[2:]))"
)


def command(*arguments):
    return [sys.executable, "-c", START, str(ROOT), *map(str, arguments)]


def run(*arguments, **variables):
    variables = os.environ | variables
    return subprocess.run(command(*arguments), env=variables, capture_output=True, text=True, timeout=DEADLINE)


@pytest.fixture
def bare(tmp_path):
    """Variables of an environment in which gguf is not installed, for a process and for those that it starts."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "gguf.py").write_text("raise ModuleNotFoundError(\"No module named 'gguf'\", name='gguf')\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def wait_until_ready(process, port):
    end = time.monotonic() + DEADLINE
    while True:
        assert time.monotonic() < end and process.poll() is None
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=DEADLINE).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)


@pytest.mark.parametrize("content", [None, b"not a model at all", b"GGUF\x03\x00\x00\x00garbage"])
def test_a_model_that_cannot_be_served_is_one_clear_line_and_code_2(tmp_path, content):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    result = run("serve", "-m", path, "--port", free_port())
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("slotcache:")]
    assert len(lines) == 1 and str(path) in lines[0]
    assert "Traceback" not in result.stderr


def test_serve_answers_without_gguf_and_ends_cleanly_on_ctrl_c(tiny, bare):
    port = free_port()
    serving = command("serve", "-m", tiny, "--port", port, "-c", 1024, "-t", 1)
    process = subprocess.Popen(serving, env=os.environ | bare, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process, port)
        body = {"prompt": "Hello", "n_predict": 3, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/completion", json=body, timeout=DEADLINE).json()
        assert answer["timings"]["predicted_n"] == 3 and answer["stop_type"] == "limit"
        settings = httpx.get(f"http://127.0.0.1:{port}/props", timeout=DEADLINE).raise_for_status().json()["settings"]
        assert settings["ctx_size"] == 1024 and set(settings) == {setting.name for setting in SETTINGS} - {"api_key"}
        for _ in range(2):  # one who cannot wait presses ctrl-C again
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, log = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in log
    assert "tiny.gguf" in log and "bytes a token" in log and "ready on" in log


@needs_cpu
def test_a_card_that_is_not_used_is_reported_once_at_the_start_by_doctor_and_in_props(tiny, tmp_path):
    for path in ("dev/dri/renderD128", "sys/class/drm/renderD128/device/device", "usr/lib/libvulkan.so.1"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "sys/class/drm/renderD128/device/driver").symlink_to("../../bus/pci/drivers/amdgpu")
    card, remedy = "AMD card (driver amdgpu) is not used: ", " is a build for the CPU; make serve LLAMA=vulkan"
    root = {"SLOTCACHE_ROOT": str(tmp_path), "SLOTCACHE_LLAMA": ""}
    port = free_port()
    serving = command("serve", "-m", tiny, "--port", port, "-c", 512, "-t", 1)
    process = subprocess.Popen(serving, env=os.environ | root, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process, port)
        props = httpx.get(f"http://127.0.0.1:{port}/props", timeout=DEADLINE).raise_for_status().json()
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    unused = props["device"]["unused"]
    assert unused.startswith(card) and remedy in unused and log.count(unused) == 1
    assert f"GPU offload: no. {unused}" in run("doctor", **root).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_a_crash_inside_a_library_reports_where_each_thread_was(tiny):
    port = free_port()
    serving = command("serve", "-m", tiny, "--port", port, "-c", 512, "-t", 1)
    process = subprocess.Popen(serving, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process, port)
        process.send_signal(signal.SIGSEGV)
        _, log = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in log and "engine.py" in log


def test_a_server_that_is_asked_to_end_while_it_loads_says_so_and_no_more(tiny, caplog):
    caplog.set_level(logging.INFO, "slotcache")
    server, host = make_server(Settings(model=str(tiny), port=int(free_port())))
    server.should_exit = True
    asyncio.run(serve.run(server, host, tiny))
    assert host.service is None and not host.failure
    assert "stopped before the model was loaded" in caplog.messages


def test_health_reports_what_a_start_waits_for(tiny, monkeypatch, caplog):
    port, shown = int(free_port()), []
    caplog.set_level(logging.DEBUG, "slotcache.requests")

    def health():
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=DEADLINE).json()

    def listens():
        with suppress(httpx.ConnectError):
            shown.append(health()["error"])
        return shown

    def learn(context, goes_on):
        assert goes_on("timing Vulkan0, 2 of 9: a chunk")
        until(listens)  # the model is loaded while the port opens

    monkeypatch.setattr(load, "learn_costs", learn)
    with running(tiny, is_timed=True, port=port):
        assert health() == {"status": "ok"}
    assert shown[0]["message"] == "the model is loading: timing Vulkan0, 2 of 9: a chunk"
    assert shown[0]["code"] == "loading_model"
    looks = [record for record in caplog.records if record.name == "slotcache.requests"]
    assert {(record.fields["status"], record.levelno) for record in looks} == {(503, logging.DEBUG), (200, logging.DEBUG)}


def test_a_server_that_cannot_start_what_it_has_loaded_ends_with_the_reason(tiny, monkeypatch):
    """Else it would say for ever that the model is loading."""

    def fail(*given):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(serve, "start", fail)
    server, host = make_server(Settings(model=str(tiny), port=int(free_port()), ctx_size=512))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        asyncio.run(asyncio.wait_for(serve.run(server, host, tiny), DEADLINE))
    assert server.should_exit


@needs_cpu
def test_a_terminal_shows_no_progress_beside_the_log_lines_before_the_model_is_read(tiny, capsys, monkeypatch):
    shown = []

    def measure(path, threads, goes_on):
        shown.append((goes_on(), capsys.readouterr().err))
        server.should_exit = True

    monkeypatch.setattr(fit, "is_faster_repacked", measure)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    server, host = make_server(Settings(model=str(tiny), port=int(free_port())))
    asyncio.run(serve.run(server, host, tiny))
    assert shown == [(True, "")]


def test_the_demo_opens_the_page_over_the_bundled_documents_without_gguf(tmp_path, bare):
    reported, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {reported}.part && mv {reported}.part {reported}\n')
    browser.chmod(0o755)
    variables = os.environ | bare | {"XDG_CACHE_HOME": str(tmp_path), "BROWSER": f"{browser} %s"}
    process = subprocess.Popen(command("demo", "--page"), env=variables, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + DEADLINE
        while not reported.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        url = reported.read_text()
        assert httpx.get(url, timeout=DEADLINE).headers["content-type"].startswith("text/html")
        assert httpx.get(f"{url}v1/sources", timeout=DEADLINE).json()["collections"][0]["questions"] == list(SUGGESTED)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0 and shown == f"the page is at {url}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)])
def test_a_signal_ends_a_server_once_its_index_is_closed(tiny, tmp_path, number, code):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "port.md").write_text("# Port\n\nThe port opens at nine.\n")
    (index := tmp_path / "index").mkdir(mode=0o700)
    arguments = ("-m", tiny, "--port", port := free_port(), "-c", 512, "-t", 1, "--embedding-model", "none")
    serving = command("serve", *arguments, "--docs", tmp_path / "docs", "--docs-db", index)
    process = subprocess.Popen(serving, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process, port)
        assert [*index.glob("*.db-wal")], "the journal of an index that is open"
        process.send_signal(number)
        _, log = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == code and "Traceback" not in log
    assert [*index.glob("*.db")] and not [*index.glob("*.db-wal")]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends what a killed process has started")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_the_server_of_a_demo_ends_with_it(tmp_path, number):
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command("demo"), env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline(), "the first answer"
        (server,) = children(process.pid)
        with watched(server) as (watch,):
            process.send_signal(number)
            _, said = process.communicate(timeout=DEADLINE)
            assert ended(watch)
    finally:
        process.kill()
    assert process.returncode == (130 if number != signal.SIGKILL else -number)
    assert "Traceback" not in said
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("slotcache-*.log"))


def test_doctor_names_devices_and_what_fits_without_gguf(tiny, bare):
    result = run("doctor", "-m", tiny, **bare)
    assert result.returncode == 0
    assert "CPU" in result.stdout and "GPU offload" in result.stdout and "512 bytes a token" in result.stdout
    assert result.stdout.startswith(f"{llama.LIBRARY}: llama.cpp ") and str(llama.LIBRARY.path) in result.stdout
    assert f"  made for: {', '.join(used_features())}\n" in result.stdout and "  tried: " in result.stdout


def test_doctor_finds_the_model_as_serve_does(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(serve, "fetch_hub", lambda *asked: tiny if asked == ("user/repo", True, "") else None)
    packaged_file("smollm2").parent.mkdir(parents=True)
    packaged_file("smollm2").write_bytes(tiny.read_bytes())
    for flags, name in ((["-hf", "user/repo", "--offline"], tiny.name), (["-m", "smollm2"], "smollm2.gguf")):
        assert main(["doctor", *flags]) == 0 and f"\n{name}: " in capsys.readouterr().out
    assert main(["doctor", "-m", str(tiny), "-m", "smollm2"]) == 2
    assert "only `slotcache serve` can serve several models" in capsys.readouterr().err


def test_doctor_says_which_template_a_server_would_use(tiny, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}é")
    printed = run("doctor", "-m", tiny, "--chat-template-file", file).stdout
    assert f"chat template of --chat-template-file: 26 characters, sha256 {sha256(file.read_bytes()).hexdigest()}" in printed
    file.write_text("{% for %}")
    refused = run("doctor", "-m", tiny, "--chat-template-file", file)
    assert refused.returncode == 2 and "line 1 of the chat template" in refused.stderr
    refused = run("doctor", "-m", tiny, "--chat-template", "llama33")
    assert refused.returncode == 2 and "--chat-template llama33: expected Jinja or one of" in refused.stderr


def test_generate_writes_a_model_that_serves(tmp_path):
    path = tmp_path / "small.gguf"
    result = run("generate", "tiny", path, "--layers", "1", "--seed", "3")
    assert result.returncode == 0, result.stderr
    assert path.read_bytes()[:4] == b"GGUF"
    refused = run("generate", "tiny", path, "--width", "7")
    assert refused.returncode == 2 and refused.stderr.startswith("slotcache:")


def test_a_package_that_only_generate_needs_is_named(tmp_path, bare):
    path = tmp_path / "small.gguf"
    refused = run("generate", "tiny", path, **bare)
    assert refused.returncode == 2 and not path.exists()
    assert refused.stderr == "slotcache: gguf is missing: pip install 'slotcache[bench]'\n"
    ordering = run("order", **bare)
    assert ordering.returncode == 2 and ordering.stderr.startswith("slotcache: --upstream is missing")
    assert run("bench", "--help", **bare).returncode == 0
    refused = run("bench", "burst", "--queries", "1", **bare)
    assert refused.returncode == 2
    assert "the bench model needs gguf: pip install 'slotcache[bench]'" in refused.stderr


def test_state_is_shown_without_text(tiny):
    from .conftest import running

    with running(tiny) as server:
        server.chat("A secret question.", max_tokens=8)
        slots = server.http.get("/slots").json()
        assert [slot["id"] for slot in slots] == [0, 1, 2, 3] and not any(slot["is_processing"] for slot in slots)
        props = server.http.get("/props").json()
        assert props["total_slots"] == 4 and "im_start" in props["chat_template"]
        assert "secret question" not in json.dumps([slots, props]) + server.http.get("/metrics").text
        assert server.metric("slotcache_generated_tokens_total") == 8
        assert server.metric("slotcache_ttft_seconds_count") == 1


def test_every_place_reports_the_one_version(server, capsys):
    """The command, a server's routes and metrics, the front's, and the newest section of the changes."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    shown = {path: server.http.get(path).json() for path in ("/props", "/openapi.json", "/api/version")}
    label = re.compile(r'^slotcache_build_info\{.*version="([^"]*)"\} 1\.0$', re.M)
    printed = {
        "slotcache --version": capsys.readouterr().out.removeprefix("slotcache ").strip(),
        "/props": shown["/props"]["build_info"].rpartition("-slotcache-")[2],
        "/openapi.json": shown["/openapi.json"]["info"]["version"],
        "/api/version": shown["/api/version"]["slotcache"],
        "/metrics": "".join(label.findall(server.http.get("/metrics").text)),
        "/metrics of the front": "".join(label.findall(FrontMetrics(lambda: 0).exposition().decode())),
        "CHANGELOG.md": re.findall(r"^## (\d\S*) - ", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[0],
    }
    assert printed == dict.fromkeys(printed, VERSION)


def test_a_build_reads_the_version_where_the_command_does():
    """An environment that was made for an older checkout has older metadata: nothing asks for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"] == {"version": {"attr": f"{Settings.__module__}.VERSION"}}
