"""An exported network computes in llama.cpp the same as in training."""

from pathlib import Path

import numpy as np
import pytest
from slotcache.models.model import Model
from slotcache.models.training.encoder import Encoder
from support.lab import Lab

torch = pytest.importorskip("torch", reason="torch is not installed")


def test_the_exported_network_computes_the_same_in_llama_cpp(tmp_path: Path) -> None:
    from slotcache.models.training.export import export
    from slotcache.models.training.network import Network, NetworkShape

    torch.manual_seed(1)
    shape = NetworkShape(layers=2, width=64, heads=2, kv_heads=1, head_size=32, feed_forward=96)
    network, encoder = Network(shape), Encoder.load()
    weights = {name: weight.numpy() for name, weight in network.state_dict().items()}
    export(shape, weights, encoder, path := tmp_path / "model.gguf")
    tokens = encoder.encode("The river is Oskel. What is the river of Velmora?")
    with torch.no_grad():
        last = network.hidden(torch.tensor([tokens]), torch.float32)[-1:].expand(shape.vocabulary, -1)
        expected = -network.score(last, torch.arange(shape.vocabulary))[0].numpy()
    lab = Lab(Model(path))
    logits = lab.run(np.array(tokens, np.int32), limit=1, cache=False).logits[0].astype(np.float64)
    lab.close()
    assert np.abs(logits - np.log(np.exp(logits).sum()) - expected).max() < 0.1 * expected.std()
