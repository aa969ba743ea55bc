"""The command as a user runs it: a process of its own."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from slotcache.models.demo.corpus import SUGGESTED
from slotcache.server import serve
from slotcache.server.fitting import layout
from slotcache.server.serve import make_server
from slotcache.server.settings import SETTINGS, Settings
from support.on_device import needs_cpu

ROOT = Path(__file__).parents[2]
START = (
    "import sys, types; package = types.ModuleType('slotcache'); package.__path__ = [sys.argv[1]];"
    "sys.modules['slotcache'] = package; from slotcache.server.cli import main; sys.exit(main(sys.argv[2:]))"
)


def command(*arguments):
    return [sys.executable, "-c", START, str(ROOT), *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def test_serve_answers_and_ends_cleanly_on_ctrl_c(tiny):
    port = free_port()
    process = subprocess.Popen(
        command("serve", "-m", tiny, "--port", port, "-c", 1024, "-t", 1), stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 60
        while True:
            assert time.monotonic() < end and process.poll() is None
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        body = {"prompt": "Hello", "n_predict": 3, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/completion", json=body).json()
        assert answer["timings"]["predicted_n"] == 3 and answer["stop_type"] == "limit"
        settings = httpx.get(f"http://127.0.0.1:{port}/props").raise_for_status().json()["settings"]
        assert settings["ctx_size"] == 1024 and set(settings) == {setting.name for setting in SETTINGS} - {"api_key"}
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in log
    assert "tiny.gguf" in log and "bytes a token" in log and "ready on" in log


def test_a_server_that_is_told_to_end_while_it_loads_says_so_and_no_more(tiny, caplog):
    caplog.set_level(logging.INFO, "slotcache")
    server, host = make_server(Settings(model=str(tiny), port=int(free_port())))
    server.should_exit = True
    asyncio.run(serve.run(server, host, tiny))
    assert host.service is None and not host.failure
    assert "stopped before the model was loaded" in caplog.messages


@needs_cpu
def test_a_terminal_shows_no_progress_beside_the_log_lines_before_the_model_is_read(tiny, capsys, monkeypatch):
    shown = []

    def measure(path, threads, goes_on):
        shown.append((goes_on(), capsys.readouterr().err))
        server.should_exit = True

    monkeypatch.setattr(layout, "is_faster_repacked", measure)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    server, host = make_server(Settings(model=str(tiny), port=int(free_port())))
    asyncio.run(serve.run(server, host, tiny))
    assert shown == [(True, "")]


def test_the_demo_opens_the_page_over_the_bundled_documents(tmp_path):
    told, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {told}.part && mv {told}.part {told}\n')
    browser.chmod(0o755)
    variables = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "BROWSER": f"{browser} %s"}
    process = subprocess.Popen(command("demo", "--page"), env=variables, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not told.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        url = told.read_text()
        assert httpx.get(url).headers["content-type"].startswith("text/html")
        assert httpx.get(f"{url}v1/sources").json()["collections"][0]["questions"] == list(SUGGESTED)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and shown == f"the page is at {url}\n"


def test_doctor_names_devices_and_what_fits(tiny):
    result = run("doctor", "-m", tiny)
    assert result.returncode == 0
    assert "CPU" in result.stdout and "GPU offload" in result.stdout and "512 bytes a token" in result.stdout


def test_generate_writes_a_model_that_serves(tmp_path):
    path = tmp_path / "small.gguf"
    result = run("generate", "tiny", path, "--layers", "1", "--seed", "3")
    assert result.returncode == 0, result.stderr
    assert path.read_bytes()[:4] == b"GGUF"
    refused = run("generate", "tiny", path, "--width", "7")
    assert refused.returncode == 2 and refused.stderr.startswith("slotcache:")


def test_state_is_shown_without_text(tiny):
    from .conftest import running

    with running(tiny) as server:
        server.chat("A secret question.", max_tokens=8)
        lanes = server.http.get("/slots").json()
        assert [lane["id"] for lane in lanes] == [0, 1, 2, 3] and not any(lane["is_processing"] for lane in lanes)
        props = server.http.get("/props").json()
        assert props["total_slots"] == 4 and "im_start" in props["chat_template"]
        assert "secret question" not in json.dumps([lanes, props]) + server.http.get("/metrics").text
        assert server.metric("slotcache_generated_tokens_total") == 8
        assert server.metric("slotcache_ttft_seconds_count") == 1
