"""Random clients of a server with every tier, on models of each kind: `support/differential.py` says what is compared.

SLOTCACHE_REQUESTS=1000 sends so many to each kind, half of them one at a time; without it a few go to two of them. A life
with a wrong answer names its file: SLOTCACHE_REPLAY=FILE lives it again, and then without as many of its acts as it can do
without. FILE may also be the record of one server of a life: its prompts are then sent as ids, one after the other.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from slotcache.bench.random_models import SHAPES, generate
from support.architectures import delta, hybrid, mamba2, recurrent, windowed
from support.differential import Judge, Life, Reference, reference
from support.more_llama import LLAMA_FTYPE_ALL_F32, quantised
from support.on_device import needs_cpu
from support.random_clients import RAW, Act, Clients
from support.recorder import Record

REQUESTS = int(os.environ.get("SLOTCACHE_REQUESTS", "0"))
REPLAY = os.environ.get("SLOTCACHE_REPLAY", "")
WEIGHTS = Path(os.environ.get("SLOTCACHE_WEIGHTS", "."))
FEW, IN_A_LIFE = 10, 50  # requests

pytestmark = [needs_cpu, pytest.mark.timeout(900 + 20 * REQUESTS)]


def dense(path: Path, floats: bool = False) -> Path:
    return generate(path, replace(SHAPES["tiny"], quantisation="F32" if floats else "Q8_0"))


MADE: dict[str, Callable[..., Path]] = {
    "dense": dense,
    "windowed": windowed,
    "hybrid": hybrid,
    "delta": delta,
    "recurrent": recurrent,
    "mamba2": mamba2,
}
REAL = {"smollm2", "gemma"}  # files of SLOTCACHE_WEIGHTS
CAN_MOVE = {"dense", "smollm2"}
IN_SHORT = {("dense", False): 4395, ("delta", True): 2961}  # seeds of lives whose few acts are of most kinds
EXPECTED = {"ask", "stop", "kill", "drop", "none", "disk", "left in the prompt", "left in the answer"}
TOGETHER = {"left at once"}


@dataclass(frozen=True)
class Net:
    """What lives of a kind of model share. flags: of it and its numbers. seen: what came about in all of them."""

    folder: Path
    kind: str
    alone: bool
    flags: list[str]
    other: Reference
    seen: Counter[str]

    def life(self, name: str, seed: object, flags: Sequence[str]) -> Life:
        place = self.folder / name
        place.mkdir()
        about = {"kind": self.kind, "alone": self.alone, "seed": seed, "flags": flags}
        return Life(place, [*self.flags, *flags], Judge(self.other, self.alone, self.seen), about)


def model_of(kind: str, path: Path, floats: bool) -> Path:
    """Return a model of a kind. floats: with weights as float32, which round least; else as it is served."""
    if kind in MADE:
        return MADE[kind](path, floats=floats)
    if not (file := WEIGHTS / f"{kind}.gguf").is_file():
        pytest.skip(f"SLOTCACHE_WEIGHTS names no folder with {kind}.gguf")
    return quantised(file, path, LLAMA_FTYPE_ALL_F32) if floats else file


@contextmanager
def net(folder: Path, kind: str, alone: bool) -> Iterator[Net]:
    flags = ["-m", str(model_of(kind, folder / "model.gguf", floats=not alone))]
    flags += [] if alone else ["-ctk", "f32", "-ctv", "f32"]
    with reference(folder, flags) as other:
        yield Net(folder, kind, alone, flags, other, Counter())


def flags_of(rng: Random, alone: bool) -> list[str]:
    """Return the settings of a life: small tiers, so that KV moves between them."""
    chosen = {"-c": rng.choice([1024, 2048, 6000]), "-np": rng.randint(1, 3), "-b": rng.choice([64, 512])}
    if alone:
        chosen |= {"-cram": rng.choice([2, 64]), "--idle-prefill": "off"}
    else:
        chosen |= {"-cram": rng.choice([0, 1, 2, 64]), "--cache-disk": rng.choice([1, 64]), "--window": rng.choice([0, 8])}
        chosen |= {"--idle-sets": rng.choice([0, 0, 6]), "--draft": rng.choice(["off", "off", "lookup"])}
        chosen |= {"--idle-prefill": rng.choice(["on", "off"])}
    return [str(word) for pair in chosen.items() for word in pair]


@pytest.mark.skipif(bool(REPLAY), reason="a replay")
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "together"])
@pytest.mark.parametrize("kind", [*MADE, *sorted(REAL)])
def test_answers_are_those_of_a_server_without_a_cache(kind: str, alone: bool, tmp_path: Path) -> None:
    if not REQUESTS and (kind, alone) not in IN_SHORT:
        pytest.skip("SLOTCACHE_REQUESTS=1000 for all kinds")
    wrong: list[str] = []
    left, seed, worst = REQUESTS // 2 or FEW, 0 if REQUESTS else IN_SHORT[kind, alone], 0.0
    with net(tmp_path, kind, alone) as made:
        while left > 0:
            rng = Random(f"{kind} {alone} {seed}")
            clients = Clients(rng, alone=alone, can_move=kind in CAN_MOVE)
            with made.life(f"life {seed}", seed, flags_of(rng, alone)) as life:
                while life.num_requests < min(left, IN_A_LIFE) and not life.wrong:
                    clients.hear(life.do(clients.act()))
            wrong += life.wrong
            left, seed, worst = left - life.num_requests, seed + 1, max(worst, life.worst)
    print(f"{kind} {'alone' if alone else 'together'}: {dict(sorted(made.seen.items()))}, rounded by {worst:.2g} at most")
    assert not wrong, "\n".join(wrong)
    if REQUESTS >= 1000:
        reuse = {"own", "fork", "host"} if kind in ("dense", "windowed", *REAL) else {"snapshot"}
        assert {name for name in EXPECTED | reuse | (set() if alone else TOGETHER) if not made.seen[name]} == set()
    assert made.seen["answers"] > made.seen["none"] > 0 and made.seen["not compared"] < made.seen["answers"] / 5


def acts_of(file: Path) -> tuple[dict[str, Any], list[Act]]:
    """Return what a life was about, and its acts; of a server's record, its prompts as ids."""
    about, *lines = map(json.loads, (file.parent / "life.jsonl").read_text().splitlines())
    if file.name == "life.jsonl":
        return about, [line for line in lines if "do" in line]
    record = Record(file)
    record.read()
    fields = {"temperature": 0, "ignore_eos": True, "cache_prompt": True}
    bodies = [
        {"prompt": one.prompt, "cache_scope": one.scope, "n_predict": len(one.tokens), **fields}
        for one in record.requests.values()
        if one.answer and one.tokens and not one.is_moved
    ]
    return about, [{"do": "ask", "requests": [{"path": RAW, "body": body, "leave": None}]} for body in bodies]


@pytest.mark.skipif(not REPLAY, reason="SLOTCACHE_REPLAY=FILE")
@pytest.mark.timeout(0)
def test_a_life_again(tmp_path: Path) -> None:
    about, acts = acts_of(Path(REPLAY))
    with net(tmp_path, about["kind"], about["alone"]) as made:

        def wrong(some: list[Act]) -> list[str]:
            made.seen["lives"] += 1
            try:
                with made.life(f"life {made.seen['lives']}", about["seed"], about["flags"]) as life:
                    for act in some:
                        life.do(act)
            except AssertionError as error:
                return [str(error), *error.__notes__]
            return life.wrong

        found, size = wrong(acts), len(acts) // 2
        while found and size:
            for at in reversed(range(0, len(acts), size)):
                fewer = [*acts[:at], *acts[at + size :]]
                if again := wrong(fewer):
                    acts, found = fewer, again
            size //= 2
    assert not found, "\n".join(found)  # with the file of these acts
