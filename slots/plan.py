"""A step as frozen values: the memory operations in their order, and the spans of one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .reuse import Source


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy of the KV at positions [start, stop) of one path.

    data: the KV (uint8); None until the plan that makes the copy has run.
    users: how many nodes use the copy. If a run is split, both parts use the same copy.
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
    """Let sequence `target` also hold the cells of `source` at positions [start, stop) (`seq_cp`). No data moves."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Remove `sequence` from its cells at positions [start, stop) (`seq_rm`). A cell that no sequence holds is free."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove `sequence` from all its cells."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the KV of `sequence` at positions [copy.start, copy.stop) to host memory, into `copy`."""

    sequence: int
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class Restore:
    """Give `sequence` new cells at positions [start, stop), filled with KV from `copy`.

    distance: how many positions the KV moves up from its position in the copy. If `distance` is not 0, the keys are rotated.
    """

    copy: HostCopy
    sequence: int
    start: int
    stop: int
    distance: int = 0


@dataclass(frozen=True, slots=True)
class Snap:
    """Copy into `copy`, in host memory, the recurrent state that `sequence` has after copy.stop tokens."""

    sequence: int
    copy: HostCopy


@dataclass(frozen=True, slots=True)
class Load:
    """Give `sequence` the recurrent state in `copy`. The sequence already holds the KV of positions [0, copy.stop)."""

    copy: HostCopy
    sequence: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Free every cell."""


Operation = Share | Trim | Drop | Save | Restore | Snap | Load | Clear


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive tokens of one request, which a step computes.

    tokens (int32): the ids at positions [start, start + len(tokens)) of `sequence`.
    logits: whether a token is sampled after the span.
    drafted: how many of the span's last tokens are a draft. The runner samples a token to compare with the first drafted
        token. After each drafted token that equals the sampled one, the runner samples another token.
    scored (int32): prompt tokens, from position start + 1 on, whose logprobs the request wants.
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
        """The number of rows of logits that the span needs."""
        return self.num_scored + self.logits + self.drafted

    @property
    def draft(self) -> np.ndarray:
        return self.tokens[len(self.tokens) - self.drafted :]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: carry out `operations` in order, then compute `spans` as one batch.

    afterwards: operations to carry out after the batch, even if the batch fails.
    num_spare: how many cells stay free during the batch. The runner may use these cells until the step ends.
    background: whether the step may be aborted, because no client waits for it.
    admitted: the ids of the requests that were admitted for this step.
    adapters: the LoRA adapters with which all spans are computed.
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
