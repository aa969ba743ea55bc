"""The order in which files leave: no other file stands on the next one, in any order of writing."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from slotcache.slots.disk import FileIndex
from slotcache.slots.radix import common_prefix

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)
RUNS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=30)


def stands_on(one, other):
    """Return whether a file (start, tokens) needs a part of another one's run."""
    (start, tokens), (before, path) = one, other
    common = common_prefix(np.array(tokens), np.array(path))
    return before < start and min(common, start) > before


@given(PATHS, RUNS, st.data())
def test_beginnings_leave_last(paths, runs, data):
    index, files = FileIndex(), {}
    for number, (which, start, length) in enumerate(runs):
        path = paths[which % len(paths)]
        start = min(start, len(path) - 1)
        tokens = path[: start + length]
        if (start, tuple(tokens)) in files.values():
            continue
        now, array = 1_000_000 * (number + 1), np.array(tokens, np.int32)
        needed = {entry.path for entry in index.prefixes("s", start, array)}
        file = Path(str(number))
        assert needed >= {name for name, other in files.items() if stands_on((start, tokens), other)}
        index.use(index.prefixes("s", start, array), now)
        index.add(file, "s", start, array, size=1, used=now)
        files[file] = (start, tuple(tokens))
        if data.draw(st.booleans()):
            leave(index, files)
    again = FileIndex()  # after a restart, from the files' times
    for entry in index.newest_first():
        again.add(entry.path, "s", entry.start, np.array(files[entry.path][1], np.int32), size=1, used=entry.used)
    again.settle()
    assert [one.path for one in again.newest_first()] == [one.path for one in index.newest_first()]
    while files:
        leave(again, files)
    assert not again.roots and again.num_bytes == 0


def leave(index, files):
    oldest = index.oldest()
    assert not [name for name, one in files.items() if stands_on(one, files[oldest.path])]
    index.remove(oldest)
    del files[oldest.path]
