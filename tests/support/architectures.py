"""Makes tiny models with random weights, of other architectures than Llama: sliding windows, recurrent, hybrid, mixtures."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from slotcache.bench.random_models import ModelFile, Vocabulary, train

LAYERS, WIDTH, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 4, 128, 4, 2, 256, 1024
WINDOW = 32


@cache
def vocabulary() -> Vocabulary:
    """Return the vocabulary of all these models. It is trained only once, because that takes seconds."""
    return train(VOCABULARY, 700)


class TinyModel(ModelFile):
    """A GGUF file that is being made. The end of the `with` block finishes it.

    floats: store weights as float32. With Q8_0, other rounding of a last bit, in a larger batch or at other cells, may move
    a number to the next of 255 steps, and so choose another token.
    """

    def __init__(
        self, path: Path, architecture: str, layers: int = LAYERS, *, embedding: bool = True, floats: bool = False
    ) -> None:
        super().__init__(path, architecture, vocabulary())
        self._floats = floats
        self.rng = np.random.default_rng(0)
        self.set_metadata(context_length=8192, embedding_length=WIDTH, block_count=layers, vocab_size=VOCABULARY)
        if embedding:
            self.matrix("token_embd", VOCABULARY, WIDTH)

    def set_metadata(self, **fields: object) -> None:
        """Write metadata fields, by the names of the writer's methods."""
        for name, value in fields.items():
            getattr(self.writer, f"add_{name}")(value)

    def blocks(self, *norms: str, layers: int = LAYERS) -> Iterator[tuple[int, str]]:
        """Write these norms for each layer, and yield the layer's number and name."""
        for layer in range(layers):
            for norm in norms:
                self.ones(f"blk.{layer}.{norm}_norm", WIDTH)
            yield layer, f"blk.{layer}"

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Write a matrix of random weights."""
        self.matrices(name, (rows, columns), gain)

    def matrices(self, name: str, shape: tuple[int, ...], gain: float = 1.0) -> None:
        """Write several matrices as one tensor, such as those of all experts."""
        values = self.random(*shape, gain=gain)
        if self._floats:
            self.numbers(f"{name}.weight", values)
            return
        blocks = values.reshape(*shape[:-1], -1, 32)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        whole = np.rint(blocks / scale).astype(np.int8)
        data = np.concatenate([scale.astype(np.float16).view(np.uint8), whole.view(np.uint8)], axis=-1)
        self.tensor(f"{name}.weight", shape, lambda: data.reshape(*shape[:-1], -1), GGMLQuantizationType.Q8_0)

    def numbers(self, name: str, values: np.ndarray) -> None:
        """Write values as float32."""
        self.tensor(name, values.shape, lambda: values.astype(np.float32))

    def ones(self, name: str, size: int, value: float = 1.0) -> None:
        self.numbers(f"{name}.weight", np.full(size, value))

    def random(self, *shape: int, gain: float = 1.0) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32) * (gain / shape[-1] ** 0.5)

    def attention(self, block: str, adds: float = 1.0) -> None:
        self.matrix(f"{block}.attn_q", WIDTH, WIDTH, 2.0)
        self.matrix(f"{block}.attn_k", WIDTH // HEADS * KV_HEADS, WIDTH, 2.0)
        self.matrix(f"{block}.attn_v", WIDTH // HEADS * KV_HEADS, WIDTH)
        self.matrix(f"{block}.attn_output", WIDTH, WIDTH, adds)

    def head(self, block: str, reading: np.ndarray) -> None:
        """Write the tensors that make a layer a multi-token head, which reads a token and a state together."""
        self.numbers(f"{block}.nextn.eh_proj.weight", reading)
        for name in ("enorm", "hnorm"):
            self.ones(f"{block}.nextn.{name}", WIDTH)

    def feed_forward(self, block: str, adds: float = 1.0) -> None:
        self.matrix(f"{block}.ffn_gate", FEED_FORWARD, WIDTH)
        self.matrix(f"{block}.ffn_up", FEED_FORWARD, WIDTH)
        self.matrix(f"{block}.ffn_down", WIDTH, FEED_FORWARD, adds)


def windowed(path: Path, floats: bool = False) -> Path:
    """Write a model of Cohere 2's architecture, with windows of 32 in layers 0 to 2, and none in layer 3."""
    with TinyModel(path, "cohere2", floats=floats) as model:
        model.set_metadata(feed_forward_length=FEED_FORWARD, head_count=HEADS, head_count_kv=KV_HEADS)
        model.set_metadata(rope_dimension_count=WIDTH // HEADS, layer_norm_eps=1e-5, logit_scale=1.0, sliding_window=WINDOW)
        model.ones("output_norm", WIDTH, 3.0)
        for _, block in model.blocks("attn"):
            model.attention(block)
            model.feed_forward(block)
    return path


def mixture(path: Path, layers: int = 6, experts: int = 16, feed_forward: int = 512) -> Path:
    """Write a model of Mixtral's architecture. Each token uses two experts per layer. 20 MiB, nearly all of it experts."""
    with TinyModel(path, "llama", layers) as model:
        model.set_metadata(
            feed_forward_length=feed_forward, head_count=HEADS, head_count_kv=KV_HEADS, layer_norm_rms_eps=1e-5
        )
        model.set_metadata(expert_count=experts, expert_used_count=2)
        model.ones("output_norm", WIDTH, 3.0)
        for _, block in model.blocks("attn", "ffn", layers=layers):
            model.attention(block)
            model.numbers(f"{block}.ffn_gate_inp.weight", model.random(experts, WIDTH))
            model.matrices(f"{block}.ffn_gate_exps", (experts, feed_forward, WIDTH))
            model.matrices(f"{block}.ffn_up_exps", (experts, feed_forward, WIDTH))
            model.matrices(f"{block}.ffn_down_exps", (experts, WIDTH, feed_forward))
    return path


def recurrent(path: Path, floats: bool = False) -> Path:
    """Write a model of Mamba's architecture, without attention and with a state of fixed size."""
    inner, state, kernel, rank = 2 * WIDTH, 16, 4, 32
    with TinyModel(path, "mamba", floats=floats) as model:
        model.set_metadata(feed_forward_length=0, head_count=0, layer_norm_rms_eps=1e-5, ssm_conv_kernel=kernel)
        model.set_metadata(ssm_inner_size=inner, ssm_state_size=state, ssm_time_step_rank=rank)
        model.ones("output_norm", WIDTH, 3.0)
        for _, block in model.blocks("attn"):
            model.matrix(f"{block}.ssm_in", 2 * inner, WIDTH)
            model.numbers(f"{block}.ssm_conv1d.weight", model.random(inner, kernel))
            model.numbers(f"{block}.ssm_conv1d.bias", np.zeros(inner))
            model.matrix(f"{block}.ssm_x", rank + 2 * state, inner)
            model.matrix(f"{block}.ssm_dt", inner, rank)
            model.numbers(f"{block}.ssm_dt.bias", np.full(inner, -3.0))  # a long memory
            model.numbers(f"{block}.ssm_a", -np.tile(np.arange(1, state + 1) / state, (inner, 1)))
            model.numbers(f"{block}.ssm_d", np.ones(inner))
            model.matrix(f"{block}.ssm_out", WIDTH, inner)
    return path


def hybrid(path: Path, floats: bool = False) -> Path:
    """Write a model of LFM 2's architecture: short convolutions in layers 0 and 2, attention in layers 1 and 3."""
    kernel = 3
    with TinyModel(path, "lfm2", floats=floats) as model:
        model.set_metadata(feed_forward_length=FEED_FORWARD, head_count=HEADS, head_count_kv=[0, KV_HEADS, 0, KV_HEADS])
        model.set_metadata(layer_norm_rms_eps=1e-5, shortconv_l_cache=kernel)
        model.ones("token_embd_norm", WIDTH, 3.0)
        for layer, block in model.blocks("attn", "ffn"):
            model.feed_forward(block)
            if layer % 2:
                model.attention(block)
                model.ones(f"{block}.attn_q_norm", WIDTH // HEADS)
                model.ones(f"{block}.attn_k_norm", WIDTH // HEADS)
            else:
                model.numbers(f"{block}.shortconv.conv.weight", model.random(WIDTH, kernel))
                model.matrix(f"{block}.shortconv.in_proj", 3 * WIDTH, WIDTH, 2.0)
                model.matrix(f"{block}.shortconv.out_proj", WIDTH, WIDTH)
    return path


def delta(path: Path, heads: int = 0, floats: bool = False) -> Path:
    """Write a model of Qwen 3.5's architecture: gated delta nets in layers 0 to 2, gated attention in layer 3.

    heads: the number of multi-token heads.
    """
    size, key_heads, value_heads, kernel = 32, 2, 4, 4
    keys, values = size * key_heads, size * value_heads
    with TinyModel(path, "qwen35", LAYERS + heads, floats=floats) as model:
        if heads:
            model.set_metadata(nextn_predict_layers=heads)
        model.set_metadata(
            feed_forward_length=FEED_FORWARD, head_count=HEADS, head_count_kv=KV_HEADS, layer_norm_rms_eps=1e-5
        )
        model.set_metadata(rope_dimension_sections=[8, 8, 0, 0], full_attention_interval=LAYERS, ssm_conv_kernel=kernel)
        model.set_metadata(
            ssm_inner_size=values, ssm_state_size=size, ssm_time_step_rank=value_heads, ssm_group_count=key_heads
        )
        model.ones("output_norm", WIDTH, 3.0)
        for layer, block in model.blocks("attn", "post_attention", layers=LAYERS + heads):
            model.feed_forward(block)
            if layer >= LAYERS:
                model.head(block, model.random(WIDTH, 2 * WIDTH))
            if layer >= LAYERS - 1:
                model.matrix(f"{block}.attn_q", 2 * WIDTH, WIDTH, 2.0)  # each number has a gate
                model.matrix(f"{block}.attn_k", WIDTH // HEADS * KV_HEADS, WIDTH, 2.0)
                model.matrix(f"{block}.attn_v", WIDTH // HEADS * KV_HEADS, WIDTH)
                model.matrix(f"{block}.attn_output", WIDTH, WIDTH)
                model.ones(f"{block}.attn_q_norm", WIDTH // HEADS)
                model.ones(f"{block}.attn_k_norm", WIDTH // HEADS)
            else:
                model.matrix(f"{block}.attn_qkv", 2 * keys + values, WIDTH, 2.0)
                model.matrix(f"{block}.attn_gate", values, WIDTH)
                model.numbers(f"{block}.ssm_conv1d.weight", model.random(2 * keys + values, kernel))
                model.numbers(f"{block}.ssm_dt.bias", np.full(value_heads, -3.0))  # a long memory
                model.numbers(f"{block}.ssm_a", -np.arange(1, value_heads + 1) / value_heads)
                model.matrix(f"{block}.ssm_beta", value_heads, WIDTH)
                model.matrix(f"{block}.ssm_alpha", value_heads, WIDTH)
                model.ones(f"{block}.ssm_norm", size)
                model.matrix(f"{block}.ssm_out", WIDTH, values)
    return path


def mamba2(path: Path, floats: bool = False) -> Path:
    """Write a model of Granite 4's architecture: Mamba 2 in layers 0 and 2, attention in layers 1 and 3."""
    inner, state, heads, groups, kernel = 2 * WIDTH, 32, 4, 1, 4
    with TinyModel(path, "granitehybrid", floats=floats) as model:
        model.set_metadata(feed_forward_length=FEED_FORWARD, head_count=HEADS, head_count_kv=[0, KV_HEADS, 0, KV_HEADS])
        model.set_metadata(rope_dimension_count=WIDTH // HEADS, layer_norm_rms_eps=1e-5, ssm_conv_kernel=kernel)
        model.set_metadata(ssm_inner_size=inner, ssm_state_size=state, ssm_time_step_rank=heads, ssm_group_count=groups)
        model.ones("output_norm", WIDTH, 3.0)
        for layer, block in model.blocks("attn", "ffn"):
            model.feed_forward(block)
            if layer % 2:
                model.attention(block)
            else:
                model.matrix(f"{block}.ssm_in", 2 * inner + 2 * groups * state + heads, WIDTH)
                model.numbers(f"{block}.ssm_conv1d.weight", model.random(inner + 2 * groups * state, kernel))
                model.numbers(f"{block}.ssm_conv1d.bias", np.zeros(inner + 2 * groups * state))
                model.numbers(f"{block}.ssm_dt.bias", np.full(heads, -3.0))  # a long memory
                model.numbers(f"{block}.ssm_a", -np.arange(1, heads + 1).reshape(heads, 1) / heads)
                model.numbers(f"{block}.ssm_d", np.ones((heads, 1)))
                model.numbers(f"{block}.ssm_norm.weight", np.ones((groups, inner // groups)))
                model.matrix(f"{block}.ssm_out", WIDTH, inner)
    return path


def with_head(path: Path, reads: str = "token", heads: int = 1, dense: int = 1) -> Path:
    """Write a model of GLM 4.5's architecture with a multi-token head. Nearly always, tokens follow each other in a circle.

    reads: what the head uses to guess the token after the last one: the last `token`, the `state` of the token before it,
    or, with attention, `all`. With `token` every guess is right. With `state` only the first guess after each state of the
    model is right. With `all` guesses are always wrong, and depend on every token and state.
    heads: the heads that the file declares; 0: one layer for a head, but no head.
    dense: the layers without experts.
    """
    experts, small = 4, 0.05
    with TinyModel(path, "glm4moe", LAYERS + (heads or 1), embedding=False) as model:
        model.set_metadata(feed_forward_length=FEED_FORWARD, expert_feed_forward_length=FEED_FORWARD, head_count=HEADS)
        model.set_metadata(head_count_kv=KV_HEADS, rope_dimension_count=WIDTH // HEADS, layer_norm_rms_eps=1e-5)
        model.set_metadata(expert_count=experts, expert_used_count=2, expert_shared_count=1, leading_dense_block_count=dense)
        model.set_metadata(nextn_predict_layers=heads or 1)
        words = np.array([token.isascii() for token in vocabulary().tokens]) & (np.array(vocabulary().types) == 1)
        circle, embedding = np.flatnonzero(words), model.random(VOCABULARY, WIDTH, gain=WIDTH**0.5)
        model.numbers("token_embd.weight", embedding)
        model.ones("output_norm", WIDTH, 12.0 / WIDTH)

        def following(ahead: int) -> np.ndarray:
            """Return output rows that choose the token `ahead` places further on in the circle."""
            rows = np.zeros((VOCABULARY, WIDTH), np.float32)
            rows[np.roll(circle, -ahead)] = embedding[circle]
            return rows

        model.numbers("output.weight", following(1))
        for layer, block in model.blocks("attn", "post_attention", layers=LAYERS + heads):
            model.attention(block, 1.0 if reads == "all" else small)
            if layer < dense:
                model.feed_forward(block, small)
                continue
            model.numbers(f"{block}.ffn_gate_inp.weight", model.random(experts, WIDTH))
            model.numbers(f"{block}.exp_probs_b.bias", np.zeros(experts))
            for kind, rows, columns in (
                ("gate", FEED_FORWARD, WIDTH),
                ("up", FEED_FORWARD, WIDTH),
                ("down", WIDTH, FEED_FORWARD),
            ):
                model.matrices(f"{block}.ffn_{kind}_exps", (experts, rows, columns), small)
                model.matrix(f"{block}.ffn_{kind}_shexp", rows, columns, small)
            if layer < LAYERS:
                continue
            reading = np.hstack([np.eye(WIDTH) * (reads == "token"), np.eye(WIDTH) * (reads == "state")])
            model.head(block, model.random(WIDTH, 2 * WIDTH) if reads == "all" else reading)
            model.ones(f"{block}.nextn.shared_head_norm", WIDTH, 12.0 / WIDTH)
            model.numbers(f"{block}.nextn.shared_head_head.weight", following(2 if reads == "state" else 1))
    return path
