"""Draws the requests of a random life with hypothesis."""

from dataclasses import dataclass

from hypothesis import strategies as st
from slotcache.slots.scope import Scope

CONTEXT = 48  # most tokens of a prompt with its answer
SCOPES = st.sampled_from([*[Scope.shared("")] * 6, Scope.shared("x"), Scope.shared("", "a"), Scope.shared("", "ab")])


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to submit.

    of: the history that it continues, counted from the latest.
    share: the share of this history that it repeats.
    forced: the tokens that a grammar forces after each sampled token.
    """

    of: int
    share: float
    fresh: list[int]
    stops: set[int]
    limit: int
    scope: Scope
    cache: bool
    priority: int
    background: bool
    slot: int = 0  # the number of the slot that it waits for, from 1; 0: any slot
    forced: int = 0


ASKS = st.builds(
    Ask,
    of=st.integers(1, 4),
    share=st.sampled_from([1.0, 1.0, 0.7, 0.3]),
    fresh=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    stops=st.sets(st.integers(1, CONTEXT - 1), max_size=4),
    limit=st.integers(1, 10),
    scope=SCOPES,
    cache=st.sampled_from([True, True, True, False]),
    priority=st.sampled_from([0, 0, 1, -100]),
    background=st.sampled_from([False, False, True]),
    slot=st.sampled_from([0, 0, 0, 1, 2]),
    forced=st.sampled_from([0, 0, 0, 1, 4]),
)
