"""A hypothesis state machine: tree and scheduler against a simple model of memory, over random lives.

SLOTCACHE_LIVES says how many lives: 200, under a minute, if it is not set.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.chatting import Chatting
from support.keeping import Keeping
from support.life import EXPECTED, SEEN

LIVES = int(os.environ.get("SLOTCACHE_LIVES", "200"))


class Lives(Chatting, Keeping):
    """Everything that can happen, in any order."""


SHRINKING = 300  # s that hypothesis shortens a failing life for, at most: cut off, it would not tell what failed
TestLives = pytest.mark.timeout(900 + LIVES + SHRINKING)(Lives.TestCase)
TestLives.settings = settings(
    max_examples=LIVES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list[Any](HealthCheck),
    phases=set(Phase) - {Phase.explain},  # it traces every line
)


def test_those_lives_had_everything_that_can_happen():
    if LIVES < 5000 or not SEEN:
        pytest.skip("looks back on the lives above: SLOTCACHE_LIVES=5000 or more")
    print(dict(sorted(SEEN.items())))
    assert {name for name in EXPECTED if not SEEN[name]} == set()
