"""Short pieces in which a prompt differs from an earlier one that goes on in the same way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.server.engine.usage import LONGEST_CHANGE, SAME_AFTER, changed_piece
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.scope import Scope

SCOPE = Scope.shared("")
FRONT, REST = list(range(100)), list(range(1000, 1200))


def after(*prompts):
    """What differs in the last of some prompts, each of which was computed in turn."""
    tree = PrefixTree(10_000)
    piece = None
    for prompt in prompts:
        tokens = np.array(prompt, np.int32)
        claim = tree.claim(SCOPE, tokens)
        tree.device.advance(claim.sequence, len(tokens))
        piece = changed_piece(claim.sequence.last_node, tokens, claim.cached)
        tree.release(claim.sequence)
    return piece and (piece.before.tolist(), piece.after.tolist(), piece.num_after)


@given(
    st.lists(st.integers(2000, 2003), max_size=LONGEST_CHANGE),
    st.lists(st.integers(2010, 2013), max_size=LONGEST_CHANGE),
)
def test_a_piece_that_changed_is_found_with_all_that_follows(old, new):
    expected = (old, new, len(REST)) if old or new else None
    found = after(FRONT + old + REST, FRONT + new + REST)
    assert found == expected


def test_of_several_prompts_the_one_that_goes_on_longest_counts():
    prompts = [[*FRONT, 1, *REST], [*FRONT, 2, *REST[:40], 7], [*FRONT, 3, *REST]]
    assert after(*prompts) == ([1], [3], len(REST))


@pytest.mark.parametrize(
    "prompt",
    [
        [*FRONT, *range(5000, 5200)],  # another question
        [*FRONT, *range(5000, 5001 + LONGEST_CHANGE), *REST],  # too long for a piece
        [*FRONT, 5000, *REST[: SAME_AFTER - 1]],  # too little behind it
        FRONT,
    ],
)
def test_what_is_no_piece_is_none(prompt):
    assert after([*FRONT, 1, *REST], prompt) is None
