"""The loss of a batch: the tokens of answers, with less weight the rest of the text, and the places that finders look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch  # pyright: ignore[reportMissingImports]

from .finders import FINDERS, finding_loss
from .network import Network
from .sample import HEAD
from .stream import Batch

HEAD_WEIGHT = 3.0  # of the first tokens of an answer


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights relative to a token of an answer. scored: the share of the tokens besides answers that are scored."""

    text: float
    finders: float
    scored: float


@dataclass(frozen=True, slots=True)
class LossSums:
    """Means since the last report: loss of answer tokens, share of them that were right, loss of the finders."""

    loss: float
    right: float
    finders: float


class BatchLoss:
    """Computes the loss of batches, and sums it up for the log."""

    def __init__(self, network: Network, dtype: torch.dtype, weights: LossWeights) -> None:
        self._network, self._dtype, self._weights = network, dtype, weights
        self._device = network.token_embd.device
        # Since the last report: loss, hits and number of answer tokens; loss and number of the finders' tokens.
        self._sums = torch.zeros(5, device=self._device)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, ready for `backward`."""
        weights = self._weights
        tokens, marks, sentences, sought = self._to_device(batch)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        x = self._network.hidden(tokens[:, :-1], self._dtype, seen=seen)
        lost = torch.cat([finding_loss(seen[layer], head, sentences[:, :-1], sought[:, :-1]) for layer, head in FINDERS])
        target, mark = tokens[:, 1:].reshape(-1), _with_heads(marks)[:, 1:].reshape(-1)
        if weights.scored < 1:
            kept = ((mark >= 2) | ((mark == 1) & (torch.rand(len(mark)) < weights.scored))).nonzero()[:, 0]
            x, target, mark = x[kept], target[kept], mark[kept]
        losses, right = self._network.score(x, target)
        answer = mark >= 2
        weight = answer + (HEAD_WEIGHT - 1) * (mark == 3) + weights.text / weights.scored * (mark == 1)
        with torch.no_grad():
            found = torch.stack([lost.detach().sum(), torch.tensor(float(len(lost)), device=self._device)])
            answers = torch.stack([(losses * answer).sum(), (right & answer).sum(), answer.sum()])
            self._sums += torch.cat([answers, found])
        loss = (losses * weight).sum() / weight.sum()
        return loss + weights.finders * lost.mean() if len(lost) else loss

    def take_sums(self) -> LossSums:
        """Return the means since the last call."""
        total, hits, count, lost, looks = self._sums.tolist()
        self._sums.zero_()
        return LossSums(total / max(count, 1), hits / max(count, 1), lost / max(looks, 1))

    def _to_device(self, batch: Batch) -> list[torch.Tensor]:
        fields = [torch.from_numpy(field) for field in (batch.tokens, batch.marks, batch.sentences, batch.sought)]
        if self._device.type == "cuda":
            fields = [field.pin_memory() for field in fields]
        tokens, *rest = (field.to(self._device, non_blocking=True) for field in fields)
        return [tokens.long(), *rest]


def _with_heads(marks: torch.Tensor) -> torch.Tensor:
    """Return marks (rows, tokens) with 3 instead of 2 for the first tokens of an answer."""
    before = torch.nn.functional.pad(marks, (HEAD, 0))[:, :-HEAD]
    return torch.where((marks == 2) & (before != 2), 3, marks)
