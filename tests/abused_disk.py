"""How long requests wait for slow disks, beside computing: `python tests/abused_disk.py [MODEL]`.

Prompts are computed by a server, and asked again of one that has them on a disk with 50 ms a read, 1 MB/s, both, or none
that answers. The bar is 1.1 of the time to compute. Run it on an idle machine.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import conftest  # noqa: F401  # it makes the package importable
from server.conftest import running
from server.engine.test_fetching import written
from support.abused import abused

DISKS = {
    "whole": {},
    "50 ms a read": {"seconds": 0.05},
    "1 MB/s": {"bytes_per_second": 1e6},
    "both": {"seconds": 0.05, "bytes_per_second": 1e6},
    "standing still": {"is_still": True},
}
PROMPTS = [f"Question {number}: {' '.join(f'word{number * at % 97}' for at in range(240))}?" for number in range(9)]


def seconds(up, content):
    began = time.perf_counter()
    answer = up.chat(content, max_tokens=1)
    return time.perf_counter() - began, answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def main(model: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        usual = {"cache_dir": folder, "ctx_size": 4096, "parallel": 1, "cache_ram": 64}
        with running(model, **usual) as up:
            up.service.engine.fetches.least = 0.005
            first = [seconds(up, content) for content in PROMPTS]
            written(up)
        cold = median(took for took, _, _ in first[1:])
        print(f"computed: {1000 * cold:.0f} ms")
        for name, speed in DISKS.items():
            is_still = speed.pop("is_still", False)
            with pytest.MonkeyPatch.context() as patch, abused(patch, **speed) as tiers, running(model, **usual) as up:
                up.service.engine.fetches.least = 0.005
                seconds(up, "Who is it?" * 20)  # what a token takes is learnt
                if is_still:
                    tiers[0].gate.clear()
                again = [seconds(up, content) for content in PROMPTS]
                given_up = up.service.engine.fetches.num_given_up
                tiers[0].gate.set()
            same = [one[1] for one in again] == [one[1] for one in first]
            times, tokens = sorted(took for took, _, _ in again), sum(one[2] for one in again)
            ratios = f"median {median(times) / cold:.2f}, longest {times[-1] / cold:.2f} of computing"
            print(f"{name}: {ratios}; {tokens} tokens reused, {given_up} given up, texts {'the same' if same else 'DIFFER'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "/tmp/m/bench.gguf"))
