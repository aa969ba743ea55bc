"""Models with a sliding window: KV behind the window can still be shared, cut and moved, and no result changes."""

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.errors import RunnerError
from slotcache.models.model import Model
from slotcache.models.runner import data_of
from slotcache.models.timing import DeviceTiming
from slotcache.slots.plan import Drop, HostCopy, Plan, Restore, Save, Span
from slotcache.slots.scope import Scope
from support.architectures import WINDOW, windowed
from support.lab import Lab
from support.on_device import NEAR, same_answers

LEAVES = Scope.shared("leaves")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(windowed(tmp_path_factory.mktemp("models") / "windowed.gguf"))
    yield model
    model.close()


def lab_of(model, **options):
    return Lab(model, num_cells=1024, batch=128, budget=64, sequences=64, **options)


@pytest.fixture
def prompt():
    return np.random.default_rng(1).integers(300, 900, 400).astype(np.int32)


def fresh(model, tokens, limit):
    lab = lab_of(model)
    answer = lab.run(tokens, limit=limit)
    lab.close()
    assert answer.job.reuse.cached == 0
    return answer


def close(answer, reference):
    """Within rounding; a cell that was overwritten would be far off."""
    assert same_answers(answer, reference, NEAR)


def test_the_model_has_a_window_and_can_be_cut(model):
    assert model.window == WINDOW and model.can_trim


def test_the_window_matters(model, prompt):
    """Else these tests could not fail: with the whole prompt in front the answer is another one."""
    one, other = prompt.copy(), prompt.copy()
    other[:50] += 1
    assert not np.array_equal(fresh(model, one, 1).logits[0], fresh(model, other, 1).logits[0])


def test_forks_far_beyond_the_window_are_exact(model, prompt):
    lab = lab_of(model)
    lab.run(prompt, limit=20)
    for cut in (320, 200, 96, 30):
        other = np.concatenate([prompt[:cut], prompt[50:90]])
        forked = lab.run(other, limit=3)
        assert forked.job.reuse.cached >= cut
        close(forked, fresh(model, other, 3))
    lab.close()


def test_what_the_window_has_passed_is_not_taken_for_new_tokens(model, prompt):
    lab = lab_of(model)
    lab.run(prompt[:100], limit=2, scope=LEAVES)
    lab.run(prompt[:300], limit=2)
    assert lab.scheduler.tree.drop(LEAVES) > 100
    # Its cells come first, and behind them stand those of the other prompt, which its window has passed.
    lab.run(prompt[300:] + 1, limit=100, scope=Scope.shared("comes"))
    for cut in (60, 30, 200):
        other = np.concatenate([prompt[:cut], prompt[350:390]])
        forked = lab.run(other, limit=3)
        assert forked.job.reuse.cached >= cut
        close(forked, fresh(model, other, 3))
    lab.close()


def test_requests_beside_each_other_in_a_full_pool(model, prompt):
    lab = lab_of(model)
    requests = [np.concatenate([prompt[:100], prompt[start : start + 150]]) for start in (120, 150, 180, 210)]
    answers = [lab.submit(tokens, limit=60, stops=[100]) for tokens in requests]
    lab.finish()
    for tokens, answer in zip(requests, answers, strict=True):
        close(answer, fresh(model, tokens, 60))
    lab.close()


def test_a_conversation_goes_on_in_place(model, prompt):
    lab = lab_of(model)
    first = lab.run(prompt[:150], limit=30)
    whole = np.concatenate([prompt[:150], first.tokens, prompt[200:260]])
    second = lab.run(whole, limit=5)
    assert second.job.reuse.source == "own" and second.job.reuse.cached == 179
    close(second, fresh(model, whole, 5))
    lab.close()


def compute(runner, sequence, tokens, afterwards=()):
    runner.run(Plan((), (Span(0, sequence, 0, tokens, logits=False),), afterwards))


def saved(runner, sequence, length):
    """Return a copy of a sequence's first tokens. It raises if one of them has lost its cell."""
    runner.apply(Save(sequence, copy := HostCopy(0, length)))
    return copy


def test_what_has_come_back_keeps_the_cells_that_its_window_has_passed(model, prompt):
    lab = lab_of(model)
    assert lab.runner.warm_up()
    compute(lab.runner, 0, prompt[:100])
    compute(lab.runner, 1, prompt[100:220])
    copy = saved(lab.runner, 1, 120)
    for operation in (Drop(1), Restore(copy, 2, 0, 120), Drop(0)):
        lab.runner.apply(operation)
    compute(lab.runner, 3, prompt[:128])  # more than the cells in front of those
    assert np.array_equal(data_of(saved(lab.runner, 2, 120)), data_of(copy))
    lab.close()


def test_what_comes_back_after_a_step_leaves_that_step_its_cells(model, prompt):
    lab = lab_of(model)
    assert lab.runner.warm_up()
    compute(lab.runner, 0, prompt[:60])
    copy = saved(lab.runner, 0, 60)
    compute(lab.runner, 1, prompt[100:220], (Drop(0), Restore(copy, 2, 0, 60), Restore(copy, 3, 0, 60)))
    whole = saved(lab.runner, 1, 120)
    assert lab.runner.states.accepts(data_of(whole), 0, 120)
    lab.close()


def test_a_cell_that_is_lost_is_not_saved_over(model, prompt):
    """Nothing is left of a copy that would lack a window's cell: a run comes back whole, or is computed."""
    lab = lab_of(model)
    assert lab.runner.warm_up()
    compute(lab.runner, 0, prompt[:100])
    llama.llama_memory_seq_rm(lab.context.memory, 0, 30, 31)
    copy = HostCopy(0, 100)
    with pytest.raises(RunnerError, match="saved KV has 99 cells for positions 0 to 100"):
        lab.runner.apply(Save(0, copy))
    assert copy.data is None
    lab.close()


def test_its_moves_are_timed(model):
    lab = lab_of(model)
    times = DeviceTiming(lab.context).run()
    assert times.idle and min(times.save, times.restore) > 0
    lab.close()
