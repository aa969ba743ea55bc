"""Complete GGUF models with random weights: for tests and benchmarks that need an engine, and nothing to download."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from . import vocabulary
from .chat import named
from .chat.named import DEFAULT_TEMPLATE
from .vocabulary import PRE_TOKENIZER, Vocabulary, byte_alphabet, train

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors written so far and in all."""

_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}


@dataclass(frozen=True, slots=True)
class Shape:
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
    """Of the matrices: F32, F16, Q8_0 or Q4_0."""

    def __post_init__(self) -> None:
        if self.quantisation not in _FILE_TYPES:
            raise ValueError(f"quantisation {self.quantisation!r} is not one of {', '.join(_FILE_TYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"the heads ({self.heads}) must be a multiple of the KV heads ({self.kv_heads})")
        if self.width % (2 * self.heads):
            raise ValueError(f"the width ({self.width}) must be an even number for each of {self.heads} heads")
        block = GGML_QUANT_SIZES[GGMLQuantizationType[self.quantisation]][0]
        for name, size in (("width", self.width), ("feed-forward size", self.feed_forward)):
            if size % block:
                raise ValueError(f"the {name} ({size}) must be a multiple of {block} for {self.quantisation}")

    @property
    def kv_width(self) -> int:
        """Numbers that a token puts into each layer's K, and as many into its V."""
        return self.width // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """Numbers in the matrices."""
        return sum(rows * columns for _, rows, columns, _ in self.matrices())

    def matrices(self) -> Iterator[tuple[str, int, int, float]]:
        """Yield (name, rows, columns, gain) of each matrix; with gain 1 the output is as large as the input.

        The gains keep greedy decoding from going in circles. A small embedding: with tied weights a large one makes
        the last token the next one, too. Sharp attention: the next token depends on more than the last few tokens.
        """
        yield "token_embd.weight", self.vocabulary, self.width, 0.5
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_q.weight", self.width, self.width, 2.0
            yield f"blk.{layer}.attn_k.weight", self.kv_width, self.width, 2.0
            yield f"blk.{layer}.attn_v.weight", self.kv_width, self.width, 1.0
            yield f"blk.{layer}.attn_output.weight", self.width, self.width, 1.0
            yield f"blk.{layer}.ffn_gate.weight", self.feed_forward, self.width, 1.0
            yield f"blk.{layer}.ffn_up.weight", self.feed_forward, self.width, 1.0
            yield f"blk.{layer}.ffn_down.weight", self.width, self.feed_forward, 1.0

    def norms(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value) of each normalisation, `width` times the same value."""
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", 1.0
            yield f"blk.{layer}.ffn_norm.weight", 1.0
        yield "output_norm.weight", 6.0  # makes up for the small embedding: logits with a standard deviation of 3


SHAPES = {
    "tiny": Shape(layers=2, width=128, heads=4, kv_heads=2, feed_forward=256, vocabulary=1024, merges=700),
    "exact": Shape(
        layers=2, width=102, heads=3, kv_heads=1, feed_forward=202, vocabulary=1024, merges=700, quantisation="F32"
    ),
    "bench": Shape(layers=12, width=512, heads=8, kv_heads=2, feed_forward=1408, vocabulary=151936, merges=4000),
    "qwen2.5-7b": Shape(layers=28, width=3584, heads=28, kv_heads=4, feed_forward=18944, vocabulary=152064, merges=4000),
    "llama-3.1-8b": Shape(
        layers=32, width=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=128256, merges=4000, context=131072
    ),
}
"""Shapes by name.

- `tiny`: for tests and first steps; 0.5 MB, and every option works with it (heads of 32, so any KV cache type).
- `exact`: 1.2 MB; the logits of a token are the same bit for bit in any batch (on a CPU, flash attention off).
  llama.cpp's fast kernels add in another order for one token than for several, but they take only sizes that divide by
  4, and no size here does. Its heads are too odd for a quantised KV cache.
- `bench`: for a CPU; 112 M parameters, 6 KiB of KV a token.
- the others: the sizes of well-known models, for a GPU.
"""


def generate(path: Path | str, shape: Shape, seed: int = 0, progress: Progress | None = None) -> Path:
    """Write a model of this shape to `path` and return the path. The file appears only when it is complete.

    The same Python, shape and seed give the same model. Its words mean nothing, but greedy decoding wanders, in ASCII,
    and never ends an answer by itself: the output rows of special, unused and non-ASCII tokens are nearly zero.
    """
    path = Path(path)
    words = train(shape.vocabulary, shape.merges)
    with _replacing(path) as partial:
        writer = GGUFWriter(partial, "llama")
        try:
            _describe(writer, shape, words, path.stem)
            _write(writer, shape, words, seed=seed, progress=progress or (lambda done, total: None))
        finally:
            writer.close()
    return path


def built_in_model(cache_dir: Path | None = None, name: str = "tiny") -> Path:
    """Return the model of this named shape, written on first use into `cache_dir` (by default the user's cache).

    Two processes may call this at once: both get a complete file.
    """
    shape = SHAPES[name]
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotcache"
    # The source that writes the model is its version, so that no version number has to be raised by hand.
    sources = b"".join(Path(module).read_bytes() for module in (__file__, vocabulary.__file__, named.__file__))
    digest = sha256(repr(shape).encode() + sources).hexdigest()[:12]
    path = folder / f"{name}-{digest}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        generate(path, shape)
    return path


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` to write to. It replaces `path` at the end and is deleted after an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _describe(writer: GGUFWriter, shape: Shape, words: Vocabulary, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[shape.quantisation])
    writer.add_quantization_version(2)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.bos)
    writer.add_eos_token_id(words.eos)
    writer.add_add_bos_token(False)
    writer.add_chat_template(DEFAULT_TEMPLATE)


def _write(writer: GGUFWriter, shape: Shape, words: Vocabulary, *, seed: int, progress: Progress) -> None:
    """Write tensor by tensor, so that at most one is in memory."""
    kind = GGMLQuantizationType[shape.quantisation]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    total = 0
    for name, rows, columns, _ in shape.matrices():
        size = rows * columns // block * block_bytes
        writer.add_tensor_info(name, (rows, columns), np.dtype(np.float32), size, raw_dtype=kind)
        total += size
    for name, _ in shape.norms():
        writer.add_tensor_info(name, (shape.width,), np.dtype(np.float32), 4 * shape.width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for index, (name, rows, columns, gain) in enumerate(shape.matrices()):
        rng = np.random.default_rng([seed, index])
        scale = np.full(rows, gain / columns**0.5, dtype=np.float32)
        if name == "token_embd.weight":
            scale *= _loudness(words)
        tensor = _random(rng, columns, kind, scale)
        writer.write_tensor_data(tensor)
        done += tensor.nbytes
        progress(done, total)
    for _, value in shape.norms():
        writer.write_tensor_data(np.full(shape.width, value, dtype=np.float32))


def _loudness(words: Vocabulary) -> np.ndarray:
    """Return (tokens,) the scale of each token's embedding: 1, or so small that the token is never the likeliest.

    As input a quiet token counts as much as any other, because each layer begins by normalising it.
    """
    alphabet = byte_alphabet()
    plain = {alphabet[ord("\n")], *alphabet[ord(" ") : ord("~") + 1]}
    pairs = zip(words.tokens, words.types, strict=True)
    loud = [kind == TokenType.NORMAL and plain.issuperset(token) for token, kind in pairs]
    return np.where(loud, 1.0, 0.1).astype(np.float32)


def _random(rng: np.random.Generator, columns: int, kind: GGMLQuantizationType, scale: np.ndarray) -> np.ndarray:
    """Make (rows, columns) of random numbers about 0, with the standard deviation `scale` (rows,), as bytes of `kind`."""
    rows = len(scale)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        matrix = rng.standard_normal((rows, columns), dtype=np.float32)
        matrix *= scale[:, None]
        return matrix.astype(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
    return _random_blocks(rng, columns, kind, scale)


def _random_blocks(rng: np.random.Generator, columns: int, kind: GGMLQuantizationType, scale: np.ndarray) -> np.ndarray:
    """Make the same as blocks of a float16 step and 32 uniform integers: many times as fast as quantising."""
    blocks = len(scale) * columns // 32
    body = 32 if kind == GGMLQuantizationType.Q8_0 else 16
    out = np.empty((blocks, 2 + body), dtype=np.uint8)
    out[:, 2:] = np.frombuffer(rng.bytes(blocks * body), dtype=np.uint8).reshape(blocks, body)
    levels = 256 if kind == GGMLQuantizationType.Q8_0 else 16
    step = np.repeat(scale * (12 / (levels**2 - 1)) ** 0.5, columns // 32)
    # The numbers reach one further down than up (-8 to 7): steps of either sign keep the mean at 0.
    step *= rng.choice(np.array([-1, 1], dtype=np.float32), blocks)
    out[:, :2] = step.astype(np.float16).view(np.uint8).reshape(blocks, 2)
    return out
