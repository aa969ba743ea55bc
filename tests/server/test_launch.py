"""Agents that are started with settings of their own: what each reads there, and a server that is started for it."""

import json
import os
import pwd
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from slotcache.server.launch import (
    CLIENTS,
    LaunchError,
    ServedModel,
    _with_model,
    make_folder,
    served_model,
    write,
)
from slotcache.slots.store.private_folder import FolderError
from support.processes import children, ended, watched

from server.conftest import DEADLINE, free_port, running
from server.test_cli import command

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


def test_claude_finds_all_in_its_settings():
    assert setup("claude").arguments == ("--settings", "/at/settings.json")
    written = only_file("claude")["env"]
    assert written["ANTHROPIC_BASE_URL"] == MODEL.url and written["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert written["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and int(written["API_TIMEOUT_MS"]) >= 600_000
    assert written["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "40000" and written["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert {value for name, value in written.items() if name.endswith("_MODEL")} == {"org/model"}
    assert all(isinstance(value, str) for value in written.values())


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
    assert provider["base_url"] == MODEL.v1 and provider["wire_api"] == "responses" and provider["name"] == "OpenAI"
    assert made.variables[provider["env_key"]] == "secret"


def test_opencode_has_a_provider_and_opts_in():
    written = only_file("opencode")
    provider = written["provider"]["slotcache"]
    assert written["model"] == written["small_model"] == "slotcache/org/model"
    assert provider["options"] == {"baseURL": MODEL.v1, "apiKey": "secret", "timeout": False, "setCacheKey": True}
    assert provider["models"]["org/model"]["limit"]["context"] == 40_000


def test_qwen_crush_and_cline_have_a_provider():
    (entry,) = only_file("qwen")["modelProviders"]["openai"]
    assert (entry["id"], entry["baseUrl"], entry["generationConfig"]["contextWindowSize"]) == ("org/model", MODEL.v1, 40_000)
    assert setup("qwen").variables[entry["envKey"]] == setup("qwen").variables["OPENAI_API_KEY"] == "secret"
    provider = only_file("crush")["providers"]["slotcache"]
    assert (provider["base_url"], provider["models"][0]["context_window"]) == (MODEL.v1, 40_000)
    assert setup("crush").variables[provider["api_key"].removeprefix("$")] == "secret"
    cline = only_file("cline")
    written = cline["providers"][cline["lastUsedProvider"]]["settings"]
    assert (written["baseUrl"], written["model"], written["apiKey"]) == (MODEL.v1, "org/model", "secret")


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


# ---- Names and keys -----------------------------------------------------------------------------------------------------


def in_variables(text, variables):
    """As Qwen Code and Crush read a text of their settings: $NAME and ${NAME} are replaced, once."""
    return re.sub(r"\$(?:(\w+)|\{([^}]+)\})", lambda found: variables.get(found[1] or found[2], found[0]), text)


def of_claude(made):
    written = json.loads(made.files["settings.json"])["env"]
    return written["ANTHROPIC_MODEL"], written["ANTHROPIC_AUTH_TOKEN"]


def of_codex(made):
    tomllib.loads(made.files["config.toml"])
    written = {}
    for overridden in made.arguments[1::2]:
        name, value = overridden.split("=", 1)
        written[name] = tomllib.loads(f"value = {value}")["value"]
    return written["model"], made.variables["SLOTCACHE_API_KEY"]


def of_opencode(made):
    text = re.sub(r"\{env:([^}]+)\}", lambda found: os.environ.get(found[1], ""), made.files["opencode.json"])
    written = json.loads(re.sub(r"\{file:([^}]+)\}", "a file", text))
    provider = written["provider"]["slotcache"]
    (name,) = provider["models"]
    assert written["model"] == f"slotcache/{name}"
    return name, provider["options"]["apiKey"]


def of_qwen(made):
    written, variables = json.loads(made.files["settings.json"]), os.environ | made.variables
    (entry,) = written["modelProviders"]["openai"]
    assert in_variables(written["model"]["name"], variables) == in_variables(entry["id"], variables)
    return in_variables(entry["id"], variables), variables[entry["envKey"]]


def of_crush(made):
    provider = json.loads(made.files["crush.json"])["providers"]["slotcache"]
    return provider["models"][0]["id"], in_variables(provider["api_key"], os.environ | made.variables)


def of_cline(made):
    written = json.loads(made.files["data/settings/providers.json"])["providers"]["openai-compatible"]["settings"]
    return written["model"], written["apiKey"]


READERS = dict(zip(CLIENTS, (of_claude, of_codex, of_opencode, of_qwen, of_crush, of_cline), strict=True))
HARD = ('"', "\\", "\n", "\r\t", "\x7f", "\x01", "\x85", "\u2028", "\ufeff", "\U0001f600", "\U0010ffff", "'", "#", "=", "]")
HARD += ("$HOME", "${HOME}", "$", "$(id)", "{env:HOME}", "{file:/etc/passwd}", "\\{env:HOME}", "{", "%", "`id`", " ", "-c")
TEXTS = st.lists(
    st.one_of(st.sampled_from(HARD), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
)
TEXTS = TEXTS.map("".join).filter(bool)


@given(TEXTS, TEXTS)
@example("org/\U0001f600", "\U0001f511")
def test_each_client_reads_the_name_and_the_key_that_were_written(name, key):
    model = ServedModel("http://127.0.0.1:9", name, 40_000, key)
    for client, (make, _) in CLIENTS.items():
        made = make(model, Path("/at"))
        for text in made.files.values():
            assert text.encode().decode() == text
        assert READERS[client](made) == (name, key), client


@pytest.mark.parametrize("text", ["\ud83d", "a\0b"])
def test_what_is_no_text_is_refused_with_what_would_do(tmp_path, text):
    model = ServedModel("http://127.0.0.1:9", text, 40_000)
    for wrong in (model, replace(model, name="m", key=text)):
        with pytest.raises(LaunchError, match=r"is not valid text, '.*': choose another with --alias or --api-key"):
            _with_model(wrong, "", CLIENTS["claude"][0], tmp_path / "claude", ["claude"], prints=True)


def test_what_is_printed_is_a_command_of_the_shell(tiny, home):
    name = "a'b $HOME \U0001f600 \\"
    stdout, stderr, code = launch("qwen", "--print", "-m", tiny, "--alias", name, "--port", free_port(), **home)
    assert code == 0, stderr
    shown = stdout.splitlines()[-1].removesuffix("qwen") + f"{shlex.quote(sys.executable)} -c 'import os; print(os.environ)'"
    assert repr(name) in subprocess.run(["sh", "-c", shown], capture_output=True, text=True).stdout


# ---- Whose the files are ------------------------------------------------------------------------------------------------


def modes(folder):
    return {path.relative_to(folder).as_posix(): path.lstat().st_mode & 0o777 for path in folder.rglob("*")}


@pytest.mark.parametrize("client", CLIENTS)
def test_files_and_folders_are_the_owner_s_alone_whatever_they_were_before(tmp_path, client):
    folder = tmp_path / "slotcache/launch" / client
    made = CLIENTS[client][0](MODEL, folder)
    (name, text), *_ = made.files.items()
    folder.mkdir(parents=True, mode=0o755)
    (folder / "README").write_text("written before")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("written before")
    others = os.open(folder / name, os.O_RDONLY)
    make_folder(folder)
    write(folder, made)
    assert folder.stat().st_mode & 0o777 == 0o700
    if name not in made.kept:
        assert (folder / name).read_text() == text and modes(folder)[name] == 0o600
    assert os.read(others, 100) == b"written before", "who had it open does not see the key"
    os.close(others)
    assert not list(folder.rglob("*.tmp"))


def test_a_folder_that_others_can_write_to_is_refused(tiny, home):
    config = Path(home["XDG_CONFIG_HOME"])
    arguments = ("claude", "-m", tiny, "--port", free_port())
    for part in ("slotcache/launch/claude", "slotcache/launch", "slotcache", "."):
        (config / "slotcache/launch/claude").mkdir(parents=True, exist_ok=True)
        (config / part).chmod(0o777)
        _, stderr, code = launch(*arguments, **home)
        assert code == 2 and stderr.splitlines()[-1].startswith(f"slotcache: settings in {config / part}: other users may")
        assert not [path for path in config.rglob("*") if path.is_file()]
        (config / part).chmod(0o755)
    home["XDG_CACHE_HOME"] = str(config.parent / "cache")
    shared = config.parent / "home"
    shared.mkdir()
    shared.chmod(0o777)
    _, stderr, code = launch(*arguments, **home | {"XDG_CONFIG_HOME": "", "HOME": str(shared)})
    assert code == 2 and f"HOME {shared}: other users may write to it (mode 777)" in stderr and not list(shared.iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can make a stranger's folder")
def test_a_stranger_s_folder_and_file_are_refused(tmp_path):
    folder = tmp_path / "slotcache/launch/claude"
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder.parent, 12345, -1)
    with pytest.raises(FolderError, match="belongs to user 12345"):
        make_folder(folder)
    os.chown(folder.parent, 0, -1)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, -1)
    (folder / "README").symlink_to(theirs / "file")
    with pytest.raises(LaunchError, match=f"is a link: {theirs} belongs to user 12345"):
        write(folder, CLIENTS["claude"][0](MODEL, folder))
    assert not list(theirs.iterdir())


def test_a_link_to_the_user_s_own_dotfiles_stays_one(tmp_path):
    """As stow makes them: of a folder, or of a file."""
    dotfiles, folder = tmp_path / "dotfiles", tmp_path / "config/slotcache/launch/claude"
    (dotfiles / "claude").mkdir(parents=True)
    folder.parent.mkdir(parents=True)
    folder.symlink_to("../../../dotfiles/claude")
    made = CLIENTS["claude"][0](MODEL, folder)
    make_folder(folder)
    write(folder, made)
    assert folder.is_symlink() and modes(dotfiles) == {
        "claude": 0o700,
        "claude/README": 0o600,
        "claude/settings.json": 0o600,
    }
    (dotfiles / "other.json").write_text("old")
    (folder / "settings.json").unlink()
    (folder / "settings.json").symlink_to("../other.json")
    write(folder, made)
    assert (folder / "settings.json").is_symlink() and modes(dotfiles)["other.json"] == 0o600
    assert (dotfiles / "other.json").read_text() == made.files["settings.json"]


@pytest.mark.parametrize("what", ["a shared folder", "a folder", "a missing folder", "a device"])
def test_a_link_elsewhere_is_refused_and_nothing_is_written(tmp_path, what):
    folder, shared = tmp_path / "slotcache/launch/claude", tmp_path / "shared"
    make_folder(folder)
    (shared / "inner").mkdir(parents=True)
    target, why = {
        "a shared folder": (shared / "inner/file", f"other users may write to {shared}"),
        "a folder": (tmp_path, "it leads to no file"),
        "a missing folder": (tmp_path / "none/file", f"{tmp_path / 'none'} does not exist"),
        "a device": ("/dev/null", "it leads to no file"),
    }[what]
    shared.chmod(0o777)
    (folder / "README").write_text("ours")
    (folder / "settings.json").symlink_to(target)
    with pytest.raises(LaunchError, match=re.escape(f"settings.json is a link: {why}: remove the link")):
        write(folder, CLIENTS["claude"][0](MODEL, folder))
    assert (folder / "settings.json").is_symlink() and not list((shared / "inner").iterdir())


def test_folders_that_are_no_paths_are_ignored(tiny, home, tmp_path):
    """The specification of XDG asks for it; an empty HOME is none."""
    for variables in (
        {"XDG_CONFIG_HOME": "relative"},
        {"XDG_CONFIG_HOME": "", "HOME": ""},
        {"XDG_CONFIG_HOME": "", "HOME": "x"},
    ):
        ran = subprocess.run(
            command("launch", "claude", "--print", "-m", tiny, "--port", free_port()),
            env=os.environ | home | variables | {"XDG_CACHE_HOME": "relative"},
            cwd=tmp_path / "bin",
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        usual = Path.home() if "HOME" not in variables else Path(pwd.getpwuid(os.getuid()).pw_dir)
        assert f"# {usual}/.config/slotcache/launch/claude/settings.json" in ran.stdout, ran.stderr
        assert [path.name for path in (tmp_path / "bin").iterdir()] == ["claude"]


# ---- The server -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends what a killed process has started")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_client_and_the_server_end_with_it(tiny, home, tmp_path, number):
    agent = tmp_path / "bin/claude"
    agent.write_text(f"#!{sys.executable}\nimport os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    arguments = command("launch", "claude", "-m", tiny, "--port", free_port(), "-t", 1, "-fa", "off")
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, env=os.environ | home, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout and process.stderr
        client = int(process.stdout.readline())
        (server,) = set(children(process.pid)) - {client}
        with watched(client, server) as watches:
            process.send_signal(number)
            assert all(map(ended, watches))
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    log = tmp_path / "config/slotcache/launch/claude.log"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_client_of_a_server_that_runs(tiny, home):
    with running(tiny, ctx_size=CONTEXT, cache_prompt=True, api_key="k", alias="served") as server:
        port = server.http.base_url.port
        stdout, stderr, code = launch("claude", "--port", port, "--api-key", "k", "--", "--port", "8", **home)
        printed = json.loads(stdout)
        assert code == 7 and printed["cached"] > 0 and printed["arguments"] == ["--port", "8"]
        assert printed["settings"]["ANTHROPIC_MODEL"] == "served" and f"{CONTEXT:,} tokens of context" in stderr
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
    assert code == 0 and f"http://127.0.0.1:{port}/v1" in stdout and "no server runs" in stdout
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
