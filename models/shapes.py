"""The shapes of models with random weights: sizes, tensors and their names."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}

OUTPUT_GAIN = 6.0  # makes up for the small embedding: logits with a standard deviation of 3

Matrix = tuple[str, int, int, float]
"""Name, rows, columns, gain."""


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
        if self.quantisation not in FILE_TYPES:
            raise ValueError(f"quantisation {self.quantisation!r} is not one of {', '.join(FILE_TYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"the heads ({self.heads}) must be a multiple of the KV heads ({self.kv_heads})")
        if self.width % (2 * self.heads):
            raise ValueError(f"the width ({self.width}) must be an even number for each of {self.heads} heads")
        block = GGML_QUANT_SIZES[GGMLQuantizationType[self.quantisation]][0]
        for name, size in (("width", self.width), ("feed-forward size", self.feed_forward)):
            if size % block:
                raise ValueError(f"the {name} ({size}) must be a multiple of {block} for {self.quantisation}")

    @property
    def architecture(self) -> str:
        """The name that llama.cpp has for it."""
        return "llama"

    @property
    def kv_width(self) -> int:
        """Numbers that a token puts into each layer's K, and as many into its V."""
        return self.width // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """Numbers in the matrices."""
        return sum(rows * columns for _, rows, columns, _ in self.matrices())

    def matrices(self) -> Iterator[Matrix]:
        """Yield (name, rows, columns, gain) of each matrix; with gain 1 the output is as large as the input.

        The gains keep greedy decoding from going in circles. A small embedding: with tied weights a large one makes
        the last token the next one, too. Sharp attention: the next token depends on more than the last few tokens.
        """
        yield "token_embd.weight", self.vocabulary, self.width, 0.5
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
        """Yield (name, float32) of each tensor that is no matrix: normalisations, the same value `width` times."""
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", _ones(self.width)
            yield f"blk.{layer}.ffn_norm.weight", _ones(self.width)
        yield "output_norm.weight", OUTPUT_GAIN * _ones(self.width)

    def describe(self, writer: GGUFWriter) -> None:
        """Write the sizes."""
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
class HybridShape(Shape):
    """The sizes of a Qwen 3.5: gated delta nets, and gated attention in every fourth layer.

    delta_heads: of a delta net, with a state of `delta_size` squared numbers each.
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
        """Numbers that a token puts into each of a delta net's Q, K and V."""
        return self.delta_heads * self.delta_size

    def is_attention(self, layer: int) -> bool:
        return layer % self.interval == self.interval - 1

    def mixer(self, layer: int, block: str) -> Iterator[Matrix]:
        if self.is_attention(layer):
            for name, rows, columns, gain in Shape.mixer(self, layer, block):
                is_gated = name.endswith("attn_q.weight")  # a gate for each number
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
        Shape.describe(self, writer)
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
    "tiny": Shape(layers=2, width=128, heads=4, kv_heads=2, feed_forward=256, vocabulary=1024, merges=700),
    "exact": Shape(
        layers=2, width=102, heads=3, kv_heads=1, feed_forward=202, vocabulary=1024, merges=700, quantisation="F32"
    ),
    "bench": Shape(layers=12, width=512, heads=8, kv_heads=2, feed_forward=1408, vocabulary=151936, merges=4000),
    "bench-hybrid": HybridShape(layers=8, width=512, heads=8, kv_heads=2, feed_forward=1408, vocabulary=151936, merges=4000),
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
- `bench-hybrid`: the same for a hybrid; 113 M parameters, 1 KiB of KV a token and a recurrent state of 3.2 MiB, as much as
  that of 3,200 tokens; of Qwen 3.5 with 27 B parameters, 2,400.
- the others: the sizes of well-known models, for a GPU.
"""
