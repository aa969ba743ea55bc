"""Turn settings into argparse flags, read settings from the environment and a file, and handle llama-server's flags."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from .settings import SETTINGS, Setting, Settings, Value, parse_switch, written
from .topics import TOPICS

# ---- Llama --------------------------------------------------------------------------------------------------------------
# Tables of llama-server's flags that are not settings here. They exist so that llama-server's command lines work here, too.
#
# A flag is accepted if ignoring it changes nothing that clients see. If the flag then has no effect, the log says so. A flag
# that would change answers, or the machine that computes them, is refused. The error says what to do instead.

Row = tuple[str, int, str]
"""The names of a flag, the number of its arguments, and its environment variable without LLAMA_ARG_ (empty: none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFlag:
    """A flag of llama-server that is not a setting here.

    says: why the flag has no effect or is refused; empty: the server always behaves as if the flag were set.
    """

    flags: tuple[str, ...]
    num_values: int
    variable: str
    says: str = ""
    refused: bool = False


SO_HERE: tuple[Row, ...] = (
    ("--jinja --no-jinja", 0, "JINJA"),
    ("-cb --cont-batching", 0, "CONT_BATCHING"),
    ("-kvo --kv-offload", 0, "KV_OFFLOAD"),
    ("--op-offload", 0, ""),
    ("--warmup", 0, ""),
    ("--mmap", 0, "MMAP"),
    ("--swa-full", 0, "SWA_FULL"),
    ("--cache-idle-slots", 0, "CACHE_IDLE_SLOTS"),
    ("--no-context-shift", 0, ""),
    ("--no-mmproj --no-mmproj-auto --mmproj-auto", 0, "MMPROJ_AUTO"),
    ("--models-autoload --no-models-autoload", 0, "MODELS_AUTOLOAD"),
    ("--no-ui-mcp-proxy --no-webui-mcp-proxy", 0, ""),
    ("-no-ag --no-agent", 0, ""),
    ("-e --escape --no-escape", 0, ""),
    ("--perf --no-perf", 0, "PERF"),
    ("--log-prefix --no-log-prefix", 0, "LOG_PREFIX"),
    ("--log-timestamps --no-log-timestamps", 0, "LOG_TIMESTAMPS"),
    ("--log-colors", 1, "LOG_COLORS"),
    ("-dt --defrag-thold", 1, "DEFRAG_THOLD"),
    ("--cors-credentials", 0, "CORS_CREDENTIALS"),
)

WITHOUT_EFFECT: Mapping[str, tuple[Row, ...]] = {
    "weights are mapped from the file": (
        ("--mlock", 0, "MLOCK"),
        ("--no-mmap", 0, "NO_MMAP"),
        ("-lm --load-mode", 1, "LOAD_MODE"),
        ("-lzm --lazy-mode", 1, "LAZY_MODE"),
        ("--check-tensors", 0, ""),
        ("--no-host", 0, "NO_HOST"),
    ),
    "--threads sets the threads, the system places them": (
        ("-tb --threads-batch", 1, ""),
        ("-C --cpu-mask", 1, ""),
        ("-Cr --cpu-range", 1, ""),
        ("--cpu-strict", 1, ""),
        ("--prio", 1, ""),
        ("--poll", 1, ""),
        ("-Cb --cpu-mask-batch", 1, ""),
        ("-Crb --cpu-range-batch", 1, ""),
        ("--cpu-strict-batch", 1, ""),
        ("--prio-batch", 1, ""),
        ("--poll-batch", 1, ""),
        ("--numa", 1, "NUMA"),
    ),
    "one thread serves all connections, each with limits": (
        ("--threads-http", 1, "THREADS_HTTP"),
        ("-to --timeout", 1, "TIMEOUT"),
        ("--reuse-port", 0, "REUSE_PORT"),
    ),
    "slots share one pool of cells, and a step is one batch": (
        ("-nocb --no-cont-batching", 0, ""),
        ("--no-cache-idle-slots", 0, ""),
        ("--no-warmup", 0, ""),
        ("-nkvo --no-kv-offload", 0, ""),
        ("--no-op-offload", 0, ""),
    ),
    "equal prefixes are reused, exactly": (
        ("--cache-reuse", 1, "CACHE_REUSE"),
        ("-ctxcp --ctx-checkpoints --swa-checkpoints", 1, "CTX_CHECKPOINTS"),
        ("-cms --checkpoint-min-step", 1, "CHECKPOINT_MIN_SPACING_NT"),
    ),
    "the server measures how many drafted tokens pay; --draft-model drafts": (
        ("-hfd -hfrd --hf-repo-draft --spec-draft-hf", 1, "SPEC_DRAFT_HF_REPO"),
        ("-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", 1, "N_GPU_LAYERS_DRAFT"),
        ("-devd --device-draft --spec-draft-device", 1, ""),
        ("-ctkd --cache-type-k-draft --spec-draft-type-k", 1, "SPEC_DRAFT_CACHE_TYPE_K"),
        ("-ctvd --cache-type-v-draft --spec-draft-type-v", 1, "SPEC_DRAFT_CACHE_TYPE_V"),
        ("-td --threads-draft --spec-draft-threads", 1, ""),
        ("-tbd --threads-batch-draft --spec-draft-threads-batch", 1, ""),
        ("--draft-n --draft-max --spec-draft-n-max", 1, "DRAFT_MAX"),
        ("--draft-min --draft-n-min --spec-draft-n-min", 1, "DRAFT_MIN"),
        ("--draft-p-min --spec-draft-p-min", 1, "SPEC_DRAFT_P_MIN"),
        ("--draft-p-split --spec-draft-p-split", 1, "SPEC_DRAFT_P_SPLIT"),
        ("-lcs --lookup-cache-static", 1, ""),
        ("-lcd --lookup-cache-dynamic", 1, ""),
    ),
    "sampling runs on the CPU": (("-bs --backend-sampling --no-backend-sampling", 0, "BACKEND_SAMPLING"),),
    "--verbose logs more": (("-lv --verbosity --log-verbosity", 1, "LOG_VERBOSITY"), ("--log-disable", 0, "")),
}

REFUSED: Mapping[str, tuple[Row, ...]] = {
    "a full context ends an answer; -c makes it larger": (
        ("--context-shift --ctx-shift", 0, "CONTEXT_SHIFT"),
        ("--keep", 1, ""),
        ("--kv-unified-per-slot", 1, "KV_UNIFIED_PER_SLOT"),
    ),
    "use --n-cpu-moe or -ngl": (("-ncffn --n-cpu-ffn", 1, "N_CPU_FFN"),),
    "devices of other machines are not supported": (("--rpc", 1, "RPC"),),
    "`slotcache doctor` lists devices": (("--list-devices", 0, ""),),
    "control vectors change every answer": (
        ("--control-vector", 1, ""),
        ("--control-vector-scaled", 1, ""),
        ("--control-vector-layer-range", 2, ""),
    ),
    "download the file, or name a repository with -hf": (
        ("-mu --model-url", 1, "MODEL_URL"),
        ("-dr --docker-repo", 1, "DOCKER_REPO"),
        ("-cl --cache-list", 0, ""),
        ("--fim-qwen-1.5b-default --embd-gemma-default", 0, ""),
    ),
    "the variable HF_TOKEN holds the token; other users can read a command line": (("-hft --hf-token", 1, ""),),
    "images, sound and video are not supported": (
        ("-mm --mmproj", 1, "MMPROJ"),
        ("-mmu --mmproj-url", 1, "MMPROJ_URL"),
        ("--media-path", 1, "MEDIA_PATH"),
        ("--image-min-tokens", 1, "IMAGE_MIN_TOKENS"),
        ("--image-max-tokens", 1, "IMAGE_MAX_TOKENS"),
    ),
    "an agent beside the server runs tools": (
        ("--tools", 1, "TOOLS"),
        ("--tools-runtime", 1, "TOOLS_RUNTIME"),
        ("--mcp-servers-config", 1, "MCP_SERVERS_CONFIG"),
        ("--mcp-servers-json", 1, "MCP_SERVERS_JSON"),
        ("--ui-mcp-proxy --webui-mcp-proxy", 0, "UI_MCP_PROXY"),
        ("-ag --agent", 0, "AGENT"),
    ),
    "a reverse proxy does that; --allowed-hosts names it": (
        ("--api-prefix", 1, "API_PREFIX"),
        ("--path", 1, "STATIC_PATH"),
        ("--ui-config --webui-config", 1, "UI_CONFIG"),
        ("--ui-config-file --webui-config-file", 1, "UI_CONFIG_FILE"),
    ),
    "pages of --cors-origins may use any header and method": (
        ("--cors-methods", 1, "CORS_METHODS"),
        ("--cors-headers", 1, "CORS_HEADERS"),
        ("--no-cors-credentials", 0, ""),
    ),
    "all models have the same settings": (("--models-preset", 1, "MODELS_PRESET"),),
    "send it with each request: `stop`": (("-r --reverse-prompt", 1, ""),),
    "send it with each request: `grammar` or `json_schema`": (
        ("--grammar", 1, ""),
        ("--grammar-file", 1, ""),
        ("-j --json-schema", 1, ""),
        ("-jf --json-schema-file", 1, ""),
    ),
    "special tokens never become text here": (("-sp --special", 0, ""),),
    "prompts are never logged": (("--log-prompts-dir", 1, ""),),
}


def _foreign() -> Iterator[LlamaFlag]:
    for refused, groups in ((False, {"": SO_HERE}), (False, WITHOUT_EFFECT), (True, REFUSED)):
        for says, rows in groups.items():
            for names, num_values, variable in rows:
                yield LlamaFlag(
                    flags=tuple(names.split()),
                    num_values=num_values,
                    variable=variable and f"LLAMA_ARG_{variable}",
                    says=says,
                    refused=refused,
                )


FOREIGN = tuple(_foreign())


PREFIX = "LLAMA_ARG_"  # of llama-server's environment variables
FILE_HELP = "a TOML file with settings by their names, such as `ctx_size = 8192`; flags and variables win over it"


class Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slotcache: {message}\n")

    def unknown(self, argument: str) -> NoReturn:
        """Exit with an error about an unknown flag. The error suggests the most similar known flag, if one is close."""
        if not argument.startswith("-"):
            self.error(
                f"{argument}: expected a flag; {self.prog} --help shows them, -m names a model, "
                "and a value with spaces needs quotes"
            )
        flag = argument.partition("=")[0]
        known = [name for name, action in self._option_string_actions.items() if not isinstance(action, _Foreign)]
        near = get_close_matches(flag, known, n=1, cutoff=0.75)
        self.error(f"{flag} is no flag of {self.prog}: " + (f"did you mean {near[0]}?" if near else "--help shows all"))


def add_arguments(parser: argparse.ArgumentParser, shown: bool = True) -> None:
    """Add the flags of all settings to a parser, and the other flags of llama-server, which are refused or have no effect.

    shown: whether --help shows the settings in each `Topic.first`; otherwise it shows no setting. --help-all shows all.
    """
    parser.set_defaults(notes=[], given=frozenset(), from_file=frozenset())
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help=f"show all {len(SETTINGS)} flags, and exit")
    parser.add_argument("--config", action=_ReadFile, metavar="FILE", help=FILE_HELP)
    settings = {setting.name: setting for setting in SETTINGS}
    for topic in TOPICS:
        group = parser.add_argument_group(topic.title)
        add_settings(group, [settings[name] for name in topic.first], hidden=not shown)
        add_settings(group, [settings[name] for name in topic.rest], hidden=True)
    for foreign in FOREIGN:
        parser.add_argument(*foreign.flags, action=_Foreign, nargs=foreign.num_values, foreign=foreign)


def add_settings(parser: argparse._ActionsContainer, settings: Sequence[Setting], hidden: bool = False) -> None:
    """Add the flags of some settings to a parser. hidden: whether only --help-all shows these flags.

    The flag of a switch may have a value, `on` or `off`: `--cache-prompt`, `--cache-prompt off`. Each switch also has a
    flag `--no-...`.
    """
    for setting in settings:
        default = f" (default: {written(setting.default)})" if setting.default != "" else ""
        help = f"{setting.help}{default}".replace("%", "%%")
        parser.add_argument(
            *setting.flags,
            dest=setting.name,
            default=from_environment(setting),
            help=argparse.SUPPRESS if hidden else help,
            whole_help=help,
            type=_argument_type(setting),
            metavar="on|off" if setting.is_switch else "|".join(setting.choices) or type(setting.default).__name__,
            nargs="?" if setting.may_be_bare else None,
            const=setting.parse("on") if setting.may_be_bare else None,
            action=_Store,
            separator=setting.separator,
        )
        for flag, text in setting.fixed.items():
            value = setting.parse(text)
            parser.add_argument(flag, dest=setting.name, action=_Store, nargs=0, const=value, help=argparse.SUPPRESS)


class _ReadFile(argparse.Action):
    """The action of --config: read settings from a file.

    Flags and environment variables override the file, even if a flag stands before --config.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            for name, value in _read_settings(Path(str(values)).expanduser()):
                if name not in namespace.given and name not in namespace.from_file:
                    setattr(namespace, name, value)
                namespace.from_file |= {name}
        except (OSError, ValueError, RecursionError) as error:  # deeply nested values exceed the recursion limit
            reason = error.strerror if isinstance(error, OSError) else error
            parser.exit(2, f"slotcache: {option_string} {values}: {reason}\n")


def _read_settings(path: Path) -> Iterator[tuple[str, Value]]:
    """Yield the settings in a file. Skip settings that an environment variable sets. Raises OSError and ValueError."""
    known = {setting.name: setting for setting in SETTINGS}
    for key, value in tomllib.loads(path.read_text(encoding="utf-8-sig")).items():
        setting = known.get(key.replace("-", "_"))
        if setting is None:
            near = [f"did you mean {name}?" for name in get_close_matches(key, known, n=1)]
            raise ValueError(f"{key} is no setting: {[*near, 'docs/settings.md has them all'][0]}")
        if isinstance(value, list) and setting.separator:
            value = setting.separator.join(map(str, value))
        if not isinstance(value, Value):
            raise ValueError(f"{key}: expected a text, a number or a switch")
        try:
            found = setting.parse(written(value))
        except ValueError as error:
            raise ValueError(f"{key} = {value!r}: {error}") from None
        if variable_of(setting) is None:
            yield setting.name, found


class _HelpAll(argparse.Action):
    """The action of --help-all: show all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        for action in parser._actions:
            if isinstance(action, _Store) and action.whole_help:
                action.help = action.whole_help
        parser.print_help()
        parser.exit()


def settings_of(arguments: argparse.Namespace) -> Settings:
    values = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS}
    return Settings(**values, given=given_among(arguments, SETTINGS))


def given_among(arguments: argparse.Namespace, settings: Sequence[Setting]) -> frozenset[str]:
    """Return the names of the settings that the user set by a flag, in the file of --config or by an environment variable.

    A setting counts even if its value is empty.
    """
    flags: frozenset[str] = getattr(arguments, "given", frozenset()) | getattr(arguments, "from_file", frozenset())
    return flags.union(setting.name for setting in settings if variable_of(setting))


def notes_of(arguments: argparse.Namespace) -> list[str]:
    """Return a line for each llama-server flag or environment variable that the user set, but that has no effect here."""
    known = {variable for setting in SETTINGS for variable in setting.variables}
    others = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return [*arguments.notes, *(f"{name} has no effect: {why}" for name in others if (why := _why_unheeded(name)))]


def _why_unheeded(variable: str) -> str:
    """Return why a variable of llama-server has no effect here; empty if the server behaves as the variable says."""
    foreign = next((one for one in FOREIGN if one.variable == variable), None)
    if foreign is None:
        return "it is not known here"
    if foreign.says or not _is_off(os.environ[variable]):
        return foreign.says
    negations = {f"--no-{flag[2:]}" for flag in foreign.flags if flag.startswith("--")}
    return next((one.says for one in FOREIGN if negations.intersection(one.flags)), "")


def _is_off(text: str) -> bool:
    try:
        return not parse_switch(text)
    except ValueError:
        return False


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in the names of long flags, as llama-server does: `--ctx_size` becomes `--ctx-size`."""
    return [_with_dashes(argument) if argument.startswith("--") else argument for argument in arguments]


def _with_dashes(argument: str) -> str:
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value


class _Store(argparse.Action):
    """The action of a setting's flag. The action also adds the setting's name to `given` in the namespace.

    separator: if the flag is repeated, this text joins the values; "": the last value counts. whole_help: the help text
    in --help-all; "": none.
    """

    def __init__(self, *, dest: str, separator: str = "", whole_help: str = "", **options: object) -> None:
        super().__init__(dest=dest, **options)  # type: ignore[arg-type]
        self.whole_help, self._separator = whole_help, separator

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        given: frozenset[str] = getattr(namespace, "given", frozenset())
        value = self.const if self.nargs == 0 else values
        if self._separator and self.dest in given:
            value = f"{getattr(namespace, self.dest)}{self._separator}{value}"
        setattr(namespace, self.dest, value)
        namespace.given = given | {self.dest}


class _Foreign(argparse.Action):
    """The action of a `LlamaFlag`."""

    def __init__(self, *, foreign: LlamaFlag, dest: str, **options: object) -> None:
        super().__init__(dest=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)  # type: ignore[arg-type]
        self._foreign = foreign

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        foreign = self._foreign
        if foreign.refused:
            parser.exit(2, f"slotcache: {option_string} is not supported: {foreign.says}\n")
        if foreign.says:
            namespace.notes = [*namespace.notes, f"{option_string} has no effect: {foreign.says}"]


def _argument_type(setting: Setting) -> Callable[[str], Value]:
    """Return a function that parses a setting's value.

    The returned function raises argparse's error, which names the flag.
    """

    def parse(text: str) -> Value:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def variable_of(setting: Setting) -> str | None:
    """Return the environment variable that sets a setting, or None if no variable sets it."""
    return next((name for name in setting.variables if name in os.environ), None)


def from_environment(setting: Setting) -> Value:
    variable = variable_of(setting)
    if variable is None:
        return setting.default
    try:
        return setting.parse(os.environ[variable])
    except ValueError as error:
        raise SystemExit(f"slotcache: {variable}={os.environ[variable]!r}: {error}") from None
