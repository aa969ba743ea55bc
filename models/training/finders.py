"""Attention heads that are taught where to look: at the sentence that holds the answer, while the answer begins."""

from __future__ import annotations

import math

import torch  # pyright: ignore[reportMissingImports]

FINDERS = ((-2, 0), (-1, 3))  # (layer, head)


def finding_loss(
    seen: tuple[torch.Tensor, torch.Tensor], head: int, sentences: torch.Tensor, sought: torch.Tensor
) -> torch.Tensor:
    """Return how far a head is from the right place: for each token with a sought sentence, minus the logarithm of the
    attention on that sentence.

    seen: a layer's queries and keys, (rows * length, heads, head size). sentences, sought: (rows, length).
    """
    queries, keys = seen
    q = queries[:, head].unflatten(0, sought.shape)
    k = keys[:, head * keys.shape[1] // queries.shape[1]].unflatten(0, sought.shape)  # the key head that its group shares
    losses = []
    for row in range(len(q)):
        (at,) = sought[row].nonzero(as_tuple=True)
        scores = (q[row, at].float() @ k[row].float().T) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.arange(q.shape[1], device=q.device) > at[:, None], -math.inf)
        elsewhere = sentences[row] != sought[row, at][:, None]
        losses.append(scores.logsumexp(-1) - scores.masked_fill(elsewhere, -math.inf).logsumexp(-1))
    return torch.cat(losses)
