"""Agents that are started with settings of their own: what each reads there, and a server that is started for it."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from slotcache.server.launch import CLIENTS, LaunchError, ServedModel, served_model, write

from server.conftest import DEADLINE, running
from server.test_cli import command, free_port

CONTEXT = 32768
MODEL = ServedModel("http://127.0.0.1:9", "org/model", 40_000, "secret")
AGENT = f"""#!{sys.executable}
import json, sys
from urllib.request import Request, urlopen

settings = json.load(open(sys.argv[sys.argv.index("--settings") + 1]))["env"]
body = {{"model": settings["ANTHROPIC_MODEL"], "max_tokens": 4, "messages": [{{"role": "user", "content": "word " * 100}}]}}
headers = {{"Authorization": "Bearer " + settings["ANTHROPIC_AUTH_TOKEN"], "Content-Type": "application/json"}}
for _ in range(2):
    asked = Request(settings["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(), headers)
    usage = json.load(urlopen(asked))["usage"]
print(json.dumps({{"cached": usage["cache_read_input_tokens"], "arguments": sys.argv[3:], "settings": settings}}))
sys.exit(7)
"""
"""A client that reads its settings as Claude Code does, asks the same twice, and tells what was cached."""


@pytest.fixture
def home(tmp_path):
    """Variables for a command: a home of its own, and an agent on the path."""
    agent = tmp_path / "bin/claude"
    agent.parent.mkdir()
    agent.write_text(AGENT)
    agent.chmod(0o755)
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": f"{agent.parent}{os.pathsep}{os.environ['PATH']}"}


def launch(*arguments, **variables):
    """What the command prints, the errors, and its exit code."""
    ran = subprocess.run(
        command("launch", *arguments), env=os.environ | variables, capture_output=True, text=True, timeout=DEADLINE
    )
    return ran.stdout, ran.stderr, ran.returncode


def setup(client):
    return CLIENTS[client][0](MODEL, Path("/at"))


def only_file(client):
    (text,) = setup(client).files.values()
    return json.loads(text)


def test_claude_is_told_all_in_its_settings():
    assert setup("claude").arguments == ("--settings", "/at/settings.json")
    told = only_file("claude")["env"]
    assert told["ANTHROPIC_BASE_URL"] == MODEL.url and told["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert told["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and int(told["API_TIMEOUT_MS"]) >= 600_000
    assert told["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "40000"
    assert {value for name, value in told.items() if name.endswith("_MODEL")} == {"org/model"}
    assert all(isinstance(value, str) for value in told.values())


def test_codex_has_a_provider_whose_changing_parts_are_arguments():
    made = setup("codex")
    settings = tomllib.loads(made.files["config.toml"])
    for overridden in made.arguments[1::2]:
        (name, value), at = overridden.split("=", 1), settings
        *path, last = name.split(".")
        for part in path:
            at = at[part]
        at[last] = tomllib.loads(f"value = {value}")["value"]
    provider = settings["model_providers"][settings["model_provider"]]
    assert set(made.arguments[::2]) == {"-c"} and made.variables["CODEX_HOME"] == "/at"
    assert (settings["model"], settings["model_context_window"]) == ("org/model", 40_000)
    assert provider["base_url"] == MODEL.v1 and provider["wire_api"] == "responses"
    assert made.variables[provider["env_key"]] == "secret"


def test_opencode_has_a_provider_and_opts_in():
    told = only_file("opencode")
    provider = told["provider"]["slotcache"]
    assert told["model"] == told["small_model"] == "slotcache/org/model"
    assert provider["options"] == {"baseURL": MODEL.v1, "apiKey": "secret", "timeout": False, "setCacheKey": True}
    assert provider["models"]["org/model"]["limit"]["context"] == 40_000


def test_qwen_crush_and_cline_have_a_provider():
    (entry,) = only_file("qwen")["modelProviders"]["openai"]
    assert (entry["id"], entry["baseUrl"], entry["generationConfig"]["contextWindowSize"]) == ("org/model", MODEL.v1, 40_000)
    assert setup("qwen").variables[entry["envKey"]] == setup("qwen").variables["OPENAI_API_KEY"] == "secret"
    provider = only_file("crush")["providers"]["slotcache"]
    assert (provider["base_url"], provider["api_key"], provider["models"][0]["context_window"]) == (
        MODEL.v1,
        "secret",
        40_000,
    )
    cline = only_file("cline")
    told = cline["providers"][cline["lastUsedProvider"]]["settings"]
    assert (told["baseUrl"], told["model"], told["apiKey"]) == (MODEL.v1, "org/model", "secret")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_folder_of_another_s_files_is_left_alone(tmp_path, client):
    made = CLIENTS[client][0](MODEL, tmp_path)
    (name, text), *_ = made.files.items()
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(LaunchError, match="was not written by slotcache launch"):
        write(tmp_path, made)
    assert file.read_text() == "mine"
    file.unlink()
    write(tmp_path, made)
    assert file.read_text() == text and file.stat().st_mode & 0o077 == 0
    file.write_text("theirs")
    write(tmp_path, made)
    assert file.read_text() == ("theirs" if name in made.kept else text)


def test_a_client_of_a_server_that_runs(tiny, home):
    with running(tiny, ctx_size=CONTEXT, cache_prompt=True, api_key="k", alias="served") as server:
        port = server.http.base_url.port
        stdout, stderr, code = launch("claude", "--port", port, "--api-key", "k", "--", "--port", "8", **home)
        told = json.loads(stdout)
        assert code == 7 and told["cached"] > 0 and told["arguments"] == ["--port", "8"]
        assert told["settings"]["ANTHROPIC_MODEL"] == "served" and f"{CONTEXT:,} tokens of context" in stderr
        assert "name its key with --api-key" in launch("claude", "--port", port, **home)[1]
        assert served_model(server.url, "k")[1]


def test_a_server_is_started_for_it_and_ends_with_it(tiny, home):
    port = free_port()
    stdout, stderr, code = launch("claude", "-m", tiny, "--port", port, "-t", 1, "-fa", "off", **home)
    assert code == 7, stderr
    assert json.loads(stdout)["cached"] > 0, "it runs with --cache-prompt"
    assert "of KV" in stderr and f"{CONTEXT:,} tokens of context" in stderr
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_printing_writes_and_starts_nothing(tiny, home):
    port = free_port()
    stdout, _, code = launch("opencode", "--print", "-m", tiny, "--port", port, **home)
    assert code == 0 and f"http://127.0.0.1:{port}/v1" in stdout and "no server answers" in stdout
    assert stdout.splitlines()[-1].endswith("opencode") and "OPENCODE_CONFIG=" in stdout
    assert not Path(home["XDG_CONFIG_HOME"]).exists()


def test_a_context_that_is_too_small_is_refused_with_what_would_do(tiny, home):
    with running(tiny, ctx_size=8192) as server:
        _, stderr, code = launch("claude", "--port", server.http.base_url.port, **home)
        assert code == 2 and "has 8,192 here" in stderr and "-c 32768" in stderr
    _, stderr, code = launch("claude", "-m", tiny, "-c", 8192, "--port", free_port(), **home)
    assert code == 2 and "has 8,192 here: -c 32768 takes " in stderr and "MiB of KV" in stderr


def test_what_is_unknown_or_not_installed_is_named(home):
    assert "expected one of claude, codex" in launch("klaus", **home)[1]
    assert "npm install -g cline" in launch("cline", PATH="", XDG_CONFIG_HOME=home["XDG_CONFIG_HOME"])[1]


def test_a_server_that_does_not_come_up_says_why(tmp_path, tiny, home):
    port = free_port()
    arguments = ("-m", tiny, "--port", port, "--cache-dir", tmp_path / "file", "-t", 1)
    (tmp_path / "file").write_text("no folder")
    _, stderr, code = launch("claude", *arguments, **home)
    assert code == 2 and "did not come up" in stderr and str(tmp_path / "file") in stderr
