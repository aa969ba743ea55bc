"""Complete GGUF models with random weights: for tests and benchmarks that need an engine, and nothing to download."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType

from . import shapes, vocabulary
from .chat import named
from .chat.named import DEFAULT_TEMPLATE
from .shapes import FILE_TYPES, SHAPES, Shape
from .vocabulary import PRE_TOKENIZER, Vocabulary, byte_alphabet, train

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors written so far and in all."""


def generate(path: Path | str, shape: Shape, seed: int = 0, progress: Progress | None = None) -> Path:
    """Write a model of this shape to `path` and return the path. The file appears only when it is complete.

    The same Python, shape and seed give the same model. Its words mean nothing, but greedy decoding wanders, in ASCII,
    and never ends an answer by itself: the output rows of special, unused and non-ASCII tokens are nearly zero.
    """
    path = Path(path)
    words = train(shape.vocabulary, shape.merges)
    with _replacing(path) as partial:
        writer = GGUFWriter(partial, shape.architecture)
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
    sources = b"".join(
        Path(module).read_bytes() for module in (__file__, shapes.__file__, vocabulary.__file__, named.__file__)
    )
    digest = sha256(repr(shape).encode() + sources).hexdigest()[:12]
    path = folder / f"{name}-{digest}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        generate(path, shape)
    return path


def version_of(shape: Shape) -> str:
    """Return a digest of a shape and of the source that writes it, so that no version number has to be raised by hand."""
    sources = b"".join(
        Path(module).read_bytes() for module in (__file__, shapes.__file__, vocabulary.__file__, named.__file__)
    )
    return sha256(repr(shape).encode() + sources).hexdigest()[:12]


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
    writer.add_file_type(FILE_TYPES[shape.quantisation])
    writer.add_quantization_version(2)
    shape.describe(writer)
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
    for name, values in shape.arrays():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
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
    for _, values in shape.arrays():
        writer.write_tensor_data(values)


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
