"""The code of the documents: Python runs against a real server, commands are parsed by the real parsers, JSON is JSON."""

import ast
import asyncio
import inspect
import json
import re
import shlex

import pytest
from slotcache.server.cli import main
from slotcache.server.config.settings import SETTINGS

from docs.markdown import CODE, DOCUMENTS, ROOT, Block, blocks, read, without_blocks

ADDRESS = "http://127.0.0.1:8080"  # of the documents' server
EXCERPT = re.compile(r"# (?P<file>[\w/]+\.py)")  # the first line of a block that is part of a file
WRONG = "--no-such-flag"  # ends each command before it does anything: the only thing its parser may complain of
PROGRAMS = ("make", "slotcache", ".venv/bin/slotcache", ".venv/bin/pip", "python", "pip", "pipx", "python3")

PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]
COMMANDS = [
    (block.place, line)
    for path in DOCUMENTS
    for block in blocks(path, "sh")
    for line in block.text.splitlines()
    if line and not line.startswith("curl ")  # test_curl sends these
] + [
    (path.name, code.replace(" ...", " x"))
    for path in DOCUMENTS
    for code in CODE.findall(without_blocks(path))
    if re.match(r"((SLOTCACHE_\w+=\S+|CMAKE_ARGS=\S+) )*(make|slotcache|\.venv/bin/slotcache) \w", code)
]


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_python_runs(path, demo_server, capsys):
    names = {"__name__": "document"}
    for block in blocks(path, "python"):
        if EXCERPT.match(block.text):
            compile(excerpt(block), block.place, "exec")
        else:
            run(block, names, demo_server.url)


def excerpt(block: Block) -> str:
    """A part of a file as a program that compiles: rows of tables stand in a list."""
    code = "\n".join(line for line in block.text.splitlines() if not line.startswith("#"))
    return f"rows = [{code}]" if code.rstrip().endswith(",") else code


def run(block: Block, names, url):
    program = compile(
        "\n" * (int(block.place.rpartition(":")[2]) - 1) + block.text.replace(ADDRESS, url),
        block.place.rpartition(":")[0],
        "exec",
        ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    result = eval(program, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.mark.parametrize(("place", "line"), COMMANDS, ids=[f"{place} {line[:50]}" for place, line in COMMANDS])
def test_commands_are_understood(place, line, capsys, monkeypatch):
    words = shlex.split(line, comments=True)
    for command in " ".join(map(shlex.quote, words)).split(" '&&' "):
        check_command(shlex.split(command), capsys, monkeypatch)


def check_command(words, capsys, monkeypatch):
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        check_variable(name)
        if name.startswith("SLOTCACHE_") and name in {setting.variable for setting in SETTINGS}:
            monkeypatch.setenv(name, value)
    program, *arguments = words
    assert program in PROGRAMS
    if program.endswith("slotcache"):
        check_slotcache(arguments, capsys)
    elif program == "make":
        target = next(word for word in arguments if "=" not in word)
        assert re.search(rf"^{target}:", read("Makefile"), re.M), f"the Makefile has no target {target}"
        for word in arguments:
            if word.startswith("ARGS="):
                check_arguments(target, shlex.split(word.removeprefix("ARGS=")), capsys)
    elif program == "python" and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).is_file()


def check_arguments(target, arguments, capsys):
    """Of `make serve ARGS=...` and `make test ARGS=...`."""
    if target in ("serve", "launch"):
        check_slotcache([target, *["claude"] * (target == "launch"), *arguments], capsys)
    else:
        assert all((ROOT / word).exists() for word in arguments if not word.startswith("-"))


def check_slotcache(arguments, capsys):
    if arguments in (["bench"], ["cache"], ["models"]):
        return  # the program by its name, no command
    with pytest.raises(SystemExit) as ended:
        main([*arguments, WRONG])
    message = capsys.readouterr().err
    reported = (f"{WRONG} is no flag of slotcache {arguments[0]}: --help shows all\n", f"unrecognized arguments: {WRONG}\n")
    assert ended.value.code == 2 and message.endswith(reported), message


def check_variable(name):
    known = {setting.variable for setting in SETTINGS} | {"CMAKE_ARGS"}
    assert name in known or any(f'"{name}"' in path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_json_is_json(path):
    for block in blocks(path, "json"):
        try:
            json.loads(block.text)
        except ValueError as error:
            raise AssertionError(f"{block.place}: {error}") from None


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_block_says_its_language(path):
    fences = re.findall(r"^ *```(\w*)$", path.read_text("utf-8"), re.M)
    assert set(fences[::2]) <= {"python", "sh", "json", "text"} and not any(fences[1::2])
