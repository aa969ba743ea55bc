"""Muon (Jordan et al. 2024): momentum with all singular values made about one; for matrices, in 32 bits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor  # pyright: ignore[reportMissingImports]

# The quintic iteration of the paper's code: steep at zero, so that few rounds are enough.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Takes AdamW's learning rate: updates are scaled to the size of AdamW's (Liu et al. 2025)."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do one update; matrices of one shape together."""
        for group in self.param_groups:
            for shape, same in groupby(sorted(group["params"], key=lambda p: p.shape), key=lambda p: p.shape):
                self._update(list(same), 0.2 * max(shape) ** 0.5, group)

    def _update(self, matrices: list[Tensor], scale: float, group: dict) -> None:
        directions = []
        for matrix in matrices:
            state = self.state[matrix]
            if not state:
                state["exp_avg"] = torch.zeros_like(matrix)
            state["exp_avg"].lerp_(matrix.grad, 1 - group["momentum"])
            directions.append(torch.lerp(matrix.grad, state["exp_avg"], group["momentum"]))
        for matrix, update in zip(matrices, _orthogonal(torch.stack(directions)), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def _orthogonal(x: Tensor) -> Tensor:
    """Return x (matrices, rows, columns) with singular values near one."""
    if x.shape[-2] > x.shape[-1]:
        return _orthogonal(x.mT).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x
