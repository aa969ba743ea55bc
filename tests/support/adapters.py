"""Makes LoRA adapters with random weights, for models from `generate`."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from slotcache.bench.random_models import ModelShape

RANK = 4


def lora(path: Path, shape: ModelShape, seed: int) -> Path:
    """Write an adapter of the attention and feed-forward matrices, large enough to change most answers."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for name, rows, columns, _ in shape.matrices():
        if name.startswith("blk."):
            for part, size in (("lora_a", (RANK, columns)), ("lora_b", (rows, RANK))):
                values = rng.standard_normal(size, dtype=np.float32) / size[1] ** 0.5
                writer.add_tensor(f"{name}.{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
