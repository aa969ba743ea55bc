"""Every setting, once: the flags, the environment, the help, /props and the README's table all come from this table."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from ..slots.eviction import POLICIES


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. A flag's value may also stand in the environment, as SLOTCACHE_<NAME>; the command line wins."""

    name: str
    flags: tuple[str, ...]
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    least: int = 0  # of a number
    most: int = 1 << 31

    @property
    def variable(self) -> str:
        return f"SLOTCACHE_{self.name.upper()}"

    def parse(self, text: str) -> Any:
        """A value from text. Raises ValueError."""
        if isinstance(self.default, bool):
            return parse_switch(text)
        if self.choices and text not in self.choices:
            raise ValueError(f"expected one of {', '.join(self.choices)}")
        value = type(self.default)(text)
        if isinstance(value, int) and not self.least <= value <= self.most:
            raise ValueError(f"expected {self.least} to {self.most}")
        return value


def parse_switch(text: str) -> bool:
    """on/off, true/false, 1/0. Raises ValueError."""
    if text.lower() in ("on", "true", "1", "yes"):
        return True
    if text.lower() in ("off", "false", "0", "no"):
        return False
    raise ValueError("expected on or off")


ORDERS = ("auto", "retrieval", "sorted", "greedy")  # documented; other policies are for benches, and some cost too much
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

# fmt: off
SETTINGS = (
    Setting("model", ("-m", "--model"), "", "the GGUF file to serve; without one, a small built-in model"),
    Setting("hf_repo", ("-hf", "--hf-repo"), "", "a Hugging Face repository, user/repo[:quant], to fetch the model from"),
    Setting("offline", ("--offline",), False, "with -hf, use only what is in the local cache"),
    Setting("alias", ("-a", "--alias"), "", "the model's name in answers; the file's name without one"),
    Setting("host", ("--host",), "127.0.0.1", "address to listen on"),
    Setting("port", ("--port",), 8080, "port to listen on", most=65535),
    Setting("api_key", ("--api-key",), "", "if set, requests must carry it as `Authorization: Bearer ...`"),
    Setting("allowed_hosts", ("--allowed-hosts",), "", "names by which the server may be called, beside loopback's and --host, with commas between them; *: any"),
    Setting("cors_origins", ("--cors-origins",), "", "origins whose web pages may ask, such as http://localhost:3000, with commas between them; *: any"),
    Setting("ctx_size", ("-c", "--ctx-size"), 0, "KV cells in the pool that all requests share; 0: what the model was trained for, at most 16384"),
    Setting("parallel", ("-np", "--parallel"), 4, "lanes: requests that run at the same time", least=1, most=127),
    Setting("batch_size", ("-b", "--batch-size"), 512, "most tokens a step computes", least=1),
    Setting("ubatch_size", ("-ub", "--ubatch-size"), 512, "most tokens a kernel computes", least=1),
    Setting("prefill_budget", ("--prefill-budget",), 512, "most prompt tokens a step computes while others are generating", least=1),
    Setting("cache_ram", ("-cram", "--cache-ram"), 8192, "MiB of host memory for idle KV, at most half of what is free; 0: idle KV stays on the device until cells run out"),
    Setting("cache_dir", ("--cache-dir",), "", "folder where idle KV is kept for the next start of the server; it tells what was asked and can change answers, so only its owner may read it, and it is refused if others may write to it"),
    Setting("cache_disk", ("--cache-disk",), 8192, "size limit of --cache-dir, MiB, all models and settings together; the least recently used leaves first", least=0),
    Setting("slot_save_path", ("--slot-save-path",), "", "folder for llama-server's `POST /slots/{id}?action=save` and `restore`, which only its owner may write to; without one they are refused"),
    Setting("eviction", ("--eviction",), "pgdsf", "which idle KV leaves first when a tier is full: pgdsf counts use, cost and age", tuple(POLICIES)),
    Setting("idle_cells", ("--idle-cells",), 0, "cells on the device that may hold idle KV when a request starts; the rest moves to host memory"),
    Setting("window", ("--window",), 8, "how many later requests, with more of their prompt cached, may overtake one that waits"),
    Setting("max_queue", ("--max-queue",), 256, "most requests that wait; one more is answered 429"),
    Setting("threads", ("-t", "--threads"), 0, "CPU threads; 0: one for each core"),
    Setting("gpu_layers", ("-ngl", "--gpu-layers"), 9999, "layers on the GPU; all of them where a GPU is compiled in"),
    Setting("flash_attn", ("-fa", "--flash-attn"), "auto", "flash attention: much faster; without it, reuse on the CPU is exact to the bit for one request at a time", ("on", "off", "auto")),
    Setting("cache_type_k", ("-ctk", "--cache-type-k"), "f16", "what keys are stored as; on a CPU only f16 and f32 are fast", KV_TYPES),
    Setting("cache_type_v", ("-ctv", "--cache-type-v"), "f16", "what values are stored as, likewise (quantised: flash attention only)", KV_TYPES),
    Setting("repack", ("--repack",), False, "let the CPU repack weights (AMX and the like): faster prefill, not exact to the bit"),
    Setting("cache_prompt", ("--cache-prompt",), False, "what `cache_prompt` is where a request does not say"),
    Setting("document_order", ("--document-order",), "auto", "what `document_order` is where a request does not say", ORDERS),
    Setting("dedup", ("--dedup",), "auto", "auto: a document that an earlier turn of the conversation holds is not shown again but referred to, where a request does not say", ("auto", "off")),
    Setting("order_hint", ("--order-hint",), True, "say the retrieval ranking after reordered documents, where a request does not say"),
    Setting("conversations", ("--conversations",), 1000, "conversations that are remembered; the least recently used leaves first; 0: none"),
    Setting("conversation_ram", ("--conversation-ram",), 256, "MiB that remembered conversations may take"),
    Setting("conversation_ttl", ("--conversation-ttl",), 86400, "seconds after its last use that a conversation is remembered; 0: no end"),
    Setting("idle_prefill", ("--idle-prefill",), True, "while nothing else is to be computed, compute what a conversation's next turn will start with"),
    Setting("idle_sets", ("--idle-sets",), 0, "after a chat's first answer, while nothing else is to be computed, bring so many sets of its documents to the front, where other chats can reuse them: each document alone, then pairs, and so on"),
    Setting("chat_template_file", ("--chat-template-file",), "", "a Jinja chat template to use instead of the model's"),
    Setting("max_body", ("--max-body",), 32, "largest request body, MiB"),
    Setting("check", ("--check",), False, "check the cache's invariants whenever the server is idle"),
    Setting("verbose", ("-v", "--verbose"), False, "log every step of llama.cpp's start"),
)
# fmt: on


class Settings(argparse.Namespace):
    """The value of every row, as an attribute of its name."""

    def shown(self) -> dict[str, Any]:
        """All that may be told: every row but the key."""
        return {setting.name: getattr(self, setting.name) for setting in SETTINGS if setting.name != "api_key"}

    def __getattr__(self, name: str) -> Any:  # for type checkers: rows are attributes
        raise AttributeError(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for every row. Switches take an optional on/off: `--cache-prompt`, `--cache-prompt off`."""
    for setting in SETTINGS:
        if isinstance(setting.default, bool):
            kind: dict[str, Any] = {"nargs": "?", "const": True, "type": _typed(setting), "metavar": "on|off"}
        else:
            kind = {"type": _typed(setting), "metavar": "|".join(setting.choices) or type(setting.default).__name__}
        parser.add_argument(
            *setting.flags,
            dest=setting.name,
            default=_from_environment(setting),
            help=f"{setting.help} (default: {_shown(setting.default)})".replace("%", "%%"),
            **kind,
        )


def defaults(**changed: Any) -> Settings:
    """Settings as they are without flags, with some changed: for tests and for embedding the server."""
    return Settings(**({setting.name: setting.default for setting in SETTINGS} | changed))


def table() -> str:
    """The README's table of settings, in Markdown."""
    rows = [
        f"| `{'`, `'.join(setting.flags)}` | `{setting.variable}` | {_shown(setting.default) or '-'} | {setting.help} |"
        for setting in SETTINGS
    ]
    return "\n".join(["| flag | environment | default | what it does |", "|---|---|---|---|", *rows])


def _typed(setting: Setting) -> Any:
    def parse(text: str) -> Any:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def _from_environment(setting: Setting) -> Any:
    text = os.environ.get(setting.variable)
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise SystemExit(f"slotcache: {setting.variable}={text!r}: {error}") from None


def _shown(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
