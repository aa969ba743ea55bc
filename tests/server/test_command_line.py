"""The command line: what it helps with, and the line that each mistake gets."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from slotcache.models.sampling_params import Numbers
from slotcache.server.cli import main
from slotcache.server.config.flags import Parser, add_arguments, settings_of
from slotcache.server.config.settings import SETTINGS
from slotcache.server.config.topics import TOPICS

from server.test_cli import ROOT, command, run


def said(capsys, *arguments):
    """Run a command that ends at once; return its exit code, what it printed, and what it wrote to stderr."""
    try:
        code = main([*arguments])
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def taken():
    """A port that another socket of this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "odd.toml": "ctx_sise = 1",
        "list.toml": "port = [1]",
        "word.toml": 'port = "a"',
        "no.toml": "x =",
        "deep.toml": "x = " + "[" * 5000,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)


MISTAKES = [
    ("run", "there is no command run: `slotcache serve -m MODEL --open` opens a page to talk to a model"),
    ("list", "there is no command list: `slotcache models list --models-dir FOLDER`"),
    ("ps", "there is no command ps: GET /v1/models and GET /slots of a server show what it runs"),
    ("pull x", "there is no command pull: `slotcache serve -hf USER/REPO` fetches a model"),
    ("sevre", "argument COMMAND: invalid choice: 'sevre' (choose from"),
    ("-m model.gguf --port 80", "-m: expected a command before it, such as `slotcache serve -m`"),
    ("serve model.gguf", "model.gguf: expected a flag; slotcache serve --help shows them, -m names a model, and a value"),
    ("serve --ctx-sze 4096", "--ctx-sze is no flag of slotcache serve: did you mean --ctx-size?"),
    ("serve --docz=x", "--docz is no flag of slotcache serve: did you mean --docs?"),
    ("serve --zzzzzzz", "--zzzzzzz is no flag of slotcache serve: --help shows all"),
    ("launch claude --prot 1", "--prot is no flag of slotcache launch: did you mean --port?"),
    ("doctor --tiem", "--tiem is no flag of slotcache doctor: did you mean --time?"),
    ("serve -c many", "argument -c/--ctx-size: 'many': expected a whole number"),
    ("serve --port 70000", "argument --port: '70000': expected 0 to 65535"),
    ("serve -fa perhaps", "argument -fa/--flash-attn: 'perhaps': expected one of on, off, auto"),
    ("serve --docs", "argument --docs: expected one argument"),
    ("serve --mmproj x", "--mmproj is not supported: images, sound and video are not supported"),
    ("batch", "the following arguments are required: IN, -o/--output"),
    ("serve --config odd.toml", "--config odd.toml: ctx_sise is no setting: did you mean ctx_size?"),
    ("serve --config list.toml", "--config list.toml: port: expected a text, a number or a switch"),
    ("serve --config word.toml", "--config word.toml: port = 'a': expected a whole number"),
    ("serve --config no.toml", "--config no.toml: Invalid value"),
    ("serve --config deep.toml", "--config deep.toml: maximum recursion depth exceeded"),
    ("serve --config none.toml", "--config none.toml: No such file or directory"),
    ("serve -m none.gguf", "cannot read the model none.gguf: No such file or directory"),
    ("serve -m none.gguf --docs none", "--docs none: there is no such file or folder"),
    ("serve -m none.gguf -hf user/repo", "-m and -hf: give one of them"),
    ("serve --hf-file some.gguf", "--hf-file needs -hf USER/REPO"),
    ("serve -m llama3", "cannot read the model llama3: No such file or directory: expected a GGUF file or smollm2; -hf "),
    (
        "serve -m .",
        "cannot read the model .: Is a directory: expected a GGUF file; --models-dir serves all models in a folder",
    ),
    ("serve --host ,", "--host is empty: expected an address, such as 127.0.0.1, or 0.0.0.0 for all"),
    ("serve --host no.such.invalid", "--host no.such.invalid: this machine has no such address"),
    ("serve --port 0 --ssl-key-file none.pem", "--ssl-key-file none.pem: No such file or directory: expected a PEM file"),
    ("serve --port 0 --ssl-cert-file none.pem", "--ssl-key-file is missing: TLS needs the key and its certificate"),
    ("serve --port 0 --cors-origins app.example", "--cors-origins app.example: expected an origin such as https://"),
    ("serve --host none/server.sock", "--host none/server.sock: none is not a folder that this user may write to"),
    ("launch claude --print --host server.sock", "agents use plain HTTP on this machine: leave out --host"),
    ("order --port 0 --upstream 8080", "--upstream 8080: expected an address such as http://127.0.0.1:8080"),
    ("docs remove", "expected an index that `slotcache docs list` shows, a folder, or --unused DAYS"),
    ("docs lst", "argument COMMAND: invalid choice: 'lst' (choose from"),
    ("cache lst .", "argument COMMAND: invalid choice: 'lst' (choose from"),
    ("models shw", "argument COMMAND: invalid choice: 'shw' (choose from"),
]


@pytest.mark.parametrize(("line", "answer"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line_that_says_what_would_be_right(capsys, files, line, answer):
    code, out, err = said(capsys, *line.split())
    assert (code, out) == (2, "") and err.startswith(f"slotcache: {answer}") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve -m none.gguf", "order --upstream http://127.0.0.1:1"])
def test_a_port_that_is_taken_is_named_with_its_owner_before_anything_is_loaded(capsys, taken, command):
    code, out, err = said(capsys, *command.split(), "--port", taken)
    name = Path("/proc/self/comm").read_text().strip()
    assert (code, out) == (2, "")
    assert err.startswith(f"slotcache: port {taken} is taken by pid {os.getpid()} ({name}): --port ")
    with socket.create_server(("127.0.0.1", int(err.rpartition(" ")[2]))):
        pass  # what it names is free


def test_alone_it_shows_its_commands_and_two_examples(capsys):
    code, out, err = said(capsys)
    assert (code, err) == (0, "") and out.count("  slotcache serve") == 2
    assert all(f"\n    {name} " in out for name in ("serve", "launch", "batch", "demo", "doctor", "models"))


def test_each_setting_has_one_topic():
    names = [name for topic in TOPICS for name in topic.first + topic.rest]
    known = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names)), "a setting has two topics (server/config/topics.py)"
    lacking, unknown = set(known) - set(names), set(names) - set(known)
    assert not lacking, f"settings without a topic in server/config/topics.py: {', '.join(sorted(lacking))}"
    assert not unknown, f"topics of server/config/topics.py name what is no setting: {', '.join(sorted(unknown))}"
    assert sum(len(topic.first) for topic in TOPICS) <= 32


def test_the_server_reads_each_setting():
    """A flag that only its row of the table knows is parsed, and has no effect."""
    sources = [file.read_text() for room in ("server", "front") for file in (ROOT / room).rglob("*.py")]
    read = set(re.findall(r"(?:(?<=settings\.)|(?<=self\.)|(?<=given\.))\w+", "\n".join(sources)))
    unread = {setting.name for setting in SETTINGS} - read - {field.name for field in fields(Numbers)}
    assert not unread, f"nothing in server/ reads these settings, for example in server/load.py: {', '.join(sorted(unread))}"


def test_help_shows_the_first_settings_and_help_all_every_one(capsys):
    first = said(capsys, "serve", "--help")[1]
    everything = said(capsys, "serve", "--help-all")[1]
    own = said(capsys, "batch", "--help")[1]
    for topic in TOPICS:
        for setting in (setting for setting in SETTINGS if setting.name in topic.first + topic.rest):
            shown = f"\n  {setting.flags[0]} "
            assert shown in everything and (shown in first) == (setting.name in topic.first) and shown not in own
    assert len(first.splitlines()) < 150 and len(own.splitlines()) < 30


def settings(*arguments):
    parser = Parser()
    add_arguments(parser)
    return settings_of(parser.parse_args(arguments))


def test_flags_and_variables_win_over_a_file(tmp_path, monkeypatch):
    file = tmp_path / "slotcache.toml"
    file.write_text(
        'ctx-size = 2048\nport = 1\nparallel = 3\nui = false\ndocs = ["a", "b"]\nlora = "x"\n', "utf-8-sig"
    )  # as editors of Windows write it
    monkeypatch.setenv("SLOTCACHE_PARALLEL", "2")
    for arguments in (("--port", "5", "--config", str(file)), ("--config", str(file), "--port", "5")):
        found = settings(*arguments, "--lora", "y", "--lora", "z")
        assert (found.ctx_size, found.port, found.parallel, found.ui) == (2048, 5, 2, False)
        assert (found.docs, found.lora) == ("a\nb", "y,z")
        assert {"ctx_size", "ui", "docs"} <= found.given and "top_k" not in found.given


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("slotcache se", {"serve"}),
        ("slotcache serve --ctx", {"--ctx-size"}),
        ("slotcache serve -fa o", {"on", "off"}),
        ("slotcache demo --u", {"--url"}),
        ("slotcache completion z", {"zsh"}),
    ],
)
def test_bash_completes_commands_flags_and_values(capsys, words, expected):
    code, script, _ = said(capsys, "completion", "bash")
    ask = f'COMP_WORDS=({words}); COMP_CWORD={words.count(" ")}; _slotcache; echo "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True)
    assert code == 0 and set(found.stdout.split()) == expected


def test_zsh_and_fish_get_every_flag(capsys):
    zsh, fish = said(capsys, "completion", "zsh")[1], said(capsys, "completion", "fish")[1]
    assert "bashcompinit" in zsh and "-n '__fish_seen_subcommand_from serve' -l ctx-size\n" in fish


def test_a_reader_that_has_gone_and_ctrl_c_leave_no_traceback(tmp_path):
    ended = subprocess.run(
        ["bash", "-c", '"$@" | head -n 1 > /dev/null; echo ${PIPESTATUS[0]}', "bash", *command("serve", "--help-all")],
        capture_output=True,
        text=True,
    )
    assert ended.stderr == "" and ended.stdout.strip() in ("0", "141")
    assert "Traceback" not in run("serve", "--config", str(tmp_path / "none")).stderr


INTERRUPTED = """
import os, signal, sys, types
package = types.ModuleType("slotcache")
package.__path__ = [sys.argv[1]]
sys.modules["slotcache"] = package
module = sys.argv[2]


class Interrupting:
    def find_spec(self, name, *more):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
from slotcache.server.start import main
sys.argv[1:] = ["doctor"]
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
@pytest.mark.parametrize("module", ["slotcache.server.config.flags", "slotcache.models.errors", "slotcache.server.doctor"])
def test_ctrl_c_while_modules_are_loaded_is_no_traceback(module):
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED, str(ROOT), module], capture_output=True, text=True)
    assert ran.stderr == "" and ran.returncode in (130, -signal.SIGINT)
