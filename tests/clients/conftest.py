"""A real server for the clients of other APIs. `make client-test` installs them; without one, its tests are skipped.

The model is SmolLM2 where the folder SLOTCACHE_WEIGHTS has it (smollm2.gguf), else the embedded one.
"""

import os
from pathlib import Path

import pytest
from server.conftest import running
from slotcache.models.demo import FILE

WEIGHTS = Path(os.environ.get("SLOTCACHE_WEIGHTS", ".")) / "smollm2.gguf"


@pytest.fixture(scope="session")
def served():
    with running(WEIGHTS if WEIGHTS.is_file() else FILE, ctx_size=4096, threads=2) as up:
        yield up
