"""The settings of a server, as a frozen dataclass: each field declares its flags, environment variable, default and help."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

from ...models.sampling_params import NUMBER, NUMBERS, ORDER, SAMPLERS, Numbers
from ...ordering.policy import BestPlace, Order
from ...ordering.prompt import ASK_FOR_IDS
from ...slots.eviction import POLICIES
from ...slots.queue import WINDOW

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# ---- Setting ------------------------------------------------------------------------------------------------------------
# A row in the table of settings. Each field of a dataclass becomes flags, environment variables, help and documentation.

Value = str | int | float | bool
T = TypeVar("T")
OF_LLAMA = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""The sampling parameters that also have an environment variable in llama-server."""


VERSION = "0.2.0"
"""The version of slotcache. A build reads it from here (`dynamic` in pyproject.toml), so it is written in one place only."""


class SettingsError(Exception):
    """The settings are invalid, so the server cannot start."""


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

    choices: the allowed values; empty: the values that the field's type lists.
    least, most: the range of a number.
    words: words that a user may write instead of a number, each with its number.
    fixed: flags without a value, each with the value that it sets.
    refused: values that are not supported, each with the reason.
    separator: if the flag is repeated, this text joins the values.
    llama: llama-server's environment variable for this setting.
    """
    about = {"flags": flags, "help": help, "choices": choices, "least": least, "most": most, "clamps": False}
    about |= {"words": words or {}, "fixed": fixed or {}, "refused": refused or {}, "separator": separator, "llama": llama}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. The setting's flag overrides its environment variable, SLOTCACHE_<NAME>.

    The fields are the parameters of `row`. If the setting is a switch, `fixed` also has the flags that turn the switch off.
    clamps: whether a number outside the range becomes the nearest number in the range; otherwise such a number is an error.
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
        """Whether the flag may be given without a value, which means `on`."""
        return self.is_switch or {"on", "off"} <= {*self.choices}

    @property
    def variable(self) -> str:
        return f"SLOTCACHE_{self.name.upper()}"

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables for this setting. If several of these variables are set, the first one counts."""
        return (self.variable, *filter(None, [self.llama]))

    def parse(self, text: str) -> Value:
        """Parse the text of a value. Raises ValueError."""
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
    """Split the text of a setting at its commas, and return the values."""
    return frozenset(filter(None, map(str.strip, text.split(","))))


def parse_switch(text: str) -> bool:
    """Parse on/off, true/false, yes/no or 1/0. Raises ValueError."""
    if text.lower() in ("on", "true", "1", "yes", "enabled"):
        return True
    if text.lower() in ("off", "false", "0", "no", "disabled"):
        return False
    raise ValueError("expected on or off")


def _parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError("expected a whole number" if kind is int else "expected a number") from None


def _negations(default: Value, flags: tuple[str, ...]) -> dict[str, str]:
    """Return the flags that turn a switch off: `--no-NAME` for each long flag `--NAME`."""
    return {f"--no-{flag[2:]}": "off" for flag in flags if flag.startswith("--")} if isinstance(default, bool) else {}


def table_of(unset: DataclassInstance) -> tuple[Setting, ...]:
    """Return the settings that the fields of a dataclass declare. unset: an object of the class with all defaults."""
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
    """Return the metadata of a sampling parameter, with the same keys as `row` uses for other settings."""
    number = NUMBERS[name]
    return {
        "flags": number.flags,
        "help": f"default `{name}`: {number.help}",
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
    """Return a value as the user writes it on the command line."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


SOCKET = ".sock"  # the end of a socket file's name, as in llama-server
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
    """The settings of a server.

    `Numbers` adds the sampling parameters. The values of the sampling parameters are the defaults for requests that do not
    set them.
    """

    model: str = row("", ("-m", "--model"), "GGUF file to serve, or `smollm2`, a small chat model to download; if unset, a built-in model. Repeat it for several models; NAME=FILE names one", separator="\n", llama="LLAMA_ARG_MODEL")
    models_dir: str = row("", ("--models-dir",), "folder of further GGUF files to serve", llama="LLAMA_ARG_MODELS_DIR")
    models_loaded: int = row(1, ("--models-loaded", "--models-max"), "most models in memory at the same time", least=1, most=64, llama="LLAMA_ARG_MODELS_MAX")
    model_turn: int = row(30, ("--model-turn",), "seconds a busy model may keep the device while another model waits", least=0)
    hf_repo: str = row("", ("-hf", "-hfr", "--hf-repo"), "Hugging Face repository to download the model from: user/repo[:quant]", llama="LLAMA_ARG_HF_REPO")
    hf_file: str = row("", ("-hff", "--hf-file"), "with -hf, the file to download", llama="LLAMA_ARG_HF_FILE")
    offline: bool = row(False, ("--offline",), "with -hf, use only the local cache", llama="LLAMA_ARG_OFFLINE")
    alias: str = row("", ("-a", "--alias"), "the model's names, separated by commas; if unset, the file's name", llama="LLAMA_ARG_ALIAS")
    any_model: bool = row(False, ("--any-model",), "serve the model under any name, for clients with a fixed name")
    tags: str = row("", ("--tags",), "words about the model for `GET /v1/models`, separated by commas", llama="LLAMA_ARG_TAGS")
    host: str = row("127.0.0.1", ("--host",), "addresses to listen on, separated by commas; the default accepts only this machine's clients; a name that ends in .sock is a socket file", llama="LLAMA_ARG_HOST")
    port: int = row(8080, ("--port",), "port to listen on; `--ollama` sets Ollama's port, 11434", most=65535, fixed={"--ollama": "11434"}, llama="LLAMA_ARG_PORT")
    ssl_key_file: str = row("", ("--ssl-key-file",), "PEM file with the private key of --ssl-cert-file; the server then speaks only HTTPS", llama="LLAMA_ARG_SSL_KEY_FILE")
    ssl_cert_file: str = row("", ("--ssl-cert-file",), "PEM file with the server's certificate chain", llama="LLAMA_ARG_SSL_CERT_FILE")
    api_key: str = row("", ("--api-key",), "API keys, separated by commas; each request must carry one; if unset, requests need no key", llama="LLAMA_API_KEY")
    api_key_file: str = row("", ("--api-key-file",), "file with API keys, one per line; # starts a comment", llama="LLAMA_ARG_API_KEY_FILE")
    allowed_hosts: str = row("", ("--allowed-hosts",), "host names of this server besides loopback and --host, separated by commas; other names are refused; *: any name")
    cors_origins: str = row("", ("--cors-origins",), "origins whose web pages may send requests, separated by commas; localhost: this machine, any port; *: any origin; if unset, none", llama="LLAMA_ARG_CORS_ORIGINS")
    ctx_size: int = row(0, ("-c", "--ctx-size"), "KV cells that all requests share; 0: the model's trained length, up to 65536 if --fit finds memory for it, otherwise up to 16384", most=(1 << 31) - 1, llama="LLAMA_ARG_CTX_SIZE")
    kv_unified: bool = row(True, ("-kvu", "--kv-unified"), "a request may use all cells; off: each slot has an equal share", fixed={"-no-kvu": "off"}, llama="LLAMA_ARG_KV_UNIFIED")
    parallel: int = row(4, ("-np", "--parallel"), "slots: requests that run at the same time", least=1, most=127, words={"-1": 4}, llama="LLAMA_ARG_N_PARALLEL")
    slot_prompt_similarity: float = row(0.1, ("-sps", "--slot-prompt-similarity"), "prefer a slot whose history matches at least this share of the prompt; 0: prefer none", most=1)
    batch_size: int = row(512, ("-b", "--batch-size"), "most tokens a step computes", least=1, llama="LLAMA_ARG_BATCH")
    ubatch_size: int = row(512, ("-ub", "--ubatch-size"), "most tokens a kernel computes", least=1, llama="LLAMA_ARG_UBATCH")
    prefill_budget: int = row(512, ("--prefill-budget",), "most prompt tokens a step computes while other requests generate", least=1)
    max_stall: int = row(300, ("--max-stall",), "most ms that prefilling other requests adds to a step of running streams; less lengthens TTFT; 0: no limit", least=0)
    hang_after: int = row(300, ("--hang-after",), "seconds after which an unfinished step makes `/health` answer 503; 0: never", least=0)
    draft: Draft = row("off", ("--draft",), "default `draft`; lookup: draft the tokens that followed the same words earlier; model: draft with --draft-model, the default if it is set")
    draft_model: str = row("", ("-md", "--draft-model", "--model-draft", "--spec-draft-model"), "GGUF file of a smaller model with the vocabulary of -m, to draft tokens; no answer depends on it")
    spec_type: str = row("none", ("--spec-type",), "draft-mtp: draft with the multi-token head in the model's file; not tested with real weights", separator=",", llama="LLAMA_ARG_SPEC_TYPE")
    cache_ram: int = row(8192, ("-cram", "--cache-ram"), "MiB of host memory for idle KV, at most half of the free memory; 0: idle KV stays on the device", words={"-1": 1 << 31}, llama="LLAMA_ARG_CACHE_RAM")
    cache_dir: str = row("", ("--cache-dir",), "folder that keeps idle KV and stored conversations across restarts. It reveals prompts and can change answers, so only its owner may read it, and a folder that others may write to is refused")
    cache_disk: int = row(8192, ("--cache-disk",), "most MiB of KV in --cache-dir, for all models and settings together", least=0)
    slot_save_path: str = row("", ("--slot-save-path",), "folder for llama-server's `POST /slots/{id}?action=save` and `restore`; only its owner may have write access")
    eviction: str = row("pgdsf", ("--eviction",), "which idle KV a full tier evicts first", choices=tuple(POLICIES))
    idle_cells: int = row(0, ("--idle-cells",), "most device cells with idle KV when a request starts; other idle KV is offloaded")
    window: int = row(WINDOW, ("--window",), "most requests of equal priority that may overtake a waiting request; larger values shorten the median wait, lengthen the longest")
    max_queue: int = row(256, ("--max-queue",), "most waiting requests; a further request gets a 429")
    threads: int = row(0, ("-t", "--threads"), "CPU threads; 0: one for each fast core that this process may use", words={"-1": 0}, llama="LLAMA_ARG_THREADS")
    gpu_layers: int = row(-1, ("-ngl", "--gpu-layers", "--n-gpu-layers"), "layers on the GPU; -1 or auto: --fit chooses; -2 or all: all", least=-2, words={"auto": -1, "all": -2}, llama="LLAMA_ARG_N_GPU_LAYERS")
    n_cpu_moe: int = row(0, ("-ncmoe", "--n-cpu-moe"), "keep the experts of the first N layers in host memory; if unset, --fit chooses", llama="LLAMA_ARG_N_CPU_MOE")
    cpu_moe: bool = row(False, ("-cmoe", "--cpu-moe"), "keep the experts of all layers in host memory", llama="LLAMA_ARG_CPU_MOE")
    override_tensor: str = row("", ("-ot", "--override-tensor"), "PATTERN=BUFFER pairs, separated by commas: the buffer of tensors whose names match, such as `ffn_down=CPU`", separator=",", llama="LLAMA_ARG_OVERRIDE_TENSOR")
    device: str = row("", ("-dev", "--device"), "GPUs that hold layers, by their names in `slotcache doctor`, separated by commas; none: no GPU; if unset, all GPUs", llama="LLAMA_ARG_DEVICE")
    split_mode: SplitMode = row("layer", ("-sm", "--split-mode"), "how GPUs share a model: by layers, by matrix rows, or none: all on --main-gpu", refused={"tensor": TENSOR}, llama="LLAMA_ARG_SPLIT_MODE")
    tensor_split: str = row("", ("-ts", "--tensor-split"), "share of each GPU, such as 3,1; if unset, by free memory", llama="LLAMA_ARG_TENSOR_SPLIT")
    main_gpu: int = row(0, ("-mg", "--main-gpu"), "GPU, from 0, that holds everything with --split-mode none, and KV with --split-mode row", least=-1, llama="LLAMA_ARG_MAIN_GPU")
    rope_scaling: RopeKind = row("", ("--rope-scaling",), "scaling of rotary positions; if unset, the file's", llama="LLAMA_ARG_ROPE_SCALING_TYPE")
    rope_scale: float = row(0.0, ("--rope-scale",), "scale rotary positions for a context N times as long; 0: the file's", llama="LLAMA_ARG_ROPE_SCALE")
    rope_freq_base: float = row(0.0, ("--rope-freq-base",), "base frequency of rotary positions; 0: the file's", llama="LLAMA_ARG_ROPE_FREQ_BASE")
    rope_freq_scale: float = row(0.0, ("--rope-freq-scale",), "factor for the frequencies of rotary positions: 1/N is --rope-scale N; 0: the file's", llama="LLAMA_ARG_ROPE_FREQ_SCALE")
    yarn_orig_ctx: int = row(0, ("--yarn-orig-ctx",), "YaRN: the unscaled model's trained context length; 0: the file's", llama="LLAMA_ARG_YARN_ORIG_CTX")
    yarn_ext_factor: float = row(-1.0, ("--yarn-ext-factor",), "YaRN: share of extrapolation; 0: none; -1: the file's, or else 1", least=-1, llama="LLAMA_ARG_YARN_EXT_FACTOR")
    yarn_attn_factor: float = row(-1.0, ("--yarn-attn-factor",), "YaRN: attention factor; -1: the file's", least=-1, llama="LLAMA_ARG_YARN_ATTN_FACTOR")
    yarn_beta_slow: float = row(-1.0, ("--yarn-beta-slow",), "YaRN: rotations below which a frequency is fully scaled; -1: the file's", least=-1, llama="LLAMA_ARG_YARN_BETA_SLOW")
    yarn_beta_fast: float = row(-1.0, ("--yarn-beta-fast",), "YaRN: rotations above which a frequency is not scaled; -1: the file's", least=-1, llama="LLAMA_ARG_YARN_BETA_FAST")
    override_kv: str = row("", ("--override-kv",), "KEY=TYPE:VALUE replaces metadata of the file; int, float, bool or str; may be repeated", separator=",")
    fit: bool = row(True, ("-fit", "--fit"), "fit -c, -np, -ncmoe and -ngl to the free memory, unless they are set; off: refuse to start if the model does not fit", llama="LLAMA_ARG_FIT")
    fit_target: int = row(1024, ("-fitt", "--fit-target"), "MiB that --fit keeps free on each device", llama="LLAMA_ARG_FIT_TARGET")
    fit_ctx: int = row(4096, ("-fitc", "--fit-ctx"), "fewest cells that --fit chooses", least=1, llama="LLAMA_ARG_FIT_CTX")
    device_memory: int = row(0, ("--device-memory",), "most MiB of weights, KV and buffers on each GPU (without a GPU: in host memory); 0: all free memory")
    flash_attn: FlashAttention = row("auto", ("-fa", "--flash-attn"), "flash attention, which is much faster; auto: on where it works; off: reuse on the CPU is exact to the bit for one request at a time", llama="LLAMA_ARG_FLASH_ATTN")
    cache_type_k: KvType = row("f16", ("-ctk", "--cache-type-k"), "data type of keys; on a CPU only f16 and f32 are fast", llama="LLAMA_ARG_CACHE_TYPE_K")
    cache_type_v: KvType = row("f16", ("-ctv", "--cache-type-v"), "data type of values, as for keys; quantised types need flash attention", llama="LLAMA_ARG_CACHE_TYPE_V")
    repack: Switch = row("auto", ("--repack",), "another layout of the weights for the CPU, not exact to the bit; auto: if faster, with flash attention and no GPU", fixed={"-nr": "off", "--no-repack": "off"}, llama="LLAMA_ARG_REPACK")
    cache_prompt: bool = row(False, ("--cache-prompt",), "default `cache_prompt`: reuse cached KV and cache the prompt's; off, since KV takes memory and timing reveals cached prompts to the scope's clients", llama="LLAMA_ARG_CACHE_PROMPT")
    predict: int = row(-1, ("-n", "--predict", "--n-predict"), "default `max_tokens`; -1: no limit but the context", least=-1, llama="LLAMA_ARG_N_PREDICT")
    samplers: str = row(";".join(ORDER), ("--samplers",), "default `samplers`: names, separated by semicolons")
    sampling_seq: str = row("", ("--sampling-seq", "--sampler-seq"), f"samplers in letters: {', '.join(f'{letter} {name}' for name, letter in SAMPLERS.items())}")
    dry_sequence_breaker: str = row("", ("--dry-sequence-breaker",), "text that ends a repeated sequence for --dry-multiplier; may be repeated; none: no text", separator="\n")
    ignore_eos: bool = row(False, ("--ignore-eos",), "default `ignore_eos`")
    logit_bias: str = row("", ("-l", "--logit-bias"), "default `logit_bias`: a token's id and bias, such as 15043-inf; may be repeated", separator=",")
    document_order: Order = row("auto", ("--document-order",), "default `document_order`; auto: the order that reuses most KV")
    best: BestPlace = row("free", ("--best",), "default `best`: place of the document of rank 1; first and last cost reuse")
    best_price_ms: int = row(0, ("--best-price-ms",), "default `best_price_ms`: the document of rank 1 moves only to save more ms; 0: `best` alone decides")
    documents_attention: Attention = row("joint", ("--documents-attention",), "default `documents_attention`; joint: a document attends to the documents before it; separate: to none, at some cost in quality")
    dedup: Dedup = row("auto", ("--dedup",), "default `dedup`; auto: refer to documents of earlier turns instead of repeating them")
    tool_documents: Dedup = row("off", ("--tool-documents",), "default `tool_documents`; auto: order documents in tool results, and replace repeated lines by references")
    documents_in_text: Dedup = row("off", ("--documents-in-text",), "default `documents_in_text`; auto: treat lists of documents in the text of messages like `documents`")
    order_hint: bool = row(True, ("--order-hint",), "default `order_hint`: state the retrieval ranking after reordered documents")
    volatile: Volatile = row("off", ("--volatile",), "default `volatile`; move: a session keeps the instructions of its first request; the last message states changes")
    conversations: int = row(1000, ("--conversations",), "most stored conversations; 0: none")
    conversation_ram: int = row(256, ("--conversation-ram",), "most MiB of stored conversations")
    conversation_ttl: int = row(86400, ("--conversation-ttl",), "seconds that an unused conversation stays stored; 0: no limit")
    idle_prefill: bool = row(True, ("--idle-prefill",), "prefill likely prompts in idle time, such as the next turn of a conversation or the prompt of a disconnected client")
    idle_sets: int = row(0, ("--idle-sets",), "subsets of a chat's documents to prefill in idle time, for other chats; each takes host memory")
    chat_template: str = row("", ("--chat-template",), "chat template instead of the model's: a name, such as chatml, or Jinja", llama="LLAMA_ARG_CHAT_TEMPLATE")
    chat_template_file: str = row("", ("--chat-template-file",), "file with a Jinja chat template instead of the model's", llama="LLAMA_ARG_CHAT_TEMPLATE_FILE")
    sse_ping_interval: int = row(9, ("--sse-ping-interval",), "seconds of silence after which a stream gets an empty event; -1 or 0: never", least=-1, llama="LLAMA_ARG_SSE_PING_INTERVAL")
    spm_infill: bool = row(False, ("--spm-infill",), "`/infill` puts the text after the gap first")
    lora: str = row("", ("--lora",), "GGUF file with a LoRA adapter; may be repeated", separator=",")
    lora_scaled: str = row("", ("--lora-scaled",), "LoRA adapter with a scale: FILE:SCALE", separator=",")
    lora_init_without_apply: bool = row(False, ("--lora-init-without-apply",), "start with scale 0 for all adapters")
    embedding_model: str = row("", ("--embedding-model",), "GGUF file of the embedding model for `POST /v1/embeddings` and --docs, or `minilm`, a small English model to download, the default of --docs; none: no model")
    embedding_query_prefix: str = row("auto", ("--embedding-query-prefix",), "text that the embedding model gets before a query of --docs; auto: as in its training")
    embedding_document_prefix: str = row("auto", ("--embedding-document-prefix",), "text before a document of --docs, likewise")
    rerank_model: str = row("", ("--rerank-model",), "GGUF file of a reranker for `POST /v1/rerank` and --docs")
    embeddings: bool = row(False, ("--embeddings", "--embedding"), "answer `POST /v1/embeddings` with vectors of -m, which may be an encoder", llama="LLAMA_ARG_EMBEDDINGS")
    reranking: bool = row(False, ("--reranking", "--rerank"), "answer `POST /v1/rerank` with scores of -m", llama="LLAMA_ARG_RERANKING")
    pooling: Pooling = row("", ("--pooling",), "how the vectors of a text's tokens become one vector; if unset, the file's; rank: with --embeddings, as --reranking", llama="LLAMA_ARG_POOLING")
    embd_normalize: int = row(2, ("--embd-normalize",), "norm of embeddings; 0: the largest number becomes 32,760; 1: taxicab; 2: Euclidean; n: n-norm; -1: none", least=-1, most=100)
    docs: str = row("", ("--docs",), "folder of documents, or a file, for `retrieval`; may be repeated", separator="\n")
    docs_watch: bool = row(True, ("--docs-watch",), "notice changes in --docs; off: only at the start and on `POST /v1/sources/refresh`")
    docs_db: str = row("", ("--docs-db",), "folder for the index of --docs, which contains their text; a folder that others may write to is refused; if unset, in the user's cache directory")
    docs_scope: str = row("", ("--docs-scope",), "the `cache_scope` whose requests may search --docs; if unset, the common scope")
    docs_top_k: int = row(5, ("--docs-top-k",), "default `retrieval.top_k`: most documents that a search adds", least=1, most=100)
    chunk_tokens: int = row(300, ("--chunk-tokens",), "approximate tokens in a document of --docs", least=32, most=4096)
    read_ahead: int = row(0, ("--read-ahead",), "MiB of KV to prefill in idle time for documents that searches of --docs will likely find; 0: none", most=1 << 20)
    retrieval_prompt: str = row(ASK_FOR_IDS, ("--retrieval-prompt",), "text at the end of the system message in chats with `retrieval`; empty: none")
    reasoning_format: ReasoningFormat = row("auto", ("--reasoning-format",), "none: reasoning stays in the content; other values: it becomes `reasoning_content`", llama="LLAMA_ARG_THINK")
    reasoning_budget: int = row(-1, ("--reasoning-budget",), "most tokens of reasoning in an answer; 0: none; -1: no limit", least=-1, llama="LLAMA_ARG_THINK_BUDGET")
    reasoning_budget_message: str = row("", ("--reasoning-budget-message",), "text before the end tag of reasoning that reached its limit", llama="LLAMA_ARG_THINK_BUDGET_MESSAGE")
    chat_template_kwargs: str = row("", ("--chat-template-kwargs",), "default `chat_template_kwargs`: variables of the chat template, as JSON", llama="LLAMA_ARG_CHAT_TEMPLATE_KWARGS")
    reasoning: Switch = row("auto", ("-rea", "--reasoning"), "default of the template's `enable_thinking`; auto: on for a model that reasons", llama="LLAMA_ARG_REASONING")
    reasoning_effort: str = row("", ("--reasoning-effort",), "default `reasoning_effort`: low, medium, high, ...", llama="LLAMA_ARG_REASONING_EFFORT")
    reasoning_preserve: bool = row(True, ("--reasoning-preserve",), "keep the reasoning of earlier answers in the prompt if the template allows it", llama="LLAMA_ARG_REASONING_PRESERVE")
    prefill_assistant: bool = row(True, ("--prefill-assistant",), "continue an assistant's message at the end of a chat", llama="LLAMA_ARG_PREFILL_ASSISTANT")
    max_body: int = row(32, ("--max-body",), "largest request body in MiB")
    strict: bool = row(False, ("--strict",), "refuse requests with an unknown field; off: a warning")
    opens_page: bool = row(False, ("--open",), "open the page in the browser")
    ui: bool = row(True, ("--ui", "--webui"), "serve a page for browsers at `/`", llama="LLAMA_ARG_UI")
    metrics: bool = row(True, ("--metrics",), "serve `GET /metrics`, without any client text", llama="LLAMA_ARG_ENDPOINT_METRICS")
    slots: bool = row(True, ("--slots",), "serve `GET /slots`, without any client text", llama="LLAMA_ARG_ENDPOINT_SLOTS")
    props: bool = row(False, ("--props",), "accept `POST /props`, which changes nothing", llama="LLAMA_ARG_ENDPOINT_PROPS")
    log_format: LogFormat = row("text", ("--log-format",), "format of log lines: text or JSON", fixed={"--log-jsonl": "json", "--no-log-jsonl": "text"})
    log_file: str = row("", ("--log-file",), "file for the log, instead of stderr", llama="LLAMA_ARG_LOG_FILE")
    sleep_idle_seconds: int = row(-1, ("--sleep-idle-seconds",), "idle seconds after which the model is unloaded until the next request; -1 or 0: never", least=-1)
    check: bool = row(False, ("--check",), "check the cache's invariants in idle time")
    verbose: bool = row(False, ("-v", "--verbose", "--log-verbose"), "log each step of llama.cpp's start")
    # fmt: on
    is_one_of_several: bool = field(default=False, compare=False)  # several models share a device
    given: frozenset[str] = field(default=frozenset(), compare=False)  # the settings that a flag, a file or a variable sets

    @property
    def hosts(self) -> list[str]:
        """The addresses to listen on, except socket files."""
        return [host for host in self._places if not host.endswith(SOCKET)]

    @property
    def socket_files(self) -> list[str]:
        """The paths of the socket files to listen on."""
        return [str(Path(host).expanduser()) for host in self._places if host.endswith(SOCKET)]

    @property
    def _places(self) -> list[str]:
        return [host for host in map(str.strip, self.host.split(",")) if host]

    @property
    def sleep_after(self) -> int:
        """The seconds without a request after which the model is unloaded; 0: never."""
        return max(self.sleep_idle_seconds, 0)

    @property
    def draft_mode(self) -> Draft:
        """The default of a request's `draft`.

        If --draft is not set, but there is a draft model or a multi-token head, the default is `model`.
        """
        return "model" if (self.draft_model or self.uses_head) and not self.is_given("draft") else self.draft

    @property
    def uses_head(self) -> bool:
        """Whether the multi-token head of the model makes drafts."""
        return "draft-mtp" in listed(self.spec_type)

    @property
    def may_unload(self) -> bool:
        """Whether the model may be unloaded while the server runs."""
        return self.sleep_after > 0 or self.is_one_of_several

    def is_given(self, name: str) -> bool:
        """Return whether the user set a setting. A value that differs from the default always counts as set."""
        return name in self.given or getattr(self, name) != getattr(UNSET, name)

    def names(self, model: Path) -> tuple[str, ...]:
        """Return the names in --alias, sorted like llama-server's. Without --alias, return the name of the model's file."""
        names = (self.alias,) if self.is_one_of_several else tuple(sorted(listed(self.alias)))
        return names or (model.stem,)

    def shown(self) -> dict[str, Value]:
        """Return all settings except the API keys, which are secret."""
        return {setting.name: getattr(self, setting.name) for setting in SETTINGS if setting.name != "api_key"}


UNSET = Settings()
SETTINGS = table_of(UNSET)
