"""llama-server's flags that no setting stands for, as tables: its command lines start this server, too.

A flag that changes nothing a client sees is accepted, with a line in the log if it asks for more than it gets. A flag that
would change answers, or the machine that computes them, is refused with a line that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Row = tuple[str, int, str]
"""The names of a flag, the number of words that follow it, and its variable in the environment after LLAMA_ARG_, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag of llama-server. says: why it has no effect, or is refused; empty: what it asks for is so here."""

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
    ("-sps --slot-prompt-similarity", 1, ""),
    ("--cors-credentials", 0, "CORS_CREDENTIALS"),
)

WITHOUT_EFFECT: Mapping[str, tuple[Row, ...]] = {
    "the weights are mapped from the file, and the system keeps them in memory": (
        ("--mlock", 0, "MLOCK"),
        ("--no-mmap", 0, "NO_MMAP"),
        ("-lm --load-mode", 1, "LOAD_MODE"),
        ("-lzm --lazy-mode", 1, "LAZY_MODE"),
        ("--check-tensors", 0, ""),
        ("--no-host", 0, "NO_HOST"),
    ),
    "--threads sets the threads, and the system places them": (
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
    "one thread serves all connections, each with limits of its own": (
        ("--threads-http", 1, "THREADS_HTTP"),
        ("-to --timeout", 1, "TIMEOUT"),
        ("--reuse-port", 0, "REUSE_PORT"),
    ),
    "lanes share one pool of cells, and all requests of a step are one batch": (
        ("-nocb --no-cont-batching", 0, ""),
        ("--no-cache-idle-slots", 0, ""),
        ("--no-warmup", 0, ""),
        ("-nkvo --no-kv-offload", 0, ""),
        ("--no-op-offload", 0, ""),
    ),
    "reuse here is that of equal prefixes, and exact": (
        ("--cache-reuse", 1, "CACHE_REUSE"),
        ("-ctxcp --ctx-checkpoints --swa-checkpoints", 1, "CTX_CHECKPOINTS"),
        ("-cms --checkpoint-min-step", 1, "CHECKPOINT_MIN_SPACING_NT"),
    ),
    "no draft model runs here, and answers are the same without one; --draft lookup drafts from the prompt": (
        ("--spec-type", 1, "SPEC_TYPE"),
        ("-md --model-draft --spec-draft-model", 1, ""),
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
    "a full context ends an answer with finish_reason `length`; -c makes it larger": (
        ("--context-shift --ctx-shift", 0, "CONTEXT_SHIFT"),
        ("--keep", 1, ""),
        ("--kv-unified-per-slot", 1, "KV_UNIFIED_PER_SLOT"),
    ),
    "the model's own metadata says how positions are encoded": (
        ("--rope-scaling", 1, "ROPE_SCALING_TYPE"),
        ("--rope-scale", 1, "ROPE_SCALE"),
        ("--rope-freq-base", 1, "ROPE_FREQ_BASE"),
        ("--rope-freq-scale", 1, "ROPE_FREQ_SCALE"),
        ("--yarn-orig-ctx", 1, "YARN_ORIG_CTX"),
        ("--yarn-ext-factor", 1, "YARN_EXT_FACTOR"),
        ("--yarn-attn-factor", 1, "YARN_ATTN_FACTOR"),
        ("--yarn-beta-slow", 1, "YARN_BETA_SLOW"),
        ("--yarn-beta-fast", 1, "YARN_BETA_FAST"),
    ),
    "change the file itself: its metadata holds for every program that reads it": (("--override-kv", 1, ""),),
    "CUDA_VISIBLE_DEVICES chooses among GPUs, and -ngl says how many layers they hold": (
        ("-dev --device", 1, "DEVICE"),
        ("-ncffn --n-cpu-ffn", 1, "N_CPU_FFN"),
        ("-sm --split-mode", 1, "SPLIT_MODE"),
        ("-ts --tensor-split", 1, "TENSOR_SPLIT"),
        ("-mg --main-gpu", 1, "MAIN_GPU"),
        ("--rpc", 1, "RPC"),
    ),
    "`slotcache doctor` lists devices": (("--list-devices", 0, ""),),
    "control vectors change every answer, and there are none here": (
        ("--control-vector", 1, ""),
        ("--control-vector-scaled", 1, ""),
        ("--control-vector-layer-range", 2, ""),
    ),
    "download the file and name it with -m, or a repository with -hf": (
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
    "this server runs no tools: an agent beside it does, with the calls of its answers": (
        ("--tools", 1, "TOOLS"),
        ("--tools-runtime", 1, "TOOLS_RUNTIME"),
        ("--mcp-servers-config", 1, "MCP_SERVERS_CONFIG"),
        ("--mcp-servers-json", 1, "MCP_SERVERS_JSON"),
        ("--ui-mcp-proxy --webui-mcp-proxy", 0, "UI_MCP_PROXY"),
        ("-ag --agent", 0, "AGENT"),
    ),
    "a reverse proxy does it better; --allowed-hosts names it": (
        ("--ssl-key-file", 1, "SSL_KEY_FILE"),
        ("--ssl-cert-file", 1, "SSL_CERT_FILE"),
        ("--api-prefix", 1, "API_PREFIX"),
        ("--path", 1, "STATIC_PATH"),
        ("--ui-config --webui-config", 1, "UI_CONFIG"),
        ("--ui-config-file --webui-config-file", 1, "UI_CONFIG_FILE"),
    ),
    "--cors-origins names the pages that may ask; they may send any header, and use any method of a route": (
        ("--cors-methods", 1, "CORS_METHODS"),
        ("--cors-headers", 1, "CORS_HEADERS"),
        ("--no-cors-credentials", 0, ""),
    ),
    "one process serves one model; start a second server on another port": (
        ("--models-dir", 1, "MODELS_DIR"),
        ("--models-preset", 1, "MODELS_PRESET"),
        ("--models-max", 1, "MODELS_MAX"),
    ),
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


def _foreign() -> Iterator[Foreign]:
    for refused, groups in ((False, {"": SO_HERE}), (False, WITHOUT_EFFECT), (True, REFUSED)):
        for says, rows in groups.items():
            for names, num_values, variable in rows:
                yield Foreign(
                    flags=tuple(names.split()),
                    num_values=num_values,
                    variable=variable and f"LLAMA_ARG_{variable}",
                    says=says,
                    refused=refused,
                )


FOREIGN = tuple(_foreign())


def as_markdown() -> str:
    """Return the tables for the documentation."""
    lines = ["| llama-server's flag | here |", "|---|---|"]
    for effect, groups in (("no effect: ", WITHOUT_EFFECT), ("refused: ", REFUSED)):
        for says, rows in groups.items():
            flags = ", ".join(f"`{name}`" for names, _, _ in rows for name in names.split())
            lines.append(f"| {flags} | {effect}{says} |")
    accepted = ", ".join(f"`{name}`" for names, _, _ in SO_HERE for name in names.split())
    return "\n".join([*lines, f"| {accepted} | accepted: it is so here, or nothing depends on it |"])
