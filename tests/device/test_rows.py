"""Without flash attention, the last tokens of a prompt are rounded as in a prefill of all of it, whatever computes them."""

from contextlib import closing

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.context import Context, ContextSettings
from slotcache.models.model import ALL_LAYERS, Model
from slotcache.models.runner import Runner
from slotcache.slots.plan import Span
from support.on_device import needs_device

pytestmark = needs_device
SETTINGS = ContextSettings(num_cells=512, batch=256, flash_attention="off", threads=1, num_sequences=4)


@pytest.mark.parametrize("layers", [ALL_LAYERS, 1, 0], ids=["all layers there", "half of them", "none"])
def test_a_prompt_after_its_cached_front_is_equal_to_the_bit(tiny, layers):
    """Fewer rows are another kernel's: those of a card, or of the CPU where the card takes large batches alone."""
    with closing(Model(tiny, layers)) as model, closing(Context(model, SETTINGS)) as context:
        runner, rows = Runner(context), context.costs.recompute_last
        assert rows == (9 if layers == ALL_LAYERS else 32)
        tokens = np.random.default_rng(0).integers(5, model.num_vocab - 5, 128).astype(np.int32)
        whole = computed(runner, tokens)
        for size in (rows, rows + 1, 2 * rows):
            runner.clear()
            computed(runner, tokens[:-size])
            assert np.array_equal(computed(runner, tokens[-size:], len(tokens) - size), whole), f"{size} rows"


def computed(runner, tokens, start=0):
    """Return the logits behind tokens of sequence 0."""
    runner.batch.fill((Span(1, 0, start, tokens, logits=True),))
    assert llama.llama_decode(runner.context.handle, runner.batch.struct) == 0
    return runner.logits(1)[0].copy()
