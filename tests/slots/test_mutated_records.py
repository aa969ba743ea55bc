"""Record files, flipped, cut, swapped, extended, of another version, sparse: what comes back is right, or nothing does.

`make mutations` tries 10,000 damaged files, half of them here, where no model runs.
"""

import os
import random

import numpy as np
import pytest
from slotcache.slots.record import Record
from slotcache.slots.scope import Scope
from slotcache.slots.store.disk import INDEX, DiskTier
from slotcache.slots.store.record_file import FORMAT, MAGIC, Provenance
from support.mutation import cases, mutated

HERE = Provenance("0" * 32, "1" * 32)
WIDTH = 64  # bytes of a token's KV
AT_ONCE = 6  # files that are damaged together
BLOCK = 4096


def kv(scope, tokens, start):
    """The KV of tokens from a position on: each token's bytes depend on all tokens up to it, and on the scope."""
    seeds = np.cumsum(tokens.astype(np.uint64) * np.arange(1, len(tokens) + 1, dtype=np.uint64)) + np.uint64(len(scope.name))
    return np.concatenate([(seeds[start:, None] + np.arange(WIDTH, dtype=np.uint64)).astype(np.uint8)]).reshape(-1)


def records():
    """Two prompts of three runs each that share the first one, in two scopes."""
    chance = np.random.default_rng(1)
    for scope in (Scope.shared("s"), Scope.shared("other")):
        prefix = chance.integers(0, 1000, 90).astype(np.int32)
        for _ in range(2):
            tokens = np.concatenate([prefix, chance.integers(0, 1000, 160).astype(np.int32)])
            for start, stop in ((0, 90), (90, 170), (170, 250)):
                yield Record(scope, tokens[:stop], start, kv(scope, tokens[:stop], start), frequency=stop)


def swapped(files, chance):
    one, other = chance.sample(files, 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def of_another_version(files, chance):
    file, version = chance.choice(files), chance.choice((1, 2, FORMAT + 1))
    file.write_bytes(b"slotcache KV %d\n" % version + file.read_bytes()[len(MAGIC) :])


def sparse(files, chance):
    """Blocks that were never written read as zeros, as after a loss of power."""
    file = chance.choice(files)
    content = file.read_bytes()
    first = chance.randrange(0, len(content), BLOCK)
    file.write_bytes(content[:first])
    with file.open("r+b") as again:
        stop = first + BLOCK * chance.randint(1, 8)
        again.seek(stop)
        again.write(content[stop:])
        again.truncate(len(content))


def damaged(files, chance):
    file = chance.choice(files)
    file.write_bytes(mutated(file.read_bytes(), chance))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed at the start", "behind the server's back"])
def test_what_comes_back_from_damaged_files_is_right(tmp_path, caplog, is_noticed):
    """is_noticed: the files have other times than in the index, so that their heads are read at the start."""
    caplog.set_level("CRITICAL")
    first = DiskTier(tmp_path, 1 << 30, HERE)
    assert all([first.put(record) for record in records()])
    first.close()
    files = sorted(first.folder.glob("*.kv"))
    whole = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in [*files, first.folder / INDEX]}
    num_right = num_refused = 0
    for number in range(num_rounds := -(-cases(600, 0.5) // AT_ONCE)):
        chance = random.Random(number)
        for file, (content, _) in whole.items():
            file.write_bytes(content)
        for _ in range(AT_ONCE):
            chance.choice((swapped, of_another_version, sparse, damaged, damaged, damaged))(files, chance)
        for file, (_, used) in whole.items():
            if not is_noticed:
                os.utime(file, ns=(used, used))
        disk = DiskTier(tmp_path, 1 << 30, HERE)
        disk.wait()
        for record in filter(None, map(disk.get, list(disk.index.entries))):
            assert record.data.tobytes() == kv(record.scope, record.tokens, record.start).tobytes(), number
            num_right += 1
        num_refused += disk.num_refused
        disk.close()
    assert num_right > num_rounds and num_refused > num_rounds
