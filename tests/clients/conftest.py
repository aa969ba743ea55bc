"""A real server for the clients of other APIs. `make client-test` installs them; without one, its tests are skipped.

The model is SmolLM2 where the folder SLOTCACHE_WEIGHTS has it (smollm2.gguf), else the embedded one.
"""

import os
import threading
from pathlib import Path

import pytest
from server.conftest import blocked, running, until
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models.demo import FILE
from support.encoders import bert

WEIGHTS = Path(os.environ.get("SLOTCACHE_WEIGHTS", ".")) / "smollm2.gguf"


@pytest.fixture(scope="session")
def served():
    with running(WEIGHTS if WEIGHTS.is_file() else FILE, ctx_size=4096, threads=2) as up:
        yield up


@pytest.fixture(scope="session")
def vectors(tmp_path_factory):
    """A server of a random model that turns texts into vectors."""
    with running(bert(tmp_path_factory.mktemp("models") / "bert.gguf"), embeddings=True) as up:
        yield up


@pytest.fixture
def full(tmp_path_factory):
    """A server whose one slot and one place in the queue are taken, by answers that wait until somebody is refused."""
    tiny = generate(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPES["tiny"])
    with running(tiny, parallel=1, max_queue=1) as up:
        asked = {"model": "any", "prompt": "Once", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
        threads = [threading.Thread(target=lambda: up.openai.completions.create(**asked)) for _ in range(2)]
        metrics = up.service.metrics
        count_unanswered = metrics.count_unanswered
        with blocked(up) as go:
            metrics.count_unanswered = lambda end: (go.set(), count_unanswered(end))
            for thread in threads:
                thread.start()
            until(lambda: len(up.service.open) == 2)
            yield up
        for thread in threads:
            thread.join()
