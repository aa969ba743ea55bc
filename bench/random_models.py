"""Generates models with random weights, as complete GGUF files."""

from __future__ import annotations

import argparse
import ast
import os
import re
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from hashlib import sha256
from heapq import heapify, heappop, heappush
from importlib.util import find_spec
from itertools import pairwise
from math import prod
from pathlib import Path
from pydoc_data.topics import topics
from types import TracebackType
from typing import Self

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, LlamaFileType, TokenType
from gguf import GGMLQuantizationType as Kind

from ..models import named_templates
from ..models.errors import ModelError
from ..models.model_files import cache_folder
from ..models.named_templates import DEFAULT_TEMPLATE

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}

EMBEDDING = "token_embd.weight"
OUTPUT_GAIN = 6.0  # compensates the small embedding: logits have a standard deviation of 3

Matrix = tuple[str, int, int, float]
"""The name, rows, columns and gain of a matrix."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama: rotary positions, gated feed-forward, grouped heads, output weights tied to the embedding.

    Raises ValueError for sizes that do not fit together.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    merges: int
    context: int = 32768
    quantisation: str = "Q8_0"
    """The type of the matrices: F32, F16, Q8_0 or Q4_0."""

    def __post_init__(self) -> None:
        if self.quantisation not in FILE_TYPES:
            raise ValueError(f"quantisation {self.quantisation!r} is not one of {', '.join(FILE_TYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"the heads ({self.heads}) must be a multiple of the KV heads ({self.kv_heads})")
        if self.width % (2 * self.heads):
            raise ValueError(f"the width ({self.width}) must be an even number for each of {self.heads} heads")
        block = GGML_QUANT_SIZES[Kind[self.quantisation]][0]
        for name, size in (("width", self.width), ("feed-forward size", self.feed_forward)):
            if size % block:
                raise ValueError(f"the {name} ({size}) must be a multiple of {block} for {self.quantisation}")

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the architecture."""
        return "llama"

    @property
    def kv_width(self) -> int:
        """The numbers that a token adds to each layer's K. It adds as many to V."""
        return self.width // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """The numbers in all matrices."""
        return sum(rows * columns for _, rows, columns, _ in self.matrices())

    def matrices(self) -> Iterator[Matrix]:
        """Yield (name, rows, columns, gain) of each matrix. With gain 1 the output is as large as the input.

        The gains prevent loops in greedy decoding. The embedding is small, because with tied weights a large embedding would
        make each token repeat itself. Attention is sharp, so that the next token depends on more than the last few tokens.
        """
        yield EMBEDDING, self.vocabulary, self.width, 0.5
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield from self.mixer(layer, block)
            yield f"{block}.ffn_gate.weight", self.feed_forward, self.width, 1.0
            yield f"{block}.ffn_up.weight", self.feed_forward, self.width, 1.0
            yield f"{block}.ffn_down.weight", self.width, self.feed_forward, 1.0

    def mixer(self, layer: int, block: str) -> Iterator[Matrix]:
        """Yield the matrices of the part of a layer that mixes tokens."""
        yield f"{block}.attn_q.weight", self.width, self.width, 2.0
        yield f"{block}.attn_k.weight", self.kv_width, self.width, 2.0
        yield f"{block}.attn_v.weight", self.kv_width, self.width, 1.0
        yield f"{block}.attn_output.weight", self.width, self.width, 1.0

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, float32) of each tensor that is not a matrix, such as normalisations."""
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", _ones(self.width)
            yield f"blk.{layer}.ffn_norm.weight", _ones(self.width)
        yield "output_norm.weight", OUTPUT_GAIN * _ones(self.width)

    def describe(self, writer: GGUFWriter) -> None:
        """Write the sizes to a GGUF file's metadata."""
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.width)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.feed_forward)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_dimension_count(self.width // self.heads)
        writer.add_rope_freq_base(500_000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(self.vocabulary)


@dataclass(frozen=True, slots=True)
class HybridShape(ModelShape):
    """The sizes of a Qwen 3.5, with gated delta nets, and gated attention in every fourth layer.

    delta_heads: the heads of a delta net. The state of each head has `delta_size` squared numbers.
    """

    delta_heads: int = 8
    delta_size: int = 128
    interval: int = 4
    kernel: int = 4

    @property
    def architecture(self) -> str:
        return "qwen35"

    @property
    def delta_width(self) -> int:
        """The numbers that a token adds to each of Q, K and V in a delta net."""
        return self.delta_heads * self.delta_size

    def is_attention(self, layer: int) -> bool:
        return layer % self.interval == self.interval - 1

    def mixer(self, layer: int, block: str) -> Iterator[Matrix]:
        if self.is_attention(layer):
            for name, rows, columns, gain in ModelShape.mixer(self, layer, block):
                is_gated = name.endswith("attn_q.weight")  # each number has a gate
                yield name, 2 * rows if is_gated else rows, columns, gain
            return
        yield f"{block}.attn_qkv.weight", 3 * self.delta_width, self.width, 2.0
        yield f"{block}.attn_gate.weight", self.delta_width, self.width, 1.0
        yield f"{block}.ssm_beta.weight", self.delta_heads, self.width, 1.0
        yield f"{block}.ssm_alpha.weight", self.delta_heads, self.width, 1.0
        yield f"{block}.ssm_out.weight", self.width, self.delta_width, 1.0

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", _ones(self.width)
            yield f"{block}.post_attention_norm.weight", _ones(self.width)
            if self.is_attention(layer):
                yield f"{block}.attn_q_norm.weight", _ones(self.width // self.heads)
                yield f"{block}.attn_k_norm.weight", _ones(self.width // self.heads)
            else:
                yield from self._delta_net(layer, block)
        yield "output_norm.weight", OUTPUT_GAIN * _ones(self.width)

    def _delta_net(self, layer: int, block: str) -> Iterator[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(layer)
        kernels = rng.standard_normal((3 * self.delta_width, self.kernel), np.float32) / self.kernel**0.5
        yield f"{block}.ssm_conv1d.weight", kernels
        yield f"{block}.ssm_dt.bias", -3 * _ones(self.delta_heads)  # a long memory
        yield f"{block}.ssm_a", -np.arange(1, self.delta_heads + 1, dtype=np.float32) / self.delta_heads
        yield f"{block}.ssm_norm.weight", _ones(self.delta_size)

    def describe(self, writer: GGUFWriter) -> None:
        ModelShape.describe(self, writer)
        quarter = self.width // self.heads // 4
        writer.add_rope_dimension_sections([quarter, quarter, 0, 0])
        writer.add_full_attention_interval(self.interval)
        writer.add_ssm_conv_kernel(self.kernel)
        writer.add_ssm_inner_size(self.delta_width)
        writer.add_ssm_state_size(self.delta_size)
        writer.add_ssm_time_step_rank(self.delta_heads)
        writer.add_ssm_group_count(self.delta_heads)


def _ones(size: int) -> np.ndarray:
    return np.ones(size, np.float32)


SHAPES = {
    "tiny": ModelShape(layers=2, width=128, heads=4, kv_heads=2, feed_forward=256, vocabulary=1024, merges=700),
    "exact": ModelShape(
        layers=2, width=102, heads=3, kv_heads=1, feed_forward=202, vocabulary=1024, merges=700, quantisation="F32"
    ),
    "bench": ModelShape(layers=12, width=512, heads=8, kv_heads=2, feed_forward=1408, vocabulary=151936, merges=4000),
    "bench-hybrid": HybridShape(layers=8, width=512, heads=8, kv_heads=2, feed_forward=1408, vocabulary=151936, merges=4000),
    "qwen2.5-7b": ModelShape(
        layers=28, width=3584, heads=28, kv_heads=4, feed_forward=18944, vocabulary=152064, merges=4000
    ),
    "llama-3.1-8b": ModelShape(
        layers=32, width=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=128256, merges=4000, context=131072
    ),
}
"""Shapes by name.

- `tiny`: for tests and first steps. It has 0.5 MB, and every option works with it (heads of 32, so any KV cache type).
- `exact`: 1.2 MB. The logits of a token are bit-equal in any batch (on a CPU, without flash attention). llama.cpp's fast
  kernels add one token's numbers in another order than several tokens', but they need sizes that divide by 4, and no size
  here does. Its heads are too odd for a quantised KV cache.
- `bench`: for a CPU. 112 M parameters, 6 KiB of KV per token.
- `bench-hybrid`: a hybrid for a CPU. 113 M parameters, 1 KiB of KV per token, and a recurrent state of 3.2 MiB, as much as
  the KV of 3,200 tokens. In Qwen 3.5 with 27 B parameters, the state is as much as the KV of 2,400 tokens.
- all others: the sizes of well-known models, for a GPU.
"""


# ---- Vocabulary ---------------------------------------------------------------------------------------------------------
# A byte-level BPE vocabulary (GGUF's `gpt2` tokenizer), trained offline on the English text in Python itself.

PRE_TOKENIZER = "qwen2"
"""GGUF's tokenizer.ggml.pre: how llama.cpp cuts text into words. Tokens are merged only within words."""

# The same cut for Python's `re`, which lacks \p{L}: letters are word characters except digits and the underscore.
_WORD = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)

# Modules with much plain English and little code. Their source is read; they are never imported.
_MODULES = (
    "_pydecimal", "cmd", "configparser", "contextlib", "difflib", "doctest", "email.message", "fileinput", "fractions",
    "http.server", "ipaddress", "logging", "lzma", "queue", "random", "sched", "shelve", "shutil", "smtplib", "socket",
    "socketserver", "statistics", "textwrap", "threading", "timeit", "turtle", "typing", "uuid", "xmlrpc.server",
)  # fmt: skip

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All values of GGUF's tokenizer keys. A token's id is its index in `tokens`."""

    tokens: tuple[str, ...]
    """Tokens in GPT-2's byte alphabet (a space is `Ġ`), and special tokens as they are."""
    merges: tuple[str, ...]
    """Merges as `left right`, in the order in which they are applied."""
    types: tuple[int, ...]
    """The `gguf.TokenType` of each token."""
    bos: int
    eos: int


def train(size: int, merges: int) -> Vocabulary:
    """Train a vocabulary of `size` tokens: 256 bytes, up to `merges` merges, ChatML's special tokens, and padding.

    The same Python gives the same vocabulary. Raises ValueError if `size` is too small.
    """
    if size < 256 + merges + len(SPECIAL):
        raise ValueError(f"{size} tokens are too few for 256 bytes, {merges} merges and {len(SPECIAL)} special tokens")
    pairs = _merges_of_corpus(merges)
    # Two merges can spell the same token ("a"+"bc", "ab"+"c"), which is listed once.
    words = dict.fromkeys([*byte_alphabet(), *("".join(pair) for pair in pairs)])
    used = [*words, *SPECIAL]
    padding = [f"<|unused_{number}|>" for number in range(size - len(used))]
    types = [TokenType.NORMAL] * len(words) + [TokenType.CONTROL] * len(SPECIAL) + [TokenType.UNUSED] * len(padding)
    ends = {"bos": used.index(END_OF_TEXT), "eos": used.index(IM_END)}
    return Vocabulary((*used, *padding), tuple(" ".join(pair) for pair in pairs), tuple(map(int, types)), **ends)


@cache
def _merges_of_corpus(limit: int) -> list[Pair]:
    """Return the most useful merges of the corpus. Finding them takes most of the time to make a small model."""
    return learn_merges(count_words(corpus()), limit)


def byte_alphabet() -> list[str]:
    """Return GPT-2's character for each byte, in order: its Latin-1 character if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def corpus() -> Iterator[str]:
    """Yield Python's language reference and docstrings of its standard library, 0.9 MB in all."""
    for name in sorted(topics):
        yield topics[name]
    for module in _MODULES:
        spec = find_spec(module)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield from _docstrings(Path(spec.origin).read_text(encoding="utf-8"))


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Count the words of the texts, spelt in the byte alphabet.

    Words that occur only once are omitted. They are two fifths of all words, and unlikely in other texts.
    """
    counts = Counter(word for text in texts for word in split(text))
    return Counter({word: count for word, count in counts.items() if count > 1})


def split(text: str) -> Iterator[str]:
    """Yield the words of a text in order, as UTF-8 spelt in the byte alphabet."""
    alphabet = dict(enumerate(byte_alphabet()))
    return (word.encode().decode("latin-1").translate(alphabet) for word in _WORD.findall(text))


def learn_merges(words: Counter[str], limit: int) -> list[Pair]:
    """Return up to `limit` merges, in order. Each joins the most frequent pair after the earlier merges.

    After Sennrich et al. 2016, algorithm 1. It ends early if no pair occurs twice. Of equally frequent pairs, the first in
    the alphabet is merged, so the result does not depend on the hash seed.
    """
    return _Trainer(words).run(limit)


class _Trainer:
    """Counts pairs of symbols. A merge updates only the counts of words with the merged pair."""

    def __init__(self, words: Counter[str]) -> None:
        self.words = [list(word) for word in words]
        self.weight = list(words.values())
        self.counts: Counter[Pair] = Counter()
        self.owners: defaultdict[Pair, set[int]] = defaultdict(set)
        for index, word in enumerate(self.words):
            self._count(index, word, +1)
        # An entry whose count is outdated is corrected when it is popped.
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapify(self.heap)

    def run(self, limit: int) -> list[Pair]:
        merges: dict[Pair, None] = {}  # a pair can return after another merge spells one of its halves
        while self.heap and len(merges) < limit:
            count, pair = heappop(self.heap)
            if -count != self.counts[pair]:
                heappush(self.heap, (-self.counts[pair], pair))
            elif -count < 2:
                break
            else:
                self._merge(pair)
                merges[pair] = None
        return list(merges)

    def _merge(self, pair: Pair) -> None:
        changed: set[Pair] = set()
        for index in self.owners.pop(pair):
            old, new = self.words[index], _joined(self.words[index], pair)
            self._count(index, old, -1)
            self._count(index, new, +1)
            self.words[index] = new
            changed.update(pairwise(new))
        for grown in changed:
            heappush(self.heap, (-self.counts[grown], grown))

    def _count(self, index: int, word: list[str], sign: int) -> None:
        for pair in pairwise(word):
            self.counts[pair] += sign * self.weight[index]
            if sign > 0:
                self.owners[pair].add(index)


def _joined(word: list[str], pair: Pair) -> list[str]:
    """Return the word with each occurrence of the pair, from the left, as one symbol."""
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


# ---- Generate -----------------------------------------------------------------------------------------------------------
# Complete GGUF models with random weights, for tests and benchmarks that need an engine but must not download anything.


class ModelFile:
    """A GGUF file that is being made: its vocabulary, the metadata in `writer`, and its tensors.

    The end of the `with` block writes everything. The file appears only when it is complete.
    """

    def __init__(self, path: Path, architecture: str, words: Vocabulary) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        self._tensors: list[Callable[[], np.ndarray]] = []
        self.writer = writer = GGUFWriter(self._partial, architecture)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(PRE_TOKENIZER)
        writer.add_token_list(words.tokens)
        writer.add_token_types(words.types)
        writer.add_token_merges(words.merges)
        writer.add_bos_token_id(words.bos)
        writer.add_eos_token_id(words.eos)
        writer.add_add_bos_token(False)
        writer.add_chat_template(DEFAULT_TEMPLATE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.writer.write_header_to_file()
                self.writer.write_kv_data_to_file()
                self.writer.write_ti_data_to_file()
                for made in self._tensors:
                    self.writer.write_tensor_data(made())
                self.writer.close()
                os.replace(self._partial, self._path)
        finally:
            self.writer.close()
            self._partial.unlink(missing_ok=True)

    def tensor(self, name: str, shape: tuple[int, ...], made: Callable[[], np.ndarray], kind: Kind = Kind.F32) -> None:
        """Add a tensor. made: returns its bytes in the type `kind`. Only one tensor is in memory at a time."""
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = prod(shape) // block * block_bytes
        self.writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        self._tensors.append(made)


def generate(path: Path | str, shape: ModelShape, seed: int = 0) -> Path:
    """Write a model of this shape to `path` and return the path. The file appears only when it is complete.

    The same Python, shape and seed give the same model. Its answers mean nothing, but greedy decoding does not loop. It
    gives only ASCII and never ends an answer, because the output rows of special, unused and non-ASCII tokens are nearly
    zero.
    """
    path, kind = Path(path), Kind[shape.quantisation]
    words = train(shape.vocabulary, shape.merges)
    with ModelFile(path, shape.architecture, words) as model:
        model.writer.add_type("model")
        model.writer.add_name(path.stem)
        model.writer.add_file_type(FILE_TYPES[shape.quantisation])
        model.writer.add_quantization_version(2)
        shape.describe(model.writer)
        for index, (name, rows, columns, gain) in enumerate(shape.matrices()):
            scale = np.full(rows, gain / columns**0.5, dtype=np.float32)
            if name == EMBEDDING:
                scale *= _loudness(words)
            rng = np.random.default_rng([seed, index])
            model.tensor(name, (rows, columns), partial(_random, rng, columns, kind, scale), kind)
        for name, values in shape.arrays():
            model.tensor(name, values.shape, partial(np.asarray, values))
    return path


def built_in_model(cache_dir: Path | None = None, name: str = "tiny") -> Path:
    """Return the model of a named shape. Its first use writes it into `cache_dir` (by default the user's cache).

    Two processes may call this at once; both get a complete file. Raises ModelError if the file cannot be written.
    """
    shape, folder = SHAPES[name], cache_dir or cache_folder()
    path = folder / f"{name}-{version_of(shape)}.gguf"
    if not path.exists():
        print(f"generating the {name} model {path}", file=sys.stderr, flush=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            generate(path, shape)
        except OSError as error:
            raise ModelError(
                f"the built-in model cannot be written to {folder}: {error.strerror}: "
                "name a model with -m, or a folder to write to with XDG_CACHE_HOME"
            ) from None
    return path


def version_of(shape: ModelShape) -> str:
    """Return a digest of a shape and of the source that generates it. A change of either makes a new version."""
    sources = Path(__file__).read_bytes() + Path(named_templates.__file__).read_bytes()
    return sha256(repr(shape).encode() + sources).hexdigest()[:12]


def _loudness(words: Vocabulary) -> np.ndarray:
    """Return (tokens,) the scale of each token's embedding: 1, or so small that the token is never the likeliest.

    As input, a token with a small embedding counts as much as any other token, because each layer begins with a
    normalisation.
    """
    alphabet = byte_alphabet()
    plain = {alphabet[ord("\n")], *alphabet[ord(" ") : ord("~") + 1]}
    pairs = zip(words.tokens, words.types, strict=True)
    loud = [kind == TokenType.NORMAL and plain.issuperset(token) for token, kind in pairs]
    return np.where(loud, 1.0, 0.1).astype(np.float32)


def _random(rng: np.random.Generator, columns: int, kind: Kind, scale: np.ndarray) -> np.ndarray:
    """Make (rows, columns) of random numbers around 0, with standard deviation `scale` (rows,), as bytes of `kind`."""
    rows = len(scale)
    if kind in (Kind.F32, Kind.F16):
        matrix = rng.standard_normal((rows, columns), dtype=np.float32)
        matrix *= scale[:, None]
        return matrix.astype(np.float32 if kind == Kind.F32 else np.float16)
    return _random_blocks(rng, columns, kind, scale)


def _random_blocks(rng: np.random.Generator, columns: int, kind: Kind, scale: np.ndarray) -> np.ndarray:
    """Make such numbers directly as blocks of a float16 step and 32 uniform integers, much faster than by quantising."""
    blocks = len(scale) * columns // 32
    body = 32 if kind == Kind.Q8_0 else 16
    out = np.empty((blocks, 2 + body), dtype=np.uint8)
    out[:, 2:] = np.frombuffer(rng.bytes(blocks * body), dtype=np.uint8).reshape(blocks, body)
    levels = 256 if kind == Kind.Q8_0 else 16
    step = np.repeat(scale * (12 / (levels**2 - 1)) ** 0.5, columns // 32)
    # The integers go one further down than up (-8 to 7), so steps of both signs keep the mean at 0.
    step *= rng.choice(np.array([-1, 1], dtype=np.float32), blocks)
    out[:, :2] = step.astype(np.float16).view(np.uint8).reshape(blocks, 2)
    return out


def main(argv: Sequence[str]) -> int:
    """Run `slotcache generate`: write a model by the options of the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="slotcache generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("shape", choices=SHAPES, help="a named shape")
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{name}, if it differs from the named shape's")
    parser.add_argument("--quantisation", help="F32, F16, Q8_0 or Q4_0")
    chosen = parser.parse_args(argv)
    named = [field.name for field in fields(SHAPES[chosen.shape])]
    changed = {name: value for name in named if (value := getattr(chosen, name, None)) is not None}
    try:
        path = generate(chosen.out, replace(SHAPES[chosen.shape], **changed), chosen.seed)
    except (ValueError, OSError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {path.stat().st_size / 2**20:,.1f} MiB")
    return 0
