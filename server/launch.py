"""`slotcache launch CLIENT`: starts a coding agent with settings for this server. If no server runs, it starts one.

Each client reads its settings from a different place, which the client's documentation describes:

    Claude Code   environment variables, and the file of --settings
    Codex         config.toml in the folder CODEX_HOME
    OpenCode      the file OPENCODE_CONFIG
    Qwen Code     the model providers in its system settings
    Crush         crush.json in the folder CRUSH_GLOBAL_CONFIG
    Cline         providers.json in the folder CLINE_DIR
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from ..models.errors import ModelError
from ..slots.child import ends_in_order, start_child, stop_child
from ..slots.store.private_folder import FolderError, own_folder, user_folder, written_aside
from .config.settings import SETTINGS, Settings, SettingsError, listed, written
from .engine.fit import Decision, fit, mib
from .serve import model_path

# ---- The clients, and the settings of each: files in its folder, environment variables, arguments. ----------------------

KEY = "SLOTCACHE_API_KEY"  # the environment variable from which clients read the server's API key
PATIENCE = 3_600_000  # ms for which a client waits for an answer; meanwhile pings show that the server is alive
MOST_OUTPUT = 8192  # the most tokens of an answer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client needs to know of a server and its model.

    url: the server's address, without a path.
    context: the most tokens of a request.
    key: the server's API key, or "none" if the server needs no key.
    """

    url: str
    name: str
    context: int
    key: str = "none"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int:
        """The most tokens of an answer: at most a quarter of the context, to leave room for the prompt."""
        return min(MOST_OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """The settings with which a client is started.

    files: the contents of files, by their names in the client's folder.
    variables: environment variables.
    kept: names of files that the client itself changes, so that this command writes them only if they do not exist.
    """

    files: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    arguments: Sequence[str] = ()
    kept: Sequence[str] = ()


def claude(model: ServedModel, folder: Path) -> AgentSetup:
    """Return the setup of Claude Code.

    The setup gives the size of the context, because Claude Code knows this size only for its own models.

    Two features are off because they would change text that the cache could reuse. The attribution header would change the
    start of each prompt. Reminders of the remaining tokens would change the messages of the prompt.
    """
    names = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    names += tuple(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))
    variables = dict.fromkeys(names, model.name) | {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_AUTH_TOKEN": model.key,
        "ANTHROPIC_API_KEY": "",
        "API_TIMEOUT_MS": str(PATIENCE),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(model.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(model.output),
    }
    return AgentSetup({"settings.json": _json({"env": variables})}, arguments=("--settings", str(folder / "settings.json")))


def codex(model: ServedModel, folder: Path) -> AgentSetup:
    """Return the setup of Codex.

    Codex adds trusted folders to its settings file, so this command writes the file only once. Settings that may change
    later are given as arguments. The provider is named OpenAI, because Codex lets only a provider of this name compact the
    history. When the server compacts the history, the prompt for the summary reuses the KV of the history.
    """
    provider = {
        "name": "slotcache",
        "wire_api": "responses",
        "env_key": KEY,
        "stream_idle_timeout_ms": PATIENCE,
    }
    lines = ['model_provider = "slotcache"', 'web_search = "disabled"', "", "[model_providers.slotcache]"]
    text = "\n".join([*lines, *(f"{name} = {_toml(value)}" for name, value in provider.items()), ""])
    changing = {
        "model": model.name,
        "model_context_window": model.context,
        "model_providers.slotcache.name": "OpenAI",
        "model_providers.slotcache.base_url": model.v1,
    }
    arguments = [part for name, value in changing.items() for part in ("-c", f"{name}={_toml(value)}")]
    return AgentSetup({"config.toml": text}, {"CODEX_HOME": str(folder), KEY: model.key}, arguments, kept=("config.toml",))


def opencode(model: ServedModel, folder: Path) -> AgentSetup:
    """Return the setup of OpenCode.

    With this setup OpenCode sends a cache key. So OpenCode's requests use the cache even if the server runs without
    --cache-prompt. OpenCode replaces {env:...} and {file:...} in its settings file, so the brace in such texts is escaped.
    """
    limit = {"context": model.context, "output": model.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "slotcache",
        "options": {"baseURL": model.v1, "apiKey": model.key, "timeout": False, "setCacheKey": True},
        "models": {model.name: {"name": model.name, "tool_call": True, "limit": limit}},
    }
    chosen = f"slotcache/{model.name}"
    settings: dict[str, object] = {"$schema": "https://opencode.ai/config.json", "provider": {"slotcache": provider}}
    settings |= {"model": chosen, "small_model": chosen}
    text = re.sub(r"\{(?=env:|file:)", r"\\u007b", _json(settings))
    return AgentSetup({"opencode.json": text}, {"OPENCODE_CONFIG": str(folder / "opencode.json")})


def qwen(model: ServedModel, folder: Path) -> AgentSetup:
    """Return the setup of Qwen Code.

    Qwen Code prefers OpenAI's environment variables to its files, so these variables are set, too. In its files, Qwen Code
    replaces $NAME by the value of the variable NAME, but replaces nothing in this value. So a model's name that contains a $
    is given by a variable.
    """
    name = "$OPENAI_MODEL" if "$" in model.name else model.name
    entry = {
        "id": name,
        "name": name,
        "baseUrl": model.v1,
        "envKey": KEY,
        "generationConfig": {"timeout": PATIENCE, "maxRetries": 1, "contextWindowSize": model.context},
    }
    settings = {
        "modelProviders": {"openai": [entry]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": name},
    }
    variables = {
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(folder / "settings.json"),
        KEY: model.key,
        "OPENAI_API_KEY": model.key,
        "OPENAI_BASE_URL": model.v1,
        "OPENAI_MODEL": model.name,
    }
    return AgentSetup({"settings.json": _json(settings)}, variables)


def crush(model: ServedModel, folder: Path) -> AgentSetup:
    """Return the setup of Crush.

    Crush gets a separate folder for its data. In its usual folder, Crush remembers the last chosen model, and prefers that
    model to the model of the setup. Crush evaluates a key as a shell would, even $(commands), so the key is in a variable.
    """
    entry = {
        "id": model.name,
        "name": model.name,
        "context_window": model.context,
        "default_max_tokens": model.output,
    }
    provider = {"name": "slotcache", "type": "openai-compat", "base_url": model.v1, "api_key": f"${KEY}", "models": [entry]}
    chosen = {"model": model.name, "provider": "slotcache"}
    settings = {
        "$schema": "https://charm.land/crush.json",
        "providers": {"slotcache": provider},
        "models": {"large": chosen, "small": chosen},
    }
    variables = {"CRUSH_GLOBAL_CONFIG": str(folder), "CRUSH_GLOBAL_DATA": str(folder / "data"), KEY: model.key}
    return AgentSetup({"crush.json": _json(settings)}, variables)


def cline(model: ServedModel, folder: Path) -> AgentSetup:
    """Return the setup of Cline. Cline keeps its whole state in the setup's folder, including its sessions."""
    kind = "openai-compatible"
    given = {"provider": kind, "baseUrl": model.v1, "apiKey": model.key, "model": model.name, "timeout": PATIENCE}
    entry = {"settings": given, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    settings = {"version": 1, "lastUsedProvider": kind, "providers": {kind: entry}}
    variables = {"CLINE_DIR": str(folder), "CLINE_DATA_DIR": str(folder / "data")}
    return AgentSetup({"data/settings/providers.json": _json(settings)}, variables)


def _json(settings: object) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _toml(value: str | int) -> str:
    """Return a value as TOML. TOML has JSON's escapes, except for surrogate pairs. U+007F must be escaped, too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


CLIENTS: dict[str, tuple[Callable[[ServedModel, Path], AgentSetup], str]] = {
    "claude": (claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (codex, "npm install -g @openai/codex"),
    "opencode": (opencode, "npm install -g opencode-ai"),
    "qwen": (qwen, "npm install -g @qwen-code/qwen-code"),
    "crush": (crush, "npm install -g @charmland/crush"),
    "cline": (cline, "npm install -g cline"),
}
"""For the command of each client: the function that makes its setup, and the command that installs it."""


# ---- A client's folder --------------------------------------------------------------------------------------------------

MARK = "README"
NOTE = "`slotcache launch` writes these files at each start: do not edit them.\n"


class LaunchError(Exception):
    """A client cannot be started. The message says why, and what to do."""


def folder_of(client: str) -> Path:
    """Return the folder for a client's settings. Raises FolderError if the user has no home directory."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "slotcache" / "launch" / client


def make_folder(folder: Path) -> None:
    """Make the folder for a client if it does not exist. Only the folder's owner can read it.

    The folder must belong to the user, and so must the folders above it in the user's home directory. Raises FolderError if
    another user could replace one of these folders.
    """
    base = folder.parents[2]
    if not os.path.isabs(os.environ.get("XDG_CONFIG_HOME", "")):
        own_folder(base.parent, "HOME")
    for part in (base, *reversed(folder.parents[:2]), folder):
        own_folder(part, "settings in")
    folder.chmod(0o700)


def write(folder: Path, setup: AgentSetup) -> None:
    """Write the files of a client. Each file is written whole or not at all, and only its owner can read it.

    Raises LaunchError if the folder already has one of the files, but this command did not write that file.
    """
    mark = folder / MARK
    if not mark.exists() and (others := [name for name in setup.files if (folder / name).exists()]):
        raise LaunchError(f"{folder / others[0]} was not written by slotcache launch: move it, then start again")
    files = {name: text for name, text in setup.files.items() if not (name in setup.kept and (folder / name).exists())}
    for name, text in ({MARK: NOTE} | files).items():
        for part in reversed(Path(name).parents[:-1]):
            own_folder(folder / part, "settings in")
        with written_aside(_place_of(folder / name)) as out:
            out.write(text.encode())


def _place_of(file: Path) -> Path:
    """Return the path to write a file to: the target of the link if the file is a link. Raises LaunchError.

    The file is a link, for example, if the user keeps all dotfiles in one folder. The file may contain a key, so a link is
    refused if other users may change its target.
    """
    if not file.is_symlink():
        return file
    place = file.resolve()
    problem = "it leads to no file" if place.exists() and not place.is_file() else ""
    steps = {place, *place.parents, *file.parent.joinpath(file.readlink()).parents}
    for step in sorted(one for one in steps if one.exists()):
        about = step.stat()
        if hasattr(os, "geteuid") and about.st_uid not in (os.geteuid(), 0):
            problem = f"{step} belongs to user {about.st_uid}"
        elif step.is_dir() and about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
            problem = f"other users may write to {step}"
    if problem or not place.parent.is_dir():
        raise LaunchError(f"{file} is a link: {problem or f'{place.parent} does not exist'}: remove the link")
    return place


# ---- The server: one that runs, or a new one. ---------------------------------------------------------------------------

LEAST_CONTEXT = 32768  # tokens: the first prompt of Claude Code has 25,000
LAST_LINES = 5  # the last lines of the log, to show if the server does not start
LAST_SECONDS = 30.0  # within which the server must end
CLIENT_SECONDS = 5.0  # within which a client must end when this command is told to end
POLL = 0.2  # s between two checks of a server that loads its model

_open = build_opener(ProxyHandler({})).open  # without a proxy, which could not reach addresses of this machine


def address_of(settings: Settings) -> str:
    """Return the URL at which a client on this machine reaches the server with these settings. Raises LaunchError."""
    if settings.ssl_key_file or settings.ssl_cert_file or not settings.hosts:
        wrong = "--ssl-key-file and --ssl-cert-file" if settings.hosts else f"--host {settings.host}"
        raise LaunchError(f"agents use plain HTTP on this machine: leave out {wrong}")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.hosts[0], settings.hosts[0])
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _status(url: str) -> int:
    """Return the HTTP status of a server's /health. 0 if no HTTP server answers at the address."""
    try:
        with _open(f"{url}/health", timeout=10) as answer:
            return answer.status
    except HTTPError as error:
        return error.code
    except (URLError, OSError):
        return 0


def _get(url: str, path: str, key: str) -> Any:
    try:
        with _open(Request(f"{url}{path}", headers={"Authorization": f"Bearer {key}"}), timeout=30) as answer:
            return json.load(answer)
    except HTTPError as error:
        hint = ": name its key with --api-key" if error.code == 401 else ""
        raise LaunchError(f"the server at {url} answered {error.code}{hint}") from None
    except (URLError, OSError, ValueError) as error:
        raise LaunchError(f"the answer of the server at {url} cannot be read: {error}") from None


def served_model(url: str, key: str) -> tuple[ServedModel, bool]:
    """Return the first of a server's models that generates text, and whether the server caches by default.

    Raises LaunchError.
    """
    for entry in _get(url, "/v1/models", key).get("data", ()):
        if entry.get("owned_by") == "slotcache" and "n_ctx" in entry["meta"]:
            caches = _get(url, "/props", key)["settings"]["cache_prompt"]
            return ServedModel(url, entry["id"], entry["meta"]["n_ctx"], key), caches
    raise LaunchError(f"the server at {url} is not a slotcache that generates text: choose another --port")


def fitted(settings: Settings) -> tuple[Settings, int, str]:
    """Return settings that fit into memory, the most tokens of a request, and a text about the memory for these tokens.

    Raises ModelError and SettingsError. Raises LaunchError if the context is too small for an agent.
    """
    path = model_path(settings)
    fitted, decision = fit(settings, path)
    context = fitted.ctx_size if fitted.kv_unified else fitted.ctx_size // fitted.parallel
    if decision is None or context < LEAST_CONTEXT:
        raise LaunchError(f"{_too_small(context, path.name)}: {_remedy(settings, decision)}")
    kv, whole = (sum(sizes) for sizes in zip(*((use.kv, use.total) for use in decision.chosen.uses), strict=True))
    cost = f"{context:,} tokens of context take {mib(kv)} of KV, {mib(whole)} with the model"
    return replace(fitted, cache_prompt=True), context, cost


def _too_small(context: int, name: str) -> str:
    return f"a coding agent needs a context of at least {LEAST_CONTEXT:,} tokens, and {name} has {context:,} here"


def _remedy(settings: Settings, decision: Decision | None) -> str:
    """Return a text that says how to get a large enough context, and how much memory such a context takes."""
    if decision is None:
        return "choose a model that generates text"
    placed = decision.chosen.placement.cells
    kv = sum(use.kv for use in decision.chosen.uses) * LEAST_CONTEXT / max(placed, 1)
    slots = "" if settings.kv_unified else ", and leave out --no-kv-unified"
    if settings.ctx_size or placed < decision.wanted.placement.cells:
        return f"-c {LEAST_CONTEXT} takes {mib(kv)} of KV{slots}"
    return f"choose a model that was trained for more tokens{slots}"


@contextmanager
def _serving(settings: Settings, url: str, log: Path) -> Iterator[None]:
    """Run a server for as long as the block runs. Raises LaunchError if the server cannot start."""
    given = {one.variable: written(getattr(settings, one.name)) for one in SETTINGS if settings.is_given(one.name)}
    script = shutil.which("slotcache", path=str(Path(sys.executable).parent))
    command = [script] if script else [sys.executable, "-m", "slotcache.server.cli"]
    log.unlink(missing_ok=True)  # it may be a link, or a file that other users may read
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        # The server gets a session of its own, so that ctrl-C reaches only the client.
        process = start_child(
            [*command, "serve"], is_asked=True, env=os.environ | given, stdout=out, stderr=out, start_new_session=True
        )
    try:
        _wait(url, lambda: process.poll() is None, log)
        yield
    finally:
        stop_child(process, LAST_SECONDS)


def _wait(url: str, lives: Callable[[], bool], log: Path | None = None) -> None:
    """Wait until a server has loaded its model. Raises LaunchError if it ends before that, or if it is not slotcache.

    lives: returns whether the server still runs.
    log: the file with the server's log, whose last lines become part of the error.
    """
    while (status := _status(url)) != 200:
        if not lives():
            lines = log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:] if log else []
            raise LaunchError("\n".join([f"the server at {url} did not come up", *lines]))
        if status not in (0, 503):
            raise LaunchError(f"the server at {url} is not slotcache: choose another --port")
        time.sleep(POLL)


# ---- The command --------------------------------------------------------------------------------------------------------


def launch(settings: Settings, client: str, arguments: Sequence[str], *, prints: bool) -> int:
    """Start a client and return its exit code, or 2 if it cannot be started.

    arguments: the arguments for the client.
    prints: whether to print the setup instead of writing files and starting the client.
    """
    try:
        with ends_in_order(_end):
            return _launch(settings, client, arguments, prints)
    except (LaunchError, FolderError, ModelError, SettingsError, OSError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _end(number: int, frame: object) -> None:
    """At a signal, raise an exception that ends this command together with the client and the server."""
    sys.exit(128 + number)


def _launch(settings: Settings, client: str, arguments: Sequence[str], prints: bool) -> int:
    if client not in CLIENTS:
        raise LaunchError(f"unknown client {client!r}: expected one of {', '.join(CLIENTS)}")
    make, install = CLIENTS[client]
    if not (prints or shutil.which(client)):
        raise LaunchError(f"{client} is not installed: {install}; or print its settings with --print")
    url, folder, key = address_of(settings), folder_of(client), min(listed(settings.api_key), default="none")
    if _status(url):
        _wait(url, lambda: _status(url) > 0)
        return _with_model(*_checked(url, key), make, folder, [client, *arguments], prints)
    settings, context, cost = fitted(settings)
    if prints:
        note = f"no server runs at {url}: without --print, this command starts one with --cache-prompt; {cost}"
        model = ServedModel(url, settings.names(model_path(settings))[0], context, key)
        return _with_model(model, note, make, folder, [client, *arguments], prints)
    make_folder(folder)
    print(f"slotcache: starting a server at {url}: {cost}", file=sys.stderr)
    with _serving(settings, url, folder.parent / f"{client}.log"):
        return _with_model(*_checked(url, key), make, folder, [client, *arguments], prints)


def _checked(url: str, key: str) -> tuple[ServedModel, str]:
    """Return the model of a running server, and a note about it. Raises LaunchError if the context is too small."""
    model, caches = served_model(url, key)
    if model.context < LEAST_CONTEXT:
        raise LaunchError(f"{_too_small(model.context, model.name)}: start the server at {url} with -c {LEAST_CONTEXT}")
    without = "; it was started without --cache-prompt, so most clients compute each prompt anew"
    return model, f"the server at {url} has {model.context:,} tokens of context{'' if caches else without}"


def _with_model(
    model: ServedModel,
    note: str,
    make: Callable[[ServedModel, Path], AgentSetup],
    folder: Path,
    command: Sequence[str],
    prints: bool,
) -> int:
    """Start a client with its settings, or print the settings.

    Raises LaunchError if the model's name or the key has characters that no setting can contain.
    """
    for name, text in (("name of the model", model.name), ("key", model.key)):
        if re.search("[\0\ud800-\udfff]", text):  # not possible in a variable, a file or an argument
            raise LaunchError(f"the {name} is not valid text, {text!r}: choose another with --alias or --api-key")
    setup = make(model, folder)
    line = [command[0], *setup.arguments, *command[1:]]
    if prints:
        print(f"# {note}")
        for name, text in setup.files.items():
            print(f"# {folder / name}\n{text}")
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in setup.variables.items()), shlex.join(line)]))
        return 0
    print(f"slotcache: {note}", file=sys.stderr)
    make_folder(folder)
    write(folder, setup)
    return _run(line, os.environ | setup.variables)


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a client in this terminal, and return its exit code. ctrl-C ends only the client."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # not SIG_IGN, which the client would inherit
    try:
        process = start_child(command, is_asked=True, stdin=None, env=variables)
        try:
            code = process.wait()
        finally:
            stop_child(process, CLIENT_SECONDS)
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGINT, before)
