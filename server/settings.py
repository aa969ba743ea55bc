"""Every setting, once: flags, environment, help, /props and the table in the documentation come from the fields of `Settings`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, Self, TypeVar, get_args, get_type_hints

from ..slots.eviction import POLICIES

Value = str | int | bool
T = TypeVar("T")
Order = Literal["auto", "retrieval", "sorted", "greedy"]  # the other policies are for benches, and some cost too much
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
FlashAttention = Literal["on", "off", "auto"]
Dedup = Literal["auto", "off"]
ORDERS: tuple[Order, ...] = get_args(Order)


def row(
    default: T,
    flags: tuple[str, ...],
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int = 1 << 31,
) -> T:
    """Declare a field of `Settings`. choices: where they are not in its type. least, most: of a number."""
    about = {"flags": flags, "help": help, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=about)


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a server. A `Literal` lists the values that a setting may have."""

    model: str = row("", ("-m", "--model"), "the GGUF file to serve; without one, a small built-in model")
    hf_repo: str = row("", ("-hf", "--hf-repo"), "a Hugging Face repository, user/repo[:quant], to fetch the model from")
    offline: bool = row(False, ("--offline",), "with -hf, use only what is in the local cache")
    alias: str = row("", ("-a", "--alias"), "the model's name in answers; without one, the file's name")
    host: str = row("127.0.0.1", ("--host",), "address to listen on")
    port: int = row(8080, ("--port",), "port to listen on", most=65535)
    api_key: str = row("", ("--api-key",), "if set, requests must carry it as `Authorization: Bearer ...`")
    allowed_hosts: str = row("", ("--allowed-hosts",), "host names of this server beside loopback's and --host, separated by commas; *: any")
    cors_origins: str = row("", ("--cors-origins",), "origins whose web pages may send requests, such as http://localhost:3000, separated by commas; *: any")
    ctx_size: int = row(0, ("-c", "--ctx-size"), "KV cells in the pool that all requests share; 0: the length that the model was trained for, at most 16384")
    parallel: int = row(4, ("-np", "--parallel"), "lanes: requests that run at the same time", least=1, most=127)
    batch_size: int = row(512, ("-b", "--batch-size"), "most tokens a step computes", least=1)
    ubatch_size: int = row(512, ("-ub", "--ubatch-size"), "most tokens a kernel computes", least=1)
    prefill_budget: int = row(512, ("--prefill-budget",), "most prompt tokens a step computes while other requests generate", least=1)
    cache_ram: int = row(8192, ("-cram", "--cache-ram"), "MiB of host memory for idle KV, at most half of what is free; 0: idle KV stays on the device until cells run out")
    cache_dir: str = row("", ("--cache-dir",), "folder where idle KV is kept for the next start of the server; it reveals prompts and can change answers, so only its owner may read it, and the server refuses a folder that other users may write to")
    cache_disk: int = row(8192, ("--cache-disk",), "size limit of --cache-dir, MiB, all models and settings together; the least recently used runs leave first", least=0)
    slot_save_path: str = row("", ("--slot-save-path",), "folder for llama-server's `POST /slots/{id}?action=save` and `restore`, which only its owner may write to; without one they are refused")
    eviction: str = row("pgdsf", ("--eviction",), "which idle KV leaves first when a tier is full: pgdsf counts use, cost and age", choices=tuple(POLICIES))
    idle_cells: int = row(0, ("--idle-cells",), "cells on the device that may hold idle KV when a request starts; the rest moves to host memory")
    window: int = row(8, ("--window",), "how many later requests, with more of their prompt cached, may overtake a waiting request")
    max_queue: int = row(256, ("--max-queue",), "most requests that wait; one more is answered 429")
    threads: int = row(0, ("-t", "--threads"), "CPU threads; 0: one for each core")
    gpu_layers: int = row(9999, ("-ngl", "--gpu-layers"), "layers on the GPU; all of them where a GPU is compiled in")
    flash_attn: FlashAttention = row("auto", ("-fa", "--flash-attn"), "flash attention: much faster; without it, reuse on the CPU is exact to the bit for one request at a time")
    cache_type_k: KvType = row("f16", ("-ctk", "--cache-type-k"), "data type of keys; on a CPU only f16 and f32 are fast")
    cache_type_v: KvType = row("f16", ("-ctv", "--cache-type-v"), "data type of values, likewise (quantised: flash attention only)")
    repack: bool = row(False, ("--repack",), "let the CPU repack weights (AMX and the like): faster prefill, not exact to the bit")
    cache_prompt: bool = row(False, ("--cache-prompt",), "default of a request's `cache_prompt`")
    document_order: Order = row("auto", ("--document-order",), "default of a request's `document_order`")
    dedup: Dedup = row("auto", ("--dedup",), "default of a request's `dedup`; auto: a document that an earlier turn of the conversation holds is not shown again but referred to")
    order_hint: bool = row(True, ("--order-hint",), "default of a request's `order_hint`: state the retrieval ranking after reordered documents")
    conversations: int = row(1000, ("--conversations",), "conversations that are stored; the least recently used leaves first; 0: none")
    conversation_ram: int = row(256, ("--conversation-ram",), "MiB that stored conversations may take")
    conversation_ttl: int = row(86400, ("--conversation-ttl",), "seconds after its last use that a conversation stays stored; 0: no limit")
    idle_prefill: bool = row(True, ("--idle-prefill",), "while the server is idle, prefill the start of each conversation's next turn")
    idle_sets: int = row(0, ("--idle-sets",), "after a chat's first answer, while the server is idle, prefill this many sets of its documents at the front of a prompt, where other chats can reuse them: each document alone, then pairs, and so on")
    chat_template_file: str = row("", ("--chat-template-file",), "a Jinja chat template to use instead of the model's")
    max_body: int = row(32, ("--max-body",), "largest request body, MiB")
    check: bool = row(False, ("--check",), "check the cache's invariants whenever the server is idle")
    verbose: bool = row(False, ("-v", "--verbose"), "log every step of llama.cpp's start")
    # fmt: on

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """Return the settings among parsed command-line arguments."""
        return cls(**{setting.name: getattr(arguments, setting.name) for setting in SETTINGS})

    def shown(self) -> dict[str, Value]:
        """Return all settings but the secret one, the API key."""
        return {setting.name: getattr(self, setting.name) for setting in SETTINGS if setting.name != "api_key"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. The environment may hold a flag's value, as SLOTCACHE_<NAME>; the command line wins."""

    name: str
    default: Value
    flags: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    least: int
    most: int

    @property
    def variable(self) -> str:
        return f"SLOTCACHE_{self.name.upper()}"

    def parse(self, text: str) -> Value:
        """Return the value that a text stands for. Raises ValueError."""
        if isinstance(self.default, bool):
            return parse_switch(text)
        if self.choices and text not in self.choices:
            raise ValueError(f"expected one of {', '.join(self.choices)}")
        if isinstance(self.default, str):
            return text
        number = int(text)
        if not self.least <= number <= self.most:
            raise ValueError(f"expected {self.least} to {self.most}")
        return number


def parse_switch(text: str) -> bool:
    """Parse on/off, true/false, yes/no or 1/0. Raises ValueError."""
    if text.lower() in ("on", "true", "1", "yes"):
        return True
    if text.lower() in ("off", "false", "0", "no"):
        return False
    raise ValueError("expected on or off")


def _table() -> tuple[Setting, ...]:
    kinds, unset = get_type_hints(Settings), Settings()
    return tuple(
        Setting(
            name=declared.name,
            default=getattr(unset, declared.name),
            flags=declared.metadata["flags"],
            help=declared.metadata["help"],
            choices=declared.metadata["choices"] or get_args(kinds[declared.name]),
            least=declared.metadata["least"],
            most=declared.metadata["most"],
        )
        for declared in fields(Settings)
    )


SETTINGS = _table()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for every row. Switches take an optional on/off: `--cache-prompt`, `--cache-prompt off`."""
    for setting in SETTINGS:
        is_switch = isinstance(setting.default, bool)
        parser.add_argument(
            *setting.flags,
            dest=setting.name,
            default=_from_environment(setting),
            help=f"{setting.help} (default: {_written(setting.default)})".replace("%", "%%"),
            type=_argument_type(setting),
            metavar="on|off" if is_switch else "|".join(setting.choices) or type(setting.default).__name__,
            nargs="?" if is_switch else None,
            const=True if is_switch else None,
        )


def as_markdown() -> str:
    """Return the table of settings for the documentation."""
    rows = [
        f"| `{'`, `'.join(setting.flags)}` | `{setting.variable}` | {_written(setting.default) or '-'} | {setting.help} |"
        for setting in SETTINGS
    ]
    return "\n".join(["| flag | environment | default | what it does |", "|---|---|---|---|", *rows])


def _argument_type(setting: Setting) -> Callable[[str], Value]:
    """Return a parser that raises argparse's error, which names the flag."""

    def parse(text: str) -> Value:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def _from_environment(setting: Setting) -> Value:
    text = os.environ.get(setting.variable)
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise SystemExit(f"slotcache: {setting.variable}={text!r}: {error}") from None


def _written(value: Value) -> str:
    """Return a value as one writes it on the command line."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(as_markdown())
