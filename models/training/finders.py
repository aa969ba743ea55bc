"""Heads that are taught where to look: at the sentence of a document that answers, while the answer begins."""

from __future__ import annotations

import math

import torch  # pyright: ignore[reportMissingImports]

FINDERS = ((-2, 0), (-1, 3))  # their layers, and which head of each


def finding_loss(
    queries: torch.Tensor, keys: torch.Tensor, head: int, sentences: torch.Tensor, sought: torch.Tensor
) -> torch.Tensor:
    """How far a head is from looking where it should: for each place with something sought, minus the logarithm of the
    attention that goes to the sentence.

    queries, keys: (rows * length, their heads, head size); sentences, sought: (rows, length).
    """
    q = queries[:, head].unflatten(0, sought.shape)
    k = keys[:, head * keys.shape[1] // queries.shape[1]].unflatten(0, sought.shape)  # the one that its group shares
    losses = []
    for row in range(len(q)):
        (at,) = sought[row].nonzero(as_tuple=True)
        scores = (q[row, at].float() @ k[row].float().T) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.arange(q.shape[1], device=q.device) > at[:, None], -math.inf)
        elsewhere = sentences[row] != sought[row, at][:, None]
        losses.append(scores.logsumexp(-1) - scores.masked_fill(elsewhere, -math.inf).logsumexp(-1))
    return torch.cat(losses)
