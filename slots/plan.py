"""One step as plain frozen values: memory operations first, in order, then the spans of one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .reuse import Source


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy of the KV at positions [start, stop) of one path.

    data: uint8, None until the plan that saves it has run.
    users: the number of nodes whose runs are in the copy; both parts of a split run use the same copy.
    """

    start: int
    stop: int
    data: np.ndarray | None = None
    users: int = 1
    source: str = Source.HOST  # the origin that its reuse counts under: the kind of copy, or the name of its lower tier
    num_fetches: int = 0  # fetches of waiting requests that will need it

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Share:
    """Let `target` hold the cells of `source` at positions [start, stop), too. No data moves (`seq_cp`)."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Take `sequence` out of its cells at positions [start, stop) (`seq_rm`); a cell without a sequence is free."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Take `sequence` out of all its cells."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the KV of `sequence` at positions [copy.start, copy.stop) to host memory, into `copy`."""

    sequence: int
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class Restore:
    """Give `sequence` new cells at positions [start, stop) with their KV from `copy`.

    distance: by how many positions the KV moves up from its position in the copy; the keys are rotated if it is not 0.
    """

    copy: HostCopy
    sequence: int
    start: int
    stop: int
    distance: int = 0


@dataclass(frozen=True, slots=True)
class Snap:
    """Copy the recurrent state that `sequence` has after copy.stop tokens to host memory, into `copy`."""

    sequence: int
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class Load:
    """Give `sequence`, which holds the KV of positions [0, copy.stop), the recurrent state in `copy`."""

    copy: HostCopy
    sequence: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Free every cell."""


Operation = Share | Trim | Drop | Save | Restore | Snap | Load | Clear


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive tokens of one request to compute.

    tokens (int32): the ids at positions [start, start + len(tokens)) of `sequence`.
    logits: whether a token is sampled after the last one.
    drafted: how many of the last tokens are a draft. The runner samples before the first drafted token and after each of
        them, as long as its choices equal the draft.
    scored (int32): the prompt tokens whose logprobs the request wants; each follows one of the span's first tokens.
    """

    request: int
    sequence: int
    start: int
    tokens: np.ndarray
    logits: bool
    drafted: int = 0
    scored: np.ndarray | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_scored(self) -> int:
        return 0 if self.scored is None else len(self.scored)

    @property
    def num_rows(self) -> int:
        """Rows of logits that the span needs."""
        return self.num_scored + self.logits + self.drafted

    @property
    def draft(self) -> np.ndarray:
        return self.tokens[len(self.tokens) - self.drafted :]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: carry out `operations` in order, then compute `spans` as one batch of at most `batch_size` tokens.

    afterwards: operations after the batch, even after a batch that failed.
    num_spare: free cells that the batch does not take, for the runner's use during the step.
    background: no client waits for the step, so it may be aborted.
    admitted: ids of the requests that left the queue for the step.
    adapters: the LoRA adapters that compute all spans.
    """

    operations: tuple[Operation, ...] = ()
    spans: tuple[Span, ...] = ()
    afterwards: tuple[Operation, ...] = ()
    num_spare: int = 0
    background: bool = False
    admitted: tuple[int, ...] = ()
    adapters: str = ""
    num_tokens: int = field(init=False, compare=False)  # of all spans; read several times a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([len(span.tokens) for span in self.spans]))

    @property
    def has_drafts(self) -> bool:
        return any(span.drafted for span in self.spans)

    def __bool__(self) -> bool:
        return bool(self.operations or self.spans)
