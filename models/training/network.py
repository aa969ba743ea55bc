"""The network: a Llama as llama.cpp computes it, with rotary positions on neighbouring pairs and a tied embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes. All but the numbers of layers and heads are multiples of 32, as Q8_0 requires."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 64
    feed_forward: int = 704
    vocabulary: int = 2048
    context: int = 4096
    rope_base: float = 10_000.0
    epsilon: float = 1e-5


class Layer(nn.Module):
    """The weights of one layer, named as in a GGUF."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.attn_norm = nn.Parameter(torch.ones(shape.width))
        self.attn_q = _matrix(queries, shape.width)
        self.attn_k = _matrix(keys, shape.width)
        self.attn_v = _matrix(keys, shape.width)
        self.attn_output = _matrix(shape.width, queries, (2 * shape.layers) ** -0.5)
        self.ffn_norm = nn.Parameter(torch.ones(shape.width))
        self.ffn_gate = _matrix(shape.feed_forward, shape.width)
        self.ffn_up = _matrix(shape.feed_forward, shape.width)
        self.ffn_down = _matrix(shape.width, shape.feed_forward, (2 * shape.layers) ** -0.5)

    def before(self) -> tuple[Tensor, ...]:
        """Return the weights before the attention."""
        return self.attn_norm, self.attn_q, self.attn_k, self.attn_v

    def after(self) -> tuple[Tensor, ...]:
        """Return the weights after the attention."""
        return self.attn_output, self.ffn_norm, self.ffn_gate, self.ffn_up, self.ffn_down


class Network(nn.Module):
    """The whole network. The parts around the attention see a flat list of tokens, without rows.

    They are compiled once if all batches have the same number of tokens, for any length of rows.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = _matrix(shape.vocabulary, shape.width, 0.65)
        self._layers = [Layer(shape) for _ in range(shape.layers)]
        self.blk = nn.ModuleList(self._layers)
        self.output_norm = nn.Parameter(torch.ones(shape.width))
        half = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
        angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * shape.rope_base**-half
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)
        self._before: Callable = _before
        self._after: Callable = _after
        self._score: Callable = _score

    def compile_parts(self, score: bool) -> None:
        """Compile the parts around the attention at their next call; also the score if its size is constant."""
        self._before = torch.compile(_before, dynamic=False)
        self._after = torch.compile(_after, dynamic=False)
        if score:
            self._score = torch.compile(_score, dynamic=False)

    def plain_parts(self) -> None:
        """Use the parts without compilation."""
        self._before, self._after, self._score = _before, _after, _score

    def hidden(self, tokens: Tensor, dtype: torch.dtype, plain: bool = False, seen: list | None = None) -> Tensor:
        """Return (rows * length, width) before the last norm, for tokens (rows, length); each row starts at position 0.

        seen: a list to which the queries and keys of each layer are appended, (rows * length, heads, head size).
        """
        rows, length = tokens.shape
        before, after = (_before, _after) if plain else (self._before, self._after)
        cos = self.cos[:length].repeat(rows, 1, 1)
        sin = self.sin[:length].repeat(rows, 1, 1)
        x = F.embedding(tokens.reshape(-1), self.token_embd).to(dtype)
        for layer in self._layers:
            q, k, v = before(x, cos, sin, layer.before(), head_size=self.shape.head_size, epsilon=self.shape.epsilon)
            if seen is not None:
                seen.append((q, k))
            x = after(x, self._attend(q, k, v, (rows, length)), layer.after(), epsilon=self.shape.epsilon)
        return x

    def score(self, x: Tensor, targets: Tensor, plain: bool = False) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy (float32) of each target for a token of `hidden`, and whether the target is likeliest."""
        score = _score if plain else self._score
        return score(x, targets, (self.output_norm, self.token_embd), epsilon=self.shape.epsilon)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        shape, (rows, length) = self.shape, size
        group = shape.heads // shape.kv_heads
        q = q.view(rows, length, shape.heads, shape.head_size).transpose(1, 2)
        k, v = (
            t.view((rows, length, shape.kv_heads, 1, shape.head_size))
            .expand((-1, -1, -1, group, -1))
            .reshape(rows, length, shape.heads, shape.head_size)
            .transpose(1, 2)
            for t in (k, v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(rows * length, shape.heads * shape.head_size)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (0.5 * gain / columns**0.5))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbours of (tokens, heads, head size); llama.cpp's normal RoPE."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def _before(
    x: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, ...], *, head_size: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (tokens, heads, head size) of x (tokens, width).

    cos, sin: (tokens, 1, head size / 2).
    """
    norm, *projections = weights
    h = _norm(x, norm, epsilon)
    queries, keys, values = (_linear(h, weight).unflatten(-1, (-1, head_size)) for weight in projections)
    return _rotate(queries, cos, sin), _rotate(keys, cos, sin), values


def _after(x: Tensor, attended: Tensor, weights: tuple[Tensor, ...], *, epsilon: float) -> Tensor:
    """Return the next x from x and the attention's result (tokens, heads * head size)."""
    output, norm, gate, up, down = weights
    x = x + _linear(attended, output)
    h = _norm(x, norm, epsilon)
    return x + _linear(F.silu(_linear(h, gate)) * _linear(h, up), down)


def _score(x: Tensor, targets: Tensor, weights: tuple[Tensor, Tensor], *, epsilon: float) -> tuple[Tensor, Tensor]:
    norm, embedding = weights
    logits = _linear(_norm(x, norm, epsilon), embedding).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
