"""All settings, frozen: each field has its flag, variable, default and help."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

from ...models.sampling_params import NUMBER, NUMBERS, ORDER, SAMPLERS, Numbers
from ...ordering.policy import BestPlace, Order
from ...ordering.prompt import ASK_FOR_IDS
from ...slots.eviction import POLICIES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# ---- Setting ------------------------------------------------------------------------------------------------------------
# A row of a table of settings: the field of a dataclass becomes flags, variables, help and documentation.

Value = str | int | float | bool
T = TypeVar("T")
OF_LLAMA = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""The sampling parameters for which llama-server, too, has environment variables."""


def _version() -> str:
    try:
        return version("slotcache")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"


VERSION = _version()
"""Of slotcache, as pyproject.toml has it."""


class SettingsError(Exception):
    """Settings that no server can be started with."""


def row(
    default: T,
    flags: tuple[str, ...],
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int = 1 << 31,
    words: Mapping[str, int] | None = None,
    fixed: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    separator: str = "",
    llama: str = "",
) -> T:
    """Declare a field of `Settings`.

    choices: the values, if the field's type lists none. least, most: of a number. words: texts that stand for numbers.
    fixed: flags without a value, and the value that each sets. refused: values that are not supported, and why. separator:
    joins the values of a repeated flag. llama: llama-server's variable.
    """
    about = {"flags": flags, "help": help, "choices": choices, "least": least, "most": most, "clamps": False}
    about |= {"words": words or {}, "fixed": fixed or {}, "refused": refused or {}, "separator": separator, "llama": llama}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. The environment may hold a flag's value, as SLOTCACHE_<NAME>; the command line wins.

    words, fixed, refused, separator, llama: as in `row`; fixed includes the flags that turn a switch off. clamps: a number
    outside the range becomes the nearest one in the range.
    """

    name: str
    default: Value
    flags: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    least: int | float
    most: int | float
    clamps: bool
    words: Mapping[str, int]
    fixed: Mapping[str, str]
    refused: Mapping[str, str]
    separator: str
    llama: str

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def may_be_bare(self) -> bool:
        """Whether the flag alone means on."""
        return self.is_switch or {"on", "off"} <= {*self.choices}

    @property
    def variable(self) -> str:
        return f"SLOTCACHE_{self.name.upper()}"

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables of the environment that may hold its value; an earlier one wins."""
        return (self.variable, *filter(None, [self.llama]))

    def parse(self, text: str) -> Value:
        """Return the value that a text stands for. Raises ValueError."""
        if self.is_switch:
            return parse_switch(text)
        if self.choices:
            return self._choose(text)
        if isinstance(self.default, str):
            return text
        number = self.words[text] if text in self.words else _parse_number(text, type(self.default))
        nearest = min(max(number, self.least), self.most)
        if not isfinite(number) or (nearest != number and not self.clamps):
            raise ValueError(f"expected {self.least} to {self.most}")
        return nearest

    def _choose(self, text: str) -> str:
        if self.may_be_bare:
            with contextlib.suppress(ValueError):
                return written(parse_switch(text))
        found = next((choice for choice in self.choices if choice.lower() == text.lower()), None)
        if found is None:
            raise ValueError(self.refused.get(text.lower()) or f"expected one of {', '.join(self.choices)}")
        return found


def listed(text: str) -> frozenset[str]:
    """Split a setting that holds several values, separated by commas."""
    return frozenset(filter(None, map(str.strip, text.split(","))))


def parse_switch(text: str) -> bool:
    """Parse on/off, true/false, yes/no or 1/0. Raises ValueError."""
    if text.lower() in ("on", "true", "1", "yes", "enabled"):
        return True
    if text.lower() in ("off", "false", "0", "no", "disabled"):
        return False
    raise ValueError("expected on or off")


def _parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    """Parse a number. Raises ValueError."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError("expected a whole number" if kind is int else "expected a number") from None


def _negations(default: Value, flags: tuple[str, ...]) -> dict[str, str]:
    """Return the flags that turn a switch off: `--no-` in front of each long one."""
    return {f"--no-{flag[2:]}": "off" for flag in flags if flag.startswith("--")} if isinstance(default, bool) else {}


def table_of(unset: DataclassInstance) -> tuple[Setting, ...]:
    """Return the settings that the fields of a dataclass declare. unset: an object with the defaults."""
    kinds = get_type_hints(type(unset))
    declared = [one for one in fields(unset) if one.metadata]
    rows = [_setting(one, getattr(unset, one.name), kinds[one.name]) for one in declared]
    return tuple(sorted(rows, key=lambda setting: setting.name in NUMBERS))


def _setting(declared: Field[Value], default: Value, kind: type) -> Setting:
    about = _about_number(declared.name) if NUMBER in declared.metadata else dict(declared.metadata)
    about["choices"] = about["choices"] or get_args(kind)
    about["fixed"] = about["fixed"] | _negations(default, about["flags"])
    return Setting(name=declared.name, default=default, **about)


def _about_number(name: str) -> dict[str, Any]:
    """Return the row of a parameter of sampling."""
    number = NUMBERS[name]
    return {
        "flags": number.flags,
        "help": f"default of a request's `{name}`: {number.help}",
        "choices": (),
        "least": number.least,
        "most": number.most,
        "clamps": not number.is_strict,
        "words": {},
        "fixed": {},
        "refused": {},
        "separator": "",
        "llama": f"LLAMA_ARG_{name.upper()}" if name in OF_LLAMA else "",
    }


def written(value: Value) -> str:
    """Return a value as one writes it on the command line."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


SOCKET = ".sock"  # ends the name of a socket file, as in llama-server
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
TENSOR = "it is an experiment of llama.cpp: --fit cannot tell what each GPU would hold, and KV was never saved from it here"
SplitMode = Literal["none", "layer", "row"]
RopeKind = Literal["", "none", "linear", "yarn"]
FlashAttention = Literal["on", "off", "auto"]
Dedup = Literal["auto", "off"]
Attention = Literal["joint", "separate"]
Draft = Literal["off", "lookup", "model"]
Switch = Literal["on", "off", "auto"]
Volatile = Literal["off", "move"]
LogFormat = Literal["text", "json"]
Pooling = Literal["", "none", "mean", "cls", "last", "rank"]
ReasoningFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Numbers):
    """The settings of a server. A `Literal` lists the values of a setting. `Numbers` has defaults for fields of requests."""

    model: str = row("", ("-m", "--model"), "GGUF file to serve, or `smollm2`, a small chat model that is fetched once; without one, a small built-in model, so that a first start needs no file. Repeat it, or write NAME=FILE, to serve several: requests choose among them by `model`", separator="\n", llama="LLAMA_ARG_MODEL")
    models_dir: str = row("", ("--models-dir",), "folder whose GGUF files are served too, each under its file's name; a model in several files has a folder of its own there", llama="LLAMA_ARG_MODELS_DIR")
    models_loaded: int = row(1, ("--models-loaded", "--models-max"), "how many of several models may be in memory at a time; 1, since each needs weights and KV of its own. The others keep their KV in host memory and in --cache-dir", least=1, most=64, llama="LLAMA_ARG_MODELS_MAX")
    model_turn: int = row(30, ("--model-turn",), "seconds a busy model may keep the device while another waits; short turns spend the time on loads. An idle model yields at once, or after a wait as long as its load where such a wait brought a request", least=0)
    hf_repo: str = row("", ("-hf", "-hfr", "--hf-repo"), "Hugging Face repository to fetch the model from, once: user/repo[:quant]", llama="LLAMA_ARG_HF_REPO")
    hf_file: str = row("", ("-hff", "--hf-file"), "with -hf, the file of the repository to fetch; without it, the one that the quantisation names", llama="LLAMA_ARG_HF_FILE")
    offline: bool = row(False, ("--offline",), "with -hf, use only what the local cache has", llama="LLAMA_ARG_OFFLINE")
    alias: str = row("", ("-a", "--alias"), "the model's name in answers, or several, separated by commas: the first of the alphabet is the name, as in llama-server; without one, the file's name", llama="LLAMA_ARG_ALIAS")
    any_model: bool = row(False, ("--any-model",), "serve the model under any name, for clients whose model cannot be set: `GET /v1/models/{id}` knows each name, and an answer has the name that its request used; off: it has the model's own")
    tags: str = row("", ("--tags",), "words about the model, separated by commas, which `GET /v1/models` shows", llama="LLAMA_ARG_TAGS")
    host: str = row("127.0.0.1", ("--host",), "address to listen on, by default of this machine alone; or several, separated by commas. One that ends in .sock is a socket file, which the umask opens to others", llama="LLAMA_ARG_HOST")
    port: int = row(8080, ("--port",), "port to listen on, by default llama-server's; `--ollama` is short for 11434, Ollama's", most=65535, fixed={"--ollama": "11434"}, llama="LLAMA_ARG_PORT")
    ssl_key_file: str = row("", ("--ssl-key-file",), "PEM file with the private key of --ssl-cert-file, without a password: then the server speaks HTTPS alone", llama="LLAMA_ARG_SSL_KEY_FILE")
    ssl_cert_file: str = row("", ("--ssl-cert-file",), "PEM file with the certificate of this server, followed by those that lead to its authority; read at the start", llama="LLAMA_ARG_SSL_CERT_FILE")
    api_key: str = row("", ("--api-key",), "key that requests must carry, as `Authorization: Bearer ...` or `X-Api-Key: ...`; several are separated by commas; without one, none is needed", llama="LLAMA_API_KEY")
    api_key_file: str = row("", ("--api-key-file",), "file with more such keys, one a line; # begins a comment", llama="LLAMA_ARG_API_KEY_FILE")
    allowed_hosts: str = row("", ("--allowed-hosts",), "host names of this server beside loopback's and --host, separated by commas; all others are refused, so that no web page reaches it under a name of its own; *: any")
    cors_origins: str = row("", ("--cors-origins",), "origins whose web pages may send requests, such as http://localhost:3000, separated by commas; localhost: of this machine, at any port; *: any; without one, none, since any page in a browser could ask", llama="LLAMA_ARG_CORS_ORIGINS")
    ctx_size: int = row(0, ("-c", "--ctx-size"), "KV cells in the pool that all requests share; 0: the model's trained length, at most the 65536 that --fit finds memory for, since agents open with 25,000 tokens, or 16384 without it", most=(1 << 31) - 1, llama="LLAMA_ARG_CTX_SIZE")
    kv_unified: bool = row(True, ("-kvu", "--kv-unified"), "a request may fill the whole pool, since idle slots need none of it; off: at most an equal share for each slot, as in llama-server with -np", fixed={"-no-kvu": "off"}, llama="LLAMA_ARG_KV_UNIFIED")
    parallel: int = row(4, ("-np", "--parallel"), "slots: requests that run at the same time. On two cores a token of an answer takes 24 ms with 4 busy slots, 300 ms with 8", least=1, most=127, words={"-1": 4}, llama="LLAMA_ARG_N_PARALLEL")
    slot_prompt_similarity: float = row(0.1, ("-sps", "--slot-prompt-similarity"), "share of a prompt, from 0 to 1, that a slot's history must match for the prompt to run there, as in llama-server; 0: no match. A slot whose whole last prompt is continued goes first; without a match the least recently used one runs the prompt", most=1)
    batch_size: int = row(512, ("-b", "--batch-size"), "most tokens a step computes; as many as -ub, so that a step is one pass over the weights", least=1, llama="LLAMA_ARG_BATCH")
    ubatch_size: int = row(512, ("-ub", "--ubatch-size"), "most tokens a kernel computes, as in llama-server", least=1, llama="LLAMA_ARG_UBATCH")
    prefill_budget: int = row(512, ("--prefill-budget",), "most prompt tokens a step computes while other requests generate; as many as -b, since --max-stall bounds the time", least=1)
    max_stall: int = row(300, ("--max-stall",), "ms that running streams wait for prompt tokens of others in a step, or for one chunk of 64 tokens where that takes longer; shorter pauses mean a longer wait for a first token; 0: no limit", least=0)
    hang_after: int = row(300, ("--hang-after",), "seconds that a step may take, and one more for each of its tokens, until `/health` answers 503 and the log reports a hang: a slow machine is no hang; 0: never", least=0)
    draft: Draft = row("off", ("--draft",), "default of a request's `draft`; lookup: tokens that followed the same words further up are checked in one step, if that is likely to save time; model: tokens of --draft-model, whose default this is; off, since only answers that quote gain")
    draft_model: str = row("", ("-md", "--draft-model", "--model-draft", "--spec-draft-model"), "GGUF file with the vocabulary of -m and far fewer weights, whose tokens a step checks, where that is likely to save time; no answer depends on it")
    spec_type: str = row("none", ("--spec-type",), "draft-mtp: the multi-token head of the model's file drafts, if it has one, as a --draft-model would; none, since no head was tried with real weights yet; llama-server's other types have no effect", separator=",", llama="LLAMA_ARG_SPEC_TYPE")
    cache_ram: int = row(8192, ("-cram", "--cache-ram"), "MiB of host memory for idle KV, as in llama-server, but at most half of what is free; 0: idle KV stays on the device until cells run out. On a CPU a step may borrow as much as the KV pool takes, and gives it back", words={"-1": 1 << 31}, llama="LLAMA_ARG_CACHE_RAM")
    cache_dir: str = row("", ("--cache-dir",), "folder that keeps idle KV and stored conversations over a restart. It reveals prompts and can change answers, so only its owner may read it, and a folder that others may write to is refused; without one, the cache ends with the server")
    cache_disk: int = row(8192, ("--cache-disk",), "MiB that KV in --cache-dir may take, all models and settings together; as much as --cache-ram. The runs of the least worth are evicted first", least=0)
    slot_save_path: str = row("", ("--slot-save-path",), "folder for llama-server's `POST /slots/{id}?action=save` and `restore`, which only its owner may write to; without one they are refused")
    eviction: str = row("pgdsf", ("--eviction",), "which idle KV a full tier evicts first; pgdsf, RAGCache's policy, counts use, cost and age", choices=tuple(POLICIES))
    idle_cells: int = row(0, ("--idle-cells",), "cells on the device that may hold idle KV when a request starts; 0, since every step scans them. The rest is offloaded to host memory, from a GPU only if that saves time")
    window: int = row(8, ("--window",), "how many later requests of its priority may overtake a waiting one because they reuse more of the cache or are shorter, and how many may follow an earlier one because they share what it reuses; more would help the median and hurt the slowest. A request waiting for a given slot, or for the running prompts, may be overtaken by any number")
    max_queue: int = row(256, ("--max-queue",), "most requests that wait; one more is answered 429, so that waiting has a bound")
    threads: int = row(0, ("-t", "--threads"), "CPU threads; 0: one for each fast core that this process may use, since a step waits for the slowest", words={"-1": 0}, llama="LLAMA_ARG_THREADS")
    gpu_layers: int = row(-1, ("-ngl", "--gpu-layers", "--n-gpu-layers"), "layers on the GPU, the last ones of the model first; -1 or auto: as many as --fit chooses, else all; -2 or all: all", least=-2, words={"auto": -1, "all": -2}, llama="LLAMA_ARG_N_GPU_LAYERS")
    n_cpu_moe: int = row(0, ("-ncmoe", "--n-cpu-moe"), "keep the experts of this many layers, from the first on, in host memory; without it, --fit chooses", llama="LLAMA_ARG_N_CPU_MOE")
    cpu_moe: bool = row(False, ("-cmoe", "--cpu-moe"), "keep the experts of all layers in host memory", llama="LLAMA_ARG_CPU_MOE")
    override_tensor: str = row("", ("-ot", "--override-tensor"), "where tensors stand whose names match: PATTERN=BUFFER, such as `ffn_down=CPU`, or several, separated by commas", separator=",", llama="LLAMA_ARG_OVERRIDE_TENSOR")
    device: str = row("", ("-dev", "--device"), "GPUs that hold layers, by the names that `slotcache doctor` has, separated by commas; none: no GPU; without it, all", llama="LLAMA_ARG_DEVICE")
    split_mode: SplitMode = row("layer", ("-sm", "--split-mode"), "how several GPUs share a model; layer: each has layers; row: each has rows of its matrices, where their backend can; none: --main-gpu has all", refused={"tensor": TENSOR}, llama="LLAMA_ARG_SPLIT_MODE")
    tensor_split: str = row("", ("-ts", "--tensor-split"), "share of the layers, or of the rows, that each GPU has, in their order: 3,1; without it, by their free memory", llama="LLAMA_ARG_TENSOR_SPLIT")
    main_gpu: int = row(0, ("-mg", "--main-gpu"), "the GPU that has all with --split-mode none, and KV and small matrices with row: its place among them, from 0", least=-1, llama="LLAMA_ARG_MAIN_GPU")
    rope_scaling: RopeKind = row("", ("--rope-scaling",), "how rotary positions are scaled; without it, as the model's file says", llama="LLAMA_ARG_ROPE_SCALING_TYPE")
    rope_scale: float = row(0.0, ("--rope-scale",), "scale rotary positions for a context so many times as long; 0: as the file says", llama="LLAMA_ARG_ROPE_SCALE")
    rope_freq_base: float = row(0.0, ("--rope-freq-base",), "the base of the frequencies of rotary positions; 0: as the file says", llama="LLAMA_ARG_ROPE_FREQ_BASE")
    rope_freq_scale: float = row(0.0, ("--rope-freq-scale",), "the factor of these frequencies, 1/N in place of --rope-scale N; 0: as the file says", llama="LLAMA_ARG_ROPE_FREQ_SCALE")
    yarn_orig_ctx: int = row(0, ("--yarn-orig-ctx",), "YaRN: the tokens that the model was trained for before it was scaled; 0: as the file says", llama="LLAMA_ARG_YARN_ORIG_CTX")
    yarn_ext_factor: float = row(-1.0, ("--yarn-ext-factor",), "YaRN: the share of extrapolation, 0: interpolation alone; -1: as the file says, else 1", least=-1, llama="LLAMA_ARG_YARN_EXT_FACTOR")
    yarn_attn_factor: float = row(-1.0, ("--yarn-attn-factor",), "YaRN: the factor of attention; -1: as the file says", least=-1, llama="LLAMA_ARG_YARN_ATTN_FACTOR")
    yarn_beta_slow: float = row(-1.0, ("--yarn-beta-slow",), "YaRN: below so many turns in the trained context a frequency is scaled whole; -1: as the file says", least=-1, llama="LLAMA_ARG_YARN_BETA_SLOW")
    yarn_beta_fast: float = row(-1.0, ("--yarn-beta-fast",), "YaRN: above so many turns a frequency stays as it is; -1: as the file says", least=-1, llama="LLAMA_ARG_YARN_BETA_FAST")
    override_kv: str = row("", ("--override-kv",), "KEY=TYPE:VALUE in place of what the model's file says, of type int, float, bool or str, such as `tokenizer.ggml.add_bos_token=bool:false`; may be given several times, or several separated by commas", separator=",")
    fit: bool = row(True, ("-fit", "--fit"), "fit these to the memory that is free, unless a flag gives them: cells (-c), slots (-np), the experts of a mixture (-ncmoe), layers on the GPU (-ngl); off: refuse to start where the model does not fit", llama="LLAMA_ARG_FIT")
    fit_target: int = row(1024, ("-fitt", "--fit-target"), "MiB that --fit leaves free on each device, as in llama-server: for the driver and other programs", llama="LLAMA_ARG_FIT_TARGET")
    fit_ctx: int = row(4096, ("-fitc", "--fit-ctx"), "cells below which --fit does not go, as in llama-server", least=1, llama="LLAMA_ARG_FIT_CTX")
    device_memory: int = row(0, ("--device-memory",), "MiB that weights, KV and buffers may take on each GPU, or in host memory without a GPU; 0: all that is free")
    flash_attn: FlashAttention = row("auto", ("-fa", "--flash-attn"), "flash attention: much faster, so auto is on where it works; off: reuse on the CPU is exact to the bit for one request at a time", llama="LLAMA_ARG_FLASH_ATTN")
    cache_type_k: KvType = row("f16", ("-ctk", "--cache-type-k"), "data type of keys, as in llama-server; on a CPU only f16 and f32 are fast", llama="LLAMA_ARG_CACHE_TYPE_K")
    cache_type_v: KvType = row("f16", ("-ctv", "--cache-type-v"), "data type of values, likewise (quantised: flash attention only)", llama="LLAMA_ARG_CACHE_TYPE_V")
    repack: Switch = row("auto", ("--repack",), "let the CPU use weights in another layout (AMX and the like), which is not exact to the bit; auto: with flash attention and without a GPU, if it is faster, which the first start of a model measures", fixed={"-nr": "off", "--no-repack": "off"}, llama="LLAMA_ARG_REPACK")
    cache_prompt: bool = row(False, ("--cache-prompt",), "default of a request's `cache_prompt`: whether it reads from the cache and stays there; off, since that takes memory, and others of its scope can time it", llama="LLAMA_ARG_CACHE_PROMPT")
    predict: int = row(-1, ("-n", "--predict", "--n-predict"), "default of a request's `max_tokens`; -1: no limit but the context", least=-1, llama="LLAMA_ARG_N_PREDICT")
    samplers: str = row(";".join(ORDER), ("--samplers",), "default of a request's `samplers`: names, separated by semicolons, in llama-server's order")
    sampling_seq: str = row("", ("--sampling-seq", "--sampler-seq"), f"the same in letters: {', '.join(f'{letter} {name}' for name, letter in SAMPLERS.items())}")
    dry_sequence_breaker: str = row("", ("--dry-sequence-breaker",), "text that ends a repeated sequence for --dry-multiplier, in place of the four that llama-server has; may be given several times; none: no text does", separator="\n")
    ignore_eos: bool = row(False, ("--ignore-eos",), "default of a request's `ignore_eos`")
    logit_bias: str = row("", ("-l", "--logit-bias"), "default of a request's `logit_bias`: a token's id and its bias, such as 15043+1 or 15043-inf; may be given several times", separator=",")
    document_order: Order = row("auto", ("--document-order",), "default of a request's `document_order`; auto: the order that reuses most")
    best: BestPlace = row("free", ("--best",), "default of a request's `best`: the place of the document of rank 1; first and last cost reuse")
    best_price_ms: int = row(0, ("--best-price-ms",), "default of a request's `best_price_ms`: the gain for which that document leaves its place; 0: `best` alone decides")
    documents_attention: Attention = row("joint", ("--documents-attention",), "default of a request's `documents_attention`; joint: a document sees those before it, as models are trained; separate: it sees none, and its KV serves at any place of a prompt, at some cost in quality")
    dedup: Dedup = row("auto", ("--dedup",), "default of a request's `dedup`; auto: a document that an earlier turn of the conversation shows is not shown again but referred to, which saves its tokens")
    tool_documents: Dedup = row("off", ("--tool-documents",), "default of a request's `tool_documents`; auto: lists of documents in tool results are ordered, and lines that an earlier result shows are not shown again; off, since that rewrites what a tool said")
    documents_in_text: Dedup = row("off", ("--documents-in-text",), "default of a request's `documents_in_text`; auto: lists of documents that programs paste into the text of messages are ordered, and shown once, like `documents`")
    order_hint: bool = row(True, ("--order-hint",), "default of a request's `order_hint`: state the retrieval ranking after reordered documents, so that the model knows it")
    volatile: Volatile = row("off", ("--volatile",), "default of a request's `volatile`; move: if a few lines in the instructions of a session change, such as a date, they stay as its first request had them, and the change is said after the last message; off, since that rewrites instructions")
    conversations: int = row(1000, ("--conversations",), "conversations that are stored; the least recently used is deleted first; 0: none")
    conversation_ram: int = row(256, ("--conversation-ram",), "MiB that stored conversations may take; beyond it the least recently used is deleted")
    conversation_ttl: int = row(86400, ("--conversation-ttl",), "seconds after its last use that a conversation stays stored, by default a day; 0: no limit")
    idle_prefill: bool = row(True, ("--idle-prefill",), "while the server is idle, prefill the prefix of each conversation's next turn, the rest of a prompt whose client disconnected after more than half of it, and the compacted history that a client is likely to send next; a request ends it")
    idle_sets: int = row(0, ("--idle-sets",), "after a chat's first answer, while the server is idle, prefill this many sets of its documents at the front of a prompt, where other chats can reuse them: each document alone, then pairs, and so on; 0, since each set takes prefill and host memory")
    chat_template: str = row("", ("--chat-template",), "chat template to use instead of the model's: a name, such as chatml or llama3, or Jinja", llama="LLAMA_ARG_CHAT_TEMPLATE")
    chat_template_file: str = row("", ("--chat-template-file",), "file with a Jinja chat template to use instead of the model's", llama="LLAMA_ARG_CHAT_TEMPLATE_FILE")
    sse_ping_interval: int = row(9, ("--sse-ping-interval",), "seconds of silence in a stream after which it gets an event that says nothing, so that neither a proxy nor a client hangs up; 9, so that none is silent for more than ten; -1: none", least=-1, llama="LLAMA_ARG_SSE_PING_INTERVAL")
    spm_infill: bool = row(False, ("--spm-infill",), "`/infill` shows the text after the gap first, as some models were trained")
    lora: str = row("", ("--lora",), "GGUF file with a LoRA adapter of the model; may be given several times, or several separated by commas", separator=",")
    lora_scaled: str = row("", ("--lora-scaled",), "likewise with a scale: FILE:SCALE", separator=",")
    lora_init_without_apply: bool = row(False, ("--lora-init-without-apply",), "begin with a scale of 0 for all adapters")
    embedding_model: str = row("", ("--embedding-model",), "GGUF file beside -m for the vectors of `POST /v1/embeddings` and --docs, or `minilm`, a small one for English that is fetched once; without one, --docs have `minilm` if it was fetched before; none: none")
    embedding_query_prefix: str = row("auto", ("--embedding-query-prefix",), "text before a question to --docs, for the embedder; auto: the one that its model was trained with, by the name in its file; empty: none")
    embedding_document_prefix: str = row("auto", ("--embedding-document-prefix",), "likewise before a document of --docs")
    rerank_model: str = row("", ("--rerank-model",), "GGUF file of a reranker beside -m, for `POST /v1/rerank` and --docs")
    embeddings: bool = row(False, ("--embeddings", "--embedding"), "answer `POST /v1/embeddings` with vectors of -m itself, which may be an encoder: such a model generates no text", llama="LLAMA_ARG_EMBEDDINGS")
    reranking: bool = row(False, ("--reranking", "--rerank"), "answer `POST /v1/rerank` with scores of -m itself", llama="LLAMA_ARG_RERANKING")
    pooling: Pooling = row("", ("--pooling",), "how the vectors of a text's tokens become one, for embeddings; without it, as the model's file says; rank: the same as --reranking", llama="LLAMA_ARG_POOLING")
    embd_normalize: int = row(2, ("--embd-normalize",), "norm that embeddings are divided by; 0: of the largest number, to 32,760; 1: taxicab; 2: Euclidean, as in llama-server; n: the n-norm; -1: none", least=-1, most=100)
    docs: str = row("", ("--docs",), "folder of documents, or a file, for questions with `retrieval`; may be given several times", separator="\n")
    docs_watch: bool = row(True, ("--docs-watch",), "notice changes below --docs; off: look for them at the start and at `POST /v1/sources/refresh`")
    docs_db: str = row("", ("--docs-db",), "folder for the index of --docs, which holds their text; one that others may write to is refused; without one, in the user's cache directory")
    docs_scope: str = row("", ("--docs-scope",), "the `cache_scope` whose requests may search --docs; without one, the common scope")
    docs_top_k: int = row(5, ("--docs-top-k",), "default of `retrieval.top_k`: most documents that a search adds to a question; each takes --chunk-tokens of the prompt", least=1, most=100)
    chunk_tokens: int = row(300, ("--chunk-tokens",), "about how many tokens a document of --docs has: long files are cut at headings and paragraphs", least=32, most=4096)
    read_ahead: int = row(0, ("--read-ahead",), "MiB of KV: while the server is idle, prefill the documents of --docs that questions are likely to find, each at the front of a prompt, up to this much; 0: none, since it takes memory and prefill", most=1 << 20)
    retrieval_prompt: str = row(ASK_FOR_IDS, ("--retrieval-prompt",), "text that asks the model for ids in a chat with `retrieval`, at the end of the system message; empty: nothing")
    reasoning_format: ReasoningFormat = row("auto", ("--reasoning-format",), "reasoning of a model; none: leave it in the content; all others: put it into `reasoning_content`", llama="LLAMA_ARG_THINK")
    reasoning_budget: int = row(-1, ("--reasoning-budget",), "most tokens of an answer's reasoning, after which it is ended; 0: at once; -1: no limit", least=-1, llama="LLAMA_ARG_THINK_BUDGET")
    reasoning_budget_message: str = row("", ("--reasoning-budget-message",), "text before the tag that ends reasoning at its limit", llama="LLAMA_ARG_THINK_BUDGET_MESSAGE")
    chat_template_kwargs: str = row("", ("--chat-template-kwargs",), "variables of the chat template, as JSON: the defaults of a request's `chat_template_kwargs`", llama="LLAMA_ARG_CHAT_TEMPLATE_KWARGS")
    reasoning: Switch = row("auto", ("-rea", "--reasoning"), "default of the template's `enable_thinking`; auto: on, if the template is one of a model that reasons", llama="LLAMA_ARG_REASONING")
    reasoning_effort: str = row("", ("--reasoning-effort",), "default of a request's `reasoning_effort`: low, medium, high, ...; without one, the template's own", llama="LLAMA_ARG_REASONING_EFFORT")
    reasoning_preserve: bool = row(True, ("--reasoning-preserve",), "reasoning of earlier answers stays in the prompt, where the template allows it, so that the prompt keeps its prefix", llama="LLAMA_ARG_REASONING_PRESERVE")
    prefill_assistant: bool = row(True, ("--prefill-assistant",), "continue an assistant's message at the end of a chat, instead of answering it, as in llama-server", llama="LLAMA_ARG_PREFILL_ASSISTANT")
    max_body: int = row(32, ("--max-body",), "largest request body, MiB, so that no client takes the memory of all")
    strict: bool = row(False, ("--strict",), "refuse requests with a field that this server does not know; off: such a field becomes a warning in the answer and in the log, since programs send many")
    opens_page: bool = row(False, ("--open",), "open the page in the browser once the model is loaded")
    ui: bool = row(True, ("--ui", "--webui"), "show a page for browsers at `/`", llama="LLAMA_ARG_UI")
    metrics: bool = row(True, ("--metrics",), "show `GET /metrics`, which has no text of a client", llama="LLAMA_ARG_ENDPOINT_METRICS")
    slots: bool = row(True, ("--slots",), "show `GET /slots`, which has no text of a client", llama="LLAMA_ARG_ENDPOINT_SLOTS")
    props: bool = row(False, ("--props",), "accept `POST /props`, which changes nothing, as in llama-server", llama="LLAMA_ARG_ENDPOINT_PROPS")
    log_format: LogFormat = row("text", ("--log-format",), "log lines of text, or an object of JSON for each", fixed={"--log-jsonl": "json", "--no-log-jsonl": "text"})
    log_file: str = row("", ("--log-file",), "file for the log, instead of stderr", llama="LLAMA_ARG_LOG_FILE")
    sleep_idle_seconds: int = row(-1, ("--sleep-idle-seconds",), "seconds without a request after which the model leaves memory until the next one, which waits for the load; -1: never", least=-1)
    check: bool = row(False, ("--check",), "check the cache's invariants whenever the server is idle")
    verbose: bool = row(False, ("-v", "--verbose", "--log-verbose"), "log every step of llama.cpp's start")
    # fmt: on
    is_one_of_several: bool = field(default=False, compare=False)  # several models share the device
    given: frozenset[str] = field(default=frozenset(), compare=False)  # settings that a flag or a variable has

    @property
    def hosts(self) -> list[str]:
        """The addresses to listen on, without socket files."""
        return [host for host in self._places if not host.endswith(SOCKET)]

    @property
    def socket_files(self) -> list[str]:
        """The paths of the socket files to listen on."""
        return [str(Path(host).expanduser()) for host in self._places if host.endswith(SOCKET)]

    @property
    def _places(self) -> list[str]:
        return [host.strip() for host in self.host.split(",")]

    @property
    def sleep_after(self) -> int:
        """Seconds without a request until sleep; 0: never."""
        return max(self.sleep_idle_seconds, 0)

    @property
    def draft_mode(self) -> Draft:
        """The default of a request's `draft`: the draft model, if there is one and --draft does not say otherwise."""
        return "model" if (self.draft_model or self.uses_head) and not self.is_given("draft") else self.draft

    @property
    def uses_head(self) -> bool:
        """Whether the multi-token head of the model drafts."""
        return "draft-mtp" in listed(self.spec_type)

    @property
    def may_unload(self) -> bool:
        """Whether the model may be unloaded."""
        return self.sleep_after > 0 or self.is_one_of_several

    def is_given(self, name: str) -> bool:
        """Whether a setting is given, or differs from its default."""
        return name in self.given or getattr(self, name) != getattr(UNSET, name)

    def names(self, model: Path) -> tuple[str, ...]:
        """Return the model's names in alphabetical order, as llama-server does; without --alias, the file's name."""
        names = (self.alias,) if self.is_one_of_several else tuple(sorted(listed(self.alias)))
        return names or (model.stem,)

    def shown(self) -> dict[str, Value]:
        """Return all settings except the API keys, which are secret."""
        return {setting.name: getattr(self, setting.name) for setting in SETTINGS if setting.name != "api_key"}


UNSET = Settings()
SETTINGS = table_of(UNSET)
