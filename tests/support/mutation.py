"""Damages files at random, as a bad disk, a crash or a careless user would."""

import os
import random

import msgspec

from support.record_files import START, digest, head_of, resealed

CASES = int(os.environ.get("SLOTCACHE_MUTATIONS", 0))
ODD = [None, True, [], {}, "", "s" * 300, -1, 0, 1, 3, 1 << 31, 1 << 53, 1 << 80, 0.5, -0.0, 1e300, [[]], [["k", 0]],
       [["k", -1]], [["k", 1 << 20]], "0" * 32, "../x", "\0"]  # fmt: skip
INTERESTING = bytes([0, 1, 127, 128, 255])


def cases(usual: int, share: float) -> int:
    """Return how many cases to try: `usual`, or a share of SLOTCACHE_MUTATIONS if it is set."""
    return round(CASES * share) or usual


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return the bytes after one to three random damages."""
    for _ in range(chance.randint(1, 3)):
        content = chance.choice((_flipped, _overwritten, _cut, _longer, _without, _twice, _moved))(content, chance)
    return content


def forged(content: bytes, chance: random.Random) -> bytes:
    """Return a record file with another head, or another frame around the KV, but with right checksums."""
    return _other_head(content, chance) if chance.random() < 0.5 else _other_frame(content, chance)


def _other_head(content: bytes, chance: random.Random) -> bytes:
    head = msgspec.json.decode(head_of(content))
    for name in chance.sample(sorted(head), chance.randint(1, 2)):
        if chance.random() < 0.2:
            del head[name]
        else:
            head[name] = chance.choice(ODD)
    text = msgspec.json.encode(head)
    return resealed(content, mutated(text, chance) if chance.random() < 0.3 else text)


def _other_frame(content: bytes, chance: random.Random) -> bytes:
    """Change the state's header, its cells, or its length. The KV itself has no frame that could be checked."""
    head = msgspec.json.decode(head_of(content))
    body = START + len(head_of(content)) + 4 * head["tokens"]
    data = content[body:]
    frame = 16 + 12 * (head["tokens"] - head["start"]) + 8 + 12  # bytes before the KV
    if chance.random() < 0.3:
        data = _cut(data, chance) if chance.random() < 0.5 else _longer(data, chance)
    else:
        data = _overwritten(data[:frame], chance) + data[frame:]
    head |= {"data": digest(data).hex(), "size": len(data)}
    return resealed(content[:body] + data, msgspec.json.encode(head))


def _flipped(content: bytes, chance: random.Random) -> bytes:
    return _with(content, chance, lambda byte: byte ^ (1 << chance.randrange(8)))


def _overwritten(content: bytes, chance: random.Random) -> bytes:
    return _with(content, chance, lambda _: chance.choice(INTERESTING))


def _with(content, chance, change) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        if changed:
            at = chance.choice((chance.randrange(len(changed)), chance.randrange(min(len(changed), 200))))
            changed[at] = change(changed[at])
    return bytes(changed)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _longer(content: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.choice((1, 4, 12, 5000)))


def _without(content: bytes, chance: random.Random) -> bytes:
    start, stop = _range(content, chance)
    return content[:start] + content[stop:]


def _twice(content: bytes, chance: random.Random) -> bytes:
    start, stop = _range(content, chance)
    return content[:stop] + content[start:]


def _moved(content: bytes, chance: random.Random) -> bytes:
    start, stop = _range(content, chance)
    return content[:start] + content[stop:] + content[start:stop]


def _range(content: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content) + 1)
    return start, min(len(content), start + chance.choice((1, 4, 64, 4096)))
