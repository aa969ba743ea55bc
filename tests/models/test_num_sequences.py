"""The ids of sequences that a server needs: few, where idle KV moves to host memory."""

from types import SimpleNamespace
from typing import Any

import pytest
from slotcache.models.context import num_sequences

DENSE, WINDOWED, HYBRID = (
    SimpleNamespace(can_trim=True, window=0),
    SimpleNamespace(can_trim=True, window=512),
    SimpleNamespace(can_trim=False, window=0),
)


@pytest.mark.parametrize(
    ("model", "slots", "moves_idle", "expected"),
    [
        (DENSE, 4, True, 64),
        (DENSE, 100, True, 202),  # one for each slot and one ahead
        (DENSE, 4, False, 256),  # each idle history keeps one
        (WINDOWED, 4, True, 128),  # each has a twin
        (WINDOWED, 100, True, 256),  # the most that there are
        (HYBRID, 4, True, 10),
    ],
)
def test_as_many_ids_as_may_be_in_use(model: Any, slots: int, moves_idle: bool, expected: int) -> None:
    assert num_sequences(model, slots, moves_idle=moves_idle) == expected
